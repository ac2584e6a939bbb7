"""Python control flow that depends on sizes, recorded during a capture; and example inputs that keep sizes dynamic.

torch.export assumes that every dynamic dimension is at least 2: it answers `x.shape[1] > 1` without recording a guard.
For PyTorch's own decisions that is harmless, because they only choose between equivalent computations (`shape_proof`
covers the rest). The user's code may compute something else on each branch. So every decision of the user's code is
recorded here, with its answer for the real sizes: the capture is valid for the calls in which the answer is the same.

torch.export would make a dimension of size 1 static. Its example is made larger, while the user's code still sees 1.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.capture.source_location import PACKAGE
from onnxtrain.errors import CaptureError
from onnxtrain.system.time_limit import check_time
from onnxtrain.torch_compat.patch_points import EVALUATE_SIZES, SIZE_COMPARISONS, SIZE_REMAINDER, SIZE_TEXTS

InputDim: TypeAlias = tuple[int, int]  # the index of a flat tensor, and of one of its dimensions
Example: TypeAlias = Mapping[InputDim, int]  # the sizes to export with, where they differ from the real ones

_GENERIC_SIZE = 5  # with 2, `size - 1` would be 1, which PyTorch treats specially

_TORCH = str(Path(torch.__file__).parent)
# The files between the line that decides and `ShapeEnv.evaluate_expr`.
_SYMBOLIC_SIZE_FILES = frozenset({
    __file__,
    f"{PACKAGE}capture/guards/element_decisions.py",
    f"{PACKAGE}torch_compat/replacement.py",
    f"{_TORCH}/__init__.py",
    f"{_TORCH}/fx/experimental/symbolic_shapes.py",
    f"{_TORCH}/fx/experimental/sym_node.py",
    f"{_TORCH}/fx/experimental/recording.py",
    f"{_TORCH}/utils/_stats.py",
})  # fmt: skip
# Files that decide for PyTorch: the shapes and strides of results, and which of equivalent computations to take.
_PYTORCH_DECIDES = (
    "<eval_with_key>",  # code that torch.fx generates
    *(f"{PACKAGE}{name}/" for name in ("capture", "torch_compat")),  # run in place of PyTorch's code during a trace
    *(f"{_TORCH}/{name}" for name in (
        "_refs/", "_prims/", "_prims_common/", "_decomp/", "_subclasses/", "_export/", "export/", "fx/", "_functorch/",
        "_higher_order_ops/", "_library/", "_dispatch/", "utils/", "_ops.py", "_meta_registrations.py", "_compile.py",
    )),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SizeDecision:
    """The value of an expression over PyTorch's size symbols that the user's code tested.

    Attributes:
        expr: the expression.
        value: its value for the real sizes.
        where: the source location of the test.
        forced: whether the value comes from a real size that the example replaces, so that the export has no guard
            for it.
    """

    expr: Any
    value: Any
    where: str
    forced: bool


class SizeDecisions:
    """The decisions of one capture: those that the user's code takes while `recording()` is held around torch.export.

    Args:
        tensors: the call's tensors.
        example: the example sizes.
        fixed: the indices of the inputs whose dimensions are all static.

    Attributes:
        sizes: the real sizes of the inputs.
        examples: the inputs to export with.
        ones: the dimensions of size 1 that have another size in the example.
        recorded: the decisions, by expression.
        fixed: the indices of the inputs whose dimensions are all static.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        example: Example | None = None,
        fixed: Collection[int] = (),
    ) -> None:
        real = self.sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        changed = {(i, d): size for (i, d), size in (example or {}).items() if real[i][d] != size}
        self.examples = [_resized(t, {d: n for (i, d), n in changed.items() if i == k}) for k, t in enumerate(tensors)]
        self.ones = frozenset((i, d) for i, d in changed if real[i][d] == 1)
        self.recorded: dict[Any, SizeDecision] = {}
        self.fixed = frozenset(fixed)
        self._changed = frozenset(changed)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the decisions of this thread."""
        owner = threading.get_ident()
        evaluate = EVALUATE_SIZES.original

        def recording_evaluate(env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                return evaluate(env, expr, *args, **kwargs)
            check_time()
            frame = _user_frame(sys._getframe(1))
            if frame is None or not getattr(expr, "free_symbols", None):
                return evaluate(env, expr, *args, **kwargs)
            real = self._with_real_sizes(env, expr)
            value = evaluate(env, expr, *args, **kwargs) if real is None else real
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.recorded.setdefault(expr, SizeDecision(expr, value, where, forced=real is not None))
            return value

        def deciding_comparison(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
            def compare(left: Any, right: Any) -> Any:
                result = original(left, right)
                if not isinstance(result, torch.SymBool) or threading.get_ident() != owner:
                    return result
                if _user_frame(sys._getframe(1)) is None or not _is_of_inputs(result):
                    return result
                return bool(result)

            return compare

        def formatting_value(original: Callable[..., str]) -> Callable[..., str]:
            def format_size(size: Any, *args: Any) -> str:
                by_user = threading.get_ident() == owner and _user_frame(sys._getframe(1)) is not None
                return format(int(size), *args) if by_user and _is_of_inputs(size) else original(size, *args)

            return format_size

        with ExitStack() as stack:
            stack.enter_context(SIZE_REMAINDER.wrapped(partial(_remainder, owner)))
            stack.enter_context(EVALUATE_SIZES.wrapped(lambda _: recording_evaluate))
            for point in SIZE_COMPARISONS:
                stack.enter_context(point.wrapped(deciding_comparison))
            for point in SIZE_TEXTS:
                stack.enter_context(point.wrapped(formatting_value))
            yield

    def record_not_one(self, size: torch.SymInt, where: str) -> None:
        """Record that a size is not 1, as the trace assumes.

        Raises:
            CaptureError: it is 1 in the call.
        """
        expr = sympy.Eq(size.node.expr, 1)
        if self._with_real_sizes(size.node.shape_env, expr) == sympy.true:
            raise CaptureError(
                "forward writes to memory that another tensor shares only if a size is 1",
                where=where,
                got=f"the size {size} is 1",
                todo="the module is captured with this size fixed",
            )
        self.recorded.setdefault(expr, SizeDecision(expr, sympy.false, where, forced=True))

    def _with_real_sizes(self, env: ShapeEnv, expr: Any) -> Any | None:
        """Evaluate an expression that contains a size that the example changes; return None for any other."""
        real: dict[Any, Any] = {}
        changed = False
        for symbol in expr.free_symbols:
            dims = list(_dims_of_symbol(env, symbol))
            if not dims:
                return None  # not the size of an input
            i, d = dims[0]
            real[symbol] = sympy.Integer(self.sizes[i][d])
            changed = changed or not self._changed.isdisjoint(dims)
        return expr.xreplace(real) if changed else None


_SOURCE = re.compile(r"\[(\d+)\]\.size\(\)\[(\d+)\]$")


def _dims_of_symbol(env: ShapeEnv, symbol: Any) -> Iterator[InputDim]:
    """Yield the dimensions whose size a symbol is: `L['tensors'][3].size()[0]` is dimension 0 of tensor 3."""
    sources: Iterable[Any] = env.var_to_sources.get(symbol, ())
    for source in sources:
        match = _SOURCE.search(source.name() if callable(source.name) else source.name)
        if match:
            yield int(match[1]), int(match[2])


def _remainder(owner: int, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Make a remainder that fixes the size if the divisor is a float."""

    def divide(size: Any, divisor: Any) -> Any:
        is_number = isinstance(divisor, float) and threading.get_ident() == owner and _is_of_inputs(size)
        return int(size) % divisor if is_number else original(size, divisor)

    return divide


