"""Blocks, from which training graphs are built by hand, as with onnxruntime-training's onnxblock.

    with base(model):                      blocks extend this graph
        block = MyTraining()               a TrainingBlock; its build calls other blocks on value names
        block.requires_grad("fc.weight")
        block("output")
        train, evaluate = block.to_model_proto()

A block appends ONNX nodes to `self.base`, an onnx.ModelProto, and refers to values by name. Large tensors are stored
beside the proto and never copied.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.device.custom_ops import declare_types
from onnxtrain.device.from_onnx import convert, prepare
from onnxtrain.device.light_model import Tensors, hold_out, put_back, with_data, without_stubs
from onnxtrain.device.stock import for_stock
from onnxtrain.errors import ArtifactError
from onnxtrain.graph import sizes
from onnxtrain.graph.values import OWN, dtype_of

OPSET = 21  # of new graphs


@dataclass
class Base:
    """The graph that blocks extend.

    Attributes:
        model: without the data of large tensors.
        tensors: that data, by name.
        buffers: initializers that training updates, except parameters and those of BatchNormalization.
        updates: for buffers that this graph updates, the name of the new value.
        checked: how many of its nodes have been validated.
    """

    model: onnx.ModelProto
    tensors: Tensors
    buffers: Sequence[str] = ()
    updates: Mapping[str, str] = field(default_factory=dict)
    checked: int = 0

    def new_name(self, stem: str) -> str:
        """Return a name that no value or node of the graph has: `stem`, with a number if needed."""
        graph = self.model.graph
        used_names = {v.name for v in (*graph.input, *graph.output, *graph.initializer, *graph.node)}
        used_names.update(output for node in graph.node for output in node.output)
        names = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in used_names)

    def append(self, op_type: str, inputs: Sequence[str], stem: str = "", domain: str = "", **attributes: Any) -> str:
        """Append a node with one output and return the output's name."""
        name = self.new_name(stem or op_type.lower())
        node = onnx.helper.make_node(op_type, list(inputs), [name], name=name, domain=domain, **attributes)
        self.model.graph.node.append(node)
        if domain and domain not in {o.domain for o in self.model.opset_import}:
            self.model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
        return name

    def constant(self, array: Any, stem: str = "constant") -> str:
        """Add an initializer and return its name."""
        name = self.new_name(stem)
        self.model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def add_input(self, name: str, elem_type: int, shape: Sequence[Any]) -> str:
        """Add an input to the graph unless one of this name exists."""
        if name not in {v.name for v in self.model.graph.input}:
            self.model.graph.input.append(onnx.helper.make_tensor_value_info(name, elem_type, list(shape)))
        return name

    def type_of(self, name: str) -> tuple[int, list[int | str]]:
        """Return the element type and shape of a value; unnamed dimensions get names.

        Raises:
            ArtifactError: the type cannot be inferred.
        """
        graph = self.model.graph
        for value in (*graph.input, *graph.output, *graph.value_info, *self._inferred()):
            if value.name == name and value.type.HasField("tensor_type") and value.type.tensor_type.HasField("shape"):
                tensor = value.type.tensor_type
                shape = [_size(dim, f"{name}_size_{axis}") for axis, dim in enumerate(tensor.shape.dim)]
                return tensor.elem_type, shape
        for tensor in graph.initializer:
            if tensor.name == name:
                return tensor.data_type, list(tensor.dims)
        return self._converted(name)

    def is_sequence(self, name: str) -> bool:
        """Return whether a value is declared to be a sequence of tensors."""
        graph = self.model.graph
        values = (*graph.input, *graph.output, *graph.value_info)
        return any(value.name == name and value.type.HasField("sequence_type") for value in values)

    def with_data(self) -> ir.Model:
        """Return the model with all tensor data, and with the types of custom ops if a library is set."""
        model = put_back(self.model, self.tensors)
        library = _library.get()
        if library is not None:
            declare_types(model, library)
        return model

    def _converted(self, name: str) -> tuple[int, list[int | str]]:
        """Infer the type by onnxtrain's shape inference, which follows more dimensions than ONNX's."""
        try:
            converted = convert(prepare(self.with_data()), [name], (), {}, training=False)
        except ArtifactError as error:
            problem = f"The type of {name!r} cannot be inferred."
            raise ArtifactError(problem, error.where, got=str(error), todo="declare its type and shape") from error
        value = converted.graph.outputs[0]
        return int(dtype_of(value)), list(sizes.dims_of(value))

    def _inferred(self) -> Iterator[onnx.ValueInfoProto]:
        inferred = onnx.shape_inference.infer_shapes(without_stubs(self.model)).graph
        yield from (*inferred.value_info, *inferred.output)


def _size(dim: Any, name: str) -> int | str:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or name


_base: ContextVar[Base | None] = ContextVar("onnxtrain_block_base", default=None)
_library: ContextVar[Path | None] = ContextVar("onnxtrain_custom_op_library", default=None)


def current_base() -> Base:
    """Return the graph that blocks extend. Raises ArtifactError outside of `base` and `empty_base`."""
    current = _base.get()
    if current is None:
        expected = "a call inside `with onnxblock.base(model):`"
        raise ArtifactError("A block was called without a model to extend.", expected=expected)
    return current


