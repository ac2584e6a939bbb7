"""One direction of a recurrent layer in torch, step by step, on any device and in any floating dtype.

All that does not depend on the previous step is computed for all steps at once: W x + b in forward, and in backward all
but the recurrence itself. The gradient is linear in that of the states, so one of its steps is a multiplication by
precomputed factors and a GEMM with R. Per step an LSTM takes 8 kernels forward and 6 backward.

Gates are in PyTorch's order throughout. s steps, b samples, i inputs, h hidden units; G gates, K saved values
(`Cell.saved`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from onnxtrain.ops.recurrent import compiled_lstm
from onnxtrain.ops.recurrent.cells import GRU, Cell

Tensor = torch.Tensor


class Weights(NamedTuple):
    """w[G h, i], r[G h, h], and the biases b (added to W x) and d (added to R h) [G h]."""

    w: Tensor
    r: Tensor
    b: Tensor | None
    d: Tensor | None


class Run(NamedTuple):
    """y[s, b, h], the last states h[b, h] and c[b, h], saved[s, b, K h] and all cell states [s, b, h]."""

    y: Tensor
    h: Tensor
    c: Tensor | None
    saved: Tensor
    states: Tensor | None


class Gradients(NamedTuple):
    """The gradients of x, of the initial states and of `Weights`; None for one that is not needed."""

    x: Tensor | None
    h: Tensor
    c: Tensor | None
    weights: Sequence[Tensor | None]


def time_order(steps: int, reverse: bool) -> range:
    """Return the steps in the order in which a direction runs them."""
    return range(steps - 1, -1, -1) if reverse else range(steps)


def forward(
    cell: Cell,
    x: Tensor,
    weights: Weights,
    h: Tensor,
    c: Tensor | None,
    reverse: bool,
    relu: bool,
    memory: Tensor | None = None,
    compiled: bool = False,
) -> Run:
    """Run one direction.

    Args:
        cell: the kind of cell.
        x: [s, b, i].
        weights: the weights and biases.
        h: the initial state [b, h].
        c: the initial cell state [b, h] of an LSTM, else None.
        reverse: whether to run from the last step to the first.
        relu: for an RNN: relu instead of tanh.
        memory: the memory for the saved values and cell states, of exactly their size; None allocates it.
        compiled: whether the compiled kernel may run.
    """
    steps, samples, hidden = *x.shape[:2], h.shape[-1]
    widths = [len(cell.saved) * hidden, hidden * cell.has_state]
    if memory is None:
        memory = x.new_empty(steps * samples * sum(widths))
    saved, states = (
        part.view(steps, samples, width)
        for part, width in zip(memory.split([steps * samples * width for width in widths]), widths, strict=True)
    )
    y = x.new_empty(steps, samples, hidden)
    if c is not None:
        _lstm(x, weights, h, c, reverse, y, saved, states, compiled)
    elif cell is GRU:
        _gru(x, weights, h, reverse, y, saved)
    else:
        _rnn(x, weights, h, reverse, torch.relu_ if relu else torch.tanh_, y)
    last = 0 if reverse else steps - 1
    return Run(y, y[last], None if c is None else states[last], saved, None if c is None else states)


def _write_input_gates(x: Tensor, weights: Weights, out: Tensor) -> None:
    """Write W x + b + d of all steps to out[s, b, G h]."""
    bias = weights.b if weights.d is None or weights.b is None else weights.b + weights.d
    rows, target, w = x.flatten(0, 1), out.flatten(0, 1), weights.w.t()
    torch.mm(rows, w, out=target) if bias is None else torch.addmm(bias, rows, w, out=target)


def _lstm(
    x: Tensor,
    weights: Weights,
    h: Tensor,
    c: Tensor,
    reverse: bool,
    y: Tensor,
    saved: Tensor,
    states: Tensor,
    compiled: bool,
) -> None:
    """Write y, the gates i, f, g, o (`saved`) and the cell states."""
    _write_input_gates(x, weights, saved)
    if compiled and compiled_lstm.runs(h.dtype, h.device, h.size(-1)):
        compiled_lstm.forward(weights.r, h, c, reverse, y, saved, states)
        return
    hidden, r = h.shape[-1], weights.r.t()
    gates, (i, f, g, o) = saved.unbind(), (gate.unbind() for gate in saved.chunk(4, -1))
    input_and_forget = saved[..., : 2 * hidden].unbind()
    cells, out = states.unbind(), y.unbind()
    for t in time_order(len(out), reverse):
        gates[t].addmm_(h, r)
        input_and_forget[t].sigmoid_()
        g[t].tanh_()
        o[t].sigmoid_()
        c = torch.mul(f[t], c, out=cells[t]).addcmul_(i[t], g[t])
        h = torch.mul(o[t], torch.tanh(c), out=out[t])


def _gru(x: Tensor, weights: Weights, h: Tensor, reverse: bool, y: Tensor, saved: Tensor) -> None:
    """Write y and the values r, z, n, m (`saved`)."""
    hidden, r = h.shape[-1], weights.r.t()
    input_gates = torch.nn.functional.linear(x, weights.w, weights.b)
    input_rz, input_n = (part.unbind() for part in input_gates.split([2 * hidden, hidden], -1))
    reset_and_update = saved[..., : 2 * hidden].unbind()
    reset, update, new, m = (part.unbind() for part in saved.chunk(4, -1))
    out = y.unbind()
    for t in time_order(len(out), reverse):
        state_gates = torch.mm(h, r) if weights.d is None else torch.addmm(weights.d, h, r)
        torch.add(input_rz[t], state_gates[:, : 2 * hidden], out=reset_and_update[t]).sigmoid_()
        m[t].copy_(state_gates[:, 2 * hidden :])
        torch.addcmul(input_n[t], reset[t], m[t], out=new[t]).tanh_()
        h = torch.lerp(new[t], h, update[t], out=out[t])


def _rnn(
    x: Tensor, weights: Weights, h: Tensor, reverse: bool, activate: Callable[[Tensor], Tensor], y: Tensor
) -> None:
    _write_input_gates(x, weights, y)
    r, out = weights.r.t(), y.unbind()
    for t in time_order(len(out), reverse):
        h = activate(out[t].addmm_(h, r))


def previous_states(initial: Tensor, states: Tensor, reverse: bool) -> Tensor:
    """Return the state [s, b, h] before each step: `initial`[b, h] and all but the last of `states`[s, b, h]."""
    return torch.cat([states[1:], initial[None]] if reverse else [initial[None], states[:-1]])


def backward(
    cell: Cell,
    x: Tensor,
    weights: Weights,
    h: Tensor,
    c: Tensor | None,
    run: Run,
    cotangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    reverse: bool,
    relu: bool,
    output_mask: tuple[bool, bool] = (True, True),
    compiled: bool = False,
) -> Gradients:
    """Return the gradients of `forward`.

    Args:
        cell: that of forward.
        x: that of forward.
        weights: those of forward.
        h: that of forward.
        c: that of forward.
        run: the results of forward.
        cotangents: those of y and of the last h and c; None stands for zeros.
        reverse: that of forward.
        relu: that of forward.
        output_mask: whether the gradients of x and of the weights are needed.
        compiled: whether the compiled kernel may run.
    """
    dy, dh, dc = cotangents
    dy = torch.zeros_like(run.y) if dy is None else dy
    dh = torch.zeros_like(h) if dh is None else dh
    times = time_order(len(dy), not reverse)
    if c is not None and run.states is not None:
        dc = torch.zeros_like(c) if dc is None else dc.clone(memory_format=torch.contiguous_format)
        if compiled and compiled_lstm.runs(h.dtype, h.device, h.size(-1)):
            dh = dh.clone(memory_format=torch.contiguous_format)
            dstate_gates = compiled_lstm.backward(weights.r, run.saved, run.states, c, dy, dh, dc, reverse)
        else:
            c_before = previous_states(c, run.states, reverse)
            dstate_gates, dh = _lstm_backward(weights.r, c_before, run, dy, dh, dc, times)
        dinput_gates = dstate_gates
    elif cell is GRU:
        h_before = previous_states(h, run.y, reverse)
        dinput_gates, dstate_gates, dh = _gru_backward(weights.r, h_before, run.saved, dy, dh, times)
    else:
        factors = (run.y > 0).to(run.y.dtype) if relu else 1 - run.y.square()
        dstate_gates, dh = _rnn_backward(weights.r, factors, dy, dh, times)
        dinput_gates = dstate_gates
    dx = torch.matmul(dinput_gates, weights.w) if output_mask[0] else None
    dweights: Sequence[Tensor | None] = [None] * len(weights)
    if output_mask[1]:
        dweights = _weight_gradients(weights, dinput_gates, dstate_gates, x, h, run.y, reverse)
    return Gradients(dx, dh, dc if c is not None else None, dweights)


def _weight_gradients(
    weights: Weights, dinput_gates: Tensor, dstate_gates: Tensor, x: Tensor, h: Tensor, y: Tensor, reverse: bool
) -> Sequence[Tensor | None]:
    """Return the gradients of `weights` from those of W x + b and of R h + d of all steps; h is the initial state."""
    dw = torch.mm(dinput_gates.flatten(0, 1).t(), x.flatten(0, 1))
    first, later = (dstate_gates[-1], dstate_gates[:-1]) if reverse else (dstate_gates[0], dstate_gates[1:])
    h_before_later = y[1:] if reverse else y[:-1]
    dr = torch.mm(later.flatten(0, 1).t(), h_before_later.flatten(0, 1)).addmm_(first.t(), h)
    db = None if weights.b is None else dinput_gates.sum((0, 1))
    dd = None if weights.d is None else dstate_gates.sum((0, 1))
    return dw, dr, db, dd


def _lstm_backward(
    r: Tensor, c_before: Tensor, run: Run, dy: Tensor, dh: Tensor, dc: Tensor, times: range
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the gates [s, b, 4 h] and of the initial h; dc becomes that of the initial c in place."""
    assert run.states is not None
    i, f, g, o = run.saved.chunk(4, -1)
    tanh_c = torch.tanh(run.states)
    hidden = o.shape[-1]
    o_factors = (tanh_c * o * (1 - o)).unbind()
    h_to_c_factors = (o * (1 - tanh_c.square())).unbind()
    ifg_factors = torch.cat([g * i * (1 - i), c_before * f * (1 - f), i * (1 - g.square())], -1)
    dgates = torch.empty_like(run.saved)
    difg, do = dgates.split([3 * hidden, hidden], -1)
    difg_steps, do_steps, dgates_steps = difg.unflatten(-1, (3, hidden)).unbind(), do.unbind(), dgates.unbind()
    factors, forget, dy_steps = ifg_factors.unflatten(-1, (3, hidden)).unbind(), f.unbind(), dy.unbind()
    for t in times:
        dh = dh + dy_steps[t]
        torch.mul(dh, o_factors[t], out=do_steps[t])
        dc.addcmul_(dh, h_to_c_factors[t])
        torch.mul(dc.unsqueeze(1), factors[t], out=difg_steps[t])
        dc.mul_(forget[t])
        dh = torch.mm(dgates_steps[t], r)
    return dgates, dh


