"""One direction of a recurrent layer in torch, step by step, on any device and in any floating type.

Whatever does not depend on the step before is computed for all steps at once: W x + b in front, and in the gradient
everything but the chain itself. The gradient is linear in that of the states, so that a step of it is a product with
factors that are ready, and one with R. Per step an LSTM takes 8 kernels forward and 6 back.

Gates are in PyTorch's order throughout. s steps, b samples, i inputs, h hidden; G gates, K kept (`Cell.kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from onnxtrain.ops.recurrent import lstm_compiled
from onnxtrain.ops.recurrent.cells import GRU, Cell

Tensor = torch.Tensor


class Weights(NamedTuple):
    """w[G h, i], r[G h, h], and biases [G h] of the input's and of the state's side."""

    w: Tensor
    r: Tensor
    b: Tensor | None
    d: Tensor | None


class Run(NamedTuple):
    """y[s, b, h], the last states h[b, h] and c[b, h], kept[s, b, K h] and all cell states [s, b, h]."""

    y: Tensor
    h: Tensor
    c: Tensor | None
    kept: Tensor
    states: Tensor | None


class Gradients(NamedTuple):
    """Of x, of the first states, and of `Weights`; None where it was not asked for."""

    x: Tensor | None
    h: Tensor
    c: Tensor | None
    weights: Sequence[Tensor | None]


def order(steps: int, reverse: bool) -> range:
    """The steps as a direction takes them."""
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
    """Runs a direction.

    Args:
        cell: which.
        x: [s, b, i].
        weights: see there.
        h: the first state [b, h].
        c: an LSTM's first cell state [b, h].
        reverse: whether it goes from the last step to the first.
        relu: of an RNN: relu in place of tanh.
        memory: where kept and cell states are written, as many elements as they have.
        compiled: whether the compiled kernel may run.
    """
    steps, samples, hidden = *x.shape[:2], h.shape[-1]
    widths = [len(cell.kept) * hidden, hidden * cell.has_state]
    if memory is None:
        memory = x.new_empty(steps * samples * sum(widths))
    kept, states = (
        part.view(steps, samples, width)
        for part, width in zip(memory.split([steps * samples * width for width in widths]), widths, strict=True)
    )
    y = x.new_empty(steps, samples, hidden)
    if c is not None:
        _lstm(x, weights, h, c, reverse, y, kept, states, compiled)
    elif cell is GRU:
        _gru(x, weights, h, reverse, y, kept)
    else:
        _rnn(x, weights, h, reverse, torch.relu_ if relu else torch.tanh_, y)
    last = 0 if reverse else steps - 1
    return Run(y, y[last], None if c is None else states[last], kept, None if c is None else states)


def _sides(x: Tensor, weights: Weights, out: Tensor) -> None:
    """W x + b + d of all steps, into out[s, b, G h]."""
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
    kept: Tensor,
    states: Tensor,
    compiled: bool,
) -> None:
    _sides(x, weights, kept)
    if compiled and lstm_compiled.runs(h.dtype, h.device, h.size(-1)):
        lstm_compiled.forward(weights.r, h, c, reverse, y, kept, states)
        return
    hidden, r = h.shape[-1], weights.r.t()
    two, third, last = (part.unbind() for part in kept.split([2 * hidden, hidden, hidden], -1))
    forget = kept[..., hidden : 2 * hidden].unbind()
    into, whole, cells, out = kept[..., :hidden].unbind(), kept.unbind(), states.unbind(), y.unbind()
    for t in order(len(out), reverse):
        whole[t].addmm_(h, r)
        two[t].sigmoid_()
        third[t].tanh_()
        last[t].sigmoid_()
        c = torch.mul(forget[t], c, out=cells[t]).addcmul_(into[t], third[t])
        h = torch.mul(last[t], torch.tanh(c), out=out[t])


def _gru(x: Tensor, weights: Weights, h: Tensor, reverse: bool, y: Tensor, kept: Tensor) -> None:
    hidden, r = h.shape[-1], weights.r.t()
    sides = torch.nn.functional.linear(x, weights.w, weights.b)
    two, third = (part.unbind() for part in sides.split([2 * hidden, hidden], -1))
    both, new, middle = (part.unbind() for part in kept.split([2 * hidden, hidden, hidden], -1))
    reset, update, out = kept[..., :hidden].unbind(), kept[..., hidden : 2 * hidden].unbind(), y.unbind()
    for t in order(len(out), reverse):
        side = torch.mm(h, r) if weights.d is None else torch.addmm(weights.d, h, r)
        torch.add(two[t], side[:, : 2 * hidden], out=both[t]).sigmoid_()
        middle[t].copy_(side[:, 2 * hidden :])
        torch.addcmul(third[t], reset[t], middle[t], out=new[t]).tanh_()
        h = torch.lerp(new[t], h, update[t], out=out[t])


def _rnn(
    x: Tensor, weights: Weights, h: Tensor, reverse: bool, activate: Callable[[Tensor], Tensor], y: Tensor
) -> None:
    _sides(x, weights, y)
    r, out = weights.r.t(), y.unbind()
    for t in order(len(out), reverse):
        h = activate(out[t].addmm_(h, r))


def earlier(first: Tensor, values: Tensor, reverse: bool) -> Tensor:
    """What each step starts from: `first`[b, h], then `values`[s, b, h] but the last, in the direction's order."""
    return torch.cat([values[1:], first[None]] if reverse else [first[None], values[:-1]])


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
    asked: tuple[bool, bool] = (True, True),
    compiled: bool = False,
) -> Gradients:
    """The gradient of `forward`.

    Args:
        cell: as there.
        x: as there.
        weights: as there.
        h: as there.
        c: as there.
        run: what it gave.
        cotangents: of y, and of the last h and c.
        reverse: as there.
        relu: as there.
        asked: whether x's and the weights' gradients are wanted.
        compiled: as there.
    """
    dy, dh, dc = cotangents
    dy = torch.zeros_like(run.y) if dy is None else dy
    dh = torch.zeros_like(h) if dh is None else dh
    times = order(len(dy), not reverse)
    if c is not None and run.states is not None:
        dc = torch.zeros_like(c) if dc is None else dc.clone(memory_format=torch.contiguous_format)
        if compiled and lstm_compiled.runs(h.dtype, h.device, h.size(-1)):
            dh = dh.clone(memory_format=torch.contiguous_format)
            state = lstm_compiled.backward(weights.r, run.kept, run.states, c, dy, dh, dc, reverse)
        else:
            state, dh = _lstm_back(weights.r, earlier(c, run.states, reverse), run, dy, dh, dc, times)
        inputs = state
    elif cell is GRU:
        inputs, state, dh = _gru_back(weights.r, earlier(h, run.y, reverse), run.kept, dy, dh, times)
    else:
        factors = (run.y > 0).to(run.y.dtype) if relu else 1 - run.y.square()
        state, dh = _rnn_back(weights.r, factors, dy, dh, times)
        inputs = state
    dx = torch.matmul(inputs, weights.w) if asked[0] else None
    of_weights = _of_weights(weights, inputs, state, x, h, run.y, reverse) if asked[1] else [None] * len(weights)
    return Gradients(dx, dh, dc if c is not None else None, of_weights)


