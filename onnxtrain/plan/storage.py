"""Find the storage of each value of a graph at given sizes: its bytes, and the value that it is a view of.

A definition says which input an output may be a view of; whether it is one depends on strides (a Reshape of a Transpose
is a copy). PyTorch's own operators decide it: they run on meta tensors, which have strides and no data. Outputs of
onnxtrain's kernels count as new contiguous memory.
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
from onnxtrain.ops.definition import DEVICE, Call, Kernel, Method
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.symbolic_ints import known_ints
from onnxtrain.plan.channels_last import ChannelsLast
from onnxtrain.torch_compat.operators import OpOverload, OpOverloadPacket
from onnxtrain.torch_compat.tensors import storage_id


def bind_symbols(inputs: Iterable[ir.Value], tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bind each symbol in the shapes of inputs to an integer, from these tensors.

    A symbol that is not a dimension by itself is solved from a dimension that depends on it alone, such as "2*n".
    """
    symbol_values: dict[str, int] = {}
    expressions: list[tuple[str, int]] = []
    for value, tensor in zip(inputs, tensors, strict=False):
        for axis, size in enumerate(sizes.dims_of(value)):
            if isinstance(size, str) and size.isidentifier():
                symbol_values[size] = tensor.size(axis)
            elif isinstance(size, str):
                expressions.append((size, tensor.size(axis)))
    for size, count in expressions:
        unbound = sizes.symbols(size) - symbol_values.keys()
        if len(unbound) == 1:
            (name,) = unbound
            at_0, at_1 = (sizes.evaluate(size, {**symbol_values, name: number}) for number in (0, 1))
            solution = (count - at_0) // (at_1 - at_0) if at_1 != at_0 else 0
            if sizes.evaluate(size, {**symbol_values, name: solution}) == count:
                symbol_values[name] = solution
    return symbol_values


