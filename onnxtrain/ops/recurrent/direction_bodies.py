"""One direction of a recurrent layer in standard ONNX ops, for stock onnxruntime: as `direction_kernels` computes it.

All that depends on the previous step is a Scan of a few small nodes; the rest is computed for all steps at once. Gates
are in the order of the weights, PyTorch's or ONNX's, which `Direction.gates` spells. s steps, b samples, i inputs, h
hidden units.

Sequences shorter than s have a `mask`[s, b, 1]: 1 in their steps and 0 after them, where the states do not change and y
is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of
from onnxtrain.ops.body_parts import reshaped, sum_over
from onnxtrain.ops.recurrent.cells import GRU, LSTM, Cell
from onnxtrain.ops.recurrent.scan import scan
from onnxtrain.ops.reshape.dims import transposed, unsqueezed
from onnxtrain.ops.reshape.join import concatenated, split

Value = ir.Value
Gates = Mapping[str, Value]  # by letter, see `Cell`
_END = 2**63 - 1


@dataclass(frozen=True)
class Direction:
    """A direction: w[G h, i], r[G h, h], the biases b of W x and d of R h [G h], and the initial h and c[b, h].

    Attributes:
        gates: the order of the gates in the weights, one letter each.
        mask: the steps of each sequence; None if all sequences have s steps.
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
    mask: Value | None = None


def _split_gates(op: Builder, x: Value, letters: str) -> dict[str, Value]:
    """Split the last axis into one block of equal width per letter."""
    width = sizes.floor_divide(sizes.dims_of(x)[-1], len(letters))
    return dict(zip(letters, split(op, x, [width] * len(letters), -1), strict=True))


def _linear(op: Builder, x: Value, weight: Value, *biases: Value | None) -> Value:
    y: Value = op.MatMul(x, transposed(op, weight, [1, 0]))
    for bias in biases:
        if bias is not None:
            y = op.Add(y, bias)
    return y


def _sigmoid_derivative(op: Builder, gate: Value) -> Value:
    """Return the derivative from the sigmoid's result."""
    return op.Mul(gate, _one_minus(op, gate))


def _one_minus(op: Builder, x: Value) -> Value:
    return op.Sub(op.scalar(1.0, like=x), x)


def _tanh_derivative(op: Builder, tanh: Value) -> Value:
    """Return the derivative from the result of tanh."""
    return _one_minus(op, op.Mul(tanh, tanh))


def previous_states(op: Builder, direction: Direction, initial: Value, states: Value) -> Value:
    """Return the state [s, b, h] before each step: `initial`[b, h] and all but the last of `states`[s, b, h]."""
    first = unsqueezed(op, initial, 0)
    if not direction.reverse:
        return concatenated(op, [first, _steps(op, states, 0, -1)], 0)
    previous = concatenated(op, [_steps(op, states, 1, _END), first], 0)
    if direction.mask is None:
        return previous
    # The reverse direction of a shorter sequence starts at its last step: the one whose next step is masked.
    last_mask = _steps(op, direction.mask, -1, _END)
    next_mask = concatenated(op, [_steps(op, direction.mask, 1, _END), op.Sub(last_mask, last_mask)], 0)
    return op.Where(op.Cast(next_mask, to=ir.DataType.BOOL), previous, first)


def _steps(op: Builder, x: Value, start: int, end: int) -> Value:
    """x[start:end], which is the last step or all steps but one."""
    steps, *rest = sizes.dims_of(x)
    count = 1 if start == -1 else sizes.subtract(steps, 1)
    inputs = (x, *(op.constant([number], ir.DataType.INT64) for number in (start, end, 0)))
    return op.node("", "Slice", inputs, {}, [TensorType(dtype_of(x), (count, *rest))]).outputs[0]


# Forward


def compute_gates(op: Builder, direction: Direction, x: Value, h_before: Value) -> dict[str, Value]:
    """Return the values that forward saves (`Cell.saved`), of all steps at once, given the states before them."""
    input_gates = _split_gates(op, _linear(op, x, direction.w, direction.b), direction.gates)
    state_gates = _split_gates(op, _linear(op, h_before, direction.r, direction.d), direction.gates)
    return _activate(op, direction, input_gates, state_gates)


def _activate(op: Builder, direction: Direction, input_gates: Gates, state_gates: Gates) -> dict[str, Value]:
    """Return the gates from W x + b and R h + d."""
    if direction.cell is GRU:
        r, z = (op.Sigmoid(op.Add(input_gates[gate], state_gates[gate])) for gate in "rz")
        m = state_gates["n"]
        return {"r": r, "z": z, "n": op.Tanh(op.Add(input_gates["n"], op.Mul(r, m))), "m": m}
    sums = {gate: op.Add(input_gates[gate], state_gates[gate]) for gate in direction.gates}
    if direction.cell is LSTM:
        return {gate: op.Tanh(sums[gate]) if gate == "g" else op.Sigmoid(sums[gate]) for gate in direction.gates}
    return {"h": op.Relu(sums["h"]) if direction.relu else op.Tanh(sums["h"])}


