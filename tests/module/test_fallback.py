"""A module that cannot be captured falls back to PyTorch, with one warning: module, source location and reason."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_map_only

from onnxtrain import ORTModule
from onnxtrain.capture import refusals
from onnxtrain.errors import CaptureError, CompileError, GraphError, ORTModuleFallbackException, ORTModuleIOError
from tests.reference import assert_matches, with_gradients
from tests.torch_version import needs_torch
from tests.zoo.checks import Comparison, compared, count_captures, fallbacks
from tests.zoo.entry import Call, Draw, ZooModel, mean_square

WIDTH = 6
TESTS = Path(__file__).parents[1]


def sequences(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, length, WIDTH, grad=True),))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


class BranchesOnElements(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        if hidden.sum().item() > 0:  # here
            return hidden.relu()  # type: ignore[no-any-return]
        return hidden.tanh()  # type: ignore[no-any-return]


class LoopsOverElements(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        for _ in range(int(x.abs().max())):  # here
            hidden = hidden * 0.9
        return hidden  # type: ignore[no-any-return]


class ReadsAnElement(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.mean().item()  # here
        return self.inner(x) * round(scale, 1)


class UsesNumpy(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = np.sign(x.detach().numpy())  # here
        return self.inner(x) * torch.from_numpy(table)  # type: ignore[no-any-return]


class Packs(nn.Module):
    """Packs sequences that are all shorter than the padded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(x.shape[1] - 1, x.shape[1] - 1 - x.shape[0], -1).clamp(min=1)
        packed = pack_padded_sequence(x, lengths, batch_first=True)  # here
        states, _ = pad_packed_sequence(self.inner.rnn(packed)[0], batch_first=True)  # or here
        return states


class Outer(nn.Module):
    """The cause is in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.part = BranchesOnElements()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) * 2  # type: ignore[no-any-return]


class TriesAndCatches(Base):
    """The module catches its own error, which is then no error."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(x[:, :, :2])  # type: ignore[no-any-return]
        except RuntimeError:
            return self.inner(x)  # type: ignore[no-any-return]


# The class that contains the cause, and the reason in the warning.
CULPRITS: list[tuple[type[nn.Module], type[nn.Module], str]] = [
    (BranchesOnElements, BranchesOnElements, "data-dependent"),
    (LoopsOverElements, LoopsOverElements, "data-dependent"),
    (ReadsAnElement, ReadsAnElement, ""),
    (UsesNumpy, UsesNumpy, "numpy"),
    (Packs, Packs, ""),
    (Outer, BranchesOnElements, "data-dependent"),
]
every_culprit = pytest.mark.parametrize(
    ("make", "guilty", "reason"), CULPRITS, ids=lambda c: getattr(c, "__name__", "")
)
LIKE_OTHERS = (BranchesOnElements, LoopsOverElements, Packs)  # the first two as Outer, the last as ReadsAnElement
some_culprits = pytest.mark.parametrize(
    ("make", "guilty", "reason"),
    [pytest.param(*c, marks=[pytest.mark.slow] if c[0] in LIKE_OTHERS else []) for c in CULPRITS],
    ids=lambda c: getattr(c, "__name__", ""),
)


def names_line(text: str, guilty: type[nn.Module]) -> bool:
    """Whether a text names a line of a class that has the comment."""
    lines, start = inspect.getsourcelines(guilty)
    marked = [start + i for i, line in enumerate(lines) if line.endswith("here\n")]
    return any(f"{inspect.getsourcefile(guilty)}:{number}" in text for number in marked)


@pytest.mark.everywhere
@some_culprits
def test_one_warning_names_module_line_and_reason(make: type[nn.Module], guilty: type[nn.Module], reason: str) -> None:
    entry = ZooModel(make.__name__, make, sequences, mean_square, falls_back=make.__name__)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare = Comparison(entry)
        for sizes in ((3, 5), (2, 4), (3, 5)):
            compare.train(*sizes)
        with torch.no_grad():
            compare.forward(3, 5)
        compare.change(nn.Module.eval)
        compare.train(3, 5)
    (text,) = fallbacks(caught)
    assert make.__name__ in text
    assert names_line(text, guilty), text
    assert reason.lower() in text.lower()
    assert count_captures(compare.got.run) == 0
    (warning,) = [w for w in caught if str(w.message) == text]
    assert Path(warning.filename).is_relative_to(TESTS), "the warning points at the caller"


