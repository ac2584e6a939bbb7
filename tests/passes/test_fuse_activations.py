"""ReLU after a batch norm, the residual before it and the sum of its gradients are fused into the norm's two ops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager
from tests.reference import assert_matches
from tests.thinned import covering, slow_but_every

Tensor = torch.Tensor
Norm = Callable[[Tensor], Tensor]
Form = Callable[[Norm, Norm, Tensor, Tensor], Tensor]


class Formed(nn.Module):
    """A form applied to two batch norms and two inputs."""

    def __init__(self, form: Form, channels: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.form = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), form
        for norm in (self.first, self.second):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.form(self.first, self.second, x, residual)


def alone(norm, other, x, residual):
    return torch.relu(norm(x.sin())) * residual


def of_a_sum(norm, other, x, residual):
    return torch.relu(norm(x.sin()) + residual)


def residual_first(norm, other, x, residual):
    return torch.relu(residual + norm(x.sin()))


def residual_read_elsewhere(norm, other, x, residual):
    return torch.relu(norm(x) + residual) * residual.cos() * x.cos()


def result_read_twice(norm, other, x, residual):
    y = torch.relu(norm(x) + residual)
    return y * y.cos()


def two_norms(norm, other, x, residual):
    return torch.relu(norm(x) + other(residual))


def blocks(norm, other, x, residual):
    y = torch.relu(norm(x) + residual)
    return torch.relu(other(y.sin()) + y)


def in_place(norm, other, x, residual):
    y = norm(x)
    y += residual
    return torch.relu_(y)


def sum_behind(norm, other, x, residual):
    return torch.relu(norm(x)) + residual


def norm_read_elsewhere(norm, other, x, residual):
    y = norm(x)
    return torch.relu(y) * y * residual


def sum_read_elsewhere(norm, other, x, residual):
    y = norm(x) + residual
    return torch.relu(y) * y


def capped(norm, other, x, residual):
    return nn.functional.relu6(norm(x) + residual)


def broadcast(norm, other, x, residual):
    return torch.relu(norm(x) + residual[:1, :, :1])


# Form, the activations that become part of a norm, the residuals that do
FORMS = [
    (alone, 1, 0),
    (of_a_sum, 1, 1),
    (residual_first, 1, 1),
    (residual_read_elsewhere, 1, 1),
    (result_read_twice, 1, 1),
    (two_norms, 1, 1),
    (blocks, 2, 2),
    (in_place, 1, 1),
    (sum_behind, 1, 0),
    (norm_read_elsewhere, 0, 0),
    (sum_read_elsewhere, 0, 1),
    (capped, 0, 1),
    (broadcast, 0, 0),
]
LIKE_OTHERS = (residual_first, result_read_twice, two_norms, sum_behind)


def results(module: nn.Module, tensors: list[Tensor]) -> dict[str, Tensor]:
    """The output, the moved statistics and all gradients under a random cotangent."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = module(*leaves)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    wanted = dict(module.named_parameters())
    read = torch.autograd.grad(y, [*leaves, *wanted.values()], cotangent, allow_unused=True)
    gradients = {n: g for n, g in zip(["x", "residual", *wanted], read, strict=True) if g is not None}
    moved = {name: b.clone() for name, b in module.named_buffers() if "running" in name}
    return {"y": y.detach(), **gradients, **moved}


def check(form: Form, dtype: torch.dtype, channels: int = 4, channels_last: bool = False, **options: Any) -> ORTModule:
    """Compare with eager PyTorch, at several sizes on one capture."""
    torch.manual_seed(3)
    eager = Formed(form, channels).to(dtype)
    exact = copy.deepcopy(eager).double()
    ours = ORTModule(copy.deepcopy(eager), **options)
    for batch, height, width in ((3, 5, 7), (2, 4, 4), (1, 7, 3)):
        tensors = [torch.randn(batch, channels, height, width).to(dtype) for _ in range(2)]
        if channels_last:
            tensors = [t.contiguous(memory_format=torch.channels_last) for t in tensors]
        by_module = [
            results(m, [t.to(d) for t in tensors]) for m, d in ((ours, dtype), (eager, dtype), (exact, torch.double))
        ]
        assert by_module[0].keys() == by_module[1].keys()
        for name, got in by_module[0].items():
            assert_no_worse_than_eager(
                f"{name} at {batch} x {height} x {width}", got, by_module[1][name], by_module[2][name]
            )
    assert engine_of(ours).captures == 1
    return ours


def norms(ours: nn.Module) -> list[Any]:
    return [n for n in engine_of(ours).newest().parts.forward.nodes if n.op_type == "BatchNormInternal"]


