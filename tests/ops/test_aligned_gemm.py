"""Padding of vocabularies that are not aligned, a kernel for GPUs, run on the CPU: the same results."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.loss.linear_cross_entropy import PADDED
from onnxtrain.ops.matmul import aligned
from onnxtrain.testing import assert_no_worse_than_eager
from tests.reference import assert_matches
from tests.thinned import covering

NARROW = [torch.bfloat16, torch.float16]
WIDTH, CLASSES = 8, 13


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs on the CPU too, and for a vocabulary of 13."""
    monkeypatch.setattr(aligned, "DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(aligned, "_MIN_PADDED_DIM", CLASSES)
    monkeypatch.setattr(aligned, "_MIN_OTHER_DIM", WIDTH)
    monkeypatch.setattr(sys.modules["onnxtrain.passes.chunk_losses"], "MIN_CLASSES", CLASSES)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_padded_matmuls_equal_pytorchs(dtype: torch.dtype, rows: int) -> None:
    x, w, dy = torch.randn(rows, WIDTH), torch.randn(CLASSES, WIDTH), torch.randn(rows, CLASSES)
    x, w, dy, bias = (t.to(dtype) for t in (x, w, dy, torch.randn(CLASSES)))
    extra = 64 - CLASSES
    cases: list[tuple[Any, Any, Any, tuple[int, int, int]]] = [
        (x, w.t(), None, (0, 0, extra)),
        (x, w.t().contiguous(), bias, (0, 0, extra)),
        (x.expand(2, rows, WIDTH).transpose(0, 1), w.t(), bias, (0, 0, extra)),
        (dy, w, None, (0, extra, 0)),
        (dy.t(), x, None, (extra, 0, 0)),
        (x.t(), dy, None, (0, 0, extra)),
    ]
    for a, b, c, padding in cases:
        output = aligned.padded_gemm(a, b, c, *padding)
        assert output.is_contiguous()
        eager, exact = (
            torch.matmul(p, q) if r is None else torch.nn.functional.linear(p, q.t(), r)
            for p, q, r in ((a, b, c), (a.double(), b.double(), None if c is None else c.double()))
        )
        if output.numel():
            assert_no_worse_than_eager(f"{padding}", output, eager, exact)
        assert output.shape == eager.shape


def test_only_unaligned_vocabularies_are_padded() -> None:
    assert [aligned.missing(size) for size in (50257, 30522, 32000, 4096, 100, "n")] == [47, 6, 0, 0, 0, 0]


class Head(torch.nn.Module):
    """Logits over a vocabulary, and their loss."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.mix(x)))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = torch.nn.functional.cross_entropy(wide.flatten(0, -2), labels.flatten())
        return {"loss": loss, "logits": logits}


def step(model: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor, both: bool) -> list[torch.Tensor]:
    """The loss, perhaps the logits, and the gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    results = model(x, labels)
    results["loss"].backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    return [t.detach() for t in (results["loss"], *([results["logits"]] if both else ()), *gradients) if t is not None]


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize(("bias", "dtype"), covering([False, True], NARROW), ids=str)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_padded_vocabulary_changes_no_result(bias: bool, dtype: torch.dtype, chunked: bool) -> None:
    torch.manual_seed(0)
    model = Head(bias).to(dtype)
    wrapped = ORTModule(
        model, fallback_policy="FALLBACK_DISABLE", **({"keep_outputs": ("loss",)} if chunked else {"rng": "torch"})
    )
    for shape in ((3, 5), (1, 1), (2, 7)):
        x, labels = torch.randn(*shape, WIDTH).to(dtype), torch.randint(0, CLASSES, shape)
        labels[0, 0] = CLASSES - 1
        if shape[1] > 1:
            labels[-1, -1] = -100
        results = step(wrapped, x, labels, not chunked)
        assert_matches(results, functools.partial(step, labels=labels, both=not chunked), model, x)
    unit = engine_of(wrapped).newest().unit
    programs = [unit.forward, *(backward.program for backward in unit._backwards.values())]
    assert any(value is PADDED for program in programs for value in program.namespace.values()) is chunked
    calls = sum(program.source.count("padded_gemm(") for program in programs)
    assert calls == 0 if chunked else calls >= 3
