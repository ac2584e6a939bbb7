"""FP16_Optimizer: speed up the half-precision optimizers of other libraries.

    optimizer = FP16_Optimizer(deepspeed_optimizer)

The object stays the library's own. Only its methods that check for overflow or compute norms gradient by gradient are
replaced by ones that process all gradients in one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from onnxtrain.optim.fp16 import apex, deepspeed, megatron

T = TypeVar("T")

# By the qualified name of the optimizer's class. Each replaces methods and returns None, or the reason why it cannot.
_REPLACERS: Mapping[str, Callable[..., str | None]] = {
    "megatron.fp16.fp16.FP16_Optimizer": megatron.replace,
    "deepspeed.runtime.zero.stage2.FP16_DeepSpeedZeroOptimizer": deepspeed.replace,
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": deepspeed.replace,
}
_ACCELERATE = "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper"


def FP16_Optimizer(optimizer: T, **kwargs: Any) -> T:  # noqa: N802  ONNX Runtime Training's name
    """Speed up an optimizer of DeepSpeed (ZeRO 1 and 2), Megatron-LM or Apex (amp, O1 and O2).

    Args:
        optimizer: the library's optimizer, or accelerate's wrapper of DeepSpeed's.
        **kwargs: for Megatron-LM: `get_tensor_model_parallel_rank` and `get_tensor_model_parallel_group`, functions
            without arguments; `get_horizontal_model_parallel_*` are their older names.

    Returns:
        The same object. An optimizer of another class, or of an unsupported version of a library, is not modified, and
        a UserWarning says so.
    """
    inner: Any = optimizer
    name = _full_name(inner)
    if name == _ACCELERATE:
        inner = inner.optimizer
        name = _full_name(inner)
    replace = apex.replace if hasattr(inner, "_amp_stash") else _REPLACERS.get(name)
    if replace is None:
        reason: str | None = f"expected one of {', '.join(_REPLACERS)}, or one of Apex"
    else:
        reason = replace(inner, **kwargs)
    if reason is not None:
        warnings.warn(f"FP16_Optimizer does not change {name}: {reason}.", UserWarning, stacklevel=2)
    return optimizer


def _full_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
