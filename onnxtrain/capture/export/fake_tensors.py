"""Inspect fake tensors and make new ones, for the meta functions of `meta_functions.py`.

A comparison of symbolic sizes would become a guard of the export. The functions here therefore compare the sizes'
expressions, and treat a symbolic size as different from every int.
"""

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

FLOATING, REAL = object(), object()  # kinds of dtypes: floating-point; floating-point or integer, but not bool
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Fakes:
    """Inspect the fake tensors of one mode, and make new ones.

    Args:
        mode: the mode that the tensors belong to.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def are_supported(self, *tensors: Any, dtype: Any = FLOATING) -> bool:
        """Return whether all are strided fake tensors of this mode and dtype, on one device, with unknown elements.

        Args:
            tensors: what an operator was called with.
            dtype: `FLOATING`, `REAL`, a dtype, or None for any dtype.
        """

        def matches(actual: torch.dtype) -> bool:
            if dtype is FLOATING or dtype is REAL:
                return actual.is_floating_point or (dtype is REAL and actual in _INTEGERS)
            return dtype in (None, actual)

        return all(
            type(x) is FakeTensor
            and x.fake_mode is self.mode
            and x.constant is None
            and x.real_tensor is None
            and x.layout is torch.strided
            and matches(x.dtype)
            and not x.is_neg()
            and not x.is_conj()
            and x.fake_device == tensors[0].fake_device
            for x in tensors
        )

    def is_contiguous(self, x: FakeTensor) -> bool:
        """Return whether the expressions of the sizes and strides show that the tensor is contiguous. Adds no guard."""
        return self._is_row_major(x, is_one)

    def has_default_strides(self, x: FakeTensor) -> bool:
        """Return whether the tensor is contiguous, and its axes of size 1 have the strides of a new tensor."""
        return self._is_row_major(x, lambda size: False)

    def _is_row_major(self, x: FakeTensor, is_any_stride_allowed: Callable[[Any], bool]) -> bool:
        expected: Any = 1
        for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
            if not is_any_stride_allowed(size) and not is_same(stride, expected):
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
        """Make a tensor on the device of `x`, by default with its shape and dtype, and contiguous."""
        return self.new(x.shape if shape is None else shape, dtype or x.dtype, x.fake_device, strides)

    def new(
        self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device, strides: Sequence[Any] | None = None
    ) -> FakeTensor:
        """Make a tensor, contiguous unless strides are given."""
        with inside_kernel(self.mode):
            if strides is None:
                meta = torch.empty(shape, dtype=dtype, device="meta")
            else:
                meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return FakeTensor(self.mode, meta, device)

    def expanded(self, x: FakeTensor, shape: Sequence[Any]) -> FakeTensor:
        """Make a view of `x` with a shape that the shape of `x` broadcasts to."""
        return self.view(x, shape, expanded_strides(x, shape))

    def elementwise(
        self,
        tensors: Sequence[FakeTensor],
        shape: Sequence[Any],
        dtype: torch.dtype,
        others: Sequence[FakeTensor] = (),
    ) -> FakeTensor | None:
        """Make the result of an elementwise operator.

        PyTorch's own functions for symbolic sizes take 2 ms, and may guard on a size to choose the strides.

        Args:
            tensors: the operands whose strides determine the result's under symbolic sizes.
            shape: the result's, to which all operands broadcast.
            dtype: the result's.
            others: operands, such as a condition, whose strides count only under static sizes: there PyTorch takes
                the strides from the kernel, which considers all operands.

        Returns:
            None if the result's strides depend on the sizes.
        """
        first = tensors[0]
        if not any(has_symbolic_sizes(t) for t in (*tensors, *others)):
            return self.like(first, shape, dtype) if all(map(self.has_default_strides, (*tensors, *others))) else None
        is_channels_last_too = len(shape) == 4 and (is_one(shape[1]) or all(map(is_one, shape[2:])))
        if all(map(self.has_default_strides if is_channels_last_too else self.is_contiguous, tensors)):
            return self.like(first, shape, dtype)
        if is_channels_last_too:
            return None
        strides = elementwise_strides(shape, [expanded_strides(x, shape) for x in tensors])
        return None if strides is None else self.like(first, shape, dtype, strides)

    def view(
        self, x: FakeTensor, shape: Sequence[Any], strides: Sequence[Any], offset: Any | None = None
    ) -> FakeTensor:
        """Make a view of the memory of `x`, by default with the storage offset of `x`."""
        with inside_kernel(self.mode):
            meta = x.as_strided(shape, strides, x.storage_offset() if offset is None else offset)
        return FakeTensor(self.mode, meta, x.fake_device)


def broadcast_shape(shapes: Sequence[Sequence[Any]]) -> list[Any] | None:
    """Return the shape that all broadcast to; None if two sizes of an axis have different expressions, neither 1."""
    shape = []
    for axis in range(-max(map(len, shapes)), 0):
        sizes = [s[axis] for s in shapes if len(s) >= -axis]
        wide = [n for n in sizes if not is_one(n)]
        if any(not is_same(wide[0], n) for n in wide[1:]):
            return None
        shape.append(wide[0] if wide else 1)
    return shape


def is_one(size: Any) -> bool:
    """Return whether the size is the int 1; False for a symbolic size."""
    return isinstance(size, int) and size == 1


def is_same(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal ints or equal expressions."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(a.node.expr == b.node.expr)


def expanded_strides(x: torch.Tensor, shape: Sequence[Any]) -> list[Any]:
    """Return the strides of `x.expand(shape)`, as ATen's `inferExpandGeometry` computes them."""
    new = len(shape) - x.dim()
    sizes, strides = [1] * new + list(x.shape), [0] * new + list(x.stride())
    for axis in range(len(shape) - 1, -1, -1) if x.dim() else ():
        if axis < new:
            strides[axis] = shape[axis + 1] * strides[axis + 1]
        if is_one(sizes[axis]) and not is_one(shape[axis]):
            strides[axis] = 0
    return strides


