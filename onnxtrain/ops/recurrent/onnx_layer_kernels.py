"""Torch kernels of ONNX's recurrent ops: run `direction_kernels` on the sequences of each length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.ops.recurrent.cells import GRU, Cell, gate_indices
from onnxtrain.ops.recurrent.direction_kernels import Run, Weights, backward, forward, previous_states
from onnxtrain.ops.recurrent.layer_kernels import compute_dtype

Tensor = torch.Tensor


@dataclass(frozen=True)
class Layer:
    """A layer: its cell, whether each direction is reversed, and, for an RNN, whether its activation is Relu."""

    cell: Cell
    reverse: tuple[bool, ...]
    relu: bool


def _reorder_gates(value: Tensor, source: str, target: str, axis: int) -> Tensor:
    """Return the blocks of the gates along an axis in another order."""
    if source == target:
        return value
    blocks = value.chunk(len(source), axis)
    return torch.cat([blocks[index] for index in gate_indices(source, target)], axis)


def _weights(layer: Layer, d: int, w: Tensor, r: Tensor, b: Tensor | None) -> Weights:
    weights = [w[d], r[d], *(b[d].chunk(2) if b is not None else (None, None))]
    cell = layer.cell
    return Weights(*(None if v is None else _reorder_gates(v, cell.onnx, cell.torch, 0) for v in weights))  # type: ignore[arg-type]


def _samples_by_length(lengths: Tensor | None, x: Tensor) -> Iterator[tuple[int, Any]]:
    """Return each distinct length, with the indices of the samples of that length."""
    if lengths is None:
        yield x.size(0), slice(None)
        return
    for length in lengths.unique().tolist():
        if not 0 <= length <= x.size(0):
            raise RuntimeError(
                f"expected sequence_lens between 0 and {x.size(0)}, the number of steps of x, got {length}"
            )
        yield length, (lengths == length).nonzero().flatten()


def _initial_states(layer: Layer, x: Tensor, r: Tensor, h: Tensor | None, c: Tensor | None) -> list[Tensor]:
    """Return the initial h and, for an LSTM, c; zeros for absent ones."""
    zeros = x.new_zeros(len(layer.reverse), x.size(1), r.size(2))
    states = [h, c] if layer.cell.has_state else [h]
    return [zeros if v is None else v for v in states]


def run_layer(
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
    """Return the first `count` of: y, the last states, all cell states of an LSTM, and the gates."""
    dtype, wide = x.dtype, compute_dtype(x.dtype)
    x, w, r, b, h, c = (None if v is None else v.to(wide) for v in (x, w, r, b, h, c))  # type: ignore[assignment]
    cell, hidden, (steps, samples, _) = layer.cell, r.size(2), x.shape
    initial_states = _initial_states(layer, x, r, h, c)
    y = x.new_zeros(steps, len(layer.reverse), samples, hidden)
    last = [state.clone() for state in initial_states]
    gates = x.new_zeros(*y.shape[:3], cell.gates * hidden)
    states = [torch.zeros_like(y)] if cell.has_state else []
    for d, reverse in enumerate(layer.reverse):
        weights = _weights(layer, d, w, r, b)
        for length, rows in _samples_by_length(lengths, x):
            if not length:
                continue
            h0, *c0 = (state[d][rows] for state in initial_states)
            run = forward(cell, x[:length, rows], weights, h0, c0[0] if c0 else None, reverse, layer.relu)
            y[:length, d, rows] = run.y
            last[0][d, rows] = run.h
            if run.c is not None and run.states is not None:
                last[1][d, rows] = run.c
                states[0][:length, d, rows] = run.states
            if cell.saved:
                torch_gates = run.saved[..., : cell.gates * hidden]
                gates[:length, d, rows] = _reorder_gates(torch_gates, cell.torch, cell.onnx, -1)
    return tuple(v.to(dtype) for v in (y, *last, *states, gates)[:count])


def run_layer_backward(
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
    """Return the gradients of x, w, r, b and the initial states."""
    dtype, wide = x.dtype, compute_dtype(x.dtype)
    x, w, r, y = (v.to(wide) for v in (x, w, r, y))
    cell, gates = layer.cell, iofc if zrh is None else zrh
    initial_states = [v.to(wide) for v in _initial_states(layer, x, r, initial_h, initial_c)]
    widened = [None if v is None else v.to(wide) for v in (b, states, gates, dy, dy_h, dy_c)]
    bias, states, gates, dy, *dlast = widened
    dx, dw, dr = torch.zeros_like(x), torch.zeros_like(w), torch.zeros_like(r)
    db = x.new_zeros(w.size(0), 2 * w.size(1))
    # Without steps, the gradient of the last states is that of the initial ones.
    dstates = [torch.zeros_like(s) if g is None else g.clone() for s, g in zip(initial_states, dlast, strict=False)]
    for d, reverse in enumerate(layer.reverse):
        weights = _weights(layer, d, w, r, x.new_zeros(db.shape) if bias is None else bias)
        for length, rows in _samples_by_length(sequence_lens, x):
            if not length:
                continue
            h0, *c0 = (state[d][rows] for state in initial_states)
            part_states, part_gates, part_dy = (_select(v, length, d, rows) for v in (states, gates, dy))
            part_y = y[:length, d, rows]
            saved = _saved(cell, weights, h0, part_y, part_gates, reverse)
            gradients = backward(
                cell,
                *(x[:length, rows], weights, h0, c0[0] if c0 else None),
                Run(part_y, h0, None, saved, part_states),
                (part_dy, *(None if g is None else g[d][rows] for g in dlast)),  # type: ignore[arg-type]
                reverse,
                layer.relu,
            )
            assert gradients.x is not None
            dx[:length, rows] += gradients.x
            for total, gradient in zip((dw[d], dr[d], *db[d].chunk(2)), gradients.weights, strict=True):
                assert gradient is not None
                total += _reorder_gates(gradient, cell.torch, cell.onnx, 0)
            for total, gradient in zip(dstates, (gradients.h, gradients.c), strict=False):
                assert gradient is not None
                total[d, rows] = gradient
    return tuple(v.to(dtype) for v in (dx, dw, dr, db, *dstates))


def _select(value: Tensor | None, length: int, d: int, rows: Any) -> Tensor | None:
    return None if value is None else value[:length, d, rows]


def _saved(cell: Cell, weights: Weights, h: Tensor, y: Tensor, gates: Tensor | None, reverse: bool) -> Tensor:
    """Return the values that `direction_kernels.forward` saves, from the gates in ONNX's order."""
    if gates is None:
        return y
    torch_gates = _reorder_gates(gates, cell.onnx, cell.torch, -1)
    if cell is not GRU:
        return torch_gates
    state_gates = torch.nn.functional.linear(previous_states(h, y, reverse), weights.r, weights.d)
    return torch.cat([torch_gates, state_gates[..., 2 * h.size(-1) :]], -1)
