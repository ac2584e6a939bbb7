"""Print the share of tokens that are not padding and of labels that are not ignored (ORTMODULE_PRINT_INPUT_DENSITY)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.capture import Captured
from onnxtrain.capture.structure import flatten_call
from onnxtrain.execute.compiled import Compiled
from onnxtrain.graph.values import constant_of, dtype_of, is_float
from onnxtrain.ops import definition_of, view
from onnxtrain.system.ranks import rank


@dataclass(frozen=True)
class _Measure:
    """A tensor of a call to measure.

    Attributes:
        name: of the graph input.
        index: of the tensor in the call.
        claim: what the share says, such as "tokens are real".
        empty: the element that does not count.
    """

    name: str
    index: int
    claim: str
    empty: int


class DensityWatch:
    """Run the calls of a module and print the density of tokens and labels of each on rank 0.

    Labels with a cross entropy's ignore_index do not count, nor do tokens with an embedding's padding_idx, nor zeros of
    an attention mask.

    Args:
        run: runs a call: (args, kwargs) -> output.
        newest: returns the newest compiled unit; raises RuntimeError if there is none.
        name: of the module.
    """

    def __init__(
        self,
        run: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
        newest: Callable[[], Compiled],
        name: str,
    ) -> None:
        self._run, self._newest, self._name = run, newest, name
        self._step = 0

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        step, self._step = self._step, self._step + 1
        output = self._run(args, kwargs)
        try:
            captured = self._newest().captured
        except RuntimeError:  # it runs in PyTorch: the roles of its inputs are unknown
            return output
        tensors, _ = flatten_call(args, kwargs)
        measured = densities(captured, tensors)
        if measured and not rank():
            print(f"{self._name} step {step}: {', '.join(measured)}", flush=True)  # noqa: T201  the variable asks for it
        return output


def densities(captured: Captured, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the density of each tensor of a call that may have elements that do not count, in words."""
    return [_density(measure, tensors[measure.index]) for measure in _measures(captured)]


def _density(measure: _Measure, tensor: torch.Tensor) -> str:
    share = (tensor != measure.empty).float().mean().item() if tensor.numel() else 0.0
    return f"{share:.1%} of {tensor.numel()} {measure.claim} in {measure.name}"


def _measures(captured: Captured) -> Iterator[_Measure]:
    """Yield the inputs of a capture with elements that do not count, each once."""
    graph = captured.model.graph
    index_of = {v: s.index for v, s in zip(graph.inputs, captured.sources, strict=True) if s.kind == "input"}
    visited = set[ir.Value]()
    for node in graph:
        for value, claim, empty in _values_with_empty_elements(node):
            for source in _sources(value):
                if source in index_of and source not in visited:
                    visited.add(source)
                    yield _Measure(source.name or "", index_of[source], claim, empty)


def _values_with_empty_elements(node: ir.Node) -> Iterator[tuple[ir.Value, str, int]]:
    """Return the inputs of a node that may have elements that do not count, by the input names of its definition."""
    definition = definition_of(node)
    n = view(node)
    names = {definition.input_name(i): v for i, v in enumerate(node.inputs) if v is not None}
    if "labels" in names:
        ignored = n.ignore_index if "ignore_index" in definition.attributes else constant_of(names.get("ignore_index"))
        if ignored is not None:
            yield names["labels"], "labels count", int(ignored)
    if definition.attributes.get("padding_idx") is not None and n.padding_idx >= 0:
        yield names["rows"], "tokens are real", n.padding_idx
    if "mask" in names:
        yield names["mask"], "tokens are seen", 0


def _sources(value: ir.Value) -> Iterator[ir.Value]:
    """The graph inputs that a value is computed from, if all of them are integers or booleans."""
    pending, visited, inputs = [value], {value}, list[ir.Value]()
    while pending:
        current = pending.pop()
        node = current.producer()
        if node is None:
            if current.const_value is None:
                inputs.append(current)
            continue
        definition = definition_of(node)
        for index, read in enumerate(node.inputs):
            if (
                read is not None
                and read not in visited
                and definition.input_name(index) not in definition.shape_only_inputs
            ):
                visited.add(read)
                pending.append(read)
    if not any(is_float(dtype_of(v)) for v in inputs):
        yield from inputs
