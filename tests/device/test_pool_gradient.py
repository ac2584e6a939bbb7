"""MaxPool in artifacts: its gradient without indices matches PyTorch's; the ops in the graphs."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from onnxtrain.artifacts import generate_artifacts
from tests.device.stock import Stock
from tests.reference import assert_matches, with_gradients
from tests.thinned import slow_except

POOLS = {
    "side by side": nn.MaxPool2d(2),
    "of two sizes": nn.MaxPool2d((3, 2)),
    "one axis": nn.MaxPool1d(3),
    "three axes": nn.MaxPool3d((1, 2, 2)),
    "ceiled": nn.MaxPool2d(3, ceil_mode=True),
    "overlapping": nn.MaxPool2d(3, 2, 1),
}


class Weighted(nn.Module):
    """The loss is a weighted sum of pooled values, so that each element of dx has a different value."""

    def __init__(self, pool: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.pool = pool
        self.factor = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.pool(x * self.factor) * weights).sum()


def operators(path: Path) -> set[str]:
    model = onnx.load(path)
    return {node.op_type for graph in (model.graph, *model.functions) for node in graph.node}


@pytest.mark.parametrize("portable", slow_except([False, True], True))
@pytest.mark.parametrize("name", slow_except(POOLS, "side by side", "three axes", "ceiled", "overlapping"))
def test_the_gradient_is_that_of_torch(name: str, portable: bool, tmp_path: Path) -> None:
    """With ties, whose first element gets the gradient; elements outside all windows get none."""
    torch.manual_seed(0)
    pool = POOLS[name]
    shape = (2, 7, 8, 7)[: 4 if name == "three axes" else 2 if name == "one axis" else 3]
    x = torch.randn(3, *shape).round()
    module = Weighted(pool, shape)
    weights = torch.randn_like(pool(x))
    generate_artifacts(module, example_args=(x, weights), artifact_directory=tmp_path, portable=portable)
    run = Stock(tmp_path)
    for count in (3, 1):
        batch = x[:count], weights[:count]
        loss = run.step(*(t.numpy() for t in batch))[0]
        results = {"loss": loss, **run.gradients()}
        assert_matches(results, lambda m, *batch: with_gradients(m(*batch), {"factor": m.factor}), module, *batch)
    if name not in ("ceiled", "overlapping"):
        assert not operators(tmp_path / "training_model.onnx") & {"MaxPoolGrad", "ScatterElements", "ConvTranspose"}


def test_an_evaluation_computes_no_indices(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(0))
    generate_artifacts(
        nn.Sequential(module, nn.Unflatten(0, (-1, 1)), nn.AdaptiveAvgPool1d(1), nn.Flatten(0)),
        example_args=(torch.randn(2, 1, 8, 8),),
        artifact_directory=tmp_path,
    )
    model = onnx.load(tmp_path / "eval_model.onnx")
    (pool,) = (n for graph in (model.graph, *model.functions) for n in graph.node if n.op_type == "MaxPool")
    assert len(pool.output) == 1


def test_weight_gradients_of_small_kernels_are_matmuls_in_their_function(tmp_path: Path) -> None:
    """The function of ConvGrad depends on the sizes of the weight."""
    module = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 5), nn.Flatten(0))
    generate_artifacts(
        nn.Sequential(module, nn.Unflatten(0, (-1, 1)), nn.AdaptiveAvgPool1d(1), nn.Flatten(0)),
        example_args=(torch.randn(2, 1, 8, 8),),
        artifact_directory=tmp_path,
    )
    model = onnx.load(tmp_path / "training_model.onnx")
    backward = [n for graph in (model.graph, *model.functions) for n in graph.node if n.op_type == "Conv"]
    assert len(backward) == 3, "two in forward, and the gradient of the weight of 5 x 5"
