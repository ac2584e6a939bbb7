"""Decides for each batch whether it runs without padding, and which tokens are kept.

The graph of a plan's questions is run on the batch: it gives the masks of attention, and what is read of the rows
behind it. The kept tokens are the columns that the masks show. Packed is right where

* each mask hides just the tokens that are not kept, from all rows that are: nothing else than a causal triangle,
* each row that is read behind the packed nodes is kept,
* no row that is read sees nothing at all, unless that gives 0,
* where a table of biases is added to scores, padding stands on the right only: then places in it are as they were.

On a GPU this waits for the device at the start of the step: the masks are looked at on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from onnxtrain.execute.program import Program
from onnxtrain.passes.attention_masks import Mask
from onnxtrain.passes.pack_tokens import Reader

Tensor = torch.Tensor

DENSE = 0.9  # a batch with more of its tokens real runs as it is: to pack and to attend by sequence is not free
FEWEST_TOKENS = 512  # below, a step takes as long with padding as without


class Kept(NamedTuple):
    """The tokens of a batch that are kept.

    Attributes:
        rows: their numbers in [0, batch * steps), int64.
        cu: where each sequence begins among them, and their number, int64 [batch + 1].
        causal: whether a row sees only the columns up to its own.
    """

    rows: Tensor
    cu: Tensor
    causal: bool


@dataclass(frozen=True)
class Question:
    """Asks of a batch which tokens are kept.

    Attributes:
        program: gives the masks, then the values of the readers.
        masks, readers: what these are.
        always: whether a batch runs packed also where that saves little.
    """

    program: Program
    masks: Sequence[Mask]
    readers: Sequence[Reader]
    always: bool = False

    def ask(self, tensors: Sequence[Tensor], batch: int, steps: int) -> Kept | None:
        """The kept tokens; None where the batch is to run as it is."""
        if not batch * steps or (batch * steps < FEWEST_TOKENS and not self.always):
            return None
        device = tensors[0].device
        values = [value.cpu() for value in self.program.run(tensors, ())[0]]
        visible = [_visible(m, v) for m, v in zip(self.masks, values, strict=False)]
        if any(v is None for v in visible):
            return None
        seen = [v for v in visible if v is not None]
        keeps = seen[0].any(2).any(1).expand(batch, steps)
        if not self.always and keeps.float().mean().item() > DENSE:
            return None
        causal = self._is_causal(values, seen, keeps)
        if causal is None or not self._readers_hold(values[len(seen) :], keeps, batch, steps):
            return None
        counts = keeps.sum(1)
        cu = torch.zeros(batch + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=cu[1:])
        return Kept(keeps.flatten().nonzero().flatten().to(device), cu.to(device), causal)

    def _is_causal(self, values: Sequence[Tensor], seen: Sequence[Tensor], keeps: Tensor) -> bool | None:
        """Whether rows see earlier columns only; None where the masks are of another kind, or of several."""
        kinds: set[bool] = set()
        for mask, value, visible in zip(self.masks, values, seen, strict=False):
            found = _kinds(mask, value, visible, keeps)
            if not found:
                return None
            if mask.packed:
                kinds = kinds & found if kinds else found
                if not kinds:
                    return None
        return False not in kinds  # a batch of one token each is of both kinds

    def _readers_hold(self, values: Sequence[Tensor], keeps: Tensor, batch: int, steps: int) -> bool:
        """Whether all rows that are read behind the packed nodes are kept."""
        given = iter(values)
        for reader in self.readers:
            if reader.kind == "slice":
                holds = keeps[:, slice(*reader.steps)].all()
            elif reader.kind == "rows":
                holds = keeps.flatten()[next(given)].all()
            else:
                read = (next(given) != 0) ^ reader.negated
                read = read.reshape(*[1] * (reader.rank - read.dim()), *read.shape)
                read = read.flatten(2).any(2) if reader.rank > 2 else read
                holds = (keeps | ~read.expand(batch, steps)).all()
            if not holds:
                return False
        return True


def _visible(mask: Mask, value: Tensor) -> Tensor | None:
    """True where a row sees a column, [b, h, l, s]; None where scores are changed otherwise."""
    value = value.reshape(*[1] * (4 - value.dim()), *value.shape)
    if value.dtype == torch.bool:
        return value if mask.fill <= mask.lowest else None
    visible = value == 0
    return visible if (visible | (value <= mask.lowest)).all() else None


def _kinds(mask: Mask, value: Tensor, visible: Tensor, keeps: Tensor) -> set[bool]:
    """Which of False (all kept columns) and True (those up to its own) a mask shows to each row that is read."""
    steps = keeps.size(1)
    if mask.placed and (keeps[:, 1:] > keeps[:, :-1]).any():
        return set()
    columns = keeps[:, None, None, :]
    rows = keeps[:, None, :, None] if mask.packed else torch.ones((), dtype=torch.bool)
    if not mask.packed and not keeps.any(1).all() and not _nothing_gives_zero(mask, value):
        return set()
    found = set()
    if not ((visible != columns) & rows).any():
        found.add(False)
    if mask.packed:
        triangle = torch.ones(steps, steps, dtype=torch.bool).tril_()
        if not ((visible != (columns & triangle)) & rows).any():
            found.add(True)
    return found


def _nothing_gives_zero(mask: Mask, value: Tensor) -> bool:
    """Whether a row that sees nothing gives 0, and not NaN or the mean of all columns."""
    infinite = mask.fill == -torch.inf if value.dtype == torch.bool else bool((value.isneginf() | (value == 0)).all())
    return mask.safe and infinite
