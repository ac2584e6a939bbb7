"""FusedAdam against PyTorch's optimizers and against its modes written out; states; clipping; foreign input."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onnxtrain.optim import AdamWMode, FusedAdam, fused_adam
from onnxtrain.testing import assert_no_worse_than_eager

TORCH, TRANSFORMERS, L2 = AdamWMode.ADAMW_TORCH, AdamWMode.ADAMW_TRANSFORMERS, AdamWMode.ADAM_L2_REGULARIZATION
SIZES = ((7, 5), (1,), (0, 3), (), (33,))
SETTINGS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(size, dtype=dtype, device=device)) for size in SIZES]


def train(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 5, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()


def pair(dtype: torch.dtype, device: str) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    ours = parameters(dtype, device)
    return ours, copy.deepcopy(ours)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mode", "theirs"), [(TORCH, torch.optim.AdamW), (L2, torch.optim.Adam)])
def test_is_pytorchs_fused_optimizer_bit_for_bit(
    mode: AdamWMode, theirs: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, device: str
) -> None:
    ours, expected = pair(dtype, device)
    train(ours, FusedAdam(ours, adam_w_mode=mode, **SETTINGS))
    train(expected, theirs(expected, fused=True, **SETTINGS))
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("mode", AdamWMode)
def test_kernels_get_the_number_of_steps_in_float32(
    mode: AdamWMode, correct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA kernel reads the memory as float32, whatever its dtype."""
    dtypes = set()

    def noting(kernel: Callable[..., None]) -> Callable[..., None]:
        def noted(*arguments: Any, **options: Any) -> None:
            dtypes.update(t.dtype for t in arguments[5])
            kernel(*arguments, **options)

        return noted

    for name in ("fused_adam", "fused_adamw"):
        monkeypatch.setattr(fused_adam, name, noting(getattr(fused_adam, name)))
    ours = parameters(torch.float64)
    optimizer = FusedAdam(ours, adam_w_mode=mode, bias_correction=correct, **SETTINGS)
    train(ours, optimizer, steps=2)
    scaled_steps(optimizer, ours, (False, False))
    assert dtypes == {torch.float32}


def written_out(p: torch.Tensor, grads: list[torch.Tensor], mode: AdamWMode, correct: bool) -> torch.Tensor:
    """The modes as formulas, in float64."""
    lr, (beta1, beta2), eps, decay = (SETTINGS[name] for name in ("lr", "betas", "eps", "weight_decay"))
    p, m, v = p.double(), torch.zeros_like(p, dtype=torch.float64), torch.zeros_like(p, dtype=torch.float64)
    for step, gradient in enumerate(grads, 1):
        g = gradient.double()
        if mode is L2:
            g = g + decay * p
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        first, second = (1 - beta1**step, 1 - beta2**step) if correct else (1.0, 1.0)
        if mode is TRANSFORMERS:
            p = p - lr * math.sqrt(second) / first * m / (v.sqrt() + eps)
            p = p - lr * decay * p
        else:
            if mode is TORCH:
                p = p - lr * decay * p
            p = p - lr * (m / first) / ((v / second).sqrt() + eps)
    return p


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("mode", AdamWMode)
@pytest.mark.parametrize("eps", [1e-5, 0.1])  # the modes differ in where it stands
def test_every_mode_is_its_formula(
    mode: AdamWMode, correct: bool, eps: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "eps", eps)
    ours = parameters(torch.float64, device)
    start = [p.detach().clone() for p in ours]
    optimizer = FusedAdam(ours, adam_w_mode=mode, bias_correction=correct, **SETTINGS)
    grads: list[list[torch.Tensor]] = [[] for _ in ours]
    for _ in range(4):
        for p, given in zip(ours, grads, strict=True):
            p.grad = torch.randn_like(p)
            given.append(p.grad.clone())
        optimizer.step()
    for p, before, given in zip(ours, start, grads, strict=True):
        expected = written_out(before, given, mode, correct)
        assert_no_worse_than_eager("parameter", p.detach(), expected, expected)


