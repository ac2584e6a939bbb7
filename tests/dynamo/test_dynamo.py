"""torch.compile(backend="onnxtrain"): each graph that torch.compile finds is captured and differentiated here."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule, errors
from onnxtrain.capture.export import patches
from onnxtrain.frontend import dynamo
from onnxtrain.optim import FusedAdam
from tests.reference import assert_each_no_worse, assert_matches
from tests.thinned import slow_except
from tests.zoo.checks import Comparison
from tests.zoo.entry import ZooModel
from tests.zoo.models import ZOO

WIDTH = 8


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    """The cache of torch.compile is for the whole process."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    torch.compiler.reset()  # leaves compiled functions among the globals of modules
    dynamo._ENGINES.clear()


@pytest.fixture(autouse=True)
def no_fallbacks() -> Iterator[None]:
    """Fail if a graph runs in PyTorch, unless the test expects it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in PyTorch")
        yield


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="onnxtrain", options=options or None)


def train(module: Callable[..., Any], parameters: list[nn.Parameter], *args: Any) -> list[torch.Tensor]:
    """The output, the gradients of the parameters and of the first argument."""
    for parameter in parameters:
        parameter.grad = None
    args = tuple(a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args)
    torch.manual_seed(5)
    output = module(*args)
    (output.double() * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum().backward()
    gradients = [p.grad for p in parameters]
    return [output.detach(), *(g for g in gradients if g is not None)]


class Three:
    """Compiled, eager, and eager in float64, with equal parameters."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.eager = module
        self.ours = copy.deepcopy(module)
        self.exact = copy.deepcopy(module).double()
        self.run = compiled(self.ours, **options)

    def check(self, *args: Any) -> None:
        doubled = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        got = train(self.run, list(self.ours.parameters()), *args)
        eager = train(self.eager, list(self.eager.parameters()), *args)
        exact = train(self.exact, list(self.exact.parameters()), *doubled)
        assert_each_no_worse("result", got, eager, exact)
        assert_each_no_worse("buffers", *(dict(m.named_buffers()) for m in (self.ours, self.eager, self.exact)))


class Talks(nn.Module):
    """Prints, reads an element, counts its calls, and branches on elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.first(x).relu()
        print("hidden of", len(x))  # noqa: T201  as models do
        scale = hidden.mean().item()
        if hidden.sum() > 3 * len(x):
            hidden = self.second(hidden)
        else:
            hidden = self.second(hidden).tanh()
        return hidden * scale


def test_python_between_graphs_trains_as_in_eager() -> None:
    three = Three(Talks())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for factor in (1.0, 9.0):
            for rows in (2, 3, 5, 9):
                three.check(torch.randn(rows, WIDTH) * factor)
    assert three.ours.calls == three.eager.calls == 8
    assert printed.getvalue().count("hidden of 9") == 6
    assert dynamo.captures() >= 4  # forward up to print, up to item, and both branches


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(x.shape[0] * x.shape[1], WIDTH)
        return x + self.down(nn.functional.gelu(self.up(self.norm(rows)))).reshape(x.shape)  # type: ignore[no-any-return]


def test_sizes_make_at_most_one_further_capture() -> None:
    three = Three(Block())
    capture_counts = []
    for rows in (2, 3, 5, 9):
        three.check(torch.randn(rows, 4, WIDTH))
        capture_counts.append(dynamo.captures())
    assert capture_counts[0] == 1
    assert capture_counts[-1] <= 2, capture_counts


def test_a_graph_in_which_no_size_stands_serves_all_sizes() -> None:
    three = Three(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 1)))
    for rows in (2, 3, 1, 0, 9):
        three.check(torch.randn(rows, WIDTH))
    assert dynamo.captures() <= 3  # 0 and 1 may be captures of their own
    three.check(torch.randn(4, WIDTH))


def test_equal_graphs_share_one_capture() -> None:
    three = Three(nn.Sequential(*(Block() for _ in range(4))))
    parts = [compiled(layer) for layer in three.ours]
    three.run = lambda x: functools.reduce(lambda h, part: part(h), parts, x)
    three.check(torch.randn(2, 3, WIDTH, requires_grad=True))
    assert dynamo.captures() == 1
    assert len(dynamo.reports()) == 1


def test_graphs_that_differ_in_a_constant_are_not_shared() -> None:
    x = torch.randn(3)
    functions = (lambda x: x * 2.0, lambda x: x * 3.0, lambda x: x * 4, lambda x: x * 5, lambda x: x * True)
    kept = [compiled(function) for function in functions]  # a freed graph is not shared
    for run, function in zip(kept, functions, strict=True):
        assert torch.equal(run(x), function(x))


def test_graphs_of_other_options_are_not_shared() -> None:
    kept = [compiled(lambda x: x * 2, rng="torch"), compiled(lambda x: x * 2, rng="fast")]
    for run in kept:
        run(torch.ones(3))
    assert dynamo.captures() == 2


class Keeps(torch.autograd.Function):
    """Its backward is not the derivative of its forward, so that a lost backward shows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor + 0.1 * x, None


