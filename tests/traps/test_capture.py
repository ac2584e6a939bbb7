"""Silent errors of capture: each test fails when its guard is removed.

Sizes, memory, randomness and changes between steps have files of their own.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import FallbackPolicy, ORTModule
from onnxtrain.errors import CaptureError
from tests.reference import assert_each_no_worse, assert_matches
from tests.thinned import covering, slow_but_every, slow_except
from tests.zoo.checks import Comparison, compared
from tests.zoo.entry import Call, Draw, ZooModel, mean_square
from tests.zoo.huggingface import MODELS as TRANSFORMERS

WIDTH = 8
SIZES = (3, 0)


def features(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH, grad=True),))


def plain_features(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH),))


def model(
    make: Callable[[], nn.Module],
    call: Callable[[Draw, int, int], Call] = features,
    falls_back: str | None = None,
    loss: Callable[[Any], torch.Tensor] = mean_square,
) -> ZooModel:
    return ZooModel(make.__name__, make, call, loss, falls_back=falls_back)


TABLE = torch.zeros(WIDTH)


class ChangesGlobal(nn.Module):
    """Change a global tensor in place; forward is refused for that, or for a later branch on a value."""

    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.last, self.decides = nn.Linear(WIDTH, 1), decides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TABLE.add_(1.0)
        y = self.last(x)
        if self.decides and y.sum() > 0:
            y = y * 2
        return y + TABLE.sum()


@pytest.mark.parametrize(("pieces", "decides"), covering([False, True], [False, True]))
def test_a_global_tensor_is_changed_once_a_call(pieces: bool, decides: bool) -> None:
    TABLE.zero_()
    module = ORTModule(ChangesGlobal(decides=decides), pieces=pieces)
    for call in (1.0, 2.0, 3.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            module(torch.ones(2, WIDTH)).sum().backward()
        assert TABLE.tolist() == [call] * WIDTH


def test_a_global_tensor_that_forward_changes_is_named() -> None:
    module = ORTModule(ChangesGlobal(decides=False), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    with pytest.raises(CaptureError, match="belongs neither to the module nor to the call") as caught:
        module(torch.ones(2, WIDTH))
    assert "test_capture.py" in str(caught.value.where)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))  # type: ignore[no-any-return]


# Autocast


def test_autocast_around_the_call_reaches_the_graph() -> None:
    with compared(model(TwoLayers), autocast=True) as compare:
        compare.train(*SIZES)
        assert compare.got.call(*SIZES)[1].dtype == torch.bfloat16


def test_autocast_switched_on_and_off_between_steps() -> None:
    with compared(model(TwoLayers), captures=2) as compare:
        for autocast in (False, True, False, True):
            compare.got.autocast = compare.eager.autocast = autocast
            compare.train(*SIZES)


def test_autocast_around_backward_changes_nothing() -> None:
    """Eager's backward would round to bfloat16 there; the graph keeps forward's dtypes."""
    module = ORTModule(TwoLayers(), rng="torch").eval()
    x = torch.randn(3, WIDTH)
    loss = mean_square(module(x))
    plain = torch.autograd.grad(loss, [*module.parameters()], retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(loss, [*module.parameters()])
    assert all(map(torch.equal, plain, inside))


class InnerAutocast(TwoLayers):
    """Run half of forward in bfloat16, with a nested region where autocast is disabled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x)
            with torch.autocast("cpu", enabled=False):
                scale = self.last(x).square()
        return self.last(hidden.to(x.dtype) * scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize("outer", [False, True])
def test_autocast_inside_forward(outer: bool) -> None:
    with compared(model(InnerAutocast), autocast=outer) as compare:
        # The float64 and float32 runs agree only up to the precision of bfloat16, to which both round.
        for batch in (3, 1, 5):  # batch 1 after another size: casts must not depend on the first size
            compare.train(batch, 0)


# Gradients switched off


class GradSwitches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    @torch.no_grad()
    def target(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sigmoid(self.frozen(hidden)), hidden.mean(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        target, mean = self.target(hidden)
        with torch.no_grad():
            self.average.mul_(0.9).add_(mean, alpha=0.1)
        torch.set_grad_enabled(False)
        scale = hidden.square().sum(-1, keepdim=True)
        torch.set_grad_enabled(True)
        return hidden / (1 + scale) - target * self.average


def test_no_gradient_flows_out_of_a_no_grad_region() -> None:
    with compared(model(GradSwitches)) as compare:
        compare.train(*SIZES)
        compare.train(5, 0)
        assert compare.got.module.get_parameter("frozen.weight").grad is None


class ReturnsFromNoGrad(nn.Module):
    """Return one output with a gradient, and one straight from a no_grad region."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.inner(x)
        with torch.no_grad():
            quiet = hidden * 2
        return hidden, quiet


def test_an_output_of_a_no_grad_region_needs_no_gradient() -> None:
    with compared(model(ReturnsFromNoGrad, loss=lambda out: out[0].square().sum())) as compare:
        compare.train(*SIZES)


class EnablesInside(GradSwitches):
    """Compute a value under enable_grad inside no_grad: it has a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            quiet = self.frozen(x)
            with torch.enable_grad():
                hidden = self.inner(x)
            quiet = quiet + hidden.sigmoid()
        return hidden * quiet  # type: ignore[no-any-return]


def test_gradients_switched_on_inside_a_no_grad_region() -> None:
    with compared(model(EnablesInside)) as compare:
        compare.train(*SIZES)
        assert compare.got.module.get_parameter("inner.weight").grad is not None
        assert compare.got.module.get_parameter("frozen.weight").grad is None


def test_training_after_a_first_call_under_no_grad() -> None:
    with compared(model(TwoLayers), captures=2) as compare:
        with torch.no_grad():
            compare.forward(*SIZES)
        compare.train(*SIZES)
        with torch.no_grad():
            compare.forward(*SIZES)


# Checkpoints


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.active = True
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = TwoLayers()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.active:
            hidden = checkpoint(self.inner, hidden, use_reentrant=self.reentrant)
        else:
            hidden = self.inner(hidden)
        return self.last(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_flow_through_and_after_a_checkpoint(reentrant: bool) -> None:
    with compared(model(lambda: Checkpointed(reentrant))) as compare:
        compare.train(*SIZES)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_switched_on_and_off_in_mid_training(reentrant: bool) -> None:
    with compared(model(lambda: Checkpointed(reentrant)), captures=2) as compare:
        for active in (False, True, False):
            compare.change(lambda m, active=active: setattr(m, "active", active))
            compare.train(*SIZES)


@pytest.mark.parametrize("reentrant", slow_except([False, True], False))
def test_a_transformers_checkpointing_switched_on_in_mid_training(reentrant: bool) -> None:
    bert = next(m for m in TRANSFORMERS if m.name == "bert-classifier")
    # Three captures: after disabling, transformers leaves its function and hook in place, so the module differs.
    with compared(bert, captures=3) as compare:
        compare.train(3, 9)
        compare.change(lambda m: m.gradient_checkpointing_enable({"use_reentrant": reentrant}))
        compare.train(3, 9)
        compare.train(1, 6)
        compare.change(lambda m: m.gradient_checkpointing_disable())
        compare.train(3, 9)


class CheckpointFirst(nn.Module):
    """Checkpoint an input without gradient: a reentrant checkpoint then gives its parameters no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=True))  # type: ignore[no-any-return]


def test_a_reentrant_checkpoint_without_inputs_that_need_gradients() -> None:
    with compared(model(CheckpointFirst, plain_features)) as compare:
        compare.train(*SIZES)
        assert compare.got.module.get_parameter("inner.weight").grad is None


# Side effects of forward


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x)  # type: ignore[no-any-return]


class Appends(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.batch_sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batch_sizes.append(x.shape[0])
        return self.inner(x)  # type: ignore[no-any-return]


class Collects(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.lengths: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lengths.add(len(self.lengths))
        return self.inner(x) * len(self.lengths)  # type: ignore[no-any-return]


class Remembers(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.inner(x)
        return self.last * 2  # type: ignore[no-any-return]


class Caches(Counts):
    """Cache a tensor in the dictionary of a helper object that is not a module."""

    class Store:
        def __init__(self) -> None:
            self.table: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.store = Caches.Store()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.store.table["calls"] = self.store.table.get("calls", 0) + 1
        return self.inner(x) * self.store.table["calls"]  # type: ignore[no-any-return]


def test_a_counter_in_forward_counts() -> None:
    with compared(model(Counts, falls_back="calls")) as compare:
        for _ in range(3):
            compare.train(*SIZES)
        assert [side.module.calls for side in compare.sides()] == [3, 3, 3]


def test_a_list_that_forward_appends_to_grows() -> None:
    with compared(model(Appends, falls_back="batch_sizes")) as compare:
        for batch in (3, 2, 1):
            compare.train(batch, 0)
        assert [side.module.batch_sizes for side in compare.sides()] == [[3, 2, 1]] * 3


def test_a_set_that_forward_adds_to_grows() -> None:
    with compared(model(Collects, falls_back="lengths")) as compare:
        for batch in (3, 2, 1):
            compare.train(batch, 0)
        assert [side.module.lengths for side in compare.sides()] == [{0, 1, 2}] * 3


def test_a_tensor_that_forward_keeps_is_a_real_one() -> None:
    with compared(model(Remembers)) as compare:
        for batch in (3, 2):
            compare.train(batch, 0)
        kept = [side.module.last for side in compare.sides()]
        assert {type(t) for t in kept} == {torch.Tensor}
        assert torch.equal(kept[0], kept[1])


class KeepsElsewhere(Counts):
    """Store a tensor outside the module, by the function `keep`."""

    def __init__(self, keep: Callable[[list[Any], torch.Tensor], Any]) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        self.keep(STORE, h)
        return h * 2  # type: ignore[no-any-return]


STORE: list[Any] = []


@pytest.mark.parametrize(
    "keep",
    slow_but_every(
        4,
        [
            lambda store, h: store.append(h),
            lambda store, h: store.append((h.detach(), 1)),
            lambda store, h: store.append({"h": h + 1}),
            lambda store, h: store.append(SimpleNamespace(h=h.relu())),
            lambda store, h: store.append(lambda: h),
        ],
    ),
    ids=["list", "tuple", "dict", "object", "closure"],
)
def test_a_tensor_that_forward_keeps_outside_the_module_is_a_real_one(keep: Callable[..., Any]) -> None:
    STORE.clear()
    with compared(model(lambda: KeepsElsewhere(keep), falls_back="stores a tensor in a")) as compare:
        for batch in (3, 2):
            compare.train(batch, 0)
    kept = [tensor for item in STORE for tensor in tensors_in(item)]
    STORE.clear()
    assert [type(tensor) for tensor in kept] == [torch.Tensor] * 6  # onnxtrain, eager and float64, two steps each


def test_frozen_parts_may_keep_a_tensor() -> None:
    """gc.get_referrers does not see a frozen list."""
    gc.collect()
    gc.freeze()
    test_a_tensor_that_forward_keeps_outside_the_module_is_a_real_one(lambda store, h: store.append(h))
    assert gc.get_freeze_count()


def tensors_in(item: Any) -> list[Any]:
    """Return the tensors in an item; items whose fake tensors were removed are empty."""
    if isinstance(item, torch.Tensor):
        return [item]
    if callable(item):
        item = [cell.cell_contents for cell in item.__closure__ if cell != type(cell)()]
    parts = item if isinstance(item, list | tuple) else (item if isinstance(item, dict) else vars(item)).values()
    return [part for part in parts if isinstance(part, torch.Tensor)]


def test_a_cache_in_a_plain_object_is_kept() -> None:
    with compared(model(Caches, falls_back="store")) as compare:
        for _ in range(3):
            compare.train(*SIZES)
        assert [side.module.store.table for side in compare.sides()] == [{"calls": 3}] * 3


def test_the_module_is_left_as_it_was_where_capture_fails() -> None:
    class Fails(Counts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x) if x.sum().item() > 0 else x  # type: ignore[no-any-return]

    with compared(model(Fails, falls_back="Fails")) as compare:
        compare.train(*SIZES)
        assert [side.module.calls for side in compare.sides()] == [1, 1, 1]


# Tied and shared parameters


class TiedTwice(nn.Module):
    """Use one matrix three times, and call one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 12, bias=False)
        self.score.weight = self.embed.weight
        self.direct = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(torch.tanh(self.inner(self.embed(words))))
        return self.score(hidden) + (hidden @ self.direct.t()).sigmoid()  # type: ignore[no-any-return]


def words(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.ints(12, batch, 4),))


def test_a_tied_parameter_gets_the_sum_of_its_gradients() -> None:
    with compared(model(TiedTwice, words)) as compare:
        compare.train(*SIZES)
        assert len(list(compare.got.run.parameters())) == 3


def _untie(module: nn.Module) -> None:
    score: Any = module.score
    score.weight = nn.Parameter(score.weight.detach() * 0.5)


def test_parameters_untied_and_tied_again_between_steps() -> None:
    with compared(model(TiedTwice, words), captures=2) as compare:
        compare.train(*SIZES)
        compare.change(_untie)
        compare.train(*SIZES)
        compare.change(lambda m: setattr(m.score, "weight", m.embed.weight))
        compare.train(*SIZES)


def test_two_modules_that_become_one_between_steps() -> None:
    with compared(model(TwoLayers), captures=2) as compare:
        compare.train(*SIZES)
        compare.change(lambda m: setattr(m, "last", m.first))
        compare.train(*SIZES)


class Halved(nn.Parameter):
    """A subclass of Parameter: each operator reads half of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return func(args[0], args[1] * 0.5, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


class OfAnotherClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_parameter_of_a_class_of_its_own(late: bool) -> None:
    def convert(module: Any) -> None:
        module.inner.weight = Halved(module.inner.weight.detach())

    with compared(model(OfAnotherClass, falls_back="parameters are of a tensor class"), captures=int(late)) as compare:
        if late:
            compare.train(*SIZES)
        compare.change(convert)
        compare.train(*SIZES)


# BatchNorm and other buffers


class Normalized(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.norm = nn.BatchNorm1d(4, **options)
        self.last = nn.Linear(4 * (WIDTH - 2), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.conv(x[:, None]))).flatten(1))  # type: ignore[no-any-return]


def test_running_statistics_follow_training_and_rule_eval() -> None:
    with compared(model(Normalized), captures=3) as compare:
        statistics = compare.got.module.get_buffer("norm.running_mean")
        for batch in (3, 1, 5):
            compare.train(batch, 0)
        assert statistics is compare.got.module.get_buffer("norm.running_mean"), "buffers are updated in place"
        assert compare.got.module.get_buffer("norm.num_batches_tracked").item() == 3
        compare.change(nn.Module.eval)
        compare.train(*SIZES)
        with torch.no_grad():
            compare.forward(*SIZES)
        compare.change(nn.Module.train)
        compare.train(*SIZES)
        assert compare.got.module.get_buffer("norm.num_batches_tracked").item() == 4


def test_running_statistics_follow_train_mode_under_no_grad() -> None:
    with compared(model(Normalized)) as compare, torch.no_grad():
        compare.forward(*SIZES)
        compare.forward(5, 0)


@pytest.mark.parametrize(
    "options", slow_but_every(2, [{"track_running_stats": False}, {"affine": False}, {"momentum": 0.5, "eps": 0.1}])
)
def test_other_kinds_of_batch_norm(options: dict[str, Any]) -> None:
    with compared(model(lambda: Normalized(**options)), captures=2) as compare:
        compare.train(*SIZES)
        compare.change(nn.Module.eval)
        compare.train(*SIZES)


class InstanceNormalized(Normalized):
    """Use an operator whose schema does not declare that it mutates the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)  # type: ignore[assignment]


def test_running_statistics_of_an_instance_norm() -> None:
    compare = Comparison(model(InstanceNormalized))
    for batch in (3, 2):
        compare.train(batch, 0)
    compare.change(nn.Module.eval)
    compare.train(*SIZES)


def test_batch_norm_with_a_cumulative_average() -> None:
    # The factor 1 / num_batches_tracked is a Python number: each step would need another capture.
    with compared(model(lambda: Normalized(momentum=None), falls_back="Normalized")) as compare:
        for _ in range(3):
            compare.train(*SIZES)


def test_buffers_loaded_between_steps_are_read() -> None:
    def load(module: nn.Module) -> None:
        state = module.state_dict()
        state["norm.running_mean"] = torch.ones_like(state["norm.running_mean"])
        module.load_state_dict(state)

    def assign(module: nn.Module) -> None:
        module.load_state_dict({k: v.clone() * 1 for k, v in module.state_dict().items()}, assign=True)

    with compared(model(Normalized)) as compare:
        compare.train(*SIZES)
        compare.change(load)
        compare.train(*SIZES)
        compare.change(assign)
        compare.train(*SIZES)


class ReadsItsBuffer(nn.Module):
    """Update a buffer, then read it and return it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.average * 1
        self.steps += 1
        self.average.lerp_(x.detach().mean(0), 0.5)
        return self.inner(x) * self.average / self.steps + before, self.steps.clone()


def test_a_buffer_is_read_before_and_after_its_update() -> None:
    with compared(model(ReadsItsBuffer, loss=lambda out: out[0].square().sum())) as compare:
        for batch in (3, 1, 3):
            compare.train(batch, 0)


# Custom autograd functions


class StraightThrough(torch.autograd.Function):
    """Compute sign(x) with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Binarized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return StraightThrough.apply(self.inner(x)) * x  # type: ignore[no-any-return, no-untyped-call]


def test_the_backward_of_a_custom_function_is_kept() -> None:
    with compared(model(Binarized)) as compare:
        compare.train(*SIZES)
        compare.train(5, 0)


# Hooks


def _doubles(*arguments: Any) -> Any:
    return arguments[-1] * 2


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.first.register_forward_hook(_doubles),
        lambda m: m.first.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)),
        lambda m: m.first.register_full_backward_hook(lambda _, to_inputs, __: tuple(2 * g for g in to_inputs)),
        lambda m: m.first.register_full_backward_pre_hook(lambda _, to_outputs: tuple(2 * g for g in to_outputs)),
    ],
    ids=["forward", "forward-pre", "backward", "backward-pre"],
)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_hook_on_a_submodule_runs(register: Callable[[nn.Module], Any], late: bool) -> None:
    with compared(model(TwoLayers, falls_back="hook"), captures=int(late)) as compare:
        if late:
            compare.train(*SIZES)
        compare.change(register)
        compare.train(*SIZES)
        compare.train(*SIZES)


