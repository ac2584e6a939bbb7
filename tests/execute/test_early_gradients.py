"""Gradients are released layer by layer while backward runs, as in eager."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.errors import KernelError
from onnxtrain.execute.early_gradients import StagedProgram
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.observe.allocations import peak_bytes, record
from onnxtrain.plan import backward_stages
from tests.reference import assert_each_no_worse
from tests.thinned import covering
from tests.zoo.checks import count_captures
from tests.zoo.entry import ZooModel
from tests.zoo.models import ZOO

WIDTH = 16


class Network(nn.Module):
    """Layers, one of them used twice, and an embedding tied to the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(tokens) * scale
        for layer in (*self.layers, self.layers[1]):
            x = torch.tanh(layer(x)) + x
        x = self.norm(x)
        return self.head(x), x.sum(-1)


Sides = tuple[tuple[nn.Module, nn.Module], tuple[nn.Module, nn.Module]]  # (what runs, whose parameters), ours, eager's


def sides(module: nn.Module | None = None) -> Sides:
    torch.manual_seed(3)
    eager = (module or Network()).double()
    mine = copy.deepcopy(eager)
    return (ORTModule(mine, rng="torch", early_gradients=True), mine), (eager, eager)


def inputs(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    return torch.randint(11, (rows, 5)), torch.rand(rows, 5, 1, dtype=torch.float64, requires_grad=True)


def both(compared: Sides, run: Callable[[nn.Module, nn.Module], Any]) -> None:
    """Run the same on ours and on eager; results and gradients must be equal up to rounding."""
    results = []
    for runs, module in compared:
        output = run(runs, module)
        results.append([*output, *(p.grad for p in module.parameters())])
    mine, eager = results
    assert_each_no_worse("result", mine, eager, eager)


def loss_of(output: Sequence[torch.Tensor]) -> torch.Tensor:
    return output[0].square().mean() + output[1].sin().sum()


def stages_of(model: nn.Module) -> int:
    """The number of stages of the latest backward."""
    (backward,) = engine_of(model).newest().unit._backwards.values()
    return len(backward.program.programs)


WORLDS = [pytest.param(1, "auto", False), pytest.param(2, "auto", True), pytest.param(2, False, False)]


@pytest.mark.parametrize(("budget", "world", "option", "staged"), covering([None, 1.0], WORLDS))
def test_auto_releases_early_where_several_processes_train(
    world: int, option: bool | str, staged: bool, budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxtrain.system.ranks.world_size", lambda: world)
    model = ORTModule(Network().double(), early_gradients=option, memory_budget_bytes=budget)
    loss_of(model(*inputs())).backward()
    (backward,) = engine_of(model).newest().unit._backwards.values()
    assert isinstance(backward.program, StagedProgram) == staged


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_auto_decides_again_when_a_process_group_appears_and_when_it_goes() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = ORTModule(Network().double())
    staged = []
    for has_group in (False, True, False):
        if has_group:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
        try:
            for _ in range(3):
                loss_of(model(*inputs())).backward()
        finally:
            if has_group:
                dist.destroy_process_group()
        staged.append([type(p.program) is StagedProgram for p in engine_of(model).newest().unit._backwards.values()])
    assert staged[:2] == [[False], [True]]
    assert count_captures(model) == 2


@pytest.mark.parametrize("budget", [None, 1.0])
def test_auto_keeps_independent_backwards(budget: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [tower(x) for tower in self.towers]

    monkeypatch.setattr("onnxtrain.system.ranks.world_size", lambda: 2)
    model = ORTModule(Towers(), memory_budget_bytes=budget)
    for output in model(torch.randn(2, 4)):
        output.square().sum().backward()


# The same numbers


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, marks=[] if entry.name in ("lstm", "tied-weights") else pytest.mark.slow)
        for entry in ZOO
        if not entry.falls_back
    ],
    ids=lambda entry: entry.name,
)
def test_gradients_are_bitwise_those_of_one_backward(entry: ZooModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_stages, "_MAX_STAGES", 1_000_000)
    module = entry.build(torch.float32)
    gradients = []
    for early in (False, True):
        mine = copy.deepcopy(module)
        model = ORTModule(mine, rng="torch", early_gradients=early, skip_padding="never")
        for batch, length in entry.sizes:
            call = entry.arguments(batch, length)
            torch.manual_seed(5)
            entry.loss(model(*call.args, **call.kwargs)).backward()  # .grad of one call is added to by the next
        gradients.append({name: p.grad for name, p in mine.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, plain in gradients[0].items():
        staged = gradients[1][name]
        assert (plain is None) == (staged is None), name
        assert plain is None or (staged is not None and torch.equal(staged, plain)), name


def test_there_are_stages() -> None:
    ((model, _), _) = sides()
    loss_of(model(*inputs())).backward()
    assert stages_of(model) >= 4


def test_small_gradients_share_a_stage() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(40)]
    model = ORTModule(nn.Sequential(nn.Linear(64, 4), *layers, nn.Linear(4, 64)), rng="torch", early_gradients=True)
    model(torch.ones(2, 64)).sum().backward()
    assert 2 < stages_of(model) <= backward_stages._MAX_STAGES


# Hooks


def test_hooks_fire_once_each_in_the_order_of_the_layers() -> None:
    orders = []
    for runs, module in sides():
        seen: list[str] = []
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda g, n=name, s=seen: s.append(f"gradient {n}"))
            parameter.register_post_accumulate_grad_hook(lambda p, n=name, s=seen: s.append(f"added {n}"))
        loss_of(runs(*inputs())).backward()
        orders.append(seen)
    mine, eager = orders
    assert sorted(mine) == sorted(eager)
    layers = [[name for name in seen if name.startswith("added") and "weight" in name] for seen in orders]
    assert layers[0] == layers[1]
    for seen in orders:  # a gradient is accumulated before that of the layer below is computed
        assert seen.index("added layers.2.weight") < seen.index("gradient layers.0.weight")


