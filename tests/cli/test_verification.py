"""verify(model, batch): correct models pass, and a wrong operator is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import ORTModule
from onnxtrain.capture.capture import Captured
from onnxtrain.errors import ORTModuleFallbackException
from onnxtrain.frontend import verification
from onnxtrain.ops.definition import Call
from onnxtrain.ops.registry import OPS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def wrong_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 1.001


def wrong_gradient(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return dy * (1 - y * y) * 0.99


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(5, 4, requires_grad=True), "labels": torch.tensor([0, 1, 2, 0, -100])}


@pytest.mark.parametrize("wrap", [lambda net: net, ORTModule, onnxtrain.prepare, lambda net: net.eval()])
def test_a_right_model_is_right_and_stays_as_it_was(wrap: Any, capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    wrapped = wrap(net)
    inputs, state = batch(), torch.get_rng_state()
    verdict = onnxtrain.verify(wrapped, inputs)
    assert verdict.is_right
    assert verdict.first is None
    names = {tensor.name for tensor in verdict.tensors}
    assert {"output loss", "output logits", "gradient of first.weight", "gradient of last.bias"} <= names
    assert any(name.startswith("gradient of input") for name in names)
    assert capsys.readouterr().out.startswith(f"right: {len(names)} tensors agree")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_a_tuple_and_a_tensor_are_batches_too() -> None:
    assert onnxtrain.verify(nn.Linear(4, 2), torch.randn(3, 4)).is_right
    assert onnxtrain.verify(nn.Bilinear(4, 3, 2), (torch.randn(3, 4), torch.randn(3, 3))).is_right


def test_a_wrong_operator_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tanh = OPS["", "Tanh"]
    wrong = tuple(
        dataclasses.replace(k, lower=lambda n, x: Call(wrong_tanh, x), in_place_input=None) for k in tanh.kernels
    )
    monkeypatch.setitem(OPS, ("", "Tanh"), dataclasses.replace(tanh, kernels=wrong))
    verdict = onnxtrain.verify(Net(), batch())
    assert not verdict.is_right
    assert verdict.first is not None
    assert (verdict.first.op, verdict.first.value) == ("ai.onnx::Tanh", "tanh")
    assert "test_verification.py" in verdict.first.where
    assert "first difference: ai.onnx::Tanh" in capsys.readouterr().out


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = OPS["com.microsoft", "TanhGrad"]
    wrong = tuple(
        dataclasses.replace(k, lower=lambda n, dy, y: Call(wrong_gradient, dy, y), in_place_input=None)
        for k in grad.kernels
    )
    monkeypatch.setitem(OPS, ("com.microsoft", "TanhGrad"), dataclasses.replace(grad, kernels=wrong))
    verdict = onnxtrain.verify(Net(), batch())
    assert {t.name for t in verdict.tensors if not t.is_right} >= {"gradient of first.weight"}
    assert not any(t.name.startswith("output") for t in verdict.tensors if not t.is_right)
    assert verdict.first is not None
    assert verdict.first.op == "com.microsoft::TanhGrad"


def test_a_module_that_cannot_be_captured_is_an_error() -> None:
    class Decides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if torch.rand(()) + 1 > 0 else x

    with pytest.raises(ORTModuleFallbackException):
        onnxtrain.verify(Decides(), torch.randn(3))


def test_the_first_difference_is_found_among_omitted_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that is compared operator by operator has all blocks."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(13)))
    captured: list[Captured] = []
    first_operator = verification._first_operator

    def observed(graph: Captured, *arguments: Any) -> Any:
        captured.append(graph)
        return first_operator(graph, *arguments)

    monkeypatch.setattr(verification, "_first_operator", observed)
    monkeypatch.setattr(verification.Verdict, "is_right", property(lambda _: False))
    onnxtrain.verify(model, torch.randn(3, 8))
    assert [graph.omitted for graph in captured] == [()]
