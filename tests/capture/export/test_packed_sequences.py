"""Recurrent layers on packed sequences are graphs on padded ones: results, states and gradients are eager's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches
from tests.thinned import slow_but_every, slow_except

WIDTH, HIDDEN = 4, 5
LENGTHS = ([6, 4, 1], [7, 2, 7, 3])


class Packed(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, HIDDEN, batch_first=True, **options)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, state = self.rnn(packed)
        y, lengths = pad_packed_sequence(output, batch_first=True)
        return y, lengths, *(state if isinstance(state, tuple) else (state,))


class ReadsData(nn.Module):
    """Computes with the data of packed sequences, which has a row for each step that is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.linear = nn.LSTM(WIDTH, HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, lengths: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        packed = self.rnn(pack_padded_sequence(x, lengths), (h, c))[0]
        logits = PackedSequence(self.linear(packed.data), *packed[1:])
        padded = pad_packed_sequence(logits, padding_value=-1.0, total_length=9)[0]
        return padded, logits.data.pow(2).mean()


def padded(lengths: Sequence[int]) -> Tensor:
    """Sequences, with NaN for padding, which no step may read."""
    x = torch.randn(len(lengths), max(lengths), WIDTH)
    for sample, length in enumerate(lengths):
        x[sample, length:] = float("nan")
    return x.requires_grad_()


def gradients(module: nn.Module, x: Tensor, *arguments: Tensor) -> list[Tensor]:
    """Of random projections of the results, for x where it is no padding, and for all parameters."""
    results = [r for r in module(x, *arguments) if r.requires_grad]
    loss = sum((r * torch.linspace(-1, 2, r.numel(), dtype=r.dtype).reshape(r.shape)).sum() for r in results)
    dx, *others = torch.autograd.grad(loss, [x, *module.parameters()])  # type: ignore[arg-type]
    return [dx[~x.isnan()], dx[x.isnan()], *others]


@pytest.mark.filterwarnings("error:.*runs in PyTorch:UserWarning")
@pytest.mark.parametrize(
    "options", slow_but_every(2, [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}]), ids=str
)
@pytest.mark.parametrize("kind", slow_except([nn.LSTM, nn.GRU, nn.RNN], nn.LSTM))
def test_a_layer_on_packed_sequences(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    module = Packed(kind, **options)
    model = ORTModule(copy.deepcopy(module))
    for lengths in LENGTHS:
        x, sizes = padded(lengths), torch.tensor(lengths)
        assert_matches(model(x, sizes), lambda module, x, n: module(x, n), module, x, sizes)
        assert_matches(gradients(model, x, sizes), gradients, module, x, sizes, together=True)
    assert engine_of(model).captures == 1


@pytest.mark.filterwarnings("error:.*runs in PyTorch:UserWarning")
def test_the_data_of_packed_sequences_has_no_padding() -> None:
    module = ReadsData()
    model = ORTModule(copy.deepcopy(module))
    for lengths in ([6, 4, 1], [7, 7, 3, 2]):
        x, sizes = padded(lengths).detach().transpose(0, 1).contiguous().requires_grad_(), torch.tensor(lengths)
        arguments = x, sizes, torch.randn(1, len(lengths), HIDDEN), torch.randn(1, len(lengths), HIDDEN)
        assert_matches(model(*arguments), lambda module, *a: module(*a), module, *arguments)
        assert_matches(gradients(model, *arguments), gradients, module, *arguments, together=True)
    assert engine_of(model).captures == 1


def test_lengths_that_fill_no_padded_tensor_run_as_in_eager_after_others_were_captured() -> None:
    module = Packed(nn.GRU)
    model = ORTModule(copy.deepcopy(module))
    x = torch.randn(3, 6, WIDTH)
    model(x, torch.tensor([6, 4, 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shorter = model(x, torch.tensor([5, 4, 1]))
        with pytest.raises(RuntimeError, match="greater than 0"):
            model(x, torch.tensor([6, 4, 0]))
    assert shorter[0].shape == (3, 5, HIDDEN)
    assert_matches(shorter, lambda module, x, n: module(x, n), module, x, torch.tensor([5, 4, 1]))


def test_unsorted_lengths_raise_eager_s_error_after_sorted_ones_were_captured() -> None:
    class Sorted(Packed):
        def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
            return pad_packed_sequence(self.rnn(pack_padded_sequence(x, lengths, batch_first=True))[0])

    model, x = ORTModule(Sorted(nn.GRU)), torch.randn(2, 3, WIDTH)
    model(x, torch.tensor([3, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="decreasing order"):
            model(x, torch.tensor([2, 3]))
