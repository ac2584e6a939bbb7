"""The verifier reports the fault, the node and the node's origin."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.graph.verify import verify
from onnxtrain.ops import lookup
from tests.graph.small import graph_of


def valid_graph() -> tuple[Builder, ir.Value, ir.Value]:
    """Return a builder with a valid graph, the output of its first node and its result."""
    op, (x,) = graph_of(x=("b", 4))
    with op.at({"module": "encoder.layer", "line": "model.py:12 in forward"}):
        a = op.Neg(x)
        y = op.Add(a, op.scalar(1.0, like=x))
    op.graph.outputs.append(y)
    return op, a, y


def test_a_valid_graph_passes():
    op, _, _ = valid_graph()
    verify(op.graph, lookup)
    verify(ir.Model(op.graph, ir_version=10), lookup)


def out_of_order(op, a, y):
    node = a.producer()
    op.graph.remove(node)
    op.graph.append(node)


def removed_producer(op, a, y):
    op.graph.remove(a.producer())


def foreign_value(op, a, y):
    a.producer().replace_input_with(0, graph_of(z=("b", 4))[1][0])


def no_type(op, a, y):
    a.shape = None


def wrong_dtype(op, a, y):
    a.type = ir.TensorType(ir.DataType.DOUBLE)


def wrong_rank(op, a, y):
    set_type(a, TensorType(ir.DataType.FLOAT, (4,)))


def wrong_size(op, a, y):
    set_type(a, TensorType(ir.DataType.FLOAT, ("b", 5)))


def mixed_operands(op, a, y):
    y.producer().replace_input_with(1, op.scalar(1, like=ir.DataType.INT64))


def unknown_op(op, a, y):
    a.producer().op_type = "Negate"


def unknown_attribute(op, a, y):
    a.producer().attributes.add(ir.AttrInt64("axis", 1))


def absent_input(op, a, y):
    y.producer().replace_input_with(1, None)


def too_many_inputs(op, a, y):
    y.producer().resize_inputs(3)
    y.producer().replace_input_with(2, a)


def duplicate_value_name(op, a, y):
    a.name = "x"


def duplicate_node_name(op, a, y):
    a.producer().name = y.producer().name


def no_name(op, a, y):
    a.name = None


def output_of_no_node(op, a, y):
    value = ir.Value(name="z")
    set_type(value, TensorType(ir.DataType.FLOAT, (4,)))
    op.graph.outputs.append(value)


def initializer_of_another_type(op, a, y):
    constant = y.producer().inputs[1]
    constant.const_value = ir.Tensor(np.ones((2,), np.float32))


FAULTS = [
    (out_of_order, "comes later"),
    (removed_producer, "was removed"),
    (foreign_value, "neither an input nor an initializer"),
    (no_type, "has no type"),
    (wrong_dtype, "has the wrong type"),
    (wrong_rank, "has the wrong type"),
    (wrong_size, r"(?s)has the wrong type.*float\[b, 4\].*float\[b, 5\]"),
    (mixed_operands, "must have the same element type"),
    (unknown_op, "no definition"),
    (unknown_attribute, "axis"),
    (absent_input, "lacks the required input 'b'"),
    (too_many_inputs, "too many inputs"),
    (duplicate_value_name, "(?s)duplicate names of values.*x"),
    (duplicate_node_name, "duplicate names of nodes"),
    (no_name, "1 values have no name"),
    (output_of_no_node, "no node of the graph produces the output 'z'"),
    (initializer_of_another_type, "data of the initializer"),
]


@pytest.mark.parametrize(("break_it", "message"), FAULTS, ids=lambda f: getattr(f, "__name__", ""))
def test_each_fault_is_detected(break_it, message):
    op, a, y = valid_graph()
    break_it(op, a, y)
    with pytest.raises(GraphError, match=message):
        verify(op.graph, lookup)


@pytest.mark.parametrize(("break_it", "message"), FAULTS, ids=lambda f: getattr(f, "__name__", ""))
def test_a_fault_is_detected_in_a_graph_that_passed_before(break_it, message):
    op, a, y = valid_graph()
    verified = set()
    verify(op.graph, lookup, verified)
    break_it(op, a, y)
    with pytest.raises(GraphError, match=message):
        verify(op.graph, lookup, verified)


def test_equal_nodes_are_verified_once():
    looked_up = []

    def definitions(domain, op_type):
        looked_up.append(op_type)
        return lookup(domain, op_type)

    op, (x,) = graph_of(x=("b", 4))
    op.graph.outputs.append(op.Neg(op.Softmax(op.Neg(op.Softmax(x, axis=1)), axis=0)))
    verified = set()
    verify(op.graph, definitions, verified)
    verify(op.graph, definitions, verified)
    assert looked_up == ["Softmax", "Neg", "Softmax"]


def test_equal_nodes_with_differently_computed_shapes_are_both_verified():
    """Two Reshapes have equal types; the nodes that compute the second's shape give it another result type."""
    op, (x,) = graph_of(x=("b", 4))
    b, _ = sizes.dims_of(x)
    first, second = (op.Reshape(x, op.sizes([b, *others]), allowzero=1) for others in ((1, 4), (4, 1)))
    op.graph.outputs.extend((op.Neg(first), op.Neg(second)))
    verified = set()
    verify(op.graph, lookup, verified)
    set_type(second, TensorType(ir.DataType.FLOAT, ("b", 1, 4)))
    set_type(op.graph.outputs[1], TensorType(ir.DataType.FLOAT, ("b", 1, 4)))
    with pytest.raises(GraphError, match="Reshape"):
        verify(op.graph, lookup, verified)


def test_the_message_has_the_origin_of_the_node():
    op, a, y = valid_graph()
    wrong_size(op, a, y)
    with pytest.raises(GraphError) as caught:
        verify(op.graph, lookup)
    assert caught.value.where == "encoder.layer, model.py:12 in forward"
    assert "ai.onnx::Neg" in str(caught.value)
    assert (caught.value.expected, caught.value.got) == ("float[b, 4]", "float[b, 5]")


def test_symbolic_sizes_that_may_be_equal_under_guards_pass():
    op, a, _ = valid_graph()
    set_type(a, TensorType(ir.DataType.FLOAT, ("c", 4)))
    verify(op.graph, lookup)


def test_a_missing_required_attribute_is_detected():
    op, (x,) = graph_of(x=("b", 4))
    y = op.Cast(x, to=ir.DataType.DOUBLE)
    op.graph.outputs.append(y)
    verify(op.graph, lookup)
    y.producer().attributes.pop("to")
    with pytest.raises(GraphError, match="lacks the required attributes to"):
        verify(op.graph, lookup)


def test_an_element_type_that_onnx_forbids_is_detected():
    op, (x,) = graph_of(x=("b", 4))
    op.graph.outputs.append(op.Sqrt(x))
    for value in (x, op.graph.outputs[0]):
        value.type = ir.TensorType(ir.DataType.INT64)
    with pytest.raises(GraphError, match=r"(?s)ONNX does not allow.*int64"):
        verify(op.graph, lookup)
