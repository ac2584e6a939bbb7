"""Where each value of a graph lies at known sizes: which bytes it needs, and of what it is a view.

A definition says what an output may be a view of; whether it is one depends on strides (a Reshape of a Transpose is a
copy). So PyTorch is asked: its own operators run on meta tensors, which have strides and no elements. What only our
kernels compute is taken to be new, contiguous memory.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.alias import view_source
from onnxtrain.graph.host import host_values
from onnxtrain.graph.values import dtype_of, rank_of
from onnxtrain.ops import Effects, OpDef, definition_of
from onnxtrain.ops.constructors import TORCH_DTYPES
from onnxtrain.ops.definition import DEVICE, Call, Kernel, Method
from onnxtrain.ops.symbolic import held_sizes
from onnxtrain.plan.channels_last import ChannelsLast


def bind_symbols(inputs: Iterable[ir.Value], tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """The integer of each symbol in the sizes of inputs, for these tensors.

    A symbol that is no size by itself is found from a size that grows with it alone, such as "2*n".
    """
    known: dict[str, int] = {}
    others: list[tuple[str, int]] = []
    for value, tensor in zip(inputs, tensors, strict=False):
        for axis, size in enumerate(sizes.dims_of(value)):
            if isinstance(size, str) and size.isidentifier():
                known[size] = tensor.size(axis)
            elif isinstance(size, str):
                others.append((size, tensor.size(axis)))
    for size, count in others:
        unknown = sizes.symbols(size) - known.keys()
        if len(unknown) == 1:
            (name,) = unknown
            at_0, at_1 = (sizes.evaluate(size, {**known, name: number}) for number in (0, 1))
            found = (count - at_0) // (at_1 - at_0) if at_1 != at_0 else 0
            if sizes.evaluate(size, {**known, name: found}) == count:
                known[name] = found
    return known


class Storages:
    """The memory of a graph's values at known sizes.

    Attributes:
        device: "cpu" or "cuda".
        known: the integer of each symbol in the graph's sizes.
        host: the values that are Python ints.
    """

    def __init__(
        self, nodes: Iterable[ir.Node], known: Mapping[str, int], device: str, layout: ChannelsLast | None = None
    ) -> None:
        """Places the outputs of `nodes`, which stand in the order of execution.

        A size that depends on data counts as the most that it can be. `layout` says what lies channels-last.
        """
        nodes = tuple(nodes)
        self.device, self.known, self._layout = device, dict(known), layout
        self.host = frozenset(host_values(nodes, definition_of))
        self._kernels: dict[ir.Node, Kernel] = {}
        self._sources: dict[ir.Value, ir.Value] = {}
        self._bytes: dict[ir.Value, int] = {}
        self._workspace: dict[ir.Node, int] = {}
        self._tensors: dict[ir.Value, torch.Tensor] = {}
        with torch.no_grad():
            for node in nodes:
                if not self.host.issuperset(node.outputs):
                    self._place(node, definition_of(node))
        self._tensors.clear()

    def bytes_of(self, value: ir.Value) -> int:
        """The bytes that a value's elements take."""
        if value not in self._bytes:
            self._bytes[value] = int(self._count(value) * dtype_of(value).itemsize)
        return self._bytes[value]

    def source(self, value: ir.Value) -> ir.Value | None:
        """The input of its node that a value is a view of; None where its memory is new."""
        return self._sources.get(value)

    def root(self, value: ir.Value) -> ir.Value:
        """The value in whose memory this one lies: itself where it is no view."""
        while (source := self._sources.get(value)) is not None:
            value = source
        return value

    def kernel(self, node: ir.Node) -> Kernel:
        """What runs a node, where speed does not decide otherwise."""
        if node not in self._kernels:
            self._kernels[node] = definition_of(node).kernel(node, self.device)
        return self._kernels[node]

    def workspace(self, node: ir.Node) -> int:
        """The bytes of scratch memory that a node's kernel takes beside its inputs and outputs.

        Copies of inputs in another order of memory are among them, but not one that an output is a view of.
        """
        if node not in self._workspace:
            definition = definition_of(node)
            size = self.kernel(node).workspace(definition.view(node))
            viewed = {view_source(node, index, definition) for index in range(len(node.outputs))}
            copies = sum(self.bytes_of(v) for v in self._copied(node) if v not in viewed)
            self._workspace[node] = self.number(size) + copies
        return self._workspace[node]

    def copied_result(self, value: ir.Value) -> bool:
        """Whether a result leaves the program as a copy, in the usual order of memory."""
        return self._layout is not None and self._layout.may_be_channels_last(value)

    def _copied(self, node: ir.Node) -> Collection[ir.Value]:
        """The inputs that a node reads as copies."""
        if self._layout is None or self.host.issuperset(node.outputs):
            return ()
        return self._layout.converted_inputs(node)

    def number(self, size: sizes.Size) -> int:
        """The integer that a size is here."""
        return sizes.evaluate(size, self.known)

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        return tuple(map(self.number, sizes.dims_of(value)))

    def _count(self, value: ir.Value) -> int:
        count = 1
        for size in self.shape(value):
            count *= size
        return count

    # Placing

    def _place(self, node: ir.Node, definition: OpDef) -> None:
        self._bound(node)
        results = self._run(node, definition)
        forms, copied = self.kernel(node).output_bytes(definition.view(node)), self._copied(node)
        for index, value in enumerate(node.outputs):
            tensor = results[index] if index < len(results) else None
            name = definition.output_name(index)
            if name in forms:
                self._bytes[value] = self.number(forms[name])
            if not isinstance(tensor, torch.Tensor):
                self._guess(node, index, value, definition, copied)
                continue
            self._tensors[value] = tensor
            for read in node.inputs:
                if read in self._tensors and read not in copied and _share(self._tensors[read], tensor):
                    self._sources[value] = read

    def _bound(self, node: ir.Node) -> None:
        """A size that only the data decides is at most the number of elements that it is found in."""
        for value in node.outputs:
            for size in sizes.dims_of(value):
                for name in sizes.symbols(size) - self.known.keys():
                    self.known[name] = max((self._count(v) for v in node.inputs if v is not None), default=0)

    def _guess(
        self, node: ir.Node, index: int, value: ir.Value, definition: OpDef, copied: Collection[ir.Value]
    ) -> None:
        """What a kernel of ours gives: a view where the definition says so, else new memory."""
        source = view_source(node, index, definition)
        if source is not None and source not in copied and self._count(source) == self._count(value):
            self._sources[value] = source

    def _run(self, node: ir.Node, definition: OpDef) -> tuple[Any, ...]:
        """The node's outputs on meta tensors; () where its kernel must not see them."""
        if definition.effects & (Effects.PYTHON | Effects.COLLECTIVE | Effects.HOST_SYNC):
            return ()
        kernel = self.kernel(node)
        arguments = self._arguments(node, definition, kernel)
        if arguments is None:
            return ()
        call = kernel.lower(definition.view(node), *arguments)
        if not _is_torch(call):
            return ()
        try:
            result = _on_meta(call)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return ()  # no such kernel for meta tensors
        return result if isinstance(result, tuple) else (result,)

    def _arguments(self, node: ir.Node, definition: OpDef, kernel: Kernel) -> list[Any] | None:
        found = []
        for index, value in enumerate(node.inputs):
            argument = self._argument(value, kernel, index)
            if argument is None and value is not None:
                return None
            found.append(argument)
        declared = definition.inputs
        if declared and declared[-1].endswith("..."):
            fixed = len(declared) - 1
            return [*found[:fixed], tuple(found[fixed:])]
        return found + [None] * (len(declared) - len(found))

    def _argument(self, value: ir.Value | None, kernel: Kernel, index: int) -> Any:
        if value is None:
            return None
        if index in kernel.host or value in self.host:
            held = held_sizes(value)
            if held is None:
                return None
            numbers = tuple(map(self.number, held))
            return numbers if rank_of(value) else numbers[0]
        if value not in self._tensors:
            self._tensors[value] = torch.empty(self.shape(value), dtype=TORCH_DTYPES[dtype_of(value)], device="meta")
        return self._tensors[value]


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


_BUILTIN = (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _is_torch(call: Call) -> bool:
    """Whether a call, with those in its arguments, is of PyTorch's own functions."""
    own = isinstance(call, Method) or isinstance(call.function, _BUILTIN)
    return own and all(_is_torch(a) for a in call.args if isinstance(a, Call))


def _on_meta(argument: Any) -> Any:
    if argument is DEVICE:
        return torch.device("meta")
    if not isinstance(argument, Call):
        return argument
    return argument.function(
        *map(_on_meta, argument.args), **{name: _on_meta(value) for name, value in argument.kwargs.items()}
    )
