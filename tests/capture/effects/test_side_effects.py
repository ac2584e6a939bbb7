"""After a call in which forward changes its module, the module, results and generator are as in eager."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import FallbackPolicy, ORTModule
from onnxtrain.capture.effects.side_effects import FirstCallError
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches
from tests.zoo.checks import compared, count_captures
from tests.zoo.entry import Call, Draw, ZooModel, mean_square

WIDTH = 6
SIZES = ((3, 0), (3, 0), (5, 0), (1, 0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.is_ready = False


def linear_for(x: torch.Tensor) -> nn.Linear:
    """A layer with the same random values in float32 and float64."""
    layer = nn.Linear(WIDTH, WIDTH)
    return layer.double() if x.dtype == torch.float64 else layer


# Forwards that create parts of the module


class CreatesSubmodule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.projection: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.projection is None:
            self.projection = linear_for(x)
        return F.dropout(self.projection(self.inner(x)), 0.3)  # type: ignore[misc]


class CreatesRegisteredSubmodule(CreatesSubmodule):
    def __init__(self) -> None:
        super().__init__()
        del self.projection
        self.register_module("projection", None)


class Appends(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.layers) < 2:
            self.layers.append(linear_for(x))
        for layer in self.layers:
            x = F.dropout(layer(x), 0.2)
        return x


class CreatesParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(torch.randn(WIDTH).to(x.dtype))
        return F.dropout(self.inner(x) * self.scale, 0.5)  # type: ignore[operator]


class ReplacesParameter(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.inner.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(x.dtype))
            self.is_ready = True
        return self.inner(x)  # type: ignore[no-any-return]


class RemovesParameter(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner.bias is not None:
            self.inner.bias = None
        return self.inner(x)  # type: ignore[no-any-return]


class CreatesBuffer(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.register_buffer("noise", torch.randn(WIDTH).to(x.dtype))
            self.is_ready = True
        return F.dropout(self.inner(x) * self.noise, 0.5)  # type: ignore[operator]


class Tripled(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(3 * self.inner(x), 0.5)


class Switches(Base):
    """As BigBird does for short inputs: another class of attention, with the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: nn.Module = Base()
        self.kind = "sparse"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "sparse":
            self.kind = "full"
            full = Tripled()
            full.inner = self.attention.inner
            self.attention = full
        return self.attention(self.inner(x))  # type: ignore[no-any-return]


class SwitchesBySubmodule(Switches):
    """No attribute but the submodule changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(self.attention) is Base:
            full = Tripled()
            full.inner = self.attention.inner
            self.attention = full
        return self.attention(self.inner(x))  # type: ignore[no-any-return]


# Forwards whose first call computes something else


class Scales(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.is_ready = True
            return 2 * self.inner(x)  # type: ignore[no-any-return]
        return self.inner(x)  # type: ignore[no-any-return]


class Samples(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.is_ready = True
            torch.rand(3)
        return F.dropout(self.inner(x), 0.5)


class InitializesParameter(Base):
    """As the ActNorm of normalizing flows: a shift by the mean of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
            self.is_ready = True
        return self.inner(x + self.shift)  # type: ignore[no-any-return]


class InitializesBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.shift.copy_(-x.detach().mean(0))
            self.is_ready = True
        return self.inner(x + self.shift)  # type: ignore[no-any-return]


class BranchesOnElement(Base):
    """The export runs forward twice, because it branches on an element of x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1 if self.is_ready else 2
        self.is_ready = True
        return self.inner(x) * factor if x.numel() > 0 and bool(x.isfinite().all()) else self.inner(x)  # type: ignore[no-any-return]


def features(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH, grad=True),))


def model(build: type[nn.Module], falls_back: str | None) -> ZooModel:
    return ZooModel(build.__name__, build, features, mean_square, falls_back=falls_back)


ONCE = (
    *(CreatesSubmodule, CreatesRegisteredSubmodule, Appends, CreatesParameter, ReplacesParameter, RemovesParameter),
    *(Switches, SwitchesBySubmodule, Scales, Samples, InitializesParameter, InitializesBuffer, BranchesOnElement),
)
LIKE_OTHERS = (CreatesRegisteredSubmodule, ReplacesParameter, SwitchesBySubmodule, InitializesBuffer)


@pytest.mark.parametrize(
    ("build", "warning"),
    [
        *(
            pytest.param(
                build,
                "forward changes the module in this call",
                marks=[pytest.mark.slow] if build in LIKE_OTHERS else [],
            )
            for build in ONCE
        ),
        (CreatesBuffer, "forward replaces a buffer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_first_call_runs_in_pytorch_and_later_ones_as_a_graph(build: type[nn.Module], warning: str) -> None:
    with compared(model(build, warning)) as compare:
        for size in SIZES:
            compare.train(*size)
        assert count_captures(compare.got.run) == 1
        ours, eager, _ = ({k: type(v) for k, v in side.module.state_dict().items()} for side in compare.sides())
        assert ours == eager


class Notes(Base):
    """The first call is the same graph as later ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.is_ready = True
        return F.dropout(self.inner(x), 0.5, self.training)