def test_pytorch_prints_nothing_besides_the_warning(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        ORTModule(BranchesOnElements(), pieces=False)(torch.ones(3, 5, WIDTH))
    assert capfd.readouterr().err == ""
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@every_culprit
def test_the_policy_can_forbid_fallback(make: type[nn.Module], guilty: type[nn.Module], reason: str) -> None:
    module = ORTModule(make(), fallback_policy="FALLBACK_DISABLE")
    for _ in range(2):
        with pytest.raises(ORTModuleFallbackException) as raised:
            module(torch.ones(3, 5, WIDTH))
        assert names_line(str(raised.value), guilty)
        assert reason.lower() in str(raised.value).lower()


def test_a_module_that_handles_its_own_errors_runs_as_in_eager() -> None:
    compare = Comparison(ZooModel("tries", TriesAndCatches, sequences, mean_square))
    compare.train(3, 5)


@needs_torch(2, 12, "loses assignments to class attributes in what torch.compile runs, and the test counts by one")
def test_capture_is_retried_only_on_request() -> None:
    class Counted(BranchesOnElements):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).runs += 1
            return super().forward(x)

    x = torch.ones(3, 5, WIDTH)
    module = ORTModule(Counted())
    with pytest.warns(UserWarning, match="Counted runs in PyTorch"):
        module(x)
    first = Counted.runs
    module(x)
    assert Counted.runs == first + 1
    retries = ORTModule(Counted(), fallback_retry=True)
    with pytest.warns(UserWarning, match="Counted runs in PyTorch"):
        retries(x)
    before = Counted.runs
    retries(x)
    assert Counted.runs > before + 1


def test_a_module_that_falls_back_in_training_may_be_captured_in_eval() -> None:
    class TrainsInPython(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.inner(x)
            if self.training and hidden.sum().item() > 0:
                hidden = hidden * 2
            return hidden  # type: ignore[no-any-return]

    compare = Comparison(ZooModel("trains", TrainsInPython, sequences, mean_square))
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        compare.train(3, 5)
    compare.change(nn.Module.eval)
    compare.train(3, 5)
    assert count_captures(compare.got.run) == 1


# Errors of the model


class Wrong(Base):
    def forward(self, x: torch.Tensor, mistake: str) -> torch.Tensor:
        if mistake == "shape":
            return self.inner(x[..., :2])  # type: ignore[no-any-return]
        if mistake == "attribute":
            return self.missing(x)  # type: ignore[no-any-return, operator]
        raise KeyError("my own error")


@pytest.mark.parametrize("mistake", ["shape", "attribute", "raise"])
def test_errors_of_the_model_are_raised_unchanged(mistake: str) -> None:
    module, x = Wrong(), torch.ones(2, 3, WIDTH)
    with pytest.raises(Exception) as expected:  # whatever eager raises
        module(x, mistake)
    ours = ORTModule(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no fallback warning: the model itself is wrong
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value)[:30])) as raised:
            ours(x, mistake)
    assert any(__file__ in str(entry.path) and entry.name == "forward" for entry in raised.traceback)


