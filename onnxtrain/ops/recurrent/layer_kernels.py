"""The torch kernels of a recurrent layer: our own (`direction_kernels`), or, for an LSTM, oneDNN's.

An LSTM uses oneDNN's kernel if eager PyTorch does, until our compiled one is loaded.

Forward and backward against eager (width 256, 64 steps, 16 samples, float32, 2 cores of an AMD EPYC): GRU 1.25 times as
fast, RNN 1.31; a complete training step of an LSTM 1.11 times (2 cores of a Xeon, `python -m benchmarks --only lstm`).
The values that the forward kernel saves for backward pass through the graph as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.ops.recurrent import compiled_lstm
from onnxtrain.ops.recurrent.cells import LSTM, Cell
from onnxtrain.ops.recurrent.direction_kernels import Run, Weights, backward, forward
from onnxtrain.system.machine import current_machine
from onnxtrain.torch_compat import dispatch

Tensor = torch.Tensor
_LSTM_MODE = 2  # the mode argument of PyTorch's oneDNN and cuDNN kernels


@dataclass(frozen=True)
class _Direction:
    """One direction of a layer: its input x[s, b, i], initial states h and c [b, h], and weights."""

    x: Tensor
    h: Tensor
    c: Tensor | None
    weights: Weights
    reverse: bool


def _directions(x: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor | None]) -> list[_Direction]:
    """Return the one or two directions of a layer; `weights` holds four for each."""
    directions = []
    for index, start in enumerate(range(0, len(weights), 4)):
        w, r, b, d = weights[start : start + 4]
        if w is not None and r is not None:
            c = None if c0 is None else c0[index]
            directions.append(_Direction(x, h0[index], c, Weights(w, r, b, d), reverse=index == 1))
    return directions


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which `direction_kernels` computes for inputs of `dtype`: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _onednn_runs(cell: Cell, x: Tensor) -> bool:
    """Return whether eager PyTorch uses oneDNN's kernel."""
    if cell is not LSTM or x.device.type != "cpu" or not x.numel() or not bool(torch.backends.mkldnn.enabled):
        return False
    if x.dtype == torch.bfloat16:
        return current_machine().onednn_bfloat16
    return x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _saved_bytes(cell: Cell, x: Tensor, hidden: int) -> int:
    """Return the bytes that our kernels save, plus one.

    By this odd size backward tells them from oneDNN's workspace.
    """
    width = (len(cell.saved) + cell.has_state) * hidden
    return x.size(0) * x.size(1) * width * compute_dtype(x.dtype).itemsize + 1


def layer(
    cell: Cell,
    relu: bool,
    trains: bool,
    compiled: bool,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    *weights: Tensor | None,
) -> tuple[Any, ...]:
    """Run a layer of D directions: x[s, b, i], h0[D, b, h] and, for an LSTM, c0[D, b, h].

    `trains` says whether `layer_backward` will run, `compiled` whether compiled kernels may run once they are loaded.

    Returns:
        y[s, b, D h], the last h[D, b, h], for an LSTM the last c[D, b, h], and for each direction the bytes that its
        kernel saves for `layer_backward`.

    Raises:
        RuntimeError: x has no steps, as in eager PyTorch.
    """
    if not x.size(0):
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    compiled = compiled and cell is LSTM and compiled_lstm.runs(x.dtype, x.device, h0.size(-1))
    if _onednn_runs(cell, x) and not compiled:
        runs = [_with_onednn(trains, direction) for direction in _directions(x, h0, c0, weights)]
    else:
        runs = [_with_our_kernels(cell, relu, compiled, direction) for direction in _directions(x, h0, c0, weights)]
    if len(runs) == 1:
        y, h, c, saved = runs[0]
        return (y, h[None], saved) if c is None else (y, h[None], c[None], saved)
    (y, h, c, saved), (y_reverse, h_reverse, c_reverse, saved_reverse) = runs
    cell_states = () if c is None or c_reverse is None else (torch.stack([c, c_reverse]),)
    return torch.cat([y, y_reverse], -1), torch.stack([h, h_reverse]), *cell_states, saved, saved_reverse


def _widened(direction: _Direction) -> _Direction:
    """Return the direction in the dtype of the computation."""
    wide = compute_dtype(direction.x.dtype)
    x, h, c = _cast((direction.x, direction.h, direction.c), wide)
    return _Direction(x, h, c, Weights(*_cast(direction.weights, wide)), direction.reverse)


