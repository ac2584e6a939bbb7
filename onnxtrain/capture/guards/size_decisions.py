"""What Python decided from sizes while a module was captured, and example inputs that keep sizes open.

PyTorch's export takes every open size to be at least 2: a decision like `x.shape[1] > 1` is answered without a trace.
Of its own decisions that is harmless, for they only choose between equivalent ways (the proof in `guards` sees to the
rest). A decision of the user's code is another matter. So every such decision is noted here, with the answer that the
real sizes give: it holds for the calls in which the answer is the same.

An input of size 1 would be fixed to 1. Its example is made larger, while the user's decisions still see 1.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.capture.source_line import PACKAGE
from onnxtrain.torch_compat.patch_points import EVALUATE_SIZES, SIZE_COMPARISONS, SIZE_TEXTS

Place: TypeAlias = tuple[int, int]  # number of a flat tensor, number of its dimension
Example: TypeAlias = Mapping[Place, int]  # sizes to export with, where they are not the real ones

_GENERIC = 5  # a size that is nothing special: 2 would make `size - 1` a 1

_TORCH = str(Path(torch.__file__).parent)
# How Python gets from a decision to PyTorch's record of sizes.
_MACHINERY = frozenset({
    __file__,
    f"{_TORCH}/__init__.py",
    f"{_TORCH}/fx/experimental/symbolic_shapes.py",
    f"{_TORCH}/fx/experimental/sym_node.py",
    f"{_TORCH}/fx/experimental/recording.py",
    f"{_TORCH}/utils/_stats.py",
})  # fmt: skip
# Where PyTorch decides for itself: the shapes and strides of results, and which of equivalent ways to take.
_INSIDE = (
    "<eval_with_key>",  # what torch.fx generates
    *(f"{PACKAGE}{name}/" for name in ("capture", "torch_compat")),  # while forward is traced, in place of PyTorch's
    *(f"{_TORCH}/{name}" for name in (
        "_refs/", "_prims/", "_prims_common/", "_decomp/", "_subclasses/", "_export/", "export/", "fx/", "_functorch/",
        "_higher_order_ops/", "_library/", "_dispatch/", "utils/", "_ops.py", "_meta_registrations.py", "_compile.py",
    )),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """`expr` over PyTorch's size symbols had this value as the user's code saw it at this line.

    `forced` where it follows from a real size that the example does not have, and not from the export's own guards.
    """

    expr: Any
    value: Any
    where: str
    forced: bool


class Decisions:
    """The decisions of one capture: those of the user's code while `noted()` is held around torch.export.

    Attributes:
        sizes: the real sizes of the inputs.
        examples: the inputs to export with.
        ones: the places that are 1, and have another size in the example.
        made: the decisions, by expression.
        fixed: the numbers of the inputs whose sizes are not open.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], example: Example | None = None, fixed: Collection[int] = ()
    ) -> None:
        real = self.sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        changed = {place: size for place, size in (example or {}).items() if real[place[0]][place[1]] != size}
        self.examples = [_resized(t, {d: n for (i, d), n in changed.items() if i == k}) for k, t in enumerate(tensors)]
        self.ones = frozenset(place for place in changed if real[place[0]][place[1]] == 1)
        self.made: dict[Any, Decision] = {}
        self.fixed = frozenset(fixed)
        self._changed = frozenset(changed)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes decisions of this thread."""
        owner = threading.get_ident()
        evaluate = EVALUATE_SIZES.original

        def noting(env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
            frame = _user_frame(sys._getframe(1)) if threading.get_ident() == owner else None
            if frame is None or not getattr(expr, "free_symbols", None):
                return evaluate(env, expr, *args, **kwargs)
            real = self._with_real_sizes(env, expr)
            value = evaluate(env, expr, *args, **kwargs) if real is None else real
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.made.setdefault(expr, Decision(expr, value, where, forced=real is not None))
            return value

        def comparing(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
            def compare(left: Any, right: Any) -> Any:
                result = original(left, right)
                if not isinstance(result, torch.SymBool) or threading.get_ident() != owner:
                    return result
                if _user_frame(sys._getframe(1)) is None or not _is_of_inputs(result):
                    return result
                return bool(result)

            return compare

        def spelling(original: Callable[..., str]) -> Callable[..., str]:
            def spell(size: Any, *args: Any) -> str:
                if threading.get_ident() != owner or _user_frame(sys._getframe(1)) is None or not _is_of_inputs(size):
                    return original(size, *args)
                return format(int(size), *args)

            return spell

        with ExitStack() as stack:
            stack.enter_context(EVALUATE_SIZES.wrapped(lambda _: noting))
            for point in SIZE_COMPARISONS:
                stack.enter_context(point.wrapped(comparing))
            for point in SIZE_TEXTS:
                stack.enter_context(point.wrapped(spelling))
            yield

    def _with_real_sizes(self, env: ShapeEnv, expr: Any) -> Any | None:
        """The value of an expression in which a size occurs that the example changes. None for any other."""
        real: dict[Any, Any] = {}
        changed = False
        for symbol in expr.free_symbols:
            places = list(_places_of(env, symbol))
            if not places:
                return None  # not the size of an input
            i, d = places[0]
            real[symbol] = sympy.Integer(self.sizes[i][d])
            changed = changed or not self._changed.isdisjoint(places)
        return expr.xreplace(real) if changed else None


_SOURCE = re.compile(r"\[(\d+)\]\.size\(\)\[(\d+)\]$")


def _places_of(env: ShapeEnv, symbol: Any) -> Iterator[Place]:
    """The places whose size a symbol was made for: `L['tensors'][3].size()[0]` is dimension 0 of tensor 3."""
    sources: Iterable[Any] = env.var_to_sources.get(symbol, ())
    for source in sources:
        found = _SOURCE.search(source.name() if callable(source.name) else source.name)
        if found:
            yield int(found[1]), int(found[2])


def _is_of_inputs(value: torch.SymInt | torch.SymBool) -> bool:
    env = value.node.shape_env
    return env is not None and all(any(_places_of(env, symbol)) for symbol in value.node.expr.free_symbols)


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The frame that decides, where it is the user's or a layer's; None where it is PyTorch's shape arithmetic."""
    while frame is not None and frame.f_code.co_filename in _MACHINERY:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_INSIDE):
        return None
    return frame


