"""One direction of a recurrent layer in standard ops: what `steps` does, for stock onnxruntime.

What depends on the step before is a Scan of a few small nodes; all else is computed for all steps at once. Gates are in
the order that the weights have, PyTorch's or ONNX's, which `Side.gates` spells. s steps, b samples, i inputs, h hidden.

A sequence that is shorter than s has its `inside`[s, b, 1]: 1 in its steps, 0 after them, where the states stay what
they are and y is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of
from onnxtrain.ops.fused import reshaped, total
from onnxtrain.ops.recurrent.cells import GRU, LSTM, Cell
from onnxtrain.ops.recurrent.scan import scan
from onnxtrain.ops.reshape.dims import transposed, unsqueezed
from onnxtrain.ops.reshape.join import concatenated, split

Value = ir.Value
Parts = Mapping[str, Value]
_END = 2**63 - 1


@dataclass(frozen=True)
class Side:
    """A direction: w[G h, i], r[G h, h], biases b and d[G h] of the input's and the state's side, first h and c[b, h].

    Attributes:
        gates: the order of the gates in the weights, a letter each.
        inside: of sequences that are shorter than the others; None where none are.
    """

    cell: Cell
    gates: str
    w: Value
    r: Value
    b: Value | None
    d: Value | None
    h: Value
    c: Value | None
    reverse: bool
    relu: bool = False
    inside: Value | None = None


def _apart(op: Builder, x: Value, names: str) -> dict[str, Value]:
    """Blocks of equal width along the last axis, by their letters."""
    width = sizes.floor_divide(sizes.dims_of(x)[-1], len(names))
    return dict(zip(names, split(op, x, [width] * len(names), -1), strict=True))


def _linear(op: Builder, x: Value, weight: Value, *biases: Value | None) -> Value:
    found = op.MatMul(x, transposed(op, weight, [1, 0]))
    for bias in biases:
        if bias is not None:
            found = op.Add(found, bias)
    result: Value = found
    return result


def _slope(op: Builder, gate: Value) -> Value:
    """σ' from σ."""
    result: Value = op.Mul(gate, _rest(op, gate))
    return result


def _rest(op: Builder, x: Value) -> Value:
    result: Value = op.Sub(op.scalar(1.0, like=x), x)
    return result


def _tanh_slope(op: Builder, squashed: Value) -> Value:
    return _rest(op, op.Mul(squashed, squashed))


def before(op: Builder, side: Side, first: Value, values: Value) -> Value:
    """What each step starts from: `first`, then `values`[s, b, h] but the last, in the direction's order."""
    lead = unsqueezed(op, first, 0)
    if not side.reverse:
        return concatenated(op, [lead, _steps(op, values, 0, -1)], 0)
    found = concatenated(op, [_steps(op, values, 1, _END), lead], 0)
    if side.inside is None:
        return found
    # A shorter sequence starts where its next step is outside.
    last = _steps(op, side.inside, -1, _END)
    goes_on = concatenated(op, [_steps(op, side.inside, 1, _END), op.Sub(last, last)], 0)
    result: Value = op.Where(op.Cast(goes_on, to=ir.DataType.BOOL), found, lead)
    return result


def _steps(op: Builder, x: Value, start: int, end: int) -> Value:
    """x[start:end] of one step or of all but one."""
    steps, *rest = sizes.dims_of(x)
    count = 1 if start == -1 else sizes.subtract(steps, 1)
    inputs = (x, *(op.constant([number], ir.DataType.INT64) for number in (start, end, 0)))
    return op.node("", "Slice", inputs, {}, [TensorType(dtype_of(x), (count, *rest))]).outputs[0]


# Forward


def gates(op: Builder, side: Side, x: Value, h_before: Value) -> dict[str, Value]:
    """What all steps compute on the way, by letter (`Cell.kept`), where the states before them are known."""
    of_x = _apart(op, _linear(op, x, side.w, side.b), side.gates)
    of_h = _apart(op, _linear(op, h_before, side.r, side.d), side.gates)
    return _activated(op, side, of_x, of_h)


