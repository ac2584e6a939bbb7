"""The reverse walk: sums what was broadcast, adds what was shared, and follows floating edges only."""

import onnx_ir as ir
import pytest
import torch

from onnxtrain.autodiff import Joint, differentiate
from onnxtrain.errors import GradientError
from onnxtrain.execute.program import Program
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.registry import OPS
from onnxtrain.plan.cut import cut
from tests.reference import assert_matches

CPU = torch.device("cpu")


def start(**inputs: tuple[ir.DataType, tuple[int | str, ...]]) -> tuple[Builder, list[ir.Value]]:
    values = []
    for name, (dtype, shape) in inputs.items():
        value = ir.Value(name=name)
        set_type(value, TensorType(dtype, shape))
        values.append(value)
    return builder(ir.Graph(values, [], nodes=[], opset_imports={"": OPSET}, name="g")), values


def joint_of(op: Builder, outputs: list[ir.Value], wrt: list[bool]) -> Joint:
    op.graph.outputs.extend(outputs)
    return differentiate(ir.Model(op.graph, ir_version=10), wrt, [True] * len(outputs))


def gradients(joint: Joint, inputs: list[torch.Tensor], cotangents: list[torch.Tensor]) -> list[torch.Tensor | None]:
    parts = cut(joint)
    outputs, sizes = Program(parts.forward, "forward", CPU).run(inputs, ())
    kept = outputs[joint.outputs :]
    result, _ = Program(parts.backward, "backward", CPU).run([*kept, *cotangents], sizes)
    return list(result)


FLOAT, INT = ir.DataType.FLOAT, ir.DataType.INT64


@pytest.mark.parametrize("is_read", [False, True])
def test_gradients_of_zeros_are_not_added(is_read: bool) -> None:
    """A part of x is overwritten: that part has a gradient of zeros, which matters only if x has no other."""
    op, (x, y) = start(x=(FLOAT, ("b",)), y=(FLOAT, (2,)))
    part = op.Slice(x, op.constant([0], INT), op.constant([2], INT))
    result = op.Sqrt(op.own.Overwritten(part, y))
    joint = joint_of(op, [op.Add(result, op.ReduceSum(x, keepdims=0)) if is_read else result], [True, True])
    assert not [n for n in joint.model.graph if n.op_type in ("Add", "SliceGrad") and n not in joint.forward_nodes]
    dx, dy = gradients(joint, [torch.ones(5), torch.full((2,), 4.0)], [torch.tensor([1.0, 3.0])])
    assert dx is not None
    assert dx.tolist() == [4.0 if is_read else 0.0] * 5
    assert dy is not None
    assert dy.tolist() == [0.25, 0.75]


def test_an_integer_has_no_gradient_though_one_is_asked_for() -> None:
    op, (x, n) = start(x=(FLOAT, ("b",)), n=(INT, ("b",)))
    joint = joint_of(op, [op.Mul(x, op.Cast(n, to=FLOAT)), op.Cast(n, to=FLOAT)], [True, True])
    assert joint.active == (True, False)
    assert joint.gradients[1] is None
    gx, gn = gradients(joint, [torch.ones(3), torch.tensor([1, 2, 3])], [torch.ones(3)])
    assert torch.equal(gx, torch.tensor([1.0, 2.0, 3.0]))
    assert gn is None


def test_broadcast_operands_get_gradients_of_their_own_shape() -> None:
    op, (a, b) = start(a=(FLOAT, ("n", 1, 3)), b=(FLOAT, ("m", 1)))
    joint = joint_of(op, [op.Mul(a, b)], [True, True])
    x, y = torch.randn(2, 1, 3, requires_grad=True), torch.randn(4, 1, requires_grad=True)
    dz = torch.randn(2, 4, 3)
    grads = gradients(joint, [x.detach(), y.detach()], [dz])
    assert_matches(grads, lambda x, y, dz: torch.autograd.grad(x * y, [x, y], dz), x, y, dz)


def test_sizes_that_are_not_proven_equal_are_summed_at_run_time() -> None:
    op, (a, b) = start(a=(FLOAT, ("n",)), b=(FLOAT, ("m",)))
    joint = joint_of(op, [op.Add(a, b)], [True, True])
    for n, m in ((3, 3), (3, 1)):
        x, y = torch.randn(n, requires_grad=True), torch.randn(m, requires_grad=True)
        dz = torch.randn(3)
        grads = gradients(joint, [x.detach(), y.detach()], [dz])
        assert_matches(grads, lambda x, y, dz: torch.autograd.grad(x + y, [x, y], dz), x, y, dz)


