"""DeepSpeed ZeRO stages 1 and 2: overflow and norm of all gradients in one call each."""

from __future__ import annotations

import hashlib
import inspect
import io
import sys
import textwrap
import tokenize
from types import MethodType
from typing import Any

import torch

from onnxtrain.optim import gradients

# The methods to replace, with digests of the sources that the replacements match: results and side effects differ
# between versions of DeepSpeed.
_SUPPORTED: dict[str, frozenset[str]] = {
    "has_overflow_serial": frozenset({"15f63d008f269a9e"}),
    "has_overflow_partitioned_grads_serial": frozenset({"31406da9d492a055"}),
    "get_grad_norm_direct": frozenset({"1bef58e78c31670a"}),
}


def replace(optimizer: Any) -> str | None:
    """Replace the methods; return the reason if that is impossible."""
    if getattr(optimizer, "cpu_offload", False):
        return "with optimizer offload, DeepSpeed checks for overflow while it copies"
    unknown = [
        name for name, digests in _SUPPORTED.items() if digest(getattr(type(optimizer), name, None)) not in digests
    ]
    if unknown:
        return f"expected the {', '.join(unknown)} of DeepSpeed 0.19.8; this version's differs"
    for method in (has_overflow_serial, has_overflow_partitioned_grads_serial, get_grad_norm_direct):
        setattr(optimizer, method.__name__, MethodType(method, optimizer))
    return None


def digest(function: Any) -> str:
    """The digest of a function's source without whitespace, comments and docstring; "" without a source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in ignored]
    words = [t.string for t in tokens if not t.string.startswith(('"""', "'''"))]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def has_overflow_serial(self: Any, params: Any) -> torch.Tensor:
    """Whether any element of a parameter's gradient is infinite or NaN: bool [1]."""
    return _overflow(self, [p.grad for p in params if p.grad is not None])


def has_overflow_partitioned_grads_serial(self: Any) -> torch.Tensor:
    """Whether any element of this rank's averaged gradients is infinite or NaN: bool [1]."""
    groups = [self.averaged_gradients[i] for i in range(len(self.bit16_groups))]
    return _overflow(self, [g for group in groups for g in group if g is not None])


def _overflow(optimizer: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    return gradients.found_non_finite(tensors, torch.device(optimizer.device)).bool()


def get_grad_norm_direct(self: Any, grads: Any, params: Any, norm_type: float = 2) -> torch.Tensor:
    """The norm of the gradients of all ranks, with replicated ones counted once: float32 []."""
    deepspeed_module = sys.modules[type(self).__module__]
    if float(norm_type) != 2.0:
        original: torch.Tensor = type(self).get_grad_norm_direct(self, grads, params, norm_type)
        return original
    own = [
        gradient.detach()
        for gradient, p in zip((g for g in grads if not getattr(g, "_zero_padding", False)), params, strict=False)
        if not getattr(p, "ds_pipe_replicated", False)
        and (deepspeed_module.is_model_parallel_parameter(p) or self.model_parallel_rank == 0)
    ]
    total = gradients.norm(own, torch.device(self.device)).float().square()
    deepspeed_module.dist.all_reduce(total, op=deepspeed_module.dist.ReduceOp.SUM, group=self.dp_process_group)
    self._model_parallel_all_reduce(tensor=total, op=deepspeed_module.dist.ReduceOp.SUM)
    total = total.sqrt()
    deepspeed_module.mask_nan_or_inf_with_val_inplace(total, device=self.device)
    return total
