"""Steps within `memory_budget_bytes`: bitwise equal results in less memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.deterministic
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule
from onnxtrain.errors import MemoryBudgetError, OptionError
from tests.plan.measured import model_and_batches, peak_of, step
from tests.reference import assert_matches
from tests.thinned import slow_except
from tests.zoo.checks import Side, leaves
from tests.zoo.entry import ZooModel
from tests.zoo.models import ZOO

Result = tuple[dict[str, torch.Tensor | None], list[tuple[str, Any]]]


class Block(nn.Module):
    """Something of everything: products, cheap ops, dropout, a norm, a residual."""

    def __init__(self, width: int, counts: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.2)
        self.counts = counts
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.dropout(nn.functional.gelu(self.first(self.norm(x))))
        if self.counts:
            h = (h * self.count).sin()
            self.count += 1
        return x + self.dropout(self.second(h))


class Stack(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 16, counts: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, counts) for _ in range(blocks))

    def run(self, block: nn.Module, x: torch.Tensor) -> Any:
        return block(x)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = self.run(block, x)
        return {"loss": x.square().mean()}


class Checkpointed(Stack):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def run(self, block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=self.reentrant)


def gradients(run: Callable[..., Any], module: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The loss and all gradients, the inputs' among them."""
    module.zero_grad()
    batch = {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in batch.items()}
    loss = step(run, batch)["loss"].detach()
    tensors = [loss, *(p.grad for p in module.parameters()), *(t.grad for t in batch.values() if t.requires_grad)]
    return [t.clone() for t in tensors if t is not None]


