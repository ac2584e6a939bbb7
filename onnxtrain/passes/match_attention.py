"""Recognises attention that a model writes out: the products, and what stands between them.

    q @ kᵀ  ─▶ scale ─▶ masks ─▶ Softmax ─▶ Dropout? ─▶ @ v

A product is MatMul, FusedMatMul or Einsum. The scale may be a product or a quotient, on q, on k or on the scores; masks
are added, or chosen by Where; casts, and reshapes that leave rows and columns alone, may stand anywhere. All that is
found goes into a `Written`; what cannot be one raises a `NotAttention` with the reason.
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
from onnxtrain.ops.attention.parts import accumulated
from onnxtrain.ops.elementwise.arithmetic import number_of
from onnxtrain.passes.rewriting import only_user

_PRODUCTS = frozenset({"MatMul", "FusedMatMul", "Einsum"})
_OWN_TYPE = "its softmax is computed in a type of its own"


class NotAttention(Exception):  # noqa: N818  # not an error: says why a softmax stays as it is
    """What stands around a softmax is no attention, or none that one op computes. `reason` None: nothing like it."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason


class Operand(NamedTuple):
    """A factor of a product: `value` with its axes in the order `perm`."""

    value: ir.Value
    perm: tuple[int, ...]

    @property
    def shape(self) -> Sizes:
        shape = sizes.dims_of(self.value)
        return tuple(shape[axis] for axis in self.perm)


class Mask(NamedTuple):
    """Added to the scores or, where it is bool, true where a score is not `fill`."""

    value: ir.Value
    rank: int  # of the scores that it masks
    negated: bool = False  # true where the score is `fill`
    fill: float = -math.inf
    factor: float = 1.0  # what it is multiplied by


@dataclass
class Written:
    """Attention as it is written out.

    Attributes:
        softmax: its node.
        q: [..., rows, e].
        k: [..., columns, e].
        v: [..., columns, d].
        scale: of q @ kᵀ.
        leading: the sizes of the scores before rows and columns, where they have most axes.
        last: the node that gives the result [..., rows, d].
        perm: the order of the result's axes, None for this one.
        added: masks that are added, in the order in which they are.
        chosen: the mask of a Where, behind all that is added; None without.
        dropout: its node, or None.
        between: nodes from the softmax to the result, which are read by nothing else.
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
    chosen: Mask | None = None
    dropout: ir.Node | None = None
    between: list[ir.Node] = field(default_factory=list)


def recognize(softmax: ir.Node) -> Written:
    """The attention around a softmax.

    Raises:
        NotAttention: there is none, or none that one op computes.
    """
    (x,) = softmax.inputs
    assert x is not None
    rank = rank_of(x)
    if rank < 2 or normalize_axis(view(softmax).axis, rank) != rank - 1:
        raise NotAttention
    scores = _scores(x)
    last, dropout, between = _use_of(softmax.outputs[0])
    p = next(v for v in last.inputs if v is not None and v.producer() in between)
    v, perm = _values(last, p)
    if dtype_of(softmax.outputs[0]) not in (dtype_of(scores.q.value), accumulated(dtype_of(scores.q.value))):
        raise NotAttention(_OWN_TYPE)
    if len({dtype_of(each) for each in (scores.q.value, scores.k.value, v.value, last.outputs[0])}) != 1:
        raise NotAttention("queries, keys and values have several element types")
    return Written(
        softmax, scores.q, scores.k, v, scores.scale, scores.leading, last, perm, scores.added, scores.chosen,
        dropout, between,
    )  # fmt: skip


# From the softmax to the values


def _use_of(p: ir.Value) -> tuple[ir.Node, ir.Node | None, list[ir.Node]]:
    """The product that the probabilities go into, their dropout, and all nodes from the softmax to that product."""
    between = [p.producer()]
    dropout = None
    while True:
        node = only_user(p)
        if node is None:
            raise NotAttention("its probabilities are read elsewhere" if _reaches_product(p) else None)
        if node.op_type == "Dropout" and dropout is None and p is node.inputs[0]:
            if is_used(node.outputs[1]):
                raise NotAttention("the mask of its dropout is read elsewhere")
            dropout = node
        elif not definition_of(node).same_elements or p is not node.inputs[0] or not _keeps_matrices(node):
            break
        between.append(node)
        p = node.outputs[0]
    if node.op_type not in _PRODUCTS or [*node.inputs].count(p) != 1:
        raise NotAttention
    return node, dropout, [n for n in between if n is not None]


def _reaches_product(p: ir.Value) -> bool:
    """Whether a product reads p, or what dropout or a cast makes of it."""
    for use in p.uses():
        node = use.node
        if node.op_type in _PRODUCTS:
            return True
        if (node.op_type == "Dropout" or definition_of(node).same_elements) and _reaches_product(node.outputs[0]):
            return True
    return False


def _keeps_matrices(node: ir.Node) -> bool:
    """Whether a node leaves the last two axes as they are."""
    if node.op_type == "Cast" and not is_float(dtype_of(node.outputs[0])):
        return False
    before, after = sizes.dims_of(_first(node)), sizes.dims_of(node.outputs[0])
    return before[-2:] == after[-2:]


def _first(node: ir.Node) -> ir.Value:
    return _inputs(node)[0]


def _inputs(node: ir.Node) -> list[ir.Value]:
    """The inputs of a node that has all of them."""
    return [value for value in node.inputs if value is not None]


def _values(node: ir.Node, p: ir.Value) -> tuple[Operand, tuple[int, ...] | None]:
    """V [..., columns, d] of p @ v, and the order of the result's axes where it is not [..., rows, d]."""
    product = _product(node)
    if node.op_type != "Einsum":
        if product.a.value is not p or product.alpha != 1 or product.a.perm != tuple(range(rank_of(p))):
            raise NotAttention
        return product.b, None
    (p_term, v_term), output = product.terms, product.output
    other = node.inputs[1] if node.inputs[0] is p else node.inputs[0]
    if node.inputs[0] is not p:
        p_term, v_term = v_term, p_term
    *batch, row, column = list(p_term)
    width = [c for c in v_term if c not in p_term]
    wanted = [*batch, column, *width]
    if len(width) != 1 or sorted(v_term) != sorted(wanted) or sorted(output) != sorted([*batch, row, *width]):
        raise NotAttention
    assert other is not None
    natural = [*batch, row, *width]
    perm = tuple(natural.index(c) for c in output)
    v = Operand(other, tuple(v_term.index(c) for c in wanted))
    return v, None if perm == tuple(range(len(perm))) else perm