def _activated(op: Builder, side: Side, of_x: Parts, of_h: Parts) -> dict[str, Value]:
    if side.cell is GRU:
        r, z = (op.Sigmoid(op.Add(of_x[gate], of_h[gate])) for gate in "rz")
        return {"r": r, "z": z, "n": op.Tanh(op.Add(of_x["n"], op.Mul(r, of_h["n"]))), "m": of_h["n"]}
    sums = {gate: op.Add(of_x[gate], of_h[gate]) for gate in side.gates}
    if side.cell is LSTM:
        return {gate: op.Tanh(sums[gate]) if gate == "g" else op.Sigmoid(sums[gate]) for gate in side.gates}
    return {"h": op.Relu(sums["h"]) if side.relu else op.Tanh(sums["h"])}


def cell_states(op: Builder, side: Side, parts: Parts) -> Value:
    """All c[s, b, h] of an LSTM: c' = f c + i g."""
    assert side.c is not None
    fresh, stays = op.Mul(parts["i"], parts["g"]), parts["f"]
    if side.inside is not None:
        fresh, stays = op.Mul(fresh, side.inside), _held(op, side, stays)

    def step(inner: Builder, states: Sequence[Value], at: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        c = inner.Add(inner.Mul(at[0], states[0]), at[1])
        return [c], [inner.Identity(c)]

    return scan(op, [side.c], [stays, fresh], step, reverse=side.reverse)[1][0]


def _held(op: Builder, side: Side, factor: Value) -> Value:
    """A factor with which a state goes on, 1 outside the sequence."""
    assert side.inside is not None
    result: Value = op.Add(op.Mul(factor, side.inside), _rest(op, side.inside))
    return result


def forward(op: Builder, side: Side, x: Value) -> tuple[Value, Value, Value | None]:
    """y[s, b, h] and the last h and c."""
    across = transposed(op, side.r, [1, 0])
    of_x = _linear(op, x, side.w, side.b)

    def step(inner: Builder, states: Sequence[Value], at: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        of_h = inner.MatMul(states[0], across)
        if side.d is not None:
            of_h = inner.Add(of_h, side.d)
        parts = _activated(inner, side, _apart(inner, at[0], side.gates), _apart(inner, of_h, side.gates))
        new = _new_states(inner, side, parts, states)
        if side.inside is None:
            return new, [inner.Identity(new[0])]
        moves = [inner.Mul(inner.Sub(now, then), at[1]) for now, then in zip(new, states, strict=True)]
        held = [inner.Add(then, move) for then, move in zip(states, moves, strict=True)]
        return held, [inner.Mul(new[0], at[1])]

    firsts = [side.h] if side.c is None else [side.h, side.c]
    sequences = [of_x] if side.inside is None else [of_x, side.inside]
    last, (y,) = scan(op, firsts, sequences, step, reverse=side.reverse)
    return y, last[0], last[1] if side.c is not None else None


def _new_states(op: Builder, side: Side, parts: Parts, states: Sequence[Value]) -> list[Value]:
    if side.cell is LSTM:
        c = op.Add(op.Mul(parts["f"], states[1]), op.Mul(parts["i"], parts["g"]))
        return [op.Mul(parts["o"], op.Tanh(c)), c]
    if side.cell is GRU:
        return [op.Add(parts["n"], op.Mul(parts["z"], op.Sub(states[0], parts["n"])))]
    return [parts["h"]]


# Backward


@dataclass(frozen=True)
class Found:
    """Gradients of x[s, b, i], h and c[b, h], w, r and of the biases on both sides [G h]."""

    x: Value
    h: Value
    c: Value | None
    w: Value
    r: Value
    b: Value
    d: Value


def backward(
    op: Builder, side: Side, x: Value, y: Value, parts: Parts, states: Value | None, given: Sequence[Value | None]
) -> Found:
    """The gradient of a direction.

    Args:
        op: the builder.
        side: the direction.
        x: [s, b, i].
        y: [s, b, h].
        parts: what `gates` gave.
        states: what `cell_states` gave, of an LSTM.
        given: the cotangents of y and of the last h and c; None where there is none.
    """
    h_before = before(op, side, side.h, y)
    dy, dh, dc = given
    zero = op.scalar(0.0, like=y)
    dy = _zeros(op, zero, y) if dy is None else dy
    dh = _zeros(op, zero, side.h) if dh is None else dh
    if side.inside is not None:
        dy = op.Mul(dy, side.inside)
    if side.c is not None and states is not None:
        dc = _zeros(op, zero, side.c) if dc is None else dc
        side_h, dh, dc = _lstm(op, side, parts, states, (dy, dh, dc))
        side_x = side_h
    elif side.cell is GRU:
        side_x, side_h, dh = _gru(op, side, parts, h_before, dy, dh)
    else:
        factor = op.Cast(op.Greater(y, zero), to=dtype_of(y)) if side.relu else _tanh_slope(op, y)
        dh, (side_h,) = _chain(op, side, factor, 1, dy, dh, None)
        side_x = side_h
    db, dd = (total(op, side_gradient, [0, 1], keepdims=False) for side_gradient in (side_x, side_h))
    dw, dr = _product(op, side_x, x), _product(op, side_h, h_before)
    return Found(op.MatMul(side_x, side.w), dh, dc, dw, dr, db, dd)


def _zeros(op: Builder, zero: Value, like: Value) -> Value:
    result: Value = op.Expand(zero, op.shape_of(like))
    return result


def _product(op: Builder, gradient: Value, read: Value) -> Value:
    """Σ gradientᵀ read over steps and samples."""
    rows, columns = (
        reshaped(op, v, [sizes.multiply(*sizes.dims_of(v)[:2]), sizes.dims_of(v)[2]]) for v in (gradient, read)
    )
    result: Value = op.MatMul(transposed(op, rows, [1, 0]), columns)
    return result


def _masked(op: Builder, side: Side, factor: Value) -> Value:
    result: Value = factor if side.inside is None else op.Mul(factor, side.inside)
    return result


def _chain(
    op: Builder, side: Side, factor: Value, repeats: int, dy: Value, dh: Value, passed: Value | None
) -> tuple[Value, list[Value]]:
    """For a cell without c: [dh ...] * factor is the gates' gradient; `passed` is the part of dh that skips them.

    Returns the gradient of the first h, then that of the gates and, where it is repeated, dh of all steps.
    """
    factor = _masked(op, side, factor)
    if side.inside is not None:
        passed = _rest(op, side.inside) if passed is None else _held(op, side, passed)

    def step(inner: Builder, carried: Sequence[Value], at: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        whole = inner.Add(carried[0], at[0])
        found = inner.Mul(concatenated(inner, [whole] * repeats, -1), at[1])
        back = inner.MatMul(found, side.r)
        if passed is not None:
            back = inner.Add(back, inner.Mul(whole, at[2]))
        return [back], [found, whole] if repeats > 1 else [found]

    sequences = [dy, factor, *([] if passed is None else [passed])]
    (first,), outputs = scan(op, [dh], sequences, step, reverse=not side.reverse)
    return first, outputs


def _gru(op: Builder, side: Side, parts: Parts, h_before: Value, dy: Value, dh: Value) -> tuple[Value, Value, Value]:
    r, z, n, m = (parts[gate] for gate in "rznm")
    of_n = op.Mul(_rest(op, z), _tanh_slope(op, n))
    factors = {
        "r": op.Mul(op.Mul(of_n, m), _slope(op, r)),
        "z": op.Mul(op.Sub(h_before, n), _slope(op, z)),
        "n": op.Mul(of_n, r),
    }
    factor = concatenated(op, [factors[gate] for gate in side.gates], -1)
    first, (side_h, totals) = _chain(op, side, factor, 3, dy, dh, z)
    of_x = {**_apart(op, side_h, side.gates), "n": op.Mul(totals, _masked(op, side, of_n))}
    return concatenated(op, [of_x[gate] for gate in side.gates], -1), side_h, first


def _lstm(
    op: Builder, side: Side, parts: Parts, states: Value, given: tuple[Value, Value, Value]
) -> tuple[Value, Value, Value]:
    assert side.c is not None
    i, f, g, o = (parts[gate] for gate in "ifgo")
    squashed = op.Tanh(states)
    c_before = before(op, side, side.c, states)
    factors = {
        "i": op.Mul(g, _slope(op, i)),
        "f": op.Mul(c_before, _slope(op, f)),
        "g": op.Mul(i, _tanh_slope(op, g)),
        "o": op.Mul(squashed, _slope(op, o)),
    }
    factor = _masked(op, side, concatenated(op, [factors[gate] for gate in side.gates], -1))
    into_c = _masked(op, side, op.Mul(o, _tanh_slope(op, squashed)))
    sequences = [given[0], factor, into_c, f if side.inside is None else _held(op, side, f)]
    if side.inside is not None:
        sequences.append(_rest(op, side.inside))

    def step(inner: Builder, carried: Sequence[Value], at: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        dh = inner.Add(carried[0], at[0])
        dc = inner.Add(carried[1], inner.Mul(dh, at[2]))
        found = inner.Mul(concatenated(inner, [dh if gate == "o" else dc for gate in side.gates], -1), at[1])
        back = inner.MatMul(found, side.r)
        if len(at) > 4:
            back = inner.Add(back, inner.Mul(dh, at[4]))
        return [back, inner.Mul(dc, at[3])], [found]

    (dh, dc), (found,) = scan(op, list(given[1:]), sequences, step, reverse=not side.reverse)
    return found, dh, dc


# Layers


def stacked(op: Builder, rows: Sequence[Value | None]) -> Value:
    """The rows that are there, one on the other."""
    return concatenated(op, [unsqueezed(op, row, 0) for row in rows if row is not None], 0)


def row(op: Builder, value: Value, index: int, count: int) -> Value:
    """value[index] of a value with `count` rows."""
    rows = split(op, value, [1] * count, 0)
    result: Value = op.Squeeze(rows[index], op.constant([0], ir.DataType.INT64))
    return result


def turned(op: Builder, weight: Value, source: str, target: str) -> Value:
    """The rows of a weight or bias, a block for each gate, in another order of the gates."""
    if source == target:
        return weight
    rows = sizes.floor_divide(sizes.dims_of(weight)[0], len(source))
    blocks = dict(zip(source, split(op, weight, [rows] * len(source), 0), strict=True))
    return concatenated(op, [blocks[gate] for gate in target], 0)


def native(op: Builder, sides: Sequence[Side], x: Value) -> tuple[Value, Value, Value | None]:
    """ONNX's own op on all directions: y[s, D, b, h] and the last h and c [D, b, h]."""
    cell, onnx = sides[0].cell, sides[0].cell.onnx
    weights = [
        stacked(op, [turned(op, weight, side.gates, onnx) for weight, side in zip(of_all, sides, strict=True)])
        for of_all in ([s.w for s in sides], [s.r for s in sides])
    ]
    biases = None
    if sides[0].b is not None:
        turned_biases = [[turned(op, v, s.gates, onnx) for v in (s.b, s.d) if v is not None] for s in sides]
        biases = stacked(op, [concatenated(op, pair, 0) for pair in turned_biases])
    firsts = [stacked(op, [s.h for s in sides])]
    if cell.has_state:
        firsts.append(stacked(op, [s.c for s in sides]))
    how = attributes(cell, [side.reverse for side in sides], sides[0].relu)
    found = op.op("", cell.name)(x, *weights, biases, None, *firsts, hidden_size=hidden_size(sides[0].h), **how)
    return found if cell.has_state else (*found, None)


def hidden_size(h: Value) -> int:
    """The attribute that onnxruntime wants. Raises GraphError where it is no number."""
    size = sizes.dims_of(h)[-1]
    if not isinstance(size, int):
        raise GraphError("a recurrent layer has a hidden size that is a number", got=size)
    return size


def attributes(cell: Cell, reverse: Sequence[bool], relu: bool) -> dict[str, object]:
    """Those of ONNX's op for these directions."""
    how: dict[str, object] = {}
    if list(reverse) != [False]:
        how["direction"] = "bidirectional" if len(reverse) == 2 else "reverse"
    if cell is GRU:
        how["linear_before_reset"] = 1
    if relu:
        how["activations"] = ["Relu"] * len(reverse)
    return how


def inside(op: Builder, lengths: Value, steps: sizes.Size, dtype: ir.DataType) -> Value:
    """[s, b, 1]: 1 in the steps of each sequence, 0 after them."""
    count = op.Range(op.size(0), op.size(steps), op.size(1))
    within = op.Less(unsqueezed(op, count, 1), unsqueezed(op, op.Cast(lengths, to=ir.DataType.INT64), 0))
    result: Value = unsqueezed(op, op.Cast(within, to=dtype), 2)
    return result