def test_a_value_read_twice_gets_the_sum() -> None:
    op, (a,) = start(a=(FLOAT, ("n",)))
    joint = joint_of(op, [op.Mul(op.Exp(a), op.Tanh(a))], [True])
    x, dz = torch.randn(5, requires_grad=True), torch.randn(5)
    grads = gradients(joint, [x.detach()], [dz])
    assert_matches(grads, lambda x, dz: torch.autograd.grad(x.exp() * x.tanh(), x, dz), x, dz)


def test_integer_edges_carry_no_gradient() -> None:
    op, (a, i) = start(a=(FLOAT, ("n",)), i=(INT, ("k",)))
    joint = joint_of(op, [op.Gather(a, op.Add(i, i), axis=0), op.Cast(op.Exp(a), to=INT)], [True, True])
    assert joint.gradients[0] is not None
    assert joint.gradients[1] is None
    assert joint.cotangents[0] is not None
    assert joint.cotangents[1] is None


def test_a_shape_read_in_backward_keeps_no_tensor() -> None:
    op, (a,) = start(a=(FLOAT, ("n", 4)))
    joint = joint_of(op, [op.ReduceSum(op.Neg(a), op.constant([0], INT), keepdims=0)], [True])
    parts = cut(joint)
    assert not parts.kept
    assert len(parts.sizes) == 1


def test_only_wanted_gradients_are_computed() -> None:
    op, (a, b) = start(a=(FLOAT, (3,)), b=(FLOAT, (3,)))
    joint = joint_of(op, [op.Mul(a, b)], [True, True])
    assert len(cut(joint).kept) == 2
    only_a = cut(joint, [True, False])
    assert only_a.backward.outputs[1] is None
    assert [v.name for v in only_a.kept] == ["b"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda op, n, dy: op.Cast(dy, to=ir.DataType.DOUBLE), "dtype"),
        (lambda op, n, dy: op.ReduceSum(dy, op.constant([0], INT), keepdims=1), "does not broadcast from"),
        (lambda op, n, dy: (dy, dy), "number of gradients"),
    ],
)
def test_a_wrong_rule_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: object, says: str) -> None:
    import dataclasses

    from onnxtrain.ops.definition import Gradient

    broken = dataclasses.replace(OPS["", "Exp"], gradient=(Gradient(wrong, ("x",)),))  # type: ignore[arg-type]
    monkeypatch.setitem(OPS, ("", "Exp"), broken)
    op, (a,) = start(a=(FLOAT, (3,)))
    with pytest.raises(GradientError, match=says):
        joint_of(op, [op.Exp(a)], [True])


def test_a_dynamic_size_may_be_1_by_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 rows, F.pad(x.chunk(2)[0], (0, -1)) is empty by a guard: the gradient has 1 row, the chunk n."""
    import dataclasses

    from onnxtrain.ops.definition import Gradient

    one_row = dataclasses.replace(
        OPS["", "Exp"],
        gradient=(Gradient(lambda op, n, dy: op.ReduceSum(dy, op.constant([0], INT), keepdims=1), ()),),
    )
    monkeypatch.setitem(OPS, ("", "Exp"), one_row)
    op, (x,) = start(x=(FLOAT, ("n",)))
    joint = joint_of(op, [op.Exp(x)], [True])
    assert torch.equal(gradients(joint, [torch.ones(1)], [torch.full((1,), 3.0)])[0], torch.full((1,), 3.0))
    with pytest.raises(RuntimeError, match="not expandable"):
        gradients(joint, [torch.ones(2)], [torch.ones(2)])


def test_padding_and_unpadding_are_each_others_gradients() -> None:
    """No GatherGrad restores padding, in forward or backward."""
    op, (x, rows) = start(x=(FLOAT, ("n", 2)), rows=(INT, ("n",)))
    padded = op.ms.PadAndUnflatten(x, rows, op.sizes([3, 4]))
    unpadded, _ = op.ms.FlattenAndUnpad(op.Exp(padded), rows)
    joint = joint_of(op, [unpadded], [True, False])
    kinds = [node.op_type for node in joint.model.graph]
    assert kinds == ["PadAndUnflatten", "Exp", "FlattenAndUnpad", "PadAndUnflatten", "Mul", "FlattenAndUnpad"]
    values, positions = torch.randn(3, 2, requires_grad=True), torch.tensor([0, 5, 11])
    dy = torch.randn(3, 2)
    (dx, _) = gradients(joint, [values.detach(), positions], [dy])
    assert_matches(dx, lambda v, d: d * v.exp(), values.detach(), dy)