def test_a_valid_call_after_an_invalid_one_is_captured() -> None:
    module = ORTModule(_Sum())
    for wrong in (torch.ones(3, WIDTH), torch.ones(2, WIDTH + 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeError, match="must match the size"):
                module(torch.ones(2, WIDTH), wrong)
    module(torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    assert count_captures(module) == 1


class _Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_an_error_of_the_model_after_the_first_step_is_raised_unchanged() -> None:
    module = ORTModule(_Linear())
    module(torch.ones(2, WIDTH))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        module(torch.ones(2, WIDTH + 1))
    assert count_captures(module) == 1


class _Linear(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_missing_and_unknown_arguments() -> None:
    module = ORTModule(_Linear())
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        module()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        module(torch.ones(2, WIDTH), nothing=1)


# Inputs and outputs that a graph cannot contain


class Strange:
    """Neither a tensor nor a container nor a constant."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class TakesAnything(Base):
    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        factor = other.factor if isinstance(other, Strange) else 1.0
        return self.inner(x) * factor


class ReturnsAnything(Base):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), Strange(2.0)


def test_an_argument_of_an_unknown_class() -> None:
    module = TakesAnything()
    ours = ORTModule(module)
    x = torch.ones(3, WIDTH)
    with pytest.warns(UserWarning, match=r"(?s)TakesAnything runs in PyTorch.*Strange"):
        first = ours(x, Strange(2.0))
    assert torch.equal(first, module(x, Strange(2.0)))
    assert torch.equal(ours(x, Strange(3.0)), module(x, Strange(3.0)))
    assert torch.equal(ours(x), module(x))


class _Moves(nn.Module):
    """Returns a result on another device, as `logits.cpu()` on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.fc(x)
        return y, y.to("meta")


def test_a_result_on_another_device() -> None:
    ours = ORTModule(_Moves())
    with pytest.warns(UserWarning, match="forward returns a tensor on another device than its inputs"):
        y, moved = ours(torch.ones(3, WIDTH))
    assert (y.device.type, moved.device.type) == ("cpu", "meta")


def test_an_output_of_an_unknown_class() -> None:
    ours = ORTModule(ReturnsAnything())
    with pytest.warns(UserWarning, match="ReturnsAnything runs in PyTorch"):
        assert ours(torch.ones(3, WIDTH))[1].factor == 2.0


@pytest.mark.parametrize(
    "inputs",
    [
        lambda: torch.ones(3, WIDTH).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2, WIDTH), torch.ones(3, WIDTH)]),
        lambda: nn.Buffer(torch.ones(3, WIDTH)),
        lambda: torch.ones(3, WIDTH).as_subclass(_Marked),
    ],
    ids=["sparse", "nested", "buffer", "subclass"],
)
def test_kinds_of_tensors(inputs: Callable[[], torch.Tensor]) -> None:
    module = _Linear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        eager, got = module(inputs()), ORTModule(module)(inputs())
    assert type(got) is type(eager)
    assert got.is_nested == eager.is_nested
    pairs = zip(got.unbind(), eager.unbind(), strict=True) if got.is_nested else [(got, eager)]
    for ours, theirs in pairs:
        assert torch.equal(ours.as_subclass(torch.Tensor), theirs.as_subclass(torch.Tensor))


class _Recorded(torch.Tensor):
    """A lazy tensor, as XLA's: a wrapper without memory that records its operators."""

    operators: list[str]
    held: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> _Recorded:
        tensor: _Recorded = torch.Tensor._make_wrapper_subclass(cls, real.shape, dtype=real.dtype)
        tensor.held, tensor.operators = real, []
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = tree_map_only(_Recorded, lambda t: t.held, (args, kwargs or {}))
        results = function(*unwrapped[0], **unwrapped[1])
        recorded: Any = tree_map_only(torch.Tensor, _Recorded, results)
        if isinstance(recorded, _Recorded):
            recorded.operators = [*next(t.operators for t in args if isinstance(t, _Recorded)), str(function)]
        return recorded


def test_lazy_tensors_run_in_pytorch_which_records_them() -> None:
    module, x = _Linear(), torch.randn(3, WIDTH)
    ours = ORTModule(module)
    with pytest.warns(UserWarning, match="input tensor 0 is of a kind that a graph does not support") as warned:
        got = ours(_Recorded(x))
    assert "_Recorded" in str(warned[0].message)
    assert isinstance(got, _Recorded)
    assert got.operators
    assert torch.equal(got.held, module(x))