# Products


class _Product(NamedTuple):
    """alpha * a @ b; of an Einsum the letters of its two operands and of its output."""

    a: Operand
    b: Operand
    alpha: float = 1.0
    terms: tuple[str, str] = ("", "")
    output: str = ""


def _product(node: ir.Node) -> _Product:
    if node.op_type == "Einsum":
        terms, output = str(view(node).equation).replace(" ", "").split("->")
        first, second = terms.split(",") if terms.count(",") == 1 else ("", "")
        if not first or any(len(set(t)) != len(t) for t in (first, second, output)):
            raise NotAttention
        a, b = (_plain(v) for v in node.inputs)
        return _Product(a, b, terms=(first, second), output=output)
    a, b = (_plain(v) for v in node.inputs)
    if len(a.perm) < 2 or len(a.perm) != len(b.perm):
        raise NotAttention
    if node.op_type == "MatMul":
        return _Product(a, b)
    n = view(node)
    if n.transBatchA or n.transBatchB:
        raise NotAttention("its product moves the batch axes")
    return _Product(_swapped(a) if n.transA else a, _swapped(b) if n.transB else b, float(n.alpha))


def _plain(value: ir.Value | None) -> Operand:
    assert value is not None
    return Operand(value, tuple(range(rank_of(value))))


def _swapped(operand: Operand) -> Operand:
    return Operand(operand.value, (*operand.perm[:-2], operand.perm[-1], operand.perm[-2]))


def _transposed_away(operand: Operand) -> Operand:
    """The same operand, read before a Transpose where that leaves nothing to transpose."""
    node = operand.value.producer()
    if node is None or node.op_type != "Transpose":
        return operand
    axes = tuple(range(len(operand.perm)))
    given = view(node).perm or tuple(reversed(axes))
    return Operand(_first(node), axes) if tuple(given[axis] for axis in operand.perm) == axes else operand


# From the softmax to queries and keys


@dataclass
class _Scores:
    q: Operand
    k: Operand
    scale: float
    leading: Sizes
    added: list[Mask]
    chosen: Mask | None


@dataclass
class _Walk:
    """What stands between the softmax and the product q @ kᵀ, gathered backwards."""

    factor: float = 1.0  # of all that is still to be found
    added: list[Mask] = field(default_factory=list)
    chosen: Mask | None = None
    leading: Sizes = ()

    def see(self, value: ir.Value) -> None:
        """Notes the shape of the scores at one place: where they have most axes they show batches and heads."""
        leading = sizes.dims_of(value)[:-2]
        if len(leading) > len(self.leading):
            self.leading = leading

    def add(self, mask: Mask) -> None:
        self.added.insert(0, mask)

    def choose(self, mask: Mask) -> None:
        """A Where below what was found already: what is added behind it must not show where it chose.

        Nor may it have a gradient: there the one op gives it none, but eager does, in a row of -inf.
        """
        if self.added and mask.fill != -math.inf:
            raise NotAttention(f"a mask is added to scores that were filled with {mask.fill}")
        if any(_may_have_gradient(each.value) for each in self.added):
            raise NotAttention("a mask that may have a gradient is added behind a Where")
        if self.chosen is not None:
            raise NotAttention("its scores are masked by more than one Where")
        self.chosen = mask


def _scores(x: ir.Value) -> _Scores:
    walk = _Walk()
    shared = False
    while True:
        walk.see(x)
        shared = shared or only_user(x) is None
        node = x.producer()
        if node is None:
            raise NotAttention
        if _is_scores(x):
            break
        x = _below(node, walk)
    if shared:
        raise NotAttention("its scores are read elsewhere")
    return _finished(node, walk)


