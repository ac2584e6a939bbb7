"""Custom autograd functions inside the graph: every result and gradient equals eager's, bit for bit.

Each function's backward differs from the derivative of its forward: a test then detects a lost backward.
"""

from __future__ import annotations

import copy
import functools
import gc
import operator
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from onnxtrain import DebugOptions, FallbackPolicy, ORTModule
from onnxtrain.errors import ORTModuleFallbackException, PythonOpError
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager
from tests.thinned import covering, slow_but_every
from tests.zoo.checks import Result, Side, count_captures, leaves
from tests.zoo.entry import Call, Draw, ZooModel, wide

WIDTH = 4
SIZES = (3, 1, 5, 0)
DTYPES = [torch.float32, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# For calls that depend on no dtype.
a_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str
)


def strict(module: nn.Module) -> nn.Module:
    return ORTModule(module, rng="torch", fallback_policy=FallbackPolicy.FALLBACK_DISABLE)


def features(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH, grad=True),))


def total(output: Any) -> torch.Tensor:
    """Return a loss with a different weight for each element of each floating output."""
    sum_ = torch.zeros(())
    for number, (_, tensor) in enumerate(leaves(output)):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            value = wide(tensor.real if tensor.is_complex() else tensor)
            weights = torch.linspace(1 + number, 2 + number, value.numel(), dtype=value.dtype).reshape(value.shape)
            sum_ = sum_ + (value * weights).sum()
    return sum_


class Around(nn.Module):
    """Apply a layer, then `use(self, x)`."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self, x * self.before)


def assert_equal(got: Result, eager: Result) -> None:
    for (path, mine), (_, theirs) in zip(leaves(got.output), leaves(eager.output), strict=True):
        if isinstance(theirs, torch.Tensor):
            assert mine.requires_grad == theirs.requires_grad, path
            assert torch.equal(mine, theirs), path
            assert mine.dtype == theirs.dtype, path
        else:
            assert (type(mine), mine) == (type(theirs), theirs), path
    for name, gradient in eager.gradients.items():
        mine = got.gradients[name]
        assert (mine is None) == (gradient is None), f"{name}: {mine}, eager has {gradient}"
        if gradient is not None:
            assert_no_worse_than_eager(name, mine, gradient, gradient)  # exact except for the order of sums
    for name, buffer in eager.buffers.items():
        assert torch.equal(got.buffers[name], buffer), name
    for mine, theirs in zip(got.random_states, eager.random_states, strict=True):
        assert torch.equal(mine, theirs), "the random state differs from eager's"


def check(
    use: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] = SIZES,
    captures: int = 1,
    autocast: bool = False,
    make: Callable[[Callable[..., Any]], nn.Module] = Around,
) -> tuple[nn.Module, nn.Module]:
    """Compare a module that calls `use` with eager at all sizes, with and without gradients."""
    entry = ZooModel("around", lambda: make(use), features, total)
    got, eager = Side(entry, dtype, strict, autocast), Side(entry, dtype, None, autocast)
    for size in sizes:
        assert_equal(got.train(size, 0), eager.train(size, 0))
    assert count_captures(got.run) == captures + (0 in sizes)  # size 0 has its own capture
    with torch.no_grad():
        assert_equal(got.forward(3, 0), eager.forward(3, 0))
    return got.run, eager.run


class Scale(Function):
    """Compute x * factor * weight; backward is off by 7."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, factor: float = 1.0) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * factor if weight is None else x * weight * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = gradients[0] * ctx.factor * 7
        return dx, None if weight is None else (gradients[0] * x).sum(0), None


apply_scale = Scale.apply  # many users store `apply`: patching the class does not affect it


# Arguments


