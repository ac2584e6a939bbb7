"""Decide for each batch whether it runs without padding, and which tokens are kept.

The graph of a plan's questions (`passes.pack_tokens`) runs on the batch. It computes the attention masks and the rows
that are read after the packed nodes (by a loss, a pooling or an index). The kept tokens are these rows, and the columns
that attention shows to them. The packed program is equivalent if

* each mask hides exactly the tokens that are not kept from all rows that are kept, apart from a causal triangle,
* no row that is read is fully masked, unless its attention output is 0,
* padding is on the right only where a table of biases is added to scores: the kept tokens' positions stay the same.

The check runs on the host. It waits for nothing if the batch was copied to the GPU by `to_device`. Otherwise its
integers and booleans are copied to the host in one transfer, and the step waits for nothing else: the host knows the
number of rows before it launches any kernel of the step or replays a recording.

If programs are recorded (`cuda_graphs`), the number of rows is rounded up, to need few recordings. Dead rows of the
batch fill them up; their gradients are 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from onnxtrain.execute.host_batch import host_values, staged, zeros_on_host
from onnxtrain.execute.program import Program
from onnxtrain.ops.index.labelled_rows import rounded_up
from onnxtrain.ops.reshape.rows import permutation_to_front
from onnxtrain.passes.attention_masks import Mask
from onnxtrain.passes.pack_tokens import Reader

Tensor = torch.Tensor

DENSE = 0.9  # a batch with a larger share of real tokens runs unpacked: packing and varlen attention have a cost
MIN_TOKENS = 512  # below, a step takes as long with padding as without


class KeptTokens(NamedTuple):
    """The tokens of a batch that are kept.

    Attributes:
        rows: their flat indices in [0, batch * steps), int64, followed by those of the fill rows.
        cu: the cumulative lengths of the sequences, int64 [batch + 1].
        causal: whether a row sees only the columns up to its own.
        cu_filled: `cu` with the fill rows at the end of the last nonempty sequence; None without fill rows. There they
            attend to kept tokens, as padding does in eager: every value that they compute occurs in eager too.
    """

    rows: Tensor
    cu: Tensor
    causal: bool
    cu_filled: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the inputs that a packed program takes in addition to the batch."""
        return (self.rows, self.cu) if self.cu_filled is None else (self.rows, self.cu, self.cu_filled)

    def to(self, device: torch.device) -> KeptTokens:
        """Copy the tensors to a device."""
        rows, cu, *filled = (staged(t, device).to(device, non_blocking=True) for t in self.tensors())
        return KeptTokens(rows, cu, self.causal, *filled)


