"""Build the small graphs of the tests of graph/."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET


def graph_of(**inputs: tuple[int | str, ...]) -> tuple[Builder, list[ir.Value]]:
    """Return a builder on a new graph with float32 inputs of these shapes, and the inputs."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="small")
    for name, shape in inputs.items():
        value = ir.Value(name=name)
        set_type(value, TensorType(ir.DataType.FLOAT, shape))
        graph.inputs.append(value)
    return builder(graph), list(graph.inputs)
