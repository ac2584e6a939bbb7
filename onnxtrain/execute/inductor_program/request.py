"""A program as bytes that another process can compile; their hash names its artifact in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.capture.key.fingerprint import NotStorableError, versions
from onnxtrain.capture.stored.graph import to_bytes
from onnxtrain.errors import GraphError
from onnxtrain.execute.regions.request import GRAPH, METADATA, MIN_DYNAMIC_SIZE
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import ONNX
from onnxtrain.ops.bodies import IR_VERSION, import_opsets
from onnxtrain.ops.definition import OPSET
from onnxtrain.plan.cut import Part
from onnxtrain.system.machine import current_machine

_KEPT_METADATA = ("rng", "samples", "masks")  # of nodes: they choose the kernel


class ArgumentSpec(NamedTuple):
    """The properties of a tensor that a trace depends on: all but its elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> ArgumentSpec:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True)
class Symbol:
    """A size that differs between calls, and the argument that determines it.

    Attributes:
        name: of the symbol.
        argument: the index of a tensor, or, if `axis` is None, of a size.
        axis: of the tensor.
    """

    name: str
    argument: int
    axis: int | None

    def value(self, tensors: Sequence[torch.Tensor | ArgumentSpec], sizes_in: Sequence[int]) -> int:
        """Return the value in a call."""
        return sizes_in[self.argument] if self.axis is None else tensors[self.argument].shape[self.axis]


class Layout:
    """The sizes and strides of a program's arguments, as expressions of symbols.

    Attributes:
        symbols: the sizes that differ between calls.
        shapes: of the tensors.
        strides: of the tensors.
        sizes: the values of the arguments that are sizes.
    """

    def __init__(self, part: Part, tensors: Sequence[ArgumentSpec], sizes_in: Sequence[int]) -> None:
        """Name what differs between calls.

        Args:
            part: the program's part.
            tensors: its arguments in a typical call.
            sizes_in: its sizes in that call.
        """
        dims = [sizes.dims_of(value) for value in part.inputs]
        held = [_held_size(value) for value in part.sizes_in]
        sources: dict[str, Symbol] = {}
        for is_wanted in (str.isidentifier, lambda size: not sizes.symbols(size) <= sources.keys()):
            for index, shape in enumerate(dims):
                for axis, size in enumerate(shape):
                    if isinstance(size, str) and size not in sources and is_wanted(size):
                        sources[size] = Symbol(f"n{len(sources)}", index, axis)
            for index, size in enumerate(held):
                if isinstance(size, str) and size not in sources and is_wanted(size):
                    sources[size] = Symbol(f"n{len(sources)}", index, None)
        self.symbols = tuple(sources.values())
        named = {size: symbol.name for size, symbol in sources.items()}
        self.shapes = [tuple(_renamed(size, named) for size in shape) for shape in dims]
        self.sizes = [_renamed(size, named) for size in held]
        pairs = zip(self.shapes, tensors, strict=True)
        self.strides = [_symbolic_strides(shape, tensor) for shape, tensor in pairs]

    def values(self, tensors: Sequence[torch.Tensor | ArgumentSpec], sizes_in: Sequence[int]) -> list[int]:
        """Return the values of the symbols in a call."""
        return [symbol.value(tensors, sizes_in) for symbol in self.symbols]

    def strides_at(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the strides of the tensors for the values of the symbols."""
        symbol_values = {symbol.name: value for symbol, value in zip(self.symbols, values, strict=True)}
        return [tuple(sizes.evaluate(stride, symbol_values) for stride in strides) for strides in self.strides]


def _held_size(value: ir.Value) -> Size:
    """Return what is known of a size that is passed as an int: its expression, or a name of its own."""
    elements = value.meta.get("sizes")
    return elements[0] if elements and len(elements) == 1 else f"size_{value.name}".replace(".", "_")


def _renamed(size: Size, named: Mapping[str, str]) -> Size:
    """Return a size in terms of the symbols' names."""
    if isinstance(size, int):
        return size
    return (
        named[size] if size in named else sizes.substitute(size, {s: n for s, n in named.items() if s.isidentifier()})
    )


def _symbolic_strides(shape: Sizes, tensor: ArgumentSpec) -> Sizes:
    """Return strides that are those of the tensor at its sizes: each a multiple of the next smaller dimension's."""
    strides: dict[int, Size] = {}
    extent: Size = 1  # of the dimensions with smaller strides
    extent_now = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (tensor.stride[axis], -axis)):
        stride = tensor.stride[axis]
        if stride == 0 or stride % extent_now:
            strides[axis] = stride
            continue
        strides[axis] = sizes.multiply(stride // extent_now, extent)
        extent, extent_now = sizes.multiply(strides[axis], shape[axis]), stride * tensor.shape[axis]
    return tuple(strides[axis] for axis in range(len(shape)))


class ProgramRequest:
    """A program to compile.

    Attributes:
        graph: its ONNX file.
        metadata: JSON: how the program is called.
        key: names the artifact: a hash of everything that determines its code.
        layout: the sizes and strides of its arguments.
    """

    file_prefix, problem = "program", "a program is not compiled by Inductor; it runs PyTorch's operators"

    def __init__(
        self, part: Part, tensors: Sequence[ArgumentSpec], sizes_in: Sequence[int], device: torch.device
    ) -> None:
        """Serialize a part (`split.Split.computed`).

        Args:
            part: the nodes.
            tensors: the arguments of a typical call.
            sizes_in: its sizes.
            device: that it runs on.

        Raises:
            GraphError: the part contains a value that cannot be serialized.
        """
        self.layout = Layout(part, tensors, sizes_in)
        graph, names = _graph(part)
        try:
            self.graph, data = to_bytes(ir.Model(graph, ir_version=IR_VERSION))
        except NotStorableError as error:
            raise GraphError("the program cannot be written to a file", got=error) from error
        layout = self.layout
        described = {
            "kind": "program",
            "known": data,
            "threads": torch.get_num_threads(),
            "device": str(device),
            "symbols": [symbol.name for symbol in layout.symbols],
            "shapes": layout.shapes,
            "strides": layout.strides,
            "sizes": layout.sizes,
            "num_tensors": len(part.inputs),
            "host": sorted(names[v] for v in part.host if v in names),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors],
            "versions": " ".join(versions()),
            "on_host": [t.device != device for t in tensors],
        }
        typical = [max(value, MIN_DYNAMIC_SIZE) for value in layout.values(tensors, sizes_in)]
        self.metadata = json.dumps({**described, "typical": typical})
        # Without the typical values: the artifact supports others as well.
        del described["device"]
        determining = [described, current_machine().code_target, _device_kind(device)]
        self.key = hashlib.sha256(self.graph + b"\0" + json.dumps(determining).encode()).hexdigest()[:24]

    def write(self, folder: Path) -> None:
        folder.joinpath(GRAPH).write_bytes(self.graph)
        folder.joinpath(METADATA).write_text(self.metadata, encoding="utf-8")


