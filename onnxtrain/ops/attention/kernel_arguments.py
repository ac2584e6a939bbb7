"""Arguments of attention kernels beside q, k and v: score options, offsets of packed sequences, dropout."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class ScoreOptions(NamedTuple):
    """How scores [b, h, l, s] are computed from q[b, h, l, e] and k[b, g, s, e]: scaled, then masked.

    Attributes:
        scale: None for 1/√e.
        bias: added to the scores; None without one.
        mask: added to the scores too; a bool mask fills the scores with `fill` where it is false.
        fill: None for -inf.
        causal: whether row r attends to columns 0 to r only.
        safe: whether a row of -inf has probabilities of 0 instead of NaN.
    """

    scale: float | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    fill: float | None = None
    causal: bool = False
    safe: bool = True


class PackedSequences(NamedTuple):
    """Offsets of the sequences packed in q[t, h, e] and k[u, g, e], and the options of their scores.

    Attributes:
        cu_seqlens_q: sequence i has the queries q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]].
        cu_seqlens_k: sequence i has the keys k[cu_seqlens_k[i]:cu_seqlens_k[i + 1]].
        scale: None for 1/√e.
        bias: [h, l, s] for the longest sequence; bias[:, :rows, :columns] is added to the scores of each sequence.
        causal: whether row r of a sequence attends to its columns 0 to r only.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    scale: float | None = None
    bias: Tensor | None = None
    causal: bool = False


class DropoutOptions(NamedTuple):
    """Dropout of the probabilities.

    Attributes:
        key: int64 [2], the key of the random bits (`ops/random/keyed_bits.py`).
        drop_count: how many of the 65536 values of a random 16-bit number drop a probability.
        keep_scale: the factor of the probabilities that are kept.
    """

    key: Tensor
    drop_count: int
    keep_scale: float
