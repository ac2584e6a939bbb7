"""Graphs converted to other opsets compute the same results."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onnxtrain.errors import OptionError
from onnxtrain.graph.opset import convert_opset
from onnxtrain.graph.values import TensorType
from onnxtrain.ops.reshape.join import split
from tests.graph.small import graph_of
from tests.reference import assert_matches


def model_of(op):
    model = ir.Model(op.graph, ir_version=10)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(op, **feeds):
    session = onnxruntime.InferenceSession(model_of(op).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def graph():
    """Return ops that differ between opsets in allowed types, in an input that was an attribute, and by absence."""
    op, (x,) = graph_of(x=("b", 4))
    y = op.Transpose(x, perm=(1, 0))
    y = op.ReduceMax(y, op.sizes([0]), keepdims=0)
    for kind in ("none", "tanh"):
        y = op.Gelu(y, approximate=kind)
    y.name = "y"
    op.graph.outputs.append(y)
    return op


def reference(x):
    y = x.mT.amax(0)
    for kind in ("none", "tanh"):
        y = torch.nn.functional.gelu(y, approximate=kind)
    return y


@pytest.mark.parametrize("opset", [17, 18, 20, 24])
def test_same_results(opset):
    x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    (expected,) = run(graph(), x=x)
    op = graph()
    convert_opset(op.graph, opset)
    assert op.graph.opset_imports[""] == opset
    assert op.graph.outputs[0].name == "y"
    (got,) = run(op, x=x)
    for each in (got, expected):
        assert_matches(each, reference, x)


def test_nodes_that_are_equal_in_both_opsets_are_kept():
    op = graph()
    first = op.graph[0]
    convert_opset(op.graph, 17)
    assert op.graph[0] is first


def test_new_nodes_carry_the_origin():
    op, (x,) = graph_of(x=("b", 4))
    with op.at({"module": "act", "line": "m.py:3"}):
        op.graph.outputs.append(op.Gelu(x))
    convert_opset(op.graph, 17)
    assert len(op.graph) > 1
    assert all(node.metadata_props == {"module": "act", "line": "m.py:3"} for node in op.graph)


def test_the_error_names_an_op_that_cannot_be_converted():
    op, (x,) = graph_of(x=("b", 4))
    bits = op.Cast(x, to=ir.DataType.INT64)
    with op.at({"line": "m.py:7"}):
        op.graph.outputs.append(op.BitwiseAnd(bits, bits))
    with pytest.raises(OptionError, match="BitwiseAnd") as caught:
        convert_opset(op.graph, 17)
    assert caught.value.where == "m.py:7"


def test_an_element_type_that_the_opset_lacks_is_refused():
    op, (x,) = graph_of(x=("b", 4))
    half = op.Cast(x, to=ir.DataType.BFLOAT16)
    op.graph.outputs.append(op.Round(half))
    with pytest.raises(OptionError, match="Round"):
        convert_opset(op.graph, 18)


def test_a_node_that_uses_no_new_feature_of_its_op_is_kept():
    op, (x,) = graph_of(x=(4, 2))
    op.graph.outputs.extend(split(op, x, [1, 3], axis=0))
    nodes = list(op.graph)
    convert_opset(op.graph, 17)  # Split 18 added num_outputs
    assert list(op.graph) == nodes
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    first, rest = run(op, x=x)
    np.testing.assert_array_equal(np.concatenate([first, rest]), x)


@pytest.mark.parametrize("computed", [False, True])
def test_pad_of_some_axes_becomes_pad_of_all(computed):
    op, (x,) = graph_of(x=("b", 3, 4))
    widths = op.sizes([1, "b", 2, 0]) if computed else op.sizes([1, 2, 2, 0])
    shape = ("2*b", 3, 7) if computed else ("b", 5, 7)
    axes = op.sizes([2, 0] if computed else [-1, 1])
    kind = TensorType(ir.DataType.FLOAT, shape)
    y = op.node("", "Pad", [x, widths, None, axes], {}, types=[kind]).outputs[0]
    op.graph.outputs.append(y)
    convert_opset(op.graph, 17)
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    pads = [(2, 0), (0, 0), (1, 2)] if computed else [(0, 0), (2, 0), (1, 2)]
    session = onnxruntime.InferenceSession(ir.to_proto(ir.Model(op.graph, ir_version=10)).SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": array})[0], np.pad(array, pads))


def test_a_node_that_uses_a_new_feature_of_its_op_is_refused():
    op, (x,) = graph_of(x=(4, 2))
    op.graph.outputs.extend(op.Split(x, axis=0, num_outputs=2))
    with pytest.raises(OptionError, match="Split"):
        convert_opset(op.graph, 17)


@pytest.mark.parametrize("opset", [0, 9999])
def test_an_unknown_opset_is_an_error(opset):
    op, _ = graph_of(x=("b", 4))
    with pytest.raises(OptionError, match="unknown ONNX opset"):
        convert_opset(op.graph, opset)
