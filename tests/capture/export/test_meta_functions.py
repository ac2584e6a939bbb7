"""The fast meta functions return what PyTorch's return, or None."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import Eq, Ne
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from onnxtrain.capture.export.meta_functions import META_FUNCTIONS, Fakes, fast_meta_functions

aten = torch.ops.aten


def _mode(symbolic_sizes: bool) -> FakeTensorMode:
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic_sizes else None)
    mode.cache_enabled = False  # each mode serves one call, for which filling a cache takes a third of the time
    return mode


def _fake(mode: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    if mode.shape_env is None:
        return mode.from_tensor(tensor)
    kinds = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in tensor.shape]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


def _describe(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_describe(v) for v in value]
    sizes = [*value.shape, *value.stride(), value.storage_offset()]
    exprs = [n if isinstance(n, int) else n.node.expr for n in sizes]
    return type(value), exprs, value.dtype, value.device, value.layout, value.requires_grad, value.is_neg()


def _storages(value: Any) -> list[int]:
    tensors = value if isinstance(value, (tuple, list)) else [value]
    return [t.untyped_storage()._cdata for t in tensors]


X = torch.zeros(3, 4, 5)
ONE = torch.zeros(3, 1, 5)
ROW = torch.zeros(5)
TRANSPOSED = torch.zeros(3, 5, 4).transpose(1, 2)
SLICED = torch.zeros(3, 4, 9)[..., 2:7]
EXPANDED = torch.zeros(3, 1, 5).expand(3, 4, 5)
EMPTY = torch.zeros(0, 4, 5)
SCALAR = torch.zeros(())
INTS = torch.zeros(3, 4, 5, dtype=torch.int64)
HALF = torch.zeros(3, 4, 5, dtype=torch.bfloat16)
BOOL = torch.zeros(3, 4, 5, dtype=torch.bool)
IMAGES = torch.zeros(2, 3, 5, 4)
CHANNELS = torch.zeros(3)
CHANNELS_LAST = IMAGES.to(memory_format=torch.channels_last)
NEGATIVE = torch.zeros(3, 4, dtype=torch.complex64).conj().imag
SHORT = torch.zeros(3, 4, 5, dtype=torch.int32)
LABEL = torch.zeros(5, dtype=torch.int64)
ROWS, SQUARE = torch.zeros(5, 7), torch.zeros(7, 5)
WIDE = torch.zeros(3, 4, 9)[..., :6]
PIXELS = torch.zeros(1, 3, 1, 1).transpose(0, 1)  # both contiguous and channels_last
TENSORS = (
    X,
    ONE,
    ROW,
    TRANSPOSED,
    SLICED,
    EXPANDED,
    EMPTY,
    SCALAR,
    INTS,
    HALF,
    BOOL,
    IMAGES,
    CHANNELS_LAST,
    NEGATIVE,
)

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *((op, (x,), {}) for op in (aten.rsqrt.default, aten.clone.default) for x in TENSORS),
    *((aten.clone.default, (x,), {"memory_format": torch.contiguous_format}) for x in TENSORS),
    (aten.clone.default, (IMAGES,), {"memory_format": torch.channels_last}),
    *((aten._to_copy.default, (x,), {"dtype": d}) for x in (X, TRANSPOSED, INTS, HALF, CHANNELS_LAST) for d in (
        torch.float64, torch.int32,
    )),
    (aten._to_copy.default, (CHANNELS_LAST,), {"dtype": torch.float64, "memory_format": torch.contiguous_format}),
    *((aten.gelu.default, (x,), {"approximate": "tanh"}) for x in (X, TRANSPOSED, HALF)),
    *((aten.pow.Tensor_Scalar, (x, e), {}) for x in (X, INTS, HALF) for e in (2, 0.5)),
    *((aten.mul.Tensor, (x, y), {}) for x in (X, ROW, TRANSPOSED, INTS) for y in (X, ONE, SCALAR, INTS, 2, 0.5)),
    (aten.div.Tensor, (X, ROW), {}),
    (aten.div.Tensor, (INTS, 2), {}),
    (aten.add.Tensor, (X, 2.0), {}),
    (aten.add.Tensor, (X, X), {"alpha": 2}),
    (aten.sub.Tensor, (X, ROW), {"alpha": 0.5}),
    *((aten.where.self, (c, x, y), {}) for c in (BOOL, BOOL[:, :1], BOOL[0, 0]) for x, y in (
        (X, X), (X, SCALAR), (SCALAR, X), (ROW, ONE), (X, INTS), (TRANSPOSED, X), (SCALAR, SCALAR),
    )),
    (aten.where.self, (TRANSPOSED.bool(), X, X), {}),
    (aten.where.self, (TRANSPOSED.bool(), TRANSPOSED, SCALAR), {}),
    (aten.where.self, (BOOL[:, :1].expand(3, 4, 5), TRANSPOSED[:1], SCALAR), {}),
    (aten.mul.Tensor, (TRANSPOSED[:1], TRANSPOSED), {}),
    (aten.mul.Tensor, (TRANSPOSED, X), {}),
    (aten.mul.Tensor, (EXPANDED, X), {}),
    *((aten.native_dropout.default, (X, p, t), {}) for p in (0.0, 0.1) for t in (True, False)),
    (aten.native_dropout.default, (TRANSPOSED, 0.1, True), {}),
    *((aten.mean.dim, (x, d, k), {}) for x in (X, EMPTY, SLICED) for d in ([-1], [0, 2], []) for k in (True, False)),
    (aten.mean.dim, (X, [1]), {"dtype": torch.float64}),
    (aten.new_empty.default, (X, [4, 2]), {}),
    (aten.new_empty.default, (X, [4, 2]), {"dtype": torch.float64}),
    *((aten.transpose.int, (x, a, b), {}) for x in (X, SLICED, BOOL, NEGATIVE) for a, b in ((0, 1), (-1, -2), (1, 1))),
    *((aten.permute.default, (x, [2, 0, -2]), {}) for x in (X, SLICED, BOOL)),
    *((aten.unsqueeze.default, (x, a), {}) for x in (X, SLICED, BOOL) for a in (0, 1, 3, -1, -4)),
    (aten.unsqueeze.default, (SCALAR, 0), {}),
    *((aten.slice.Tensor, (x, 2, *bounds), {}) for x in (X, SLICED, TRANSPOSED) for bounds in (
        (), (1,), (1, 3), (-2,), (0, 2**63 - 1), (0, -1), (3, 1), (9,), (0, 5, 2), (-9, 2),
    )),
    *((aten.view.default, (x, s), {}) for x in (X, EMPTY, INTS) for s in ([-1, 5], [x.shape[0], 20], [-1])),
    *((aten.view.default, (x, [-1]), {}) for x in (EXPANDED[:, :1], SCALAR, IMAGES)),
    *((op, (x, y), {}) for op in (aten.add.Tensor, aten.sub.Tensor) for x in (INTS, BOOL, SHORT) for y in (
        INTS, SHORT, BOOL, LABEL, 2, 0.5, True,
    )),
    *((op, (x, x), {}) for op in (aten.eq.Tensor, aten.minimum.default) for x in (X, INTS, BOOL, TRANSPOSED)),
    (aten.add.Tensor, (INTS, INTS), {"alpha": 2}),
    (aten.sub.Tensor, (INTS, INTS), {"alpha": 0.5}),
    (aten.div.Tensor, (INTS, INTS), {}),
    (aten.div.Tensor, (X, 2), {}),
    *((op, (x, y), {}) for op in (aten.le.Tensor, aten.maximum.default) for x in (
        X, INTS, BOOL, TRANSPOSED, HALF,
    ) for y in (X, ONE, INTS, LABEL, BOOL, TRANSPOSED)),
    *((op, (x, y), {}) for op in (aten.gt.Scalar, aten.ne.Scalar) for x in (
        X, INTS, BOOL, TRANSPOSED, EMPTY,
    ) for y in (2, 0.5, True)),
    *((op, (x, y), {}) for op in (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor) for x, y in (
        (BOOL, BOOL), (BOOL, BOOL[:, :1]), (INTS, INTS), (BOOL, INTS), (TRANSPOSED.bool(), BOOL),
    )),
    *((op, (x,), {}) for op in (aten.neg.default, aten.abs.default) for x in (*TENSORS, PIXELS)),
    *((aten._log_softmax.default, (x, a, False), {}) for x in (X, TRANSPOSED, INTS, SCALAR) for a in (-1, 1)),
    (aten._log_softmax.default, (HALF, -1, False), {}),
    *((aten.cumsum.default, (x, 1), {"dtype": d}) for x in (X, INTS, BOOL, SHORT, TRANSPOSED, HALF) for d in (
        None, torch.int32, torch.float64,
    )),
    *((aten.nll_loss_forward.default, (ROWS, LABEL, w, r, -100), {}) for w in (None, ROW) for r in (0, 1, 2)),
    (aten.nll_loss_forward.default, (ROWS[0], LABEL[0], None, 1, -100), {}),
    (aten.nll_loss_forward.default, (ROWS.bfloat16(), LABEL, None, 1, -100), {}),
    *((aten.addmm.default, (b, x, y), {}) for b in (ROW, ROWS, SCALAR) for x in (ROWS, ROWS.t()) for y in (
        SQUARE, SQUARE.t(), ROWS,
    )),
    (aten.addmm.default, (ROW, ROWS, SQUARE), {"beta": 0.5, "alpha": 2}),
    (aten.addmm.default, (ROW.bfloat16(), ROWS, SQUARE), {}),
    *((aten.cat.default, ([*xs], a), {}) for a in (0, 1, -1) for xs in (
        (X,), (X, X), (X, TRANSPOSED), (X, ONE), (X, EMPTY), (INTS, INTS), (X, INTS), (X, ROW), (IMAGES, IMAGES),
        (), (IMAGES, CHANNELS_LAST), (CHANNELS_LAST, CHANNELS_LAST), (BOOL, BOOL, BOOL),
        (IMAGES[:, :1], IMAGES[:, :1]), (ROW, ROW[:0]),
    )),
    *((aten.expand.default, (x, s), {}) for x in (
        ONE, ONE[:1], ONE[:, :, :1], ROW, SCALAR, TRANSPOSED, BOOL[:, :1],
    ) for s in (
        [3, 4, 5], [-1, 4, -1], [2, 3, 4, 5], [1, 3, 4, 5], [1, 1, 3, 4, 5], [3, 1, 5], [7], [1], [-1, -1, -1], [5, -1],
    )),
    *((op, (x, s), {}) for op in (aten.view.default, aten._unsafe_view.default) for x in (
        SLICED, TRANSPOSED, WIDE, WIDE[:0], WIDE[:1],
    ) for s in (
        [0, 4, 2, 3], [1, 4, 2, 3], [1, 4, -1, 3],
        [3, 4, 1, 5], [3, 4, 5, 1], [3, 4, 2, 3], [3, 4, -1, 3], [3, 4, 2, -1], [3, 4, -1, 7], [12, 6], [12, 5],
        [3, 4, 6],
    )),
    *((aten._unsafe_view.default, (x, s), {}) for x in (X, INTS) for s in ([-1, 5], [12, 5])),
    *((aten.arange.default, (n,), {"device": d, "dtype": t}) for n in (0, 3, -1, 2.0) for d, t in (
        (torch.device("cpu"), None), ("cpu", torch.int32), ("cpu", torch.float64), ("cpu", torch.bool), ("meta", None),
        (None, None),
    )),
    *((torch.ops.prim.device.default, (x,), {}) for x in (X, INTS)),
    *((aten._to_copy.default, (INTS,), {"dtype": torch.bool, "device": torch.device(d)}) for d in ("cpu", "meta")),
    *((aten.index.Tensor, (x, i), {}) for x in (INTS[0], INTS[0].t(), BOOL[0, :1].expand(4, 5)) for i in (
        [LABEL, LABEL], [LABEL[:, None], LABEL[None, :3]], [LABEL], [LABEL, None], [None, LABEL], [LABEL, SHORT[0, 0]],
        [LABEL, LABEL[:3]], [BOOL[0]], [LABEL.view(5, 1, 1).expand(5, 2, 3), LABEL[:3]],
    )),
    (aten.view.default, (SLICED, [3, 4, 5]), {}),
    (aten.view.default, (SLICED, [3, -1, 5]), {}),
    (aten.view.default, (TRANSPOSED[:1], [1, 4, 5]), {}),
    *((op, (x, *[CHANNELS] * 4, training, 0.1, 1e-5), {}) for x in (IMAGES, CHANNELS_LAST, IMAGES.bfloat16())
      for training in (True, False) for op in (
        aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default,
    )),
]  # fmt: skip


def _with_and_without(run: Callable[[FakeTensorMode], Any], symbolic_sizes: bool) -> tuple[Any, Any]:
    """Return what `run` returns with PyTorch's meta functions, and with the fast ones."""
    expected = run(_mode(symbolic_sizes))
    with fast_meta_functions():
        return expected, run(_mode(symbolic_sizes))


