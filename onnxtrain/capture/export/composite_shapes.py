"""Compute result shapes of composite operators without running their decompositions on fake tensors.

torch.export decomposes each composite operator on fake tensors, only to learn the shape of its result. For attention
that was a third of the capture of a small BERT (0.67 s of 1.88 s for six layers), for linear and layer_norm a sixth.
The decomposition of a recurrent layer loops over the time steps and so specializes on their number; that of a
covariance reads elements. The shape functions here apply if all dimensions that must be equal are statically known to
be; PyTorch handles any other call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxtrain.torch_compat.decompositions import composite_kernel, decomposition_table, entry_replaced

_Shape: TypeAlias = "tuple[Any, ...] | None"


@contextmanager
def shape_shortcuts() -> Iterator[None]:
    """Use these shape functions on this thread. The caller must hold the capture lock."""
    owner = threading.get_ident()
    with ExitStack() as stack:
        for operator, compute_result in _SHORTCUTS.items():
            shortcut = partial(_shortcut, compute_result, owner)
            stack.enter_context(composite_kernel(operator, shortcut))
            if operator in decomposition_table:  # fake tensors look there first
                function = shortcut(decomposition_table[operator])
                stack.enter_context(entry_replaced(decomposition_table, operator, function))
        yield


def _shortcut(compute_result: Callable[..., Any], owner: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that tries `compute_result` on the thread `owner`, and `original` if that returns None."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = compute_result(*args, **kwargs) if threading.get_ident() == owner else None
        return original(*args, **kwargs) if result is None else result

    return run


def _from_shape(shape_of: Callable[..., _Shape]) -> Callable[..., torch.Tensor | None]:
    """Make a function that returns a tensor of the shape that `shape_of` computes, or None if it returns None."""

    def result(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        shape = shape_of(*args, **kwargs)
        return None if shape is None else _new_result(shape, [a for a in (*args, *kwargs.values()) if _is_tensor(a)])

    return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _new_result(shape: Sequence[Any], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of this shape: a non-leaf that requires a gradient if a result computed from `inputs` would."""
    return _as_computed_from(inputs, inputs[0].new_empty(shape))


