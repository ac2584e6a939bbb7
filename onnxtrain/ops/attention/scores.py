"""What attention's kernels are told beside q, k and v: how scores are made, where sequences lie, what dropout drops."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Scores(NamedTuple):
    """How scores [b, h, l, s] are made of q and k: scaled, then masked.

    Attributes:
        scale: None for 1/√e.
        bias: added to them, where it is there.
        mask: added too or, where it is bool, the scores are `fill` where it is false.
        fill: None for -inf.
        causal: whether row r sees the columns up to r only.
        safe: whether a row of -inf has probabilities 0, not NaN.
    """

    scale: float | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    fill: float | None = None
    causal: bool = False
    safe: bool = True


class Packed(NamedTuple):
    """Sequences one after another in q[t, h, e] and k[u, g, e], and how their scores are made.

    Attributes:
        cu_q: sequence i has the queries cu_q[i] to cu_q[i + 1].
        cu_k: the same of the keys.
        scale: None for 1/√e.
        bias: [h, l, s], as large as the longest sequence; the scores of each get its corner added.
        causal: whether row r of a sequence sees its columns up to r only.
    """

    cu_q: Tensor
    cu_k: Tensor
    scale: float | None = None
    bias: Tensor | None = None
    causal: bool = False


class Drops(NamedTuple):
    """Dropout of the probabilities: the key, how many of 65536 draws are dropped, and the factor of the others."""

    key: Tensor
    dropped: int
    factor: float
