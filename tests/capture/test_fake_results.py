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

from onnxtrain.capture.fake_results import RULES, Fakes, fake_results

aten = torch.ops.aten


def _mode(open_sizes: bool) -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv() if open_sizes else None)


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
    fakes = [known.setdefault(id(a), _fake(mode, a)) if isinstance(a, Tensor) else a for a in args]
    try:
        with mode:
            result = operator(*fakes, **kwargs)
    except Exception as error:  # noqa: BLE001  # whatever PyTorch raises
        return type(error), False, set()
    guards = {canonical(guard.expr) for guard in mode.shape_env.guards} if mode.shape_env else set()
    return _described(result), _storages(result)[0] == _storages(fakes[0])[0], guards


def canonical(condition: Any) -> Any:
    """One form for `a != b` and `b != a`."""
    return (type(condition).__name__, frozenset(condition.args)) if isinstance(condition, (Eq, Ne)) else condition


@pytest.mark.parametrize("open_sizes", [False, True])
@pytest.mark.parametrize("operator", dict.fromkeys(operator for operator, _, _ in CALLS), ids=str)
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
        ):
            assert RULES[operator](fakes, x, *rest) is not None


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
