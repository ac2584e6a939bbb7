"""Fuse norms, activations and rotary embeddings that a model writes out op by op.

    before   Pow(x, 2) ─▶ ReduceMean ─▶ Add(1e-6) ─▶ Rsqrt ─▶ Mul(x, ·) ─▶ Mul(weight, ·)
    after    SimplifiedLayerNormalization(x, weight)

`REWRITES` holds the patterns; `register` adds one. Refused if a value inside the match has other users. A bias before a
GELU, a sum before a norm and a bias before a softmax stay: their fused ops (BiasGelu, SkipLayerNormalization,
BiasSoftmax) run the same PyTorch kernels, and backward would recompute the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.traversal import is_used
from onnxtrain.graph.values import dtype_of, normalize_axis, rank_of
from onnxtrain.ops import builder, definition_of, view
from onnxtrain.ops.elementwise.copies import CAST
from onnxtrain.ops.matmul import is_exact_attribute
from onnxtrain.ops.norm.layer_norm import build_layer_norm
from onnxtrain.ops.registry import input_of
from onnxtrain.ops.reshape.join import SPLIT
from onnxtrain.ops.reshape.slicing import SLICE
from onnxtrain.ops.symbolic_ints import known_ints
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.patterns import Cast, Match, Num, Op, Pattern, Rewrite, Var, either, match, op, shared_value
from onnxtrain.passes.rewriting import nodes_before, substitute

REWRITES: list[Rewrite] = []


def register(rewrite: Rewrite) -> Rewrite:
    """Add a pattern, to be tried after those registered before."""
    REWRITES.append(rewrite)
    return rewrite


def _rewrite(name: str, *patterns: Op) -> Callable[[Callable[[Builder, Match, ir.Value], ir.Value | None]], None]:
    def add(build: Callable[[Builder, Match, ir.Value], ir.Value | None]) -> None:
        for pattern in patterns:
            register(Rewrite(name, pattern, build))

    return add


def fuse_patterns(graph: ir.Graph, changes: Changes) -> None:
    """Replace every match of a pattern in `graph`, the largest first."""
    ops = builder(graph)
    fused: dict[str, int] = {}
    for node in reversed(list(graph)):
        if node.graph is graph and node.outputs and is_used(node.outputs[0]):
            name = _fuse(ops, node, changes)
            if name is not None:
                fused[name] = fused.get(name, 0) + 1
    changes.applied += [f"fused {count} written-out {name}" for name, count in fused.items()]


def _fuse(ops: Builder, node: ir.Node, changes: Changes) -> str | None:
    """Replace `node` by the first rewrite that matches and return its name; None if none matches."""
    old, definition = node.outputs[0], definition_of(node)
    for rewrite in REWRITES:
        if definition not in rewrite.pattern.kinds:
            continue
        for matched in match(rewrite.pattern, old):
            shared = shared_value(matched, old)
            if shared is not None:
                changes.refuse(node, f"not fused into {rewrite.name}: {shared.name} has other users")
                break
            with nodes_before(ops, node):
                new = rewrite.build(ops, matched, old)
            if new is not None:
                substitute(ops.graph, old, new, [node])
                return rewrite.name
    return None


# Norms

_X, _W, _B, _EPS = Var("x"), Var("w"), Var("b"), Num("epsilon")


def _over_last_axis(node: ir.Node) -> bool:
    n = view(node)
    axes = None if n.axes is None else known_ints(n.axes)
    rank = rank_of(n.x)
    return bool(n.keepdims) and axes is not None and [normalize_axis(int(a), rank) for a in axes] == [rank - 1]


def _mean(x: Pattern) -> Op:
    return op("ReduceMean", x, check=_over_last_axis)


def _square(x: Pattern) -> Pattern:
    return either(op("Pow", x, 2.0), op("Mul", x, x))


def _normal(x: Pattern, variance: Pattern) -> Pattern:
    """Match `x` divided by the square root of its variance."""
    root = op("Sqrt", op("Add", variance, _EPS))
    inverse = either(op("onnxtrain::Rsqrt", op("Add", variance, _EPS)), op("Reciprocal", root))
    power = op("Pow", op("Add", variance, _EPS), -0.5)
    return either(op("Mul", x, either(inverse, power)), op("Div", x, root))


def _is_parameter(scale: ir.Value | None, x: ir.Value) -> bool:
    return scale is None or sizes.dims_of(scale) == sizes.dims_of(x)[-1:]


def _of_type(x: ir.Value, dtype: ir.DataType) -> ir.Value | None:
    """Return x, or the value that it is a cast of, if that has this type; else None.

    Not a float64 source of a narrowing cast: the fused op would skip the rounding and differ from eager.
    """
    if dtype_of(x) == dtype:
        return x
    if dtype == ir.DataType.DOUBLE:
        return None
    source = input_of(x, CAST)
    return source if source is not None and dtype_of(source) == dtype else None


_RMS = _normal(_X, _mean(_square(_X)))
_CENTRED = op("Sub", _X, _mean(_X))
_LAYER = _normal(_CENTRED, _mean(_square(_CENTRED)))


@_rewrite("LayerNormalization", op("Add", op("Mul", _W, Cast(_LAYER)), _B))
def _layer_norm(ops: Builder, matched: Match, old: ir.Value) -> ir.Value | None:
    x = _of_type(matched.values["x"], dtype_of(old))
    w, b = matched.values["w"], matched.values["b"]
    if x is None or sizes.dims_of(x) != sizes.dims_of(old) or not (_is_parameter(w, x) and _is_parameter(b, x)):
        return None
    if dtype_of(w) != dtype_of(b):
        return None
    return build_layer_norm(ops, x, w, b, rank_of(x) - 1, matched.numbers["epsilon"])[0]


@_rewrite("SimplifiedLayerNormalization", op("Mul", _W, Cast(_RMS)))
def _rms_norm(ops: Builder, matched: Match, old: ir.Value) -> ir.Value | None:
    x, w = _of_type(matched.values["x"], dtype_of(old)), matched.values["w"]
    if x is None or sizes.dims_of(x) != sizes.dims_of(old) or not _is_parameter(w, x):
        return None
    epsilon = matched.numbers["epsilon"]
    return ops.ms.SimplifiedLayerNormalization(x, w, axis=rank_of(x) - 1, epsilon=epsilon)[0]


# Activations


def _is_half(x: ir.Value) -> bool:
    """Return whether x has fewer than 32 bits, or was widened from such a type.

    Eager rounds after each op then, and a fused op would not: more accurate on average, but further from eager than the
    tolerance allows (1.3 times, for a gradient of GPT-2 under autocast).
    """
    source = input_of(x, CAST)
    return min(dtype_of(v).itemsize for v in (x, source) if v is not None) < 4


def _times_half(x: Pattern, factor: Pattern) -> tuple[Op, ...]:
    """0.5 * x * factor, in any association."""
    halves = op("Mul", op("Mul", x, 0.5), factor), op("Mul", op("Mul", x, factor), 0.5)
    return (*halves, op("Mul", x, op("Mul", factor, 0.5)), op("Div", op("Mul", x, factor), 2.0))


_ROOT = math.sqrt(2 / math.pi)
_CUBE = either(op("Pow", _X, 3.0), op("Mul", op("Mul", _X, _X), _X))
_INNER = either(
    op("Mul", op("Add", _X, op("Mul", _CUBE, 0.044715)), _ROOT),
    op("Mul", op("Mul", _X, _ROOT), op("Add", op("Mul", op("Mul", _X, 0.044715), _X), 1.0)),
    op("Mul", op("Mul", _X, _ROOT), op("Add", op("Mul", _square(_X), 0.044715), 1.0)),
)
_ERF = op("Erf", either(op("Div", _X, math.sqrt(2)), op("Mul", _X, math.sqrt(0.5))))


@_rewrite("FastGelu", *_times_half(_X, op("Add", op("Tanh", _INNER), 1.0)))
def _fast_gelu(ops: Builder, matched: Match, old: ir.Value) -> ir.Value | None:
    x = matched.values["x"]
    return None if _is_half(x) else ops.ms.FastGelu(x)


@_rewrite("Gelu", *_times_half(_X, op("Add", _ERF, 1.0)))
def _gelu(ops: Builder, matched: Match, old: ir.Value) -> ir.Value | None:
    x = matched.values["x"]
    return None if _is_half(x) else ops.ms.Gelu(x)  # ONNX's has PyTorch's kernel, which is less accurate than erf


@_rewrite("QuickGelu", op("Mul", _X, op("Sigmoid", either(_X, op("Mul", _X, Num("alpha"))))))
def _quick_gelu(ops: Builder, matched: Match, old: ir.Value) -> ir.Value | None:
    x, alpha = matched.values["x"], matched.numbers.get("alpha", 1.0)
    if _is_half(x) or (dtype_of(old) == ir.DataType.DOUBLE and not is_exact_attribute(alpha)):
        return None
    return ops.ms.QuickGelu(x, alpha=float(alpha))


# Rotary embeddings


def _half_index(part: ir.Value, x: ir.Value) -> int | None:
    """Return 0 or 1 if `part` is the first or the second half of x's last axis, else None."""
    node = part.producer()
    if node is None or node.inputs[0] is not x:
        return None
    axis, width = rank_of(x) - 1, sizes.dims_of(x)[-1]
    if not isinstance(width, int) or width % 2 or sizes.dims_of(part) != (*sizes.dims_of(x)[:-1], width // 2):
        return None
    n = view(node)
    if n.definition is SPLIT:
        return part.index() if normalize_axis(n.axis, axis + 1) == axis else None
    if n.definition is not SLICE or n.axes is None:
        return None
    axes, starts = known_ints(n.axes), known_ints(n.starts)
    steps = (1,) if n.steps is None else known_ints(n.steps)
    if (
        axes is None
        or starts is None
        or len(axes) != 1
        or normalize_axis(int(axes[0]), axis + 1) != axis
        or steps != (1,)
    ):
        return None
    return {0: 0, width // 2: 1, -(width // 2): 1}.get(int(starts[0]))


def _concatenates_two_on_last_axis(node: ir.Node) -> bool:
    return (
        len(node.inputs) == 2
        and normalize_axis(view(node).axis, rank_of(node.outputs[0])) == rank_of(node.outputs[0]) - 1
    )


_ROTATED = op("Concat", op("Neg", Var("second")), Var("first"), check=_concatenates_two_on_last_axis)


@_rewrite("RotaryEmbedding", op("Add", op("Mul", _X, Var("cos")), op("Mul", _ROTATED, Var("sin"))))
def _rotary(ops: Builder, matched: Match, old: ir.Value) -> ir.Value | None:
    x, cos, sin = (matched.values[name] for name in ("x", "cos", "sin"))
    if (_half_index(matched.values["first"], x), _half_index(matched.values["second"], x)) != (0, 1):
        return None
    if sizes.dims_of(x) != sizes.dims_of(old) or any(
        sizes.dims_of(t)[-1:] != sizes.dims_of(x)[-1:] for t in (cos, sin)
    ):
        return None
    if {dtype_of(t) for t in (x, cos, sin)} != {dtype_of(old)}:
        return None
    return ops.own.RotaryEmbedding(x, cos, sin)
