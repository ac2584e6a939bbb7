"""The usual call is recognised, and no change is overlooked: each that test_key knows."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.capture.key.fast_path import Missed, UsualCall, usual_call
from onnxtrain.capture.key.key import ModuleState, attribute_reads
from onnxtrain.capture.structure import flatten_call
from onnxtrain.frontend.ort_module import engine_of
from tests.capture.key.test_key import CHANGES, INPUTS, NAMES, SWITCHES, Looks, Model, X


class AnySizes:
    def check(self, tensors: Sequence[torch.Tensor]) -> bool:
        return True


def taken(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensors


def learn(model: nn.Module, names: Sequence[str], *args: Any, **kwargs: Any) -> UsualCall | None:
    tensors, structure = flatten_call(args, kwargs)
    state = ModuleState.take(model, names)
    return usual_call(state.snapshot, AnySizes(), structure, tensors, taken)  # type: ignore[arg-type]


def learned(model: nn.Module, names: Sequence[str], *args: Any, **kwargs: Any) -> UsualCall:
    usual = learn(model, names, *args, **kwargs)
    assert usual is not None, "the check does not work on this Python: steps are slower than need be"
    return usual


@pytest.mark.parametrize("name", CHANGES)
def test_no_change_of_the_module_is_overlooked(name: str) -> None:
    model = Model()
    usual = learned(model, NAMES, X)
    assert usual((X,), {}) is not Missed
    CHANGES[name][0](model)
    assert usual((X,), {}) is Missed


@pytest.mark.parametrize("name", SWITCHES)
def test_no_switch_is_overlooked(name: str) -> None:
    usual = learned(Model(), NAMES, X)
    with SWITCHES[name][0]():
        assert usual((X,), {}) is Missed
    assert usual((X,), {}) is not Missed


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
        (
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        (
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        (
            lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
            lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False),
        ),
        (
            lambda: torch.backends.mha.set_fastpath_enabled(False),
            lambda: torch.backends.mha.set_fastpath_enabled(True),
        ),
    ],
)
def test_no_global_switch_is_overlooked(change: Callable[[], None], undo: Callable[[], None]) -> None:
    usual = learned(Model(), NAMES, X)
    change()
    try:
        assert usual((X,), {}) is Missed
    finally:
        undo()


def test_no_transform_or_mode_is_overlooked() -> None:
    from torch.autograd import forward_ad
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    usual = learned(Model(), NAMES, X)
    seen: list[Any] = []
    torch.func.vmap(lambda x: seen.append(usual((X,), {})) or x)(torch.ones(2))  # type: ignore[func-returns-value]
    torch.func.grad(lambda x: seen.append(usual((X,), {})) or x.sum())(torch.ones(2))  # type: ignore[func-returns-value]
    with forward_ad.dual_level():
        seen.append(usual((X,), {}))
    with Mode():
        seen.append(usual((X,), {}))
    assert seen == [Missed] * 4


@pytest.mark.parametrize("name", INPUTS)
def test_no_fact_of_an_input_is_overlooked(name: str) -> None:
    assert learned(Model(), NAMES, X)((INPUTS[name][0],), {}) is Missed


def test_inference_tensors_are_not_overlooked() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2, 3, 4, 5)
    assert learned(Model(), NAMES, X)((tensor,), {}) is Missed


A, B, FIRST = torch.ones(2), torch.zeros(3), torch.ones(2)
BATCH = {"ids": A, "more": [B, (torch.ones(1), None, True, "x", 3)]}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((FIRST, torch.ones(2)), {"batch": BATCH}),
        ((FIRST,), {"batch": BATCH, "other": None}),
        ((FIRST,), {"other": BATCH}),
        ((FIRST,), {"batch": {**BATCH, "fresh": B}}),
        ((FIRST,), {"batch": dict(reversed(BATCH.items()))}),
        ((FIRST,), {"batch": {**BATCH, "more": (B, BATCH["more"][1])}}),
        ((FIRST,), {"batch": {**BATCH, "more": [B, (torch.ones(1), False, True, "x", 3)]}}),
        ((FIRST,), {"batch": {**BATCH, "more": [B, (torch.ones(1), None, 1, "x", 3)]}}),
        ((FIRST,), {"batch": {**BATCH, "more": [B, (torch.ones(1), None, True, "y", 3)]}}),
        ((FIRST,), {"batch": {**BATCH, "more": [B, (torch.ones(1), None, True, "x", 3.0)]}}),
        ((FIRST,), {"batch": {**BATCH, "more": [A, (torch.ones(1), None, True, "x", 3)]}}),
        ((FIRST,), {"batch": {**BATCH, "more": [B[:2], (B[1:2], None, True, "x", 3)]}}),
        ((FIRST,), {"batch": [A]}),
        ((3,), {"batch": BATCH}),
        ((FIRST,), {"batch": {"ids": A}}),
        ((FIRST,), {"batch": {**BATCH, "more": [B]}}),
        ((FIRST,), {"batch": {**BATCH, "more": [B, (torch.ones(1), None, True, "x", 3), 4]}}),
    ],
)
def test_no_change_of_the_arguments_is_overlooked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    usual = learned(Model(), NAMES, FIRST, batch=BATCH)
    expected = [A, FIRST, B, BATCH["more"][1][0]]
    found = usual((FIRST,), {"batch": BATCH})
    assert found is not Missed
    assert {id(t) for t in found[len(NAMES) :]} == {id(t) for t in expected}
    assert usual(args, kwargs) is Missed


def test_no_other_order_of_kwargs_is_overlooked() -> None:
    usual = learned(Model(), NAMES, a=A, b=B)
    assert usual((), {"a": A, "b": B}) is not Missed
    assert usual((), {"b": B, "a": A}) is Missed


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_unusual_calls_are_not_learned() -> None:
    model = Model()
    assert learn(model, NAMES, A, A) is None
    assert learn(model, NAMES, A, 0.5) is None
    assert learn(model, NAMES, A, {1: B}) is None
    assert learn(model, NAMES, Pair(A, B)) is None
    assert learn(model, NAMES, X.transpose(0, 1)) is None
    assert learn(model, NAMES) is None


def test_a_version_of_pytorch_without_its_own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.capture.key.snapshot.sees_each_fact", lambda: False)
    for name in ("dtype of all", "shape", "training of one"):
        test_no_change_of_the_module_is_overlooked(name)
    for name in INPUTS:
        test_no_fact_of_an_input_is_overlooked(name)


def test_no_usual_call_where_the_check_overlooks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.capture.key.fast_path.sees_each_change", lambda: False)
    assert learn(Model(), NAMES, X) is None


@pytest.mark.parametrize("change", ["another value", "removed", "in the module itself"])
def test_no_change_of_a_constant_of_the_class_is_overlooked(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Looks()
    with attribute_reads() as reads:
        model(X)
    tensors, structure = flatten_call((X,), {})
    state = ModuleState.take(model, [], frozenset(reads))
    usual = usual_call(state.snapshot, AnySizes(), structure, tensors, taken)  # type: ignore[arg-type]
    assert usual is not None
    assert usual((X,), {}) is not Missed
    match change:
        case "another value":
            monkeypatch.setattr(Looks, "scale", 3.0)
        case "removed":
            monkeypatch.delattr(Looks, "scale")
        case _:
            model.scale = 3.0
    assert usual((X,), {}) is Missed


class Exchanged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        return result


def usual_of(module: ORTModule) -> UsualCall:
    usual: UsualCall = engine_of(module)._recent.usual
    return usual


def test_the_tensors_of_now_are_read() -> None:
    """Parameters are exchanged before the usual call is learned, and after."""
    plain = Exchanged()
    module = ORTModule(plain)
    x = torch.randn(4, 3)
    for step in range(8):
        if step in (1, 2, 5):
            plain.linear.weight = nn.Parameter(torch.randn(2, 3))
        if step == 6:
            plain.load_state_dict({k: torch.randn_like(v) for k, v in plain.state_dict().items()}, assign=True)
        plain.zero_grad()
        output = module(x)
        output.sum().backward()
        torch.testing.assert_close(output, plain(x))
        assert plain.linear.weight.grad is not None
        torch.testing.assert_close(plain.linear.weight.grad, x.sum(0).expand(2, 3))
    assert engine_of(module).captures == 1


class Scaled(Exchanged):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scales[0]


def test_a_module_that_changes_on_every_step_is_learned_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    learned_at: list[int] = []

    def count(*args: Any) -> Any:
        learned_at.append(plain.calls - 1)
        return usual_call(*args)

    monkeypatch.setattr("onnxtrain.frontend.engine.usual_call", count)
    monkeypatch.setattr("onnxtrain.frontend.engine._MOST_PATIENCE", 8)
    plain = Scaled()
    module = ORTModule(plain)
    for _ in range(40):
        plain.calls += 1  # forward does not read it
        plain.scales = [1.0]  # another list of the same values
        module(torch.randn(4, 3))
    assert engine_of(module).captures == 1
    assert learned_at == [1, 3, 7, 15, 23, 31, 39]


def test_train_and_eval_in_turn() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    module = ORTModule(plain)
    x = torch.ones(50, 3)
    for _ in range(3):
        for _ in range(4):
            module.train()
            assert (module(x) == 0).any()
        for _ in range(4):
            module.eval()
            torch.testing.assert_close(module(x), plain(x))
    assert engine_of(module).captures == 2


class ReadsBySize(nn.Module):
    """The graph is the same for many rows and for few."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.many, self.few = [2.0], [2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * (self.many if x.shape[0] > 3 else self.few)[0]
        return result


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("name", ["many", "few"])
def test_what_forward_reads_at_other_sizes_is_not_overlooked(name: str, calls: int) -> None:
    plain = ReadsBySize()
    module = ORTModule(plain)
    inputs = (torch.randn(5, 3), torch.randn(2, 3))
    for x in inputs:
        for _ in range(calls):
            torch.testing.assert_close(module(x), plain(x))
    assert engine_of(module).captures == 1
    getattr(plain, name)[0] = 3.0
    for x in inputs:
        torch.testing.assert_close(module(x), plain(x))


def test_another_kind_of_output_at_other_sizes_is_not_overlooked() -> None:
    class Model(Exchanged):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return {"y": y} if x.shape[0] > 3 else [y]

    plain = Model()
    module = ORTModule(plain)
    for rows in (5, 2, 4, 1, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(module(x), plain(x))
    assert engine_of(module).captures == 2


def test_a_module_that_calls_a_method_of_its_class_is_learned() -> None:
    class Model(Exchanged):
        @classmethod
        def doubled(cls, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.doubled(super().forward(x))

    module = ORTModule(Model())
    x = torch.randn(4, 3)
    for _ in range(3):
        module(x)
    assert usual_of(module)((x,), {}) is not Missed
