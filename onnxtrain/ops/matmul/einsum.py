"""Einsum, and the operators captured as Einsum: tensordot, inner, bilinear.

    Einsum(x0, x1, ..; equation) -> y          equation "bij,bjk->bik": one letter per axis, always with the output

A captured equation has no ellipsis and no broadcast axis of size 1, because ONNX's Einsum does not broadcast. The
gradient of an operand is the Einsum of the cotangent and the other operands, expanded along axes that only it has.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import REQUIRED, STANDARD, Call, Gradient, NodeView
from onnxtrain.ops.matmul import constant_axes, restrict_to_matmul_dtypes

_LETTERS = string.ascii_lowercase + string.ascii_uppercase


def _terms(equation: str) -> tuple[list[str], str]:
    """Return the letters of each operand and of the output."""
    left, right = equation.replace(" ", "").split("->")
    return left.split(","), right


def _sizes_by_letter(n: NodeView) -> dict[str, Size]:
    operands, _ = _terms(n.equation)
    if [len(term) for term in operands] != [rank_of(x) for x in n.xs]:
        raise GraphError(
            "the equation of Einsum does not match its operands",
            expected=f"one letter for each axis of operands of rank {', '.join(str(rank_of(x)) for x in n.xs)}",
            got=n.equation,
        )
    letter_sizes: dict[str, Size] = {}
    for term, x in zip(operands, n.xs, strict=True):
        for letter, size in zip(term, sizes.dims_of(x), strict=True):
            if not isinstance(letter_sizes.get(letter), int):
                letter_sizes[letter] = size
    return letter_sizes


def _type(n: NodeView) -> Sequence[TensorType]:
    extents = _sizes_by_letter(n)
    return (TensorType(dtype_of(n.xs[0]), tuple(extents[letter] for letter in _terms(n.equation)[1])),)


def _axes(n: NodeView) -> str:
    operands, output = _terms(n.equation)
    return f"{', '.join(' '.join(term) for term in operands)} -> {' '.join(output)}"


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    operands, output = _terms(n.equation)
    if not n.wants("xs"):
        return [None] * len(operands)
    return [_operand_gradient(op, n, index, operands, output, dy) for index in range(len(operands))]


def _operand_gradient(op: Builder, n: NodeView, index: int, operands: list[str], output: str, dy: ir.Value) -> ir.Value:
    letters = operands[index]
    if len(set(letters)) != len(letters):
        raise GraphError(
            "Einsum: the gradient of a diagonal (a repeated letter in one operand) is not supported",
            expected="distinct letters in each operand",
            got=n.equation,
        )
    others = [term for i, term in enumerate(operands) if i != index]
    shared = "".join(letter for letter in letters if letter in output or any(letter in term for term in others))
    values = [dy, *(x for i, x in enumerate(n.xs) if i != index)]
    gradient: ir.Value = op.Einsum(*values, equation=f"{','.join([output, *others])}->{shared}")
    if shared != letters:
        missing = [axis for axis, letter in enumerate(letters) if letter not in shared]
        gradient = op.Expand(op.Unsqueeze(gradient, constant_axes(op, *missing)), op.shape_of(n.xs[index]))
    return gradient


def _call(n: NodeView, xs: Sequence[Any]) -> Call:
    if len(xs) == 1:
        return Call(einsum_of_one_operand, n.equation, xs[0])
    # Not torch.einsum, whose order of contraction depends on whether opt_einsum is installed.
    return Call(torch.ops.aten.einsum.default, n.equation, list(xs))


def einsum_of_one_operand(equation: str, x: torch.Tensor) -> torch.Tensor:
    """Sum and transpose x; the result is a copy even if PyTorch returns a view."""
    y: torch.Tensor = torch.ops.aten.einsum.default(equation, [x])
    return y.clone() if y.data_ptr() == x.data_ptr() else y


# Capture


def _capture_einsum(op: Builder, equation: str, operands: Sequence[ir.Value], *, path: Any = None) -> Any:
    if len({dtype_of(x) for x in operands}) > 1:  # eager accepts mixed dtypes for some sizes
        return NotImplemented
    terms, output = _explicit(equation, [rank_of(x) for x in operands])
    singles = [_diagonal(op, term, x) for term, x in zip(terms, operands, strict=True)]
    return build_einsum(op, [term for term, _ in singles], output, [x for _, x in singles])


def _diagonal(op: Builder, term: str, x: ir.Value) -> tuple[str, ir.Value]:
    """Take the diagonal over the axes of each letter that occurs twice; return the new letters and the value."""
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            first = term.index(letter)
            second = term.index(letter, first + 1)
            x = op.own.Diagonal(x, offset=0, row_axis=first, column_axis=second)
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + letter
    return term, x


def build_einsum(op: Builder, terms: Sequence[str], output: str, operands: Sequence[ir.Value]) -> ir.Value:
    """Build the Einsum of these terms, without axes of size 1 that broadcast against another operand."""
    broadcast_letters = {
        c
        for term, x in zip(terms, operands, strict=True)
        for c, s in zip(term, sizes.dims_of(x), strict=True)
        if s != 1
    }
    dtype = dtype_of(operands[0])
    if dtype == ir.DataType.BFLOAT16:  # unsupported by ONNX's Einsum
        operands = [cast(op, x, ir.DataType.FLOAT) for x in operands]
    kept_terms, values = [], []
    for term, x in zip(terms, operands, strict=True):
        squeezed = [
            i for i, (c, s) in enumerate(zip(term, sizes.dims_of(x), strict=True)) if s == 1 and c in broadcast_letters
        ]
        kept_terms.append("".join(c for i, c in enumerate(term) if i not in squeezed))
        values.append(op.Squeeze(x, constant_axes(op, *squeezed)) if squeezed else x)
    return cast(op, op.Einsum(*values, equation=f"{','.join(kept_terms)}->{output}"), dtype)


def _explicit(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """PyTorch's equation with letters for the axes of `...`, which align from the right, and with `->`."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    free = [c for c in _LETTERS if c not in equation]
    terms = left.split(",")
    covered = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    deepest = max([c for c, term in zip(covered, terms, strict=True) if "..." in term], default=0)
    hidden = "".join(free[:deepest])
    terms = [term.replace("...", hidden[deepest - c :]) for c, term in zip(covered, terms, strict=True)]
    if arrow:
        return terms, right.replace("...", hidden)
    letters = "".join(terms)
    return terms, hidden + "".join(sorted(c for c in set(letters) - set(hidden) if letters.count(c) == 1))