def _result(mode: FakeTensorMode, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a result's description, whether it is a view, and the guards that computing it added; or the error."""
    fakes_by_id: dict[int, FakeTensor] = {}

    def fake(a: Any) -> Any:
        if isinstance(a, list):
            return [*map(fake, a)]
        return fakes_by_id.setdefault(id(a), _fake(mode, a)) if isinstance(a, Tensor) else a

    fakes = [*map(fake, args)]
    try:
        with mode:
            result = operator(*fakes, **kwargs)
    except Exception as error:  # noqa: BLE001  # whatever PyTorch raises
        return type(error), False, set()
    guards = {canonical(guard.expr) for guard in mode.shape_env.guards} if mode.shape_env else set()
    if isinstance(result, torch.device):
        return result, False, guards
    first = fakes[0]
    return _describe(result), isinstance(first, Tensor) and _storages(result)[0] == _storages(first)[0], guards


def canonical(condition: Any) -> Any:
    """Return the same form for `a != b` and `b != a`."""
    return (type(condition).__name__, frozenset(condition.args)) if isinstance(condition, (Eq, Ne)) else condition


OPERATORS = tuple(dict.fromkeys(operator for operator, _, _ in CALLS))
# Operators that share their meta function with another one: the slow tests have them.
SHARED = (
    aten._unsafe_view.default, aten.abs.default, aten.bitwise_or.Tensor, aten.eq.Tensor, aten.maximum.default,
    aten.minimum.default, aten.mul.Tensor, aten.ne.Scalar, aten.sub.Tensor,
)  # fmt: skip
# Static sizes are a part of the symbolic ones, and need no guards: the slow tests have most operators with them alone.
OPERATORS_AND_SIZES = [
    pytest.param(operator, symbolic, id=f"{operator}-{symbolic}", marks=[pytest.mark.slow] if is_slow else [])
    for symbolic in (False, True)
    for index, operator in enumerate(OPERATORS)
    for is_slow in [operator in SHARED or (not symbolic and index % 3 > 0)]
]


def test_the_meta_function_of_a_slow_case_is_also_tested_by_a_fast_one() -> None:
    fast = {META_FUNCTIONS[operator] for operator in OPERATORS if operator in META_FUNCTIONS and operator not in SHARED}
    assert {META_FUNCTIONS[operator] for operator in SHARED} <= fast


@pytest.mark.parametrize(("operator", "symbolic_sizes"), OPERATORS_AND_SIZES)
def test_results_match_pytorch(operator: Any, symbolic_sizes: bool) -> None:
    calls = [(args, kwargs) for called, args, kwargs in CALLS if called is operator]

    for call in calls:
        expected, actual = _with_and_without(lambda mode, call=call: _result(mode, operator, *call), symbolic_sizes)
        assert actual[:2] == expected[:2], call
        assert actual[2] <= expected[2], call  # PyTorch's own functions add some guards that are not needed


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(3, 8, 1, 1), (3, 1, 2, 2), (3, 8, 1, 2), (3, 8, 2, 2), (1, 8, 2, 2)])
def test_a_batch_norm_has_the_strides_of_the_kernel(size: tuple[int, ...], training: bool) -> None:
    """Images of one pixel, or of one channel, are contiguous in both formats; PyTorch's meta function keeps strides."""
    batch, channels, height, width = size
    images = torch.randn(batch, height, width, channels).permute(0, 3, 1, 2)
    images = images.as_strided(size, (height * width * channels, 1, width * channels, channels))
    vectors = [torch.ones(channels) for _ in range(4)]
    expected = aten._native_batch_norm_legit.default(images, *vectors, training, 0.1, 1e-5)[0]
    for symbolic_sizes in (False, True):
        mode = _mode(symbolic_sizes)
        with fast_meta_functions(), mode:
            fakes = [_fake(mode, t) for t in (images, *vectors)]
            y = aten._native_batch_norm_legit.default(*fakes, training, 0.1, 1e-5)[0]
        assert [int(stride) for stride in y.stride()] == [*expected.stride()]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_chained_views_match_pytorch(shape: list[int], data: st.DataObject) -> None:
    rank = len(shape)
    perm = data.draw(st.permutations(range(rank)))
    axis = data.draw(st.integers(-rank - 1, rank))
    bounds = [data.draw(st.integers(-4, 4)) for _ in range(2)]
    step = data.draw(st.integers(1, 2))
    real = torch.arange(float(torch.tensor(shape).prod())).view(shape)

    def chain(x: Tensor) -> Tensor:
        y = aten.unsqueeze.default(aten.permute.default(x, perm), axis)
        z = aten.slice.Tensor(y, -1, *bounds, step)
        return aten.view.default(aten.clone.default(z, memory_format=torch.contiguous_format), [z.numel()])

    expected, actual = _with_and_without(lambda mode: _describe(chain(_fake(mode, real))), symbolic_sizes=False)
    assert actual == expected
    assert list(chain(real).shape) == actual[1][:1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, "symbolic"]), min_size=1, max_size=4), st.data())
