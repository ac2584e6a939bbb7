"""Random ONNX graphs compute the same before and after passes, differentiation and planning.

A seed samples a graph of standard operators in float64, of static and symbolic dimensions. Onnxruntime, or onnx's
reference where it has no kernel, runs the graph as sampled, and its joint graph without any pass. The same graph goes
through all forward passes, differentiation, all joint passes and a memory plan, and runs as our forward and backward
programs; the optimized forward graph also runs in onnxruntime. All passes run, or none, one alone, all but one, or half
of them. Sizes of the symbolic dimension are 3, 5, 1 and 0; without elements onnx's reference is asked alone.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.errors import MemoryBudgetError
from onnxtrain.execute.program import Program
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.traversal import clone, with_graph
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.graph.verify import verify
from onnxtrain.ops import builder
from onnxtrain.ops.bodies import inline_bodies
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.registry import lookup
from onnxtrain.options import Options
from onnxtrain.passes import FORWARD, JOINT, forward_passes, joint_passes, optimize
from onnxtrain.plan.cut import cut
from onnxtrain.plan.differentiation import Differentiation, unoptimized_joint
from onnxtrain.plan.memory_plan import plan_memory
from onnxtrain.plan.storage import bind_symbols
from tests.op_case import Oracle, run_model

BATCH = "b"  # the symbolic dimension
_LENGTHS = (3, 5, 1, 0)  # its sizes
_DIMS = (1, 2, 3, 4)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "none"},
    {"memory_budget_bytes": 0.9},
    {"memory_budget_bytes": 0.7},
)
_PASSES = tuple(dict.fromkeys(each.__name__ for each in (*FORWARD, *JOINT)))

Dims = tuple[int | str, ...]


@dataclass(frozen=True)
class RandomGraph:
    """A graph, and how it is compiled.

    Attributes:
        model: its inputs are the symbolic ones, then those that a module would hold as parameters.
        options: for passes and plan.
    """

    seed: int
    model: ir.Model
    options: Options

    def tensors(self, length: int) -> list[torch.Tensor]:
        """The inputs, with `length` for the symbolic dimension."""
        generator = torch.Generator().manual_seed(1000 + self.seed + length)
        shapes = [[length if d == BATCH else d for d in _dims(v)] for v in self.model.graph.inputs]
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


class _Maker:
    """Draws one graph: each node reads values that are there, mostly recent ones."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        inputs = [self._input(f"x{i}", True) for i in range(self.rng.randint(1, 2))]
        inputs += [self._input(f"w{i}", False) for i in range(self.rng.randint(1, 3))]
        self.op: Builder = builder(ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}, name="random"))
        self.values = list(inputs)

    def _input(self, name: str, symbolic: bool) -> ir.Value:
        dims: list[int | str] = self.rng.choices(_DIMS, k=self.rng.randint(1, 3))
        if symbolic:
            dims[0] = BATCH
        value = ir.Value(name=name)
        set_type(value, TensorType(ir.DataType.DOUBLE, tuple(dims)))
        return value

    def make(self) -> ir.Model:
        wanted = self.rng.randint(4, 16)
        for _ in range(6 * wanted):
            if len(self.op.graph) >= wanted:
                break
            if (outcome := self.rng.choice(_NODES)(self)) is not None:
                self.values += [outcome] if isinstance(outcome, ir.Value) else list(outcome)
        read = {v for node in self.op.graph for v in node.inputs}
        computed = [v for v in self.values if v.producer() is not None]
        ends = [v for v in computed if v not in read]
        outputs = self.rng.sample(ends, min(len(ends), 3))
        if computed and self.rng.random() < 0.4:
            outputs.append(self.rng.choice(computed))
        self.op.graph.outputs.extend(dict.fromkeys(outputs))
        return ir.Model(self.op.graph, ir_version=10)

    def value(self, least: int = 0) -> ir.Value | None:
        """A value of at least `least` dimensions."""
        candidates = [v for v in self.values if len(_dims(v)) >= least]
        return self.rng.choices(candidates, [1 + i for i in range(len(candidates))])[0] if candidates else None

    def axis(self, value: ir.Value) -> int:
        return self.rng.randrange(len(_dims(value)))

    def static_axis(self, value: ir.Value) -> int | None:
        """An axis whose size is a number."""
        axes = [i for i, d in enumerate(_dims(value)) if isinstance(d, int)]
        return self.rng.choice(axes) if axes else None

    def constant(self, *numbers: int) -> ir.Value:
        return self.op.constant(np.array(numbers, np.int64), ir.DataType.INT64)

    def floats(self, *shape: int) -> ir.Value:
        data = np.random.default_rng(self.rng.randrange(1 << 30)).normal(size=shape)
        return self.op.constant(data, ir.DataType.DOUBLE)