def _of_weights(
    weights: Weights, inputs: Tensor, state: Tensor, x: Tensor, h: Tensor, y: Tensor, reverse: bool
) -> Sequence[Tensor | None]:
    """From the gradients of all steps' gates: on the side of x, and on that of the states, which start from h."""
    dw = torch.mm(inputs.flatten(0, 1).t(), x.flatten(0, 1))
    (first, later), before = (state[-1], state[:-1]) if reverse else (state[0], state[1:]), y[1:] if reverse else y[:-1]
    dr = torch.mm(later.flatten(0, 1).t(), before.flatten(0, 1)).addmm_(first.t(), h)
    db = None if weights.b is None else inputs.sum((0, 1))
    dd = None if weights.d is None else state.sum((0, 1))
    return dw, dr, db, dd


def _lstm_back(
    r: Tensor, states_before: Tensor, run: Run, dy: Tensor, dh: Tensor, dc: Tensor, times: range
) -> tuple[Tensor, Tensor]:
    assert run.states is not None
    i, f, g, o = run.kept.chunk(4, -1)
    squashed = torch.tanh(run.states)
    hidden = o.shape[-1]
    of_o = (squashed * o * (1 - o)).unbind()
    into_c = (o * (1 - squashed.square())).unbind()
    of_ifg = torch.cat([g * i * (1 - i), states_before * f * (1 - f), i * (1 - g.square())], -1)
    found = torch.empty_like(run.kept)
    first, last = found.split([3 * hidden, hidden], -1)
    ifg, out, whole = first.unflatten(-1, (3, hidden)).unbind(), last.unbind(), found.unbind()
    factors, forget, given = of_ifg.unflatten(-1, (3, hidden)).unbind(), f.unbind(), dy.unbind()
    for t in times:
        dh = dh + given[t]
        torch.mul(dh, of_o[t], out=out[t])
        dc.addcmul_(dh, into_c[t])
        torch.mul(dc.unsqueeze(1), factors[t], out=ifg[t])
        dc.mul_(forget[t])
        dh = torch.mm(whole[t], r)
    return found, dh


def _gru_back(
    r: Tensor, before: Tensor, kept: Tensor, dy: Tensor, dh: Tensor, times: range
) -> tuple[Tensor, Tensor, Tensor]:
    reset, update, new, middle = kept.chunk(4, -1)
    of_new = (1 - update) * (1 - new.square())
    of_reset = of_new * middle * reset * (1 - reset)
    of_update = (before - new) * update * (1 - update)
    hidden = new.shape[-1]
    factors = torch.cat([of_reset, of_update, of_new * reset], -1).unflatten(-1, (3, hidden)).unbind()
    state = torch.empty_like(kept[..., : 3 * hidden], memory_format=torch.contiguous_format)
    totals = torch.empty_like(new, memory_format=torch.contiguous_format)
    parts, whole, total = state.unflatten(-1, (3, hidden)).unbind(), state.unbind(), totals.unbind()
    passed, given = update.unbind(), dy.unbind()
    for t in times:
        all_of_it = torch.add(dh, given[t], out=total[t])
        torch.mul(all_of_it.unsqueeze(1), factors[t], out=parts[t])
        dh = (all_of_it * passed[t]).addmm_(whole[t], r)
    inputs = torch.cat([state[..., : 2 * hidden], totals * of_new], -1)
    return inputs, state, dh


def _rnn_back(r: Tensor, factors: Tensor, dy: Tensor, dh: Tensor, times: range) -> tuple[Tensor, Tensor]:
    found = torch.empty_like(factors)
    out, factor, given = found.unbind(), factors.unbind(), dy.unbind()
    for t in times:
        torch.mul(dh + given[t], factor[t], out=out[t])
        dh = torch.mm(out[t], r)
    return found, dh
