"""A layer of PyTorch's LSTM, GRU or RNN, of one or both directions, with PyTorch's weights as they are.

    LSTMLayer(x[s, b, i], h0[D, b, h], c0[D, b, h], weights) -> y[s, b, D h], h[D, b, h], c[D, b, h], kept
    LSTMLayerGrad(dy, dh, dc, x, h0, c0, weights, y, c, kept) -> dx, dh0, dc0, the gradient of each weight

and GRULayer and RNNLayer, without c. The weights of a direction are w_ih[G h, i], w_hh[G h, h], b_ih and b_hh[G h];
those of the other direction, where it is there, come after them. ONNX's own LSTM, GRU and RNN want the gates in another
order and all weights in one tensor: each training step would copy weights and gradients. The body does so.

`kept` is what the kernel of the forward pass keeps for its gradient, as bytes; a body keeps none and computes the gates
again, of all steps at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, dtype_of, type_of
from onnxtrain.ops.composite import no_axes
from onnxtrain.ops.constructors import cast, never
from onnxtrain.ops.definition import NOT_DIFFERENTIABLE, Call, Effects, Gradient, Kernel, NodeView, OpDef
from onnxtrain.ops.fused import nothing, reshaped, wanted
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.recurrent import kernels, lstm_compiled, unrolled
from onnxtrain.ops.recurrent.cells import CELLS, LSTM, RNN, Cell
from onnxtrain.ops.recurrent.unrolled import Side
from onnxtrain.ops.registry import define
from onnxtrain.ops.reshape.dims import transposed
from onnxtrain.ops.reshape.join import concatenated, split

Grads = Sequence[ir.Value | None]
_DIRECTION = ("w_ih", "w_hh", "b_ih", "b_hh")
WEIGHTS = (*_DIRECTION, *(f"{name}_reverse" for name in _DIRECTION))
_OPTIONAL = tuple(name if name in ("w_ih", "w_hh") else f"{name}?" for name in WEIGHTS)
_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def _firsts(cell: Cell) -> tuple[str, ...]:
    return ("h0", "c0") if cell.has_state else ("h0",)


def _weights(n: NodeView) -> list[ir.Value | None]:
    return [getattr(n, name) for name in WEIGHTS]


def _relu(n: NodeView) -> bool:
    return "activation" in n.definition.attributes and n.activation == "Relu"


def _both(weights: Sequence[ir.Value | None]) -> bool:
    return len(weights) > len(_DIRECTION) and weights[len(_DIRECTION)] is not None


def _types(cell: Cell, n: NodeView) -> Sequence[TensorType]:
    x, h0, w = sizes.dims_of(n.x), sizes.dims_of(n.h0), sizes.dims_of(n.w_ih)
    if len(x) != 3 or len(h0) != 3 or len(w) != 2:
        raise GraphError(f"{n.definition.name} takes x[s, b, i], h0[D, b, h] and w_ih[G h, i]", got=f"{x}, {h0}, {w}")
    kinds = {dtype_of(v) for v in (n.x, n.h0, *_weights(n)) if v is not None}
    if len(kinds) > 1:
        raise GraphError(f"{n.definition.name} takes one element type", got=", ".join(sorted(k.name for k in kinds)))
    count = 2 if _both(_weights(n)) else 1
    last = TensorType(dtype_of(n.x), (count, x[1], h0[2]))
    y = TensorType(dtype_of(n.x), (*x[:2], sizes.multiply(count, h0[2])))
    kept = TensorType(ir.DataType.UINT8, ("kept_bytes",))
    return y, *[last] * len(_firsts(cell)), *[kept] * count


def _count(cell: Cell, inputs: Sequence[ir.Value | None]) -> int:
    return 1 + len(_firsts(cell)) + 1 + _both(inputs[1 + len(_firsts(cell)) :])


def _flops(cell: Cell, n: NodeView, times: int) -> Size:
    x, h = sizes.dims_of(n.x), sizes.dims_of(n.h0)[2]
    both = 2 if _both(_weights(n)) else 1
    return sizes.multiply(2 * times * both * cell.gates, *x[:2], h, sizes.add(x[2], h))


_TRAINS = "trains"  # metadata of nodes through which a gradient flows


def _keeps(n: NodeView) -> bool:
    """Whether the kernel that keeps what backward needs runs: also where backward runs forward again.

    oneDNN's kernel that keeps nothing rounds otherwise, and both runs have to agree bit for bit.
    """
    used = any(v is not None and traversal.is_used(v) for v in (n.kept, n.kept_reverse))
    return used or _TRAINS in n.node.metadata_props


def _may_compile(cell: Cell, n: NodeView) -> bool:
    """Whether compiled kernels may run; asks for them then."""
    may = cell is LSTM and may_compile(n, "cpu")
    if may:
        lstm_compiled.LIBRARY.request()
    return may


def _lower(cell: Cell, n: NodeView, x: Any, h0: Any, *rest: Any) -> Call:
    c0, weights = (rest[0], rest[1:]) if cell.has_state else (None, rest)
    return Call(kernels.layer, cell, _relu(n), _keeps(n), _may_compile(cell, n), x, h0, c0, *weights)


# Body


def _sides(op: Builder, cell: Cell, n: NodeView, inner: ir.DataType) -> list[Side]:
    weights = [None if v is None else cast(op, v, inner) for v in _weights(n)]
    count = 2 if _both(weights) else 1
    h, c = (
        [None] * count if v is None else [unrolled.row(op, cast(op, v, inner), d, count) for d in range(count)]
        for v in (n.h0, n.c0 if cell.has_state else None)
    )
    found = []
    for d in range(count):
        w, r, b, back = weights[4 * d : 4 * d + 4]
        first = h[d]
        assert w is not None
        assert r is not None
        assert first is not None
        found.append(Side(cell, cell.torch, w, r, b, back, first, c[d], d == 1, _relu(n)))
    return found


def _inner(value: ir.Value) -> ir.DataType:
    return ir.DataType.FLOAT if dtype_of(value) in _HALF else dtype_of(value)


def _body(op: Builder, cell: Cell, n: NodeView) -> Grads:
    """ONNX's op, which stock onnxruntime runs in float32 only; in double a Scan."""
    inner, dtype = _inner(n.x), dtype_of(n.x)
    x, sides = cast(op, n.x, inner), _sides(op, cell, n, inner)
    if inner == ir.DataType.FLOAT:
        apart, h, c = unrolled.native(op, sides, x)
        steps, samples, width = sizes.dims_of(n.y)
        y = reshaped(op, transposed(op, apart, [0, 2, 1, 3]), [steps, samples, width])
    else:
        runs = [unrolled.forward(op, side, x) for side in sides]
        y = concatenated(op, [run[0] for run in runs], -1)
        h = unrolled.stacked(op, [run[1] for run in runs])
        c = unrolled.stacked(op, [run[2] for run in runs]) if cell.has_state else None
    kept = [nothing(op, v) for v in (n.kept, n.kept_reverse) if v is not None]
    last = [cast(op, v, dtype) for v in (h, c) if v is not None]
    return [cast(op, y, dtype), *last, *kept]


