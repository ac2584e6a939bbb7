"""The limit of a step: its matrix products and convolutions alone, each by the fastest kernel that is known.

    eager step ─record─▶ products, with sizes and order ─try kernels─▶ one call each ─▶ timed in the rounds of the step

Attention's products of batches are not among them (a kernel that never writes the scores has no such product to
time), nor are recurrent layers, which are one op. Onnxtrain leaves out rows that nobody reads: the limit of its step is
lower by the operations that it has not (`matrix_flops`).
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

_OPAQUE = frozenset({aten.mkldnn_rnn_layer.default, aten._thnn_fused_lstm_cell.default})
_TRIALS = 5


class _Record(TorchDispatchMode):
    """Notes the products of all that runs under it; gradients too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...]]] = []
        self.opaque = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            self.found.append((func, tuple(_described(argument) for argument in args)))
        self.opaque = self.opaque or func in _OPAQUE
        return func(*args, **(kwargs or {}))


def _described(argument: Any) -> Any:
    """An argument as something that can be compared: a tensor without its elements, a list as a tuple."""
    if isinstance(argument, torch.Tensor):
        return _Operand(tuple(argument.shape), argument.stride(), argument.dtype, argument.device)
    return tuple(argument) if isinstance(argument, list) else argument


@dataclass(frozen=True)
class _Operand:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> torch.Tensor:
        """Such a tensor, of random numbers."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        numbers = torch.randn(max(last, 0) + 1, device=self.device).to(self.dtype)
        return numbers.as_strided(self.shape, self.strides)


class Products:
    """The products of `step`, ready to run alone.

    Attributes:
        count: how many; 0 where a step's products cannot be taken apart.
        operations: floating-point operations of all of them.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        with _Record() as record:
            step()
        self._calls: list[Call] = []
        self.operations = 0
        if not record.opaque:
            best = {key: _fastest(*key) for key in set(record.found)}
            self._calls = [best[key][0] for key in record.found]
            self.operations = sum(best[key][1] for key in record.found)
        self.count = len(self._calls)
        if MEMORY.wait():
            MEMORY.functions.add_program()

    def run(self) -> float:
        """The seconds that all of them take, one after the other."""
        on_gpu = torch.cuda.is_available()
        started = time.perf_counter()
        with _memory_at_hand():
            for call in self._calls:
                call()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started


