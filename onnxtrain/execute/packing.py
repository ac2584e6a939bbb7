"""Decides for each batch whether it runs without padding, and which tokens are kept.

The graph of a plan's questions is run on the batch: it gives the masks of attention, and what is read of the rows
behind the packed nodes. The kept tokens are the rows that are read, and the columns that attention shows to these: what
a loss, a pool or a choice reads says it where there is no attention. Packed is right where

* each mask hides just the tokens that are not kept, from all rows that are: nothing else than a causal triangle,
* no row that is read sees nothing at all, unless that gives 0,
* where a table of biases is added to scores, padding stands on the right only: then places in it are as they were.

All of this runs on the host. On a GPU the integers and booleans that it reads come over in one copy, and the step waits
for nothing else: the host knows the number of rows before it launches anything of the step, or plays a recording of it.

Where programs are recorded for each number of rows, that number is rounded up, so that few recordings serve all
batches. The rows that fill up are tokens of the batch that nobody reads: their gradients are 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from onnxtrain.execute.program import Program
from onnxtrain.ops.reshape.rows import permutation_to_front
from onnxtrain.passes.attention_masks import Mask
from onnxtrain.passes.pack_tokens import Reader

Tensor = torch.Tensor

DENSE = 0.9  # a batch with more of its tokens real runs as it is: to pack and to attend by sequence is not free
FEWEST_TOKENS = 512  # below, a step takes as long with padding as without
LEAST_STEP = 64  # between numbers of rows, which are multiples of it: tiles of a GPU's matrix products are that long
STEPS = 8  # from a number of rows to its double: half a step, 5 % of the rows, is what rounding costs on average


class Kept(NamedTuple):
    """The tokens of a batch that are kept.

    Attributes:
        rows: their numbers in [0, batch * steps), int64; then those of the tokens that fill up.
        cu: where each sequence begins among them, and their number, int64 [batch + 1].
        causal: whether a row sees only the columns up to its own.
        cu_filled: where rows may fill up, `cu` as if these were the last of the last sequence that has any. There they
            attend as padding does in eager, to tokens that are kept, and no number comes up that eager does not have.
    """

    rows: Tensor
    cu: Tensor
    causal: bool
    cu_filled: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """What a packed program takes beside the batch."""
        return (self.rows, self.cu) if self.cu_filled is None else (self.rows, self.cu, self.cu_filled)

    def to(self, device: torch.device) -> Kept:
        """The same on a device."""
        # Not blocking: CUDA has read what it copies from such memory when the call returns.
        rows, cu, *filled = (t.to(device, non_blocking=True) for t in self.tensors())
        return Kept(rows, cu, self.causal, *filled)


def rounded_up(count: int) -> int:
    """The next of the numbers of rows that programs are recorded for.

    They lie a sixteenth to an eighth apart. Of 500 batches of 16 sequences, whose lengths are random from 1 to 256,
    99 % have one of eight numbers then, as many as a program keeps recordings for; before they have 386.
    """
    step = max(LEAST_STEP, (1 << max(0, count.bit_length() - 1)) // STEPS)
    return -(-count // step) * step


@dataclass(frozen=True)
class Question:
    """Asks of a batch which tokens are kept.

    Attributes:
        program: gives the masks, then the values of the readers; it runs on the CPU.
        reads: the numbers of the tensors of a batch that it reads.
        masks, readers: what these are.
        always: whether a batch runs packed also where that saves little.
        fills: whether the number of rows is rounded up, by tokens that are not kept.
    """

    program: Program
    reads: Sequence[int]
    masks: Sequence[Mask]
    readers: Sequence[Reader]
    always: bool = False
    fills: bool = False

    def ask(self, tensors: Sequence[Tensor], batch: int, steps: int) -> Kept | None:
        """The kept tokens; None where the batch is to run as it is."""
        if not batch * steps or (batch * steps < FEWEST_TOKENS and not self.always):
            return None
        here = list(tensors)
        for index, copy in zip(self.reads, copied_to_host([tensors[i] for i in self.reads]), strict=True):
            here[index] = copy
        values = iter(self.program.run(here, ())[0])
        given = [next(values) if mask.value is not None else None for mask in self.masks]
        visible = [_visible(*each, steps) for each in zip(self.masks, given, strict=True)]
        seen = [v for v in visible if v is not None]
        if len(seen) < len(visible):
            return None
        keeps = self._kept(seen, self._read(values, batch, steps))
        count = int(keeps.sum())
        if not count:  # a mean over nothing is NaN, and so are its gradients
            return None
        wanted = min(rounded_up(count), keeps.numel()) if self.fills else count
        if not self.always and wanted > DENSE * keeps.numel():
            return None
        causal = self._is_causal(given, seen, keeps)
        if causal is None:
            return None
        cu = torch.zeros(batch + 1, dtype=torch.int64)
        torch.cumsum(keeps.sum(1), 0, out=cu[1:])
        rows = _numbers(keeps)
        if not self.fills:
            return Kept(rows, cu, causal).to(tensors[0].device)
        filled = torch.cat([rows, _numbers(~keeps)[: wanted - count]])
        return Kept(filled, cu, causal, torch.where(cu == count, wanted, cu)).to(tensors[0].device)

    def _read(self, values: Iterator[Tensor], batch: int, steps: int) -> Tensor:
        """The rows that are read behind the packed nodes, bool [batch, steps]."""
        found = torch.zeros(batch, steps, dtype=torch.bool)
        for reader in self.readers:
            if reader.kind == "result":
                continue  # `_kept` has its rows
            if reader.kind == "loss":
                found |= (next(values) != reader.ignore_index).view(batch, steps)
            elif reader.kind == "slice":
                found[:, slice(*reader.steps)] = True
            elif reader.kind == "rows":
                found.view(-1)[next(values)] = True
            elif reader.kind == "positions":
                found[next(values), next(values)] = True
            else:
                read = (next(values) != 0) ^ reader.negated
                read = read.reshape(*[1] * (reader.rank - read.dim()), *read.shape)
                read = read.permute(permutation_to_front(reader.rank, reader.axes))
                found |= read.flatten(2).any(2) if reader.rank > 2 else read
        return found

    def _kept(self, seen: Sequence[Tensor], read: Tensor) -> Tensor:
        """The rows that are read, and the columns that masks show to them or to the few queries of a sequence.

        Of results, the user may read each row that is not padding: the columns that masks show to any row are kept.
        """
        keeps = read
        any_row = any(reader.kind == "result" for reader in self.readers)
        for mask, visible in zip(self.masks, seen, strict=True):
            rows = read[:, None, :, None] if visible.size(2) > 1 else read.any(1)[:, None, None, None]
            shown = visible & rows if mask.packed and not any_row else visible
            keeps = keeps | shown.any(2).any(1)
        return keeps

    def _is_causal(self, values: Sequence[Tensor | None], seen: Sequence[Tensor], keeps: Tensor) -> bool | None:
        """Whether rows see earlier columns only; None where the masks are of another kind, or of several."""
        kinds: set[bool] = set()
        for mask, value, visible in zip(self.masks, values, seen, strict=True):
            found = _kinds(mask, value, visible, keeps)
            if not found:
                return None
            if mask.packed:
                kinds = kinds & found if kinds else found
                if not kinds:
                    return None
        return kinds == {True}  # a batch of one token each is of both kinds


def _numbers(chosen: Tensor) -> Tensor:
    """The numbers of the tokens that are chosen, of [batch, steps]."""
    return chosen.flatten().nonzero().flatten()


def copied_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors on the CPU with the same elements, by one transfer for all; those that are there are given as they are.

    Of floating ones only the sizes are the same: no question reads their elements.
    """
    far = [t for t in tensors if t.device.type != "cpu" and not t.is_floating_point()]
    far.sort(key=lambda t: -t.itemsize)  # so that each begins at a multiple of its size
    copies: dict[int, Tensor] = {}
    if far:
        joined = torch.cat([t.reshape(-1).view(torch.uint8) for t in far]).cpu()
        for t, part in zip(far, joined.split([t.numel() * t.itemsize for t in far]), strict=True):
            copies[id(t)] = part.view(t.dtype).view(t.shape)
    return [copies[id(t)] if id(t) in copies else _sized_as(t) if t.device.type != "cpu" else t for t in tensors]


