"""Under `rng="torch"` a graph samples the same random numbers as eager, in the same order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_each_no_worse, assert_matches
from tests.thinned import slow_but_every, slow_except
from tests.zoo.checks import Comparison, compared
from tests.zoo.entry import Call, Draw, ZooModel, mean_square

WIDTH = 6


def sequences(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, length, WIDTH, grad=True),))


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x))


def model(function: Callable[[torch.Tensor], torch.Tensor]) -> ZooModel:
    return ZooModel("function", lambda: Function(function), sequences, mean_square)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], 2, 3).transpose(1, 2)


def unused(x: torch.Tensor) -> torch.Tensor:
    F.dropout(x, 0.5)  # its result is unused, but it samples
    return F.dropout(x, 0.5)


def pixels(x: torch.Tensor) -> torch.Tensor:
    """Two channels [2 * length, 2] of each sequence, that are stored one pixel after the other."""
    return F.pixel_shuffle(torch.cat([x, x], 2)[:, :, None, :8].permute(0, 3, 1, 2), 2)


DROPOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in place of a transpose": lambda x: F.dropout((x * 1).mT, 0.5, training=True, inplace=True),
    "one": lambda x: F.dropout(x, 0.3),
    "two of one tensor": lambda x: F.dropout(x, 0.3) - F.dropout(x, 0.3),
    "in another order": lambda x: x * F.dropout(x.tanh(), 0.1) + F.dropout(x, 0.7),
    "never": lambda x: F.dropout(x, 0.0) * 2 + F.dropout(x, 0.5),
    "always": lambda x: F.dropout(x, 1.0) + F.dropout(x, 0.5) + x,
    "unused": unused,
    "of a constant": lambda x: x * F.dropout(torch.ones(x.shape[0], 1, 1, dtype=x.dtype), 0.5),
    "of a constant of fixed size": lambda x: x * F.dropout(torch.ones(WIDTH, dtype=x.dtype), 0.5),
    "of a transpose": lambda x: F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1) * x,
    "of attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), dropout_p=0.3),
    "around attention": lambda x: F.dropout(
        F.scaled_dot_product_attention(heads(F.dropout(x, 0.2)), heads(x), heads(x), dropout_p=0.3), 0.4
    ),
    "in place": lambda x: F.dropout(x * 2, 0.5, inplace=True),
    "of shuffled pixels": lambda x: F.dropout(pixels(x), 0.5),
}


def filled(x: torch.Tensor) -> torch.Tensor:
    """PyTorch samples in memory order, not in the order of the tensor's dimensions."""
    values = x.clone().bernoulli_(0.4)
    for fill in ("uniform_", "exponential_", "log_normal_", "cauchy_"):
        values = values * getattr(torch.empty_like(x), fill)()
    return values + torch.empty_like(x).geometric_(0.3)