def test_a_hook_may_replace_the_gradient() -> None:
    def run(runs: nn.Module, module: nn.Module) -> list[Any]:
        module.get_parameter("layers.1.weight").register_hook(lambda gradient: gradient * 3)
        loss_of(runs(*inputs())).backward()
        return []

    both(sides(), run)


def test_an_optimizer_that_runs_in_backward() -> None:
    """A parameter is updated as soon as its gradient is computed: later stages of backward must not read it."""

    def run(runs: nn.Module, module: nn.Module) -> list[Any]:
        def step(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.5)
            parameter.grad = None

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss_of(runs(*inputs())).backward()
        return [p.detach() for p in module.parameters()]

    both(sides(), run)


def test_a_hook_that_changes_a_tensor_of_a_later_stage_is_refused() -> None:
    for runs, module in sides():
        first = module.get_parameter("layers.0.weight")

        def change(parameter: torch.Tensor, first: torch.Tensor = first) -> None:
            with torch.no_grad():
                first.zero_()

        module.get_parameter("norm.weight").register_post_accumulate_grad_hook(change)
        with pytest.raises((RuntimeError, KernelError), match=r"in ?place"):
            loss_of(runs(*inputs())).backward()


# Autograd


def test_backward_for_some_inputs() -> None:
    def run(runs: nn.Module, module: nn.Module) -> list[Any]:
        tokens, scale = inputs()
        wanted = [module.get_parameter("layers.2.weight"), scale, module.get_parameter("table.weight")]
        gradients = [*torch.autograd.grad(loss_of(runs(tokens, scale)), wanted)]
        assert all(p.grad is None for p in module.parameters())
        loss_of(runs(tokens, scale)).backward(inputs=[module.get_parameter("norm.weight")])
        return [*gradients, scale.grad]

    both(sides(), run)


