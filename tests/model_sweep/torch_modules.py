"""PyTorch's own recurrent and transformer modules, with their usual options: width 32, two layers where they stack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.entry import Call, Draw, ragged_mask

WIDTH, HEADS, INNER = 32, 4, 48
_LAYERS = {"num_layers": 2, "dropout": 0.1}


@dataclass(frozen=True)
class TorchModule:
    """A module of PyTorch with some options.

    Attributes:
        task: the kind of module.
        make: builds it.
        call: (draw, batch, length) -> the arguments of a call.
    """

    task: str
    make: Callable[[], nn.Module]
    call: Callable[[Draw, int, int], Call]


class _Packed(nn.Module):
    """A recurrent module that reads packed sequences."""

    def __init__(self, kind: type[nn.RNNBase], is_sorted: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.is_sorted = is_sorted

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.is_sorted)
        output, state = self.rnn(packed)
        return pad_packed_sequence(output, batch_first=True)[0], state


class _Loop(nn.Module):
    """A cell that is called for each element of a sequence."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


def _sequences(draw: Draw, batch: int, length: int) -> Call:
    """Sequences with the batch first."""
    return Call((draw.floats(batch, length, WIDTH, grad=True),))


def _time_first(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(length, batch, WIDTH, grad=True),))


def _with_state(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(length, batch, WIDTH, grad=True), draw.floats(2, batch, WIDTH, grad=True)))


def _with_states(draw: Draw, batch: int, length: int) -> Call:
    states = (draw.floats(2, batch, WIDTH), draw.floats(2, batch, WIDTH))
    return Call((draw.floats(length, batch, WIDTH, grad=True), states))


def _sorted_lengths(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, length, WIDTH, grad=True), ragged_mask(batch, length).sum(1)))


def _lengths(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, length, WIDTH, grad=True), ragged_mask(batch, length).sum(1).flip(0)))


def _padded(draw: Draw, batch: int, length: int) -> Call:
    return Call(
        (draw.floats(batch, length, WIDTH, grad=True),), {"src_key_padding_mask": ragged_mask(batch, length) == 0}
    )


def _causal(draw: Draw, batch: int, length: int) -> Call:
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    return Call((draw.floats(batch, length, WIDTH, grad=True),), {"mask": mask, "is_causal": True})


def _causal_decoder(name: str) -> Callable[[Draw, int, int], Call]:
    """A target that attends causally to itself, and a padded source; `name` is that of the mask of the source."""

    def call(draw: Draw, batch: int, length: int) -> Call:
        source, target = (draw.floats(batch, count, WIDTH, grad=True) for count in (length + 2, length))
        masks = {
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(length),
            name: ragged_mask(batch, length + 2) == 0,
        }
        inputs = (source, target) if name == "src_key_padding_mask" else (target, source)
        return Call(inputs, masks)

    return call


def _two_time_first(draw: Draw, batch: int, length: int) -> Call:
    return Call(tuple(draw.floats(count, batch, WIDTH, grad=True) for count in (length + 2, length)))


def _attends(keys: int = WIDTH, values: int = WIDTH, batch_first: bool = False, **options: Any) -> Any:
    """The call of attention, with padded keys."""

    def call(draw: Draw, batch: int, length: int) -> Call:
        shapes = ((length, WIDTH), (length + 2, keys), (length + 2, values))
        tensors = (
            draw.floats(*((batch, n, width) if batch_first else (n, batch, width)), grad=True) for n, width in shapes
        )
        return Call(tuple(tensors), {"key_padding_mask": ragged_mask(batch, length + 2) == 0, **options})

    return call


def _attends_causally(draw: Draw, batch: int, length: int) -> Call:
    x = draw.floats(batch, length, WIDTH, grad=True)
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    return Call((x, x, x), {"attn_mask": mask, "is_causal": True, "need_weights": False})


def _encoder(norm_first: bool = False, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True, norm_first=norm_first, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


def _decoder(**options: Any) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, batch_first=True, **options), 2)


def _transformer(**options: Any) -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 2, 2, INNER, **options)