def test_a_first_call_that_is_the_same_graph_is_captured() -> None:
    with compared(model(Notes, None)) as compare:
        for size in SIZES:
            compare.train(*size)
        assert all(side.module.is_ready for side in compare.sides())


class Grows(Appends):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers.append(linear_for(x))
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_forward_that_changes_the_module_in_every_call_is_not_exported_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exports = 0
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal exports
        exports += 1
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    with compared(model(Grows, "forward changes the module in this call")) as compare:
        for _ in range(8):
            compare.train(3, 0)
    assert exports == 5
    assert len(compare.got.module.layers) == 9


def test_a_module_may_be_made_ready_again() -> None:
    with compared(model(Scales, "forward changes the module in this call")) as compare:
        for is_ready in (False, True, False, True):
            for side in compare.sides():
                side.module.is_ready = is_ready
            compare.train(3, 0)
        assert count_captures(compare.got.run) == 1


FACTOR = 2


class AssignsGlobal(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global FACTOR
        factor, FACTOR = FACTOR, 1
        return factor * self.inner(x)  # type: ignore[no-any-return]


def test_a_global_that_forward_assigns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2)
    module = ORTModule(AssignsGlobal())
    x = torch.randn(3, WIDTH)
    with pytest.warns(UserWarning, match="FACTOR: 2 → 1"):
        first = module(x)
    assert FACTOR == 1
    assert_matches([first, module(x)], lambda inner, x: [2 * inner(x), inner(x)], module.module.inner, x)
    assert count_captures(module) == 1


MODE: str | None = None


class SetsAttribute(Base):
    """Sets what it never reads by the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "many"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mode = "many" if len(x) > 3 else "few"
        return self.inner(x)  # type: ignore[no-any-return]


class SetsAttributeOfSubmodule(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.mode = "many" if len(x) > 3 else "few"
        return self.inner(x)  # type: ignore[no-any-return]


class SetsGlobal(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global MODE  # noqa: PLW0603  # what is tested
        MODE = "many" if len(x) > 3 else "few"
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("build", "mode"),
    [
        (SetsAttribute, lambda module: module.mode),
        (SetsAttributeOfSubmodule, lambda module: module.inner.mode),
        (SetsGlobal, lambda module: MODE),
    ],
)
def test_what_forward_sets_by_size_has_the_value_of_the_last_call(
    build: type[nn.Module], mode: Callable[[nn.Module], str]
) -> None:
    module = build()
    wrapped = ORTModule(module, log_level="ERROR")
    for size in (5, 2, 6, 2, 2, 7, 5, 2, 5, 2):
        wrapped(torch.randn(size, WIDTH))
        assert mode(module) == ("many" if size > 3 else "few")


def test_without_fallback_the_module_is_left_as_it_was() -> None:
    module = CreatesRegisteredSubmodule()
    wrapped = ORTModule(module, fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    with pytest.raises(FirstCallError, match=r"projection: None → a Linear"):
        wrapped(torch.randn(3, WIDTH))
    assert module.projection is None
    assert [*module._modules] == ["inner", "projection"]


@pytest.mark.parametrize("build", [Scales, Notes], ids=lambda build: build.__name__)
def test_a_first_call_with_stored_captures(build: type[nn.Module], tmp_path: Path) -> None:
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        torch.manual_seed(0)
        module = build().eval()
        eager = copy.deepcopy(module)
        wrapped = ORTModule(module, cache_dir=tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = [wrapped(x), wrapped(x)]
        assert_matches(results, lambda eager, x: [eager(x), eager(x)], eager, x)


class ReadsShared(Base):
    """Two modules and the user's code have the same containers."""

    def __init__(self, shared: tuple[Any, ...]) -> None:
        super().__init__()
        self.shared = self.inner.shared = shared  # type: ignore[assignment]  # no tensor
        self.scales, self.inner.options = shared[:2]  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        assert not fails
        options: dict[str, Any] = self.inner.options  # type: ignore[assignment]
        return self.inner(x) * self.scales[0] * options["nested"]["scale"] + self.shared[2][-1]  # type: ignore[no-any-return,index]


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch:UserWarning")
@pytest.mark.parametrize("fails", [False, True], ids=["captured", "not captured"])
def test_containers_stay_those_of_the_user(fails: bool) -> None:
    scales, options, offsets = [1.0], {"nested": {"scale": 2.0}}, deque([3.0])
    module = ReadsShared((scales, options, offsets))
    before, x = module.shared, torch.randn(3, WIDTH)
    ours = ORTModule(module)
    if fails:
        with pytest.raises(AssertionError):
            ours(x, fails=True)
    for number in (1.0, 4.0, 5.0):
        scales[0] = options["nested"]["scale"] = number
        offsets.append(number)
        assert_matches(ours(x), lambda inner, x: inner(x) * number * number + number, module.inner, x)  # noqa: B023
        assert module.shared is module.inner.shared is before
        assert module.scales is scales
        assert module.inner.options is options