def _is_of_inputs(value: torch.SymInt | torch.SymBool) -> bool:
    """Return whether a symbolic value depends on the sizes of inputs only."""
    env = value.node.shape_env
    return env is not None and all(any(_dims_of_symbol(env, symbol)) for symbol in value.node.expr.free_symbols)


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame that decides, if it is the user's or a layer's; None for PyTorch's shape arithmetic."""
    while frame is not None and frame.f_code.co_filename in _SYMBOLIC_SIZE_FILES:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_PYTORCH_DECIDES):
        return None
    return frame


def is_by_user() -> bool:
    """Return whether the caller evaluates a symbolic size for the user's code or a layer, not for PyTorch."""
    return _user_frame(sys._getframe(1)) is not None


def _resized(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """Make a tensor with other sizes in these dimensions, but the same stride order, dtype, device, requires_grad."""
    if not sizes:
        return _without_gradient(tensor)
    shape = [sizes.get(d, size) for d, size in enumerate(tensor.shape)]
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: -strides[d])
    inverse = [order.index(d) for d in range(tensor.ndim)]
    resized = torch.zeros([shape[d] for d in order], dtype=tensor.dtype, device=tensor.device).permute(inverse)
    return resized.requires_grad_(tensor.requires_grad)


def _without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Hide a tensor's `grad`: torch.export gives its sizes symbols that belong to no input."""
    if not tensor.is_leaf or tensor.grad is None:
        return tensor
    detached = tensor.detach().requires_grad_(tensor.requires_grad)
    return torch.nn.Parameter(detached, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else detached


def example_candidates(
    tensors: Sequence[torch.Tensor], suggested: Iterable[Example] = (), fixed: Collection[int] = ()
) -> list[Example]:
    """Return the example sizes to try, in order; the last, empty one stands for the real sizes, where 1 stays 1.

    Args:
        tensors: the inputs of the call.
        suggested: the example sizes of earlier captures that only a size decision excludes for this call.
        fixed: the indices of the inputs whose dimensions are all static.
    """
    dynamic = [(i, tensor) for i, tensor in enumerate(tensors) if i not in fixed]
    ones = {(i, d) for i, tensor in dynamic for d, size in enumerate(tensor.shape) if size == 1}
    # A batch of one, if all inputs have it. Any other size of 1 is meant to be broadcast.
    batch = {(i, 0) for i, tensor in dynamic if tensor.ndim}
    # A sequence of one token, if all inputs of shape [batch, length] (ids, masks, labels) or [batch, length, width] do.
    tokens = {
        (i, 1) for i, tensor in dynamic if tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point())
    }
    resizable = [dims for dims in (batch, tokens) if dims and dims <= ones]
    candidates = list(suggested)
    if len(resizable) == 2:
        candidates.append(dict.fromkeys(batch | tokens, _GENERIC_SIZE))
    candidates += [dict.fromkeys(dims, _GENERIC_SIZE) for dims in resizable]
    return [*candidates, {}]
