"""FP16_Optimizer: other libraries' half-precision optimizers, with their slow loops over gradients replaced.

    optimizer = FP16_Optimizer(deepspeed_optimizer)

The object stays the library's own; only the methods that look for overflow or measure norms, gradient by gradient, are
replaced by ones that take all gradients in one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from onnxtrain.optim.fp16 import apex, deepspeed, megatron

T = TypeVar("T")

# By the full name of the optimizer's class: replaces its methods, or says why not.
_REPLACERS: Mapping[str, Callable[..., str | None]] = {
    "megatron.fp16.fp16.FP16_Optimizer": megatron.replace,
    "deepspeed.runtime.zero.stage2.FP16_DeepSpeedZeroOptimizer": deepspeed.replace,
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": deepspeed.replace,
}
_ACCELERATE = "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper"


def FP16_Optimizer(optimizer: T, **kwargs: Any) -> T:  # noqa: N802  the predecessor's name
    """Replaces what is slow in an optimizer of DeepSpeed (ZeRO 1 and 2), Megatron-LM or Apex (amp, O1 and O2).

    Args:
        optimizer: the library's optimizer, or accelerate's wrapper of DeepSpeed's.
        **kwargs: for Megatron-LM `get_tensor_model_parallel_rank` and `get_tensor_model_parallel_group`, functions
            without arguments; `get_horizontal_model_parallel_*` are their older names.

    Returns:
        The same object. Where it is of another kind, or of a version whose methods are not known, it stays as it was
        and a UserWarning says so.
    """
    held: Any = optimizer
    name = _full_name(held)
    if name == _ACCELERATE:
        held = held.optimizer
        name = _full_name(held)
    replace = apex.replace if hasattr(held, "_amp_stash") else _REPLACERS.get(name)
    if replace is None:
        reason: str | None = f"expected one of {', '.join(_REPLACERS)}, or one of Apex"
    else:
        reason = replace(held, **kwargs)
    if reason is not None:
        warnings.warn(f"FP16_Optimizer leaves {name} as it is: {reason}.", UserWarning, stacklevel=2)
    return optimizer


def _full_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
