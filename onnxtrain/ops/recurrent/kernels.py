"""What runs a recurrent layer in torch: `steps`, an LSTM's chain compiled where it may be; else oneDNN's for an LSTM.

Forward and backward against eager (256 wide, 64 steps, 16 samples, float32, 2 cores of an AMD EPYC): GRU 1.25 times as
fast, RNN 1.31; a whole training step of an LSTM 1.11 times (2 cores of a Xeon, `python -m benchmarks --only lstm`).
What the kernel of the forward pass keeps for that of the backward pass goes through the graph as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.ops.recurrent import lstm_compiled
from onnxtrain.ops.recurrent.cells import LSTM, Cell
from onnxtrain.ops.recurrent.steps import Run, Weights, backward, forward
from onnxtrain.system.machine import current_machine
from onnxtrain.torch_compat import dispatch

Tensor = torch.Tensor
_LSTM_MODE = 2  # of oneDNN's and cuDNN's kernels in PyTorch


@dataclass(frozen=True)
class _Direction:
    """One direction of a layer: its input [s, b, i], first states [b, h] and weights."""

    x: Tensor
    h: Tensor
    c: Tensor | None
    weights: Weights
    reverse: bool


def _directions(x: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor | None]) -> list[_Direction]:
    """A layer's one or two directions. Its weights come four for each."""
    found = []
    for d, start in enumerate(range(0, len(weights), 4)):
        w, r, b, back = weights[start : start + 4]
        if w is not None and r is not None:
            found.append(_Direction(x, h0[d], None if c0 is None else c0[d], Weights(w, r, b, back), d == 1))
    return found


def inner(dtype: torch.dtype) -> torch.dtype:
    """The type in which `steps` computes for inputs of this one."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _onednn_runs(cell: Cell, x: Tensor) -> bool:
    """Whether eager PyTorch takes oneDNN's kernel."""
    if cell is not LSTM or x.device.type != "cpu" or not x.numel() or not bool(torch.backends.mkldnn.enabled):
        return False
    if x.dtype == torch.bfloat16:
        return current_machine().onednn_bfloat16
    return x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _kept_bytes(cell: Cell, x: Tensor, hidden: int) -> int:
    """How many bytes `steps` keeps; and one more, which no kernel of a library adds: so both are told apart."""
    width = (len(cell.kept) + cell.has_state) * hidden
    return x.size(0) * x.size(1) * width * inner(x.dtype).itemsize + 1


def layer(
    cell: Cell,
    relu: bool,
    keeps: bool,
    compiled: bool,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    *weights: Tensor | None,
) -> tuple[Any, ...]:
    """A layer of one or both directions: x[s, b, i], h0[D, b, h], c0[D, b, h] of an LSTM.

    `compiled` says whether compiled kernels may run, as soon as they are there.

    Returns:
        y[s, b, D h], the last h[D, b, h], of an LSTM c[D, b, h], and per direction what its kernel keeps: for
        `layer_backward`, where `keeps` says that it will run.

    Raises:
        RuntimeError: x has no steps, as in eager PyTorch.
    """
    if not x.size(0):
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    compiled = compiled and cell is LSTM and lstm_compiled.runs(x.dtype, x.device, h0.size(-1))
    if _onednn_runs(cell, x) and not compiled:
        runs = [_with_onednn(keeps, each) for each in _directions(x, h0, c0, weights)]
    else:
        runs = [_with_steps(cell, relu, compiled, each) for each in _directions(x, h0, c0, weights)]
    if len(runs) == 1:
        y, h, c, kept = runs[0]
        return (y, h[None], kept) if c is None else (y, h[None], c[None], kept)
    (y, h, c, kept), (y_back, h_back, c_back, kept_back) = runs
    states = () if c is None or c_back is None else (torch.stack([c, c_back]),)
    return torch.cat([y, y_back], -1), torch.stack([h, h_back]), *states, kept, kept_back


def _widened(each: _Direction) -> _Direction:
    """What `steps` computes with."""
    wide = inner(each.x.dtype)
    x, h, c = _cast((each.x, each.h, each.c), wide)
    return _Direction(x, h, c, Weights(*_cast(each.weights, wide)), each.reverse)