def _resized(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """A tensor with other sizes in these dimensions: the order of its strides, dtype, device and requires_grad stay."""
    if not sizes:
        return _without_gradient(tensor)
    shape = [sizes.get(d, size) for d, size in enumerate(tensor.shape)]
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: -strides[d])
    back = [order.index(d) for d in range(tensor.ndim)]
    made = torch.zeros([shape[d] for d in order], dtype=tensor.dtype, device=tensor.device).permute(back)
    return made.requires_grad_(tensor.requires_grad)


def _without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """PyTorch's export gives the sizes of a gradient symbols of their own, which are no input's."""
    if not tensor.is_leaf or tensor.grad is None:
        return tensor
    alone = tensor.detach().requires_grad_(tensor.requires_grad)
    return torch.nn.Parameter(alone, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else alone


def attempts(
    tensors: Sequence[torch.Tensor], suggested: Iterable[Example] = (), fixed: Collection[int] = ()
) -> list[Example]:
    """Example sizes to try in order. The last is none: the real sizes, where 1 stays 1.

    Args:
        tensors: the inputs of the call.
        suggested: the sizes that earlier captures of such calls were made with, if only decisions rule them out.
        fixed: the numbers of the inputs whose sizes are not open.
    """
    open_ = [(i, tensor) for i, tensor in enumerate(tensors) if i not in fixed]
    ones = {(i, d) for i, tensor in open_ for d, size in enumerate(tensor.shape) if size == 1}
    # A batch of one: every input has it. Elsewhere a size of 1 is there to be broadcast.
    batch = {(i, 0) for i, tensor in open_ if tensor.ndim}
    # A sequence of one token: all have it that are [batch, length] (ids, masks, labels) or [batch, length, width].
    tokens = {
        (i, 1) for i, tensor in open_ if tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point())
    }
    guesses = [part for part in (batch, tokens) if part and part <= ones]
    found = list(suggested)
    if len(guesses) == 2:
        found.append(dict.fromkeys(batch | tokens, _GENERIC))
    found += [dict.fromkeys(guess, _GENERIC) for guess in guesses]
    return [*found, {}]