def _dims(value: ir.Value) -> Dims:
    assert value.shape is not None
    return tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)


Drawn = ir.Value | Sequence[ir.Value] | None


def _unary(m: _Maker) -> Drawn:
    x, kind = m.value(), m.rng.choice(_UNARY)
    return None if x is None else m.op.op("", kind)(x)


_UNARY = (
    *("Tanh", "Sigmoid", "Neg", "Abs", "Relu", "Erf", "Identity", "Sin", "Softplus", "Cos", "Atan", "Asinh", "Sign"),
    *("Elu", "Selu", "LeakyRelu", "HardSwish", "Softsign", "Mish", "Gelu", "Floor", "Round"),
)


def _of_positive(m: _Maker) -> Drawn:
    x, kind = m.value(), m.rng.choice(["Sqrt", "Log", "Reciprocal", "Pow"])
    if x is None:
        return None
    positive = m.op.Add(m.op.Abs(x), m.op.scalar(1.0, like=x))
    if kind == "Pow":
        return m.op.Pow(positive, m.op.scalar(m.rng.choice([2.0, 0.5, -1.0, 1.5]), like=x))
    return m.op.op("", kind)(positive)


def _clip(m: _Maker) -> Drawn:
    x = m.value()
    return None if x is None else m.op.Clip(x, m.op.scalar(-0.7, like=x), m.op.scalar(m.rng.choice([0.3, 2.0]), like=x))


def _with_scalar(m: _Maker) -> Drawn:
    if (x := m.value()) is None:
        return None
    scalar = m.op.scalar(m.rng.choice([0.0, 1.0, -1.0, 0.5, 2.0]), like=x)
    kind = m.rng.choice(["Add", "Mul", "Sub", "Div"])
    if kind == "Div" and m.rng.random() < 0.5:
        return m.op.Div(scalar, m.op.Add(m.op.Abs(x), m.op.scalar(1.0, like=x)))
    if kind == "Div":
        scalar = m.op.scalar(m.rng.choice([1.0, 0.5, 4.0]), like=x)
    return m.op.op("", kind)(x, scalar)


def _binary(m: _Maker) -> Drawn:
    x = m.value()
    if x is None:
        return None
    fits = [v for v in m.values if _broadcasts(_dims(v), _dims(x))]
    return m.op.op("", m.rng.choice(["Add", "Sub", "Mul", "Max", "Min"]))(x, m.rng.choice(fits))


def _broadcasts(a: Dims, b: Dims) -> bool:
    return len(a) <= len(b) and all(p in (1, q) for p, q in zip(reversed(a), reversed(b), strict=False))


def _where(m: _Maker) -> Drawn:
    x = m.value()
    return None if x is None else m.op.Where(m.op.Greater(x, m.op.scalar(0.0, like=x)), x, m.op.scalar(-0.5, like=x))


def _product(m: _Maker) -> Drawn:
    x = m.value(2)
    if x is None or not isinstance(width := _dims(x)[-1], int):
        return None
    weights = [v for v in m.values if len(_dims(v)) == 2 and _dims(v)[0] == width]
    w = m.rng.choice(weights) if weights and m.rng.random() < 0.6 else m.floats(width, m.rng.choice(_DIMS))
    return m.op.MatMul(x, w)


def _scores(m: _Maker) -> Drawn:
    x = m.value(2)
    if x is None:
        return None
    last = len(_dims(x)) - 1
    order = (*range(last - 1), last, last - 1)
    return m.op.MatMul(x, m.op.Transpose(x, perm=order))


