"""Attention by the compiled kernel (`native/attention.cpp`), on a CPU: torch functions.

It keeps nothing but the logsumexp and, with dropout, the key: backward computes the probabilities again. Each function
answers None where the kernel is not there yet or does not do such tensors; PyTorch's operators serve then. Which of the
two ran forward shows in what was kept. Both use the same draws of a key.

Milliseconds for forward and backward, 2 threads of a Xeon at 2.8 GHz, float32; PyTorch's math path, its flash kernel
(which has no dropout) and this:

    [b, h, l, e]                       math, dropout 0.1    math    flash    compiled, dropout 0.1    compiled
    [16, 12, 128, 32], padding mask                 52.3    14.0      8.5                     10.7         9.2
    [8, 4, 512, 64], causal                        177.2    85.4     30.8                     19.1        18.0
    [2, 8, 1024, 64]                               320.1   160.1     58.3                     62.5        59.7
    [1, 4, 2048, 128]                              358.8   201.5    101.0                    136.7       133.6

Since then scores lie transposed and neighbouring heads are worked on together: of the first row, with dropout, 7.2 ms
where the kernel of the table takes 10.9 (a virtual Xeon).

Columns that a mask hides from a whole block of rows are left out (a Xeon at 2.3 GHz): a causal mask in a tensor,
[8, 8, 128, 32] flash 3.40, compiled 2.92; [4, 8, 512, 64] flash 39.7, compiled 21.0.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable

import onnx_ir as ir
import torch

from onnxtrain.graph.values import dtype_of
from onnxtrain.native import Library, pointers, text
from onnxtrain.ops.attention.parts import scale_number
from onnxtrain.ops.attention.scores import Drops, Packed, Scores
from onnxtrain.ops.constructors import TORCH_DTYPES
from onnxtrain.ops.random.keyed_bits import least_kept
from onnxtrain.system.machine import current_machine

Tensor = torch.Tensor

_NAMES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16"}


def _library(name: str) -> Library:
    sums = "double" if name == "double" else "float"
    return Library(
        f"attention-{name}",
        f"{text('vectors.h', 'exponential.h', 'draws.h', 'attention.cpp')}\nFUNCTIONS({name}, {name}, {sums})\n",
        {f"forward_{name}": "p" * 8, f"backward_{name}": "p" * 11},
    )


LIBRARIES = {dtype: _library(name) for dtype, name in _NAMES.items()}  # 1.3 s to compile each
_PROBLEM = struct.Struct("10q 24q 4q 4q 3q q 3d")  # `Problem` of attention.cpp
_NONE3, _NONE4 = (0,) * 3, (0,) * 4


def library_of(dtype: torch.dtype) -> Library | None:
    """The library for q, k and v of this type; None where PyTorch's operators serve for good."""
    if dtype == torch.bfloat16 and current_machine().rates.narrow[torch.bfloat16] > 1:
        return None  # the kernel computes in float32: processors with instructions for bfloat16 are faster with them
    return LIBRARIES.get(dtype)


def library_for(q: ir.Value) -> Library | None:
    """The same for q of a graph."""
    return library_of(TORCH_DTYPES[dtype_of(q)])


def request(q: ir.Value) -> None:
    """Asks for q's library."""
    library = library_for(q)
    if library is not None:
        library.request()


def _function(way: str, q: Tensor) -> Callable[..., None]:
    function: Callable[..., None] = getattr(LIBRARIES[q.dtype].functions, f"{way}_{_NAMES[q.dtype]}")
    return function


def forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, drops: Drops | None = None, contiguous: bool = False
) -> tuple[Tensor, Tensor] | None:
    """Gives y[b, h, l, d] and the logsumexp [b, h, l].

    Unless y is to be `contiguous` it lies as [b, l, h, d], which models turn it into.
    """
    read = _masks_as_read(q, k, v, scores)
    if read is None:
        return None
    added, shown = read
    batch, heads, rows, _ = q.shape
    y = q.new_empty((batch, heads, rows, v.size(3))) if contiguous else _by_rows(q, rows, v.size(3))
    sums = q.new_empty((batch, heads, rows), dtype=sums_type(q))
    problem = _problem(q, k, v, (y,), added, shown, scores, drops)
    _function("forward", q)(problem, *pointers(q, k, v, added, shown, y, sums))
    return y, sums


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    drops: Drops | None = None,
    of_scores: bool = False,
) -> tuple[Tensor, ...] | None:
    """The gradients of q, k and v, and where `of_scores` that of the masked scores [b, h, l, s]."""
    read = _masks_as_read(q, k, v, scores)
    if read is None:
        return None
    added, shown = read
    dy = _dense_rows(dy)
    found = [_by_rows(x, x.size(2), x.size(3)) for x in (q, k, v)]
    dscores = q.new_empty((*q.shape[:3], k.size(2)), dtype=sums_type(q)) if of_scores else None
    problem = _problem(q, k, v, (dy, dy, *found), added, shown, scores, drops)
    _function("backward", q)(problem, *pointers(dy, q, k, v, added, shown, *found, dscores))
    return tuple(found) if dscores is None else (*found, dscores)