def _device_kind(device: torch.device) -> tuple[str, ...]:
    """Return the kind of a device: its artifact runs on any device of this kind."""
    if device.type == "cpu":
        return ("cpu",)
    return (device.type, torch.cuda.get_device_name(device), f"{torch.version.cuda} {torch.version.hip}")


def _graph(part: Part) -> tuple[ir.Graph, dict[ir.Value, str]]:
    """Return the part's nodes as a graph, with names that do not depend on the model, and the names of its values."""
    inputs = (*part.inputs, *part.sizes_in)
    values = {value: traversal.clone_value(value) for value in inputs}
    read = dict.fromkeys(v for node in part.nodes for v in node.inputs)
    constants = [v for v in read if v is not None and v.const_value is not None]
    values |= {value: traversal.clone_value(value) for value in constants}
    graph = ir.Graph([values[v] for v in inputs], [], nodes=(), name="program", opset_imports={ONNX: OPSET})
    for node in part.nodes:
        copy = traversal.clone_node(node, values)
        copy.name = ""
        for key in copy.metadata_props.keys() - set(_KEPT_METADATA):
            del copy.metadata_props[key]
        graph.append(copy)
    numbered = [values[v] for v in (*inputs, *constants)] + [v for node in graph for v in node.outputs]
    for number, value in enumerate(numbered):
        value.name = f"v{number}"
        value.metadata_props.clear()
    for value in constants:
        graph.register_initializer(values[value])
    graph.outputs.extend(values[v] for v in part.outputs if v is not None)
    traversal.name_uniquely(graph)
    import_opsets(graph)
    return graph, {old: new.name for old, new in values.items() if new.name}