@pytest.mark.parametrize("device", ["lazy", "xla"])
def test_a_lazy_device_is_refused_by_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tensors are plain ones. PyTorch's wheels have no XLA, so a stand-in answers what the check asks."""
    x = SimpleNamespace(device=torch.device(device), layout=torch.strided, is_nested=False)
    monkeypatch.setattr(refusals, "PLAIN_TENSORS", {SimpleNamespace})
    with pytest.raises(ORTModuleIOError, match="a device that records operators") as raised:
        refusals.refuse_call([cast(torch.Tensor, x)])
    assert device in str(raised.value)


class _Marked(torch.Tensor):
    """A subclass that changes only the type."""


def test_function_transforms() -> None:
    """torch.func runs the module in PyTorch, or refuses it clearly."""
    module = _Linear()
    ours, x = ORTModule(module), torch.randn(3, 4, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert torch.equal(torch.func.vmap(ours)(x), torch.func.vmap(module)(x))
        gradient = torch.func.grad(lambda t: ours(t).square().sum())(x)
    assert torch.equal(gradient, torch.func.grad(lambda t: module(t).square().sum())(x))


def test_a_model_whose_submodule_falls_back_trains() -> None:
    with compared(ZooModel("outer", Outer, sequences, mean_square, falls_back="Outer")) as compare:
        compare.train_steps(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


# Policies and options


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class AppliesAFunction(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubles.apply(self.inner(x))  # type: ignore[no-any-return]  # here


def test_custom_autograd_can_be_switched_off() -> None:
    module, x = AppliesAFunction(), torch.randn(2, WIDTH)
    on = ORTModule(module)
    assert_matches(on(x), module, x)
    assert count_captures(on) == 1
    off = ORTModule(module, custom_autograd=False)
    with pytest.warns(UserWarning, match="custom_autograd is off") as caught:
        assert torch.equal(off(x), module(x))
    assert names_line(str(caught[0].message), AppliesAFunction)
    assert count_captures(off) == 0
    with pytest.raises(ORTModuleFallbackException, match=r"Doubles \("):
        ORTModule(module, custom_autograd=False, fallback_policy="FALLBACK_DISABLE")(x)


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("script", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 3))])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_runs_in_pytorch(script: Callable[[nn.Module], nn.Module], part: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    scripted = script(copy.deepcopy(module))
    ours, x = ORTModule(nn.Sequential(scripted) if part else scripted), torch.randn(2, 3)
    text = f"not as an ONNX graph: a TorchScript module cannot be captured\n +where: +{'0' if part else 'the module'}"
    with pytest.warns(UserWarning, match=text):
        ours(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ours(x), module(x))
    ours(x).sum().backward()
    module(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), module.parameters(), strict=True))
    if part:
        ours.module[0] = module
        ours(x)
        assert count_captures(ours) == 1
    with pytest.raises(CaptureError, match="use the module from before"):
        ORTModule(scripted, fallback_policy="FALLBACK_DISABLE")(x)