def _gru_backward(
    r: Tensor, h_before: Tensor, saved: Tensor, dy: Tensor, dh: Tensor, times: range
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of W x + b and of R h + d [s, b, 3 h], and of the initial h."""
    reset, update, new, m = saved.chunk(4, -1)
    n_factor = (1 - update) * (1 - new.square())
    r_factor = n_factor * m * reset * (1 - reset)
    z_factor = (h_before - new) * update * (1 - update)
    hidden = new.shape[-1]
    factors = torch.cat([r_factor, z_factor, n_factor * reset], -1).unflatten(-1, (3, hidden)).unbind()
    dstate_gates = torch.empty_like(saved[..., : 3 * hidden], memory_format=torch.contiguous_format)
    total_dh = torch.empty_like(new, memory_format=torch.contiguous_format)
    dgates_by_gate, dgates = dstate_gates.unflatten(-1, (3, hidden)).unbind(), dstate_gates.unbind()
    total_steps, update_steps, dy_steps = total_dh.unbind(), update.unbind(), dy.unbind()
    for t in times:
        total = torch.add(dh, dy_steps[t], out=total_steps[t])
        torch.mul(total.unsqueeze(1), factors[t], out=dgates_by_gate[t])
        dh = (total * update_steps[t]).addmm_(dgates[t], r)
    dinput_gates = torch.cat([dstate_gates[..., : 2 * hidden], total_dh * n_factor], -1)
    return dinput_gates, dstate_gates, dh


def _rnn_backward(r: Tensor, factors: Tensor, dy: Tensor, dh: Tensor, times: range) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sums before the activation [s, b, h] and of the initial h."""
    dsums = torch.empty_like(factors)
    dsum_steps, factor_steps, dy_steps = dsums.unbind(), factors.unbind(), dy.unbind()
    for t in times:
        torch.mul(dh + dy_steps[t], factor_steps[t], out=dsum_steps[t])
        dh = torch.mm(dsum_steps[t], r)
    return dsums, dh