# Sampled in other ways: whether captured or not, the numbers are eager's.
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels": lambda x: F.dropout2d(x[:, None], 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature alpha": lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
    "uniform noise": lambda x: x * torch.rand_like(x),
    "normal noise": lambda x: x + torch.randn_like(x) * 0.1,
    "normal of sizes": lambda x: x * torch.randn(x.shape[0], 1, 1, dtype=x.dtype),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli of a constant": lambda x: x * torch.bernoulli(torch.full((WIDTH,), 0.5)),
    "whole numbers like another tensor": lambda x: x * torch.randint_like(x, 5),
    "whole numbers widened": lambda x: x * torch.randperm(x.shape[1])[:, None] + torch.randint_like(x, 4).to(x.dtype),
    "slopes": lambda x: F.rrelu(x, training=True),
    "slopes in place": lambda x: F.rrelu_(x * 1, training=True),
    "randint": lambda x: x * torch.randint(0, 3, (x.shape[1], 1)),
    "permutation": lambda x: x[torch.randperm(x.shape[0])] * x,
    "in place uniform": lambda x: x * torch.empty_like(x).uniform_(0.5, 1.5),
    "in place normal": lambda x: x * torch.empty_like(x).normal_(1.0, 0.5),
    "in place in the order of memory": lambda x: x.mT * filled(torch.empty_like(x.mT)),
    "in place of a view": lambda x: x.mT * torch.empty_like(x).mT.uniform_(),
    "in place, every other element": lambda x: x[..., ::2] * torch.ones_like(x)[..., ::2].uniform_(),
    "in place by another algorithm": lambda x: x.mT * torch.empty_like(x.mT).normal_(),
    "normal of a transpose": lambda x: x.mT * torch.randn_like(x.mT) * torch.normal(x.mT.detach(), 1.0),
    "uniform of a transpose": lambda x: x.mT * torch.rand_like(x.mT) * torch.randint_like(x.mT, 9),
    "in place by a tensor": lambda x: x.mT * torch.empty_like(x.mT).bernoulli_(torch.full_like(x[0, 0], 0.5)[:, None]),
    "alpha in the order of memory": lambda x: x.mT * F.alpha_dropout(x.mT, 0.5, training=True),
    "alpha of an expanded tensor": lambda x: x * F.alpha_dropout(x.mean(0).expand(x.shape), 0.5, training=True),
    "alpha in place": lambda x: F.alpha_dropout((x * 1).mT, 0.5, training=True, inplace=True),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True) * x,
    "randomized relu": lambda x: F.rrelu(x, training=True),
    "dropout of what is pooled under no_grad": lambda x: (
        x * F.dropout(torch.no_grad()(F.max_pool1d)(x.mT, 2), 0.5).sum(1)[:, None, :1]
    ),
    "dropout of what is pooled with a gradient": lambda x: F.dropout(F.max_pool1d(x.mT, 2), 0.5),
    "dropout of what is pooled without a gradient": lambda x: (
        x * F.dropout(F.max_pool1d(x.detach().mT, 2), 0.5).sum(1)[:, None, :1]
    ),
    "noise and dropout": lambda x: F.dropout(x + torch.randn_like(x), 0.5) * torch.rand_like(x),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_samples_eagers_masks(name: str) -> None:
    with compared(model(DROPOUTS[name])) as compare:
        for sizes in ((3, 4), (1, 5), (2, 40)):
            compare.train(*sizes)


FEW = (
    *("bernoulli", "randint", "in place in the order of memory", "in place, every other element"),
    *("normal of a transpose", "in place by a tensor", "alpha of an expanded tensor", "gumbel"),
    "dropout of what is pooled under no_grad",
)


@pytest.mark.parametrize("name", slow_except(OTHERS, *FEW))
def test_other_random_numbers_are_eagers(name: str) -> None:
    compare = Comparison(model(OTHERS[name]))
    for sizes in ((3, 4), (1, 5), (2, 40)):
        compare.train(*sizes)


class LayerDrop(nn.Module):
    """Sample a number for each layer, also if no layer is ever dropped, as BART does before transformers 5.18."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layerdrop = layerdrop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training:
                sample = torch.rand([])
                if sample < self.layerdrop:
                    continue
            x = F.dropout(layer(x), 0.2, self.training)
        return x


class LayerDropByPython(LayerDrop):
    """As MusicGen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and random.uniform(0, 1) < self.layerdrop:
                continue
            x = F.dropout(layer(x), 0.2, self.training)
        return x


@pytest.mark.parametrize("layerdrop", [-0.1, 0.0, 1.1])
def test_layers_that_are_never_or_always_dropped_by_pythons_numbers(layerdrop: float) -> None:
    with compared(ZooModel("layerdrop", lambda: LayerDropByPython(layerdrop), sequences, mean_square)) as compare:
        states = []
        for side in compare.sides():
            random.seed(3)
            for sizes in ((3, 4), (2, 5), (3, 4)):
                side.call(*sizes)
            states.append(random.getstate())
        assert states[0] == states[1] == states[2]
        compare.train(3, 4)
        compare.train(2, 5)


NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda x: x * random.random(),
    "uniform": lambda x: x - random.uniform(-3.0, 2.0) / 2,
    "gauss": lambda x: torch.full_like(x, random.gauss(0.0, 2.0)) * x,
    "twice": lambda x: x * random.random() + random.random(),
    "an integer": lambda x: x * random.randint(2, 9),
    "a shift": lambda x: torch.roll(x, 1) * random.betavariate(0.4, 0.4),
    "unread": lambda x: x if random.random() < 2.0 else -x,
}