def test_stages_whose_gradients_are_not_needed_do_not_run() -> None:
    ((model, module), _) = sides()
    loss_of(model(*inputs())).backward()
    (backward,) = engine_of(model).newest().unit._backwards.values()
    ran = []
    for number, program in enumerate(backward.program.programs):
        run = program.run
        program.run = lambda *given, run=run, number=number: (ran.append(number), run(*given))[1]
    loss_of(model(*inputs())).backward(inputs=[module.get_parameter("norm.weight")])
    assert ran == list(range(len(ran)))
    assert len(ran) < len(backward.program.programs)


def test_a_second_backward_through_a_retained_graph() -> None:
    def run(runs: nn.Module, module: nn.Module) -> list[Any]:
        loss = loss_of(runs(*inputs()))
        loss.backward(retain_graph=True, inputs=[module.get_parameter("norm.weight")])  # ends before the last stage
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return []

    both(sides(), run)


def test_two_forwards_in_flight() -> None:
    def run(runs: nn.Module, module: nn.Module) -> list[Any]:
        first, second = runs(*inputs(3)), runs(*inputs(2))
        loss_of(first).backward()
        third = loss_of(runs(*inputs(4)))
        (third + loss_of(second)).backward()
        return []

    both(sides(), run)


def test_an_unused_output() -> None:
    def run(runs: nn.Module, module: nn.Module) -> list[Any]:
        runs(*inputs())[1].sum().backward()
        return []

    both(sides(), run)


@pytest.mark.filterwarnings("ignore:create_graph=True")
def test_a_gradient_of_gradients() -> None:
    def run(runs: nn.Module, module: nn.Module) -> list[Any]:
        parameters = list(module.parameters())
        first = torch.autograd.grad(loss_of(runs(*inputs())), parameters, create_graph=True)
        return list(torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), parameters))

    both(sides(), run)


def test_a_gradient_scaler_and_clipping() -> None:
    def run(runs: nn.Module, module: nn.Module) -> list[Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                loss = loss_of(runs(*inputs()))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in module.parameters()]

    both(sides(), run)


def test_a_hook_that_raises_leaves_the_next_step_intact() -> None:
    def run(runs: nn.Module, module: nn.Module) -> list[Any]:
        def fail(gradient: torch.Tensor) -> None:
            raise ValueError("mine")

        handle = module.get_parameter("layers.1.weight").register_hook(fail)
        with pytest.raises(ValueError, match="mine"):
            loss_of(runs(*inputs())).backward()
        handle.remove()
        module.zero_grad()
        loss_of(runs(*inputs())).backward()
        return []

    both(sides(), run)


# Without stages


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


class WithFunction(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.last(torch.tanh(self.first(x))), x)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda y, x: (Double.apply(y), y), "a custom autograd function"),
        (lambda y, x: (y, x.view(-1)), "an output may be a view"),
    ],
    ids=["autograd-function", "view"],
)
def test_a_backward_without_stages_is_logged_and_equals_eager(
    function: Callable[..., Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onnxtrain")

    def run(runs: nn.Module, module: nn.Module) -> list[Any]:
        x = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH).requires_grad_()
        runs(x)[0].square().sum().backward()
        return [x.grad]

    both(sides(WithFunction(function)), run)
    assert f"at the end of backward: {why}" in caplog.text


# Bytes


def test_the_peak_of_a_step_that_accumulates_gradients() -> None:
    """Early gradients save all gradients but one layer's and the share that waits for its stage."""
    width, layers = 256, 12
    bytes_of_layer = 4 * width * (width + 1)
    peaks = []
    for early in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())])
        model = ORTModule(module, rng="torch", early_gradients=early)
        x = torch.rand(2, width)

        def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
            model(x).sum().backward()

        step()
        step()
        peaks.append(peak_bytes(record(step).allocations))
    activations = 3 * layers * 2 * width * 4  # far less than a layer's gradient
    assert peaks[0] >= layers * bytes_of_layer
    assert peaks[1] <= 2 * bytes_of_layer + activations