def _is_scores(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type in _PRODUCTS


def _leads_to_scores(value: ir.Value) -> bool:
    try:
        _scores(value)
    except NotAttention:
        return False
    return True


def _below(node: ir.Node, walk: _Walk) -> ir.Value:
    """The scores before `node`, which the walk takes note of."""
    if definition_of(node).same_elements:
        before = _first(node)
        narrows = is_float(dtype_of(before)) and dtype_of(before).itemsize > dtype_of(node.outputs[0]).itemsize
        if not _keeps_matrices(node):
            raise NotAttention
        if narrows:
            raise NotAttention(_OWN_TYPE if _leads_to_scores(before) else None)
        return before
    match node.op_type:
        case "Mul" | "Div":
            return _scaled(node, walk)
        case "Add" | "Sub":
            return _shifted(node, walk)
        case "Where":
            return _chosen(node, walk)
    raise NotAttention


def _scaled(node: ir.Node, walk: _Walk) -> ir.Value:
    a, b = _inputs(node)
    number, x = number_of(b), a
    if number is None and node.op_type == "Mul":
        number, x = number_of(a), b
    if number is None or (node.op_type == "Div" and number == 0):
        raise NotAttention("its scores are scaled by a tensor" if _is_scores(a) or _is_scores(b) else None)
    walk.factor *= number if node.op_type == "Mul" else 1 / number
    return x


def _shifted(node: ir.Node, walk: _Walk) -> ir.Value:
    a, b = _inputs(node)
    first, second = _depth(a), _depth(b)
    if first is None and second is None:
        raise NotAttention
    if second is not None and (first is None or second < first):
        a, b = b, a
        if node.op_type == "Sub":
            raise NotAttention
    if sizes.dims_of(a) != sizes.dims_of(node.outputs[0]):
        raise NotAttention("a mask is larger than its scores")
    walk.add(Mask(b, rank_of(a), factor=-walk.factor if node.op_type == "Sub" else walk.factor))
    return a


def _chosen(node: ir.Node, walk: _Walk) -> ir.Value:
    condition, a, b = _inputs(node)
    fill, x, negated = number_of(b), a, False
    if fill is None:
        fill, x, negated = number_of(a), b, True
    if fill is None or sizes.dims_of(x) != sizes.dims_of(node.outputs[0]):
        raise NotAttention
    walk.choose(Mask(condition, rank_of(x), negated, fill * walk.factor))
    return x


def _may_have_gradient(value: ir.Value) -> bool:
    """Whether floating inputs of the graph go into a value, by way of floating values."""
    seen, waiting = set[ir.Value](), [value]
    while waiting:
        value = waiting.pop()
        if value in seen or not is_float(dtype_of(value)):
            continue
        if value.is_graph_input():
            return True
        seen.add(value)
        node = value.producer()
        waiting += [] if node is None else _inputs(node)
    return False


def _depth(value: ir.Value, left: int = 12) -> int | None:
    """How many nodes back a product is, through nodes that scale and mask; None where there is none."""
    node = value.producer()
    if node is None or not left:
        return None
    if _is_scores(value):
        return 0
    if node.op_type not in ("Mul", "Div", "Add", "Sub", "Where") and not definition_of(node).same_elements:
        return None
    found = [_depth(v, left - 1) for v in node.inputs if v is not None and is_float(dtype_of(v))]
    known = [d for d in found if d is not None]
    return 1 + min(known) if known else None


def _finished(node: ir.Node, walk: _Walk) -> _Scores:
    product = _product(node)
    if node.op_type == "Einsum":
        q, k = _einsum_operands(product)
    else:
        q, k = product.a, _swapped(product.b)
    scale = walk.factor * product.alpha
    q, of_q = _scaled_away(_transposed_away(q))
    k, of_k = _scaled_away(_transposed_away(k))
    scale *= of_q * of_k
    if not math.isfinite(scale):
        raise NotAttention
    return _Scores(q, k, scale, walk.leading, walk.added, walk.chosen)


def _einsum_operands(product: _Product) -> tuple[Operand, Operand]:
    *batch, row, column = list(product.output)
    first = 0 if row in product.terms[0] else 1
    found: list[Operand] = []
    for which, own in ((first, row), (1 - first, column)):
        term = product.terms[which]
        inner = [c for c in term if c not in product.output]
        if len(inner) != 1 or sorted(term) != sorted([*batch, own, *inner]):
            raise NotAttention
        value = (product.a, product.b)[which].value
        found.append(Operand(value, tuple(term.index(c) for c in [*batch, own, *inner])))
    return found[0], found[1]


def _scaled_away(operand: Operand) -> tuple[Operand, float]:
    """The operand before a Mul or Div by a number that gives it, and that number."""
    node = operand.value.producer()
    if node is None or node.op_type not in ("Mul", "Div"):
        return operand, 1.0
    a, b = _inputs(node)
    number, x = number_of(b), a
    if number is None and node.op_type == "Mul":
        number, x = number_of(a), b
    if number is None or not number or sizes.dims_of(x) != sizes.dims_of(operand.value):
        return operand, 1.0
    return Operand(x, operand.perm), float(number if node.op_type == "Mul" else 1 / number)