def test_all_of_the_weight_may_decay() -> None:
    ours = parameters()
    optimizer = FusedAdam(ours, lr=0.5, weight_decay=2.0)
    train(ours, optimizer, steps=1)
    assert all(not p.any() for p in ours)
    assert all(optimizer.state[p]["exp_avg"].any() for p in ours if p.numel())


def test_its_defaults_and_state_keys_are_ort_trainings() -> None:
    ours = parameters()
    optimizer = FusedAdam(ours)
    train(ours, optimizer, steps=3)
    (group,) = optimizer.param_groups
    assert group["step"] == 3
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-6, 0.0)
    assert {frozenset(state) for state in optimizer.state.values()} == {frozenset({"exp_avg", "exp_avg_sq"})}


@pytest.mark.parametrize("mode", AdamWMode)
def test_training_resumes_from_a_saved_state(mode: AdamWMode) -> None:
    ours = parameters()
    optimizer = FusedAdam(ours, adam_w_mode=mode, **SETTINGS)
    train(ours, optimizer)
    resumed = copy.deepcopy(ours)
    other = FusedAdam(resumed, adam_w_mode=mode)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(ours, optimizer, seed=2)
    train(resumed, other, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(ours, resumed, strict=True))


def test_a_state_of_pytorchs_adamw_is_taken() -> None:
    ours, theirs = pair(torch.float32, "cpu")
    before = torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    train(theirs, before)
    ours = copy.deepcopy(theirs)
    optimizer = FusedAdam(ours, adam_w_mode=TORCH)
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    assert optimizer.param_groups[0]["step"] == 5
    train(ours, optimizer, seed=2)
    train(theirs, before, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_state_with_unequal_steps_is_refused() -> None:
    theirs = parameters()
    before = torch.optim.AdamW(theirs)
    train(theirs[:2], before, steps=1)
    theirs[0].grad = None
    theirs[1].grad = torch.ones(1)
    before.step()
    with pytest.raises(ValueError, match=r"different numbers of steps, \[1.0, 2.0\]"):
        FusedAdam(theirs).load_state_dict(before.state_dict())


def test_groups_have_settings_of_their_own() -> None:
    ours, expected = pair(torch.float32, "cpu")
    split = [{"weight_decay": 0.0}, {"lr": 1e-3}]
    groups = [
        [{"params": parameters[:2], **split[0]}, {"params": parameters[2:], **split[1]}]
        for parameters in (ours, expected)
    ]
    train(ours, FusedAdam(groups[0], adam_w_mode=TORCH, **SETTINGS))
    train(expected, torch.optim.AdamW(groups[1], fused=True, **SETTINGS))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_schedulers_of_pytorch_drive_it() -> None:
    ours = parameters()
    optimizer = FusedAdam(ours, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(ours, optimizer, steps=1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_mixed_types_and_missing_gradients() -> None:
    ours = [*parameters(torch.float16), *parameters(torch.float32)]
    expected = copy.deepcopy(ours)
    optimizer, theirs = FusedAdam(ours, adam_w_mode=TORCH), torch.optim.AdamW(expected, fused=True, eps=1e-6)
    theirs.param_groups[0]["weight_decay"] = 0.0
    for params, each in ((ours, optimizer), (expected, theirs)):
        for p in params[2:]:
            p.grad = torch.ones_like(p)
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert ours[0] not in optimizer.state


# Clipping


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clips_to_the_global_norm_inside_the_kernel(limit: float, device: str) -> None:
    ours, expected = pair(torch.float64, device)
    optimizer = FusedAdam(ours, adam_w_mode=TORCH, max_grad_norm=limit, **SETTINGS)
    theirs = torch.optim.AdamW(expected, fused=True, **SETTINGS)
    for _ in range(3):
        for a, b in zip(ours, expected, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        norm = torch.nn.utils.get_total_norm([b.grad for b in expected])
        for b in expected:
            b.grad /= (norm / limit).clamp(min=1.0)  # clip_grad_norm_ adds 1e-6
        optimizer.step()
        theirs.step()
        assert optimizer.grad_norm is not None
        assert_no_worse_than_eager("norm", optimizer.grad_norm, norm, norm)
    for a, b in zip(ours, expected, strict=True):
        assert_no_worse_than_eager("parameter", a.detach(), b.detach(), b.detach())


@pytest.mark.parametrize("size", [300.0, 60_000.0])  # their squares are beyond float16; the second's norm is too
def test_the_norm_of_half_gradients_does_not_overflow(size: float) -> None:
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = FusedAdam([p], max_grad_norm=1.0)
    p.grad = torch.full((4,), size, dtype=torch.float16)
    optimizer.step()
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm.item() == 2 * size


# Under a GradScaler


def scaled_steps(
    optimizer: torch.optim.Optimizer,
    ours: Sequence[torch.nn.Parameter],
    bad: Sequence[bool],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[list[torch.Tensor]]:
    """Train under a GradScaler, `scaler.step` in a context; returns the gradients of the steps that do not overflow."""
    device = ours[0].device
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.zeros((), device=device))
    given = []
    for overflows in bad:
        plain = [torch.randn_like(p) for p in ours]
        for p, gradient in zip(ours, plain, strict=True):
            p.grad = gradient * scaler.get_scale()
        if overflows:
            ours[0].grad[0, 0] = math.inf
        else:
            given.append(plain)
        with context():
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 1024 / 2 ** sum(bad)
    return given


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("mode", [TORCH, L2])
def test_grad_scaler_unscales_inside_the_kernel_and_skips_overflows(
    mode: AdamWMode, limit: float | None, device: str
) -> None:
    ours, plain = pair(torch.float32, device)
    exact = [torch.nn.Parameter(p.detach().double()) for p in ours]
    optimizer = FusedAdam(ours, adam_w_mode=mode, max_grad_norm=limit, **SETTINGS)
    steps = scaled_steps(optimizer, ours, (False, True, False, True))
    assert optimizer.param_groups[0]["step"] == 2
    for params in (plain, exact):
        other = FusedAdam(params, adam_w_mode=mode, max_grad_norm=limit, **SETTINGS)
        for given in steps:
            for p, gradient in zip(params, given, strict=True):
                p.grad = gradient.to(p, copy=True)
            other.step()
    for got, eager, expected in zip(ours, plain, exact, strict=True):
        assert_no_worse_than_eager("parameter", got.detach(), eager.detach(), expected.detach())
    # Powers of two scale exactly. On a GPU, the compiler contracts the kernel without a scale otherwise.
    assert device != "cpu" or all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("mode", AdamWMode)
def test_every_mode_is_its_formula_under_a_grad_scaler(
    mode: AdamWMode, correct: bool, dtype: torch.dtype, device: str
) -> None:
    ours = parameters(dtype, device)
    start = [p.detach().clone() for p in ours]
    optimizer = FusedAdam(ours, adam_w_mode=mode, bias_correction=correct, **SETTINGS)
    steps = scaled_steps(optimizer, ours, (True, False, False, True, False))
    eager = [p.clone() for p in start]
    plain = FusedAdam(eager, adam_w_mode=mode, bias_correction=correct, **SETTINGS)
    for given in steps:
        for p, gradient in zip(eager, given, strict=True):
            p.grad = gradient.clone()
        plain.step()
    for p, before, given, other in zip(ours, start, zip(*steps, strict=True), eager, strict=True):
        expected = written_out(before, list(given), mode, correct)
        assert_no_worse_than_eager("parameter", p.detach(), other, expected)


def test_all_of_the_weight_may_decay_under_a_grad_scaler() -> None:
    ours = parameters()
    optimizer = FusedAdam(ours, lr=0.5, weight_decay=2.0)
    scaled_steps(optimizer, ours, (True,))
    assert all(p.any() for p in ours if p.numel())
    scaled_steps(optimizer, ours, (False,))
    assert all(not p.any() for p in ours)


class NoReads(TorchDispatchMode):
    """Refuses to read an element of a tensor on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waits() -> Iterator[None]:
    """Refuse to wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("device", "context"), [("cpu", NoReads), pytest.param("cuda", no_waits, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("mode", AdamWMode)
def test_the_host_does_not_read_from_the_device(
    mode: AdamWMode, limit: float | None, device: str, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    ours = parameters(device=device)
    optimizer = FusedAdam(ours, adam_w_mode=mode, max_grad_norm=limit, **SETTINGS)
    scaled_steps(optimizer, ours, (False, True, False), context)
    assert isinstance(optimizer.param_groups[0]["step"], torch.Tensor)
    optimizer.step()  # without the scaler: the host reads the number of steps once
    with context():
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 4


def test_the_host_reads_for_other_dtypes_in_one_mode_only() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        for mode in AdamWMode:
            ours = parameters(dtype)
            optimizer = FusedAdam(ours, adam_w_mode=mode, max_grad_norm=0.5, **SETTINGS)
            with pytest.raises(AssertionError) if mode is TRANSFORMERS else nullcontext():
                scaled_steps(optimizer, ours, (False, True), NoReads)


@pytest.mark.parametrize("mode", AdamWMode)
def test_a_state_saved_under_a_grad_scaler_counts_on_the_host(mode: AdamWMode) -> None:
    ours = parameters()
    optimizer = FusedAdam(ours, adam_w_mode=mode, **SETTINGS)
    scaled_steps(optimizer, ours, (False, True, False))
    saved = optimizer.state_dict()
    assert type(saved["param_groups"][0]["step"]) is int
    resumed = copy.deepcopy(ours)
    other = FusedAdam(resumed, adam_w_mode=mode)
    other.load_state_dict(copy.deepcopy(saved))
    train(ours, optimizer, seed=2)
    train(resumed, other, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(ours, resumed, strict=True))


def test_overflows_of_several_devices_are_one() -> None:
    """GradScaler adds up a tensor for each device; the kernel skips at 1."""
    ours = parameters()
    before = [p.detach().clone() for p in ours]
    optimizer = FusedAdam(ours, adam_w_mode=TORCH)
    optimizer.found_inf = torch.tensor(2.0)
    train(ours, optimizer, steps=1)
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    assert optimizer.param_groups[0]["step"] == 0


# Foreign input


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    for limit in (None, 1.0):
        with pytest.raises(RuntimeError, match="sparse"):
            FusedAdam(embedding.parameters(), max_grad_norm=limit).step()


def test_complex_parameters_are_refused() -> None:
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"floating-point dtype, got torch\.complex64"):
        FusedAdam([p]).step()


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1}, {"eps": -1}, {"betas": (1.0, 0.9)}, {"betas": (0.9,)}, {"weight_decay": -1}, {"max_grad_norm": 0}],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        FusedAdam(parameters(), **wrong)


@pytest.mark.parametrize(
    ("set_grad_none", "argument", "dropped"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_zero_grad(set_grad_none: bool, argument: bool, dropped: bool) -> None:
    ours = parameters()
    optimizer = FusedAdam(ours, set_grad_none=set_grad_none)
    train(ours, optimizer, steps=1)
    optimizer.zero_grad(argument)
    assert all((p.grad is None) is dropped for p in ours)
    assert dropped or all(not p.grad.any() for p in ours)


def test_a_closure_computes_the_gradients() -> None:
    p = torch.nn.Parameter(torch.ones(3))

    def loss() -> torch.Tensor:
        value = (p * p).sum()
        value.backward()
        return value

    assert FusedAdam([p], lr=0.1).step(loss).item() == 3
    assert (p < 1).all()