def _recurrent(kind: type[nn.RNNBase]) -> dict[str, TorchModule]:
    name, options = kind.__name__, {"input_size": WIDTH, "hidden_size": WIDTH}
    is_lstm = kind is nn.LSTM
    rows: dict[str, tuple[Callable[[], nn.Module], Callable[[Draw, int, int], Call]]] = {
        "": (lambda: kind(**options), _time_first),
        "no bias": (lambda: kind(**options, bias=False), _time_first),
        "batch first": (lambda: kind(**options, batch_first=True), _sequences),
        "two layers, dropout": (lambda: kind(**options, **_LAYERS), _time_first),
        "bidirectional": (lambda: kind(**options, bidirectional=True), _time_first),
        "bidirectional, two layers, dropout, batch first": (
            lambda: kind(**options, **_LAYERS, bidirectional=True, batch_first=True),
            _sequences,
        ),
        "initial state": (lambda: kind(**options, num_layers=2), _with_states if is_lstm else _with_state),
        "packed": (lambda: _Packed(kind), _lengths),
        "packed, sorted": (lambda: _Packed(kind, is_sorted=True), _sorted_lengths),
        "packed, bidirectional, two layers": (lambda: _Packed(kind, num_layers=2, bidirectional=True), _lengths),
    }
    return {
        f"{name}, {option}" if option else name: TorchModule("recurrent", make, call)
        for option, (make, call) in rows.items()
    }


MODULES: dict[str, TorchModule] = {
    **_recurrent(nn.RNN),
    "RNN, relu": TorchModule("recurrent", lambda: nn.RNN(WIDTH, WIDTH, nonlinearity="relu"), _time_first),
    **_recurrent(nn.LSTM),
    "LSTM, projected": TorchModule("recurrent", lambda: nn.LSTM(WIDTH, WIDTH, proj_size=8), _time_first),
    "LSTM, projected, bidirectional, two layers": TorchModule(
        "recurrent", lambda: nn.LSTM(WIDTH, WIDTH, 2, proj_size=8, bidirectional=True), _time_first
    ),
    **_recurrent(nn.GRU),
    "RNNCell": TorchModule("recurrent", lambda: _Loop(nn.RNNCell), _sequences),
    "LSTMCell": TorchModule("recurrent", lambda: _Loop(nn.LSTMCell), _sequences),
    "GRUCell": TorchModule("recurrent", lambda: _Loop(nn.GRUCell), _sequences),
    "MultiheadAttention": TorchModule("transformer", lambda: nn.MultiheadAttention(WIDTH, HEADS, 0.1), _attends()),
    "MultiheadAttention, batch first, no weights": TorchModule(
        "transformer",
        lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        _attends(batch_first=True, need_weights=False),
    ),
    "MultiheadAttention, causal": TorchModule(
        "transformer", lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), _attends_causally
    ),
    "MultiheadAttention, weights of each head": TorchModule(
        "transformer", lambda: nn.MultiheadAttention(WIDTH, HEADS), _attends(average_attn_weights=False)
    ),
    "MultiheadAttention, kdim, vdim, no bias": TorchModule(
        "transformer", lambda: nn.MultiheadAttention(WIDTH, HEADS, bias=False, kdim=16, vdim=24), _attends(16, 24)
    ),
    "MultiheadAttention, bias_kv, zero_attn": TorchModule(
        "transformer",
        lambda: nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, add_zero_attn=True),
        _attends(),
    ),
    "Transformer": TorchModule("transformer", _transformer, _two_time_first),
    "Transformer, batch first, causal, padded": TorchModule(
        "transformer", lambda: _transformer(batch_first=True), _causal_decoder("src_key_padding_mask")
    ),
    "TransformerDecoder": TorchModule("transformer", _decoder, _causal_decoder("memory_key_padding_mask")),
    "TransformerDecoder, norm first, gelu": TorchModule(
        "transformer",
        lambda: _decoder(norm_first=True, activation="gelu"),
        _causal_decoder("memory_key_padding_mask"),
    ),
    "TransformerEncoder": TorchModule("transformer", _encoder, _padded),
    "TransformerEncoder, norm first, gelu, no bias": TorchModule(
        "transformer", lambda: _encoder(norm_first=True, activation="gelu", bias=False), _padded
    ),
    "TransformerEncoder, causal": TorchModule("transformer", _encoder, _causal),
}