def _as_computed_from(inputs: Sequence[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return result.requires_grad_().clone()
    return result


def _known_equal(*pairs: tuple[Any, Any]) -> bool:
    return all(statically_known_true(a == b) for a, b in pairs)


def _attention_shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Shape:
    """[..., l, e], [..., s, e], [..., s, d] -> [..., l, d]."""
    if enable_gqa or not query.dim() == key.dim() == value.dim() or query.dim() < 3:
        return None
    if not query.dtype == key.dtype == value.dtype or (is_causal and attn_mask is not None):
        return None
    *batch, queries, head_dim = query.shape
    keys = key.shape[-2]
    batch_pairs = [*zip(batch, key.shape, strict=False), *zip(batch, value.shape, strict=False)]
    if not _known_equal(*batch_pairs, (head_dim, key.shape[-1]), (keys, value.shape[-2])):
        return None
    if attn_mask is not None and not _broadcasts(attn_mask, query.dtype, (*batch, queries, keys)):
        return None
    return (*batch, queries, value.shape[-1])


def _attention_result(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return the result of attention; PyTorch's flash kernel for CPUs gives it the strides of the query.

    Models whose query is a transposed view apply `transpose(1, 2).contiguous()` to it, which then traces no copy.
    """
    shape = _attention_shape(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    if shape is None:
        return None
    tensors = [t for t in (query, key, value, attn_mask) if t is not None]
    has_flash_strides = (
        len(shape) == 4
        and query.device.type == "cpu"
        and torch.backends.cuda.flash_sdp_enabled()
        and dropout_p == 0
        and _known_equal((query.shape[-1], value.shape[-1]))
        and not (attn_mask is not None and attn_mask.requires_grad)
        and all(statically_known_true(t.stride(-1) == 1) for t in (query, key, value))
    )
    if not has_flash_strides:
        return _new_result(shape, tensors)
    return _as_computed_from(tensors, torch.empty_like(query.detach()))


def _broadcasts(mask: torch.Tensor, dtype: torch.dtype, scores_shape: Sequence[Any]) -> bool:
    """Return whether the mask broadcasts to the scores.

    Sizes not statically known to be equal add a guard, as in PyTorch.
    """
    if mask.dim() > len(scores_shape) or mask.dtype not in (torch.bool, dtype):
        return False
    pairs = zip(reversed(mask.shape), reversed(scores_shape), strict=False)
    return all(statically_known_true(a == 1) or bool(a == b) for a, b in pairs)


def _linear_shape(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> _Shape:
    """[..., k], [n, k], [n] -> [..., n]."""
    if input.dim() < 3 or weight.dim() != 2 or input.dtype != weight.dtype:
        return None
    pairs = [(input.size(-1), weight.size(1))]
    if bias is not None:
        if bias.dim() != 1 or bias.dtype != input.dtype:
            return None
        pairs.append((bias.size(0), weight.size(0)))
    return (*input.shape[:-1], weight.size(0)) if _known_equal(*pairs) else None


def _layer_norm_shape(
    input: torch.Tensor,
    normalized_shape: Sequence[Any],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> _Shape:
    """[..., n], [n], [n] -> [..., n], where n may be several dimensions."""
    rank = len(normalized_shape)
    for shape in (normalized_shape, *(t.shape for t in (weight, bias) if t is not None)):
        if not len(shape) == rank <= input.dim() or not _known_equal(*zip(input.shape[-rank:], shape, strict=True)):
            return None
    return tuple(input.shape)


def _recurrent_result(
    input: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...] | None:
    """[s, b, i], [l, b, h] and, for an LSTM, [l, b, c] -> [s, b, d h] and final states shaped as the initial ones."""
    initial_states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    tensors = [input, *initial_states, *params]
    if any(t.dim() != 3 for t in (input, *initial_states)):
        return None
    if len({t.dtype for t in tensors}) > 1 and not torch.is_autocast_enabled(input.device.type):
        return None
    batch, steps = input.shape[:2] if batch_first else (input.size(1), input.size(0))
    directions = 2 if bidirectional else 1
    state_dims = (num_layers * directions, batch)
    hidden = initial_states[0].size(2)
    pairs = [pair for state in initial_states for pair in zip(state.shape, state_dims, strict=False)]
    if not _known_equal(*pairs, (input.size(2), params[0].size(1)), (hidden, params[1].size(1))):
        return None
    y = _new_result((steps, batch, hidden * directions), tensors)
    return y.transpose(0, 1) if batch_first else y, *(_new_result(state.shape, tensors) for state in initial_states)


def _corrcoef_shape(input: torch.Tensor) -> _Shape:
    """[n, observations] -> [n, n]; [] for one variable, which PyTorch squeezes."""
    if input.dim() > 2 or not input.is_floating_point():
        return None
    variables = input.size(0) if input.dim() == 2 else 1
    return () if variables == 1 else (variables, variables)


def _cov_shape(
    input: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None, aweights: Any = None
) -> _Shape:
    """As `_corrcoef_shape`, only without weights: PyTorch reads their elements to check that none is negative."""
    return _corrcoef_shape(input) if fweights is None and aweights is None else None


def _dropout_result(x: torch.Tensor, p: float, train: bool) -> torch.Tensor | None:
    """Return the argument itself if nothing is dropped, as eager does: writes to the result must reach the argument."""
    return x if p == 0 or not train else None


_SHORTCUTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.dropout.default: _dropout_result,
    torch.ops.aten.scaled_dot_product_attention.default: _attention_result,
    torch.ops.aten.linear.default: _from_shape(_linear_shape),
    torch.ops.aten.layer_norm.default: _from_shape(_layer_norm_shape),
    torch.ops.aten.cov.default: _from_shape(_cov_shape),
    torch.ops.aten.corrcoef.default: _from_shape(_corrcoef_shape),
    torch.ops.aten.lstm.input: _recurrent_result,
    torch.ops.aten.gru.input: _recurrent_result,
    torch.ops.aten.rnn_tanh.input: _recurrent_result,
    torch.ops.aten.rnn_relu.input: _recurrent_result,
}