@contextlib.contextmanager
def extending(base: Base) -> Iterator[Base]:
    """Make blocks extend this graph."""
    if _base.get() is not None:
        raise ArtifactError("A base is already set.", todo="leave the first `with base(...)` before the next")
    token = _base.set(base)
    try:
        yield base
    finally:
        _base.reset(token)


@contextlib.contextmanager
def base(model: onnx.ModelProto | ir.Model | str | os.PathLike[str], model_path: str | None = None) -> Iterator[Any]:
    """Make blocks extend a copy of `model`, which the context manager returns.

    Args:
        model: a model or its path.
        model_path: the file that `model` was read from; needed for external data.

    Raises:
        ArtifactError: another base is active.
    """
    with extending(Base(*hold_out(model, model_path))) as extended:
        yield extended.model


@contextlib.contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[Any]:
    """Make blocks build a new graph.

    Args:
        opset_version: of ai.onnx.

    Raises:
        ArtifactError: another base is active.
    """
    opsets = [onnx.helper.make_opsetid("", opset_version or OPSET)]
    graph = onnx.helper.make_graph([], "model", [], [])
    with extending(Base(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), {})) as extended:
        yield extended.model


@contextlib.contextmanager
def custom_op_library(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Allow the custom ops of a shared library in graphs.

    Raises:
        ArtifactError: the file does not exist, or a library is already set.
    """
    if _library.get() is not None:
        raise ArtifactError("A library of custom ops is already set.", got=str(_library.get()))
    library = Path(path)
    if not library.is_file():
        raise ArtifactError("The library of custom ops does not exist.", str(library), todo="pass the path of the file")
    token = _library.set(library)
    try:
        yield library
    finally:
        _library.reset(token)


class Block(ABC):
    """A part of a graph. A subclass appends nodes in `build`.

    Attributes:
        base: the model to extend, while `build` runs.
    """

    def __init__(self) -> None:
        self.base: Any = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Append nodes to `self.base` and return the names of their outputs."""

    def __call__(self, *names: Any, **options: Any) -> Any:
        """Run `build` on the current base and validate the graph.

        Raises:
            ArtifactError: no base is active, or the graph is not valid ONNX afterwards.
        """
        current = current_base()
        self.base = current.model
        result = self.build(*names, **options)
        _check(current, type(self).__name__)
        return result


def _check(base: Base, block: str) -> None:
    graph = base.model.graph
    available = {v.name for v in (*graph.input, *graph.initializer)}
    context = onnx.checker.C.CheckerContext()
    context.ir_version = base.model.ir_version
    context.opset_imports = {o.domain: o.version for o in base.model.opset_import}
    for position, node in enumerate(graph.node):
        missing = [name for name in node.input if name and name not in available]
        if missing:
            raise ArtifactError(
                f"{block} reads {missing[0]!r}, which no node or input of the graph provides.", where=node.name
            )
        available.update(node.output)
        try:
            flat = not any(a.HasField("g") or a.graphs for a in node.attribute)  # subgraphs read outer values
            if position >= base.checked and node.domain in ("", "ai.onnx") and flat:
                onnx.checker.check_node(node, context)
        except onnx.checker.ValidationError as error:
            raise ArtifactError(
                f"{block} appended a node that is not valid ONNX.", node.name, got=str(error)
            ) from error
    base.checked = len(graph.node)


class ForwardBlock(Block):
    """A graph without gradients: an optimizer or a forward model."""

    def __init__(self) -> None:
        super().__init__()
        self._extended: Base | None = None

    def __call__(self, *names: Any, **options: Any) -> Any:
        """Run `Block.__call__`; the values that `build` returns become the graph's outputs."""
        result = super().__call__(*names, **options)
        set_outputs(self.base, names_of(result))
        self._extended = current_base()
        return result

    def to_model_proto(self) -> onnx.ModelProto:
        """Return the model, with the functions of onnxtrain's ops in it: it runs on any stock onnxruntime.

        Raises:
            ArtifactError: the block was not called yet.
        """
        if self._extended is None:
            raise ArtifactError("The block has no model, because it was not called yet.", todo="call the block first")
        model = self._extended.with_data()
        if any(node.domain == OWN for node in model.graph) and not model.functions:
            outputs = [str(value.name) for value in model.graph.outputs]
            model = for_stock(convert(prepare(model), outputs, (), {}, training=False), portable=False)
        return ir.to_proto(model)


def names_of(result: Any) -> list[str]:
    """Return the result of `build` as a list of names."""
    return [result] if isinstance(result, str) else [str(name) for name in result]


def set_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Make these values the graph's outputs. Unknown types are inferred later."""
    graph = model.graph
    infos = {v.name: v for v in (*graph.output, *graph.value_info, *graph.input)}
    outputs = [infos.get(name) or onnx.ValueInfoProto(name=name) for name in names]
    missing = set(names) - {v.name for v in graph.input} - {o for node in graph.node for o in node.output}
    if missing:
        raise ArtifactError("The graph has no such values.", got=", ".join(sorted(missing)))
    copies = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in outputs]
    del graph.output[:]
    graph.output.extend(copies)


def parameters_of(base: Base, names: Sequence[str]) -> list[onnx.TensorProto]:
    """Return initializers with these names, with their data."""
    stubs = {t.name: t for t in base.model.graph.initializer}
    return [with_data(stubs[name], base.tensors.get(name)) for name in names]