def _transpose(m: _Maker) -> Drawn:
    x = m.value(2)
    if x is None:
        return None
    order = list(range(len(_dims(x))))
    m.rng.shuffle(order)
    return m.op.Transpose(x, perm=tuple(order))


def _reshape(m: _Maker) -> Drawn:
    x = m.value(2)
    if x is None:
        return None
    dims = _dims(x)
    i = m.rng.randrange(len(dims) - 1)
    a, b = dims[i], dims[i + 1]
    if isinstance(a, int) and isinstance(b, int):
        return m.op.Reshape(x, m.op.sizes((*dims[:i], a * b, *dims[i + 2 :])))
    return m.op.Reshape(x, m.op.sizes((*dims, 1)))


def _axes(m: _Maker) -> Drawn:
    x = m.value(1)
    if x is None:
        return None
    dims = _dims(x)
    if 1 in dims and m.rng.random() < 0.5:
        return m.op.Squeeze(x, m.constant(dims.index(1)))
    return m.op.Unsqueeze(x, m.constant(m.rng.randint(0, len(dims)))) if len(dims) < 4 else None


def _expand(m: _Maker) -> Drawn:
    x = m.value(1)
    if x is None or 1 not in _dims(x):
        return None
    dims = list(_dims(x))
    dims[dims.index(1)] = m.rng.choice(_DIMS)
    return m.op.Expand(x, m.op.sizes(dims))


def _slice(m: _Maker) -> Drawn:
    x = m.value(1)
    if x is None or (axis := m.static_axis(x)) is None:
        return None
    size = _dims(x)[axis]
    assert isinstance(size, int)
    start = m.rng.randrange(size)
    end = m.rng.randint(start + 1, size)
    return m.op.Slice(x, m.constant(start), m.constant(end), m.constant(axis), m.constant(m.rng.choice([1, 1, 2])))


def _split(m: _Maker) -> Drawn:
    x = m.value(1)
    if x is None or (axis := m.static_axis(x)) is None or (size := _dims(x)[axis]) == 1:
        return None
    assert isinstance(size, int)
    first = m.rng.randint(1, size - 1)
    lengths = (first, size - first)
    dims = [(*_dims(x)[:axis], n, *_dims(x)[axis + 1 :]) for n in lengths]
    node = m.op.node(
        "", "Split", (x, m.constant(*lengths)), {"axis": axis}, types=[TensorType(ir.DataType.DOUBLE, d) for d in dims]
    )
    return tuple(node.outputs)


def _concat(m: _Maker) -> Drawn:
    x = m.value(1)
    if x is None or (axis := m.static_axis(x)) is None:
        return None
    alike = [v for v in m.values if _dims(v) == _dims(x)]
    return m.op.Concat(x, m.rng.choice(alike), axis=axis)


def _gather(m: _Maker) -> Drawn:
    x = m.value(1)
    if x is None or (axis := m.static_axis(x)) is None:
        return None
    size = _dims(x)[axis]
    assert isinstance(size, int)
    places = [m.rng.randrange(size) for _ in range(m.rng.randint(1, 3))]
    return m.op.Gather(x, m.constant(*places), axis=axis)


def _reduce(m: _Maker) -> Drawn:
    x = m.value(1)
    if x is None:
        return None
    kinds = ("Sum", "Mean", "Max", "SumSquare", "LogSumExp", "Min", "L1", "L2", "Prod")
    axes = m.rng.sample(range(len(_dims(x))), m.rng.randint(1, min(2, len(_dims(x)))))
    return m.op.op("", f"Reduce{m.rng.choice(kinds)}")(x, m.constant(*axes), keepdims=m.rng.randint(0, 1))


def _pad(m: _Maker) -> Drawn:
    x = m.value(1)
    if x is None or (axis := m.static_axis(x)) is None:
        return None
    pads = m.constant(m.rng.randint(0, 2), m.rng.randint(0, 2))
    return m.op.Pad(x, pads, m.op.scalar(0.25, like=x), m.constant(axis))


def _tile(m: _Maker) -> Drawn:
    x = m.value(1)
    return None if x is None else m.op.Tile(x, m.constant(*m.rng.choices([1, 1, 2], k=len(_dims(x)))))


