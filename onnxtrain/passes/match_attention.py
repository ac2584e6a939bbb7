"""Match attention that a model writes out op by op: the two matmuls and the ops between them.

    q @ kᵀ  ─▶ scale ─▶ masks ─▶ Softmax ─▶ Dropout? ─▶ @ v

A matmul is MatMul, FusedMatMul or Einsum. The scale may be a Mul or Div on q, on k or on the scores; masks are added,
or applied by Where; casts, and reshapes that keep rows and columns, may occur anywhere. The result is an
`AttentionMatch`, or a `NotAttention` error with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.sizes import Sizes
from onnxtrain.graph.traversal import is_used
from onnxtrain.graph.values import dtype_of, is_float, normalize_axis, rank_of
from onnxtrain.ops import definition_of, view
from onnxtrain.ops.attention.scores import score_dtype
from onnxtrain.ops.elementwise.arithmetic import ADD, DIV, MUL, SUB, number_of
from onnxtrain.ops.elementwise.selection import WHERE
from onnxtrain.ops.matmul.einsum import EINSUM
from onnxtrain.ops.matmul.fused_matmul import FUSED_MATMUL
from onnxtrain.ops.matmul.matmul import MATMUL
from onnxtrain.ops.random.dropout import DROPOUT
from onnxtrain.ops.reshape.dims import TRANSPOSE, perm_of
from onnxtrain.passes.rewriting import only_user

_MATMULS = frozenset({MATMUL, FUSED_MATMUL, EINSUM})
_BETWEEN = frozenset({MUL, DIV, ADD, SUB, WHERE})  # scores and softmax
_SOFTMAX_TYPE = "the element type of its softmax differs from that of query and key"


class NotAttention(Exception):  # noqa: N818  # control flow: why a softmax is not fused
    """The ops around a softmax are not attention (`reason` is None), or attention that cannot be fused."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason


class Operand(NamedTuple):
    """An operand of a matmul: `value` with its axes permuted by `perm`."""

    value: ir.Value
    perm: tuple[int, ...]

    @property
    def shape(self) -> Sizes:
        shape = sizes.dims_of(self.value)
        return tuple(shape[axis] for axis in self.perm)


class Mask(NamedTuple):
    """An additive mask, or a boolean one that replaces scores by `fill` where it is false (true if `negated`)."""

    value: ir.Value
    rank: int  # of the masked scores
    negated: bool = False
    fill: float = -math.inf
    factor: float = 1.0  # multiplies an additive mask


@dataclass
class AttentionMatch:
    """Written-out attention.

    Attributes:
        softmax: the softmax node.
        q: [..., rows, e].
        k: [..., columns, e].
        v: [..., columns, d].
        scale: of q @ kᵀ.
        leading: the batch and head dimensions of the scores, at the point where they have the most axes.
        last: the node that computes the result [..., rows, d].
        perm: the permutation of the result's axes; None for the identity.
        added: the additive masks, in order.
        where: the mask of a Where after all additive masks, or None.
        dropout: the Dropout node, or None.
        between: the nodes from the softmax to `last`, which have no other users.
    """

    softmax: ir.Node
    q: Operand
    k: Operand
    v: Operand
    scale: float
    leading: Sizes
    last: ir.Node
    perm: tuple[int, ...] | None
    added: list[Mask] = field(default_factory=list)
    where: Mask | None = None
    dropout: ir.Node | None = None
    between: list[ir.Node] = field(default_factory=list)


def match_attention(softmax: ir.Node) -> AttentionMatch:
    """Match the attention around a softmax.

    Raises:
        NotAttention: there is none, or one that cannot be fused.
    """
    (x,) = softmax.inputs
    assert x is not None
    rank = rank_of(x)
    if rank < 2 or normalize_axis(view(softmax).axis, rank) != rank - 1:
        raise NotAttention
    scores = _match_scores(x)
    last, dropout, between = _match_probabilities(softmax.outputs[0])
    p = next(v for v in last.inputs if v is not None and v.producer() in between)
    v, perm = _match_values(last, p)
    if dtype_of(softmax.outputs[0]) not in (dtype_of(scores.q.value), score_dtype(dtype_of(scores.q.value))):
        raise NotAttention(_SOFTMAX_TYPE)
    if len({dtype_of(each) for each in (scores.q.value, scores.k.value, v.value, last.outputs[0])}) != 1:
        raise NotAttention("query, key, value and result have different element types")
    return AttentionMatch(
        softmax, scores.q, scores.k, v, scores.scale, scores.leading, last, perm, scores.added, scores.where,
        dropout, between,
    )  # fmt: skip