def _with_our_kernels(
    cell: Cell, relu: bool, compiled: bool, direction: _Direction
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    x, dtype = direction.x, direction.x.dtype
    saved = torch.empty(_saved_bytes(cell, x, direction.h.size(-1)), dtype=torch.uint8, device=x.device)
    direction = _widened(direction)
    memory = saved[:-1].view(direction.x.dtype)
    run = forward(
        cell,
        direction.x,
        direction.weights,
        direction.h,
        direction.c,
        direction.reverse,
        relu,
        memory,
        compiled,
    )
    # Copies of the last states: the program may overwrite y in place, and c is part of `saved`.
    last_c = None if run.c is None else run.c.to(dtype, copy=True)
    return run.y.to(dtype), run.h.to(dtype, copy=True), last_c, saved


def _cast(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Any]:
    return [None if t is None else t.to(dtype) for t in tensors]


def _with_onednn(trains: bool, direction: _Direction) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """OneDNN's kernel saves its workspace if grad mode is enabled; it runs below autograd, which would record it."""
    h, c = direction.h, direction.c
    assert c is not None
    with dispatch.below_autograd(), torch.set_grad_enabled(trains):
        y, last_h, last_c, workspace = torch.mkldnn_rnn_layer(
            *(direction.x.contiguous(), *_weights_with_biases(direction.weights), h, c, direction.reverse, []),
            *(_LSTM_MODE, h.size(-1), 1, True, False, False, trains),
        )
    return y, last_h.view_as(h), last_c.view_as(c), workspace


def _weights_with_biases(weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weights with zeros for absent biases: oneDNN's kernel requires them."""
    b, d = (weights.w.new_zeros(weights.w.size(0)) if bias is None else bias for bias in (weights.b, weights.d))
    return weights.w, weights.r, b, d


def layer_backward(
    cell: Cell,
    relu: bool,
    output_mask: tuple[bool, bool],
    compiled: bool,
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor | None],
    y: Tensor,
    last_c: Tensor | None,
    *saved: Tensor | None,
) -> tuple[Any, ...]:
    """Return the gradients of `layer`: of x, h0, for an LSTM c0, and the weights that are present, in their order.

    `output_mask` says whether the gradients of x and of the weights are needed.
    """
    gradients, directions, hidden = [], _directions(x, h0, c0, weights), h0.size(-1)
    for d, (direction, memory) in enumerate(zip(directions, saved, strict=False)):
        part = slice(d * hidden, (d + 1) * hidden)
        cotangents = [None if dy is None else dy[..., part], *(None if g is None else g[d] for g in (dh, dc))]
        run = Run(y[..., part], h0[d], None if last_c is None else last_c[d], memory, None)  # type: ignore[arg-type]
        if memory is None or memory.numel() == _saved_bytes(cell, x, hidden):
            gradients.append(_our_backward(cell, relu, output_mask, compiled, cotangents, direction, run))
        else:
            gradients.append(_onednn_backward(cotangents, direction, run))
    dx = gradients[0][0] if len(gradients) == 1 or not output_mask[0] else gradients[0][0] + gradients[1][0]
    dstates = [torch.stack([g[i] for g in gradients]) for i in ((1, 2) if cell.has_state else (1,))]
    dweights = [
        g
        for (*_, all_weights), direction in zip(gradients, directions, strict=True)
        for g in _present(all_weights, direction.weights)
    ]
    return dx, *dstates, *dweights


def _present(gradients: Sequence[Tensor | None], weights: Weights) -> list[Tensor | None]:
    return [g for g, w in zip(gradients, weights, strict=True) if w is not None]


def _our_backward(
    cell: Cell,
    relu: bool,
    output_mask: tuple[bool, bool],
    compiled: bool,
    cotangents: Sequence[Tensor | None],
    direction: _Direction,
    run: Run,
) -> tuple[Any, ...]:
    dtype, wide = direction.x.dtype, compute_dtype(direction.x.dtype)
    steps, samples, hidden = run.y.shape
    widths = [len(cell.saved) * hidden, hidden * cell.has_state]
    memory = run.saved[:-1].view(wide)
    saved, states = (
        part.view(steps, samples, width)
        for part, width in zip(memory.split([steps * samples * width for width in widths]), widths, strict=True)
    )
    run = Run(run.y.to(wide), direction.h, None, saved, states)
    dy, dh, dc = _cast(cotangents, wide)
    direction = _widened(direction)
    dx, dh0, dc0, dweights = backward(
        cell,
        direction.x,
        direction.weights,
        direction.h,
        direction.c,
        run,
        (dy, dh, dc),
        direction.reverse,
        relu,
        output_mask,
        compiled,
    )
    return (*_cast((dx, dh0, dc0), dtype), _cast(dweights, dtype))


def _onednn_backward(cotangents: Sequence[Tensor | None], direction: _Direction, run: Run) -> tuple[Any, ...]:
    h, c = direction.h, direction.c
    assert c is not None
    assert run.c is not None
    dy, dh, dc = cotangents
    y = run.y.contiguous()
    dy = torch.zeros_like(y) if dy is None else dy.contiguous()
    dh, dc = (torch.zeros_like(h) if g is None else g for g in (dh, dc))
    last_h = y[0 if direction.reverse else -1]
    weights = _weights_with_biases(direction.weights)
    dx, dw, dr, db, dd, dh0, dc0 = torch.ops.aten.mkldnn_rnn_layer_backward.default(
        *(direction.x.contiguous(), *weights, h, c, y, last_h, run.c, dy, dh, dc, direction.reverse),
        *(_LSTM_MODE, h.size(-1), 1, True, True, False, [], False, run.saved),
    )
    dx, dh0, dc0, *dweights = _cast((dx, dh0.view_as(h), dc0.view_as(c), dw, dr, db, dd), direction.x.dtype)
    return dx, dh0, dc0, dweights
