"""One file with loss, output and gradients, which stock onnxruntime runs with PyTorch's results."""

from __future__ import annotations

import copy
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
from torch.nn import functional as F

from onnxtrain.device.gradient_graph import export_gradient_graph
from onnxtrain.errors import ArtifactError, ORTModuleFallbackException
from onnxtrain.execute.tolerance import perturbed
from tests.reference import with_gradients
from tests.zoo.checks import compare_named


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU())
        self.head = torch.nn.Linear(8, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def run(path: Path, model: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {"input": x, "labels": labels, **model.state_dict()}
    feeds = {i.name: given[i.name].numpy() for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, session.run(names, feeds)), strict=True))


def step(model: Net, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss, output, gradients and, in training, the new running statistics in eager PyTorch."""
    output = model(x.to(model.head.weight.dtype))
    results = with_gradients(F.cross_entropy(output, labels), dict(model.named_parameters()))
    named = {name if name == "loss" else f"{name}_grad": tensor for name, tensor in results.items()}
    statistics = dict(model.named_buffers()) if model.training else {}
    named |= {f"{name}.out": value for name, value in statistics.items() if "running" in name}
    return {"output": output, **named}


@pytest.mark.parametrize("training", [True, False])
def test_loss_output_and_gradients(tmp_path: Path, training: bool) -> None:
    model = Net().train(training)
    path = tmp_path / "gradients.onnx"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export_gradient_graph(model, F.cross_entropy, torch.randn(6, 4), torch.arange(6) % 3, path)
    assert model.training is training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for batch in (6, 3):  # sizes stay open
        x, labels = torch.randn(batch, 4), torch.arange(batch) % 3
        results = run(path, model, x, labels)
        sides = [*perturbed(model), copy.deepcopy(model), copy.deepcopy(model).double()]
        *samples, eager, exact = (step(side, x, labels) for side in sides)
        assert results.keys() == eager.keys()
        results = {name: results[name].reshape(value.shape) for name, value in eager.items()}
        compare_named("gradient graph", results, eager, exact, lambda samples=samples: samples)


def test_a_newer_opset(tmp_path: Path) -> None:
    path = tmp_path / "gradients.onnx"
    export_gradient_graph(Net(), F.cross_entropy, torch.randn(6, 4), torch.arange(6) % 3, path, opset_version=22)
    (opset,) = [o.version for o in onnx.load(path).opset_import if not o.domain]
    assert opset == 22


def test_modules_that_cannot_be_exported(tmp_path: Path) -> None:
    class Decides(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if torch.rand(()) + 1 > 0 else -x

    with pytest.raises(ORTModuleFallbackException, match="data-dependent"):
        export_gradient_graph(Decides(), F.mse_loss, torch.ones(2), torch.ones(2), tmp_path / "x.onnx")
    with pytest.raises(ArtifactError, match="does not depend on 1 of the trainable parameters"):
        export_gradient_graph(Unused(), F.mse_loss, torch.ones(1, 2), torch.ones(1, 2), tmp_path / "x")
    assert not list(tmp_path.iterdir())


class Unused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.detached = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.detached.detach()