class Storages:
    """The storage of a graph's values at given sizes.

    Attributes:
        device: "cpu" or "cuda".
        symbol_values: the integer of each symbol in the graph's shapes.
        host: the values that are Python ints.
    """

    def __init__(
        self,
        nodes: Iterable[ir.Node],
        symbol_values: Mapping[str, int],
        device: str,
        layout: ChannelsLast | None = None,
    ) -> None:
        """Find the storage of the outputs of `nodes`.

        Args:
            nodes: in execution order.
            symbol_values: the integer of each symbol; a data-dependent dimension counts at its upper bound.
            device: "cpu" or "cuda".
            layout: which values are channels_last.
        """
        nodes = tuple(nodes)
        self.device, self.symbol_values, self._layout = device, dict(symbol_values), layout
        self.host = frozenset(host_values(nodes, definition_of))
        self._kernels: dict[ir.Node, Kernel] = {}
        self._sources: dict[ir.Value, ir.Value] = {}
        self._bytes: dict[ir.Value, int] = {}
        self._workspace: dict[ir.Node, int] = {}
        self._tensors: dict[ir.Value, torch.Tensor] = {}
        with torch.no_grad():
            for node in nodes:
                if not self.host.issuperset(node.outputs):
                    self._find_storage(node, definition_of(node))
        self._tensors.clear()

    def bytes_of(self, value: ir.Value) -> int:
        """Return the bytes of a value's elements."""
        if value not in self._bytes:
            self._bytes[value] = int(self._count(value) * dtype_of(value).itemsize)
        return self._bytes[value]

    def source(self, value: ir.Value) -> ir.Value | None:
        """Return the input of its node that a value is a view of; None if the node allocates it."""
        return self._sources.get(value)

    def root(self, value: ir.Value) -> ir.Value:
        """Return the value whose allocation holds this one: itself if it is not a view."""
        while (source := self._sources.get(value)) is not None:
            value = source
        return value

    def kernel(self, node: ir.Node) -> Kernel:
        """Return the kernel that runs a node, unless measured speed selects another."""
        if node not in self._kernels:
            self._kernels[node] = definition_of(node).kernel(node, self.device)
        return self._kernels[node]

    def workspace(self, node: ir.Node) -> int:
        """Return the bytes that a node's kernel allocates beside its outputs.

        They include copies of inputs in another memory format, except a copy that an output is a view of.
        """
        if node not in self._workspace:
            definition = definition_of(node)
            size = self.kernel(node).workspace_bytes(definition.view(node))
            viewed = {view_source(node, index, definition) for index in range(len(node.outputs))}
            copies = sum(self.bytes_of(v) for v in self._copied(node) if v not in viewed)
            self._workspace[node] = self.number(size) + copies
        return self._workspace[node]

    def copied_result(self, value: ir.Value) -> bool:
        """Return whether a result leaves the program as a contiguous copy."""
        return self._layout is not None and self._layout.is_made_contiguous(value)

    def _copied(self, node: ir.Node) -> Collection[ir.Value]:
        """Return the inputs that a node copies before reading them."""
        if self._layout is None or self.host.issuperset(node.outputs):
            return ()
        return self._layout.converted_inputs(node)

    def number(self, size: sizes.Size) -> int:
        """Return the integer of a size."""
        return sizes.evaluate(size, self.symbol_values)

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        return tuple(map(self.number, sizes.dims_of(value)))

    def _count(self, value: ir.Value) -> int:
        count = 1
        for size in self.shape(value):
            count *= size
        return count

    # Views

    def _find_storage(self, node: ir.Node, definition: OpDef) -> None:
        self._bind_data_dependent(node)
        results = self._run(node, definition)
        copied = self._copied(node)
        for index, value in enumerate(node.outputs):
            tensor = results[index] if index < len(results) else None
            if not isinstance(tensor, torch.Tensor):
                self._from_definition(node, index, value, definition, copied)
                continue
            self._tensors[value] = tensor
            for read in node.inputs:
                if (
                    read in self._tensors
                    and read not in copied
                    and storage_id(self._tensors[read]) == storage_id(tensor)
                ):
                    self._sources[value] = read

    def _bind_data_dependent(self, node: ir.Node) -> None:
        """Bind data-dependent dimensions to their upper bound: the number of elements of the largest input."""
        for value in node.outputs:
            for size in sizes.dims_of(value):
                for name in sizes.symbols(size) - self.symbol_values.keys():
                    self.symbol_values[name] = max((self._count(v) for v in node.inputs if v is not None), default=0)

    def _from_definition(
        self, node: ir.Node, index: int, value: ir.Value, definition: OpDef, copied: Collection[ir.Value]
    ) -> None:
        """Treat an output of onnxtrain's kernel as a view if the definition says so, else as an allocation."""
        source = view_source(node, index, definition)
        if source is not None and source not in copied and self._count(source) == self._count(value):
            self._sources[value] = source

    def _run(self, node: ir.Node, definition: OpDef) -> tuple[Any, ...]:
        """Run the node on meta tensors; () if its kernel cannot run on them."""
        if definition.effects & (Effects.PYTHON | Effects.HOST_SYNC):
            return ()
        kernel = self.kernel(node)
        arguments = self._arguments(node, definition, kernel)
        if arguments is None:
            return ()
        call = kernel.lower(definition.view(node), *arguments)
        if not _calls_torch_only(call):
            return ()
        try:
            result = _on_meta(call)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return ()  # the operator has no meta kernel
        return result if isinstance(result, tuple) else (result,)

    def _arguments(self, node: ir.Node, definition: OpDef, kernel: Kernel) -> list[Any] | None:
        arguments = []
        for index, value in enumerate(node.inputs):
            argument = self._argument(value, kernel, index)
            if argument is None and value is not None:
                return None
            arguments.append(argument)
        declared = definition.inputs
        if declared and declared[-1].endswith("..."):
            fixed = len(declared) - 1
            return [*arguments[:fixed], tuple(arguments[fixed:])]
        return arguments + [None] * (len(declared) - len(arguments))

    def _argument(self, value: ir.Value | None, kernel: Kernel, index: int) -> Any:
        if value is None:
            return None
        if index in kernel.host_inputs or value in self.host:
            dims = known_ints(value)
            if dims is None:
                return None
            integers = tuple(map(self.number, dims))
            return integers if rank_of(value) else integers[0]
        if value not in self._tensors:
            self._tensors[value] = torch.empty(self.shape(value), dtype=TORCH_DTYPES[dtype_of(value)], device="meta")
        return self._tensors[value]


_BUILTIN = (types.BuiltinFunctionType, OpOverload, OpOverloadPacket)


def _calls_torch_only(call: Call) -> bool:
    """Return whether a call and the calls in its arguments are to PyTorch's own functions."""
    is_torch = isinstance(call, Method) or isinstance(call.function, _BUILTIN)
    return is_torch and all(_calls_torch_only(a) for a in call.args if isinstance(a, Call))


def _on_meta(argument: Any) -> Any:
    if argument is DEVICE:
        return torch.device("meta")
    if not isinstance(argument, Call):
        return argument
    return argument.function(
        *map(_on_meta, argument.args), **{name: _on_meta(value) for name, value in argument.kwargs.items()}
    )