class Takes(Function):
    """Check the arguments, and multiply by their digest."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        return x * (1 + digest(arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * digest(ctx.arguments) * 7, *(
            torch.full_like(a, 2.0) if isinstance(a, torch.Tensor) and a.requires_grad else None for a in ctx.arguments
        )


def digest(value: Any) -> Any:
    match value:
        case None:
            return 1
        case bool():
            return 3 if value else 5
        case int() | float() | torch.SymInt() | torch.SymFloat():
            return value
        case str():
            return len(value)
        case torch.Tensor():
            return value.double().sum().to(torch.float32) if value.is_floating_point() else value.sum()
        case list() | tuple():
            return sum((1 + i) * digest(v) for i, v in enumerate(value))
        case dict():
            return sum((1 + i) * digest(v) for i, v in enumerate(value.values()))
        case SimpleNamespace():
            return digest(vars(value))
    return value()


ARGUMENTS: dict[str, Callable[[nn.Module, torch.Tensor], tuple[Any, ...]]] = {
    "none": lambda m, x: (None,),
    "bool": lambda m, x: (True, False),
    "numbers": lambda m, x: (3, 0.25, -1, 2**40),
    "text": lambda m, x: ("relu",),
    "tuples": lambda m, x: ((1, 2), (0.5, 0.25), (True, False), (), (1, 0.5)),
    "lists": lambda m, x: ([1, 2], [[1], [2, (3,)]], {"a": 1, "b": [2.0]}),
    "parameter": lambda m, x: (m.weight,),
    "intermediate": lambda m, x: (x + 1,),
    "same twice": lambda m, x: (x, x),
    "integers": lambda m, x: ((x > 0).long(), x > 0),
    "nested tensors": lambda m, x: ([m.weight, (x, 2)], {"a": x > 0, "b": None}),
    "sizes": lambda m, x: (x.shape[0], x.shape[0] * 2 + 1, [x.shape[0], 3]),
    "number of sizes": lambda m, x: (1.0 / (1 + x.shape[0]),),
    "object": lambda m, x: (SimpleNamespace(a=1, b=[2]),),
    "callable": lambda m, x: (lambda: 3, functools.partial(lambda a: a, 4)),
    "module": lambda m, x: (lambda: 2, None, "x", 3),
    "no tensor beside": lambda m, x: (),
}


@a_dtype
@pytest.mark.parametrize("kind", slow_but_every(3, ARGUMENTS))
def test_arguments(kind: str, dtype: torch.dtype) -> None:
    check(lambda m, x: Takes.apply(x, *ARGUMENTS[kind](m, x)), dtype)


def test_arguments_are_distinguished_by_type() -> None:
    """True == 1 == 1.0, and equal calls of one capture share their analysis."""
    check(lambda m, x: [Takes.apply(x, a) for a in (True, 1, 1.0, 3, "3", (1,), [1], (True,))])


def test_keyword_arguments() -> None:
    class Powers(Function):
        @staticmethod
        def forward(x: torch.Tensor, power: int = 2) -> torch.Tensor:
            return x**power

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[0])
            ctx.power = inputs[1]

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0] * ctx.saved_tensors[0] * ctx.power, None

    try:
        Powers.apply(torch.ones(1), power=3)
    except TypeError:
        pytest.skip("this PyTorch's apply takes no keyword arguments")
    check(lambda m, x: (Powers.apply(x), Powers.apply(x, power=3), Powers.apply(power=3, x=x)))


def test_a_function_without_tensors() -> None:
    class Ramp(Function):
        @staticmethod
        def forward(ctx: Any, count: int) -> torch.Tensor:
            return torch.arange(count, dtype=torch.float32)

    check(lambda m, x: x * Ramp.apply(WIDTH))


def test_apply_kept_before_the_capture() -> None:
    check(lambda m, x: apply_scale(x, m.weight))


# Outputs of forward


@every_dtype
def test_outputs_of_all_kinds(dtype: torch.dtype) -> None:
    class Many(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            ctx.save_for_backward(x)
            return x * 2, x > 0, None, 3, "text", [x + 1, {"a": x - 1}], x.argmax(-1), x.shape[0]

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            assert [g is None for g in gradients] == [False, False, True, True, True, True, False, True]
            return gradients[0] * 7 * ctx.saved_tensors[0]

    check(lambda m, x: Many.apply(x), dtype)


def test_a_list_of_outputs_has_no_gradient() -> None:
    class Pair(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return [x * 2, x + 1]

    check(lambda m, x: [x, Pair.apply(x)])


def test_one_tensor_returned_twice() -> None:
    class Twice(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            y = x * 2
            return y, x + 1, y

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0] * 5 + gradients[1] * 7 + gradients[2] * 11

    def use(m: nn.Module, x: torch.Tensor) -> Any:
        first, second, third = Twice.apply(x)
        assert first is third
        return first * m.weight, second, third

    check(use)


def test_outputs_marked_without_gradient() -> None:
    class Marked(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            mask = (x > 0).to(x.dtype)
            ctx.mark_non_differentiable(mask)
            ctx.save_for_backward(mask)
            return x * mask, mask

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            assert not gradients[1].any()
            return gradients[0] * (3 + ctx.saved_tensors[0])

    check(lambda m, x: (*Marked.apply(x), Marked.apply(x)[1] * m.weight))


class Both(Function):
    """Return two outputs, and record which of them got a gradient."""

    has_gradient: ClassVar[list[tuple[bool, ...]]] = []
    materialize = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        ctx.set_materialize_grads(Both.materialize)
        ctx.zero = torch.zeros_like(x)
        return x * 2, y * 3, x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Both.has_gradient.append(tuple(g is not None for g in gradients))
        a, b, c = (ctx.zero if g is None else g for g in gradients)
        return a * 5 + c, b * 11 + c


@a_dtype
@pytest.mark.parametrize(("used", "materialize"), covering([(0,), (1,), (0, 2), (0, 1, 2)], [True, False]), ids=str)
def test_materialized_gradients(
    used: tuple[int, ...], materialize: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Both, "materialize", materialize)
    monkeypatch.setattr(Both, "has_gradient", [])
    check(lambda m, x: operator.itemgetter(*used)(Both.apply(x, x * m.weight)), dtype)
    assert set(Both.has_gradient) == {tuple(materialize or i in used for i in range(3))}


@pytest.mark.parametrize("used_output", [0, 1])
def test_a_gradient_that_comes_for_some_outputs_only(used_output: int) -> None:
    """The module has two outputs, and only one is used in the loss."""
    entry = ZooModel(
        "both",
        lambda: Around(lambda m, x: Both.apply(x, x * m.weight)[:2]),
        features,
        lambda out: out[used_output].sum(),
    )
    got, eager = Side(entry, torch.float32, strict), Side(entry, torch.float32, None)
    for size in SIZES:
        assert_equal(got.train(size, 0), eager.train(size, 0))


# None gradients


class GivesNone(Function):
    """Return no gradient for the first input if the flag is set."""

    flags: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        none = GivesNone.flags.pop(0) if GivesNone.flags else True
        return None if none else gradients[0] * 2, gradients[0] * 3


NONES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "parameter": lambda m, x: GivesNone.apply(m.weight, x),
    "upstream": lambda m, x: GivesNone.apply(m.weight.sin().exp(), x),
    "used elsewhere too": lambda m, x: GivesNone.apply(m.weight.sin(), x) + m.weight,
    "all upstream": lambda m, x: GivesNone.apply(x, x.detach()),
    "chain": lambda m, x: GivesNone.apply(m.weight.exp(), GivesNone.apply(m.weight.sin(), x)),
}


@a_dtype
@pytest.mark.parametrize("kind", NONES)
def test_none_gradients_stay_none_upstream(kind: str, dtype: torch.dtype) -> None:
    check(NONES[kind], dtype)


def test_a_gradient_that_is_none_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [True, False, True, False, False, True]
    entry = ZooModel("none", lambda: Around(NONES["used elsewhere too"]), features, total)
    got, eager = Side(entry, torch.float32, strict), Side(entry, torch.float32, None)
    for flag in flags:
        results = []
        for side in (got, eager):
            monkeypatch.setattr(GivesNone, "flags", [flag])
            results.append(side.train(3, 0))
            assert not GivesNone.flags, "backward did not run"
        assert_equal(*results)


def test_no_backward_runs_twice_where_none_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Counts(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
            ctx.name_ = name
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            calls.append(ctx.name_)
            return gradients[0] * 3, None

    def use(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return Counts.apply(GivesNone.apply(m.weight.sin(), Counts.apply(x, "inner")), "outer")

    check(use, sizes=(3,))
    assert calls == ["outer", "inner"] * 2  # onnxtrain's and eager's


def test_a_backward_that_gives_no_gradient_at_all_runs_at_every_step() -> None:
    calls: list[int] = []

    class Silent(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            calls.append(len(gradients[0]))

    run = strict(Around(lambda m, x: Silent.apply(x)))
    for rows in (3, 5, 3):
        run(torch.randn(rows, WIDTH)).sum().backward()
    assert calls == [3, 5, 3]


# Saved tensors


def test_inputs_are_not_copied_and_parameters_are_themselves() -> None:
    arguments: list[tuple[Any, ...]] = []

    class Looks(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            arguments.append((x.data_ptr(), weight))
            return x * weight

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            arguments.append((x.data_ptr(), weight))
            weight.main_grad.add_(1)
            return gradients[0], gradients[0].sum(0)

    module = Around(lambda m, x: Looks.apply(x, m.weight))
    module.weight.main_grad = torch.zeros(WIDTH)
    run = strict(module)
    x = torch.randn(3, WIDTH)
    run(x)
    arguments.clear()
    run(x).sum().backward()
    (before, weight), (after, saved) = arguments
    assert before == after, "the saved input was copied"
    assert weight is module.weight
    assert saved is module.weight
    assert torch.equal(module.weight.main_grad, torch.ones(WIDTH))


def test_saved_tensors_are_freed_after_backward() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    class Keeps(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            table = x.sin()
            kept.append(weakref.ref(table))
            ctx.save_for_backward(table)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0] * ctx.saved_tensors[0]

    run = strict(Around(lambda m, x: Keeps.apply(x)))
    run(torch.randn(3, WIDTH)).sum().backward()
    gc.collect()
    kept.clear()
    loss = run(torch.randn(3, WIDTH)).sum()
    assert kept[0]() is not None
    loss.backward(retain_graph=True)
    assert kept[0]() is not None, "the graph is retained"
    loss.backward()
    assert kept[0]() is None, "kept after backward, though the loss still lives"
    other = run(torch.randn(3, WIDTH))
    assert kept[1]() is not None
    del other
    assert kept[1]() is None, "kept though there will be no backward"


def test_a_second_backward_needs_a_retained_graph() -> None:
    run = strict(Around(lambda m, x: Scale.apply(x, m.weight)))
    loss = run(torch.randn(3, WIDTH)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_several_forwards_before_backward_and_retained_graphs() -> None:
    def use(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = Scale.apply(x, m.weight, 2.0)
        return Scale.apply(hidden, m.weight, 3.0) + Scale.apply(hidden, m.weight, 2.0)

    torch.manual_seed(0)
    inputs = [torch.randn(size, WIDTH) for size in SIZES]
    sides = []
    for wrap in (strict, lambda module: module):
        module = Around(use)
        run = wrap(module)
        losses = [total(run(x)) for x in inputs]
        for loss in reversed(losses):
            loss.backward(retain_graph=True)
        losses[1].backward()
        sides.append([module.before.grad, module.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True))


def test_saved_tensors_hooks_see_saved_tensors_of_functions() -> None:
    counts = []
    for wrap in (strict, lambda module: module):
        packed: list[torch.Tensor] = []
        run = wrap(Around(lambda m, x: Scale.apply(x, m.weight)))
        run(torch.randn(2, WIDTH))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, p=packed: (p.append(t), t * 1)[1], lambda t: t):
            loss = run(torch.ones(3, WIDTH)).sum()
        loss.backward()
        counts.append(sum(t.shape == (3, WIDTH) for t in packed))
    assert counts[0] >= 1
    check(lambda m, x: Scale.apply(x, m.weight), make=OnCpu)


class OnCpu(Around):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


def test_a_saved_tensor_changed_before_backward_is_an_error() -> None:
    run = strict(Around(lambda m, x: Scale.apply(x, m.weight)))
    loss = run(torch.randn(3, WIDTH)).sum()
    with torch.no_grad():
        run.module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# In-place mutations and aliases


class Doubles(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mark: bool = True) -> torch.Tensor:
        x.mul_(2)
        if mark:
            ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 7, None


class UpdatesMean(Function):
    """Mutate a buffer without mark_dirty, as batch norms do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        mean.mul_(0.5).add_(x.sum(0), alpha=0.5)
        return x - mean

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 7, None


