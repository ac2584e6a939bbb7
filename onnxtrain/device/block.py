"""Blocks: the way to build training graphs by hand, as onnxruntime-training's onnxblock had it.

    with base(model):                      the graph that blocks extend
        block = MyTraining()               a TrainingBlock; its build calls other blocks on names of values
        block.requires_grad("fc.weight")
        block("output")
        train, evaluate = block.to_model_proto()

A block appends ONNX nodes to `self.base`, an onnx.ModelProto. It works on names; large tensors are held beside it and
never copied.
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
from onnxtrain.device.light_model import Tensors, hold_out, put_back, whole, without_stubs
from onnxtrain.errors import ArtifactError
from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of

OPSET = 21  # of graphs that start empty


@dataclass
class Base:
    """The graph that blocks extend now.

    Attributes:
        model: without the elements of large tensors.
        tensors: those elements, by name.
        buffers: initializers that training changes besides parameters, beside those of BatchNormalization.
        updates: for those of them that this graph changes, the name of the value that it gives them.
        checked: how many of its nodes have been checked.
    """

    model: onnx.ModelProto
    tensors: Tensors
    buffers: Sequence[str] = ()
    updates: Mapping[str, str] = field(default_factory=dict)
    checked: int = 0

    def new_name(self, stem: str) -> str:
        """`stem`, or with a number where a value or node of the graph has that name."""
        graph = self.model.graph
        taken = {v.name for v in (*graph.input, *graph.output, *graph.initializer, *graph.node)}
        taken.update(output for node in graph.node for output in node.output)
        names = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)

    def append(self, op_type: str, inputs: Sequence[str], stem: str = "", domain: str = "", **attributes: Any) -> str:
        """Appends a node with one output, and returns the output's name."""
        name = self.new_name(stem or op_type.lower())
        node = onnx.helper.make_node(op_type, list(inputs), [name], name=name, domain=domain, **attributes)
        self.model.graph.node.append(node)
        if domain and domain not in {o.domain for o in self.model.opset_import}:
            self.model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
        return name

    def constant(self, array: Any, stem: str = "constant") -> str:
        """Adds an initializer, and returns its name."""
        name = self.new_name(stem)
        self.model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def add_input(self, name: str, elem_type: int, shape: Sequence[Any]) -> str:
        """Adds an input of the graph, unless there is one of this name."""
        if name not in {v.name for v in self.model.graph.input}:
            self.model.graph.input.append(onnx.helper.make_tensor_value_info(name, elem_type, list(shape)))
        return name

    def type_of(self, name: str) -> tuple[int, list[int | str]]:
        """Element type and shape of a value; a size that has no name gets one.

        Raises:
            ArtifactError: nothing is known of it.
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

    def whole(self) -> ir.Model:
        """The model with its tensors, and with the types of custom ops where there is a library of them."""
        model = put_back(self.model, self.tensors)
        library = _library.get()
        if library is not None:
            declare_types(model, library)
        return model

    def _converted(self, name: str) -> tuple[int, list[int | str]]:
        """The type by our own shape rules, which follow sizes further than ONNX's."""
        try:
            found = convert(prepare(self.whole()), [name], (), {}, training=False)
        except ArtifactError as error:
            what = f"Nothing is known of the type of {name!r}."
            raise ArtifactError(what, error.where, got=str(error), todo="declare its type and shape") from error
        value = found.graph.outputs[0]
        return int(dtype_of(value)), list(sizes.dims_of(value))

    def _inferred(self) -> Iterator[onnx.ValueInfoProto]:
        known = onnx.shape_inference.infer_shapes(without_stubs(self.model)).graph
        yield from (*known.value_info, *known.output)


def _size(dim: Any, name: str) -> int | str:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or name


_base: ContextVar[Base | None] = ContextVar("onnxtrain_block_base", default=None)
_library: ContextVar[Path | None] = ContextVar("onnxtrain_custom_op_library", default=None)


def current_base() -> Base:
    """The graph that blocks extend now. Raises ArtifactError outside `base` and `empty_base`."""
    found = _base.get()
    if found is None:
        raise ArtifactError("Blocks extend a model.", expected="a call inside `with onnxblock.base(model):`")
    return found


@contextlib.contextmanager
def extending(base: Base) -> Iterator[Base]:
    """Lets blocks extend this graph."""
    if _base.get() is not None:
        raise ArtifactError("A base is set already.", todo="leave the first `with base(...)` before the next")
    token = _base.set(base)
    try:
        yield base
    finally:
        _base.reset(token)