def _with_steps(
    cell: Cell, relu: bool, compiled: bool, each: _Direction
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    dtype = each.x.dtype
    kept = torch.empty(_kept_bytes(cell, each.x, each.h.size(-1)), dtype=torch.uint8, device=each.x.device)
    each = _widened(each)
    memory = kept[:-1].view(each.x.dtype)
    run = forward(cell, each.x, each.weights, each.h, each.c, each.reverse, relu, memory, compiled)
    # Copies: in a graph y may be written over, and c lies in what is kept.
    last_c = None if run.c is None else run.c.to(dtype, copy=True)
    return run.y.to(dtype), run.h.to(dtype, copy=True), last_c, kept


def _cast(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Any]:
    return [None if t is None else t.to(dtype) for t in tensors]


def _with_onednn(keeps: bool, each: _Direction) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The kernel asks the grad mode whether to keep what its gradient needs; the tape itself is not wanted."""
    assert each.c is not None
    with dispatch.below_autograd(), torch.set_grad_enabled(keeps):
        y, last_h, last_c, kept = torch.mkldnn_rnn_layer(
            *(each.x.contiguous(), *_four(each.weights), each.h, each.c, each.reverse, []),
            *(_LSTM_MODE, each.h.size(-1), 1, True, False, False, keeps),
        )
    return y, last_h.view_as(each.h), last_c.view_as(each.c), kept


def _four(weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With biases of zero where there are none: the kernel reads them."""
    b, d = (weights.w.new_zeros(weights.w.size(0)) if bias is None else bias for bias in (weights.b, weights.d))
    return weights.w, weights.r, b, d


def layer_backward(
    cell: Cell,
    relu: bool,
    asked: tuple[bool, bool],
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
    *kept: Tensor | None,
) -> tuple[Any, ...]:
    """The gradient of `layer`: of x, h0, of an LSTM c0, and of the weights that are there, in their order."""
    found, sides, hidden = [], _directions(x, h0, c0, weights), h0.size(-1)
    for d, (each, memory) in enumerate(zip(sides, kept, strict=False)):
        part = slice(d * hidden, (d + 1) * hidden)
        given = [None if dy is None else dy[..., part], *(None if g is None else g[d] for g in (dh, dc))]
        run = Run(y[..., part], h0[d], None if last_c is None else last_c[d], memory, None)  # type: ignore[arg-type]
        if memory is None or memory.numel() == _kept_bytes(cell, x, hidden):
            found.append(_steps_backward(cell, relu, asked, compiled, given, each, run))
        else:
            found.append(_onednn_backward(given, each, run))
    dx = found[0][0] if len(found) == 1 or not asked[0] else found[0][0] + found[1][0]
    firsts = [torch.stack([f[i] for f in found]) for i in ((1, 2) if cell.has_state else (1,))]
    of_weights = [g for f, each in zip(found, sides, strict=True) for g in _present(f[3], each.weights)]
    return dx, *firsts, *of_weights


def _present(gradients: Sequence[Tensor | None], weights: Weights) -> list[Tensor | None]:
    return [g for g, w in zip(gradients, weights, strict=True) if w is not None]


def _steps_backward(
    cell: Cell,
    relu: bool,
    asked: tuple[bool, bool],
    compiled: bool,
    given: Sequence[Tensor | None],
    each: _Direction,
    run: Run,
) -> tuple[Any, ...]:
    dtype, wide = each.x.dtype, inner(each.x.dtype)
    steps, samples, hidden = run.y.shape
    widths = [len(cell.kept) * hidden, hidden * cell.has_state]
    memory = run.kept[:-1].view(wide)
    kept, states = (
        part.view(steps, samples, width)
        for part, width in zip(memory.split([steps * samples * width for width in widths]), widths, strict=True)
    )
    run = Run(run.y.to(wide), each.h, None, kept, states)
    dy, dh, dc = _cast(given, wide)
    each = _widened(each)
    dx, dh0, dc0, of_weights = backward(
        cell, each.x, each.weights, each.h, each.c, run, (dy, dh, dc), each.reverse, relu, asked, compiled
    )
    return (*_cast((dx, dh0, dc0), dtype), _cast(of_weights, dtype))


def _onednn_backward(given: Sequence[Tensor | None], each: _Direction, run: Run) -> tuple[Any, ...]:
    h, c = each.h, each.c
    assert c is not None
    assert run.c is not None
    dy, dh, dc = given
    y = run.y.contiguous()
    dy = torch.zeros_like(y) if dy is None else dy.contiguous()
    dh, dc = (torch.zeros_like(h) if g is None else g for g in (dh, dc))
    last = y[0 if each.reverse else -1]
    dx, dw, dr, db, dd, dh0, dc0 = torch.ops.aten.mkldnn_rnn_layer_backward.default(
        *(each.x.contiguous(), *_four(each.weights), h, c, y, last, run.c, dy, dh, dc, each.reverse),
        *(_LSTM_MODE, h.size(-1), 1, True, True, False, [], False, run.kept),
    )
    dx, dh0, dc0, *of_weights = _cast((dx, dh0.view_as(h), dc0.view_as(c), dw, dr, db, dd), each.x.dtype)
    return dx, dh0, dc0, of_weights