def doubled_twice(m: nn.Module, x: torch.Tensor) -> Any:
    hidden = x * 3
    before = hidden + 1
    doubled = Doubles.apply(hidden)
    assert doubled is hidden
    return before, hidden * m.weight, doubled + hidden


def doubled_view(m: nn.Module, x: torch.Tensor) -> Any:
    hidden = x * 3
    Doubles.apply(hidden[:, :2])
    return hidden * m.weight


def doubled_beside_an_equal(m: nn.Module, x: torch.Tensor) -> Any:
    """Compute equal values twice; CSE makes one of them."""
    hidden, other = x * 3, x * 3
    return Doubles.apply(hidden) * m.weight, other + 1


@a_dtype
@pytest.mark.parametrize(
    "use",
    slow_but_every(
        2,
        [
            doubled_twice,
            doubled_view,
            doubled_beside_an_equal,
            lambda m, x: UpdatesMean.apply(x, m.mean) + m.mean,
            lambda m, x: (m.mean.clone(), UpdatesMean.apply(UpdatesMean.apply(x, m.mean), m.mean)),
            lambda m, x: x * Doubles.apply(torch.ones(WIDTH, dtype=x.dtype), False),
        ],
    ),
    ids=["dirty", "dirty view", "dirty and equal", "buffer", "buffer twice", "unmarked constant"],
)
def test_changes_in_place(use: Callable[..., Any], dtype: torch.dtype) -> None:
    check(use, dtype)


