"""Rules for fake results give what PyTorch gives, or nothing."""

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

from onnxtrain.capture.export.meta_functions import RULES, Fakes, fake_results

aten = torch.ops.aten


def _mode(open_sizes: bool) -> FakeTensorMode:
    mode = FakeTensorMode(shape_env=ShapeEnv() if open_sizes else None)
    mode.cache_enabled = False  # each serves one call: to fill a cache would take a third of the time
    return mode


def _fake(mode: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    if mode.shape_env is None:
        return mode.from_tensor(tensor)
    kinds = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in tensor.shape]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


def _described(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_described(v) for v in value]
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
WHOLE = torch.zeros(3, 4, 5, dtype=torch.int64)
HALF = torch.zeros(3, 4, 5, dtype=torch.bfloat16)
BOOL = torch.zeros(3, 4, 5, dtype=torch.bool)
PICTURES = torch.zeros(2, 3, 5, 4)
CHANNELS = torch.zeros(3)
LAST = PICTURES.to(memory_format=torch.channels_last)
NEGATIVE = torch.zeros(3, 4, dtype=torch.complex64).conj().imag
SHORT = torch.zeros(3, 4, 5, dtype=torch.int32)
LABEL = torch.zeros(5, dtype=torch.int64)
ROWS, SQUARE = torch.zeros(5, 7), torch.zeros(7, 5)
WIDE = torch.zeros(3, 4, 9)[..., :6]
PIXELS = torch.zeros(1, 3, 1, 1).transpose(0, 1)  # in order with the channels first and last
TENSORS = (X, ONE, ROW, TRANSPOSED, SLICED, EXPANDED, EMPTY, SCALAR, WHOLE, HALF, BOOL, PICTURES, LAST, NEGATIVE)

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *((op, (x,), {}) for op in (aten.rsqrt.default, aten.clone.default) for x in TENSORS),
    *((aten.clone.default, (x,), {"memory_format": torch.contiguous_format}) for x in TENSORS),
    (aten.clone.default, (PICTURES,), {"memory_format": torch.channels_last}),
    *((aten._to_copy.default, (x,), {"dtype": d}) for x in (X, TRANSPOSED, WHOLE, HALF, LAST) for d in (
        torch.float64, torch.int32,
    )),
    (aten._to_copy.default, (LAST,), {"dtype": torch.float64, "memory_format": torch.contiguous_format}),
    *((aten.gelu.default, (x,), {"approximate": "tanh"}) for x in (X, TRANSPOSED, HALF)),
    *((aten.pow.Tensor_Scalar, (x, e), {}) for x in (X, WHOLE, HALF) for e in (2, 0.5)),
    *((aten.mul.Tensor, (x, y), {}) for x in (X, ROW, TRANSPOSED, WHOLE) for y in (X, ONE, SCALAR, WHOLE, 2, 0.5)),
    (aten.div.Tensor, (X, ROW), {}),
    (aten.div.Tensor, (WHOLE, 2), {}),
    (aten.add.Tensor, (X, 2.0), {}),
    (aten.add.Tensor, (X, X), {"alpha": 2}),
    (aten.sub.Tensor, (X, ROW), {"alpha": 0.5}),
    *((aten.where.self, (c, x, y), {}) for c in (BOOL, BOOL[:, :1], BOOL[0, 0]) for x, y in (
        (X, X), (X, SCALAR), (SCALAR, X), (ROW, ONE), (X, WHOLE), (TRANSPOSED, X), (SCALAR, SCALAR),
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
    *((aten.view.default, (x, s), {}) for x in (X, EMPTY, WHOLE) for s in ([-1, 5], [x.shape[0], 20], [-1])),
    *((aten.view.default, (x, [-1]), {}) for x in (EXPANDED[:, :1], SCALAR, PICTURES)),
    *((op, (x, y), {}) for op in (aten.add.Tensor, aten.sub.Tensor) for x in (WHOLE, BOOL, SHORT) for y in (
        WHOLE, SHORT, BOOL, LABEL, 2, 0.5, True,
    )),
    *((op, (x, x), {}) for op in (aten.eq.Tensor, aten.minimum.default) for x in (X, WHOLE, BOOL, TRANSPOSED)),
    (aten.add.Tensor, (WHOLE, WHOLE), {"alpha": 2}),
    (aten.sub.Tensor, (WHOLE, WHOLE), {"alpha": 0.5}),
    (aten.div.Tensor, (WHOLE, WHOLE), {}),
    (aten.div.Tensor, (X, 2), {}),
    *((op, (x, y), {}) for op in (aten.le.Tensor, aten.maximum.default) for x in (
        X, WHOLE, BOOL, TRANSPOSED, HALF,
    ) for y in (X, ONE, WHOLE, LABEL, BOOL, TRANSPOSED)),
    *((op, (x, y), {}) for op in (aten.gt.Scalar, aten.ne.Scalar) for x in (
        X, WHOLE, BOOL, TRANSPOSED, EMPTY,
    ) for y in (2, 0.5, True)),
    *((op, (x, y), {}) for op in (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor) for x, y in (
        (BOOL, BOOL), (BOOL, BOOL[:, :1]), (WHOLE, WHOLE), (BOOL, WHOLE), (TRANSPOSED.bool(), BOOL),
    )),
    *((op, (x,), {}) for op in (aten.neg.default, aten.abs.default) for x in (*TENSORS, PIXELS)),
    *((aten._log_softmax.default, (x, a, False), {}) for x in (X, TRANSPOSED, WHOLE, SCALAR) for a in (-1, 1)),
    (aten._log_softmax.default, (HALF, -1, False), {}),
    *((aten.cumsum.default, (x, 1), {"dtype": d}) for x in (X, WHOLE, BOOL, SHORT, TRANSPOSED, HALF) for d in (
        None, torch.int32, torch.float64,
    )),
    *((aten.nll_loss_forward.default, (ROWS, LABEL, w, r, -100), {}) for w in (None, ROW) for r in (0, 1, 2)),
    (aten.nll_loss_forward.default, (ROWS[0], LABEL[0], None, 1, -100), {}),
    (aten.nll_loss_forward.default, (ROWS.bfloat16(), LABEL, None, 1, -100), {}),
    *((aten.embedding.default, (w, i), {}) for w in (ROWS, ROWS.t(), ROW) for i in (
        LABEL, WHOLE, SCALAR.long(), SHORT,
    )),
    (aten.embedding.default, (ROWS, LABEL, 2, False, True), {}),
    *((aten.embedding.default, (w, i), {}) for w in (ROWS, WIDE[0]) for i in (
        LABEL[:1].expand(5), LABEL[::2], WHOLE[:1].expand(3, 4, 5), WHOLE.transpose(0, 1), WHOLE[..., :1],
    )),
    *((aten.addmm.default, (b, x, y), {}) for b in (ROW, ROWS, SCALAR) for x in (ROWS, ROWS.t()) for y in (
        SQUARE, SQUARE.t(), ROWS,
    )),
    (aten.addmm.default, (ROW, ROWS, SQUARE), {"beta": 0.5, "alpha": 2}),
    (aten.addmm.default, (ROW.bfloat16(), ROWS, SQUARE), {}),
    *((aten.cat.default, ([*xs], a), {}) for a in (0, 1, -1) for xs in (
        (X,), (X, X), (X, TRANSPOSED), (X, ONE), (X, EMPTY), (WHOLE, WHOLE), (X, WHOLE), (X, ROW), (PICTURES, PICTURES),
        (), (PICTURES, LAST), (LAST, LAST), (BOOL, BOOL, BOOL), (PICTURES[:, :1], PICTURES[:, :1]), (ROW, ROW[:0]),
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
    *((aten._unsafe_view.default, (x, s), {}) for x in (X, WHOLE) for s in ([-1, 5], [12, 5])),
    *((aten.arange.default, (n,), {"device": d, "dtype": t}) for n in (0, 3, -1, 2.0) for d, t in (
        (torch.device("cpu"), None), ("cpu", torch.int32), ("cpu", torch.float64), ("cpu", torch.bool), ("meta", None),
        (None, None),
    )),
    *((torch.ops.prim.device.default, (x,), {}) for x in (X, WHOLE)),
    *((aten.copy_.default, (x, y), {}) for x in (X, SLICED, TRANSPOSED, WHOLE, EMPTY) for y in (
        X, ONE, WHOLE, TRANSPOSED, SCALAR, ROWS,
    )),
    *((aten._to_copy.default, (WHOLE,), {"dtype": torch.bool, "device": torch.device(d)}) for d in ("cpu", "meta")),
    *((op, (x, *v), {"dtype": d}) for op, v in (
        (aten.zeros_like.default, ()), (aten.ones_like.default, ()), (aten.full_like.default, (0.5,)),
    ) for x in (X, TRANSPOSED, EMPTY, WHOLE, LAST) for d in (None, torch.int32)),
    (aten.full_like.default, (X, 1), {"device": torch.device("meta")}),
    *((aten.masked_fill.Scalar, (x, m, v), {}) for x in (X, WHOLE, BOOL) for m in (
        BOOL, BOOL[:, :1], TRANSPOSED.bool(),
    ) for v in (0, 0.5, True)),
    *((aten.masked_fill.Scalar, (x, BOOL, 0), {}) for x in (ONE, ROW)),
    *((aten.scalar_tensor.default, (v,), {"dtype": d, "device": torch.device("cpu"), "layout": layout})
      for v in (0.5, 2, True) for d in (torch.float32, torch.bool, None) for layout in (torch.strided, None)),
    *((aten.index.Tensor, (x, i), {}) for x in (WHOLE[0], WHOLE[0].t(), BOOL[0, :1].expand(4, 5)) for i in (
        [LABEL, LABEL], [LABEL[:, None], LABEL[None, :3]], [LABEL], [LABEL, None], [None, LABEL], [LABEL, SHORT[0, 0]],
        [LABEL, LABEL[:3]], [BOOL[0]], [LABEL.view(5, 1, 1).expand(5, 2, 3), LABEL[:3]],
    )),
    (aten.view.default, (SLICED, [3, 4, 5]), {}),
    (aten.view.default, (SLICED, [3, -1, 5]), {}),
    (aten.view.default, (TRANSPOSED[:1], [1, 4, 5]), {}),
    *((op, (x, *[CHANNELS] * 4, training, 0.1, 1e-5), {}) for x in (PICTURES, LAST, PICTURES.bfloat16())
      for training in (True, False) for op in (
        aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default,
    )),
]  # fmt: skip


def _both(run: Callable[[FakeTensorMode], Any], open_sizes: bool) -> tuple[Any, Any]:
    plain = run(_mode(open_sizes))
    with fake_results():
        return plain, run(_mode(open_sizes))


def _result(mode: FakeTensorMode, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What is known of a result, whether it is a view, and what sizes are asked for it; or the error."""
    known: dict[int, FakeTensor] = {}

    def fake(a: Any) -> Any:
        if isinstance(a, list):
            return [*map(fake, a)]
        return known.setdefault(id(a), _fake(mode, a)) if isinstance(a, Tensor) else a

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
    return _described(result), isinstance(first, Tensor) and _storages(result)[0] == _storages(first)[0], guards


def canonical(condition: Any) -> Any:
    """One form for `a != b` and `b != a`."""
    return (type(condition).__name__, frozenset(condition.args)) if isinstance(condition, (Eq, Ne)) else condition


OPERATORS = tuple(dict.fromkeys(operator for operator, _, _ in CALLS))
# Others with the same rule stand for them at open sizes.
LIKE_OTHERS = (
    aten._unsafe_view.default, aten.abs.default, aten.bitwise_or.Tensor, aten.eq.Tensor, aten.minimum.default,
    aten.mul.Tensor, aten.ne.Scalar, aten.ones_like.default, aten.sub.Tensor, aten.zeros_like.default,
)  # fmt: skip
OF_RULES = [
    pytest.param(operator, sizes, id=f"{operator}-{sizes}", marks=[pytest.mark.slow] if is_slow else [])
    for sizes in (False, True)
    for operator in OPERATORS
    for is_slow in [sizes and operator in LIKE_OTHERS]
]


def test_operators_that_others_stand_for_have_their_rules() -> None:
    shown = {RULES[operator] for operator in OPERATORS if operator in RULES and operator not in LIKE_OTHERS}
    assert {RULES[operator] for operator in LIKE_OTHERS} <= shown


@pytest.mark.parametrize(("operator", "open_sizes"), OF_RULES)
def test_rules_give_what_pytorch_gives(operator: Any, open_sizes: bool) -> None:
    calls = [(args, kwargs) for one, args, kwargs in CALLS if one is operator]

    for call in calls:
        plain, ruled = _both(lambda mode, call=call: _result(mode, operator, *call), open_sizes)
        assert ruled[:2] == plain[:2], call
        assert ruled[2] <= plain[2], call  # what PyTorch's own functions ask of sizes is not always needed


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_views_of_views_give_what_pytorch_gives(shape: list[int], data: st.DataObject) -> None:
    rank = len(shape)
    order = data.draw(st.permutations(range(rank)))
    axis = data.draw(st.integers(-rank - 1, rank))
    bounds = [data.draw(st.integers(-4, 4)) for _ in range(2)]
    step = data.draw(st.integers(1, 2))
    real = torch.arange(float(torch.tensor(shape).prod())).view(shape)

    def chain(x: Tensor) -> Tensor:
        y = aten.unsqueeze.default(aten.permute.default(x, order), axis)
        z = aten.slice.Tensor(y, -1, *bounds, step)
        return aten.view.default(aten.clone.default(z, memory_format=torch.contiguous_format), [z.numel()])

    plain, ruled = _both(lambda mode: _described(chain(_fake(mode, real))), open_sizes=False)
    assert ruled == plain
    assert list(chain(real).shape) == ruled[1][:1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, "open"]), min_size=1, max_size=4), st.data())
def test_orders_of_elements_are_those_of_pytorch(shape: list[Any], data: st.DataObject) -> None:
    """Of a unary and a binary operator, on tensors whose axes lie in any order, parts of larger ones or broadcast."""
    rank = len(shape)
    operands = []
    for _ in range(2):
        kept = [data.draw(st.sampled_from([1, n])) for n in shape]
        order = data.draw(st.permutations(range(rank)))
        gaps = [n != "open" and data.draw(st.booleans()) for n in kept]
        operands.append((kept, order, gaps, data.draw(st.booleans())))

    def operand(mode: FakeTensorMode, kept: list[Any], order: list[int], gaps: list[bool], expands: bool) -> Tensor:
        kinds = [DimDynamic.DYNAMIC if kept[d] == "open" else DimDynamic.STATIC for d in order]
        real = torch.zeros([5 if kept[d] == "open" else kept[d] + gaps[d] for d in order])
        whole = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
        x = aten.permute.default(whole, [order.index(d) for d in range(rank)])
        for axis, size in enumerate(kept):
            x = aten.slice.Tensor(x, axis, 0, size) if gaps[axis] else x
        return aten.expand.default(x, [-1 if n == "open" else n for n in shape]) if expands else x

    def results(mode: FakeTensorMode) -> Any:
        with mode:
            first, second = (operand(mode, *given) for given in operands)
            found = [aten.neg.default(first), aten.cat.default([first, first], -1), aten.clone.default(first)]
            found += [aten.add.Tensor(first, second), aten.maximum.default(second, first)]
            return _described(found)

    plain, ruled = _both(results, open_sizes=True)
    assert ruled == plain


def test_orders_of_open_sizes() -> None:
    """What expressions say of all sizes is enough for a rotary embedding: halves of heads, negated and joined."""
    kinds = [DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC]

    def turned(mode: FakeTensorMode) -> Any:
        x = mode.from_tensor(torch.zeros(3, 5, 8, 4), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
        with mode:
            heads = aten.permute.default(x, [0, 2, 1, 3])
            halves = [aten.slice.Tensor(heads, 3, *bounds) for bounds in ((0, 2), (2, 4))]
            negative = aten.neg.default(halves[1])
            joined = aten.cat.default([negative, halves[0]], -1)
            same = aten.view.default(heads, list(heads.shape))
            found = [negative, joined, same, aten.mul.Tensor(heads, joined), aten.mul.Tensor(joined, heads)]
        assert mode.shape_env is not None
        return _described(found), {canonical(guard.expr) for guard in mode.shape_env.guards}

    plain, ruled = _both(turned, open_sizes=True)
    assert ruled[0] == plain[0]
    assert ruled[1] == set()
    mode = _mode(open_sizes=True)
    x = mode.from_tensor(torch.zeros(3, 5, 8, 4), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
    with mode:
        heads = aten.permute.default(x, [0, 2, 1, 3])
        part = aten.slice.Tensor(heads, 3, 0, 2)
    for operator, *args in ((aten.neg.default, part), (aten.cat.default, [part, part], -1), (aten.sub.Tensor, part, 1)):
        assert RULES[operator](Fakes(mode), *args) is not None, operator


def test_numbers_up_to_a_size() -> None:
    """Of an input, as it is; what is computed of sizes may be negative, which PyTorch asks."""

    def numbers(mode: FakeTensorMode) -> Any:
        x = _fake(mode, X)
        with mode:
            found = [aten.arange.default(n, device="cpu") for n in (x.shape[0], x.shape[0] - 1)]
        assert mode.shape_env is not None
        return _described(found), {canonical(guard.expr) for guard in mode.shape_env.guards}

    plain, ruled = _both(numbers, open_sizes=True)
    assert ruled == plain
    mode = _mode(open_sizes=True)
    size = _fake(mode, X).shape[0]
    with mode:
        assert RULES[aten.arange.default](Fakes(mode), size, device="cpu") is not None
        assert RULES[aten.arange.default](Fakes(mode), size - 1, device="cpu") is None
        assert mode.shape_env is not None
        count = mode.shape_env.create_unbacked_symint()  # an element of a tensor
        assert RULES[aten.arange.default](Fakes(mode), count, device="cpu") is None


def test_heads_of_a_part_of_a_row() -> None:
    """Of open sizes but the last, as q, k and v of one projection."""
    kinds = [DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]

    def heads(mode: FakeTensorMode) -> Any:
        x = mode.from_tensor(torch.zeros(3, 4, 9), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
        with mode:
            part = aten.slice.Tensor(x, 2, 2, 8)
            found = [aten.view.default(part, [*x.shape[:2], *size]) for size in ((2, 3), (-1, 2), (6, 1))]
        assert mode.shape_env is not None
        return _described(found), {canonical(guard.expr) for guard in mode.shape_env.guards}

    plain, ruled = _both(heads, open_sizes=True)
    assert ruled[0] == plain[0]
    assert ruled[1] <= plain[1]
    mode = _mode(open_sizes=True)
    x = mode.from_tensor(torch.zeros(3, 4, 9), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
    with mode:
        part = aten.slice.Tensor(x, 2, 2, 8)
    assert RULES[aten.view.default](Fakes(mode), part, [*x.shape[:2], 2, 3]) is not None
    assert RULES[aten.view.default](Fakes(mode), part, [*x.shape[:2], 2, 4]) is None


def test_open_sizes_that_agree() -> None:
    def product(mode: FakeTensorMode) -> Any:
        x = _fake(mode, ROWS)
        with mode:
            means = aten.mean.dim(x, [1])
            found = [aten.addmm.default(means, x, aten.permute.default(x, [1, 0]))]
            labels = aten._to_copy.default(means, dtype=torch.int64)
            found += [t for r in (1, 2) for t in aten.nll_loss_forward.default(x, labels, None, r, -100)]
        assert mode.shape_env is not None
        return _described(found), {canonical(guard.expr) for guard in mode.shape_env.guards}

    plain, ruled = _both(product, open_sizes=True)
    assert ruled[0] == plain[0]
    assert ruled[1] <= plain[1]


def test_rules_are_used() -> None:
    mode = _mode(open_sizes=True)
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
            assert RULES[operator](fakes, x, *rest) is not None
        rows, labels = _fake(mode, ROWS), _fake(mode, LABEL)
        assert RULES[aten.cat.default](fakes, [x, x], 1) is not None
        with mode:
            across = rows.t()
        assert RULES[aten.addmm.default](fakes, fakes.like(rows, rows.shape[:1]), rows, across) is not None
        assert RULES[aten.embedding.default](fakes, rows, labels) is not None
        of_rows = fakes.like(rows, rows.shape[:1], torch.int64)
        assert RULES[aten.nll_loss_forward.default](fakes, rows, of_rows, None, 1, -100) is not None


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
def test_what_pytorch_refuses_is_refused(operator: Any, args: Any) -> None:
    mode = _mode(open_sizes=False)
    rest = args if isinstance(args, tuple) else (args,)
    with fake_results(), mode, pytest.raises((RuntimeError, IndexError, ValueError, AssertionError)):
        operator(_fake(mode, X), *(_fake(mode, a) if isinstance(a, Tensor) else a for a in rest))


def test_tensors_of_another_mode_are_left_to_pytorch() -> None:
    other = _fake(_mode(open_sizes=False), X)
    assert aten.relu.default in RULES
    assert RULES[aten.relu.default](Fakes(_mode(open_sizes=False)), other) is None


def test_known_elements_stay_known() -> None:
    with fake_results(), FakeTensorMode(), torch.no_grad():
        number = torch.tensor(2.0) * 3
        assert number.item() == 6.0