# From the softmax to the values


def _match_probabilities(p: ir.Value) -> tuple[ir.Node, ir.Node | None, list[ir.Node]]:
    """Return the matmul that reads the probabilities, their dropout, and the nodes from the softmax to the matmul."""
    between = [p.producer()]
    dropout = None
    while True:
        node = only_user(p)
        if node is None:
            raise NotAttention("its probabilities have other users" if _reaches_matmul(p) else None)
        if definition_of(node) is DROPOUT and dropout is None and p is node.inputs[0]:
            if is_used(node.outputs[1]):
                raise NotAttention("its dropout mask has other users")
            dropout = node
        elif not definition_of(node).is_transparent or p is not node.inputs[0] or not _keeps_matrices(node):
            break
        between.append(node)
        p = node.outputs[0]
    if definition_of(node) not in _MATMULS or [*node.inputs].count(p) != 1:
        raise NotAttention
    return node, dropout, [n for n in between if n is not None]


def _reaches_matmul(p: ir.Value) -> bool:
    """Return whether a matmul reads p, directly or through dropout and shape-preserving ops."""
    for use in p.uses():
        node, definition = use.node, definition_of(use.node)
        if definition in _MATMULS:
            return True
        if (definition is DROPOUT or definition.is_transparent) and _reaches_matmul(node.outputs[0]):
            return True
    return False


def _keeps_matrices(node: ir.Node) -> bool:
    """Return whether a node keeps the last two dimensions, and floating-point numbers."""
    if not is_float(dtype_of(node.outputs[0])):
        return False
    before, after = sizes.dims_of(_first_input(node)), sizes.dims_of(node.outputs[0])
    return before[-2:] == after[-2:]


def _first_input(node: ir.Node) -> ir.Value:
    return _inputs(node)[0]


def _inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node, none of which is absent."""
    return [value for value in node.inputs if value is not None]


def _match_values(node: ir.Node, p: ir.Value) -> tuple[Operand, tuple[int, ...] | None]:
    """Return v [..., columns, d] of p @ v, and the permutation of the result's axes if it is not [..., rows, d]."""
    matmul = _matmul(node)
    if definition_of(node) is not EINSUM:
        if matmul.a.value is not p or matmul.alpha != 1 or matmul.a.perm != tuple(range(rank_of(p))):
            raise NotAttention
        return matmul.b, None
    (p_term, v_term), output = matmul.terms, matmul.output
    other = node.inputs[1] if node.inputs[0] is p else node.inputs[0]
    if node.inputs[0] is not p:
        p_term, v_term = v_term, p_term
    *batch, row, column = list(p_term)
    width = [c for c in v_term if c not in p_term]
    v_axes, result_axes = [*batch, column, *width], [*batch, row, *width]
    if len(width) != 1 or sorted(v_term) != sorted(v_axes) or sorted(output) != sorted(result_axes):
        raise NotAttention
    assert other is not None
    perm = tuple(result_axes.index(c) for c in output)
    v = Operand(other, tuple(v_term.index(c) for c in v_axes))
    return v, None if perm == tuple(range(len(perm))) else perm


# Matmuls


class _MatMul(NamedTuple):
    """alpha * a @ b; for an Einsum also the subscripts of its operands and output."""

    a: Operand
    b: Operand
    alpha: float = 1.0
    terms: tuple[str, str] = ("", "")
    output: str = ""


def _matmul(node: ir.Node) -> _MatMul:
    if definition_of(node) is EINSUM:
        terms, output = str(view(node).equation).replace(" ", "").split("->")
        first, second = terms.split(",") if terms.count(",") == 1 else ("", "")
        if not first or any(len(set(t)) != len(t) for t in (first, second, output)):
            raise NotAttention
        a, b = (_unpermuted(v) for v in node.inputs)
        return _MatMul(a, b, terms=(first, second), output=output)
    a, b = (_unpermuted(v) for v in node.inputs)
    if len(a.perm) < 2 or len(a.perm) != len(b.perm):
        raise NotAttention
    n = view(node)
    if n.definition is MATMUL:
        return _MatMul(a, b)
    if n.transBatchA or n.transBatchB:
        raise NotAttention("its matmul permutes batch dimensions")
    return _MatMul(_transposed(a) if n.transA else a, _transposed(b) if n.transB else b, float(n.alpha))