def _cumulative(m: _Maker) -> Drawn:
    x = m.value(1)
    if x is None:
        return None
    axis = m.op.constant(np.array(m.axis(x), np.int64), ir.DataType.INT64)
    return m.op.CumSum(x, axis, exclusive=m.rng.randint(0, 1), reverse=m.rng.randint(0, 1))


def _triangle(m: _Maker) -> Drawn:
    x = m.value(2)
    return None if x is None else m.op.Trilu(x, upper=m.rng.randint(0, 1))


def _gather_elements(m: _Maker) -> Drawn:
    """Along the last axis, or written to there with another value added up."""
    x = m.value(1)
    dims = () if x is None else _dims(x)
    if x is None or not all(isinstance(d, int) for d in dims):
        return None
    shape = (*dims[:-1], m.rng.randint(1, 3))
    places = np.random.default_rng(m.rng.randrange(1 << 30)).integers(0, dims[-1], shape)
    indices = m.op.constant(places.astype(np.int64), ir.DataType.INT64)
    axis = len(dims) - 1
    taken = m.op.GatherElements(x, indices, axis=axis)
    return m.op.ScatterElements(x, indices, taken, axis=axis, reduction="add") if m.rng.random() < 0.5 else taken


def _gemm(m: _Maker) -> Drawn:
    x = m.value(2)
    if x is None or len(_dims(x)) != 2 or not isinstance(width := _dims(x)[1], int):
        return None
    columns = m.rng.choice(_DIMS)
    return m.op.Gemm(x, m.floats(columns, width), m.floats(columns), alpha=0.5, beta=2.0, transB=1)


def _convolve(m: _Maker) -> Drawn:
    """A convolution over one or two axes, and a pool."""
    x = m.value(3)
    if x is None or len(dims := _dims(x)) > 4 or not isinstance(dims[1], int):
        return None
    spatial = len(dims) - 2
    y = m.op.Conv(x, m.floats(m.rng.choice(_DIMS), dims[1], *[3] * spatial), pads=[1] * (2 * spatial))
    return y if m.rng.random() < 0.5 else m.op.AveragePool(y, kernel_shape=[1] * spatial)


def _attention(m: _Maker) -> Drawn:
    x = m.value(3)
    if x is None:
        return None
    order = (*range(len(_dims(x)) - 2), len(_dims(x)) - 1, len(_dims(x)) - 2)
    scores = m.op.Mul(m.op.MatMul(x, m.op.Transpose(x, perm=order)), m.op.scalar(0.5, like=x))
    return m.op.MatMul(m.op.Softmax(scores, axis=-1), x)


def _softmax(m: _Maker) -> Drawn:
    x = m.value(1)
    return None if x is None else m.op.op("", m.rng.choice(["Softmax", "LogSoftmax"]))(x, axis=m.axis(x))


def _norm(m: _Maker) -> Drawn:
    x = m.value(1)
    if x is None or not isinstance(width := _dims(x)[-1], int):
        return None
    return m.op.own.LayerNormalization(x, m.floats(width), m.floats(width), axis=-1, epsilon=1e-5)[0]


def _gelu(m: _Maker) -> Drawn:
    x = m.value()
    if x is None:
        return None
    half, root = m.op.scalar(0.5, like=x), m.op.scalar(2.0**0.5, like=x)
    return m.op.Mul(m.op.Mul(x, half), m.op.Add(m.op.Erf(m.op.Div(x, root)), m.op.scalar(1.0, like=x)))


_NODES: tuple[Callable[[_Maker], Drawn], ...] = (
    *(_unary, _unary, _with_scalar, _with_scalar, _binary, _binary, _binary, _where, _product, _product, _scores),
    *(_transpose, _transpose, _reshape, _axes, _expand, _slice, _split, _concat, _gather, _reduce, _softmax, _norm),
    *(_gelu, _of_positive, _clip, _pad, _tile, _cumulative, _triangle, _gather_elements, _gemm, _convolve, _attention),
)  # fmt: skip


def draw_graph(seed: int) -> RandomGraph:
    """The graph of a seed."""
    maker = _Maker(seed)
    model = maker.make()
    options = {**maker.rng.choice(_OPTIONS), "disabled_passes": _disabled_passes(maker.rng)}
    return RandomGraph(seed, model, Options(**options))


