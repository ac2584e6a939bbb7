"""The fast path recognizes a repeated call, and detects every change that test_key lists."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.capture.key.fast_path import FastPath, Missed, compile_fast_path
from onnxtrain.capture.key.key import ModuleState, attribute_reads
from onnxtrain.capture.structure import flatten_call
from onnxtrain.frontend.ort_module import engine_of
from tests.capture.key.test_key import CHANGES, INPUTS, NAMES, SWITCHES, Looks, Model, X
from tests.reference import assert_matches


class AnySizes:
    def check(self, tensors: Sequence[torch.Tensor]) -> bool:
        return True


def return_tensors(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensors


def compile_for(model: nn.Module, names: Sequence[str], *args: Any, **kwargs: Any) -> FastPath | None:
    tensors, structure = flatten_call(args, kwargs)
    state = ModuleState(model, names)
    return compile_fast_path(state.snapshot, AnySizes(), structure, tensors, return_tensors)  # type: ignore[arg-type]


def compiled_for(model: nn.Module, names: Sequence[str], *args: Any, **kwargs: Any) -> FastPath:
    fast_path = compile_for(model, names, *args, **kwargs)
    assert fast_path is not None, "the generated check does not work on this Python: steps are slower than necessary"
    return fast_path


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_the_module_is_detected(name: str) -> None:
    model = Model()
    fast_path = compiled_for(model, NAMES, X)
    assert fast_path((X,), {}) is not Missed
    CHANGES[name][0](model)
    assert fast_path((X,), {}) is Missed


@pytest.mark.parametrize("name", SWITCHES)
def test_every_context_is_detected(name: str) -> None:
    fast_path = compiled_for(Model(), NAMES, X)
    with SWITCHES[name][0]():
        assert fast_path((X,), {}) is Missed
    assert fast_path((X,), {}) is not Missed


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
def test_every_switch_is_detected(change: Callable[[], None], undo: Callable[[], None]) -> None:
    fast_path = compiled_for(Model(), NAMES, X)
    change()
    try:
        assert fast_path((X,), {}) is Missed
    finally:
        undo()


def test_every_transform_and_mode_is_detected() -> None:
    from torch.autograd import forward_ad
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    fast_path = compiled_for(Model(), NAMES, X)
    seen: list[Any] = []
    torch.func.vmap(lambda x: seen.append(fast_path((X,), {})) or x)(torch.ones(2))  # type: ignore[func-returns-value]
    torch.func.grad(lambda x: seen.append(fast_path((X,), {})) or x.sum())(torch.ones(2))  # type: ignore[func-returns-value]
    with forward_ad.dual_level():
        seen.append(fast_path((X,), {}))
    with Mode():
        seen.append(fast_path((X,), {}))
    assert seen == [Missed] * 4


@pytest.mark.parametrize("name", INPUTS)
def test_every_fact_of_an_input_is_detected(name: str) -> None:
    assert compiled_for(Model(), NAMES, X)((INPUTS[name][0],), {}) is Missed


def test_inference_tensors_are_detected() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2, 3, 4, 5)
    assert compiled_for(Model(), NAMES, X)((tensor,), {}) is Missed


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
def test_every_change_of_the_arguments_is_detected(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    fast_path = compiled_for(Model(), NAMES, FIRST, batch=BATCH)
    expected = [A, FIRST, B, BATCH["more"][1][0]]
    tensors = fast_path((FIRST,), {"batch": BATCH})
    assert tensors is not Missed
    assert {id(t) for t in tensors[len(NAMES) :]} == {id(t) for t in expected}
    assert fast_path(args, kwargs) is Missed


@pytest.mark.parametrize("value", [0.5, 0.0, -0.0, math.inf, math.nan])
def test_every_change_of_a_float_is_detected(value: float) -> None:
    fast_path = compiled_for(Model(), NAMES, A, value)
    for other in (0.5, 0.0, -0.0, math.inf, -math.inf, math.nan, 0, 1):
        recognized = fast_path((A, other), {}) is not Missed
        assert recognized == (type(other) is float and repr(other) == repr(value)), other


def test_another_order_of_kwargs_is_detected() -> None:
    fast_path = compiled_for(Model(), NAMES, a=A, b=B)
    assert fast_path((), {"a": A, "b": B}) is not Missed
    assert fast_path((), {"b": B, "a": A}) is Missed


def test_a_tensor_that_is_passed_twice() -> None:
    """As in model(input_ids=ids, labels=ids)."""
    equal = A.clone()
    fast_path = compiled_for(Model(), NAMES, A, labels=A)
    assert fast_path((A,), {"labels": A})[len(NAMES) :] == (A,)
    assert fast_path((equal,), {"labels": equal})[len(NAMES) :] == (equal,)
    assert fast_path((A,), {"labels": equal}) is Missed
    assert fast_path((A,), {"labels": A[:]}) is Missed
    assert compiled_for(Model(), NAMES, A, labels=equal)((A,), {"labels": A}) is Missed


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_unsupported_calls_have_no_fast_path() -> None:
    model = Model()
    assert compile_for(model, NAMES, A, A[:1]) is None
    assert compile_for(model, NAMES, A, 0.5j) is None
    assert compile_for(model, NAMES, A, {1: B}) is None
    assert compile_for(model, NAMES, Pair(A, B)) is None
    assert compile_for(model, NAMES, X.transpose(0, 1)) is None
    assert compile_for(model, NAMES) is None


def test_a_version_of_pytorch_without_the_cpp_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.capture.key.tensor_checks.detects_every_fact", lambda: False)
    for name in ("dtype of all", "shape", "training of one"):
        test_every_change_of_the_module_is_detected(name)
    for name in INPUTS:
        test_every_fact_of_an_input_is_detected(name)


def test_no_fast_path_if_the_check_misses_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.capture.key.fast_path.detects_every_change", lambda: False)
    assert compile_for(Model(), NAMES, X) is None


@pytest.mark.parametrize("change", ["another value", "removed", "in the instance"])
def test_every_change_of_a_class_constant_is_detected(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Looks()
    with attribute_reads() as reads:
        model(X)
    tensors, structure = flatten_call((X,), {})
    state = ModuleState(model, [], frozenset(reads))
    fast_path = compile_fast_path(state.snapshot, AnySizes(), structure, tensors, return_tensors)  # type: ignore[arg-type]
    assert fast_path is not None
    assert fast_path((X,), {}) is not Missed
    match change:
        case "another value":
            monkeypatch.setattr(Looks, "scale", 3.0)
        case "removed":
            monkeypatch.delattr(Looks, "scale")
        case _:
            model.scale = 3.0
    assert fast_path((X,), {}) is Missed


class LinearModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        return result


def fast_path_of(module: ORTModule) -> FastPath:
    fast_path: FastPath = engine_of(module)._recent.fast_path
    return fast_path


def test_current_tensors_are_read() -> None:
    """Parameters are replaced before the fast path is compiled, and after."""
    plain = LinearModel()
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
        assert_matches(output, plain, x)
        assert plain.linear.weight.grad is not None
        assert_matches(plain.linear.weight.grad, lambda x: x.sum(0).expand(2, 3), x)
    assert engine_of(module).captures == 1


class Scaled(LinearModel):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scales[0]


def test_a_module_that_changes_on_every_step_is_recompiled_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled_at: list[int] = []

    def count(*args: Any) -> Any:
        compiled_at.append(plain.calls - 1)
        return compile_fast_path(*args)

    monkeypatch.setattr("onnxtrain.frontend.engine.compile_fast_path", count)
    monkeypatch.setattr("onnxtrain.frontend.engine._MAX_PATIENCE", 8)
    plain = Scaled()
    module = ORTModule(plain)
    for _ in range(40):
        plain.calls += 1  # forward does not read it
        plain.scales = [1.0]  # another list of the same values
        module(torch.randn(4, 3))
    assert engine_of(module).captures == 1
    assert compiled_at == [1, 3, 7, 15, 23, 31, 39]


def test_alternating_train_and_eval() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    module = ORTModule(plain)
    x = torch.ones(50, 3)
    for _ in range(3):
        for _ in range(4):
            module.train()
            assert (module(x) == 0).any()
        for _ in range(4):
            module.eval()
            assert_matches(module(x), plain, x)
    assert engine_of(module).captures == 2


class ReadsBySize(nn.Module):
    """Has the same graph for many rows and for few."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.many, self.few = [2.0], [2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * (self.many if x.shape[0] > 3 else self.few)[0]
        return result


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("name", ["many", "few"])
def test_attributes_read_at_other_sizes_are_checked(name: str, calls: int) -> None:
    plain = ReadsBySize()
    module = ORTModule(plain)
    inputs = (torch.randn(5, 3), torch.randn(2, 3))
    for x in inputs:
        for _ in range(calls):
            assert_matches(module(x), plain, x)
    assert engine_of(module).captures == 1
    getattr(plain, name)[0] = 3.0
    for x in inputs:
        assert_matches(module(x), plain, x)


def test_another_type_of_output_at_other_sizes_is_detected() -> None:
    class Model(LinearModel):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return {"y": y} if x.shape[0] > 3 else [y]

    plain = Model()
    module = ORTModule(plain)
    for rows in (5, 2, 4, 1, 5):
        x = torch.randn(rows, 3)
        assert_matches(module(x), plain, x)
    assert engine_of(module).captures == 2


def test_a_module_that_calls_a_class_method_has_a_fast_path() -> None:
    class Model(LinearModel):
        @classmethod
        def doubled(cls, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.doubled(super().forward(x))

    module = ORTModule(Model())
    x = torch.randn(4, 3)
    for _ in range(3):
        module(x)
    assert fast_path_of(module)((x,), {}) is not Missed
