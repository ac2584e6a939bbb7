"""Rebuild results of forward that are views of an input or buffer which forward mutates.

    x.neg_(); return x[1:]        the graph computes -x, which is written to x after the run; x[1:] is a view of x again

In eager the result shares x's memory: a later change of x, by the next block for example, changes the result too. The
view is rebuilt from its layout in the trace, as expressions over the sizes of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from onnxtrain.capture import source_location
from onnxtrain.capture.convert.symbolic_sizes import size_of
from onnxtrain.capture.node_storage import layout_of, storages_of
from onnxtrain.errors import CaptureError, KernelError
from onnxtrain.graph import sizes
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.torch_compat.tensors import is_contiguous_or_false


@dataclass(frozen=True)
class WrittenView:
    """A result that is a view of a graph input which forward mutates.

    Attributes:
        result: the index of the result.
        target: the index of the graph input.
        target_strides: the strides of the target for which `strides` and `offset` are valid; None if the result is the
            target itself.
        strides: the result's strides.
        offset: the result's offset from the target's first element, in elements of the target.
    """

    result: int
    target: int
    target_strides: Sizes | None = None
    strides: Sizes = ()
    offset: Size = 0

    def rebuild(self, result: torch.Tensor, target: torch.Tensor, bindings: Mapping[str, int]) -> torch.Tensor:
        """Make the result a view of `target`.

        Args:
            result: the tensor that the program computed, with the view's shape and dtype.
            target: the tensor that forward mutated.
            bindings: the values of the symbols in the sizes.

        Raises:
            KernelError: the target's strides are not those that it had at the capture.
        """
        if self.target_strides is None:
            return target
        expected = [sizes.evaluate(stride, bindings) for stride in self.target_strides]
        if any(a != b for a, b, size in zip(expected, target.stride(), target.shape, strict=True) if size > 1):
            raise KernelError(
                "the strides of a tensor that forward changes in place, and of which it returns a view, differ from "
                "those at the capture",
                expected=tuple(expected),
                got=target.stride(),
                todo="do not change the memory format of the module's buffers and inputs after the first call",
            )
        base = target if target.dtype == result.dtype else target.view(result.dtype)
        strides = [sizes.evaluate(stride, bindings) for stride in self.strides]
        return base.as_strided(result.shape, strides, target.storage_offset() + sizes.evaluate(self.offset, bindings))


def written_views(
    traced: ExportedProgram, functional: ExportedProgram, targets: Sequence[int], inputs: Sequence[ir.Value]
) -> Iterator[WrittenView]:
    """Find the results that share the memory of a tensor which forward mutates.

    Args:
        traced: the export, which has forward's in-place writes.
        functional: the same program functionalized, whose signature names the tensors that forward mutates.
        targets: the index of the graph input of each of these mutations, in their order.
        inputs: the graph's inputs.

    Raises:
        CaptureError: the layout of such a view cannot be computed from the sizes of the inputs.
    """
    symbols = frozenset[str]().union(*(sizes.symbols(size) for value in inputs for size in sizes.dims_of(value)))
    by_storage = {
        storage: (node, target)
        for node, target in zip(_mutated(traced, functional), targets, strict=True)
        for storage in storages_of(node)
    }
    results = [node for node in traced.graph.output_node().args[0] if _is_tensor(node)]
    for index, result in enumerate(results):
        shared = next((by_storage[storage] for storage in storages_of(result) if storage in by_storage), None)
        if shared is not None:
            yield _written_view(index, result, *shared, symbols)


def _mutated(traced: ExportedProgram, functional: ExportedProgram) -> Iterator[Node]:
    """Yield the placeholder in the trace of each tensor that forward mutates."""
    specs = traced.graph_signature.input_specs
    by_name = {node.name: node for node in traced.graph.find_nodes(op="placeholder")}
    by_target = {spec.target: by_name[spec.arg.name] for spec in specs if spec.target is not None}
    user_inputs = [by_name[spec.arg.name] for spec in specs if spec.kind == InputKind.USER_INPUT]
    names = [s.arg.name for s in functional.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    for spec in functional.graph_signature.output_specs:
        if spec.kind == OutputKind.USER_INPUT_MUTATION:
            yield user_inputs[names.index(str(spec.target))]
        elif spec.kind == OutputKind.BUFFER_MUTATION:
            yield by_target[spec.target]


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, Node) and isinstance(argument.meta.get("val"), torch.Tensor)


def _written_view(index: int, result: Node, node: Node, target: int, symbols: frozenset[str]) -> WrittenView:
    view, base = result.meta["val"], node.meta["val"]
    if layout_of(view) == layout_of(base) and view.dtype == base.dtype and _bits(view) == _bits(base):
        return WrittenView(index, target)
    strides = tuple(map(size_of, view.stride()))
    target_strides = tuple(map(size_of, base.stride()))
    offset = sizes.subtract(size_of(view.storage_offset()), size_of(base.storage_offset()))
    is_computable = all(sizes.symbols(size) <= symbols for size in (*strides, *target_strides, offset))
    has_same_elements = view.dtype.itemsize == base.dtype.itemsize and _bits(view) == _bits(base)
    if is_computable and has_same_elements and is_contiguous_or_false(base):
        return WrittenView(index, target, target_strides, strides, offset)
    raise CaptureError(
        "forward returns a view of a tensor that it changes in place, whose strides do not follow from its shape",
        where=source_location.of_trace(str(result.meta.get("stack_trace", ""))),
        expected=f"a contiguous tensor, and a view with elements of {base.dtype.itemsize} bytes",
        got=f"strides {base.stride()}, and a view of {view.dtype} with strides {view.stride()}",
        todo="the module runs in PyTorch; return a copy of the view: x[1:].clone()",
    )


def _bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return the conjugate bit and the negative bit."""
    return tensor.is_conj(), tensor.is_neg()