def _unpermuted(value: ir.Value | None) -> Operand:
    assert value is not None
    return Operand(value, tuple(range(rank_of(value))))


def _transposed(operand: Operand) -> Operand:
    return Operand(operand.value, (*operand.perm[:-2], operand.perm[-1], operand.perm[-2]))


def _cancel_transpose(operand: Operand) -> Operand:
    """Return the operand as the input of its Transpose, if that cancels the operand's permutation."""
    node = operand.value.producer()
    if node is None or definition_of(node) is not TRANSPOSE:
        return operand
    axes, perm = tuple(range(len(operand.perm))), perm_of(view(node))
    return Operand(_first_input(node), axes) if tuple(perm[axis] for axis in operand.perm) == axes else operand


# From the softmax to queries and keys


@dataclass
class _Scores:
    q: Operand
    k: Operand
    scale: float
    leading: Sizes
    added: list[Mask]
    where: Mask | None


@dataclass
class _Walk:
    """The ops between the softmax and q @ kᵀ, collected backwards."""

    factor: float = 1.0  # multiplies everything found from here on
    added: list[Mask] = field(default_factory=list)
    where: Mask | None = None
    leading: Sizes = ()

    def note_shape(self, value: ir.Value) -> None:
        """Keep the scores' batch and head dimensions at the point where they have the most axes."""
        leading = sizes.dims_of(value)[:-2]
        if len(leading) > len(self.leading):
            self.leading = leading

    def prepend_added(self, mask: Mask) -> None:
        self.added.insert(0, mask)

    def set_where(self, mask: Mask) -> None:
        """Record a Where before the masks in `added`.

        These must not change the scores that it fills. Nor may they have a gradient: the fused op has none for filled
        scores, while eager has, in a row of -inf.
        """
        if self.added and mask.fill != -math.inf:
            raise NotAttention(f"a mask is added to scores that were filled with {mask.fill}")
        if any(_may_have_gradient(each.value) for each in self.added):
            raise NotAttention("a mask that may have a gradient is added after a Where")
        if self.where is not None:
            raise NotAttention("its scores are masked by more than one Where")
        self.where = mask


def _match_scores(x: ir.Value) -> _Scores:
    walk = _Walk()
    shared = False
    while True:
        walk.note_shape(x)
        shared = shared or only_user(x) is None
        node = x.producer()
        if node is None:
            raise NotAttention
        if _is_matmul_result(x):
            break
        x = _step_back(node, walk)
    if shared:
        raise NotAttention("its scores have other users")
    return _finish(node, walk)


