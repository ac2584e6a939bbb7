"""FP16_Optimizer on stand-ins with the interface of each library's optimizer; on DeepSpeed where it is installed."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from onnxtrain.optim import FP16_Optimizer, FusedAdam, gradients
from onnxtrain.optim.fp16 import deepspeed as of_deepspeed
from onnxtrain.testing import assert_no_worse_than_eager
from tests.optim import library_stand_ins as stand_ins
from tests.reference import assert_matches_float64


def of_class(full_name: str, **members: Any) -> Any:
    module, name = full_name.rsplit(".", 1)
    return type(name, (), {"__module__": module, **members})()


def with_gradients(*values: list[float]) -> list[Parameter]:
    parameters = []
    for given in values:
        p = Parameter(torch.zeros(len(given)))
        p.grad = torch.tensor(given)
        parameters.append(p)
    return parameters


def test_others_stay_as_they_are_with_a_warning() -> None:
    optimizer = torch.optim.SGD([Parameter(torch.zeros(1))])
    methods = dict(vars(optimizer))
    with pytest.warns(UserWarning, match=r"does not change torch\.optim\.sgd\.SGD: expected one of megatron"):
        assert FP16_Optimizer(optimizer) is optimizer
    assert vars(optimizer) == methods


# One call over all gradients


@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_finds_every_kind_of_overflow(bad: float | None, dtype: torch.dtype) -> None:
    grads = [torch.randn(5, dtype=dtype), torch.randn(3, 4), torch.randn(0), torch.randn(4, 3).t()]
    if bad is not None:
        grads[0][3] = bad
    before = [each.clone() for each in grads]
    assert gradients.found_non_finite(grads).tolist() == [float(bad is not None)]
    for a, b in zip(grads, before, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_the_norm_of_mixed_gradients() -> None:
    grads = [torch.full((4,), 3.0, dtype=torch.bfloat16), torch.full((2,), 4.0, dtype=torch.float64), torch.zeros(0)]
    exact = torch.tensor(4 * 9 + 2 * 16, dtype=torch.float64).sqrt()
    assert_no_worse_than_eager("norm", gradients.norm(grads), exact, exact)
    assert gradients.norm([]).item() == 0


# Megatron-LM

MEGATRON = "megatron.fp16.fp16.FP16_Optimizer"
PARALLEL = {"get_tensor_model_parallel_rank": lambda: 0, "get_tensor_model_parallel_group": lambda: None}


def megatron(halves: list[Parameter], full: list[Parameter]) -> Any:
    optimizer = of_class(MEGATRON, _check_overflow=None, clip_master_grads=None)
    optimizer.fp16_groups, optimizer.fp32_from_fp32_groups = [halves], [[]]
    optimizer.optimizer, optimizer.overflow = SimpleNamespace(param_groups=[{"params": full}]), False
    return optimizer


@pytest.mark.parametrize("old_names", [False, True])
def test_megatron(old_names: bool) -> None:
    halves, full = with_gradients([1.0], [math.inf]), with_gradients([3.0, 0.0], [0.0, 4.0])
    names = {k.replace("tensor", "horizontal"): v for k, v in PARALLEL.items()} if old_names else PARALLEL
    optimizer = FP16_Optimizer(megatron(halves, full), **names)
    optimizer._check_overflow()
    assert optimizer.overflow is True
    assert optimizer.clip_master_grads(1.0) == -1
    halves[1].grad.fill_(1.0)
    optimizer._check_overflow()
    assert optimizer.overflow is False
    assert optimizer.clip_master_grads(10.0) == 5
    assert full[1].grad.tolist() == [0, 4]
    assert optimizer.clip_master_grads(1.0) == 5
    assert_matches_float64(full[1].grad, np.array([0, 4 / (5 + 1e-6)]))  # as Megatron-LM clips


@pytest.mark.parametrize(("order", "expected"), [(1, 7.0), (3, 91 ** (1 / 3)), (math.inf, 4.0)])
def test_megatrons_other_norms(order: float, expected: float) -> None:
    optimizer = FP16_Optimizer(megatron([], with_gradients([3.0], [-4.0])), **PARALLEL)
    assert_matches_float64(optimizer.clip_master_grads(100.0, order), np.float64(expected))


def test_megatron_counts_replicated_parameters_once() -> None:
    full = with_gradients([3.0], [4.0])
    full[1].model_parallel = True
    optimizer = FP16_Optimizer(megatron([], full), **{**PARALLEL, "get_tensor_model_parallel_rank": lambda: 1})
    assert optimizer.clip_master_grads(100.0) == 4


def test_megatron_needs_to_know_its_ranks() -> None:
    with pytest.warns(UserWarning, match="expected the arguments get_tensor_model_parallel_rank"):
        FP16_Optimizer(megatron([], []))
    with pytest.warns(UserWarning, match="lacks _check_overflow"):
        FP16_Optimizer(of_class(MEGATRON), **PARALLEL)


# Apex


def apex(halves: list[Parameter], full: list[Parameter], own: list[Parameter]) -> tuple[Any, Any]:
    calls: list[str] = []
    optimizer = of_class(
        "apex.optimizers.FusedAdam",
        _post_amp_backward=lambda self, scaler: calls.append("original"),
        _prepare_amp_backward=None,
        _amp_lazy_init=lambda self: None,
        zero_grad=lambda self: calls.append("zero"),
    )
    optimizer.calls = calls
    optimizer._amp_stash = SimpleNamespace(
        all_fp16_params=halves,
        all_fp32_from_fp16_params=full,
        all_fp32_from_fp32_params=own,
        all_fp32_from_fp32_grad_stash=[None] * len(own),
    )
    scaler = SimpleNamespace(loss_scale=lambda: 4.0, _overflow_buf=torch.zeros(1, dtype=torch.int32))
    return optimizer, scaler


def test_apex_unscales_accumulates_and_reports_overflow() -> None:
    halves = [Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(3)]
    full, own = [Parameter(p.detach().float()) for p in halves], with_gradients([8.0], [8.0])
    halves[0].grad = torch.tensor([4.0, 8.0], dtype=torch.float16)
    halves[1].grad = torch.tensor([4.0, 8.0], dtype=torch.float16)
    full[1].grad = torch.tensor([10.0, 20.0])
    optimizer, scaler = apex(halves, full, own)
    optimizer._amp_stash.all_fp32_from_fp32_grad_stash[1] = torch.tensor([1.0])
    assert FP16_Optimizer(optimizer) is optimizer
    optimizer._post_amp_backward(scaler)
    assert full[0].grad.tolist() == [1, 2]
    assert full[1].grad.tolist() == [11, 22]
    assert full[2].grad is None
    assert (own[0].grad.tolist(), own[1].grad.tolist()) == ([2], [3])
    assert optimizer._amp_stash.all_fp32_from_fp32_grad_stash == [None, None]
    assert scaler._overflow_buf.item() == 0
    assert not optimizer.calls
    halves[0].grad[0] = math.inf
    optimizer._post_amp_backward(scaler)
    assert scaler._overflow_buf.item() == 1


@pytest.mark.parametrize("to_none", [True, False])
def test_apex_zero_grad(to_none: bool) -> None:
    halves, full, own = with_gradients([1.0]), with_gradients([1.0]), with_gradients([1.0])
    optimizer = FP16_Optimizer(apex(halves, full, own)[0])
    optimizer.zero_grad(set_to_none=to_none)
    assert full[0].grad is None
    for (p,) in (halves, own):
        assert p.grad is None if to_none else p.grad.tolist() == [0]


def test_apex_without_float32_copies_stays_apexs() -> None:
    optimizer, scaler = apex([], [], [])
    del optimizer._amp_stash.all_fp32_from_fp16_params
    FP16_Optimizer(optimizer)
    optimizer._post_amp_backward(scaler)
    optimizer.zero_grad()
    assert optimizer.calls == ["original", "zero"]


# DeepSpeed

DEEPSPEED = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
METHODS = ("has_overflow_serial", "has_overflow_partitioned_grads_serial", "get_grad_norm_direct")


def zero(gradients: dict[int, list[torch.Tensor | None]] | None = None, **members: Any) -> Any:
    """A stand-in for ZeRO."""
    return type(
        "DeepSpeedZeroOptimizer", (stand_ins.DeepSpeed,), {"__module__": DEEPSPEED.rsplit(".", 1)[0], **members}
    )(gradients or {})


def test_deepspeed() -> None:
    grads = {0: [torch.tensor([3.0]), None], 1: [torch.tensor([4.0])]}
    optimizer = FP16_Optimizer(zero(grads))
    assert {*METHODS} <= {*vars(optimizer)}
    params = with_gradients([3.0], [4.0])
    assert optimizer.has_overflow_partitioned_grads_serial().tolist() == [False]
    assert optimizer.has_overflow_serial(params).tolist() == [False]
    param_grads = [p.grad for p in params]
    assert optimizer.get_grad_norm_direct(param_grads, params).item() == 5
    assert optimizer.get_grad_norm_direct(param_grads, params, 1).item() == 7
    params[1].ds_pipe_replicated = True
    assert optimizer.get_grad_norm_direct(param_grads, params).item() == 3
    params[0].ds_pipe_replicated = True
    assert optimizer.get_grad_norm_direct(param_grads, params).item() == 0
    del params[0].ds_pipe_replicated
    params[0].grad[0] = grads[1][0][0] = math.inf
    assert optimizer.get_grad_norm_direct(param_grads, params).item() == -1
    assert optimizer.has_overflow_serial(params).tolist() == [True]
    assert optimizer.has_overflow_partitioned_grads_serial().tolist() == [True]


def test_padding_of_a_partition_is_no_gradient_of_a_parameter() -> None:
    padding = torch.tensor([100.0])
    padding._zero_padding = True
    grads = [torch.tensor([3.0]), padding, torch.tensor([4.0])]
    assert FP16_Optimizer(zero()).get_grad_norm_direct(grads, with_gradients([3.0], [4.0])).item() == 5


def test_a_version_keeps_its_own_mask_of_infinite_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed 0.15 gives NaN, later ones -1."""
    monkeypatch.setattr(stand_ins, "masked", lambda norm: norm * torch.where(norm.isfinite(), 1.0, math.nan))
    optimizer = FP16_Optimizer(zero())
    assert {*METHODS} <= {*vars(optimizer)}
    (p,) = with_gradients([math.inf])
    assert optimizer.get_grad_norm_direct([p.grad], [p]).isnan()


