"""Fake tensors as the rules of `fake_results` see them: what they ask of them, and how they make new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sympy import sympify

from onnxtrain.torch_compat.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    contiguous_strides,
    has_symbolic_sizes,
    inside_kernel,
)

FLOATING, NUMBERS = object(), object()  # kinds of types: floating; and these or integers, without bool and complex
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Fakes:
    """What rules ask of fake tensors, and how they make new ones.

    Args:
        mode: the mode that the tensors belong to.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def are_plain(self, *tensors: Any, dtype: Any = FLOATING) -> bool:
        """Fake tensors of unknown elements, on one device; of a kind of types, of this one, or (None) of any."""

        def fits(of: torch.dtype) -> bool:
            if dtype is FLOATING or dtype is NUMBERS:
                return of.is_floating_point or (dtype is NUMBERS and of in _INTEGERS)
            return dtype in (None, of)

        return all(
            type(x) is FakeTensor
            and x.fake_mode is self.mode
            and x.constant is None
            and x.real_tensor is None
            and x.layout is torch.strided
            and fits(x.dtype)
            and not x.is_neg()
            and not x.is_conj()
            and x.fake_device == tensors[0].fake_device
            for x in tensors
        )

    def is_contiguous(self, x: FakeTensor) -> bool:
        """Whether the elements lie row by row, by the sizes' expressions: nothing is asked that becomes a condition."""
        return self._lies_row_by_row(x, is_one)

    def is_in_order(self, x: FakeTensor) -> bool:
        """The same, and axes of size 1 have the strides that a new tensor's would have."""
        return self._lies_row_by_row(x, lambda size: False)

    def _lies_row_by_row(self, x: FakeTensor, may_have_any: Callable[[Any], bool]) -> bool:
        expected: Any = 1
        for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
            if not may_have_any(size) and not is_same(stride, expected):
                return False
            expected = expected * torch.sym_max(size, 1)
        return True

    def like(
        self,
        x: FakeTensor,
        shape: Sequence[Any] | None = None,
        dtype: torch.dtype | None = None,
        strides: Sequence[Any] | None = None,
    ) -> FakeTensor:
        """A new tensor, its elements in order where no strides are given."""
        return self.new(x.shape if shape is None else shape, dtype or x.dtype, x.fake_device, strides)

    def new(
        self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device, strides: Sequence[Any] | None = None
    ) -> FakeTensor:
        """The same, of no other tensor."""
        with inside_kernel(self.mode):
            if strides is None:
                meta = torch.empty(shape, dtype=dtype, device="meta")
            else:
                meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return FakeTensor(self.mode, meta, device)

    def expanded(self, x: FakeTensor, shape: Sequence[Any]) -> FakeTensor:
        """A view with this shape, which its own broadcasts to."""
        return self.view(x, shape, expanded_strides(x, shape))

    def elementwise(
        self,
        tensors: Sequence[FakeTensor],
        shape: Sequence[Any],
        dtype: torch.dtype,
        others: Sequence[FakeTensor] = (),
    ) -> FakeTensor | None:
        """What an operator makes element by element of tensors, and of `others`, that all broadcast to this shape.

        None where the order of its elements depends on sizes, or on more than PyTorch's functions for open sizes look
        at: for known ones kernels find it, which go by the others too. Those functions ask of sizes what they cannot
        know, and take 2 ms.
        """
        first = tensors[0]
        if not any(has_symbolic_sizes(t) for t in (*tensors, *others)):
            return self.like(first, shape, dtype) if all(map(self.is_in_order, (*tensors, *others))) else None
        channels_last_as_well = len(shape) == 4 and (is_one(shape[1]) or all(map(is_one, shape[2:])))
        if all(map(self.is_in_order if channels_last_as_well else self.is_contiguous, tensors)):
            return self.like(first, shape, dtype)
        if channels_last_as_well:
            return None
        strides = elementwise_strides(shape, [expanded_strides(x, shape) for x in tensors])
        return None if strides is None else self.like(first, shape, dtype, strides)

    def view(
        self, x: FakeTensor, shape: Sequence[Any], strides: Sequence[Any], offset: Any | None = None
    ) -> FakeTensor:
        """Of the memory of `x`, from its own first element on or another."""
        with inside_kernel(self.mode):
            meta = x.as_strided(shape, strides, x.storage_offset() if offset is None else offset)
        return FakeTensor(self.mode, meta, x.fake_device)


