"""Losses that save their logits for backward: which do, which are refused; results stay eager's."""

import onnx_ir as ir
import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.save_logits_for_backward import save_logits_for_backward
from onnxtrain.testing import assert_no_worse_than_eager

FLOAT, HALF, INT64 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT64


def run_pass(scores_type: ir.DataType, *, reads: int, **attributes: int) -> tuple[list[str], Changes]:
    """The ops that a loss becomes of which the first `reads` results are read."""
    scores, labels = ir.Value(name="scores"), ir.Value(name="labels")
    set_type(scores, TensorType(scores_type, ("n", 7)))
    set_type(labels, TensorType(INT64, ("n",)))
    op = builder(ir.Graph([scores, labels], [], nodes=[], opset_imports={"": OPSET}, name="g"))
    results = op.ms.SoftmaxCrossEntropyLossInternal(scores, labels, **attributes)
    op.graph.outputs.extend(results[:reads])
    changes = Changes("save_logits_for_backward")
    save_logits_for_backward(op.graph, changes)
    return [node.op_type for node in op.graph], changes


def test_logits_are_saved_if_log_probabilities_are_not_read() -> None:
    ops, changes = run_pass(FLOAT, reads=1)
    assert ops == ["CrossEntropy"]
    assert len(changes.applied) == 1


@pytest.mark.parametrize(
    ("dtype", "reads", "attributes", "reason"),
    [
        (FLOAT, 2, {}, "have users"),
        (HALF, 1, {}, "FLOAT16"),
        (HALF, 1, {"output_type": int(FLOAT)}, "another type"),
    ],
)
def test_refusals_say_why(dtype: ir.DataType, reads: int, attributes: dict[str, int], reason: str) -> None:
    ops, changes = run_pass(dtype, reads=reads, **attributes)
    assert ops == ["SoftmaxCrossEntropyLossInternal"]
    assert reason in changes.refused[0].reason


class Scorer(torch.nn.Module):
    """Gives its scores besides the loss, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(9, 37)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.layer(x)
        return torch.nn.functional.cross_entropy(scores, labels), scores


@pytest.mark.parametrize("rng", ["fast", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_loss_and_scores(dtype: torch.dtype, rng: str) -> None:
    module = Scorer().to(dtype)
    compiled = ORTModule(module, rng=rng)

    def gradients(run: torch.nn.Module, kind: torch.dtype, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        loss, scores = run(x.to(kind), labels)
        (3 * loss + scores.square().mean()).backward()
        results = [loss.detach(), *(p.grad for p in run.parameters() if p.grad is not None)]
        run.zero_grad()
        return results

    for rows in (5, 1, 64):
        x, labels = torch.randn(rows, 9, dtype=dtype), torch.randint(0, 37, (rows,))
        labels[rows // 2] = -100 if rows > 1 else 3
        ours, eager = gradients(compiled, dtype, x, labels), gradients(module, dtype, x, labels)
        reference = Scorer().double()
        reference.load_state_dict(module.state_dict())
        exact = gradients(reference, torch.float64, x, labels)
        for got, plain, true in zip(ours, eager, exact, strict=True):
            assert_no_worse_than_eager(f"{rows} rows", got, plain, true)
