"""Attention by the compiled CPU kernel (`native/attention.cpp`).

Backward recomputes the probabilities, and the dropout mask from a key. Each function returns None if the library is not
compiled yet, or if the kernel does not support the tensors; the callers then run PyTorch's operators, which sample the
same dropout mask from a key.

Milliseconds for forward and backward, 2 threads of a Xeon at 2.8 GHz, float32, of PyTorch's math path, its flash kernel
(which has no dropout) and this kernel:

    [b, h, l, e]                       math, dropout 0.1    math    flash    compiled, dropout 0.1    compiled
    [16, 12, 128, 32], padding mask                 52.3    14.0      8.5                     10.7         9.2
    [8, 4, 512, 64], causal                        177.2    85.4     30.8                     19.1        18.0
    [2, 8, 1024, 64]                               320.1   160.1     58.3                     62.5        59.7
    [1, 4, 2048, 128]                              358.8   201.5    101.0                    136.7       133.6

A later version stores scores transposed and processes neighbouring heads together: the first row with dropout takes 7.2
ms, the version of the table 10.9 (a virtual Xeon).

The kernel skips columns that a mask hides from a whole block of rows. With a causal mask as a tensor (a Xeon at
2.3 GHz): [8, 8, 128, 32] flash 3.40, compiled 2.92; [4, 8, 512, 64] flash 39.7, compiled 21.0.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable

import onnx_ir as ir
import torch

from onnxtrain.graph.values import dtype_of
from onnxtrain.native import Library, pointers, read_sources
from onnxtrain.ops.attention.kernel_arguments import DropoutOptions, PackedSequences, ScoreOptions
from onnxtrain.ops.attention.scores import scale_number
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random.keyed_bits import keep_threshold
from onnxtrain.system.machine import current_machine
from onnxtrain.torch_compat.tensors import empty_strided_cpu

Tensor = torch.Tensor

_C_TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16"}


def _library(c_type: str) -> Library:
    sum_type = "double" if c_type == "double" else "float"
    source = read_sources("vectors.h", "gemm_tile.h", "exponential.h", "keyed_bits.h", "attention.cpp")
    return Library(
        f"attention-{c_type}",
        f"{source}\nFUNCTIONS({c_type}, {c_type}, {sum_type})\n",
        {f"forward_{c_type}": "p" * 8, f"backward_{c_type}": "p" * 11},
    )


LIBRARIES = {dtype: _library(c_type) for dtype, c_type in _C_TYPES.items()}  # each takes 1.3 s to compile
_PROBLEM = struct.Struct("10q 24q 4q 4q 3q q 3d")  # `Problem` of attention.cpp
_NO_STRIDES3, _NO_STRIDES4 = (0,) * 3, (0,) * 4


def library_for_dtype(dtype: torch.dtype) -> Library | None:
    """Return the library for q, k and v of this type; None if PyTorch's operators always run instead."""
    if dtype == torch.bfloat16 and current_machine().rates.narrow[torch.bfloat16] > 1:
        return None  # PyTorch uses the processor's bfloat16 instructions; this kernel computes in float32
    return LIBRARIES.get(dtype)


def library_for_value(q: ir.Value) -> Library | None:
    """Return the library for q of a graph; see `library_for_dtype`."""
    return library_for_dtype(TORCH_DTYPES[dtype_of(q)])


def may_run(n: NodeView) -> bool:
    """Return whether the compiled kernel runs a node of dense attention once it is ready."""
    library = library_for_value(n.q) if may_compile(n, "cpu") else None
    return library is not None and library.is_ready() is not None and current_machine().can_compile


def request(q: ir.Value) -> None:
    """Start compiling q's library in the background, unless it is compiled."""
    library = library_for_value(q)
    if library is not None:
        library.request()