def elementwise_strides(shape: Sequence[Any], operands: Sequence[Sequence[Any]]) -> list[Any] | None:
    """Compute `torch._prims_common.compute_elementwise_output_strides` for operands with these strides.

    Returns:
        The strides; None if they depend on how sizes compare, beyond what the sizes' expressions show.
    """
    axes = list(reversed(range(len(shape))))  # innermost axis first
    try:
        for i in range(1, len(shape)):
            current = i
            for other in reversed(range(i)):
                order = _axis_order(shape, operands, axes[other], axes[current])
                if order < 0:
                    break
                if order > 0:
                    axes[other], axes[current] = axes[current], axes[other]
                    current = other
    except _UndecidedError:
        return None
    strides = [0] * len(shape)
    outermost_first = list(reversed(axes))
    dense = contiguous_strides([shape[axis] for axis in outermost_first])
    for axis, stride in zip(outermost_first, dense, strict=True):
        strides[axis] = stride
    return strides


class _UndecidedError(Exception):
    """The result depends on the values of symbolic sizes."""


def _axis_order(shape: Sequence[Any], operands: Sequence[Sequence[Any]], a: int, b: int) -> int:
    """Return 1 if axis `a` is outer to `b`, -1 if inner, 0 if either may be; the first operand that tells decides."""
    for strides in operands:
        if _is_zero(strides[a]) or _is_zero(strides[b]):
            continue
        order = _compare(strides[a], strides[b])
        if order == 0 and _compare(shape[a], shape[b]) > 0:
            return 1
        if order:
            return order
    return 0


def _is_zero(stride: Any) -> bool:
    return isinstance(stride, int) and stride == 0


def _compare(a: Any, b: Any) -> int:
    """Return 1, 0 or -1 if a > b, a = b or a < b for all values of the symbols.

    Raises:
        _UndecidedError: the order depends on the values, or the expressions do not show it.
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
