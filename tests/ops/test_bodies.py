"""Bodies, inlined or as functions: on stock onnxruntime both compute the same as the op."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import traversal
from onnxtrain.graph.values import TensorType, rank_of, set_type, type_of
from onnxtrain.ops import OPS, NoBody, builder
from onnxtrain.ops.bodies import inline_bodies
from onnxtrain.ops.constructors import define_unary
from onnxtrain.ops.local_functions import as_functions
from tests.graph.small import graph_of

# Ops of these tests: half is x/2 by a constant, shaped reads its own sizes and contains half, same returns x itself.


def _half(op, n):
    return op.Mul(n.x, op.scalar(0.5, like=n.x))


def _shaped(op, n):
    return op.own.TestHalf(op.Reshape(op.Neg(n.x), op.shape_of(n.x)))


def _by_static_size(op, n):
    last_size = type_of(n.x).shape[-1]
    if not isinstance(last_size, int):
        raise GraphError("the last size must be static")
    return op.Mul(n.x, op.scalar(float(last_size), like=n.x))


def _by_rank(op, n):
    return op.Mul(n.x, op.scalar(float(rank_of(n.x)), like=n.x))


def _scaled(op, n):
    return op.Mul(n.x, op.scalar(n.alpha, like=n.x))


def _of_wrong_type(op, n):
    return op.Cast(n.x, to=ir.DataType.DOUBLE)


def _recursive(op, n):
    return op.own.TestRecursive(n.x)


BODIES = {
    "TestHalf": _half,
    "TestShaped": _shaped,
    "TestSame": lambda op, n: n.x,
    "TestByStaticSize": _by_static_size,
    "TestByRank": _by_rank,
    "TestScaled": _scaled,
    "TestWrongType": _of_wrong_type,
    "TestRecursive": _recursive,
    "TestNoBody": NoBody("it runs Python"),
}


@pytest.fixture(autouse=True)
def test_ops() -> Iterator[None]:
    for name, body in BODIES.items():
        define_unary(name, (), torch.neg, None, domain="onnxtrain", body=body, attributes={"alpha": 1.0})
    yield
    for name in BODIES:
        del OPS["onnxtrain", name]


def run(model: ir.Model, *arrays: np.ndarray) -> list[np.ndarray]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {v.name: a for v, a in zip(model.graph.inputs, arrays, strict=True)})


def ops_of(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4)


def chain():
    op, (x,) = graph_of(x=("b", 4))
    with op.at({"module": "layer"}):
        y = op.own.TestShaped(op.own.TestHalf(x))
    y.name = "result"
    op.graph.outputs.append(y)
    return op.graph


def test_nested_bodies_are_inlined_down_to_standard_ops():
    graph = chain()
    before = str(graph)
    model = inline_bodies(graph)
    assert str(graph) == before
    assert not any(node.domain for node in model.graph)
    assert all(node.metadata_props["module"] == "layer" for node in model.graph)
    assert model.graph.outputs[0].name == "result"
    np.testing.assert_array_equal(run(model, X)[0], -X / 4)


def test_kept_nodes_are_not_inlined():
    model = inline_bodies(chain(), keep=lambda node: node.op_type == "TestHalf")
    assert [n.op_type for n in model.graph if n.domain] == ["TestHalf", "TestHalf"]
    assert model.graph.opset_imports["onnxtrain"] == 1


def test_input_that_becomes_an_output_is_copied_by_an_identity():
    op, (x,) = graph_of(x=("b", 4))
    y, z = op.own.TestSame(x), op.own.TestSame(op.own.TestSame(x))
    y.name, z.name = "y", "z"
    op.graph.outputs.extend([y, z])
    for model in (inline_bodies(op.graph), as_functions(ir.Model(op.graph, ir_version=10))):
        assert [v.name for v in model.graph.outputs] == ["y", "z"]
        for result in run(model, X):
            np.testing.assert_array_equal(result, X)


def test_op_without_a_body_raises_its_reason_unless_kept():
    op, (x,) = graph_of(x=("b", 4))
    with op.at({"line": "model.py:3"}):
        op.graph.outputs.append(op.own.TestNoBody(x))
    with pytest.raises(GraphError, match=r"(?s)TestNoBody.*it runs Python") as caught:
        inline_bodies(op.graph)
    assert caught.value.where == "model.py:3"
    assert ops_of(inline_bodies(op.graph, keep=lambda node: True)) == {"TestNoBody"}
    assert ops_of(as_functions(ir.Model(op.graph, ir_version=10))) == {"TestNoBody"}


@pytest.mark.parametrize(
    ("name", "message"), [("TestWrongType", "of a wrong type"), ("TestRecursive", "contain the ops themselves")]
)
def test_invalid_body_raises(name, message):
    op, (x,) = graph_of(x=("b", 4))
    op.graph.outputs.append(getattr(op.own, name)(x))
    with pytest.raises(GraphError, match=message):
        inline_bodies(op.graph)


def test_one_function_per_rank_serves_all_sizes():
    op, (x, y, z) = graph_of(x=("b", 4), y=("b", "2*b"), z=("b", "c", 4))
    op.graph.outputs.extend([op.own.TestShaped(v) for v in (x, y, z)])
    model = as_functions(ir.Model(op.graph, ir_version=10))
    assert [n.overload for n in model.graph] == ["", "", "1"]
    assert set(model.functions) == {("onnxtrain", "TestShaped", ""), ("onnxtrain", "TestShaped", "1")}
    wide, deep = np.ones((3, 6), np.float32), np.ones((3, 2, 4), np.float32)
    for result, array in zip(run(model, X, wide, deep), (X, wide, deep), strict=True):
        np.testing.assert_array_equal(result, -array / 2)


def test_functions_call_no_functions():
    model = as_functions(ir.Model(chain(), ir_version=10))
    for function in model.functions.values():
        assert not any(node.domain for node in function)
        assert function.opset_imports[""] == model.graph.opset_imports[""]
    np.testing.assert_array_equal(run(model, X)[0], -X / 4)


def test_body_that_needs_static_sizes_gets_a_function_for_each():
    op, (x, y, z) = graph_of(x=("b", 4), y=("b", 2), z=("c", 4))
    op.graph.outputs.extend([op.own.TestByStaticSize(v) for v in (x, y, z)])
    model = as_functions(ir.Model(op.graph, ir_version=10))
    assert [n.overload for n in model.graph] == ["", "1", ""]
    narrow = X[:, :2].copy()
    for result, expected in zip(run(model, X, narrow, X), (X * 4, narrow * 2, X * 4), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_one_function_per_element_type_and_attributes():
    op, (x,) = graph_of(x=("b", 4))
    double = ir.Value(name="d")
    set_type(double, TensorType(ir.DataType.DOUBLE, ("b", 4)))
    op.graph.inputs.append(double)
    op.graph.outputs.extend([op.own.TestHalf(x), op.own.TestHalf(double)])
    op.graph.outputs.extend([op.own.TestScaled(x), op.own.TestScaled(x, alpha=3.0), op.own.TestScaled(x, alpha=-2.0)])
    model = as_functions(ir.Model(op.graph, ir_version=10))
    assert [n.overload for n in model.graph] == ["", "1", "", "1", "2"]
    scaled = [f for key, f in model.functions.items() if key[1] == "TestScaled"]
    assert [{a.name: a.value for a in f.attributes.values()} for f in scaled] == [{}, {"alpha": 3.0}, {"alpha": -2.0}]
    results = run(model, X, X.astype(np.float64))
    for result, expected in zip(results, (X / 2, X.astype(np.float64) / 2, X, X * 3, X * -2), strict=True):
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == expected.dtype


def test_doc_string_of_a_function_describes_its_case():
    op, (x,) = graph_of(x=("b", 4))
    op.graph.outputs.append(op.own.TestHalf(x))
    (function,) = as_functions(ir.Model(op.graph, ir_version=10)).functions.values()
    assert function.doc_string == "TestHalf(x: float[d0, d1]) -> y: float[d0, d1]"


def _calls_to_inline(nodes: int) -> int:
    """Return the number of Python calls that inlining the bodies of this many nodes takes."""
    op, (x,) = graph_of(x=("b", 4))
    for _ in range(nodes):
        x = op.own.TestShaped(x)
    op.graph.outputs.append(x)
    traversal.name_uniquely(op.graph)
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        inline_bodies(op.graph)
    finally:
        sys.setprofile(before)
    return count


def test_inlining_is_linear_in_the_number_of_nodes() -> None:
    """By Python calls, not by seconds: twice the nodes take twice the calls, not four times as many."""
    _calls_to_inline(20)  # warm up caches
    few, many = _calls_to_inline(100), _calls_to_inline(200)
    assert few > 100
    assert many < 2.2 * few


def test_new_values_get_names_that_inlined_bodies_do_not_use():
    """The result of a body gets the name of the op's output, which the copied graph must reserve."""
    op, (x,) = graph_of(x=("b", 4))
    y = op.own.TestHalf(x)
    y.name = "val_20"
    op.graph.outputs.append(y)
    graph = inline_bodies(op.graph).graph
    for _ in range(30):
        graph.append(ir.Node("", "Neg", [graph.outputs[0]]))
    names = [value.name for node in graph for value in node.outputs]
    assert len(set(names)) == len(names)


def test_values_of_sizes_have_unique_names_in_a_copied_graph():
    op, (x,) = graph_of(x=("b", 4))
    op.graph.outputs.append(op.Reshape(x, op.sizes(("b", 4))))
    graph = traversal.clone(op.graph)[0]
    builder(graph).sizes(("b", 2))
    names = [value.name for node in graph for value in node.outputs]
    assert len(set(names)) == len(names)