def test_a_hook_that_only_looks_sees_real_tensors() -> None:
    outputs_by_module: dict[int, list[Any]] = {}

    def watch(module: nn.Module) -> None:
        outputs = outputs_by_module.setdefault(id(module), [])
        module.get_submodule("first").register_forward_hook(lambda _, __, output: outputs.append(output.detach()))

    with compared(model(TwoLayers, falls_back="hook")) as compare:
        compare.change(watch)
        for _ in range(2):
            compare.train(*SIZES)
    assert all(len(outputs) == 2 for outputs in outputs_by_module.values())
    assert {type(t) for outputs in outputs_by_module.values() for t in outputs} == {torch.Tensor}


def test_a_hook_on_the_module_itself() -> None:
    def edit(module: nn.Module) -> None:
        module.register_forward_hook(_doubles)

    compare = Comparison(model(TwoLayers))
    compare.change(edit)
    compare.train(*SIZES)
    compare.train(*SIZES)


def test_a_hook_for_all_modules() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda m, _, out: out * 2 if type(m) is nn.Linear else None)
    try:
        compare = Comparison(model(TwoLayers))
        compare.train(*SIZES)
    finally:
        handle.remove()


class HooksATensor(TwoLayers):
    """Register a hook on an intermediate tensor, which torch.export ignores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 3)
        return self.last(hidden)  # type: ignore[no-any-return]


def test_a_hook_on_an_inner_tensor_runs() -> None:
    with compared(model(HooksATensor, falls_back="hook")) as compare:
        compare.train(*SIZES)
        compare.train(*SIZES)


class RetainsAGradient(TwoLayers):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.retain_grad()
        return self.last(hidden), hidden


def test_the_retained_gradient_of_an_inner_tensor() -> None:
    with compared(model(RetainsAGradient, loss=lambda out: out[0].square().sum(), falls_back="retain_grad")) as compare:
        for side in compare.sides():
            _, output = side.call(*SIZES)
            output[0].sum().backward()
            assert output[1].grad is not None


# Embeddings


class Embeds(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH, **options)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.last(self.embed(indices))  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_kinds_of_embedding(options: dict[str, Any]) -> None:
    compare = Comparison(model(lambda: Embeds(**options), words))
    compare.train(*SIZES)
    compare.train(1, 0)
    for name, parameter in compare.got.module.named_parameters():
        assert torch.equal(parameter, compare.eager.module.get_parameter(name)), f"max_norm changes {name} in forward"


class Scored(Embeds):
    """Label few of the words, or read one of each sequence: scaling by frequency must count the other words too."""

    def __init__(self, read: str) -> None:
        super().__init__(scale_grad_by_freq=True)
        self.read = read

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        scores = super().forward(indices)
        if self.read == "one":
            return scores[:, 0].square().mean()
        labels = torch.where(torch.arange(indices.size(1)) < 2, indices % 3, -100)
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("read", ["one", "labels"])
def test_a_gradient_by_frequency_counts_unread_words(read: str) -> None:
    with compared(model(lambda: Scored(read), words)) as compare:
        compare.train(*SIZES)


def test_a_sparse_gradient_stays_sparse() -> None:
    compare = Comparison(model(lambda: Embeds(sparse=True), words))
    gradients = [side.train(*SIZES).gradients["embed.weight"] for side in compare.sides()]
    assert all(gradient is not None and gradient.is_sparse for gradient in gradients)
    assert_each_no_worse("gradient", *(gradient.to_dense() for gradient in gradients if gradient is not None))


# Fast paths of PyTorch itself


class Padded(nn.Module):
    """Use PyTorch's encoder, which skips padding in eval mode and writes zeros there."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.arange(x.shape[1]) >= torch.arange(x.shape[0], 0, -1)[:, None]
        return self.encoder(x, src_key_padding_mask=padding)  # type: ignore[no-any-return]