# Gradient


def _gradient(op: Builder, cell: Cell, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    n.node.metadata_props[_TRAINS] = "yes"
    weights = _weights(n)
    firsts = [getattr(n, name) for name in _firsts(cell)]
    states = [n.c] if cell.has_state else []
    mask = [wanted(n, "x")[0], int(any(wanted(n, *WEIGHTS)))]
    found = op.op(OWN, f"{n.definition.name}Grad")(
        *cotangents[: 1 + len(firsts)],
        *(n.x, *firsts, *weights, n.y, *states, n.kept, n.kept_reverse),
        output_mask=None if all(mask) else mask,
        activation="Relu" if _relu(n) else None,
    )
    dx, *rest = found
    of_firsts, of_weights = rest[: len(firsts)], iter(rest[len(firsts) :])
    aligned = [None if v is None else next(of_weights) for v in weights]
    gradients: Grads = [dx if mask[0] else None, *of_firsts, *(g if mask[1] else None for g in aligned)]
    return gradients[: len(n.node.inputs)]


def _grad_inputs(cell: Cell) -> tuple[str, ...]:
    cotangents = ("dy?", *(f"d{name[0]}?" for name in _firsts(cell)))
    last = ("c",) if cell.has_state else ()
    return (*cotangents, "x", *_firsts(cell), *_OPTIONAL, "y", *last, "kept", "kept_reverse?")


def _grad_types(cell: Cell, n: NodeView) -> Sequence[TensorType]:
    firsts = [getattr(n, name) for name in _firsts(cell)]
    return [type_of(v) for v in (n.x, *firsts, *_weights(n)) if v is not None]


def _grad_count(cell: Cell, inputs: Sequence[ir.Value | None]) -> int:
    count = len(_firsts(cell))
    return 1 + count + sum(v is not None for v in inputs[2 + 2 * count : 2 + 2 * count + len(WEIGHTS)])


def _lower_grad(cell: Cell, n: NodeView, *values: Any) -> Call:
    count = len(_firsts(cell))
    given, values = values[: 1 + count], values[1 + count :]
    x, firsts, values = values[0], values[1 : 1 + count], values[1 + count :]
    weights, y, rest = values[: len(WEIGHTS)], values[len(WEIGHTS)], values[len(WEIGHTS) + 1 :]
    if not cell.has_state:
        given, firsts, rest = (*given, None), (*firsts, None), (None, *rest)
    asked = (bool(n.output_mask[0]), bool(n.output_mask[1]))
    return Call(
        kernels.layer_backward,
        cell,
        _relu(n),
        asked,
        _may_compile(cell, n),
        *given,
        x,
        *firsts,
        tuple(weights),
        y,
        *rest,
    )


def _grad_body(op: Builder, cell: Cell, n: NodeView) -> Grads:
    inner, dtype = _inner(n.x), dtype_of(n.x)
    sides, x = _sides(op, cell, n, inner), cast(op, n.x, inner)
    count = len(sides)
    width = sizes.dims_of(n.h0)[2]
    ys, dys = (
        [None] * count if v is None else list(split(op, cast(op, v, inner), [width] * count, -1)) for v in (n.y, n.dy)
    )
    last = [n.dh, n.dc if cell.has_state else None]
    found = []
    for d, side in enumerate(sides):
        y = ys[d]
        assert y is not None
        parts = {} if cell is RNN else unrolled.gates(op, side, x, unrolled.before(op, side, side.h, y))
        states = unrolled.cell_states(op, side, parts) if cell.has_state else None
        given = [dys[d], *(None if v is None else unrolled.row(op, cast(op, v, inner), d, count) for v in last)]
        found.append(unrolled.backward(op, side, x, y, parts, states, given))
    dx = found[0].x if count == 1 else op.Add(found[0].x, found[1].x)
    firsts = [unrolled.stacked(op, [f.h for f in found])]
    if cell.has_state:
        firsts.append(unrolled.stacked(op, [f.c for f in found]))
    weights = [(f.w, f.r, *((f.b, f.d) if side.b is not None else ())) for f, side in zip(found, sides, strict=True)]
    return [cast(op, v, dtype) for v in (dx, *firsts, *(w for each in weights for w in each)) if v is not None]


# Definitions


def _define(cell: Cell) -> None:
    activation: Mapping[str, Any] = {"activation": "Tanh"} if cell is RNN else {}
    last = ("h", "c") if cell.has_state else ("h",)
    common: dict[str, Any] = {
        "domain": OWN,
        "since_version": 1,
        "from_torch": {},
        "ort_compatible": never,
        "nondiff_inputs": frozenset(),
        "axes": no_axes,
        "effects": Effects.NONE,
        "aliases": {},
        "host_eval": None,
    }
    define(
        OpDef(
            **common,
            name=f"{cell.name}Layer",
            inputs=("x", *_firsts(cell), *_OPTIONAL),
            outputs=("y", *last, "kept", "kept_reverse?"),
            attributes=activation,
            shapes=lambda n: _types(cell, n),
            body=lambda op, n: _body(op, cell, n),
            gradient=(
                Gradient(
                    lambda op, n, *given: _gradient(op, cell, n, *given),
                    reads=("x", *_firsts(cell), *WEIGHTS, "y", *last[1:], "kept", "kept_reverse"),
                ),
            ),
            kernels=(Kernel(lower=lambda n, *values: _lower(cell, n, *values)),),
            flops=lambda n: _flops(cell, n, 1),
            count_outputs=lambda inputs, attributes: _count(cell, inputs),
        )
    )
    define(
        OpDef(
            **common,
            name=f"{cell.name}LayerGrad",
            inputs=_grad_inputs(cell),
            outputs=("dx", *(f"d{name}" for name in _firsts(cell)), "dweights..."),
            attributes={**activation, "output_mask": (1, 1)},
            shapes=lambda n: _grad_types(cell, n),
            body=lambda op, n: _grad_body(op, cell, n),
            gradient=NOT_DIFFERENTIABLE,
            kernels=(Kernel(lower=lambda n, *values: _lower_grad(cell, n, *values)),),
            flops=lambda n: _flops(cell, n, 2),
            count_outputs=lambda inputs, attributes: _grad_count(cell, inputs),
        )
    )


for _cell in CELLS:
    _define(_cell)