def eager_gradients(module: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return gradients(module, module, batch)


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


def stack_with(**options: Any) -> tuple[Stack, ORTModule]:
    """Return the stack; without a budget it keeps all values."""
    torch.manual_seed(3)
    module = Stack()
    return module, ORTModule(module, rng="torch", recompute="none", **options)


BATCH = {"x": torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("share", slow_except([0.8, 0.6, 0.5], 0.5))
def test_a_share_is_met_and_changes_no_bit(share: float) -> None:
    module, plain = stack_with()
    expected = gradients(plain, module, BATCH)
    before = peak_of(lambda: step(plain, BATCH))
    module, model = stack_with(memory_budget_bytes=share)
    assert_same(gradients(model, module, BATCH), expected)
    assert peak_of(lambda: step(model, BATCH)) <= 1.02 * share * before
    for rows in (1, 7, 300):  # one plan for all sizes
        batch = {"x": torch.randn(rows, 16)}
        assert_same(gradients(model, module, batch), gradients(plain, plain.module, batch))


def test_bytes_hold_at_all_sizes() -> None:
    module, plain = stack_with()
    step(plain, BATCH)
    budget = int(0.6 * peak_of(lambda: step(plain, BATCH)))
    module, model = stack_with(memory_budget_bytes=budget)
    for rows in (256, 512, 800, 1024, 1031, 256):
        batch = {"x": torch.randn(rows, 16)}
        assert_same(gradients(model, module, batch), gradients(plain, plain.module, batch))
        assert peak_of(lambda batch=batch: step(model, batch)) <= 1.02 * budget  # type: ignore[misc]
    with pytest.raises(MemoryBudgetError, match=f"got: +{budget}"):
        step(model, {"x": torch.randn(32768, 16)})


def test_the_least_budget_of_the_error_can_be_met() -> None:
    least = min_budget(stack_with(memory_budget_bytes=1000)[1], BATCH)
    _, model = stack_with(memory_budget_bytes=least)
    step(model, BATCH)
    assert peak_of(lambda: step(model, BATCH)) <= 1.02 * least


def wide_with(module: type[nn.Module] = Stack, **options: Any) -> tuple[Any, ORTModule]:
    """Gradients that outweigh activations."""
    torch.manual_seed(3)
    stack = module(blocks=6, width=64)
    return stack, ORTModule(stack, rng="torch", **options)


WIDE = {"x": torch.randn(128, 64, generator=torch.Generator().manual_seed(0))}


def min_budget(model: ORTModule, batch: dict[str, torch.Tensor]) -> int:
    """Return the smallest budget that the error of an impossible budget gives."""
    with pytest.raises(MemoryBudgetError) as caught:
        step(model, batch)
    match = re.search(r"(\d+) bytes or more", str(caught.value))
    assert match is not None
    return int(match[1])


def test_gradients_are_accumulated_early_if_nothing_else_fits() -> None:
    module, plain = wide_with()
    expected = gradients(plain, module, WIDE)
    held = sum(p.nbytes for p in module.parameters())
    least = min_budget(wide_with(memory_budget_bytes=1)[1], WIDE)
    assert least < held  # all gradients together do not fit
    module, model = wide_with(memory_budget_bytes=least)
    assert_same(gradients(model, module, WIDE), expected)
    assert peak_of(lambda: step(model, WIDE)) <= 1.02 * least
    torch.manual_seed(1)
    wanted = [module.blocks[3].first.weight]
    (alone,) = torch.autograd.grad(model(**WIDE)["loss"], wanted)
    module.zero_grad()
    torch.manual_seed(1)
    model(**WIDE)["loss"].backward(inputs=wanted)
    assert [p.grad is not None for p in module.parameters()].count(True) == 1
    assert torch.equal(alone, wanted[0].grad)
    module, roomy = wide_with(memory_budget_bytes=2 * held)
    assert_same(gradients(roomy, module, WIDE), expected)
    assert "released" in str(model.report())
    assert "released" not in str(roomy.report())


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class WithFunction(Stack):
    def run(self, block: nn.Module, x: torch.Tensor) -> Any:
        return Double.apply(block(x))


def test_gradients_that_leave_together_count_together() -> None:
    """Backward cannot be split where a custom autograd function runs."""
    module, model = wide_with(WithFunction, memory_budget_bytes=1)
    assert min_budget(model, WIDE) > sum(p.nbytes for p in module.parameters())


def test_auto_keeps_everything_where_there_is_room() -> None:
    module, model = stack_with(memory_budget_bytes="auto")
    _, plain = stack_with()
    assert_same(gradients(model, module, BATCH), gradients(plain, plain.module, BATCH))
    assert "recompute: 0 values" in str(model.report())


@pytest.mark.parametrize("value", [0, -5, 1.5, 0.0, "half", True])
def test_no_budget(value: Any) -> None:
    with pytest.raises(OptionError, match="memory_budget_bytes"):
        ORTModule(Stack(), memory_budget_bytes=value)


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXTRAIN_MEMORY_BUDGET", "0.5")
    _, model = stack_with()
    step(model, BATCH)
    assert re.search(r"recompute: [1-9]", str(model.report()))


def test_readers_of_a_changed_buffer_are_not_recomputed() -> None:
    """The count is another one when backward runs."""
    results = []
    for share in (None, 0.7):
        torch.manual_seed(3)
        module = Stack(counts=True)
        model = ORTModule(module, rng="torch", memory_budget_bytes=share)
        results.append([t for _ in range(2) for t in gradients(model, module, BATCH)])
    assert_same(*results)


def test_some_gradients_only_and_several_results() -> None:
    """Other backward programs than the usual one compute the same values again."""

    class Two(Stack):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.blocks[0](x)
            return {"loss": self.blocks[1](h).mean(), "other": self.blocks[2](h).sum()}

    by_budget = []
    for share in (None, 0.7):
        torch.manual_seed(3)
        module = Two()
        model = ORTModule(module, rng="torch", memory_budget_bytes=share)
        both, one = [], []
        for wanted, into in ((("loss", "other"), both), (("other",), one)):
            module.zero_grad()
            torch.manual_seed(1)
            output = model(BATCH["x"])
            torch.stack([output[name] for name in wanted]).sum().backward()
            into += [p.grad for p in module.parameters()]
        torch.manual_seed(1)
        (alone,) = torch.autograd.grad(model(BATCH["x"])["loss"], [module.blocks[0].first.weight])
        by_budget.append([t for t in (*both, *one, alone) if t is not None])
    assert_same(*by_budget)


@pytest.mark.parametrize("reentrant", slow_except([False, True], False))
def test_checkpointed_regions_are_recomputed(reentrant: bool) -> None:
    """Without a budget. What is left above eager's peak are masks, which are not sampled again."""
    _, plain = stack_with()
    batch = {"x": BATCH["x"].clone().requires_grad_()}
    expected = gradients(plain, plain.module, batch)
    torch.manual_seed(3)
    other = Checkpointed(reentrant)
    model = ORTModule(other, rng="torch")
    assert_same(gradients(model, other, batch), expected)
    without = peak_of(lambda: step(plain, batch))
    masks = 4 * (4 + 1) * batch["x"].numel()
    eager, ours = peak_of(lambda: step(other, batch)), peak_of(lambda: step(model, batch))
    gradients_held = sum(p.nbytes for p in other.parameters())
    assert ours <= eager + masks + gradients_held < without, (ours, eager, without)


def test_steps_in_flight_do_not_share_memory() -> None:
    """The tensors that one step holds are unchanged while others run in memory that is filled with NaN at allocation.

    Also for a second backward: what forward kept is not written over in the first.
    """
    module, model = stack_with(memory_budget_bytes=0.6)
    alone = [gradients(model, module, {"x": BATCH["x"] * i}) for i in (1, 2)]
    for factor, results in zip((1, 2), alone, strict=True):  # a plan that is wrong may be so each time
        assert_matches(results, eager_gradients, module, {"x": BATCH["x"] * factor})
    module.zero_grad()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        torch.manual_seed(1)
        first = model(**BATCH)["loss"]
        torch.manual_seed(1)
        second = model(BATCH["x"] * 2)["loss"]
        losses = first.detach().clone(), second.detach().clone()
        steps = (first, second, first, second)
        both = [torch.autograd.grad(loss, list(module.parameters()), retain_graph=True) for loss in steps]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
    for loss, got, expected in zip(losses * 2, both, alone * 2, strict=True):
        assert_same([loss, *got], expected[: len(got) + 1])


class ReadLater(nn.Module):
    """Values that are read just after an op that could be written over them, once through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b = self.one(x), self.two(x)
        first = torch.relu(a) + a
        view = b.unsqueeze(0)
        second = torch.relu(b)
        return {"loss": (first + second + view.cos()).square().mean()}


def test_a_value_that_is_read_a_step_later_is_not_overwritten() -> None:
    torch.manual_seed(3)
    module = ReadLater()
    results = gradients(ORTModule(module, rng="torch"), module, BATCH)
    assert_matches(results, eager_gradients, module, BATCH)


def test_twice_the_batch_fits_in_eagers_memory_for_one() -> None:
    """With the bytes that eager holds for one batch as the budget, counted by the allocator's events."""
    module, make = model_and_batches("minilm")
    eager = peak_of(lambda: step(module, make(8, 48)))
    batch = make(16, 48)
    model = ORTModule(module, rng="torch", memory_budget_bytes=eager)
    results = gradients(model, module, batch)
    assert peak_of(lambda: step(model, batch)) <= 1.02 * eager
    assert_matches(results, eager_gradients, module, batch, together=True)


# The zoo


def result_of(entry: ZooModel, share: float | None) -> list[Result]:
    """All gradients, outputs and buffers at all sizes."""
    side = Side(entry, torch.float32, lambda module: ORTModule(module, rng="torch", memory_budget_bytes=share))
    results = []
    for size in entry.sizes:
        result = side.train(*size)
        kept = {name: None if t is None else t.clone() for name, t in result.gradients.items()}
        results.append((kept | result.buffers, list(leaves(result.output))))
    return results


@functools.lru_cache(maxsize=1)  # the shares of a model follow one another
def unbudgeted(entry: ZooModel) -> list[Result]:
    return result_of(entry, None)


def assert_zoo_equal(entry: ZooModel, share: float) -> None:
    """Compare at the fraction, or at the smallest possible budget if the fraction cannot be met."""
    try:
        got = result_of(entry, share)
    except MemoryBudgetError as error:
        least = re.search(r"(\d+) bytes or more", str(error))
        assert least is not None
        got = result_of(entry, min(share * (int(least[1]) + 1) / int(str(error.got)), 1.0))
    for (tensors, output), (others, expected) in zip(got, unbudgeted(entry), strict=True):
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            other = others[name]
            assert (tensor is None) == (other is None), name
            if tensor is not None and other is not None:
                assert torch.equal(tensor.nan_to_num(), other.nan_to_num()), f"{entry} {name}"
        for (path, value), (_, other) in zip(output, expected, strict=True):
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.nan_to_num(), other.nan_to_num()), f"{entry} output{path}"


@pytest.mark.parametrize("name", slow_except(["mlp", "distilbert", "lstm", "transformer-encoder"], "mlp"))
def test_a_model_of_the_zoo(name: str) -> None:
    assert_zoo_equal(next(m for m in ZOO if m.name == name), 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("entry", [m for m in ZOO if m.falls_back is None], ids=str)
def test_the_zoo(entry: ZooModel, share: float) -> None:
    assert_zoo_equal(entry, share)


@pytest.mark.slow  # the model of test_twice_the_batch_fits_in_eagers_memory_for_one
def test_models_of_several_layers() -> None:
    """A transformer, with dropout in its attention, at half its peak."""
    module, make = model_and_batches("minilm")
    batch = make(16, 48)
    plain = ORTModule(module, rng="torch", recompute="none")
    expected = gradients(plain, plain.module, batch)
    before = peak_of(lambda: step(plain, batch))
    model = ORTModule(module, rng="torch", memory_budget_bytes=0.5)
    assert_same(gradients(model, module, batch), expected)
    assert peak_of(lambda: step(model, batch)) <= 1.02 * 0.5 * before