@pytest.mark.parametrize("policy", ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA", "FALLBACK_UNSUPPORTED_DEVICE"])
def test_data_parallel_is_refused_immediately(policy: str) -> None:
    with pytest.raises(ORTModuleFallbackException, match="DataParallel"):
        ORTModule(nn.DataParallel(nn.Linear(2, 2)), fallback_policy=policy)


@pytest.mark.parametrize("policy", ["FALLBACK_UNSUPPORTED_TORCH_MODEL", "FALLBACK_BAD_INITIALIZATION", None])
def test_data_parallel_falls_back_if_the_policy_covers_it(policy: str | None) -> None:
    parallel, x = nn.DataParallel(nn.Linear(2, 2)), torch.randn(3, 2)
    module = ORTModule(parallel, **({} if policy is None else {"fallback_policy": policy}))
    with pytest.warns(UserWarning, match="DataParallel runs in PyTorch"):
        assert torch.equal(module(x), parallel(x))


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Multiplies(nn.Module):
    def forward(self, point: Point) -> int:
        return point.x * point.y


class Points(nn.Module):
    def forward(self, x: int, y: int) -> Point:
        return Point(x, y)


@pytest.mark.parametrize(("make", "args"), [(Multiplies, (Point(2, 3),)), (Points, (2, 3))])
def test_a_call_without_tensors_is_not_captured(make: Callable[[], nn.Module], args: tuple[Any, ...]) -> None:
    for policy in ("FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DEVICE"):
        with pytest.raises(ORTModuleFallbackException, match="no tensor"):
            ORTModule(make(), fallback_policy=policy)(*args)
    module = ORTModule(make(), fallback_policy="FALLBACK_UNSUPPORTED_DATA")
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        assert module(*args) == make()(*args)


@pytest.mark.parametrize("policy", ["FALLBACK_FORCE_TORCH_FORWARD", "FALLBACK_FORCE_TORCH_BACKWARD"])
def test_force_torch_policies_cover_every_refusal(policy: str) -> None:
    for make, inputs in ((BranchesOnElements, torch.randn(1, 2, WIDTH)), (TakesAnything, Strange(2.0))):
        module = ORTModule(make(), fallback_policy=policy)
        with pytest.warns(UserWarning, match="runs in PyTorch"):
            module(inputs) if make is BranchesOnElements else module(torch.randn(2, WIDTH), inputs)


def test_a_policy_covers_its_own_failures_only() -> None:
    module = ORTModule(BranchesOnElements(), fallback_policy="FALLBACK_UNSUPPORTED_DATA|FALLBACK_UNSUPPORTED_DEVICE")
    with pytest.raises(ORTModuleFallbackException):
        module(torch.randn(1, 2, WIDTH))


class Interrupted(Base):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.error: type[BaseException] | None = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.error is not None:
            raise self.error("stop")
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_an_interrupted_forward_leaves_the_module_unchanged(error: type[BaseException]) -> None:
    inner = Interrupted(error)
    module, x = ORTModule(inner), torch.randn(2, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fallback warning of an error in forward
        with pytest.raises(error, match="stop"):
            module(x)
    inner.error = None
    before = inner.calls.item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_matches(module(x), inner.inner, x)
    assert inner.calls.item() == before + 1
    assert count_captures(module) == 1


def test_an_interrupted_backward_leaves_the_next_step_intact() -> None:
    module, x = ORTModule(AppliesAFunction()), torch.randn(2, WIDTH)
    plain = copy.deepcopy(module.module)
    stopped = [True]
    module.inner.weight.register_hook(lambda gradient: 1 / 0 if stopped else None)
    with pytest.raises(ZeroDivisionError):
        module(x).sum().backward()
    stopped.clear()
    results = with_gradients(module(x), dict(module.named_parameters()))
    assert_matches(results, lambda m, x: with_gradients(m(x), dict(m.named_parameters())), plain, x)


INTERNAL_ERRORS = {
    "NotImplementedError": NotImplementedError("unforeseen"),
    "GraphError": GraphError("unforeseen", expected="a graph", got="something else"),
}


@pytest.mark.parametrize("stage", ["capture.capture.convert", "compile.optimize", "compile.plan_memory"])
@pytest.mark.parametrize("name", list(INTERNAL_ERRORS))
def test_a_bug_of_our_own_is_reported_and_ends_no_training(
    stage: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise INTERNAL_ERRORS[name]

    monkeypatch.setattr(f"onnxtrain.{stage}", fail)
    monkeypatch.setattr(Base, "forward", lambda self, x: self.inner(x), raising=False)
    net = Base()
    model = ORTModule(net)
    with pytest.warns(UserWarning, match=f"{name}: unforeseen(.|\n)*a bug of onnxtrain: please report"):
        output = model(torch.ones(2, WIDTH))
    assert torch.equal(output, net.inner(torch.ones(2, WIDTH)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        model(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(CompileError if stage.startswith("compile") else CaptureError, match=f"{name}: unforeseen"):
        ORTModule(Base(), fallback_policy="FALLBACK_DISABLE")(torch.ones(2, WIDTH))


def test_running_out_of_memory_while_compiling_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("onnxtrain.compile.plan_memory", fail)
    monkeypatch.setattr(Base, "forward", lambda self, x: self.inner(x), raising=False)
    with pytest.raises(torch.OutOfMemoryError):
        ORTModule(Base())(torch.ones(2, WIDTH))