def test_an_input_of_the_module_is_changed_in_place() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Doubles.apply(x) * self.weight

    torch.manual_seed(0)
    x = torch.randn(3, WIDTH)
    mine, theirs = x.clone(), x.clone()
    got, eager = strict(Whole())(mine), Whole()(theirs)
    assert torch.equal(got, eager)
    assert torch.equal(mine, theirs)


def refused(use: Callable[..., Any], reason: str) -> str:
    """Check that the module falls back with this reason and returns eager's result."""
    entry = ZooModel("refused", lambda: Around(use), features, total)
    got = Side(entry, torch.float32, lambda m: ORTModule(m, rng="torch"))
    eager = Side(entry, torch.float32, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_equal(got.train(3, 0), eager.train(3, 0))
    texts = [str(w.message) for w in caught if "runs in PyTorch" in str(w.message)]
    assert len(texts) == 1, texts
    assert reason in texts[0]
    assert "to do:" in texts[0]
    return texts[0]


def test_an_unmarked_change_of_an_input_with_a_gradient_is_refused() -> None:
    refused(lambda m, x: Doubles.apply(x * 1, False), "without ctx.mark_dirty")


class Same(Function):
    """Return the input, or a view of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, view: bool = False) -> torch.Tensor:
        return x.view(-1) if view else x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].view(-1, WIDTH) * -7, None


@a_dtype
@pytest.mark.parametrize("view", [False, True])
def test_outputs_in_the_memory_of_inputs(view: bool, dtype: torch.dtype) -> None:
    check(lambda m, x: Same.apply(x, view) * 2, dtype)
    check(lambda m, x: Same.apply(x, view), dtype)


class Reverses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Same.apply(x)


def test_an_alias_seen_at_capture_is_neither_copied_nor_warned_of() -> None:
    x = torch.randn(3, WIDTH, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = strict(Reverses())(x)
    assert y.data_ptr() == x.data_ptr()
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3, WIDTH), -7.0))


def changed_after(m: nn.Module, x: torch.Tensor, view: bool = False) -> Any:
    hidden = x * 3
    same = Same.apply(hidden, view)
    with torch.no_grad():
        hidden.mul_(2)
    return same + 1


def test_a_later_change_of_shared_memory() -> None:
    module = Around(changed_after)
    x = torch.randn(3, WIDTH)
    with torch.no_grad():  # the result is the input, and both change
        assert torch.equal(strict(module)(x), module(x))
    for wrap in (strict, lambda module: module):
        with pytest.raises((RuntimeError, ORTModuleFallbackException), match=r"in ?place"):  # eager raises too
            wrap(module)(x)
    views = Around(lambda m, x: changed_after(m, x, True))
    with torch.no_grad(), pytest.warns(UserWarning, match="in place later"):
        assert torch.equal(ORTModule(views)(x), views(x))


class Tricky(Function):
    """Return a view of the input if it has more than two rows, which it does not have at capture."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x if isinstance(x.shape[0], int) and len(x) > 5 else x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 7


class Declared(Tricky):
    @staticmethod
    def alias_input(node_proto_str: bytes) -> Any:
        node = onnx.NodeProto.FromString(node_proto_str)
        assert node.op_type == "PythonOp"
        assert node.attribute[0].s.decode().endswith("Declared")
        return [0], [-1]


def test_an_alias_that_appears_later_is_copied_and_warned_of_once() -> None:
    run = strict(Around(lambda m, x: Tricky.apply(x)))
    run(torch.randn(3, WIDTH))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run(torch.randn(7, WIDTH)).sum().backward()
    (text,) = [str(w.message) for w in caught]
    assert re.search(r"Tricky: output 0 .* tensor input 0, .*alias_input", text)
    assert count_captures(run) == 1


def test_a_declared_alias_is_not_copied() -> None:
    run = strict(Around(lambda m, x: Declared.apply(x)))
    run(torch.randn(3, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(torch.randn(7, WIDTH)).sum().backward()


def test_a_wrong_alias_map_is_an_error() -> None:
    class Wrong(Tricky):
        @staticmethod
        def alias_input(node_proto_str: bytes) -> Any:
            return [0, 1], [-1]

    text = refused(lambda m, x: Wrong.apply(x), "alias_input")
    assert "1 entries, one for each of forward's outputs" in text


# Sizes


class Counting(Function):
    """Read sizes as Python numbers, loop over them and branch on them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.rows = int(x.shape[0])
        scale = 0.0
        for i in range(ctx.rows):
            scale += 1 / (1 + i)
        extra = torch.full((int(x.shape[0]) + 1, int(x.shape[1])), scale, dtype=x.dtype)
        extra[1:] += x if x.shape[0] > 1 else 2 * x
        return extra.repeat(2, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][1 : 1 + ctx.rows] * ctx.rows


@a_dtype
def test_sizes_are_not_fixed_by_their_use_in_a_function(dtype: torch.dtype) -> None:
    check(lambda m, x: Counting.apply(x) * m.weight, dtype, sizes=(3, 1, 5, 8, 0))


def test_a_batch_of_one_first() -> None:
    check(lambda m, x: Scale.apply(x, m.weight), sizes=(1, 3, 5))
    check(lambda m, x: Counting.apply(x) * m.weight, sizes=(1, 3, 5))


class Powers(Function):
    """Return an output whose size follows no rule that could be deduced."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.rows = int(x.shape[0])
        return torch.cat([x] * (1 + ctx.rows**2 // 3))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][: ctx.rows] * 7


def test_sizes_that_follow_no_rule_are_guarded() -> None:
    check(lambda m, x: Powers.apply(x) * m.weight, sizes=(3, 5, 3, 8), captures=3)


class Positive(Function):
    """Return an output whose size depends on the input's values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        ctx.save_for_backward(mask)
        return x[mask]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return torch.zeros(mask.shape, dtype=gradients[0].dtype).masked_scatter_(mask, gradients[0] * 7)


def test_an_output_whose_size_is_in_the_elements() -> None:
    check(lambda m, x: Positive.apply(x) * 2, sizes=(3, 5, 1, 8))


class InNumpy(Function):
    """Compute in numpy, which cannot read fake tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        array = x.detach().numpy()
        ctx.array = array
        flat = np.sin(array).reshape(-1)
        return torch.from_numpy(flat), torch.from_numpy(array.sum(1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        flat, sums = (g.numpy() for g in gradients)
        return torch.from_numpy(flat.reshape(ctx.array.shape) * ctx.array * 7 + sums[:, None])


@a_dtype
def test_a_forward_that_needs_elements(dtype: torch.dtype) -> None:
    check(lambda m, x: InNumpy.apply(x), dtype)


def test_a_forward_whose_sizes_cannot_be_told_is_refused() -> None:
    class Squares(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(np.ones(int(x.numpy().shape[0] ** 2.5)))

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return None

    text = refused(lambda m, x: (x, Squares.apply(x)), "cannot deduce the output sizes")
    assert "infer_shape" in text


def test_a_rule_that_does_not_hold_is_an_error_and_no_wrong_result() -> None:
    class Liar(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(np.zeros(min(len(x.numpy()), 20), np.float32))

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return None

    run = strict(Around(lambda m, x: (x, Liar.apply(x))))
    run(torch.randn(3, WIDTH))
    with pytest.raises(PythonOpError, match=r"output 0 of .*Liar") as error:
        run(torch.randn(40, WIDTH))
    assert "[40]" in str(error.value)
    assert "[20]" in str(error.value)


class Shaped(Function):
    """Declare its output shapes, and fail at all sizes but the real ones."""

    requests: ClassVar[list[Any]] = []
    allowed = (3,)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> Any:
        assert x.numpy().shape[0] in Shaped.allowed
        return torch.cat([x] * count), x.sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][: len(gradients[1])] * 7 + gradients[1][:, None], None

    @staticmethod
    def infer_shape(node: Any, tensor_input_shapes: Any, tensor_input_dtypes: Any) -> Any:
        Shaped.requests.append((node, tensor_input_shapes, tensor_input_dtypes))
        rows, columns = tensor_input_shapes[0]
        return [[rows * 2, columns], [rows]], [tensor_input_dtypes[0]] * 2


def test_declared_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shaped, "allowed", SIZES)
    check(lambda m, x: Shaped.apply(x, 2))
    node, shapes, dtypes = Shaped.requests[0]
    assert node.op_type == "PythonOp"
    assert len(shapes[0]) == 2
    assert dtypes == [onnx.TensorProto.FLOAT]
    monkeypatch.setattr(Shaped, "allowed", ())
    run = strict(Around(lambda m, x: Shaped.apply(x, 2)))
    with pytest.raises(AssertionError):  # captured from its declaration; the first real call is the first run
        run(torch.randn(3, WIDTH))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda node, shapes, dtypes: [shapes[0]], "did not return the shapes and dtypes"),
        (lambda node, shapes, dtypes: ([["batch", 4]], dtypes), "did not return the shapes and dtypes"),
        (lambda node, shapes, dtypes: ([shapes[0], shapes[0]], [dtypes[0]] * 2), "wrong number of outputs"),
    ],
)
def test_a_wrong_declaration_is_refused(rule: Callable[..., Any], reason: str) -> None:
    class Wrong(Scale):
        infer_shape = staticmethod(rule)

    assert "Wrong" in refused(lambda m, x: Wrong.apply(x, m.weight), reason)


# Names


def test_equal_names_in_different_scopes() -> None:
    def make(factor: float) -> type[Function]:
        class Twin(Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * factor

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
                return gradients[0] * factor * 10

        return Twin

    first, second = make(2.0), make(3.0)
    check(lambda m, x: first.apply(second.apply(x)) + second.apply(first.apply(x) * m.weight))


# Styles


@a_dtype
def test_setup_context_and_once_differentiable(dtype: torch.dtype) -> None:
    class Styled(Function):
        @staticmethod
        def forward(x: torch.Tensor, weight: torch.Tensor) -> Any:
            return x * weight, x.sum()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.anything = {"total": output[1], "needs": ctx.needs_input_grad}

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            assert ctx.anything["needs"] == ctx.needs_input_grad == (True, True)
            return gradients[0] * weight * 7 + ctx.anything["total"], (gradients[0] * x).sum(0) * gradients[1]

    check(lambda m, x: Styled.apply(x, m.weight), dtype)


def test_which_inputs_need_a_gradient() -> None:
    flags: list[Any] = []

    class Needs(Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
            ctx.count = len(inputs)
            return inputs[0] * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            flags.append(ctx.needs_input_grad)
            return gradients[0] * 7, *[None] * (ctx.count - 1)

    def use(m: nn.Module, x: torch.Tensor) -> Any:
        with torch.no_grad():
            frozen = x * 2
        return Needs.apply(x, m.weight, m.mean, frozen, x.detach(), 3, x > 0, [x], x + 1)

    check(use, sizes=(3,))
    assert flags[0] == flags[1] == (True, True, False, False, False, False, False, False, True)


def test_a_frozen_parameter() -> None:
    class Frozen(Around):
        def __init__(self, use: Callable[..., Any]) -> None:
            super().__init__(use)
            self.weight.requires_grad_(False)

    class Asks(Scale):
        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            assert ctx.needs_input_grad == (True, False, False)
            return gradients[0] * 7, None, None

    check(lambda m, x: Asks.apply(x, m.weight, 2.0), make=Frozen)


def test_functions_inside_functions() -> None:
    class Outer(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return Scale.apply(x, weight, 2.0) + Scale.apply(x, None, 3.0)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                inner = Scale.apply(leaf, weight.detach(), 2.0)
            (dx,) = torch.autograd.grad(inner, leaf, gradients[0])
            return dx * 3, None

    check(lambda m, x: Outer.apply(x, m.weight))


def test_a_function_that_runs_a_module_and_its_backward_inside() -> None:
    """Checkpoints do so: a backward inside the function's backward computes gradients of captured parameters."""

    class Runs(Function):
        @staticmethod
        def forward(ctx: Any, run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
            ctx.run = run
            ctx.save_for_backward(x)
            return run(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            assert torch.autograd._is_checkpoint_valid()
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.run(leaf)
            torch.autograd.backward(output, gradients[0])
            return None, leaf.grad

    class Layered(Around):
        def __init__(self, use: Callable[..., Any]) -> None:
            super().__init__(use)
            self.inner = nn.Linear(WIDTH, WIDTH)

    check(lambda m, x: Runs.apply(m.inner, x), make=Layered)


def test_hooks_on_parameters_run_once() -> None:
    counts = []
    for wrap in (strict, lambda module: module):
        module = Around(lambda m, x: Scale.apply(x, m.weight))
        calls: list[int] = []
        module.weight.register_hook(lambda g, c=calls: c.append(1))
        wrap(module)(torch.ones(3, WIDTH)).sum().backward()
        counts.append(len(calls))
    assert counts == [1, 1]


# Modes


class InHalf(Function):
    """Compute in autocast's dtype, and record the dtypes."""

    dtypes: ClassVar[list[Any]] = []

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        InHalf.dtypes.append((torch.is_autocast_enabled("cpu"), x.dtype))
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        InHalf.dtypes.append((torch.is_autocast_enabled("cpu"), gradients[0].dtype))
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t() * 7, x.t() @ gradients[0]


class InFull(Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        return x.exp()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 7


class Squared(Around):
    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__(use)
        self.square = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH))


def test_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InHalf, "dtypes", [])

    def use(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return InFull.apply(InHalf.apply(x, m.square)) * 2

    check(use, autocast=True, make=Squared, sizes=(3, 5))
    assert all(enabled for enabled, _ in InHalf.dtypes[-6:])
    check(use, make=Squared, sizes=(3, 5))


def test_under_autocast_inside_the_module() -> None:
    def use(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            half = InHalf.apply(x, m.square)
            with torch.autocast("cpu", enabled=False):
                return half.float() + InHalf.apply(x, m.square)

    check(use, make=Squared, sizes=(3, 5))


def test_backward_inside_autocast() -> None:
    class Multiplies(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return gradients[0] @ weight.t(), x.t() @ gradients[0]

    torch.manual_seed(0)
    x = torch.randn(3, WIDTH)
    gradients = []
    for wrap in (strict, lambda module: module):
        module = Squared(lambda m, x: Multiplies.apply(x, m.square))
        run = wrap(module)
        with torch.autocast("cpu", torch.bfloat16):
            total(run(x)).backward()
        gradients.append(module.square.grad)
    assert torch.equal(*gradients)


def test_without_gradients() -> None:
    def use(m: nn.Module, x: torch.Tensor) -> Any:
        with torch.no_grad():
            fixed = Scale.apply(x, m.weight)
        return Scale.apply(fixed * x, m.weight), fixed

    run, _ = check(use)
    with torch.inference_mode():
        run(torch.randn(3, WIDTH))
    run.eval()
    assert run(torch.randn(3, WIDTH))[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    check(lambda m, x: Scale.apply(x, m.weight, 0.5), dtype)


def test_complex_values() -> None:
    class Turns(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1j

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0] * -7j

    check(lambda m, x: torch.view_as_real(Turns.apply(torch.fft.fft(x))), sizes=(3, 5))


class Drops(Function):
    """Sample a mask in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0] * 7


def test_random_numbers_come_in_eagers_order() -> None:
    def use(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = nn.functional.dropout(x, 0.5)
        Drops.apply(x)  # it samples nevertheless
        return Drops.apply(nn.functional.dropout(Drops.apply(first), 0.5)) + nn.functional.dropout(x, 0.25)

    check(use)


def test_a_function_whose_result_is_unused_runs() -> None:
    calls: list[str] = []

    class Notes(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
            if not isinstance(x, torch._subclasses.FakeTensor):
                calls.append(name)
            return x * 1

    def use(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        Notes.apply(x, "unused")
        Notes.apply(x, "again")
        Notes.apply(x, "again")
        return (x * 2).add_(1)

    run = strict(Around(use))
    for _ in range(2):
        calls.clear()
        run(torch.randn(3, WIDTH)).sum().backward()
        assert calls == ["unused", "again", "again"]


def test_double_backward() -> None:
    class Cubes(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0] * 7 * ctx.saved_tensors[0] ** 2

    results = []
    for wrap in (strict, lambda module: module):
        module = Around(lambda m, x: Cubes.apply(x) * m.weight)
        x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (first,) = torch.autograd.grad(total(wrap(module)(x)), x, create_graph=True)
        first.square().sum().backward()
        results.append((first.detach(), x.grad, module.before.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Collectives


@pytest.fixture
def process_group() -> Iterable[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collectives_inside_forward_and_backward(process_group: Any) -> None:
    class Reduces(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.group = group
            total_ = x.clone()
            dist.all_reduce(total_, group=group)
            gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, x, group=group)
            work = dist.all_reduce(total_, group=group, async_op=True)
            work.wait()
            return total_ + gathered[0]

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            gradient = gradients[0].clone()
            dist.all_reduce(gradient, group=ctx.group)
            return gradient * 7, None

    check(lambda m, x: Reduces.apply(x, process_group))


# Refusals


def test_under_vmap_a_function_is_refused() -> None:
    class Maps(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0] * 7

    text = refused(lambda m, x: torch.vmap(Maps.apply)(x), "inside a torch.func transform")
    assert "Maps" in text
    assert "test_calls.py" in text


def test_under_vmap_a_function_of_pytorch_s_is_traced() -> None:
    """An index that vmap batches is applied as PyTorch's own function, as in the masks of transformers."""

    def masked(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.size(0))
        with TransformGetItemToIndex():
            mask = torch.vmap(lambda i: (x[i] > 0).all() | (positions > i))(positions)
        return torch.where(mask[:, :1], x * 2, x)

    check(masked, sizes=(2, 5))


def test_tensors_hidden_in_objects_are_refused() -> None:
    refused(lambda m, x: Takes.apply(x, SimpleNamespace(a=x)), "an object that holds a tensor")
    refused(lambda m, x: Takes.apply(x, lambda: x * 2), "an object that holds a tensor")
    refused(lambda m, x: Takes.apply(x, functools.partial(torch.sum, x)), "an object that holds a tensor")


def test_a_leaf_made_in_forward_is_refused() -> None:
    refused(
        lambda m, x: Takes.apply(torch.zeros(WIDTH, requires_grad=True), x.detach()), "created with requires_grad=True"
    )


def test_an_alias_of_a_parameter_under_no_grad_is_no_leaf_of_forward() -> None:
    module = Around(lambda m, x: Takes.apply(torch.ravel(m.weight)) * x)
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        assert torch.equal(strict(copy.deepcopy(module))(x), module(x))


def test_an_object_returned_is_refused() -> None:
    class Boxes(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return x * 2, SimpleNamespace(a=1)

    class Unboxes(Around):
        pass

    refused(lambda m, x: Boxes.apply(x)[0].detach() + x, "an object that a graph cannot hold")


# Errors


def failing(backward: Callable[..., Any]) -> type[Function]:
    class Fails(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, factor: float) -> torch.Tensor:
            return x * weight * factor

    Fails.backward = staticmethod(backward)  # type: ignore[method-assign]
    return Fails


WRONG: dict[str, tuple[Callable[..., Any], str, list[str]]] = {
    "too few": (lambda ctx, g: (g, g.sum(0)), "wrong number of gradients", ["3", "2"]),
    "too many": (lambda ctx, g: (g, g.sum(0), None, g), "wrong number of gradients", ["3", "4"]),
    "bare": (lambda ctx, g: g, "wrong number of gradients", ["3", "1"]),
    "list": (lambda ctx, g: [g, g.sum(0), None], "wrong number of gradients", ["3", "1"]),
    "shape": (lambda ctx, g: (g[:1, :2], g.sum(0), None), "the wrong shape for argument 0", ["[3, 4]", "[1, 2]"]),
    "weight's shape": (lambda ctx, g: (g, g[:, 0], None), "the wrong shape for argument 1", ["[4]", "[3]"]),
    "number": (lambda ctx, g: (g, 1.0, None), "not a tensor for argument 1", ["float"]),
    "for a constant": (lambda ctx, g: (g, g.sum(0), g), "for argument 2, which is not a tensor", ["Tensor"]),
    "device": (lambda ctx, g: (g.to("meta"), g.sum(0), None), "the wrong device for argument 0", ["cpu", "meta"]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_backward_is_named(kind: str) -> None:
    backward, reason, words = WRONG[kind]
    function = failing(backward)
    x = torch.randn(3, WIDTH)
    eager = Around(lambda m, x: function.apply(x, m.weight, 2.0))
    with pytest.raises(RuntimeError):
        eager(x).sum().backward()
    with pytest.raises(PythonOpError, match=reason) as error:
        strict(eager)(x).sum().backward()
    text = str(error.value)
    assert "failing.<locals>.Fails" in text
    assert "test_calls.py:" in text
    assert all(word in text for word in words)


def test_results_that_autograd_accepts_are_accepted() -> None:
    """More Nones than arguments, a broadcast gradient, another dtype."""
    forgiving = failing(lambda ctx, g: (g.double(), g.new_ones(5, *g.shape), None, None, None))
    check(lambda m, x: forgiving.apply(x, m.weight, 2.0), sizes=(3, 5))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_errors_show_the_users_line(where: str) -> None:
    class Raises(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward" and not isinstance(x, torch._subclasses.FakeTensor):
                raise LookupError("in forward")
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            raise LookupError("in backward")

    with pytest.raises(LookupError, match=where) as error:
        strict(Around(lambda m, x: Raises.apply(x)))(torch.randn(3, WIDTH)).sum().backward()
    frame = traceback.extract_tb(error.value.__traceback__)[-1]
    assert frame.filename == __file__
    assert frame.name == where
    assert f"in {where}" in str(frame.line)


# Files


def test_files_hold_the_calls(tmp_path: Any) -> None:
    def use(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = Takes.apply(x, 2, 0.5, True, (1, 2), (0.25,), (False,), "text", x.shape[0])
        return Scale.apply(hidden, m.weight, 2.0)

    run = ORTModule(
        Around(use),
        DebugOptions(save_onnx=True, onnx_prefix="calls", save_path=tmp_path),
        fallback_policy=FallbackPolicy.FALLBACK_DISABLE,
    )
    run(torch.randn(3, WIDTH)).sum().backward()
    files = sorted(tmp_path.glob("*.onnx"))
    assert len(files) == 4
    for path in files:
        onnx.checker.check_model(str(path))
    nodes = {n.op_type + attribute(n, "func_name")[-5:]: n for n in onnx.load(files[-2]).graph.node if n.domain}
    takes, scale, back = nodes["PythonOpTakes"], nodes["PythonOpScale"], nodes["PythonOpGradScale"]
    assert attribute(takes, "func_name") == f"{__name__}.Takes"
    assert attribute(takes, "input_convention") == "dcccccccs"
    assert attribute(takes, "training_mode") == 1
    assert attribute(takes, "input_int_scalars") == [2]
    assert attribute(takes, "input_int_scalar_positions") == [1]
    assert attribute(takes, "input_float_scalars") == [0.5]
    assert attribute(takes, "input_bool_scalars") == [1]
    assert attribute(takes, "input_int_tuples") == [1, 2]
    assert attribute(takes, "input_int_tuple_begins") == [0]
    assert attribute(takes, "input_pointer_scalar_positions") == [7]
    assert "7: 'text'" in attribute(takes, "comment")
    assert attribute(scale, "input_tensor_types") == [onnx.TensorProto.FLOAT] * 2
    assert attribute(scale, "input_tensor_ranks") == [2, 1]
    assert attribute(scale, "input_requires_grads") == [1, 1]
    assert attribute(scale, "tensor_reuse_map") == [-1]
    assert attribute(back, "func_name") == f"{__name__}.Scale"
    assert attribute(back, "output_tensor_requires_grads") == [1, 1]
    assert back.input[0] == scale.output[0]


def attribute(node: onnx.NodeProto, name: str) -> Any:
    value = next(onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name)
    return value.decode() if isinstance(value, bytes) else value


def test_a_graph_with_calls_has_no_form_in_standard_ops(tmp_path: Any) -> None:
    from onnxtrain.errors import GraphError
    from onnxtrain.ops.bodies import inline_bodies

    run = strict(Around(lambda m, x: Scale.apply(x, m.weight)))
    run(torch.randn(3, WIDTH))
    compiled = engine_of(run).newest()
    with pytest.raises(GraphError, match="PythonOp"):
        inline_bodies(compiled.captured.model)