@pytest.mark.parametrize("name", slow_but_every(2, NUMBERS))
def test_pythons_numbers_are_sampled_in_each_step(name: str) -> None:
    entry = ZooModel(name, lambda: Function(NUMBERS[name]), sequences, mean_square)
    with compared(entry) as compare:
        outputs, states = [], []
        for side in compare.sides():
            random.seed(3)
            outputs.append([side.call(3, 4)[1].detach() for _ in range(5)])
            states.append(random.getstate())
        for got, eager, exact in zip(*outputs, strict=True):
            assert_each_no_worse(name, got, eager, exact)
        assert states[0] == states[1] == states[2]
        assert name == "unread" or not torch.equal(outputs[0][0], outputs[0][1])
        assert engine_of(compare.got.run).captures == 1


@pytest.mark.parametrize("layerdrop", [0.0, 1.0])
def test_layers_that_are_never_or_always_dropped_sample(layerdrop: float) -> None:
    with compared(ZooModel("layerdrop", lambda: LayerDrop(layerdrop), sequences, mean_square)) as compare:
        compare.train(3, 4)
        compare.train(2, 5)


def changed_by_a_view(x: torch.Tensor) -> torch.Tensor:
    sample = torch.rand([])
    sample.view(1).sub_(9)
    return x if sample < 0.0 else -x


COMPARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "changed by a view": changed_by_a_view,
    "normal": lambda x: x if torch.randn([]) < 0.0 else -x,
    "between": lambda x: x if torch.rand([]) < 0.1 else -x,
}


@pytest.mark.parametrize(
    "name", ["changed by a view", *(pytest.param(n, marks=pytest.mark.slow) for n in ("normal", "between"))]
)
def test_comparisons_of_samples_that_vary_are_no_part_of_a_graph(name: str) -> None:
    entry = ZooModel(name, lambda: Function(COMPARED[name]), sequences, mean_square, falls_back="data-dependent")
    with compared(entry) as compare:
        for _ in range(3):
            compare.train(3, 4)


def test_a_layerdrop_that_changes_is_captured_again() -> None:
    module = LayerDrop(0.0)
    ours, x = ORTModule(module, rng="torch", fallback_policy="FALLBACK_DISABLE"), torch.randn(5, WIDTH)
    assert not torch.equal(ours(x), x)
    module.layerdrop = 1.0
    assert torch.equal(ours(x), x)


class OnlySometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.inner(x), 0.5, self.training)  # type: ignore[no-any-return]


def runs(module: nn.Module, x: torch.Tensor, count: int) -> list[Any]:
    """Return the outputs of consecutive steps from a seed, and a number sampled after them."""
    torch.manual_seed(5)
    outputs = []
    for _ in range(count):
        out = module(x)
        out.sum().backward()
        outputs.append(out.detach())
    return [*outputs, torch.rand(1)]


def test_every_step_samples_new_masks_that_follow_the_seed() -> None:
    module, x = OnlySometimes(), torch.randn(5, WIDTH)
    ours = ORTModule(module, rng="torch")
    first, second = runs(ours, x, 4), runs(ours, x, 4)
    assert_matches(first, runs, module, x, 4)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])


def test_capture_samples_nothing() -> None:
    """The first call, which captures, advances the generator as eager does; so does a call that falls back."""
    compare = Comparison(model(DROPOUTS["one"]))
    compare.train(3, 4)
    compare = Comparison(model(lambda x: F.dropout(x, 0.5) if x.sum() > -99 else x))
    compare.train(3, 4)


def test_a_restored_random_state_repeats_the_step() -> None:
    module, x = ORTModule(OnlySometimes(), rng="torch"), torch.randn(5, WIDTH)
    module(x)
    state = torch.get_rng_state()
    first = module(x)
    torch.set_rng_state(state)
    assert torch.equal(module(x), first)