def test_deepspeed_inside_accelerate() -> None:
    inner = zero()
    wrapper = of_class("accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper")
    wrapper.optimizer = inner
    assert FP16_Optimizer(wrapper) is wrapper
    assert "has_overflow_serial" in vars(inner)
    wrapper.optimizer = FusedAdam([Parameter(torch.zeros(1))])
    with pytest.warns(UserWarning, match="FusedAdam"):
        FP16_Optimizer(wrapper)


def largest(self: Any, gradients: Any, params: Any, norm_type: float = 2) -> torch.Tensor:
    return torch.stack([g.abs().max() for g in gradients] or [torch.zeros(())]).max()


def reduced_twice(self: Any, params: Any) -> torch.Tensor:
    result = stand_ins.DeepSpeed.has_overflow_serial(self, params)
    dist.all_reduce(result, op=None, group=None)
    return result


def of_one_more(self: Any, loss_scale: float) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.bool)


dist, is_model_parallel_parameter = stand_ins.dist, stand_ins.is_model_parallel_parameter


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"get_grad_norm_direct": largest}, r"this version's gives 15\.0, where 29\."),
        ({"has_overflow_serial": reduced_twice}, "this version's makes 1 reductions over the ranks"),
        ({"has_overflow_partitioned_grads_serial": of_one_more}, "this version's cannot be tried: TypeError"),
        ({"has_overflow_serial": lambda self, params: torch.zeros(1)}, "this version's gives tensor"),
        ({"has_overflow_serial": None}, "it lacks has_overflow_serial"),
        ({"cpu_offload": True}, "offload"),
    ],
    ids=["norm", "reductions", "arguments", "dtype", "missing", "offload"],
)
def test_a_version_that_behaves_otherwise_is_left(members: dict[str, Any], reason: str) -> None:
    optimizer = zero(**members)
    with pytest.warns(UserWarning, match=reason):
        FP16_Optimizer(optimizer)
    assert not {*METHODS} & {*vars(optimizer)}