class Records(nn.Module):
    def __init__(self, container: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.container = container

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.container, deque):
            self.container.append(len(self.container))
        else:
            self.container["calls"] = self.container.get("calls", 0) + 1
        return self.inner(x) * len(self.container)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch:UserWarning")
@pytest.mark.parametrize(
    "make", [OrderedDict, deque, lambda: defaultdict(int)], ids=["OrderedDict", "deque", "defaultdict"]
)
def test_a_container_that_forward_changes_is_changed_in_each_call(make: Callable[[], Any]) -> None:
    ours, eager = (Records(make()) for _ in range(2))
    wrapped, x = ORTModule(ours), torch.randn(2, WIDTH)
    for _ in range(3):
        wrapped(x)
        eager(x)
        assert ours.container == eager.container


class HooksItself(nn.Module):
    """Registers a hook in the first call, as models of transformers do to collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.is_hooked = nn.Linear(3, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            self.inner.register_forward_hook(lambda module, arguments, output: output * 2)
            self.is_hooked = True
        y = self.inner(x)
        return y + 1 if (x > 9).any() else y  # the capture traces forward up to here, then again


def test_a_hook_that_forward_registers_is_registered_once() -> None:
    eager = HooksItself()
    wrapped = copy.deepcopy(eager)
    model, x = ORTModule(wrapped), torch.randn(2, 3)
    for _ in range(3):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            got = model(x)
        torch.testing.assert_close(got, eager(x))
        assert len(wrapped.inner._forward_hooks) == 1


class CollectsStates(nn.Module):
    """Collects hidden states by a hook that it registers in its first call, and a flag tells that it did."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.is_hooked = nn.Linear(3, 3), False

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        output_capturing = pytest.importorskip("transformers.utils.output_capturing")
        states: list[torch.Tensor] = []
        if not self.is_hooked:
            output_capturing.install_output_capuring_hook(self.inner, "states", 0)
            self.is_hooked = True
        token = output_capturing._active_collector.set({"states": states})
        try:
            y = self.inner(x)
        finally:
            output_capturing._active_collector.reset(token)
        return [y.tanh(), *states]


@pytest.mark.filterwarnings("error:.*runs in PyTorch:UserWarning")
def test_a_hook_that_runs_with_forward_is_registered_with_what_tells_of_it() -> None:
    module = CollectsStates()
    model, x = ORTModule(module), torch.randn(2, 3)
    for _ in range(3):
        got = model(x)
        assert len(got) == 2
        assert_matches(got, lambda module, x: module(x), module, x)
        assert len(module.inner._forward_hooks) == 1
    assert engine_of(model).captures == 1


class MakesTable(nn.Module):
    """Makes a list of tensors in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.tables: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tables is None:
            self.tables = [torch.arange(3.0), torch.arange(3.0) / 2]
        return self.inner(x) * self.tables[0] + self.tables[1]  # type: ignore[no-any-return]


class MakesAttribute(nn.Module):
    """Has no attribute for the tensor before its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.table = [torch.arange(3.0)]
        return self.inner(x) * self.table[0]  # type: ignore[no-any-return]


class FillsCache(nn.Module):
    """Keeps a table for each device, as LeViT does in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cache = nn.Linear(3, 3), dict[str, torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if str(x.device) not in self.cache:
            self.cache[str(x.device)] = self.inner.weight[:, 0].detach()
        return self.inner(x) + self.cache[str(x.device)]  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [MakesTable, MakesAttribute, FillsCache])
def test_a_forward_that_makes_an_object_in_its_first_call_is_a_graph_from_the_second_on(
    make: type[nn.Module],
) -> None:
    module = make()
    model, x = ORTModule(module), torch.randn(2, 3)
    with pytest.warns(UserWarning, match="the next one is captured"):
        model(x)
    assert any(vars(module).get(name) for name in ("tables", "table", "cache"))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = model(x)
        assert_matches(got, lambda module, x: module(x), module, x)
    assert engine_of(model).captures == 1