def _disabled_passes(rng: random.Random) -> tuple[str, ...]:
    """All passes in two of five graphs; else one alone, all but one, half of them, or none."""
    kind, some = rng.randrange(6), rng.choice(_PASSES)
    if kind == 2:
        return tuple(name for name in _PASSES if name != some)
    return {3: (some,), 4: tuple(rng.sample(_PASSES, len(_PASSES) // 2)), 5: _PASSES}.get(kind, ())


def difference(graph: RandomGraph) -> str:
    """Describe the difference; "" if there is none."""
    model, device = graph.model, torch.device("cpu")
    results = len(model.graph.outputs)
    wrt = (True,) * len(model.graph.inputs)
    plain_forward = inline_bodies(_copied(model))
    plain = inline_bodies(unoptimized_joint(model, wrt, results))
    optimized = _copied(model)
    optimize(optimized, forward_passes(graph.options))
    verify(optimized, lookup)
    joint = Differentiation(optimized, wrt, results, (), joint_passes(graph.options)).optimized()
    verify(joint.model, lookup)
    first = graph.tensors(_LENGTHS[0])
    plan = plan_memory(joint, (), [""] * results, first, graph.options, "cpu", None)
    for length in _LENGTHS:
        tensors = graph.tensors(length)
        run = run_model if length else _run_by_reference  # onnxruntime's results of no elements are wrong in places
        try:
            planned, _ = plan.planned(plan.choose(bind_symbols(plan.joint.model.graph.inputs, tensors)))
        except MemoryBudgetError:
            return ""
        try:
            expected = run(plain_forward, tensors)
            generator = torch.Generator().manual_seed(graph.seed)
            cotangents = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in expected]
            given = [c for c, flag in zip(cotangents, planned.cotangents, strict=True) if flag is not None]
            reference = run(plain, [*tensors, *given])
            every = run(_with_all_values(plain), [*tensors, *given])
            inlined = run(inline_bodies(_copied(optimized)), tensors)
        except _UndefinedError:
            continue
        largest = max((v.abs().nan_to_num(0, 0).max().item() for v in every if v.numel()), default=0.0)
        parts = cut(planned)
        try:
            values, crossing = Program(parts.forward, "random forward", device).run(tensors, ())
        except IndexError:
            if length:
                raise
            continue  # PyTorch refuses the extreme of no elements, which the reference gives as an infinity
        gradients, _ = Program(parts.backward, "random backward", device).run([*values[results:], *given], crossing)
        computed = [*values[:results], *(g for g in gradients if g is not None)]
        for side, tensors_found in (("programs", computed), ("optimized graph in onnxruntime", inlined)):
            if text := _differs(tensors_found, reference[: len(tensors_found)], largest):
                return f"{side} at {BATCH} = {length}: {text}"
    return ""


class _UndefinedError(Exception):
    """The reference does not take tensors without elements here: the maximum of none, for example."""


def _with_all_values(model: ir.Model) -> ir.Model:
    """The model with all its floating values as outputs: terms that cancel are larger than the result."""
    copy = _copied(model)
    copy.graph.outputs.clear()
    copy.graph.outputs.extend(v for n in copy.graph for v in n.outputs if v.name and v.dtype == ir.DataType.DOUBLE)
    return copy


def _run_by_reference(model: ir.Model, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about means of no elements
        try:
            return Oracle(model, by_reference=True).run(tensors)
        except Exception as error:
            raise _UndefinedError from error


def _copied(model: ir.Model) -> ir.Model:
    return with_graph(model, clone(model.graph)[0])


def _differs(tensors: Sequence[torch.Tensor], right: Sequence[torch.Tensor], largest: float) -> str:
    if len(tensors) != len(right):
        return f"{len(tensors)} tensors, expected {len(right)}"
    allowed = 64 * torch.finfo(torch.float64).eps * largest
    for index, (f, r) in enumerate(zip(tensors, right, strict=True)):
        if f.shape != r.shape:
            return f"{index}: shape {tuple(f.shape)}, expected {tuple(r.shape)}"
        if not torch.allclose(f, r, rtol=0, atol=allowed, equal_nan=True):
            return f"{index}: error {(f - r).abs().max().item():.3e}, allowed {allowed:.3e}"
    return ""
