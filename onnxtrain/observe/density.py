"""How many of a step's tokens are real, and how many of its labels count (ORTMODULE_PRINT_INPUT_DENSITY)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.export import Captured
from onnxtrain.capture.structure import flatten_call
from onnxtrain.execute.compiled import Compiled
from onnxtrain.graph.values import constant_of, dtype_of, is_float
from onnxtrain.observe.logs import rank
from onnxtrain.ops import definition_of, view


@dataclass(frozen=True)
class _Count:
    """What counts in tensor number `index` of a call: elements other than `empty`; `what` they are."""

    name: str
    index: int
    what: str
    empty: int


class DensityWatch:
    """Runs calls of a module, and prints the density of tokens and labels of each on rank 0.

    Labels that a cross entropy ignores do not count, nor do tokens of an embedding's padding_idx, nor zeros of an
    attention mask.

    Args:
        run: what runs a call: (args, kwargs) -> output.
        newest: gives the newest compiled unit. Raises RuntimeError where there is none.
        name: the module's.
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
        except RuntimeError:  # it runs in PyTorch: what its inputs are for is not known
            return output
        tensors, _ = flatten_call(args, kwargs)
        found = [self._density(count, tensors[count.index]) for count in _counts(captured)]
        if found and not rank():
            print(f"{self._name} step {step}: {', '.join(found)}", flush=True)  # noqa: T201  what the user asks for
        return output

    @staticmethod
    def _density(count: _Count, tensor: torch.Tensor) -> str:
        share = (tensor != count.empty).float().mean().item() if tensor.numel() else 0.0
        return f"{share:.1%} of {tensor.numel()} {count.what} in {count.name}"


def _counts(captured: Captured) -> Iterator[_Count]:
    """The inputs of a capture whose density is known to matter, each once."""
    graph = captured.model.graph
    places = {v: s.index for v, s in zip(graph.inputs, captured.sources, strict=True) if s.kind == "input"}
    seen = set[ir.Value]()
    for node in graph:
        for value, what, empty in _counted(node):
            for source in _sources(value):
                if source in places and source not in seen:
                    seen.add(source)
                    yield _Count(source.name or "", places[source], what, empty)


def _counted(node: ir.Node) -> Iterator[tuple[ir.Value, str, int]]:
    """Inputs of a node of which some elements are empty: asked of its definition by the names that it gives them."""
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
    """The integer or boolean inputs of the graph that a value is made of, where it is made of such alone."""
    waiting, seen, found = [value], {value}, list[ir.Value]()
    while waiting:
        at = waiting.pop()
        node = at.producer()
        if node is None:
            if at.const_value is None:
                found.append(at)
            continue
        definition = definition_of(node)
        for index, read in enumerate(node.inputs):
            if read is not None and read not in seen and definition.input_name(index) not in definition.shape_only:
                seen.add(read)
                waiting.append(read)
    if not any(is_float(dtype_of(v)) for v in found):
        yield from found