def forward_of_sequences(q: Tensor, k: Tensor, v: Tensor, packed: Packed, drops: Drops | None = None) -> Tensor | None:
    """y[t, h, d] of sequences one after another, without a bias; see `varlen.py`."""
    offsets = _offsets(q, k, v, packed)
    if offsets is None:
        return None
    y = _fresh(q, offsets[0], v.size(2))
    sums = q.new_empty((q.size(1), q.size(0)), dtype=sums_type(q))
    problem = _problem(q, k, v, (y,), None, None, _scores(packed), drops, offsets)
    _function("forward", q)(problem, *pointers(q, k, v, None, None, y, sums))
    return y


def backward_of_sequences(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, packed: Packed, drops: Drops | None = None
) -> tuple[Tensor, ...] | None:
    """The gradients of q, k and v."""
    offsets = _offsets(q, k, v, packed)
    if offsets is None:
        return None
    dy = _dense_rows(dy)
    found = (_fresh(q, offsets[0], q.size(2)), *(_fresh(x, offsets[1], x.size(2)) for x in (k, v)))
    problem = _problem(q, k, v, (dy, dy, *found), None, None, _scores(packed), drops, offsets)
    _function("backward", q)(problem, *pointers(dy, q, k, v, None, None, *found, None))
    return found


def _scores(packed: Packed) -> Scores:
    return Scores(packed.scale, causal=packed.causal)


def _offsets(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> tuple[Tensor, Tensor] | None:
    """The offsets as the kernel reads them; None where it cannot do such tensors. It trusts what it reads."""
    if not _reads(q, k, v) or packed.cu_q.numel() < 2:
        return None
    offsets = packed.cu_q.to(torch.int64).contiguous(), packed.cu_k.to(torch.int64).contiguous()
    for each, tokens in zip(offsets, (q.size(0), k.size(0)), strict=True):
        numbers = [0, *each.tolist(), tokens]
        if any(a > b for a, b in itertools.pairwise(numbers)):
            return None
    return offsets


def _fresh(like: Tensor, offsets: Tensor, width: int) -> Tensor:
    """A tensor [tokens, heads, width]; zeros where some tokens belong to no sequence."""
    shape = (*like.shape[:2], width)
    whole = int(offsets[0]) == 0 and int(offsets[-1]) == like.size(0)
    return like.new_empty(shape) if whole else like.new_zeros(shape)


def _by_rows(like: Tensor, rows: int, width: int) -> Tensor:
    """A tensor [b, h, rows, width] that lies as [b, rows, h, width]."""
    _, heads, own_rows, own_width = like.shape
    if (rows, width) == (own_rows, own_width) and like.stride() == (rows * heads * width, width, heads * width, 1):
        return torch.empty_like(like)  # it keeps the order: 1.4 µs, the way below 4.9
    return like.new_empty((like.size(0), rows, like.size(1), width)).transpose(1, 2)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.size(-1) == 1 else x.contiguous()


def sums_type(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _reads(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel is there and does such tensors."""
    library = library_of(q.dtype)
    if library is None or library.functions is None or not q.dtype == k.dtype == v.dtype:
        return False
    return all(x.stride(-1) == 1 or x.size(-1) == 1 for x in (q, k, v)) and q.numel() > 0 and k.numel() > 0


def _masks_as_read(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor | None, Tensor | None] | None:
    """What is added and what is shown, each [b, h, l, s] by strides; None where the kernel cannot do it."""
    if not _reads(q, k, v):
        return None
    added, shown = scores.bias, None
    if scores.mask is not None and scores.mask.dtype == torch.bool:
        shown = scores.mask
    elif scores.mask is not None:
        added = scores.mask if added is None else added + scores.mask
    if added is not None and added.dtype != q.dtype:
        return None
    shape = (*q.shape[:3], k.size(2))
    return None if added is None else added.expand(shape), None if shown is None else shown.expand(shape)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: tuple[Tensor, ...],
    added: Tensor | None,
    shown: Tensor | None,
    scores: Scores,
    drops: Drops | None,
    offsets: tuple[Tensor, Tensor] | None = None,
) -> bytes:
    """The fields of `Problem`: sizes, strides, offsets, the key, numbers."""
    tensors = (q, k, v, *others)
    if offsets is None:
        strides = [x.stride()[:3] for x in tensors]
        batch, rows, columns, places = q.size(0), q.size(2), k.size(2), (0, 0)
    else:
        strides = [(0, x.stride(1), x.stride(0)) for x in tensors]
        batch, rows, columns = offsets[0].numel() - 1, q.size(0), k.size(0)
        places = offsets[0].data_ptr(), offsets[1].data_ptr()
    strides += [_NONE3] * (8 - len(strides))
    return _PROBLEM.pack(
        batch, q.size(1), k.size(1), rows, columns, q.size(-1), v.size(-1), scores.causal, scores.safe,
        torch.get_num_threads(),
        *(number for each in strides for number in each),
        *(_NONE4 if added is None else added.stride()),
        *(_NONE4 if shown is None else shown.stride()),
        *places, 0 if drops is None else drops.key.data_ptr(), 0 if drops is None else least_kept(drops.dropped),
        scale_number(scores.scale, q), 1.0 if drops is None else drops.factor,
        -math.inf if scores.fill is None else scores.fill,
    )  # fmt: skip