def test_a_trial_does_not_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins.dist, "all_reduce", lambda *arguments, **named: pytest.fail("communicates"))
    FP16_Optimizer(zero())


def test_deepspeed_itself() -> None:
    theirs = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    optimizer = object.__new__(theirs.DeepSpeedZeroOptimizer)
    vars(optimizer).update(device="cpu", cpu_offload=False)
    assert of_deepspeed.replace(optimizer) is None


# Training with each


def trained(make: Callable[[list[Parameter]], Any], wrap: Callable[[Any], Any]) -> list[Any]:
    """Weights after each of some steps, of which one overflows, and what the steps gave."""
    torch.manual_seed(0)
    weights = [Parameter(torch.randn(n, 3).half()) for n in (4, 2)]
    optimizer = wrap(make(weights))
    results: list[Any] = []
    for scale in (1.0, 2.0, 3e4, 0.5):
        x = torch.randn(5, 4).half() * scale
        loss = (x @ weights[0]).square().mean() + weights[1].square().sum()
        results += [optimizer.train_step(loss), *(w.detach().float() for w in weights)]
    return results


@pytest.mark.parametrize(
    ("make", "wrap"),
    [
        (lambda weights: named(stand_ins.Megatron, MEGATRON)(weights, lr=0.1), lambda o: FP16_Optimizer(o, **PARALLEL)),
        (lambda weights: named(stand_ins.Apex, "apex.optimizers.FusedSGD")(weights, lr=0.1), FP16_Optimizer),
    ],
    ids=["megatron", "apex"],
)
def test_training_is_the_librarys_own(make: Callable[..., Any], wrap: Callable[[Any], Any]) -> None:
    theirs, ours = trained(make, lambda optimizer: optimizer), trained(make, wrap)
    assert len(ours) == len(theirs)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(ours, theirs, strict=True))
    skipped = [step for step in theirs if step is True or (isinstance(step, float) and step == -1.0)]
    assert len(skipped) == 1


def named(base: type, full_name: str) -> type:
    module, name = full_name.rsplit(".", 1)
    return type(name, (base,), {"__module__": module})
