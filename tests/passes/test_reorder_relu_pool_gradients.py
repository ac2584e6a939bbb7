"""ReLU before MaxPool: its gradient is masked after the pool's, and results stay eager's."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.eliminate_dead_code import eliminate_dead_code
from onnxtrain.passes.reorder_relu_pool_gradients import reorder_relu_pool_gradients

POOL = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}


def run_pass(*, masked_by: str = "relu", read_twice: bool = False) -> tuple[list[str], Changes]:
    """The backward ops of a Relu and a MaxPool, in order."""
    x, dy = ir.Value(name="x"), ir.Value(name="dy")
    set_type(x, TensorType(ir.DataType.FLOAT, ("n", 2, 8, 8)))
    set_type(dy, TensorType(ir.DataType.FLOAT, ("n", 2, 4, 4)))
    op = builder(ir.Graph([x, dy], [], nodes=[], opset_imports={"": OPSET}, name="g"))
    y = op.Relu(x)
    _, indices = op.own.MaxPool(y, **POOL)
    spread = op.ms.MaxPoolGrad(dy, indices, op.shape_of(y), **POOL)
    dx = op.ms.ReluGrad(spread, {"relu": y, "input": x}[masked_by])
    op.graph.outputs.extend([dx, spread] if read_twice else [dx])
    changes = Changes("reorder_relu_pool_gradients")
    reorder_relu_pool_gradients(op.graph, changes)
    eliminate_dead_code(op.graph, Changes("eliminate_dead_code"))
    return [node.op_type for node in op.graph if node.op_type.endswith("Grad")], changes


def test_the_mask_moves_after_the_pool() -> None:
    ops, changes = run_pass()
    assert ops == ["ReluGrad", "MaxPoolGrad"]
    assert len(changes.applied) == 1


@pytest.mark.parametrize(
    ("case", "reason"),
    [({"masked_by": "input"}, "is not the input of the pool"), ({"read_twice": True}, "other users")],
)
def test_refusals_say_why(case: dict[str, Any], reason: str) -> None:
    ops, changes = run_pass(**case)
    assert ops == ["MaxPoolGrad", "ReluGrad"]
    assert reason in changes.refused[0].reason


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 1), nn.MaxPool2d(2, 2, ceil_mode=True)]
)
def test_gradients_are_eagers_bit_for_bit(pool: nn.Module) -> None:
    """With ties: whole windows of zeros."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.ReLU(), pool, nn.Flatten(0))
    wrapped = ORTModule(nn.Sequential(nn.ReLU(), pool, nn.Flatten(0)), rng="torch")
    for size in (9, 4):
        x = torch.randn(2, 3, size, size).round().requires_grad_()
        dy = torch.randn_like(eager(x))
        (expected,) = torch.autograd.grad(eager(x), x, dy)
        (got,) = torch.autograd.grad(wrapped(x), x, dy)
        assert torch.equal(got, expected)