def _kernel(direction: str, q: Tensor) -> Callable[..., None]:
    return getattr(LIBRARIES[q.dtype].functions, f"{direction}_{_C_TYPES[q.dtype]}")


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    dropout: DropoutOptions | None = None,
    contiguous: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """Return y[b, h, l, d] and the logsumexp [b, h, l].

    Unless `contiguous`, the memory of y is in the order [b, l, h, d], to which models transpose y.
    """
    masks = _expanded_masks(q, k, v, scores)
    if masks is None:
        return None
    additive, visible = masks
    batch, heads, rows, _ = q.shape
    y = q.new_empty((batch, heads, rows, v.size(3))) if contiguous else _empty_rows_first(q, rows, v.size(3))
    logsumexp = empty_strided_cpu((batch, heads, rows), (heads * rows, rows, 1), _sum_dtype(q))
    problem = _problem(q, k, v, (y,), additive, visible, scores, dropout)
    _kernel("forward", q)(problem, *pointers(q, k, v, additive, visible, y, logsumexp))
    return y, logsumexp


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    dropout: DropoutOptions | None = None,
    output_dscores: bool = False,
) -> tuple[Tensor, ...] | None:
    """Return the gradients of q, k and v and, with `output_dscores`, of the masked scores [b, h, l, s]."""
    masks = _expanded_masks(q, k, v, scores)
    if masks is None:
        return None
    additive, visible = masks
    dy = _with_dense_rows(dy)
    gradients = [_empty_rows_first(x, x.size(2), x.size(3)) for x in (q, k, v)]
    dscores = q.new_empty((*q.shape[:3], k.size(2)), dtype=_sum_dtype(q)) if output_dscores else None
    problem = _problem(q, k, v, (dy, dy, *gradients), additive, visible, scores, dropout)
    _kernel("backward", q)(problem, *pointers(dy, q, k, v, additive, visible, *gradients, dscores))
    return tuple(gradients) if dscores is None else (*gradients, dscores)


def forward_varlen(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, dropout: DropoutOptions | None = None
) -> Tensor | None:
    """Return y[t, h, d] of packed sequences without a bias; see `varlen.py`."""
    offsets = _checked_offsets(q, k, v, packed)
    if offsets is None:
        return None
    y = _packed_result(q, offsets[0], v.size(2))
    logsumexp = q.new_empty((q.size(1), q.size(0)), dtype=_sum_dtype(q))
    problem = _problem(q, k, v, (y,), None, None, _score_options(packed), dropout, offsets)
    _kernel("forward", q)(problem, *pointers(q, k, v, None, None, y, logsumexp))
    return y


def backward_varlen(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, dropout: DropoutOptions | None = None
) -> tuple[Tensor, ...] | None:
    """Return the gradients of q, k and v of `forward_varlen`."""
    offsets = _checked_offsets(q, k, v, packed)
    if offsets is None:
        return None
    dy = _with_dense_rows(dy)
    gradients = (
        _packed_result(q, offsets[0], q.size(2)),
        *(_packed_result(x, offsets[1], x.size(2)) for x in (k, v)),
    )
    problem = _problem(q, k, v, (dy, dy, *gradients), None, None, _score_options(packed), dropout, offsets)
    _kernel("backward", q)(problem, *pointers(dy, q, k, v, None, None, *gradients, None))
    return gradients


def _score_options(packed: PackedSequences) -> ScoreOptions:
    return ScoreOptions(packed.scale, causal=packed.causal)


def _checked_offsets(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor] | None:
    """Return the offsets as contiguous int64; None if the kernel does not support the tensors.

    The kernel does not check the offsets: None as well if they decrease or point outside q or k.
    """
    if not _supports(q, k, v) or packed.cu_seqlens_q.numel() < 2:
        return None
    offsets = packed.cu_seqlens_q.to(torch.int64).contiguous(), packed.cu_seqlens_k.to(torch.int64).contiguous()
    for cu_seqlens, tokens in zip(offsets, (q.size(0), k.size(0)), strict=True):
        bounds = [0, *cu_seqlens.tolist(), tokens]
        if any(a > b for a, b in itertools.pairwise(bounds)):
            return None
    return offsets