@pytest.mark.parametrize(
    ("form", "activated", "added"),
    [pytest.param(*f, marks=[pytest.mark.slow] if f[0] in LIKE_OTHERS else []) for f in FORMS],
    ids=lambda v: getattr(v, "__name__", ""),
)
@pytest.mark.parametrize("dtype", slow_but_every(2, [torch.float32, torch.float64]))
def test_activations_after_a_norm_become_part_of_it(form: Form, activated: int, added: int, dtype: torch.dtype) -> None:
    norm_nodes = norms(check(form, dtype))
    assert sum("activation" in n.attributes for n in norm_nodes) == activated
    assert sum(len(n.inputs) == 6 and n.inputs[5] is not None for n in norm_nodes) == added


@pytest.mark.parametrize(("native", "form"), covering([True, False], [alone, of_a_sum, result_read_twice, blocks]))
def test_channels_last(native: bool, form: Form) -> None:
    assert len(
        norms(check(form, torch.float32, 16, channels_last=True, kernels="native" if native else "pytorch"))
    ) == 1 + (form is blocks)


def gradient_of_norm(ours: nn.Module) -> Any:
    nodes = engine_of(ours).newest().parts.backward.nodes
    (norm,) = (n for n in nodes if n.op_type == "BatchNormalizationGrad")
    return norm


def three_readers(norm, other, x, residual):
    y = norm(x)
    return y * residual + y.cos() + y.sin()


@pytest.mark.parametrize("form", [result_read_twice, three_readers, norm_read_elsewhere], ids=lambda f: f.__name__)
def test_the_sum_of_two_gradients_is_computed_by_its_reader(form: Form) -> None:
    norm = gradient_of_norm(check(form, torch.float32))
    assert len(norm.inputs) == 7
    assert norm.inputs[6] is not None


def test_a_sum_that_the_residual_reads_too_stays() -> None:
    def form(norm: Norm, other: Norm, x: Tensor, residual: Tensor) -> Tensor:
        y = norm(x) + residual
        return y.sin() * y

    norm = gradient_of_norm(check(form, torch.float32))
    assert len(norm.inputs) < 7 or norm.inputs[6] is None


def test_in_bfloat16() -> None:
    check(of_a_sum, torch.bfloat16)


def test_a_refusal_says_why() -> None:
    report = engine_of(check(norm_read_elsewhere, torch.float32)).newest().report
    (refusal,) = (r for r in report.refused if r.pass_name == "fuse_activations")
    assert "not fused into BatchNormInternal" in refusal.reason
    assert "has other users" in refusal.reason


def test_relu_after_a_checkpoint_stays() -> None:
    """The result of the checkpoint is kept: relu of it alone is not recomputed."""

    def form(norm: nn.BatchNorm2d, other: Norm, x: Tensor, r: Tensor) -> Tensor:
        def plain(x: Tensor) -> Tensor:  # without running statistics: eager moves them twice, when it computes y again
            return nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True)

        return torch.relu(checkpoint(plain, x, use_reentrant=False)) * r

    norm_nodes = norms(check(form, torch.float32))
    assert not any("activation" in n.attributes for n in norm_nodes)


@pytest.mark.parametrize("frozen", ["x", "residual", "norm"])
def test_gradients_that_are_not_needed(frozen: str) -> None:
    torch.manual_seed(0)
    eager = Formed(of_a_sum)
    eager.second.requires_grad_(False)
    eager.first.requires_grad_(frozen != "norm")
    ours = ORTModule(copy.deepcopy(eager))
    tensors = [torch.randn(2, 4, 5, 5, requires_grad=name != frozen) for name in ("x", "residual")]

    def gradients(module: nn.Module, *tensors: Tensor) -> list[Tensor | None]:
        module(*tensors).square().sum().backward()
        return [t.grad for t in (*tensors, *module.parameters())]

    assert_matches(gradients(ours, *tensors), gradients, eager, *tensors)


def test_without_gradients_and_in_eval_mode() -> None:
    torch.manual_seed(0)
    eager = Formed(of_a_sum)
    ours = ORTModule(copy.deepcopy(eager))
    x, residual = torch.randn(2, 2, 4, 5, 5)

    def both(module: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            first = module(x, residual)
        return first, module.eval()(x, residual)

    assert_matches(both(ours, x, residual), both, eager, x, residual)


@pytest.mark.parametrize("residual", [False, True])
def test_in_front_of_a_pool_the_mask_is_the_pools(residual: bool) -> None:
    """Of y, which is larger, backward then reads nothing."""

    def form(norm: Norm, other: Norm, x: Tensor, r: Tensor) -> Tensor:
        y = norm(x) + r if residual else norm(x * r)
        return nn.functional.max_pool2d(torch.relu(y), 2)

    ours = check(form, torch.float32)
    kinds = [n.op_type for n in engine_of(ours).newest().parts.backward.nodes]
    assert kinds.index("ReluGrad") < kinds.index("MaxPoolGrad") < kinds.index("BatchNormalizationGrad")
    norm = gradient_of_norm(ours)
    assert len(norm.inputs) < 6 or norm.inputs[5] is None