def _sized_as(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _visible(mask: Mask, value: Tensor | None, steps: int) -> Tensor | None:
    """True where a row sees a column, [b, h, l, s]; None where scores are changed otherwise."""
    if value is None:
        visible = torch.ones(1, 1, 1, steps, dtype=torch.bool)
    else:
        value = value.reshape(*[1] * (4 - value.dim()), *value.shape)
        visible = value if value.dtype == torch.bool else value == 0
        hides = mask.fill <= mask.lowest if value.dtype == torch.bool else (visible | (value <= mask.lowest)).all()
        if not hides:
            return None
    return visible & _triangle(steps) if mask.causal else visible


def _triangle(steps: int) -> Tensor:
    """True up to the diagonal, [steps, steps]."""
    return torch.ones(steps, steps, dtype=torch.bool).tril_()


def _kinds(mask: Mask, value: Tensor | None, visible: Tensor, keeps: Tensor) -> set[bool]:
    """Which of False (all kept columns) and True (those up to its own) a mask shows to each row that is read."""
    if mask.indexes_table and (keeps[:, 1:] > keeps[:, :-1]).any():
        return set()
    columns = keeps[:, None, None, :]
    rows = keeps[:, None, :, None] if mask.packed else torch.ones((), dtype=torch.bool)
    if not mask.packed and not keeps.any(1).all() and not _nothing_gives_zero(mask, value):
        return set()
    found = set()
    if not mask.causal and not ((visible != columns) & rows).any():
        found.add(False)
    if mask.packed and not ((visible != (columns & _triangle(keeps.size(1)))) & rows).any():
        found.add(True)
    return found


def _nothing_gives_zero(mask: Mask, value: Tensor | None) -> bool:
    """Whether a row that sees nothing gives 0, and not NaN or the mean of all columns."""
    if value is None:
        return True  # all columns are shown
    infinite = mask.fill == -torch.inf if value.dtype == torch.bool else bool((value.isneginf() | (value == 0)).all())
    return mask.safe and infinite