@pytest.mark.parametrize("rng", ["torch", "fast"])
def test_backward_uses_the_mask_of_its_own_forward(rng: str) -> None:
    """This holds after another forward, and for a second backward."""
    module, x = ORTModule(OnlySometimes(), rng=rng), torch.randn(5, WIDTH)
    module.get_submodule("inner").requires_grad_(False)
    module.get_parameter("inner.weight").data.copy_(torch.eye(WIDTH))
    x.requires_grad_()
    first, second = module(x), module(x)
    for out in (first, second):
        dropped = out.detach() == 0
        for _ in range(2):
            (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
            assert torch.equal(gradient, 2.0 * ~dropped)
    assert not torch.equal(first == 0, second == 0)


def test_fast_masks_are_of_the_right_rate_and_follow_the_seed() -> None:
    module, x = ORTModule(OnlySometimes(), rng="fast"), torch.randn(4000, WIDTH)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(module(x).detach())
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    rate = (outputs[0] == 0).double().mean().item()
    assert abs(rate - 0.5) < 0.02, "6 standard deviations of the mean of 24000 elements"
    module.eval()
    assert not (module(x) == 0).any()


# Random numbers of Python and numpy

PYTHONS: dict[str, Callable[[Any], float]] = {
    "random": lambda m: random.random(),
    "numpy": lambda m: float(np.random.rand()),  # noqa: NPY002  models do so
    "a generator of its own": lambda m: m.own.random(),
    "numpy's generator": lambda m: m.new.random(),
    "numpy's old generator": lambda m: m.old.rand(),
}


NUMPYS, PYTHONS_OWN, TORCHS = np.random.default_rng(5), random.Random(5), torch.Generator()
OUTSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numpy": lambda x: x * torch.tensor(NUMPYS.random(WIDTH), dtype=x.dtype),
    "Python": lambda x: x * PYTHONS_OWN.random(),
    "PyTorch": lambda x: x * torch.rand(WIDTH, generator=TORCHS, dtype=x.dtype),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_generators_outside_of_the_module_are_not_frozen(name: str) -> None:
    ours, x = ORTModule(Function(OUTSIDE[name]), rng="torch", fallback_policy="FALLBACK_DISABLE"), torch.ones(2, WIDTH)
    with pytest.raises(CaptureError, match=r"random|generator"):
        ours(x)


REASONS = {"random": "runs the user's Python"}  # a node of the graph samples it


class DropsLayers(nn.Module):
    """Drop each layer with probability 1/2, by Python's or numpy's random numbers."""

    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.draw = draw
        self.own, self.new, self.old = random.Random(5), np.random.default_rng(5), np.random.RandomState(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.draw(self) < 0.5 else x
        return x


@pytest.mark.parametrize("name", PYTHONS)
def test_layers_dropped_by_pythons_numbers(name: str) -> None:
    """A graph would drop the same layers in every step."""
    entry = ZooModel(
        name, lambda: DropsLayers(PYTHONS[name]), sequences, mean_square, falls_back=REASONS.get(name, "generator")
    )
    with compared(entry) as compare:
        outputs, after = [], []
        for side in compare.sides():
            random.seed(3)
            np.random.seed(3)  # noqa: NPY002
            outputs.append([side.call(3, 4)[1].detach().float() for _ in range(5)])
            after.append([draw(side.module) for draw in PYTHONS.values()])
        assert all(map(torch.equal, outputs[0], outputs[1]))
        assert after[0] == after[1] == after[2]


def forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return F.dropout(x, 0.5)


def repeated(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = F.dropout(x, 0.5)
    torch.set_rng_state(state)
    return first - F.dropout(x.tanh(), 0.5)


SEEDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "manual_seed": lambda x: F.dropout(x, 0.5, training=bool(torch.manual_seed(3))),
    "fork_rng": forked,
    "set_rng_state": repeated,
}


def test_a_new_seed_inside_forward_is_refused() -> None:
    class Seeds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (torch.seed() % 2)

    with pytest.raises(CaptureError, match="seed inside forward"):
        ORTModule(Seeds(), fallback_policy="FALLBACK_DISABLE")(torch.ones(2))


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_set_inside_forward(name: str) -> None:
    """A graph would not set it again."""
    entry = ZooModel(name, lambda: Function(SEEDS[name]), sequences, mean_square, falls_back="inside forward")
    with compared(entry) as compare:
        for _ in range(2):
            compare.train(3, 4)