@dataclass(frozen=True)
class PackingCheck:
    """Finds the kept tokens of a batch.

    Attributes:
        program: computes the masks, then the values of the readers; it runs on the CPU.
        reads: the indices of the batch's tensors that it reads.
        masks: the attention masks, in the order of the program's results.
        readers: the nodes that read packed rows, in the order of the program's results.
        always: whether to pack a batch even if that saves little.
        fills: whether the number of rows is rounded up with fill rows.
    """

    program: Program
    reads: Sequence[int]
    masks: Sequence[Mask]
    readers: Sequence[Reader]
    always: bool = False
    fills: bool = False

    def kept_tokens(self, tensors: Sequence[Tensor], batch: int, steps: int) -> KeptTokens | None:
        """Return the kept tokens; None if the batch has to run unpacked.

        Args:
            tensors: the batch.
            batch: the number of sequences.
            steps: their padded length.
        """
        if not batch * steps or (batch * steps < MIN_TOKENS and not self.always):
            return None
        on_host = list(tensors)
        for index, copy in zip(self.reads, copied_to_host([tensors[i] for i in self.reads]), strict=True):
            on_host[index] = copy
        values = iter(self.program.run(on_host, ())[0])
        mask_values = [next(values) if mask.value is not None else None for mask in self.masks]
        all_visible = [_visible(*each, steps) for each in zip(self.masks, mask_values, strict=True)]
        visible = [v for v in all_visible if v is not None]
        if len(visible) < len(all_visible):
            return None
        keeps = self._keeps(visible, self._read_rows(values, batch, steps))
        count = int(keeps.sum())
        if not count:  # a mean over nothing is NaN, and so are its gradients
            return None
        num_rows = min(rounded_up(count), keeps.numel()) if self.fills else count
        if not self.always and num_rows > DENSE * keeps.numel():
            return None
        causal = self._is_causal(mask_values, visible, keeps)
        if causal is None:
            return None
        cu = torch.zeros(batch + 1, dtype=torch.int64)
        torch.cumsum(keeps.sum(1), 0, out=cu[1:])
        rows = _flat_indices(keeps)
        if not self.fills:
            return KeptTokens(rows, cu, causal).to(tensors[0].device)
        filled = torch.cat([rows, _flat_indices(~keeps)[: num_rows - count]])
        return KeptTokens(filled, cu, causal, torch.where(cu == count, num_rows, cu)).to(tensors[0].device)

    def _read_rows(self, values: Iterator[Tensor], batch: int, steps: int) -> Tensor:
        """Return the rows that are read after the packed nodes, bool [batch, steps]."""
        read = torch.zeros(batch, steps, dtype=torch.bool)
        for reader in self.readers:
            if reader.kind == "result":
                continue  # `_keeps` adds its rows
            if reader.kind == "loss":
                read |= (next(values) != reader.ignore_index).view(batch, steps)
            elif reader.kind == "slice":
                read[:, slice(*reader.steps)] = True
            elif reader.kind == "rows":
                read.view(-1)[next(values)] = True
            elif reader.kind == "positions":
                read[next(values), next(values)] = True
            else:
                selected = (next(values) != 0) ^ reader.negated
                selected = selected.reshape(*[1] * (reader.rank - selected.dim()), *selected.shape)
                selected = selected.permute(permutation_to_front(reader.rank, reader.axes))
                read |= selected.flatten(2).any(2) if reader.rank > 2 else selected
        return read

    def _keeps(self, all_visible: Sequence[Tensor], read: Tensor) -> Tensor:
        """Return the rows that are read, and the columns that masks show to them or to the few queries of a sequence.

        The user may read any row of a result that is not padding: then the columns that masks show to any row are kept.
        """
        keeps = read
        any_row = any(reader.kind == "result" for reader in self.readers)
        for mask, visible in zip(self.masks, all_visible, strict=True):
            rows = read[:, None, :, None] if visible.size(2) > 1 else read.any(1)[:, None, None, None]
            selected = visible & rows if mask.packed and not any_row else visible
            keeps = keeps | selected.any(2).any(1)
        return keeps

    def _is_causal(self, values: Sequence[Tensor | None], all_visible: Sequence[Tensor], keeps: Tensor) -> bool | None:
        """Return whether all masks are causal (True) or all show every kept column (False); None if neither."""
        common: set[bool] = set()
        for mask, value, visible in zip(self.masks, values, all_visible, strict=True):
            kinds = _kinds(mask, value, visible, keeps)
            if not kinds:
                return None
            if mask.packed:
                common = common & kinds if common else kinds
                if not common:
                    return None
        return common == {True}  # a batch of sequences of one token fits both


def _flat_indices(selected: Tensor) -> Tensor:
    """Return the flat indices of the True elements of [batch, steps]."""
    return selected.flatten().nonzero().flatten()


def copied_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU in one transfer, apart from those that the host knows; those on the CPU are returned.

    Floating tensors are not copied: the check reads only their shapes, so they become expanded zeros.
    """
    integers = [t for t in tensors if t.device.type != "cpu" and not t.is_floating_point()]
    copies = {id(t): values for t in integers if (values := host_values(t)) is not None}
    on_device = [t for t in integers if id(t) not in copies]
    on_device.sort(key=lambda t: -t.itemsize)  # each then starts at a multiple of its element size
    if on_device:
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in on_device]).cpu()
        for t, part in zip(on_device, flat.split([t.numel() * t.itemsize for t in on_device]), strict=True):
            copies[id(t)] = part.view(t.dtype).view(t.shape)
    return [copies[id(t)] if id(t) in copies else zeros_on_host(t) if t.device.type != "cpu" else t for t in tensors]


def _visible(mask: Mask, value: Tensor | None, steps: int) -> Tensor | None:
    """Return True where a row sees a column, [b, h, l, s]; None if the mask also changes visible scores."""
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
    """Return True up to the diagonal, [steps, steps]."""
    return torch.ones(steps, steps, dtype=torch.bool).tril_()


def _kinds(mask: Mask, value: Tensor | None, visible: Tensor, keeps: Tensor) -> set[bool]:
    """Return the kinds that a mask fits: False if each kept row sees every kept column, True if those up to its own."""
    if mask.indexes_table and (keeps[:, 1:] > keeps[:, :-1]).any():
        return set()
    columns = keeps[:, None, None, :]
    rows = keeps[:, None, :, None] if mask.packed else torch.ones((), dtype=torch.bool)
    if not mask.packed and not keeps.any(1).all() and not _fully_masked_is_zero(mask, value):
        return set()
    kinds = set()
    if not mask.causal and not ((visible != columns) & rows).any():
        kinds.add(False)
    if mask.packed and not ((visible != (columns & _triangle(keeps.size(1)))) & rows).any():
        kinds.add(True)
    return kinds


def _fully_masked_is_zero(mask: Mask, value: Tensor | None) -> bool:
    """Return whether the attention output of a fully masked row is 0, and not NaN or the mean of all columns."""
    if value is None:
        return True  # no row is fully masked
    infinite = mask.fill == -torch.inf if value.dtype == torch.bool else bool((value.isneginf() | (value == 0)).all())
    return mask.safe and infinite
