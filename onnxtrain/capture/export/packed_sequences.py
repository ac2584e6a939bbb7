"""Trace recurrent layers on packed sequences as layers on padded ones, of which a mask selects the steps.

    pack_padded_sequence(x, lengths)     the steps x[t, b] with t < lengths[b], in the order of t
    lstm(packed)                         the layer on x with zeros for padding; its last states are read at each end
    pad_packed_sequence(packed)          where(mask, y, padding_value)

The sizes of a packed sequence are values of `lengths`. Here all have the padded tensor's sizes, which requires that the
longest sequence fills it: a branch on the values of `lengths`, as the check that they are sorted is, becomes a guard.
Otherwise PyTorch's own functions run, which no graph represents.

A step of padding follows all steps of its sequence, so that it changes no other step's output. Its inputs are zeros, so
that it has finite gradients. The reverse direction runs on each sequence in reverse order. A cell state has no output
for each step: the gates of padding are set so that it is kept, by an input of the layer that is 1 there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from onnxtrain.torch_compat.fake_tensors import FakeTensor, remember_item
from onnxtrain.torch_compat.patch_points import EXPECTED_CELL_SIZE, EXPECTED_HIDDEN_SIZE
from onnxtrain.torch_compat.recurrent_functions import recurrent_functions

_KEPT = 1e4  # sigmoid(_KEPT) is 1 and sigmoid(-_KEPT) is 0 in each dtype, float16 has both
_BATCH = "_onnxtrain_batch"  # the attribute of a packed sequence's batch_sizes
_PADDED = "_onnxtrain_padded"  # the attribute of its data


@dataclass(frozen=True)
class _Batch:
    """The sequences of a batch, sorted by length.

    Attributes:
        lengths: int64 [b], on the CPU.
        mask: bool [s, b], whether a step is one of its sequence.
        last: int64 [b], the last step of each sequence.
        reverse: int64 [s, b], the step that is at each place in the reverse order of its sequence.
    """

    lengths: Tensor
    mask: Tensor
    last: Tensor
    reverse: Tensor

    @classmethod
    def of(cls, lengths: Tensor, steps: Any, device: torch.device) -> _Batch:
        step = torch.arange(steps, device=device)[:, None]
        on_device = lengths.to(device)
        mask = step < on_device
        return cls(lengths, mask, on_device - 1, torch.where(mask, on_device - 1 - step, step))

    def masked(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Return x[s, b, ...] with a value for padding."""
        return torch.where(self.mask_of(x), x, torch.full((), value, dtype=x.dtype, device=x.device))

    def mask_of(self, x: Tensor) -> Tensor:
        """Return the mask with the number of dimensions of x[s, b, ...]."""
        return self.mask.reshape(*self.mask.shape, *[1] * (x.dim() - 2))

    def reversed(self, x: Tensor) -> Tensor:
        """Return x[s, b, i] with each sequence in reverse order."""
        return x.gather(0, self.reverse[:, :, None].expand(x.shape))

    def at_end(self, y: Tensor) -> Tensor:
        """Return the last step of each sequence of y[s, b, h], as [1, b, h]."""
        return y.gather(0, self.last[None, :, None].expand(1, *y.shape[1:]))