@contextlib.contextmanager
def _memory_at_hand() -> Iterator[None]:
    """Results use the memory of the round before, as with "reuse_memory": the system clears fresh memory.

    In a process with five variants BERT's products, with scores of 30,522 words, run at 133 GFLOP/s so, and at 98
    where memory is given back each time: they took longer than onnxtrain's whole step.
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


def matrix_flops(step: Callable[[], object]) -> int:
    """Floating-point operations of the step's products of two matrices: of PyTorch, oneDNN, 1×1 convolutions, our own.

    Convolutions that are none of these products are not counted: they are the same in every variant.
    """
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile,
        _compiled_products() as compiled,
    ):
        step()
    events = profile.events() or ()
    return sum(compiled) + sum(_FLOPS[e.name](e.input_shapes) for e in events if e.name in _FLOPS)


@contextlib.contextmanager
def _compiled_products() -> Iterator[list[int]]:
    """The operations of each product by the compiled kernel, which the profiler does not see."""
    found: list[int] = []
    functions = compiled_gemm.LIBRARY.functions
    if functions is None:
        yield found
        return
    gemm = functions.gemm

    def counted(*arguments: Any) -> None:
        m, n, k = arguments[4:7]
        found.append(2 * m * n * k)
        gemm(*arguments)

    functions.gemm = counted
    try:
        yield found
    finally:
        functions.gemm = gemm


def _flops_of_product(shapes: Shapes) -> int:
    """Of mm(a, b) and addmm(bias, a, b)."""
    *_, a, b = (shape for shape in shapes if len(shape) == 2)
    return 2 * math.prod(a) * b[1]


def _flops_of_linear(shapes: Shapes) -> int:
    """Of x[.., k] and weight[n, k]."""
    return 2 * math.prod(shapes[0]) * shapes[1][0]


def _flops_of_weight_gradient(shapes: Shapes) -> int:
    """Of `gemm_by_convolution`: dy[.., n, rows, 1], whose images are one wide, and weight[n, k, 1, 1]."""
    dy, _, weight = shapes[:3]
    is_product = len(weight) == 4 and weight[2:] == [1, 1] and dy[3] == 1
    return 2 * math.prod(dy) * weight[1] if is_product else 0


_FLOPS: dict[str, Callable[[Shapes], int]] = {
    "aten::mm": _flops_of_product,
    "aten::addmm": _flops_of_product,
    "mkldnn::_linear_pointwise": _flops_of_linear,
    "aten::convolution_backward": _flops_of_weight_gradient,
}


def _fastest(func: Any, arguments: tuple[Any, ...]) -> tuple[Call, int]:
    """The fastest way, and the operations of the product."""
    given = [a.made() if isinstance(a, _Operand) else list(a) if isinstance(a, tuple) else a for a in arguments]
    calls = _PRODUCTS[func](func, given)
    with FlopCounterMode(display=False) as counter:
        func(*given)
    return calls[0] if len(calls) == 1 else min(calls, key=_seconds), counter.get_total_flops()


def _seconds(call: Call) -> float:
    least = math.inf
    for _ in range(_TRIALS):
        started = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - started)
    return least


def _ways_of_product(func: Any, given: list[Any]) -> list[Call]:
    """Of mm(a, b) and addmm(bias, a, b)."""
    *bias, a, b = given
    added = bias[0] if bias else None
    ways: list[Call] = [functools.partial(func, *given)]
    if a.device.type != "cpu":
        return ways
    if a.dtype == torch.float32:
        ways.append(functools.partial(onednn_gemm, a, b, added if added is None or added.dim() == 1 else None, 1.0))
        if compiled_gemm.LIBRARY.wait() and (added is None or added.dim() == 1):
            ways.append(functools.partial(compiled_gemm.gemm, a, b, added, 1.0))
        if added is None and a.stride(0) == 1:  # a weight gradient
            ways.append(functools.partial(gemm_by_convolution, a.t(), b, 1.0))
    elif a.dtype in (torch.bfloat16, torch.float16):
        ways.append(functools.partial(gemm_in_float32, a, b, added, 1.0))
    return ways


def _ways_of_convolution(func: Any, given: list[Any]) -> list[Call]:
    """In the order of memory that it has, and channels-last."""
    ways: list[Call] = [functools.partial(func, *given)]
    pictures = [a.dim() == 4 if isinstance(a, torch.Tensor) else False for a in given]
    if any(pictures):
        last = [
            a.contiguous(memory_format=torch.channels_last) if picture else a
            for a, picture in zip(given, pictures, strict=True)
        ]
        ways.append(functools.partial(func, *last))
        ways += _ways_of_weight_gradient(func, last)
    return ways


def _ways_of_weight_gradient(func: Any, given: list[Any]) -> list[Call]:
    """By the compiled kernel, of convolutions without groups of pictures that lie channels-last."""
    if func is not aten.convolution_backward.default or not CONVOLUTIONS.wait():
        return []
    dy, x, w, _, strides, pads, dilations, transposed, _, groups, mask = given
    if transposed or groups != 1 or not mask[1] or x.dim() != 4 or x.dtype != torch.float32 or x.device.type != "cpu":
        return []
    return [functools.partial(convolution_gradients, dy, x, w, strides, pads, dilations, mask)]


_PRODUCTS: dict[Any, Callable[[Any, list[Any]], list[Call]]] = {
    aten.mm.default: _ways_of_product,
    aten.addmm.default: _ways_of_product,
    aten.convolution.default: _ways_of_convolution,
    aten.convolution_backward.default: _ways_of_convolution,
}
