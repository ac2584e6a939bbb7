"""What Python decided from sizes while a module was captured, and example inputs that keep sizes open.

PyTorch's export takes every open size to be at least 2: a decision like `x.shape[1] > 1` is answered without a trace.
Of its own decisions that is harmless, for they only choose between equivalent ways (the proof in `guards` sees to the
rest). A decision of the user's code is another matter. So every such decision is noted here, with the answer that the
real sizes give: it holds for the calls in which the answer is the same.

An input of size 1 would be fixed to 1. Its example is enlarged to 2, while the user's decisions still see 1.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Place: TypeAlias = tuple[int, int]  # number of a flat tensor, number of its dimension

_TORCH = str(Path(torch.__file__).parent)
# How Python gets from a decision to PyTorch's record of sizes.
_MACHINERY = frozenset(
    f"{_TORCH}/{name}"
    for name in (
        "__init__.py",
        "fx/experimental/symbolic_shapes.py",
        "fx/experimental/sym_node.py",
        "fx/experimental/recording.py",
        "utils/_stats.py",
    )
)
# Where PyTorch decides for itself: the shapes and strides of results, and which of equivalent ways to take.
_INSIDE = tuple(
    f"{_TORCH}/{name}"
    for name in (
        "_refs/", "_prims/", "_prims_common/", "_decomp/", "_subclasses/", "_export/", "export/", "fx/", "_functorch/",
        "_higher_order_ops/", "_library/", "_dispatch/", "utils/", "_ops.py", "_meta_registrations.py", "_compile.py",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """`expr` over PyTorch's size symbols had this value as the user's code saw it at this line.

    `forced` where the value follows from the real size of an enlarged example, and not from the export's own guards.
    """

    expr: Any
    value: Any
    where: str
    forced: bool


class Decisions:
    """The decisions of one capture. A context manager around the export and functionalization.

    Attributes:
        examples: the inputs to export with.
        enlarged: the places whose example has size 2 where the real size is 1.
        made: the decisions, by expression.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], enlarged: Collection[Place] = ()) -> None:
        self.enlarged = frozenset(enlarged)
        self.examples = [_enlarge(t, {d for i, d in self.enlarged if i == n}) for n, t in enumerate(tensors)]
        self.made: dict[Any, Decision] = {}
        self._sizes = [tuple(t.shape) for t in tensors]
        self._real: dict[Any, int | None] = {}  # by symbol; None for one that is not a size of an input

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes decisions of this thread."""
        owner = threading.get_ident()
        evaluate = ShapeEnv.evaluate_expr

        def noting(env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
            frame = _user_frame(sys._getframe(1)) if threading.get_ident() == owner else None
            if frame is None or not getattr(expr, "free_symbols", None):
                return evaluate(env, expr, *args, **kwargs)
            real = self._with_real_sizes(env, expr)
            value = evaluate(env, expr, *args, **kwargs) if real is None else real
            self._note(expr, value, frame, forced=real is not None)
            return value

        def comparing(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
            def compare(left: Any, right: Any) -> Any:
                result = original(left, right)
                if isinstance(result, torch.SymBool) and threading.get_ident() == owner and self.enlarged:
                    frame = _user_frame(sys._getframe(1))
                    real = self._with_real_sizes(result.node.shape_env, result.node.expr) if frame else None
                    if frame is not None and real is not None:
                        self._note(result.node.expr, real, frame, forced=True)
                        return bool(real)
                return result

            return compare

        with ExitStack() as stack:
            stack.enter_context(_patched(ShapeEnv, "evaluate_expr", noting))
            # `size > 1 and mask is None` is the left operand itself where that is false: then it has to be a bool,
            # as in eager, for operators do not take a symbolic one.
            for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
                stack.enter_context(_patched(torch.SymInt, name, comparing(getattr(torch.SymInt, name))))
            yield

    def _note(self, expr: Any, value: Any, frame: FrameType, forced: bool) -> None:
        self.made.setdefault(expr, Decision(expr, value, f"{frame.f_code.co_filename}:{frame.f_lineno}", forced))

    def _with_real_sizes(self, env: ShapeEnv, expr: Any) -> Any | None:
        """The value of an expression in which the size of an enlarged place occurs. None for any other."""
        real = {symbol: self._real_size(env, symbol) for symbol in expr.free_symbols}
        if None in real.values() or not any(self._is_enlarged(env, symbol) for symbol in real):
            return None
        value = expr.xreplace({symbol: sympy.Integer(size) for symbol, size in real.items()})
        return value if value.is_number or value in (sympy.true, sympy.false) else None

    def _real_size(self, env: ShapeEnv, symbol: Any) -> int | None:
        places = list(places_of(env, symbol))
        return self._sizes[places[0][0]][places[0][1]] if places else None

    def _is_enlarged(self, env: ShapeEnv, symbol: Any) -> bool:
        return any(place in self.enlarged for place in places_of(env, symbol))


@contextmanager
def _patched(owner: type, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_SOURCE = re.compile(r"\[(\d+)\]\.size\(\)\[(\d+)\]$")


def places_of(env: ShapeEnv, symbol: Any) -> Iterator[Place]:
    """The places whose size a symbol was made for: `L['tensors'][3].size()[0]` is dimension 0 of tensor 3."""
    sources: Iterable[Any] = env.var_to_sources.get(symbol, ())
    for source in sources:
        name = source.name() if callable(source.name) else source.name
        found = _SOURCE.search(name)
        if found:
            yield int(found[1]), int(found[2])


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The frame that decides, where it is the user's or a layer's; None where it is PyTorch's shape arithmetic."""
    while frame is not None and frame.f_code.co_filename in _MACHINERY:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_INSIDE):
        return None
    return frame


def _enlarge(tensor: torch.Tensor, dims: Collection[int]) -> torch.Tensor:
    """The tensor with these dimensions of size 1 doubled: same strides order, dtype, device and requires_grad."""
    if not dims:
        return tensor
    strides = tensor.stride()
    with torch.no_grad():
        larger = tensor
        for dim in dims:
            larger = larger.repeat_interleave(2, dim=dim)
        order = sorted(range(tensor.ndim), key=lambda d: -strides[d])
        back = [order.index(d) for d in range(tensor.ndim)]
        larger = larger.permute(order).contiguous().permute(back)
    return larger.detach().requires_grad_(tensor.requires_grad)


def attempts(tensors: Sequence[torch.Tensor], known_open: Collection[Place] = ()) -> list[frozenset[Place]]:
    """Which places of size 1 to enlarge: the best guess first, and last none, which fixes them to 1.

    Args:
        tensors: the inputs of the call.
        known_open: the places that earlier captures of such calls keep open.
    """
    ones = {(i, d) for i, t in enumerate(tensors) for d, size in enumerate(t.shape) if size == 1}
    if not ones:
        return [frozenset()]
    guesses = [frozenset(ones & set(known_open))]
    batch = {(i, 0) for i, t in enumerate(tensors) if t.ndim}
    # A batch of one: every input has it. Elsewhere a size of 1 is there to be broadcast.
    batch = batch if batch <= ones else set()
    tokens = {(i, 1) for i, t in enumerate(tensors) if t.ndim == 2 and not t.is_floating_point()}
    # A sequence of one token: every matrix of token ids, masks and labels has it.
    tokens = tokens if tokens <= ones else set()
    guesses += [frozenset(batch | tokens), frozenset(batch)]
    return [*dict.fromkeys(guess for guess in guesses if guess), frozenset()]