def _packed_result(like: Tensor, offsets: Tensor, width: int) -> Tensor:
    """Return a tensor [tokens, heads, width] for the kernel to fill; zeros if some tokens belong to no sequence."""
    shape = (*like.shape[:2], width)
    covers_all = int(offsets[0]) == 0 and int(offsets[-1]) == like.size(0)
    return like.new_empty(shape) if covers_all else like.new_zeros(shape)


def _empty_rows_first(like: Tensor, rows: int, width: int) -> Tensor:
    """Return an empty tensor [b, h, rows, width] on the CPU whose memory is in the order [b, rows, h, width]."""
    batch, heads, *_ = like.shape
    strides = rows * heads * width, width, heads * width, 1
    return empty_strided_cpu((batch, heads, rows, width), strides, like.dtype)  # 0.8 µs; new_empty and transpose 3.5


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.size(-1) == 1 else x.contiguous()


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the library is compiled and supports this device, these dtypes and strides."""
    library = library_for_dtype(q.dtype) if q.is_cpu else None
    if library is None or library.functions is None or not q.dtype == k.dtype == v.dtype:
        return False
    return all(x.stride(-1) == 1 or x.size(-1) == 1 for x in (q, k, v)) and q.numel() > 0 and k.numel() > 0


def _expanded_masks(
    q: Tensor, k: Tensor, v: Tensor, scores: ScoreOptions
) -> tuple[Tensor | None, Tensor | None] | None:
    """Return the additive and the bool mask, expanded to [b, h, l, s]; None if the kernel does not support them."""
    if not _supports(q, k, v):
        return None
    additive, visible = scores.bias, None
    if scores.mask is not None and scores.mask.dtype == torch.bool:
        visible = scores.mask
    elif scores.mask is not None:
        additive = scores.mask if additive is None else additive + scores.mask
    if additive is not None and additive.dtype != q.dtype:
        return None
    shape = (*q.shape[:3], k.size(2))
    expanded_additive = None if additive is None else additive.expand(shape)
    return expanded_additive, None if visible is None else visible.expand(shape)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    outputs: tuple[Tensor, ...],
    additive: Tensor | None,
    visible: Tensor | None,
    scores: ScoreOptions,
    dropout: DropoutOptions | None,
    offsets: tuple[Tensor, Tensor] | None = None,
) -> bytes:
    """Pack the struct `Problem`: sizes, strides, addresses, and floating-point parameters.

    `outputs` is y in forward; in backward dy twice, then the gradients.
    """
    tensors = (q, k, v, *outputs)
    if offsets is None:
        strides = [x.stride()[:3] for x in tensors]
        batch, rows, columns, addresses = q.size(0), q.size(2), k.size(2), (0, 0)
    else:
        strides = [(0, x.stride(1), x.stride(0)) for x in tensors]
        batch, rows, columns = offsets[0].numel() - 1, q.size(0), k.size(0)
        addresses = offsets[0].data_ptr(), offsets[1].data_ptr()
    strides += [_NO_STRIDES3] * (8 - len(strides))
    return _PROBLEM.pack(
        batch, q.size(1), k.size(1), rows, columns, q.size(-1), v.size(-1), scores.causal, scores.safe,
        torch.get_num_threads(),
        *(stride for strides_of_tensor in strides for stride in strides_of_tensor),
        *(_NO_STRIDES4 if additive is None else additive.stride()),
        *(_NO_STRIDES4 if visible is None else visible.stride()),
        *addresses,
        0 if dropout is None else dropout.key.data_ptr(),
        0 if dropout is None else keep_threshold(dropout.drop_count),
        scale_number(scores.scale, q), 1.0 if dropout is None else dropout.keep_scale,
        -math.inf if scores.fill is None else scores.fill,
    )  # fmt: skip
