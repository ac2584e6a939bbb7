"""Hyper-parameters of optimizers as plain values: what ONNX Runtime Training's trainer took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any


class OptimizerConfig:
    """The name of an optimizer, its learning rate, defaults, and groups of parameters with values of their own.

    Args:
        name: of the optimizer's operator.
        params: groups: dicts of "params" (a list of names) and of values that differ from the defaults.
        defaults: all hyper-parameters.

    Raises:
        ValueError: `lr` is no number from 0 up, or a group lacks "params", or names something that is no
            hyper-parameter, or has a learning rate of its own.
    """

    def __init__(self, name: str, params: Sequence[Mapping[str, Any]], defaults: dict[str, Any]) -> None:
        lr = defaults["lr"]
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not lr >= 0:
            raise ValueError(f"{name}: lr is {lr!r}; expected a number from 0 up.")
        for group in params:
            if "params" not in group or len(group) < 2:
                raise ValueError(f'{name}: a group is a dict of "params" and of hyper-parameters, got {group!r}.')
            if "lr" in group:
                raise ValueError(f"{name}: a group has no learning rate of its own, got {group['lr']!r}.")
            if unknown := sorted(group.keys() - defaults.keys() - {"params"}):
                names = ", ".join(sorted(defaults.keys() - {"lr"}))
                raise ValueError(f"{name}: a group has {', '.join(unknown)}; expected some of {names}.")
        self.name = name
        self.lr = float(lr)
        self.defaults = defaults
        self.params = [{**defaults, **group} for group in params]


class SGDConfig(OptimizerConfig):
    """Gradient descent: weight -= lr * gradient."""

    def __init__(self, params: Sequence[Mapping[str, Any]] = (), lr: float = 0.001) -> None:
        if params:
            raise ValueError("SGDOptimizer: there is nothing that groups of parameters could set.")
        super().__init__("SGDOptimizer", params, {"lr": lr})


class AdamConfig(OptimizerConfig):
    """Adam; `alpha` and `beta` are the factors of the running averages, `lambda_coef` that of the weight decay."""

    class DecayMode(IntEnum):
        """Whether weights decay before or after their update."""

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
        self.alpha = alpha
        self.beta = beta
        self.lambda_coef = lambda_coef
        self.epsilon = epsilon
        self.max_norm_clip = max_norm_clip
        self.do_bias_correction = do_bias_correction
        self.weight_decay_mode = weight_decay_mode


class LambConfig(OptimizerConfig):
    """LAMB; the ratio of weight norm to update norm is kept between `ratio_min` and `ratio_max`."""

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
        self.alpha = alpha
        self.beta = beta
        self.lambda_coef = lambda_coef
        self.ratio_min = ratio_min
        self.ratio_max = ratio_max
        self.epsilon = epsilon
        self.max_norm_clip = max_norm_clip
        self.do_bias_correction = do_bias_correction