@contextlib.contextmanager
def base(model: onnx.ModelProto | ir.Model | str | os.PathLike[str], model_path: str | None = None) -> Iterator[Any]:
    """Lets blocks extend a copy of `model`, which is given to the `with` block.

    Args:
        model: a model, or the path of one.
        model_path: the file that `model` was read from, where its tensors lie in files beside it.

    Raises:
        ArtifactError: inside another base.
    """
    with extending(Base(*hold_out(model, model_path))) as found:
        yield found.model


@contextlib.contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[Any]:
    """Lets blocks build a graph from nothing.

    Args:
        opset_version: of ai.onnx.

    Raises:
        ArtifactError: inside another base.
    """
    opsets = [onnx.helper.make_opsetid("", opset_version or OPSET)]
    graph = onnx.helper.make_graph([], "model", [], [])
    with extending(Base(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), {})) as found:
        yield found.model


@contextlib.contextmanager
def custom_op_library(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Lets graphs hold the custom ops of a shared library (F93).

    Raises:
        ArtifactError: there is no such file, or a library is set already.
    """
    if _library.get() is not None:
        raise ArtifactError("A library of custom ops is set already.", got=str(_library.get()))
    found = Path(path)
    if not found.is_file():
        raise ArtifactError("The library of custom ops is not there.", str(found), todo="give the path of the file")
    token = _library.set(found)
    try:
        yield found
    finally:
        _library.reset(token)


class Block(ABC):
    """A part of a graph. A subclass says in `build` what it appends.

    Attributes:
        base: the model that it extends, while `build` runs.
    """

    def __init__(self) -> None:
        self.base: Any = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Appends nodes to `self.base` and returns the names of the values that they give."""

    def __call__(self, *names: Any, **options: Any) -> Any:
        """Runs `build` on the current base and checks the graph.

        Raises:
            ArtifactError: outside a base, or the graph is no valid ONNX afterwards.
        """
        found = current_base()
        self.base = found.model
        result = self.build(*names, **options)
        _check(found, type(self).__name__)
        return result


def _check(base: Base, block: str) -> None:
    graph = base.model.graph
    known = {v.name for v in (*graph.input, *graph.initializer)}
    context = onnx.checker.C.CheckerContext()
    context.ir_version = base.model.ir_version
    context.opset_imports = {o.domain: o.version for o in base.model.opset_import}
    for position, node in enumerate(graph.node):
        missing = [name for name in node.input if name and name not in known]
        if missing:
            raise ArtifactError(f"{block} reads {missing[0]!r}, which nothing in the graph makes.", where=node.name)
        known.update(node.output)
        try:
            flat = not any(a.HasField("g") or a.graphs for a in node.attribute)  # subgraphs read outer values
            if position >= base.checked and node.domain in ("", "ai.onnx") and flat:
                onnx.checker.check_node(node, context)
        except onnx.checker.ValidationError as error:
            raise ArtifactError(f"{block} made a node that is no valid ONNX.", node.name, got=str(error)) from error
    base.checked = len(graph.node)


class ForwardBlock(Block):
    """A graph as it is, without gradients: an optimizer, or a forward model."""

    def __init__(self) -> None:
        super().__init__()
        self._model: onnx.ModelProto | None = None

    def __call__(self, *names: Any, **options: Any) -> Any:
        """As `Block`; what `build` returns are the graph's outputs."""
        result = super().__call__(*names, **options)
        set_outputs(self.base, names_of(result))
        self._model = self.base
        return result

    def to_model_proto(self) -> onnx.ModelProto:
        """The model. Raises ArtifactError before the block was called."""
        if self._model is None:
            raise ArtifactError("The block has built no model yet.", todo="call the block first")
        return self._model


def names_of(result: Any) -> list[str]:
    """What `build` returned, as a list of names."""
    return [result] if isinstance(result, str) else [str(name) for name in result]


def set_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Makes these values the graph's outputs. What is not known of their types is inferred later."""
    graph = model.graph
    known = {v.name: v for v in (*graph.output, *graph.value_info, *graph.input)}
    outputs = [known.get(name) or onnx.ValueInfoProto(name=name) for name in names]
    missing = set(names) - {v.name for v in graph.input} - {o for node in graph.node for o in node.output}
    if missing:
        raise ArtifactError("The graph has no such values.", got=", ".join(sorted(missing)))
    copies = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in outputs]
    del graph.output[:]
    graph.output.extend(copies)


def parameters_of(base: Base, names: Sequence[str]) -> list[onnx.TensorProto]:
    """Initializers of the model, with their elements."""
    stubs = {t.name: t for t in base.model.graph.initializer}
    return [whole(stubs[name], base.tensors.get(name)) for name in names]
