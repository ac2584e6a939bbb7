"""ONNX's recurrent ops in torch: `steps` on weights in ONNX's form, the sequences of one length at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.ops.recurrent.cells import GRU, Cell, places
from onnxtrain.ops.recurrent.kernels import inner
from onnxtrain.ops.recurrent.steps import Run, Weights, backward, earlier, forward

Tensor = torch.Tensor


@dataclass(frozen=True)
class Layer:
    """A layer: its cell, for each direction whether it is reversed, and for an RNN whether it has Relu for Tanh."""

    cell: Cell
    reverse: tuple[bool, ...]
    relu: bool


def _turned(value: Tensor, source: str, target: str, axis: int) -> Tensor:
    """The blocks of the gates along an axis in another order."""
    if source == target:
        return value
    blocks = value.chunk(len(source), axis)
    return torch.cat([blocks[place] for place in places(source, target)], axis)


def _weights(layer: Layer, d: int, w: Tensor, r: Tensor, b: Tensor | None) -> Weights:
    sides = [w[d], r[d], *(b[d].chunk(2) if b is not None else (None, None))]
    cell = layer.cell
    return Weights(*(None if v is None else _turned(v, cell.onnx, cell.torch, 0) for v in sides))  # type: ignore[arg-type]


def _lengths(lengths: Tensor | None, x: Tensor) -> Iterator[tuple[int, Any]]:
    """Each length that there is, and which samples have it."""
    if lengths is None:
        yield x.size(0), slice(None)
        return
    for length in lengths.unique().tolist():
        if not 0 <= length <= x.size(0):
            raise RuntimeError(f"sequence_lens are from 0 to the {x.size(0)} steps of x, got {length}")
        yield length, (lengths == length).nonzero().flatten()


def _firsts(layer: Layer, x: Tensor, r: Tensor, h: Tensor | None, c: Tensor | None) -> list[Tensor]:
    zeros = x.new_zeros(len(layer.reverse), x.size(1), r.size(2))
    found = [h, c] if layer.cell.has_state else [h]
    return [zeros if v is None else v for v in found]


def run(
    layer: Layer,
    count: int,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    lengths: Tensor | None,
    h: Tensor | None,
    c: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The first `count` of: y, the last states, all cell states of an LSTM, and the gates."""
    dtype, wide = x.dtype, inner(x.dtype)
    x, w, r, b, h, c = (None if v is None else v.to(wide) for v in (x, w, r, b, h, c))  # type: ignore[assignment]
    cell, hidden, (steps, samples, _) = layer.cell, r.size(2), x.shape
    firsts = _firsts(layer, x, r, h, c)
    y = x.new_zeros(steps, len(layer.reverse), samples, hidden)
    last = [first.clone() for first in firsts]
    gates = x.new_zeros(*y.shape[:3], cell.gates * hidden)
    states = [torch.zeros_like(y)] if cell.has_state else []
    for d, reverse in enumerate(layer.reverse):
        weights = _weights(layer, d, w, r, b)
        for length, rows in _lengths(lengths, x):
            if not length:
                continue
            mine = [first[d][rows] for first in firsts]
            found = forward(cell, x[:length, rows], weights, mine[0], mine[1] if states else None, reverse, layer.relu)
            y[:length, d, rows] = found.y
            last[0][d, rows] = found.h
            if found.c is not None and found.states is not None:
                last[1][d, rows] = found.c
                states[0][:length, d, rows] = found.states
            if cell.kept:
                gates[:length, d, rows] = _turned(found.kept[..., : cell.gates * hidden], cell.torch, cell.onnx, -1)
    return tuple(v.to(dtype) for v in (y, *last, *states, gates)[:count])


def run_backward(
    layer: Layer,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    y: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    states: Tensor | None = None,
    iofc: Tensor | None = None,
    zrh: Tensor | None = None,
    dy: Tensor | None = None,
    dy_h: Tensor | None = None,
    dy_c: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of x, w, r, b and the first states."""
    dtype, wide = x.dtype, inner(x.dtype)
    x, w, r, y = (v.to(wide) for v in (x, w, r, y))
    cell, gates = layer.cell, iofc if zrh is None else zrh
    firsts = [v.to(wide) for v in _firsts(layer, x, r, initial_h, initial_c)]
    given = [None if v is None else v.to(wide) for v in (b, states, gates, dy, dy_h, dy_c)]
    bias, states, gates, dy, *last = given
    dx, dw, dr = torch.zeros_like(x), torch.zeros_like(w), torch.zeros_like(r)
    db = x.new_zeros(w.size(0), 2 * w.size(1))
    # A sequence without steps hands the gradient of its last states on.
    dfirsts = [torch.zeros_like(f) if g is None else g.clone() for f, g in zip(firsts, last, strict=False)]
    for d, reverse in enumerate(layer.reverse):
        weights = _weights(layer, d, w, r, x.new_zeros(db.shape) if bias is None else bias)
        for length, rows in _lengths(sequence_lens, x):
            if not length:
                continue
            mine = [first[d][rows] for first in firsts]
            part = _at(states, length, d, rows), _at(gates, length, d, rows), _at(dy, length, d, rows)
            found_y = y[:length, d, rows]
            kept = _kept(cell, weights, mine[0], found_y, part[1], reverse)
            result = backward(
                cell,
                *(x[:length, rows], weights, mine[0], mine[1] if cell.has_state else None),
                Run(found_y, mine[0], None, kept, part[0]),
                (part[2], *(None if g is None else g[d][rows] for g in last)),  # type: ignore[arg-type]
                reverse,
                layer.relu,
            )
            assert result.x is not None
            dx[:length, rows] += result.x
            for total, gradient in zip((dw[d], dr[d], *db[d].chunk(2)), result.weights, strict=True):
                assert gradient is not None
                total += _turned(gradient, cell.torch, cell.onnx, 0)
            for total, first in zip(dfirsts, (result.h, result.c), strict=False):
                assert first is not None
                total[d, rows] = first
    return tuple(v.to(dtype) for v in (dx, dw, dr, db, *dfirsts))


def _at(value: Tensor | None, length: int, d: int, rows: Any) -> Tensor | None:
    return None if value is None else value[:length, d, rows]


def _kept(cell: Cell, weights: Weights, h: Tensor, y: Tensor, gates: Tensor | None, reverse: bool) -> Tensor:
    """What `steps` keeps, from the gates in ONNX's order."""
    if gates is None:
        return y
    found = _turned(gates, cell.onnx, cell.torch, -1)
    if cell is not GRU:
        return found
    middle = torch.nn.functional.linear(earlier(h, y, reverse), weights.r, weights.d)
    return torch.cat([found, middle[..., 2 * h.size(-1) :]], -1)