def broadcast_shape(shapes: Sequence[Sequence[Any]]) -> list[Any] | None:
    """None where two sizes are not the same by their expressions, and neither is 1."""
    found = []
    for axis in range(-max(map(len, shapes)), 0):
        sizes = [s[axis] for s in shapes if len(s) >= -axis]
        wide = [n for n in sizes if not is_one(n)]
        if any(not is_same(wide[0], n) for n in wide[1:]):
            return None
        found.append(wide[0] if wide else 1)
    return found


def is_one(size: Any) -> bool:
    """Whether it is the number: of an expression nothing is asked, for the answer would become a condition."""
    return isinstance(size, int) and size == 1


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(a.node.expr == b.node.expr)


def expanded_strides(x: torch.Tensor, shape: Sequence[Any]) -> list[Any]:
    """Those of a view of `x` with a shape that its own broadcasts to, as ATen's `inferExpandGeometry` gives them."""
    new = len(shape) - x.dim()
    sizes, strides = [1] * new + list(x.shape), [0] * new + list(x.stride())
    for axis in range(len(shape) - 1, -1, -1) if x.dim() else ():
        if axis < new:
            strides[axis] = shape[axis + 1] * strides[axis + 1]
        if is_one(sizes[axis]) and not is_one(shape[axis]):
            strides[axis] = 0
    return strides


def elementwise_strides(shape: Sequence[Any], operands: Sequence[Sequence[Any]]) -> list[Any] | None:
    """What `torch._prims_common.compute_elementwise_output_strides` gives for operands with these strides.

    None where it would have to ask of sizes what their expressions do not say.
    """
    places = list(reversed(range(len(shape))))  # from the innermost axis outwards
    try:
        for i in range(1, len(shape)):
            moved = i
            for other in reversed(range(i)):
                order = _order(shape, operands, places[other], places[moved])
                if order < 0:
                    break
                if order > 0:
                    places[other], places[moved] = places[moved], places[other]
                    moved = other
    except _UndecidedError:
        return None
    found = [0] * len(shape)
    outwards = list(reversed(places))
    for axis, stride in zip(outwards, contiguous_strides([shape[d] for d in outwards]), strict=True):
        found[axis] = stride
    return found


class _UndecidedError(Exception):
    """Sizes decide it."""


def _order(shape: Sequence[Any], operands: Sequence[Sequence[Any]], a: int, b: int) -> int:
    """Whether axis `a` lies outside of `b` (1), inside (-1), or as it may (0), by the first operand that tells."""
    for strides in operands:
        if _is_zero(strides[a]) or _is_zero(strides[b]):
            continue
        order = _compared(strides[a], strides[b])
        if order == 0 and _compared(shape[a], shape[b]) > 0:
            return 1
        if order:
            return order
    return 0


def _is_zero(stride: Any) -> bool:
    return isinstance(stride, int) and stride == 0


def _compared(a: Any, b: Any) -> int:
    """1, 0 or -1 where a > b, a = b or a < b for all sizes.

    Raises:
        _UndecidedError: it is not the same for all sizes, or not plain to see.
    """
    if isinstance(a, int) and isinstance(b, int):
        return (a > b) - (a < b)
    node = (b if isinstance(a, int) else a).node
    exprs = [sympify(n) if isinstance(n, int) else n.node.expr for n in (a, b)]
    if exprs[0] == exprs[1]:
        return 0
    if 0 in exprs:
        raise _UndecidedError
    for sign, ratio in ((1, exprs[0] / exprs[1]), (-1, exprs[1] / exprs[0])):
        factor, symbols = ratio.as_coeff_mul()
        ranges = [node.shape_env.var_to_range.get(s) for s in symbols]
        if factor >= 1 and factor.is_integer and all(r is not None and r.lower >= 1 for r in ranges):
            if factor > 1 or any(r.lower > 1 for r in ranges):
                return sign
    raise _UndecidedError