def _is_matmul_result(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and definition_of(node) in _MATMULS


def _leads_to_scores(value: ir.Value) -> bool:
    try:
        _match_scores(value)
    except NotAttention:
        return False
    return True


def _step_back(node: ir.Node, walk: _Walk) -> ir.Value:
    """Record `node` in the walk and return the scores that it reads."""
    if definition_of(node).is_transparent:
        before = _first_input(node)
        narrows = is_float(dtype_of(before)) and dtype_of(before).itemsize > dtype_of(node.outputs[0]).itemsize
        if not _keeps_matrices(node):
            raise NotAttention
        if narrows:
            raise NotAttention(_SOFTMAX_TYPE if _leads_to_scores(before) else None)
        return before
    definition = definition_of(node)
    if definition in (MUL, DIV):
        return _step_over_scaling(node, walk)
    if definition in (ADD, SUB):
        return _step_over_added_mask(node, walk)
    if definition is WHERE:
        return _step_over_where(node, walk)
    raise NotAttention


def _step_over_scaling(node: ir.Node, walk: _Walk) -> ir.Value:
    scaling = _scaling(node)
    if scaling is None:
        raise NotAttention("its scores are scaled by a tensor" if any(map(_is_matmul_result, _inputs(node))) else None)
    x, factor = scaling
    walk.factor *= factor
    return x


def _scaling(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return the tensor and the constant factor of a Mul or Div; None if it has no such factor."""
    a, b = _inputs(node)
    if definition_of(node) is DIV:
        divisor = number_of(b)
        return (a, 1 / divisor) if divisor else None
    for x, other in ((a, b), (b, a)):
        number = number_of(other)
        if number is not None:
            return x, float(number)
    return None


def _step_over_added_mask(node: ir.Node, walk: _Walk) -> ir.Value:
    a, b = _inputs(node)
    first, second = _distance_to_matmul(a), _distance_to_matmul(b)
    if first is None and second is None:
        raise NotAttention
    if second is not None and (first is None or second < first):
        a, b = b, a
        if definition_of(node) is SUB:
            raise NotAttention
    if sizes.dims_of(a) != sizes.dims_of(node.outputs[0]):
        raise NotAttention("an additive mask broadcasts its scores to a larger shape")
    walk.prepend_added(Mask(b, rank_of(a), factor=-walk.factor if definition_of(node) is SUB else walk.factor))
    return a


def _step_over_where(node: ir.Node, walk: _Walk) -> ir.Value:
    condition, a, b = _inputs(node)
    fill, x, negated = number_of(b), a, False
    if fill is None:
        fill, x, negated = number_of(a), b, True
    if fill is None or sizes.dims_of(x) != sizes.dims_of(node.outputs[0]):
        raise NotAttention
    walk.set_where(Mask(condition, rank_of(x), negated, fill * walk.factor))
    return x


def _may_have_gradient(value: ir.Value) -> bool:
    """Return whether a value depends on floating-point graph inputs through floating-point values only."""
    visited, waiting = set[ir.Value](), [value]
    while waiting:
        value = waiting.pop()
        if value in visited or not is_float(dtype_of(value)):
            continue
        if value.is_graph_input():
            return True
        visited.add(value)
        node = value.producer()
        waiting += [] if node is None else _inputs(node)
    return False


def _distance_to_matmul(value: ir.Value, limit: int = 12) -> int | None:
    """Return how many scaling and masking nodes lie between a value and a matmul; None without a matmul."""
    node = value.producer()
    if node is None or not limit:
        return None
    if _is_matmul_result(value):
        return 0
    definition = definition_of(node)
    if definition not in _BETWEEN and not definition.is_transparent:
        return None
    distances = [_distance_to_matmul(v, limit - 1) for v in node.inputs if v is not None and is_float(dtype_of(v))]
    return min((1 + d for d in distances if d is not None), default=None)


def _finish(node: ir.Node, walk: _Walk) -> _Scores:
    matmul = _matmul(node)
    if definition_of(node) is EINSUM:
        q, k = _einsum_operands(matmul)
    else:
        q, k = matmul.a, _transposed(matmul.b)
    scale = walk.factor * matmul.alpha
    q, scale_of_q = _strip_scaling(_cancel_transpose(q))
    k, scale_of_k = _strip_scaling(_cancel_transpose(k))
    scale *= scale_of_q * scale_of_k
    if not math.isfinite(scale):
        raise NotAttention
    return _Scores(q, k, scale, walk.leading, walk.added, walk.where)


def _einsum_operands(matmul: _MatMul) -> tuple[Operand, Operand]:
    *batch, row, column = list(matmul.output)
    first = 0 if row in matmul.terms[0] else 1
    operands: list[Operand] = []
    for index, own in ((first, row), (1 - first, column)):
        term = matmul.terms[index]
        inner = [c for c in term if c not in matmul.output]
        if len(inner) != 1 or sorted(term) != sorted([*batch, own, *inner]):
            raise NotAttention
        value = (matmul.a, matmul.b)[index].value
        operands.append(Operand(value, tuple(term.index(c) for c in [*batch, own, *inner])))
    return operands[0], operands[1]


def _strip_scaling(operand: Operand) -> tuple[Operand, float]:
    """Return the operand before its Mul or Div by a constant, and the constant factor (1 without)."""
    node = operand.value.producer()
    scaling = None if node is None or definition_of(node) not in (MUL, DIV) else _scaling(node)
    if scaling is None or not scaling[1] or sizes.dims_of(scaling[0]) != sizes.dims_of(operand.value):
        return operand, 1.0
    return Operand(scaling[0], operand.perm), scaling[1]