class Regions(nn.Module):
    """Dynamo's own forms: a custom function, a checkpoint, autocast, no_grad; and buffers that are changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def part(self, h: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(h)).tanh()  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        h = self.norm(self.linear(x)) * factor
        h = Keeps.apply(h, 2.0)
        h = checkpoint(self.part, h, use_reentrant=False)
        with torch.no_grad():
            mean = h.mean()
        return h.view(x.shape[0], -1) + mean  # type: ignore[no-any-return]


def test_dynamos_own_regions() -> None:
    three = Three(Regions(), rng="torch")
    for step, rows in enumerate((2, 3, 5)):
        three.check(torch.randn(rows, 4), 3 + step)
    assert 0 < dynamo.captures() <= 2
    operators = {node.op_type for engine in dynamo._ENGINES.values() for node in engine.newest().captured.model.graph}
    assert {"PythonOp", "BitmaskDropout", "Detach"} <= operators


def test_two_forwards_of_a_custom_function_before_backward() -> None:
    module = Regions().eval()
    run = compiled(module)

    def gradients(run: Callable[..., Any], xs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        torch.autograd.backward([run(x, 2).sum() for x in xs])
        return [x.grad for x in xs]

    xs = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    assert_matches(gradients(run, xs), gradients, module, xs)


def test_a_checkpointed_region_that_runs_in_pytorch_keeps_its_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own fallback for such a region samples other masks in backward."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise errors.CaptureError("not today")

    monkeypatch.setattr("onnxtrain.frontend.engine.capture", refuse)
    module = Regions()
    run = compiled(copy.deepcopy(module))
    x = torch.randn(64, 4)
    with pytest.warns(UserWarning, match="runs in PyTorch") as caught:
        got = train(run, list(run._orig_mod.parameters()), x, 2)  # type: ignore[attr-defined]
    assert len([w for w in caught if "runs in PyTorch" in str(w.message)]) == 1
    assert_matches(got, lambda module, x: train(module, list(module.parameters()), x, 2), module, x)


@pytest.mark.everywhere
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast(inside: bool) -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
                h = self.linear(x)
            return self.linear(h.to(self.linear.weight.dtype)) + h.dtype.itemsize  # type: ignore[no-any-return]

    three = Three(Casts())
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        for rows in (2, 3):
            three.check(torch.randn(rows, WIDTH))
    assert dynamo.captures() >= 1


def test_inference_and_training() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    run, x = compiled(module, rng="torch"), torch.randn(3, WIDTH)

    def seeded(run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(2)
        return run(x)  # type: ignore[no-any-return]

    for mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        for training in (True, False):
            module.train(training)
            with mode():
                got = seeded(run, x)
            assert_matches(got, seeded, module, x)
            assert got.requires_grad == (mode is contextlib.nullcontext)
    assert dynamo.captures() >= 4


def test_a_graph_without_inputs() -> None:
    run = compiled(lambda: torch.full((3,), 2.0).cumsum(0))
    for _ in range(2):
        assert torch.equal(run(), torch.tensor([2.0, 4.0, 6.0]))
    assert dynamo.captures() == 1


def test_numbers_that_change_are_no_constants() -> None:
    def scaled(x: torch.Tensor, count: int, factor: float) -> torch.Tensor:
        return (x * factor).repeat(count, 1) * count / factor

    def differentiated(run: Callable[..., Any], x: torch.Tensor, *numbers: float) -> tuple[torch.Tensor, torch.Tensor]:
        y = run(x, *numbers)
        weight = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
        return y, torch.autograd.grad(y, x, weight)[0]

    run = compiled(scaled)
    for count, factor in ((3, 0.5), (4, 0.25), (5, 0.75), (8, 1.5), (9, -2.0), (1, 3.0), (0, 4.0)):
        x = torch.randn(2, 3, requires_grad=True)
        assert_matches(differentiated(run, x, count, factor), differentiated, scaled, x, count, factor)
    assert dynamo.captures() <= 4  # the first numbers, others, and torch.compile's own graphs for 0 and 1


def test_results_that_are_sizes_and_views() -> None:
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        return x[1:], x.shape[0] * 2, x * 2

    run = compiled(parts)
    for rows in (3, 4, 5):
        x = torch.randn(rows, 2)
        view, size, twice = run(x)
        assert size == 2 * rows
        view += 1  # a view of x, as in eager
        assert torch.equal(view, x[1:])
        assert twice.shape == x.shape


def test_options_and_their_errors() -> None:
    with pytest.raises(Exception, match=r"(?s)OptionError.*Unknown option.*speed"):
        compiled(lambda x: x + 1, speed=3)(torch.ones(2))
    _forget()
    with pytest.raises(Exception, match=r"(?s)OptionError.*no modes"):
        torch.compile(lambda x: x + 2, backend="onnxtrain", mode="max-autotune")(torch.ones(2))
    _forget()
    output = torch.compile(lambda x: x + 3, backend="onnxrt", fullgraph=True)(torch.ones(2))
    assert torch.equal(output, 4 * torch.ones(2))
    assert {"onnxtrain", "onnxrt"} <= set(torch.compiler.list_backends())


def test_a_graph_that_cannot_be_captured_runs_in_pytorch_with_one_warning() -> None:
    run = compiled(lambda x: torch.nested.nested_tensor([x, x]).to_padded_tensor(0.0) + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run(torch.ones(2, 2))
    assert len([w for w in caught if "runs in PyTorch" in str(w.message)]) <= 1

    run = compiled(lambda x: (x * 2).to_sparse().to_dense() * 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(run(torch.eye(2)), 6 * torch.eye(2))
    texts = [str(w.message) for w in caught if "runs in PyTorch" in str(w.message)]
    assert len(texts) <= 1, texts


# The zoo


def compare_compiled(entry: ZooModel) -> Comparison:
    return Comparison(entry, wrap=lambda module: compiled(module, rng="torch"))


@pytest.mark.parametrize(
    "name", slow_except(["mlp", "tied-weights", "no-grad-region", "weight-norm-hook"], "tied-weights", "no-grad-region")
)
def test_models_of_the_zoo(name: str) -> None:
    entry = next(model for model in ZOO if model.name == name)
    compare = compare_compiled(entry)
    for sizes in entry.sizes:
        compare.train(*sizes)
    assert dynamo.captures() > 0


@pytest.mark.slow
@pytest.mark.parametrize("entry", ZOO, ids=str)
def test_all_models_of_the_zoo(entry: ZooModel) -> None:
    compare = compare_compiled(entry)
    for sizes in entry.sizes:
        compare.train(*sizes)
    compare.change(nn.Module.eval)
    with torch.no_grad():
        compare.forward(*entry.sizes[0])


# ORTModule in pieces


def in_pieces(module: nn.Module, **options: Any) -> ORTModule:
    return ORTModule(module, rng="torch", **options)


def test_modules_that_are_not_one_graph_run_with_graph_breaks() -> None:
    module = Talks()
    ours = in_pieces(copy.deepcopy(module))
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        for rows in (2, 3, 5):
            x = torch.randn(rows, WIDTH)
            got = train(ours, list(ours.parameters()), x)
            assert_matches(got, lambda module, x: train(module, list(module.parameters()), x), module, x)
    (text,) = [str(w.message) for w in caught if "runs in PyTorch" in str(w.message)]
    assert "Talks" in text
    assert "in pieces between graph breaks" in text
    assert dynamo.captures() >= 4
    assert ours.calls == 3


def test_pieces_can_be_switched_off() -> None:
    ours = in_pieces(Talks(), pieces=False)
    with (
        pytest.warns(UserWarning, match="runs in PyTorch, not as an ONNX graph"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        ours(torch.randn(2, WIDTH)).sum().backward()
    assert dynamo.captures() == 0


def test_modules_that_are_refused_beforehand_run_without_graphs() -> None:
    module = Block()
    module.up.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="not as an ONNX graph: submodules have hooks"):
        in_pieces(module)(torch.randn(2, 3, WIDTH))
    assert dynamo.captures() == 0


def test_a_compiled_part_of_a_wrapped_module_is_a_part_of_its_graph() -> None:
    inner = Block()
    x = torch.randn(2, 3, WIDTH)
    run = compiled(inner)
    assert_matches(run(x), inner, x)
    assert not patches.is_capturing()
    ours = ORTModule(nn.Sequential(inner, nn.ReLU()))
    assert_matches(ours(x), nn.Sequential(inner, nn.ReLU()), x)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compiled_training_step_traces_nothing_of_onnxtrain(wrapped: bool) -> None:
    """A loop that compiles its whole step calls backward and the optimizer under torch.compile's tracer."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    ours = ORTModule(copy.deepcopy(module)) if wrapped else copy.deepcopy(module)
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        traced.append(str(graph.code))
        return graph if wrapped else dynamo.backend(graph, inputs)

    def steps(model: nn.Module, x: torch.Tensor, compile_step: Callable[..., Any]) -> torch.Tensor:
        optimizer = FusedAdam(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = compile_step(step)
        return torch.stack([run(x, torch.tensor([0, 1, 2, 1, 0])).detach() for _ in range(3)])

    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    losses = steps(ours, x, lambda step: torch.compile(step, backend=backend))
    assert_matches(losses, steps, module, x, lambda step: step)
    assert len(traced) == 1
    assert "cross_entropy" in traced[0]
