"""Losses with more than 2^31 elements, as a large vocabulary times a large batch reaches."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from onnxtrain.autodiff import differentiate
from onnxtrain.graph import sizes
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.bodies import inline_bodies
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.interfaces.cost import flops_of
from onnxtrain.ops.loss.cross_entropy import cross_entropy, cross_entropy_backward

ROWS, CLASSES = 32769, 65536  # 2^31 + 65536 elements


def loss_graph(rows: sizes.Size, classes: sizes.Size, reduction: str) -> ir.Model:
    """The loss of `rows` scores over `classes`, and its gradient."""
    scores, labels = ir.Value(name="scores"), ir.Value(name="labels")
    set_type(scores, TensorType(ir.DataType.BFLOAT16, (rows, classes)))
    set_type(labels, TensorType(ir.DataType.INT64, (rows,)))
    op = builder(ir.Graph([scores, labels], [], nodes=[], opset_imports={"": OPSET}, name="loss"))
    outputs = op.ms.SoftmaxCrossEntropyLossInternal(
        scores, labels, None, op.scalar(-100, ir.DataType.INT64), reduction=reduction
    )
    outputs[0].name = "loss"
    op.graph.outputs.append(outputs[0])
    for number, node in enumerate(op.graph):
        node.name = f"node_{number}"
    return differentiate(ir.Model(op.graph, ir_version=10), [True, False], [True]).model


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("static", [True, False])
def test_all_integers_of_the_bodies_are_int64(reduction: str, static: bool) -> None:
    """Element counts and indices are int64, in the loss and in its gradient, with static and symbolic dimensions."""
    model = loss_graph(*((ROWS, CLASSES) if static else ("n", "c")), reduction)
    bodies = inline_bodies(model).graph
    values = [*bodies.initializers.values(), *(v for node in bodies for v in node.outputs)]
    integers = [v for v in values if dtype_of(v).is_integer()]
    assert integers, "the bodies contain no integers: this test checks nothing"
    assert {dtype_of(v) for v in integers} == {ir.DataType.INT64}


def test_sizes_and_costs_are_not_cut_off() -> None:
    """Sizes are Python integers: the element count of a graph does not overflow."""
    for rows, classes, size_values in ((ROWS, CLASSES, {}), ("n", "c", {"n": ROWS, "c": CLASSES})):
        model = loss_graph(rows, classes, "mean")
        costs = [sizes.evaluate(flops_of(node), size_values) for node in model.graph if node.domain == MICROSOFT]
        assert min(costs) > 2**31


@pytest.mark.parametrize("inner", [(), (3,), (2, 2)])
def test_kernels_take_the_shapes(inner: tuple[int, ...]) -> None:
    """Our calls of PyTorch's kernels with the full shapes, on meta tensors."""
    scores = torch.empty(ROWS, CLASSES, *inner, dtype=torch.bfloat16, device="meta")
    labels = torch.empty(ROWS, *inner, dtype=torch.int64, device="meta")
    loss, log_prob, total = cross_entropy(scores, labels, None, 0, -100, None)
    assert loss.shape == labels.shape
    assert log_prob.shape == scores.shape
    dx = cross_entropy_backward(loss, log_prob, labels, None, None, total, 0, -100, None)
    assert dx.shape == scores.shape


@pytest.mark.slow
@pytest.mark.large(gb=12)
def test_the_last_rows_of_large_log_probabilities() -> None:
    """The elements that the loss gathers, and those that its gradient writes, beyond index 2^31."""

    class Loss(torch.nn.Module):
        def forward(self, log_prob: torch.Tensor, labels: torch.Tensor) -> Any:
            return F.nll_loss(log_prob, labels, reduction="none")

    log_prob = torch.zeros(ROWS, CLASSES, dtype=torch.bfloat16)
    log_prob[-1] = torch.linspace(-4, 0, CLASSES)
    labels = torch.arange(ROWS) % CLASSES
    labels[-1] = CLASSES // 2
    log_prob.requires_grad_()
    loss = ORTModule(Loss())(log_prob, labels)
    assert loss[-1] == 2
    assert not loss[:-1].any()
    cotangent = torch.zeros_like(loss)
    cotangent[-1] = 3
    loss.backward(cotangent)
    assert log_prob.grad is not None
    assert log_prob.grad[-1].nonzero().tolist() == [[CLASSES // 2]]
    assert log_prob.grad[-1, CLASSES // 2] == -3
    assert not log_prob.grad[-100:-1].any()


@pytest.mark.slow
@pytest.mark.large(gb=32)
def test_the_last_rows_of_a_large_loss() -> None:
    """Elements beyond index 2^31 get the right loss and gradient: those of the last rows by themselves."""

    class Loss(torch.nn.Module):
        def forward(self, scores: torch.Tensor, labels: torch.Tensor) -> Any:
            return F.cross_entropy(scores, labels, reduction="none")

    generator = torch.Generator().manual_seed(3)
    scores = torch.empty(ROWS, CLASSES, dtype=torch.bfloat16).normal_(generator=generator).requires_grad_()
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    loss = ORTModule(Loss())(scores, labels)
    cotangent = torch.zeros_like(loss)
    cotangent[-2:] = 1
    loss.backward(cotangent)

    last = scores.detach()[-2:].clone().requires_grad_()
    F.cross_entropy(last, labels[-2:], reduction="none").sum().backward()
    assert torch.equal(loss.detach()[-2:], F.cross_entropy(last.detach(), labels[-2:], reduction="none"))
    assert scores.grad is not None
    assert last.grad is not None
    assert torch.equal(scores.grad[-2:], last.grad)
    assert not scores.grad[:-2].any()
