"""The Triton kernel of cross entropy is used only if it computes what PyTorch's operators do."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.ops import native_kernels
from onnxtrain.ops.loss import linear_cross_entropy, row_losses
from onnxtrain.ops.loss.row_losses import rows_by_pytorch, rows_by_triton

Tensor = torch.Tensor
CLASSES, PADDING = 7, 2


def arguments() -> tuple[Tensor, int, Tensor, Tensor, torch.dtype]:
    torch.manual_seed(0)
    logits, labels = torch.randn(3, CLASSES + PADDING), torch.tensor([6, 0, 3])
    return logits, CLASSES, labels, torch.tensor([0.5, 0.0, -1.0]), torch.float32


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[int]]:
    """Replace the kernel; returns a list to which each of its calls adds an element."""
    monkeypatch.setattr(row_losses, "_agrees", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def replace(function: Any) -> list[int]:
        calls: list[int] = []

        def run(*args: Any) -> Any:
            calls.append(1)
            return function(*args)

        monkeypatch.setattr(row_losses, "run_kernel", run)
        return calls

    return replace


def right(logits: Tensor, classes: int, labels: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return rows_by_pytorch(logits, classes, labels, factors, torch.float32)


def wrong_losses(*args: Any) -> tuple[Tensor, Tensor | None]:
    losses, gradients = right(*args)
    return losses * 1.01, gradients


def wrong_gradients(*args: Any) -> tuple[Tensor, Tensor | None]:
    losses, gradients = right(*args)
    assert gradients is not None
    return losses, gradients.roll(1, 1)


def fails(*args: Any) -> Any:
    raise RuntimeError("no compiler")


def test_a_kernel_that_agrees_is_used(kernel: Callable[[Any], list[int]]) -> None:
    """It is compared once."""
    calls = kernel(right)
    for count in (2, 3):
        logits, *others = arguments()
        losses, gradients = rows_by_triton(logits, *others)
        assert len(calls) == count
        expected_losses, expected_gradients = rows_by_pytorch(*arguments())
        assert torch.equal(losses, expected_losses)
        assert torch.equal(gradients, expected_gradients)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "reason"),
    [(wrong_losses, "losses differ"), (wrong_gradients, "gradients differ"), (fails, "no compiler")],
)
def test_another_kernel_is_not_used(
    kernel: Callable[[Any], list[int]], function: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning gives the reason once."""
    calls = kernel(function)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            losses, gradients = rows_by_triton(*arguments())
            expected_losses, expected_gradients = rows_by_pytorch(*arguments())
            assert torch.equal(losses, expected_losses)
            assert torch.equal(gradients, expected_gradients)  # type: ignore[arg-type]
    assert len(calls) == 1
    assert len([r for r in caplog.records if reason in r.getMessage()]) == 1


def test_a_kernel_is_compared_for_each_kind_of_call(kernel: Callable[[Any], list[int]]) -> None:
    calls = kernel(right)
    logits, classes, labels, factors, dtype = arguments()
    rows_by_triton(logits.clone(), classes, labels, factors, dtype)
    rows_by_triton(logits.clone(), classes, labels, None, dtype)
    rows_by_triton(logits.bfloat16(), classes, labels, factors, dtype)
    assert len(calls) == 6


def test_no_rows_run_no_kernel(kernel: Callable[[Any], list[int]]) -> None:
    calls = kernel(fails)
    losses, _ = rows_by_triton(torch.empty(0, 7), 7, torch.empty(0, dtype=torch.int64), None, torch.float32)
    assert losses.shape == (0,)
    assert not calls


def test_nothing_is_compared_while_a_graph_is_recorded(
    kernel: Callable[[Any], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host could not wait for the comparison."""
    calls = kernel(right)
    with monkeypatch.context() as recording:
        recording.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        rows_by_triton(*arguments())
        assert not calls
    rows_by_triton(*arguments())
    assert len(calls) == 2


class Head(nn.Module):
    """A vocabulary of 40 classes, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 40)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.score(x), labels)


@pytest.mark.parametrize("kernels", ["native", "pytorch"])
def test_a_module_runs_the_kernel_if_native_kernels_are_on(
    kernel: Callable[[Any], list[int]], monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """As if the CPU were a GPU."""
    monkeypatch.setattr(importlib.import_module("onnxtrain.passes.chunk_losses"), "MIN_CLASSES", 40)
    monkeypatch.setattr(linear_cross_entropy, "may_run_triton", lambda n, device: native_kernels.may_compile(n, "cpu"))
    calls = kernel(right)
    torch.manual_seed(0)
    head, x, labels = Head(), torch.randn(5, 8), torch.tensor([3, 39, -100, 0, 3])
    eager = torch.autograd.grad(head(x, labels), list(head.parameters()))
    loss = ORTModule(head, kernels=kernels)(x, labels)
    gradients = torch.autograd.grad(loss, list(head.parameters()))
    torch.testing.assert_close(gradients, eager)
    assert bool(calls) == (kernels == "native")


def test_triton_runs_on_a_gpu_if_native_kernels_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_kernels, "_has_triton", lambda: True)
    notes = [{native_kernels.NOTE: "triton"}, {native_kernels.NOTE: "on"}, {}]
    nodes: list[Any] = [SimpleNamespace(node=SimpleNamespace(metadata_props=note)) for note in notes]
    assert [native_kernels.may_run_triton(node, "cuda") for node in nodes] == [True, False, False]
    assert [native_kernels.may_run_triton(node, "cpu") for node in nodes] == [False] * 3
    assert [native_kernels.may_compile(node, "cpu") for node in nodes] == [False, True, False]
