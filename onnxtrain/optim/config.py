"""Optimizer hyperparameters as plain values, as ONNX Runtime Training's trainer took them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any


class OptimizerConfig:
    """An optimizer's name, learning rate, default hyperparameters and parameter groups.

    Args:
        name: the op type of the optimizer.
        params: parameter groups: dicts of "params" (a list of names) and hyperparameters that differ from the defaults.
        defaults: all hyperparameters, which become attributes.

    Raises:
        ValueError: `lr` is negative or no number; a group lacks "params", or sets "lr" or an unknown hyperparameter.
    """

    def __init__(self, name: str, params: Sequence[Mapping[str, Any]], defaults: dict[str, Any]) -> None:
        lr = defaults["lr"]
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not lr >= 0:
            raise ValueError(f"{name}: lr is {lr!r}; expected a number >= 0.")
        for group in params:
            if "params" not in group or len(group) < 2:
                raise ValueError(
                    f'{name}: expected groups as dicts of "params" and at least one hyperparameter, got {group!r}.'
                )
            if "lr" in group:
                raise ValueError(
                    f"{name}: expected groups without a learning rate of their own, got lr={group['lr']!r}."
                )
            if unknown := sorted(group.keys() - defaults.keys() - {"params"}):
                names = ", ".join(sorted(defaults.keys() - {"lr"}))
                raise ValueError(f"{name}: a group sets {', '.join(unknown)}; expected hyperparameters among {names}.")
        vars(self).update(defaults)
        self.name = name
        self.lr = float(lr)
        self.defaults = defaults
        self.params = [{**defaults, **group} for group in params]


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent: weight -= lr * gradient."""

    def __init__(self, params: Sequence[Mapping[str, Any]] = (), lr: float = 0.001) -> None:
        if params:
            raise ValueError("SGDOptimizer: expected no parameter groups, as SGD has no hyperparameter but lr.")
        super().__init__("SGDOptimizer", params, {"lr": lr})


class AdamConfig(OptimizerConfig):
    """Adam. `alpha` and `beta` are the decay rates of the two moments, `lambda_coef` is the weight decay."""

    class DecayMode(IntEnum):
        """Whether weight decay is applied before or after the weight update."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]] = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
            "weight_decay_mode": weight_decay_mode,
        }
        super().__init__("AdamOptimizer", params, defaults)


class LambConfig(OptimizerConfig):
    """LAMB. The trust ratio (weight norm / update norm) is clamped to [`ratio_min`, `ratio_max`]."""

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]] = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__("LambOptimizer", params, defaults)