def _capture_tensordot(op: Builder, a: ir.Value, b: ir.Value, dims_a: Sequence[int], dims_b: Sequence[int]) -> ir.Value:
    left = list(_LETTERS[: rank_of(a)])
    right = list(_LETTERS[rank_of(a) : rank_of(a) + rank_of(b)])
    for i, j in zip(dims_a, dims_b, strict=True):
        right[j] = left[i]
    output = [c for c in left if c not in right] + [c for c in right if c not in left]
    return build_einsum(op, ["".join(left), "".join(right)], "".join(output), [a, b])


def _capture_inner(op: Builder, a: ir.Value, b: ir.Value) -> Any:
    if not rank_of(a) or not rank_of(b):
        return op.Mul(a, b)
    return _capture_tensordot(op, a, b, [-1], [-1])


def _capture_bilinear(op: Builder, a: ir.Value, b: ir.Value, weight: ir.Value, bias: ir.Value | None = None) -> Any:
    """y[..., n] = Σ a[..., i] * weight[n, i, j] * b[..., j] + bias[n]."""
    leading = _LETTERS[3 : 2 + rank_of(a)]
    y = build_einsum(op, [leading + "a", "cab", leading + "b"], leading + "c", [a, weight, b])
    return y if bias is None else op.Add(y, bias)


EINSUM = define_pure(
    ONNX,
    "Einsum",
    ("xs...",),
    ("y",),
    attributes={"equation": REQUIRED},
    from_torch={
        "aten.einsum.default": restrict_to_matmul_dtypes(_capture_einsum),
        "aten.tensordot.default": restrict_to_matmul_dtypes(_capture_tensordot),
        "aten.inner.default": restrict_to_matmul_dtypes(_capture_inner),
        "aten.bilinear.default": restrict_to_matmul_dtypes(_capture_bilinear),
    },
    shapes=_type,
    body=STANDARD,
    gradient=(Gradient(_gradient, reads=("xs",)),),
    lower=_call,
    axes=_axes,
    flops=lambda n: sizes.multiply(2, *_sizes_by_letter(n).values()),
)