def test_strides_match_pytorch(shape: list[Any], data: st.DataObject) -> None:
    """Test unary and binary operators on tensors that are permuted, sliced or expanded."""
    rank = len(shape)
    operands = []
    for _ in range(2):
        sizes = [data.draw(st.sampled_from([1, n])) for n in shape]
        perm = data.draw(st.permutations(range(rank)))
        is_sliced = [n != "symbolic" and data.draw(st.booleans()) for n in sizes]
        operands.append((sizes, perm, is_sliced, data.draw(st.booleans())))

    def operand(
        mode: FakeTensorMode, sizes: list[Any], perm: list[int], is_sliced: list[bool], is_expanded: bool
    ) -> Tensor:
        kinds = [DimDynamic.DYNAMIC if sizes[d] == "symbolic" else DimDynamic.STATIC for d in perm]
        real = torch.zeros([5 if sizes[d] == "symbolic" else sizes[d] + is_sliced[d] for d in perm])
        base = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
        x = aten.permute.default(base, [perm.index(d) for d in range(rank)])
        for axis, size in enumerate(sizes):
            x = aten.slice.Tensor(x, axis, 0, size) if is_sliced[axis] else x
        return aten.expand.default(x, [-1 if n == "symbolic" else n for n in shape]) if is_expanded else x

    def results(mode: FakeTensorMode) -> Any:
        with mode:
            first, second = (operand(mode, *arguments) for arguments in operands)
            tensors = [aten.neg.default(first), aten.cat.default([first, first], -1), aten.clone.default(first)]
            tensors += [aten.add.Tensor(first, second), aten.maximum.default(second, first)]
            return _describe(tensors)

    expected, actual = _with_and_without(results, symbolic_sizes=True)
    assert actual == expected