def _pack(original: Callable[..., Any], x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    is_plain = isinstance(x, FakeTensor) and lengths.dim() == 1 and lengths.device.type == "cpu"
    if not is_plain or lengths.shape[0] != batch or not _fits(lengths, steps):
        return original(x, lengths, batch_first)
    sequences = _Batch.of(lengths, steps, x.device)
    padded = sequences.masked(x.transpose(0, 1) if batch_first else x)
    batch_sizes = sequences.mask.sum(1).to("cpu")
    setattr(batch_sizes, _BATCH, sequences)
    return _data(padded, sequences), batch_sizes


def _fits(lengths: Tensor, steps: Any) -> bool:
    """Return whether `pack_padded_sequence` accepts the lengths and the longest is `steps`."""
    is_sorted = (lengths[1:] <= lengths[:-1]).all()
    return bool(is_sorted & (lengths[0] == steps) & (lengths[-1] > 0))


def _data(padded: Tensor, sequences: _Batch) -> Tensor:
    """Return the data of a packed sequence, from which `_padded` returns `padded`."""
    data = padded[sequences.mask]
    setattr(data, _PADDED, padded)
    return data


def _padded(data: Tensor, sequences: _Batch) -> Tensor:
    """Return data of a packed sequence as [s, b, ...] with zeros for padding."""
    padded: Tensor | None = getattr(data, _PADDED, None)
    if padded is not None:
        return padded
    zeros = data.new_zeros(*sequences.mask.shape, *data.shape[1:])
    return zeros.masked_scatter(sequences.mask_of(zeros), data)


def _pad(
    original: Callable[..., Any], data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total_length: Any
) -> Any:
    sequences: _Batch | None = getattr(batch_sizes, _BATCH, None)
    if sequences is None:
        return original(data, batch_sizes, batch_first, value, total_length)
    padded = sequences.masked(_padded(data, sequences), value)
    if total_length > padded.shape[0]:
        rest = (total_length - padded.shape[0], *padded.shape[1:])
        padded = torch.cat([padded, padded.new_full(rest, value)])
    return padded.transpose(0, 1) if batch_first else padded, sequences.lengths


def _run(
    has_cell_state: bool,
    original: Callable[..., Any],
    x: Tensor,
    batch_sizes: Any,
    hx: Any,
    weights: Any,
    *options: Any,
) -> Any:
    """Run a layer on a packed sequence; other layers have the initial states in the place of `batch_sizes`."""
    sequences: _Batch | None = getattr(batch_sizes, _BATCH, None)
    states = tuple(hx) if has_cell_state else (hx,)
    if sequences is None or not _fit_weights(sequences, x, states, weights):
        return original(x, batch_sizes, hx, weights, *options)
    has_biases, layers, dropout, trains, bidirectional = options
    directions = 2 if bidirectional else 1
    count = len(weights) // (layers * directions)
    y, last = _padded(x, sequences), []
    for layer in range(layers):
        if layer and trains and dropout:
            y = torch.dropout(y, dropout, True)
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = [state[index : index + 1] for state in states]
            part = weights[index * count : (index + 1) * count]
            run = partial(_run_one, original, has_biases, trains)
            output, ends = _direction(run, sequences, y, own, part, is_reverse=direction == 1)
            outputs.append(output)
            last.append(ends)
        y = torch.cat(outputs, -1) if bidirectional else outputs[0]
    joined = [torch.cat(ends) for ends in zip(*last, strict=True)]
    return _data(y, sequences), *joined


def _fit_weights(sequences: _Batch, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Compare sizes: those that are symbols become the numbers or symbols that they are equal to."""
    batch, widths = sequences.mask.shape[1], (weights[1].shape[1], weights[1].shape[0] // 4)
    fit = all(s.shape[1] == batch and s.shape[2] == width for s, width in zip(states, widths, strict=False))
    return bool(fit and x.shape[-1] == weights[0].shape[1])


def _run_one(
    original: Callable[..., Any], has_biases: bool, trains: bool, x: Tensor, states: Any, weights: Sequence[Tensor]
) -> Any:
    return original(x, states, weights, has_biases, 1, 0.0, trains, False, False)  # one layer of one direction


def _direction(
    run: Callable[..., Any],
    sequences: _Batch,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    is_reverse: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of one direction of a layer, with zeros for padding, and the last states."""
    x = sequences.reversed(x) if is_reverse else x
    if len(states) == 2:
        x, weights = _keeping_cell_states(sequences, x, weights)
        y, _, *last = run(x, tuple(states), weights)
    else:
        y, *_ = run(x, states[0], weights)
        last = []
    y = sequences.masked(y)
    end = sequences.at_end(y)
    return sequences.reversed(y) if is_reverse else y, [end, *last]


def _keeping_cell_states(sequences: _Batch, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Add an input to an LSTM that is 1 at padding: it closes the input gate there, and opens the forget gate."""
    closes, opens, *others = weights[0].new_tensor([-_KEPT, _KEPT, 0.0, 0.0]).unbind()
    column = torch.stack([closes, opens, *others])[:, None].expand(4, weights[0].shape[0] // 4).reshape(-1, 1)
    is_padding = (~sequences.mask).to(x.dtype)[:, :, None]
    return torch.cat([x, is_padding], -1), [torch.cat([weights[0], column], 1), *weights[1:]]


def getitem(original: Callable[..., Any], x: Tensor, index: Any) -> Any:
    """Return `x[index]`: the first of the batch sizes is that of the padded tensor."""
    item = original(x, index)
    sequences: _Batch | None = getattr(x, _BATCH, None)
    if sequences is not None and index == 0:
        remember_item(item, sequences.mask.shape[1])
    return item


_TRACED: Mapping[str, Callable[..., Any]] = {
    "_pack_padded_sequence": _pack,
    "_pad_packed_sequence": _pad,
    "lstm": partial(_run, True),
    "gru": partial(_run, False),
    "rnn_tanh": partial(_run, False),
    "rnn_relu": partial(_run, False),
}
REPLACEMENTS = {function: _TRACED[name] for name, function in recurrent_functions.items()}


@contextmanager
def expected_sizes_of_padded() -> Iterator[None]:
    """Let recurrent modules expect states of the padded tensor's batch size: they would read it as a number."""

    def expected(original: Callable[..., Any], module: Any, x: Tensor, batch_sizes: Tensor | None) -> Any:
        sequences: _Batch | None = getattr(batch_sizes, _BATCH, None)
        if sequences is None:
            return original(module, x, batch_sizes)
        return original(module, SimpleNamespace(size=lambda _: sequences.mask.shape[1]), None)

    with (
        EXPECTED_HIDDEN_SIZE.replaced_in_thread(partial(expected, EXPECTED_HIDDEN_SIZE.original)),
        EXPECTED_CELL_SIZE.replaced_in_thread(partial(expected, EXPECTED_CELL_SIZE.original)),
    ):
        yield
