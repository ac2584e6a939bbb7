"""The lower bound of a step: its GEMMs and convolutions alone, each by the fastest available kernel.

    eager step ─record─▶ GEMMs, with sizes and strides ─try kernels─▶ one call each ─▶ timed in the rounds of the step

The batched matmuls of attention are not included, because a kernel that never writes the scores has no such matmul;
nor are recurrent layers, which are one op. onnxtrain skips dead rows, so the bound of its step is lower by the FLOPs
that it skips (`matmul_flops`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from onnxtrain.execute.reused_memory import LIBRARY as MEMORY
from onnxtrain.ops.convolution.weight_gradient import LIBRARY as CONVOLUTIONS
from onnxtrain.ops.convolution.weight_gradient import convolution_gradients
from onnxtrain.ops.matmul import compiled_gemm
from onnxtrain.ops.matmul.candidates import gemm_by_convolution, gemm_in_float32, onednn_gemm

aten = torch.ops.aten
Call = Callable[[], object]
Shapes = Sequence[list[int]]

# By name: transformers registers its own when its experts are first imported.
_OPAQUE = frozenset({
    "aten::mkldnn_rnn_layer",
    "aten::_thnn_fused_lstm_cell",
    "aten::_grouped_mm",
    "transformers::grouped_mm_fallback",
})  # fmt: skip
_TRIALS = 5


class _Recorder(TorchDispatchMode):
    """Record the GEMMs and convolutions of the code that runs under it, including backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.is_opaque = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CANDIDATES:
            self.calls.append((func, tuple(_described(argument) for argument in args)))
        self.is_opaque = self.is_opaque or func.name().partition(".")[0] in _OPAQUE
        return func(*args, **(kwargs or {}))


def _described(argument: Any) -> Any:
    """Return a hashable description of an argument: a tensor without its values, a list as a tuple."""
    if isinstance(argument, torch.Tensor):
        return _Operand(tuple(argument.shape), argument.stride(), argument.dtype, argument.device)
    return tuple(argument) if isinstance(argument, list) else argument


@dataclass(frozen=True)
class _Operand:
    """A tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def random(self) -> torch.Tensor:
        """Return such a tensor, with random values."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        values = torch.randn(max(last, 0) + 1, device=self.device).to(self.dtype)
        return values.as_strided(self.shape, self.strides)


