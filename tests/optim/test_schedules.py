"""Learning rate schedules, loss scalers and configs, by their formulas; invalid arguments are refused."""

from __future__ import annotations

import math

import pytest
import torch

from onnxtrain import optim
from onnxtrain.optim import AdamConfig, LambConfig, SGDConfig, TrainStepInfo
from onnxtrain.testing import assert_no_worse_than_eager

TOTAL = 100


def rates(schedule: object, top: float = 2.0) -> list[float]:
    info = TrainStepInfo(AdamConfig(lr=top))
    learning_rates = []
    for info.optimization_step in range(TOTAL + 2):
        (rate,) = schedule.get_lr(info)
        assert schedule.get_last_lr() == [rate]
        learning_rates.append(rate)
    return learning_rates


EXPECTED = {
    "ConstantWarmupLRScheduler": lambda done: 2.0,
    "LinearWarmupLRScheduler": lambda done: 2.0 * (1 - done),
    "CosineWarmupLRScheduler": lambda done: 1 + math.cos(math.pi * done),
    "PolyWarmupLRScheduler": lambda done: 1e-7 + (2.0 - 1e-7) * (1 - done),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_warm_up_and_decay(name: str) -> None:
    schedule = getattr(optim, name)(total_steps=TOTAL, warmup=0.1)
    learning_rates = rates(schedule)
    steps = range(TOTAL + 2)
    expected = [2.0 * s / 10 if s < 10 else EXPECTED[name](min((s - 10) / 90, 1)) for s in steps]
    exact = torch.tensor(expected, dtype=torch.float64)
    assert_no_worse_than_eager(name, torch.tensor(learning_rates, dtype=torch.float64), exact, exact)


def test_power_and_end() -> None:
    schedule = optim.PolyWarmupLRScheduler(TOTAL, lr_end=0.5, power=2.0, warmup=0.0)
    learning_rates = rates(schedule)
    assert (learning_rates[0], learning_rates[50], learning_rates[TOTAL], learning_rates[TOTAL + 1]) == (
        2.0,
        0.5 + 1.5 * 0.25,
        0.5,
        0.5,
    )
    with pytest.raises(ValueError, match="peak learning rate"):
        rates(schedule, top=0.1)


def test_cosine_cycles() -> None:
    assert rates(optim.CosineWarmupLRScheduler(TOTAL, cycles=1.0, warmup=0.0))[50] == 0


def test_pytorchs_optimizers_take_the_factor() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = optim.LinearWarmupLRScheduler(TOTAL, warmup=0.1)
    theirs = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)
    expected = rates(schedule)
    for step in range(20):
        assert optimizer.param_groups[0]["lr"] == expected[step]
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("wrong", [{"total_steps": 0}, {"total_steps": 1.5}, {"warmup": 1.0}, {"warmup": -0.1}])
def test_numbers_out_of_range_are_refused(name: str, wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        getattr(optim, name)(**{"total_steps": TOTAL, **wrong})


def test_there_is_no_last_rate_before_the_first() -> None:
    with pytest.raises(RuntimeError, match="get_lr"):
        optim.ConstantWarmupLRScheduler(TOTAL).get_last_lr()


class TestDynamicLossScaler:
    def info(self, finite: bool) -> TrainStepInfo:
        return TrainStepInfo(SGDConfig(), all_finite=finite)

    def test_doubles_after_a_window_and_halves_after_an_overflow(self) -> None:
        scaler = optim.DynamicLossScaler(loss_scale=8.0, up_scale_window=2, min_loss_scale=2.0, max_loss_scale=16.0)
        scales = [scaler.update(self.info(finite)) for finite in (1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0)]
        assert scales == [8, 16, 16, 8, 8, 16, 16, 16, 8, 4, 2, 2]
        scaler.reset()
        assert scaler.loss_scale == 8

    def test_defaults(self) -> None:
        scaler = optim.DynamicLossScaler()
        assert (scaler.automatic_update, scaler.loss_scale, scaler.up_scale_window) == (True, 65536, 2000)
        assert (scaler.min_loss_scale, scaler.max_loss_scale) == (1.0, 2**24)

    def test_may_stay_as_it_is(self) -> None:
        assert optim.DynamicLossScaler(automatic_update=False).update(self.info(False)) == 65536

    @pytest.mark.parametrize("wrong", [{"loss_scale": 0}, {"up_scale_window": 0}, {"min_loss_scale": 1 << 20}])
    def test_numbers_out_of_range_are_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            optim.DynamicLossScaler(**wrong)

    def test_the_base_class_has_no_rule(self) -> None:
        with pytest.raises(NotImplementedError):
            optim.LossScaler(1.0).update(self.info(True))


def test_configs() -> None:
    adam = AdamConfig([{"params": ["bias"], "lambda_coef": 0.0}], lambda_coef=0.1)
    assert (adam.name, adam.lr, adam.lambda_coef, adam.params[0]["lambda_coef"]) == ("AdamOptimizer", 0.001, 0.1, 0.0)
    assert adam.weight_decay_mode is AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE
    assert (LambConfig().ratio_min, LambConfig().ratio_max, LambConfig().epsilon) == (-math.inf, math.inf, 1e-6)
    assert (SGDConfig().name, SGDConfig().lr) == ("SGDOptimizer", 0.001)


@pytest.mark.parametrize(
    ("config", "arguments", "named"),
    [
        (SGDConfig, {"params": [{"params": ["w"]}]}, "no parameter groups"),
        (AdamConfig, {"lr": -1}, "lr is -1"),
        (AdamConfig, {"lr": "1"}, "lr is '1'"),
        (LambConfig, {"params": [{"alpha": 0.1}]}, '"params"'),
        (AdamConfig, {"params": [{"params": ["w"], "lr": 0.1}]}, "without a learning rate of their own"),
        (AdamConfig, {"params": [{"params": ["w"], "gamma": 0.1}]}, "gamma"),
    ],
)
def test_configs_refuse(config: type, arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(**arguments)