def cell_states(op: Builder, direction: Direction, gates: Gates) -> Value:
    """Return all c[s, b, h] of an LSTM: c' = f c + i g."""
    assert direction.c is not None
    update, forget = op.Mul(gates["i"], gates["g"]), gates["f"]
    if direction.mask is not None:
        update, forget = op.Mul(update, direction.mask), _one_where_masked(op, direction, forget)

    def step(body: Builder, states: Sequence[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        c = body.Add(body.Mul(slices[0], states[0]), slices[1])
        return [c], [body.Identity(c)]

    return scan(op, [direction.c], [forget, update], step, reverse=direction.reverse)[1][0]


def _one_where_masked(op: Builder, direction: Direction, factor: Value) -> Value:
    """Return the factor of a state, and 1 after the end of its sequence, where the state does not change."""
    assert direction.mask is not None
    return op.Add(op.Mul(factor, direction.mask), _one_minus(op, direction.mask))


def forward(op: Builder, direction: Direction, x: Value) -> tuple[Value, Value, Value | None]:
    """y[s, b, h] and the last h and c."""
    r_transposed = transposed(op, direction.r, [1, 0])
    all_input_gates = _linear(op, x, direction.w, direction.b)

    def step(body: Builder, states: Sequence[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        state_gates = body.MatMul(states[0], r_transposed)
        if direction.d is not None:
            state_gates = body.Add(state_gates, direction.d)
        split_gates = (_split_gates(body, gates, direction.gates) for gates in (slices[0], state_gates))
        new = _new_states(body, direction, _activate(body, direction, *split_gates), states)
        if direction.mask is None:
            return new, [body.Identity(new[0])]
        mask = slices[1]
        changes = [body.Mul(body.Sub(after, before), mask) for after, before in zip(new, states, strict=True)]
        masked_states = [body.Add(before, change) for before, change in zip(states, changes, strict=True)]
        return masked_states, [body.Mul(new[0], mask)]

    initial_states = [direction.h] if direction.c is None else [direction.h, direction.c]
    sequences = [all_input_gates] if direction.mask is None else [all_input_gates, direction.mask]
    last, (y,) = scan(op, initial_states, sequences, step, reverse=direction.reverse)
    return y, last[0], last[1] if direction.c is not None else None


def _new_states(op: Builder, direction: Direction, gates: Gates, states: Sequence[Value]) -> list[Value]:
    if direction.cell is LSTM:
        c = op.Add(op.Mul(gates["f"], states[1]), op.Mul(gates["i"], gates["g"]))
        return [op.Mul(gates["o"], op.Tanh(c)), c]
    if direction.cell is GRU:
        return [op.Add(gates["n"], op.Mul(gates["z"], op.Sub(states[0], gates["n"])))]
    return [gates["h"]]


# Backward


@dataclass(frozen=True)
class Gradients:
    """The gradients of x[s, b, i], of the initial h and c[b, h], and of w, r, b and d."""

    x: Value
    h: Value
    c: Value | None
    w: Value
    r: Value
    b: Value
    d: Value


def backward(
    op: Builder,
    direction: Direction,
    x: Value,
    y: Value,
    gates: Gates,
    states: Value | None,
    cotangents: Sequence[Value | None],
) -> Gradients:
    """Return the gradients of a direction.

    Args:
        op: the builder.
        direction: the direction.
        x: [s, b, i].
        y: [s, b, h].
        gates: the result of `compute_gates`.
        states: for an LSTM, the result of `cell_states`.
        cotangents: those of y and of the last h and c; None stands for zeros.
    """
    h_before = previous_states(op, direction, direction.h, y)
    dy, dh, dc = cotangents
    zero = op.scalar(0.0, like=y)
    dy = _zeros(op, zero, y) if dy is None else dy
    dh = _zeros(op, zero, direction.h) if dh is None else dh
    if direction.mask is not None:
        dy = op.Mul(dy, direction.mask)
    if direction.c is not None and states is not None:
        dc = _zeros(op, zero, direction.c) if dc is None else dc
        dstate_gates, dh, dc = _lstm_backward(op, direction, gates, states, (dy, dh, dc))
        dinput_gates = dstate_gates
    elif direction.cell is GRU:
        dinput_gates, dstate_gates, dh = _gru_backward(op, direction, gates, h_before, dy, dh)
    else:
        factor = op.Cast(op.Greater(y, zero), to=dtype_of(y)) if direction.relu else _tanh_derivative(op, y)
        dh, (dstate_gates,) = _scan_backward(op, direction, factor, 1, dy, dh, None)
        dinput_gates = dstate_gates
    db, dd = (sum_over(op, dgates, [0, 1], keepdims=False) for dgates in (dinput_gates, dstate_gates))
    dw, dr = _weight_gradient(op, dinput_gates, x), _weight_gradient(op, dstate_gates, h_before)
    return Gradients(op.MatMul(dinput_gates, direction.w), dh, dc, dw, dr, db, dd)


def _zeros(op: Builder, zero: Value, like: Value) -> Value:
    return op.Expand(zero, op.shape_of(like))


def _weight_gradient(op: Builder, dgates: Value, operand: Value) -> Value:
    """dgatesᵀ @ operand, summed over steps and samples."""
    rows, columns = (
        reshaped(op, v, [sizes.multiply(*sizes.dims_of(v)[:2]), sizes.dims_of(v)[2]]) for v in (dgates, operand)
    )
    return op.MatMul(transposed(op, rows, [1, 0]), columns)


def _masked(op: Builder, direction: Direction, factor: Value) -> Value:
    return factor if direction.mask is None else op.Mul(factor, direction.mask)


def _scan_backward(
    op: Builder, direction: Direction, factor: Value, repeats: int, dy: Value, dh: Value, bypass: Value | None
) -> tuple[Value, list[Value]]:
    """Build the backward Scan of a cell without c.

    `repeats` copies of dh, concatenated, times `factor` are the gradient of R h + d; dh times `bypass` reaches the
    previous h without passing through the gates.

    Returns:
        The gradient of the initial h, then that of R h + d and, if `repeats` > 1, the total dh of all steps.
    """
    factor = _masked(op, direction, factor)
    if direction.mask is not None:
        bypass = _one_minus(op, direction.mask) if bypass is None else _one_where_masked(op, direction, bypass)

    def step(body: Builder, states: Sequence[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        total_dh = body.Add(states[0], slices[0])
        dgates = body.Mul(concatenated(body, [total_dh] * repeats, -1), slices[1])
        previous_dh = body.MatMul(dgates, direction.r)
        if bypass is not None:
            previous_dh = body.Add(previous_dh, body.Mul(total_dh, slices[2]))
        return [previous_dh], [dgates, total_dh] if repeats > 1 else [dgates]

    sequences = [dy, factor, *([] if bypass is None else [bypass])]
    (initial_dh,), outputs = scan(op, [dh], sequences, step, reverse=not direction.reverse)
    return initial_dh, outputs


def _gru_backward(
    op: Builder, direction: Direction, gates: Gates, h_before: Value, dy: Value, dh: Value
) -> tuple[Value, Value, Value]:
    """Return the gradients of W x + b, of R h + d and of the initial h."""
    r, z, n, m = (gates[gate] for gate in "rznm")
    n_factor = op.Mul(_one_minus(op, z), _tanh_derivative(op, n))
    factors = {
        "r": op.Mul(op.Mul(n_factor, m), _sigmoid_derivative(op, r)),
        "z": op.Mul(op.Sub(h_before, n), _sigmoid_derivative(op, z)),
        "n": op.Mul(n_factor, r),
    }
    factor = concatenated(op, [factors[gate] for gate in direction.gates], -1)
    initial_dh, (dstate_gates, total_dh) = _scan_backward(op, direction, factor, 3, dy, dh, z)
    dinput_gates = {
        **_split_gates(op, dstate_gates, direction.gates),
        "n": op.Mul(total_dh, _masked(op, direction, n_factor)),
    }
    return concatenated(op, [dinput_gates[gate] for gate in direction.gates], -1), dstate_gates, initial_dh


def _lstm_backward(
    op: Builder, direction: Direction, gates: Gates, states: Value, cotangents: tuple[Value, Value, Value]
) -> tuple[Value, Value, Value]:
    """Return the gradients of the sums W x + b + R h + d, and of the initial h and c."""
    assert direction.c is not None
    i, f, g, o = (gates[gate] for gate in "ifgo")
    tanh_c = op.Tanh(states)
    c_before = previous_states(op, direction, direction.c, states)
    factors = {
        "i": op.Mul(g, _sigmoid_derivative(op, i)),
        "f": op.Mul(c_before, _sigmoid_derivative(op, f)),
        "g": op.Mul(i, _tanh_derivative(op, g)),
        "o": op.Mul(tanh_c, _sigmoid_derivative(op, o)),
    }
    factor = _masked(op, direction, concatenated(op, [factors[gate] for gate in direction.gates], -1))
    h_to_c_factor = _masked(op, direction, op.Mul(o, _tanh_derivative(op, tanh_c)))
    forget = f if direction.mask is None else _one_where_masked(op, direction, f)
    sequences = [cotangents[0], factor, h_to_c_factor, forget]
    if direction.mask is not None:
        sequences.append(_one_minus(op, direction.mask))

    def step(body: Builder, states: Sequence[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        dy, factor, h_to_c_factor, forget, *bypass = slices
        dh = body.Add(states[0], dy)
        dc = body.Add(states[1], body.Mul(dh, h_to_c_factor))
        dgates = body.Mul(concatenated(body, [dh if gate == "o" else dc for gate in direction.gates], -1), factor)
        previous_dh = body.MatMul(dgates, direction.r)
        if bypass:
            previous_dh = body.Add(previous_dh, body.Mul(dh, bypass[0]))
        return [previous_dh, body.Mul(dc, forget)], [dgates]

    (dh, dc), (dgates,) = scan(op, list(cotangents[1:]), sequences, step, reverse=not direction.reverse)
    return dgates, dh, dc


# Layers


def stack(op: Builder, values: Sequence[Value | None]) -> Value:
    """Stack the values that are not None along a new first axis."""
    return concatenated(op, [unsqueezed(op, value, 0) for value in values if value is not None], 0)


def select(op: Builder, value: Value, index: int, count: int) -> Value:
    """value[index], where the first axis of the value has size `count`."""
    rows = split(op, value, [1] * count, 0)
    return op.Squeeze(rows[index], op.constant([0], ir.DataType.INT64))


def reorder_gates(op: Builder, weight: Value, source: str, target: str) -> Value:
    """Return the rows of a weight or bias, one block per gate, in another order of the gates."""
    if source == target:
        return weight
    rows = sizes.floor_divide(sizes.dims_of(weight)[0], len(source))
    blocks = dict(zip(source, split(op, weight, [rows] * len(source), 0), strict=True))
    return concatenated(op, [blocks[gate] for gate in target], 0)


def onnx_layer(op: Builder, directions: Sequence[Direction], x: Value) -> tuple[Value, Value, Value | None]:
    """Build ONNX's op for all directions: y[s, D, b, h] and the last h and c [D, b, h]."""
    cell, onnx_order = directions[0].cell, directions[0].cell.onnx
    weights = [
        stack(op, [reorder_gates(op, w, d.gates, onnx_order) for w, d in zip(matrices, directions, strict=True)])
        for matrices in ([d.w for d in directions], [d.r for d in directions])
    ]
    biases = None
    if directions[0].b is not None:
        pairs = [[reorder_gates(op, v, d.gates, onnx_order) for v in (d.b, d.d) if v is not None] for d in directions]
        biases = stack(op, [concatenated(op, pair, 0) for pair in pairs])
    initial_states = [stack(op, [d.h for d in directions])]
    if cell.has_state:
        initial_states.append(stack(op, [d.c for d in directions]))
    attributes = _onnx_attributes(cell, [d.reverse for d in directions], directions[0].relu)
    attributes["hidden_size"] = hidden_size(directions[0].h)
    outputs = op.op("", cell.name)(x, *weights, biases, None, *initial_states, **attributes)
    return outputs if cell.has_state else (*outputs, None)


def hidden_size(h: Value) -> int:
    """Return the hidden size, which onnxruntime requires as an attribute.

    Raises:
        GraphError: it is symbolic.
    """
    size = sizes.dims_of(h)[-1]
    if not isinstance(size, int):
        raise GraphError("the hidden size of a recurrent layer is symbolic", expected="a static dimension", got=size)
    return size


def _onnx_attributes(cell: Cell, reverse: Sequence[bool], relu: bool) -> dict[str, object]:
    """Return the attributes of ONNX's op for these directions, except hidden_size."""
    attributes: dict[str, object] = {}
    if list(reverse) != [False]:
        attributes["direction"] = "bidirectional" if len(reverse) == 2 else "reverse"
    if cell is GRU:
        attributes["linear_before_reset"] = 1
    if relu:
        attributes["activations"] = ["Relu"] * len(reverse)
    return attributes


def sequence_mask(op: Builder, lengths: Value, steps: sizes.Size, dtype: ir.DataType) -> Value:
    """[s, b, 1]: 1 in the steps of each sequence, 0 after them."""
    step = op.Range(op.size(0), op.size(steps), op.size(1))
    within = op.Less(unsqueezed(op, step, 1), unsqueezed(op, op.Cast(lengths, to=ir.DataType.INT64), 0))
    return unsqueezed(op, op.Cast(within, to=dtype), 2)
