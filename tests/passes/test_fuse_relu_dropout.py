"""ReLU followed by dropout is one op, which saves only its result; it equals PyTorch under the same masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager
from tests.ops.captures import FunctionModule
from tests.passes.test_fuse_gated_activations import backward_kinds, kinds
from tests.passes.test_fuse_sums import SIZES, Form, P, gradients, keyed, results
from tests.reference import assert_matches
from tests.thinned import covering

Tensor = torch.Tensor


def alone(drop, x, other):
    return drop(torch.relu(x.sin())) * other


def of_an_input(drop, x, other):
    return drop(torch.relu(x)) + other.cos() * other


def twice(drop, x, other):
    return drop(torch.relu(drop(torch.relu(x * other))))


def of_a_view(drop, x, other):
    return drop(torch.relu((x * other).transpose(0, 1))).exp()


ONE_OP: tuple[Form, ...] = (alone, of_an_input, twice, of_a_view)


def relu_read_elsewhere(drop, x, other):
    y = torch.relu(x * other)
    return drop(y) * y


def with_residual(drop, x, other):
    return other + drop(torch.relu(x))


def dropout_first(drop, x, other):
    return torch.relu(drop(x * other))


def other_activation(drop, x, other):
    return drop(F.gelu(x)) * other


STAYS: tuple[Form, ...] = (relu_read_elsewhere, with_residual, dropout_first, other_activation)


def check(form: Form, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Compare with PyTorch under the same masks, at all sizes, on one capture."""
    ours = ORTModule(FunctionModule(lambda x, other: form(lambda t: F.dropout(t, P), x, other)), **options)
    eager = FunctionModule(lambda x, other: form(keyed, x, other))
    for sizes in SIZES:
        tensors = [torch.randn(sizes["b"], sizes["s"], 6).to(dtype) for _ in range(2)]
        triples = results(ours, tensors, dtype), results(eager, tensors, dtype), results(eager, tensors, torch.float64)
        for name, got, theirs, exact in zip(("y", "dx", "dother"), *triples, strict=True):
            assert_no_worse_than_eager(f"{name} at {sizes}", got, theirs, exact)
    assert engine_of(ours).captures == 1
    return ours


@pytest.mark.parametrize(
    ("form", "dtype", "native"),
    covering(ONE_OP, [torch.float32, torch.float64, torch.bfloat16], [True, False]),
    ids=lambda v: v.__name__ if callable(v) else str(v),
)
def test_they_are_one_op(form: Form, dtype: torch.dtype, native: bool) -> None:
    ours = check(form, dtype, kernels="native" if native else "pytorch")
    count = 1 + (form is twice)
    assert kinds(ours).count("ReluDropout") == count
    assert backward_kinds(ours).count("ReluDropoutGrad") == count
    assert not {"Relu", "KeyedDropout"} & {*kinds(ours)}
    assert not {"ReluGrad", "KeyedDropout", "ReluDropout"} & {*backward_kinds(ours)}


@pytest.mark.parametrize("form", STAYS, ids=lambda f: f.__name__)
def test_similar_subgraphs_are_not_fused(form: Form) -> None:
    ours = check(form, torch.float32)
    assert "ReluDropout" not in kinds(ours)
    refused = [r for r in engine_of(ours).newest().report.refused if r.pass_name == "fuse_relu_dropout"]
    assert len(refused) == (form is relu_read_elsewhere)


def test_a_relu_outside_of_the_models_checkpoint_stays() -> None:
    def form(x: Tensor, other: Tensor) -> Tensor:
        return checkpoint(F.dropout, torch.relu(x * other), P, use_reentrant=False).exp()  # type: ignore[no-any-return]

    ours = ORTModule(FunctionModule(form))
    x, other = (torch.randn(4, 6, requires_grad=True) for _ in range(2))

    def differentiated(run: Callable[..., Tensor], x: Tensor, other: Tensor) -> list[Tensor]:
        torch.manual_seed(1)
        y = run(x, other)
        return [y, *torch.autograd.grad(y.sum(), (x, other))]

    results = differentiated(ours, x, other)
    assert_matches(results, differentiated, lambda x, other: keyed(torch.relu(x * other)).exp(), x, other)
    assert "ReluDropout" not in kinds(ours)


class FeedForward(nn.Module):
    """Layers of T5 and of nn.TransformerEncoderLayer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(16, 64) for _ in range(3))
        self.narrow = nn.ModuleList(nn.Linear(64, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = x + narrow(F.dropout(torch.relu(wide(x)), P, self.training))
        return x.square().mean()


def test_a_layer_keeps_one_tensor_and_writes_over_the_product() -> None:
    torch.manual_seed(0)
    layers = FeedForward()
    ours, apart = (
        ORTModule(layers, kernels="pytorch", disabled_passes=names) for names in ((), ("fuse_relu_dropout",))
    )
    for rows in (9, 64):
        assert all(map(torch.equal, *(gradients(module, rows) for module in (ours, apart))))
    source = engine_of(ours).newest().unit.forward.source
    assert source.count(" relu_drop_(linear") == 3, source
    assert not {"ReluDropout", "KeyedDropout", "DropoutKey"} & {*backward_kinds(ours)}, "backward samples again"


def test_a_budget_computes_it_again() -> None:
    torch.manual_seed(0)
    layers = FeedForward()
    plain, least = (ORTModule(layers, kernels="pytorch", memory_budget_bytes=budget) for budget in (None, 0.7))
    for rows in (256, 33):
        assert all(map(torch.equal, *(gradients(module, rows) for module in (plain, least))))
    assert "ReluDropout" in backward_kinds(least)
    assert "ReluDropout" not in backward_kinds(plain)


def test_evaluation_has_no_dropout() -> None:
    layers = FeedForward().eval()
    x = torch.randn(5, 16)
    assert_matches(ORTModule(layers)(x), layers, x)