class Gemms:
    """The GEMMs and convolutions of `step`, ready to run alone.

    Attributes:
        count: how many there are; 0 if the step has fused ops whose GEMMs cannot run alone.
        flops: the floating-point operations of all of them.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        with _Recorder() as recorder:
            step()
        self._calls: list[Call] = []
        self.flops = 0
        if not recorder.is_opaque:
            fastest = {key: _fastest(*key) for key in set(recorder.calls)}
            self._calls = [fastest[key][0] for key in recorder.calls]
            self.flops = sum(fastest[key][1] for key in recorder.calls)
        self.count = len(self._calls)
        if MEMORY.wait():
            MEMORY.functions.add_program()

    def run(self) -> float:
        """Run all of them in order; return the seconds."""
        on_gpu = torch.cuda.is_available()
        started = time.perf_counter()
        with _reused_memory():
            for call in self._calls:
                call()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started


@contextlib.contextmanager
def _reused_memory() -> Iterator[None]:
    """Reuse the memory of the previous round for the results, as "reuse_memory" does: the system zeroes fresh memory.

    In a process with five variants, BERT's GEMMs, with logits of 30,522 words, run at 133 GFLOP/s this way, and at 98
    if memory is freed each time: then they took longer than onnxtrain's whole step.
    """
    native = MEMORY.functions
    if native is None:
        yield
        return
    native.begin_run()
    try:
        yield
    finally:
        native.end_run()


def matmul_flops(step: Callable[[], object]) -> int:
    """Return the FLOPs of a step's matmuls, by kernels of PyTorch, oneDNN, 1×1 convolutions or onnxtrain.

    Other convolutions are not counted: they are the same in every variant.
    """
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile,
        _compiled_gemms() as compiled,
    ):
        step()
    events = profile.events() or ()
    return sum(compiled) + sum(_FLOPS[e.name](e.input_shapes) for e in events if e.name in _FLOPS)


@contextlib.contextmanager
def _compiled_gemms() -> Iterator[list[int]]:
    """Collect the FLOPs of each call of the compiled GEMM kernel, which the profiler does not see."""
    flops: list[int] = []
    functions = compiled_gemm.LIBRARY.functions
    if functions is None:
        yield flops
        return
    gemm = functions.gemm

    def counted(*arguments: Any) -> None:
        m, n, k = arguments[4:7]
        flops.append(2 * m * n * k)
        gemm(*arguments)

    functions.gemm = counted
    try:
        yield flops
    finally:
        functions.gemm = gemm


def _flops_of_mm(shapes: Shapes) -> int:
    """Return the FLOPs of mm(a, b), which may have an `out` as well."""
    a, b, *_ = shapes
    return 2 * math.prod(a) * b[1]


def _flops_of_addmm(shapes: Shapes) -> int:
    """Return the FLOPs of addmm(bias, a, b)."""
    return _flops_of_mm(shapes[1:])


def _flops_of_linear(shapes: Shapes) -> int:
    """Return the FLOPs of linear(x[.., k], weight[n, k])."""
    return 2 * math.prod(shapes[0]) * shapes[1][0]


def _flops_of_weight_gradient(shapes: Shapes) -> int:
    """Return the FLOPs of `gemm_by_convolution`: dy[.., n, rows, 1], images of width 1, and weight[n, k, 1, 1]."""
    dy, _, weight = shapes[:3]
    is_gemm = len(weight) == 4 and weight[2:] == [1, 1] and dy[3] == 1
    return 2 * math.prod(dy) * weight[1] if is_gemm else 0


_FLOPS: dict[str, Callable[[Shapes], int]] = {
    "aten::mm": _flops_of_mm,
    "aten::addmm": _flops_of_addmm,
    "mkldnn::_linear_pointwise": _flops_of_linear,
    "aten::convolution_backward": _flops_of_weight_gradient,
}


def _fastest(func: Any, arguments: tuple[Any, ...]) -> tuple[Call, int]:
    """Return the fastest call that computes an operator, and its FLOPs."""
    operands = [a.random() if isinstance(a, _Operand) else list(a) if isinstance(a, tuple) else a for a in arguments]
    calls = _CANDIDATES[func](func, operands)
    with FlopCounterMode(display=False) as counter:
        func(*operands)
    return calls[0] if len(calls) == 1 else min(calls, key=_seconds), counter.get_total_flops()


def _seconds(call: Call) -> float:
    shortest = math.inf
    for _ in range(_TRIALS):
        started = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


def _gemm_candidates(func: Any, operands: list[Any]) -> list[Call]:
    """Return calls that compute mm(a, b) or addmm(bias, a, b)."""
    *bias, a, b = operands
    added = bias[0] if bias else None
    calls: list[Call] = [functools.partial(func, *operands)]
    if a.device.type != "cpu":
        return calls
    if a.dtype == torch.float32:
        calls.append(functools.partial(onednn_gemm, a, b, added if added is None or added.dim() == 1 else None, 1.0))
        if compiled_gemm.LIBRARY.wait() and (added is None or added.dim() == 1):
            calls.append(functools.partial(compiled_gemm.gemm, a, b, added, 1.0))
        if added is None and a.stride(0) == 1:  # a weight gradient
            calls.append(functools.partial(gemm_by_convolution, a.t(), b, 1.0))
    elif a.dtype in (torch.bfloat16, torch.float16):
        calls.append(functools.partial(gemm_in_float32, a, b, added, 1.0))
    return calls


def _convolution_candidates(func: Any, operands: list[Any]) -> list[Call]:
    """Return calls of a convolution in its own memory format, and in channels_last."""
    calls: list[Call] = [functools.partial(func, *operands)]
    are_images = [isinstance(a, torch.Tensor) and a.dim() == 4 for a in operands]
    if any(are_images):
        channels_last = [
            a.contiguous(memory_format=torch.channels_last) if is_image else a
            for a, is_image in zip(operands, are_images, strict=True)
        ]
        calls.append(functools.partial(func, *channels_last))
        calls += _weight_gradient_candidates(func, channels_last)
    return calls


def _weight_gradient_candidates(func: Any, operands: list[Any]) -> list[Call]:
    """Return a call of the compiled kernel, for convolutions of channels_last images without groups."""
    if func is not aten.convolution_backward.default or not CONVOLUTIONS.wait():
        return []
    dy, x, w, _, strides, pads, dilations, transposed, _, groups, mask = operands
    if transposed or groups != 1 or not mask[1] or x.dim() != 4 or x.dtype != torch.float32 or x.device.type != "cpu":
        return []
    return [functools.partial(convolution_gradients, dy, x, w, strides, pads, dilations, mask)]


_CANDIDATES: dict[Any, Callable[[Any, list[Any]], list[Call]]] = {
    aten.mm.default: _gemm_candidates,
    aten.addmm.default: _gemm_candidates,
    aten.convolution.default: _convolution_candidates,
    aten.convolution_backward.default: _convolution_candidates,
}
