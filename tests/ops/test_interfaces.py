"""Facts that are registered beside the definitions of ops, by interfaces."""

import dataclasses

import onnx_ir as ir
import pytest

from onnxtrain.errors import GraphError
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.elementwise.arithmetic import ADD, MUL, SUB
from onnxtrain.ops.interfaces import OpInterface, OpSet


def test_a_node_has_the_entry_of_its_op() -> None:
    numbers = OpInterface[int]("numbers")
    numbers.register(ADD, 1)
    numbers.implements(SUB)(2)
    x = ir.Value(name="x")
    set_type(x, TensorType(ir.DataType.FLOAT, (3,)))
    op = builder(ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}))
    nodes = [f(x, x).producer() for f in (op.Add, op.Sub, op.Mul)]
    assert [numbers.entry(node) for node in nodes] == [1, 2, None]
    assert numbers.entries == {("", "Add"): 1, ("", "Sub"): 2}


def test_an_op_has_at_most_one_entry() -> None:
    numbers = OpInterface[int]("numbers")
    numbers.register(MUL, 1)
    with pytest.raises(GraphError, match="Mul has two entries for numbers"):
        numbers.register(MUL, 1)


def test_the_op_of_an_entry_is_defined() -> None:
    undefined = dataclasses.replace(ADD, name="Added")
    with pytest.raises(GraphError, match="Added has an entry for numbers but is not defined"):
        OpInterface[int]("numbers").register(undefined, 1)


def test_a_set_of_ops_contains_their_nodes() -> None:
    commutative = OpSet("order of inputs")
    commutative.add(ADD, MUL)
    x = ir.Value(name="x")
    nodes = [ir.Node("", name, (x, x)) for name in ("Add", "Mul", "Sub")]
    assert [node in commutative for node in nodes] == [True, True, False]
    with pytest.raises(GraphError, match="Mul has two entries for order of inputs"):
        commutative.add(MUL)


def test_the_inputs_that_an_entry_names_exist() -> None:
    inputs = OpInterface[str]("inputs", names=lambda name: (name,))
    inputs.register(ADD, "b")
    with pytest.raises(GraphError, match="must name inputs or outputs of the op") as error:
        inputs.register(MUL, "x")
    assert (error.value.expected, error.value.got) == ("y, a, b", "x")