def test_an_encoder_that_drops_padding_in_eval_mode() -> None:
    compare = Comparison(model(Padded, lambda draw, batch, length: Call((draw.floats(batch, batch, WIDTH),))))
    compare.train(*SIZES)
    compare.change(nn.Module.eval)
    compare.train(*SIZES)
    with torch.no_grad():
        compare.forward(*SIZES)
        compare.forward(4, 0)


# Losses that use a part of the outputs


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Linear(WIDTH, 3)
        self.right = nn.Linear(WIDTH, 3)
        self.unused = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return {"left": self.left(hidden), "right": self.right(hidden)}


@pytest.mark.parametrize("heads", [["left"], ["right"], ["left", "right"]], ids="+".join)
def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient(heads: list[str]) -> None:
    def loss(output: Any) -> torch.Tensor:
        return torch.stack([output[head].square().sum() for head in heads]).sum()

    with compared(model(TwoHeads, loss=loss)) as compare:
        compare.train(*SIZES)


def test_the_loss_changes_the_outputs_that_it_reads() -> None:
    now = SimpleNamespace(heads=[])

    def loss(output: Any) -> torch.Tensor:
        return torch.stack([output[head].square().sum() for head in now.heads]).sum()

    with compared(model(TwoHeads, loss=loss)) as compare:
        for now.heads in (["left"], ["right"], ["left", "right"], ["left"]):
            compare.train(*SIZES)


class GivesNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("results", [1, 2])
def test_parameters_get_no_gradient_where_none_comes(results: int) -> None:
    """Zero gradients differ from none: with zeros an optimizer still applies momentum and weight decay."""

    class Linears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(results))

        def forward(self, x: torch.Tensor) -> Any:
            outputs = tuple(layer(x) for layer in self.layers)
            return outputs[0] if results == 1 else outputs

    for module in (Linears(), ORTModule(Linears())):
        outputs = module(torch.randn(2, 3))
        total = sum(GivesNothing.apply(y).sum() for y in (outputs if results > 1 else [outputs]))
        total.backward()
        assert all(p.grad is None for p in module.parameters())


def test_backward_does_not_enter_an_input_without_gradient() -> None:
    """With zeros, autograd would run the backward of the input's producer, which eager does not run."""

    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            raise AssertionError("eager does not come here")

    class Detaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + y.detach()

    for module in (Detaches(), ORTModule(Detaches())):
        for _ in range(3):
            leaf = torch.ones(2, 3, requires_grad=True)
            module(torch.randn(2, 3), Refuses.apply(leaf)).sum().backward()
            assert leaf.grad is None


# Tensors that belong neither to the module nor to the call

_OUTSIDE: dict[str, torch.Tensor] = {}


class ReadsOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * _OUTSIDE["scale"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [nn.Parameter, lambda t: t.requires_grad_(), lambda t: t.requires_grad_() * 2])
def test_a_tensor_from_outside_that_needs_a_gradient_gets_one(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    _OUTSIDE["scale"] = make(torch.full((WIDTH,), 2.0))
    _OUTSIDE["scale"].retain_grad()
    module = ReadsOutside()
    with pytest.warns(UserWarning, match="belongs neither to the module nor to the call"):
        ORTModule(module)(torch.ones(3, WIDTH)).sum().backward()
    assert_matches(_OUTSIDE["scale"].grad, lambda layer, x: layer(x).sum(0), module.layer, torch.ones(3, WIDTH))


# Graphs of the same nodes whose shapes differ


class SplitsInTwo(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part * 2 for part in torch.tensor_split(x, 2)]


def test_the_graph_for_an_even_length_does_not_serve_odd_ones() -> None:
    module = ORTModule(SplitsInTwo())
    for length in (4, 7, 8, 5, 1):
        parts = module(torch.ones(length, requires_grad=True))
        assert [len(part) for part in parts] == [len(part) for part in torch.ones(length).tensor_split(2)]