def test_a_rotary_embedding_of_symbolic_sizes_adds_no_guard() -> None:
    """The operations are those of a rotary embedding: halves of heads are negated and concatenated."""
    kinds = [DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC]

    def rotate(mode: FakeTensorMode) -> Any:
        x = mode.from_tensor(torch.zeros(3, 5, 8, 4), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
        with mode:
            heads = aten.permute.default(x, [0, 2, 1, 3])
            halves = [aten.slice.Tensor(heads, 3, *bounds) for bounds in ((0, 2), (2, 4))]
            negative = aten.neg.default(halves[1])
            joined = aten.cat.default([negative, halves[0]], -1)
            same = aten.view.default(heads, list(heads.shape))
            results = [negative, joined, same, aten.mul.Tensor(heads, joined), aten.mul.Tensor(joined, heads)]
        assert mode.shape_env is not None
        return _describe(results), {canonical(guard.expr) for guard in mode.shape_env.guards}

    expected, actual = _with_and_without(rotate, symbolic_sizes=True)
    assert actual[0] == expected[0]
    assert actual[1] == set()
    mode = _mode(symbolic_sizes=True)
    x = mode.from_tensor(torch.zeros(3, 5, 8, 4), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
    with mode:
        heads = aten.permute.default(x, [0, 2, 1, 3])
        part = aten.slice.Tensor(heads, 3, 0, 2)
    for operator, *args in ((aten.neg.default, part), (aten.cat.default, [part, part], -1), (aten.sub.Tensor, part, 1)):
        assert META_FUNCTIONS[operator](Fakes(mode), *args) is not None, operator


def test_arange_up_to_a_symbolic_size() -> None:
    """An expression of sizes may be negative, on which PyTorch guards; the size of an input may not."""

    def aranges(mode: FakeTensorMode) -> Any:
        x = _fake(mode, X)
        with mode:
            results = [aten.arange.default(n, device="cpu") for n in (x.shape[0], x.shape[0] - 1)]
        assert mode.shape_env is not None
        return _describe(results), {canonical(guard.expr) for guard in mode.shape_env.guards}

    expected, actual = _with_and_without(aranges, symbolic_sizes=True)
    assert actual == expected
    mode = _mode(symbolic_sizes=True)
    size = _fake(mode, X).shape[0]
    with mode:
        assert META_FUNCTIONS[aten.arange.default](Fakes(mode), size, device="cpu") is not None
        assert META_FUNCTIONS[aten.arange.default](Fakes(mode), size - 1, device="cpu") is None
        assert mode.shape_env is not None
        count = mode.shape_env.create_unbacked_symint()  # an element of a tensor
        assert META_FUNCTIONS[aten.arange.default](Fakes(mode), count, device="cpu") is None


def test_a_slice_of_the_last_axis_is_split_into_heads() -> None:
    """As q, k and v of one projection, with all sizes symbolic but the last."""
    kinds = [DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]

    def heads(mode: FakeTensorMode) -> Any:
        x = mode.from_tensor(torch.zeros(3, 4, 9), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
        with mode:
            part = aten.slice.Tensor(x, 2, 2, 8)
            results = [aten.view.default(part, [*x.shape[:2], *size]) for size in ((2, 3), (-1, 2), (6, 1))]
        assert mode.shape_env is not None
        return _describe(results), {canonical(guard.expr) for guard in mode.shape_env.guards}

    expected, actual = _with_and_without(heads, symbolic_sizes=True)
    assert actual[0] == expected[0]
    assert actual[1] <= expected[1]
    mode = _mode(symbolic_sizes=True)
    x = mode.from_tensor(torch.zeros(3, 4, 9), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
    with mode:
        part = aten.slice.Tensor(x, 2, 2, 8)
    assert META_FUNCTIONS[aten.view.default](Fakes(mode), part, [*x.shape[:2], 2, 3]) is not None
    assert META_FUNCTIONS[aten.view.default](Fakes(mode), part, [*x.shape[:2], 2, 4]) is None


def test_equal_symbolic_sizes() -> None:
    def addmm_and_loss(mode: FakeTensorMode) -> Any:
        x = _fake(mode, ROWS)
        with mode:
            means = aten.mean.dim(x, [1])
            results = [aten.addmm.default(means, x, aten.permute.default(x, [1, 0]))]
            labels = aten._to_copy.default(means, dtype=torch.int64)
            results += [t for r in (1, 2) for t in aten.nll_loss_forward.default(x, labels, None, r, -100)]
        assert mode.shape_env is not None
        return _describe(results), {canonical(guard.expr) for guard in mode.shape_env.guards}

    expected, actual = _with_and_without(addmm_and_loss, symbolic_sizes=True)
    assert actual[0] == expected[0]
    assert actual[1] <= expected[1]


def test_meta_functions_compute_frequent_calls() -> None:
    mode = _mode(symbolic_sizes=True)
    x = _fake(mode, X)
    fakes = Fakes(mode)
    with mode:
        for operator, *rest in (
            (aten.relu.default,),
            (aten.add.Tensor, x),
            (aten.view.default, [-1, x.shape[2]]),
            (aten.native_dropout.default, 0.1, True),
            (aten.mean.dim, [1]),
            (aten.le.Scalar, 2),
            (aten.expand.default, [2, -1, -1, -1]),
            (aten.cumsum.default, 1),
            (aten._log_softmax.default, -1, False),
            (torch.ops.prim.device.default,),
        ):
            assert META_FUNCTIONS[operator](fakes, x, *rest) is not None
        rows = _fake(mode, ROWS)
        assert META_FUNCTIONS[aten.cat.default](fakes, [x, x], 1) is not None
        with mode:
            transposed = rows.t()
        assert META_FUNCTIONS[aten.addmm.default](fakes, fakes.like(rows, rows.shape[:1]), rows, transposed) is not None
        row_labels = fakes.like(rows, rows.shape[:1], torch.int64)
        assert META_FUNCTIONS[aten.nll_loss_forward.default](fakes, rows, row_labels, None, 1, -100) is not None


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.mean.dim, [3]),
        (aten.mean.dim, [1, 1]),
        (aten.transpose.int, (0, 3)),
        (aten.permute.default, [0, 1]),
        (aten.permute.default, [0, 1, 5]),
        (aten.unsqueeze.default, 4),
        (aten.slice.Tensor, (3, 0, 1)),
        (aten.slice.Tensor, (2, 0, 1, 0)),
        (aten.view.default, [-1, 7]),
        (aten.view.default, [-2, 5]),
        (aten.view.default, [-1, -1]),
        (aten.add.Tensor, torch.zeros(3, 2, 5)),
        (aten.new_empty.default, [-1]),
    ],
)
def test_invalid_arguments_raise_as_in_pytorch(operator: Any, args: Any) -> None:
    mode = _mode(symbolic_sizes=False)
    rest = args if isinstance(args, tuple) else (args,)
    with fast_meta_functions(), mode, pytest.raises((RuntimeError, IndexError, ValueError, AssertionError)):
        operator(_fake(mode, X), *(_fake(mode, a) if isinstance(a, Tensor) else a for a in rest))


def test_tensors_of_another_mode_are_left_to_pytorch() -> None:
    other = _fake(_mode(symbolic_sizes=False), X)
    assert aten.relu.default in META_FUNCTIONS
    assert META_FUNCTIONS[aten.relu.default](Fakes(_mode(symbolic_sizes=False)), other) is None


def test_a_fake_tensor_with_known_elements_keeps_them() -> None:
    with fast_meta_functions(), FakeTensorMode(), torch.no_grad():
        scalar = torch.tensor(2.0) * 3
        assert scalar.item() == 6.0
