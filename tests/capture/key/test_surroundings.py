"""State outside the module that forward reads changes between two calls, and the next call equals eager's."""

from __future__ import annotations

import copy
import functools
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias

import pytest
import torch
import transformers
from transformers.models.bert import modeling_bert

import onnxtrain
from onnxtrain import ORTModule
from onnxtrain.frontend.hierarchical_module import HierarchicalORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.capture.key import surroundings_model as outside
from tests.capture.key import surroundings_other as other
from tests.reference import assert_each_no_worse, assert_matches
from tests.thinned import covering, slow_but_every

# Makes a change, and registers how to revert it.
Change: TypeAlias = Callable[[ExitStack], Any]


def attribute(name: str, value: Any, owner: Any = outside) -> Change:
    """Set an attribute or a global to another value."""
    return lambda undo: undo.enter_context(pytest.MonkeyPatch.context()).setattr(owner, name, value, raising=False)


def item(holder: Any, key: Any, value: Any) -> Change:
    def change(undo: ExitStack) -> None:
        undo.callback(holder.__setitem__, key, holder[key])
        holder[key] = value

    return change


def in_place(tensor: torch.Tensor) -> Change:
    def change(undo: ExitStack) -> None:
        undo.callback(tensor.copy_, tensor.clone())
        tensor.add_(1)

    return change


def ones() -> torch.Tensor:
    return torch.ones(3, dtype=torch.float64)


def negated(x: torch.Tensor, plus: float = 0.5, *, times: float = 1.0) -> torch.Tensor:
    return -x


def another_config() -> outside.Config:
    config = outside.Config()
    config.inner.shift = 3.0
    return config


INNER = outside.from_closure.__closure__ or ()
VALUES: dict[str, Change] = {
    "float": attribute("SCALE", 3.0),
    "int for a float": attribute("SCALE", 2),
    "string": attribute("NAME", "mean"),
    "tuple": attribute("SIZES", (1, 3)),
    "bool": attribute("FLAG", False),
    "list": attribute("WEIGHTS", [3.0, [2.0]]),
    "list element": item(outside.WEIGHTS, 0, 3.0),
    "nested list element": item(outside.WEIGHTS[1], 0, 3.0),
    "dict entry": item(outside.TABLE, "a", 3.0),
    "set": attribute("CHOSEN", {"a", "b"}),
}
OBJECTS: dict[str, Change] = {
    "object": attribute("config", another_config()),
    "attribute of an object": attribute("shift", 3.0, outside.config.inner),
    "attribute of its class, in the object": attribute("rate", 3.0, outside.config),
    "method in the object": attribute("times", lambda x: x - 1, outside.config),
    "object in an object": attribute("inner", another_config().inner, outside.config),
    "attribute of a class": attribute("rate", 3.0, outside.Config),
    "attribute of a base, in the class": attribute("rate", 3.0, outside.Derived),
    "attribute of a class by name": attribute("on", 3.0, outside.Switches),
    "method": attribute("times", lambda self, x: x - 1, outside.Config),
    "property": attribute("half", property(lambda self: 3.0), outside.Config),
    "__call__": attribute("__call__", lambda self, x: x - 1, outside.Config),
    "slot": attribute("bias", 3.0, outside.slots),
    "list in a slot": item(outside.slots.factors, 1, 3.0),
}
FUNCTIONS: dict[str, Change] = {
    "function in a dict": item(outside.TABLE, "function", torch.sigmoid),
    "function": attribute("helper", lambda x: x - 1),
    "function in a function": attribute("innermost", lambda: 3.0),
    "code of a function": attribute("__code__", negated.__code__, outside.with_defaults),
    "closure": attribute("from_closure", outside.closure(3.0)),
    "cell of a closure": attribute("cell_contents", 3.0, INNER[0]),
    "argument of a partial": item(outside.partial.keywords, "other", ones()),
    "a builtin": attribute("min", max),
    "default": attribute("__defaults__", (3.0,), outside.with_defaults),
    "default by name": item(outside.with_defaults.__kwdefaults__, "times", 3.0),
    "defaults by name": attribute("__kwdefaults__", {"times": 4.0}, outside.with_defaults),
    "attribute of a Python module": attribute("FACTOR", 3.0, other),
    "attribute of a class of a Python module": attribute("shift", 3.0, other.Settings),
    "global of a function of a Python module": attribute("AMONG", 3.0, other),
    "name imported by forward": attribute("WITHIN", 3.0, other),
    "a Python module": attribute("other", types.SimpleNamespace(**{**vars(other), "FACTOR": 4.0})),
}
TENSORS: dict[str, Change] = {
    "tensor": attribute("TENSOR", ones()),
    "elements of a tensor": in_place(outside.TENSOR),
    "shape of a tensor": attribute("TENSOR", torch.ones(1, dtype=torch.float64)),
    "dtype of a tensor": attribute("TENSOR", torch.ones(3)),
    "tensor in a list in a dict": item(outside.TENSORS["a"], 0, ones()),
    "elements of a tensor in a list in a dict": in_place(outside.TENSORS["a"][0]),
    "tensor of an object": attribute("tensor", ones(), outside.config.inner),
    "elements of a tensor of an object": in_place(outside.config.inner.tensor),
    "elements of a tensor in a closure": in_place(INNER[1].cell_contents[0]),
    "weights of another module": item(
        outside.layer._parameters, "weight", torch.nn.Parameter(torch.eye(3).double(), requires_grad=False)
    ),
    "elements of the weights of another module": in_place(outside.layer.weight),
    "training of another module": attribute("training", True, outside.teacher[1]),
    "another module": attribute("teacher", torch.nn.Identity()),
}


CHANGES = {
    f"{kind.__name__}: {name}": (kind, change)
    for kind, changes in (
        (outside.Values, VALUES),
        (outside.Objects, OBJECTS),
        (outside.Functions, FUNCTIONS),
        (outside.Tensors, TENSORS),
    )
    for name, change in changes.items()
}


@functools.cache
def shared(kind: type[outside.Model], training: bool) -> tuple[outside.Model, Any]:
    """Make one module for all changes: a reverted change leaves it as it was."""
    torch.manual_seed(0)
    model = kind().double().train(training)
    return model, ORTModule(model, pieces=False)


X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


def check(model: torch.nn.Module, ours: Any) -> None:
    results = []
    for run in (model, ours):
        model.zero_grad()
        output = run(X)
        output.square().sum().backward()
        results.append((output.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert_each_no_worse("result", results[1], results[0], results[0])


@pytest.mark.parametrize(
    ("name", "calls", "training"),
    covering(
        slow_but_every(3, CHANGES), [pytest.param(2, False, id="2, eval"), pytest.param(300, True, id="300, train")]
    ),
)
@pytest.mark.filterwarnings("error")
def test_a_change(name: str, calls: int, training: bool) -> None:
    kind, change = CHANGES[name]
    model, ours = shared(kind, training)
    for _ in range(calls):
        ours(X)
    before = ours(X)
    with ExitStack() as undo:
        change(undo)
        assert not torch.equal(model(X), before)
        for _ in range(3):
            check(model, ours)
    check(model, ours)


# Changes that need no recapture, and changes that are too frequent for one


def captures(ours: Any) -> int:
    return int(engine_of(ours).captures)


UNCHANGED: dict[str, Change] = {
    "equal number": attribute("SCALE", float("1.5")),
    "equal list": attribute("WEIGHTS", [1.0, [2.0]]),
    "attribute that no code names": attribute("step", 3, outside.config),
    "tensor": attribute("TENSOR", ones()),
    "elements of a tensor": in_place(outside.TENSOR),
    "elements of a tensor in a list": in_place(outside.TENSORS["a"][0]),
    "elements of the weights of another module": in_place(outside.layer.weight),
}


@pytest.mark.parametrize("kind", [outside.Values, outside.Objects, outside.Tensors])
def test_the_same_graph_is_used(kind: type[outside.Model]) -> None:
    model, ours = shared(kind, True)
    check(model, ours)
    before = captures(ours)
    for change in UNCHANGED.values():
        with ExitStack() as undo:
            change(undo)
            for _ in range(3):
                check(model, ours)
    assert captures(ours) == before


NUMBER = torch.tensor(2.0, dtype=torch.float64)
SIZES = torch.tensor([2, 3])


class ReadsElements(outside.Model):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = torch.tensor([2, 3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * NUMBER.item() + float(NUMBER) + NUMBER
        return x.sum(1) * SIZES.tolist()[0] + self.sizes.tolist()[0]


def test_tensor_values_that_forward_reads_as_numbers() -> None:
    model = ReadsElements().double()
    ours = ORTModule(model, pieces=False)
    changes = (in_place(NUMBER), in_place(SIZES), in_place(model.sizes))
    replaced = [
        attribute(name, value, sys.modules[__name__]) for name, value in (("NUMBER", NUMBER + 3), ("SIZES", SIZES + 3))
    ]
    for change in (*changes, *replaced, attribute("sizes", SIZES + 3, model)):
        for _ in range(3):
            check(model, ours)
        with ExitStack() as undo:
            change(undo)
            check(model, ours)
    assert captures(ours) > 6


STEP = 0
WEIGHT = 0.0


class ReadsStep(outside.Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum(1) * STEP


class ReadsWeight(outside.Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum(1) * WEIGHT


@pytest.mark.parametrize(
    ("kind", "name", "pieces"),
    covering([pytest.param(ReadsStep, "STEP"), pytest.param(ReadsWeight, "WEIGHT")], [True, False]),
)
def test_a_value_that_changes_on_each_call(kind: type[outside.Model], name: str, pieces: bool) -> None:
    model = kind().double()
    ours = ORTModule(model, pieces=pieces)
    with warnings.catch_warnings(record=True) as warned, ExitStack() as undo:
        warnings.simplefilter("always")
        attribute(name, globals()[name], sys.modules[__name__])(undo)
        for _ in range(12):
            globals()[name] += 1
            check(model, ours)
    assert captures(ours) == 5
    [warning] = [w for w in warned if w.category is UserWarning]
    assert f"forward reads or sets {name} of global" in str(warning.message)
    assert f"{__file__}:{kind.forward.__code__.co_firstlineno + 1} in forward" in str(warning.message)


def test_a_value_that_changes_after_many_calls_is_captured_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ReadsStep().double()
    ours = ORTModule(model)
    for step in range(8):
        monkeypatch.setattr(sys.modules[__name__], "STEP", step + 1)
        for _ in range(40):
            ours(X)
        check(model, ours)
    assert captures(ours) == 8


COUNT = 0


class Counts(outside.Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global COUNT  # noqa: PLW0603  # the case that is tested
        COUNT += 1
        return self.first(x).sum(1) * COUNT


def test_forward_assigns_to_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "COUNT", 0)
    model = Counts().double()
    ours = ORTModule(model, pieces=False)
    with pytest.warns(UserWarning, match=r"changes Python state.*COUNT: 1 → 2"):
        first = ours(X)
    second = ours(X)
    assert COUNT == 2
    assert_each_no_worse("second", second, 2 * first, 2 * first)


# Other entry points, and packages


@pytest.mark.parametrize("wrap", [onnxtrain.prepare, HierarchicalORTModule])
def test_other_entry_points(wrap: Callable[[torch.nn.Module], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = outside.Values().double()
    eager = copy.deepcopy(model)
    ours = wrap(model)
    for _ in range(3):
        check(eager, eager)
        assert_matches(ours(X), eager, X)
    monkeypatch.setattr(outside, "SCALE", 4.0)
    assert_matches(ours(X), eager, X)


def test_a_forward_that_is_set_on_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    model = outside.Objects().double()
    eager = copy.deepcopy(model)
    for each in (model, eager):
        each.forward = types.MethodType(outside.Values.forward, each)  # type: ignore[method-assign]
    ours = onnxtrain.prepare(model)
    for scale in (1.5, 4.0):
        monkeypatch.setattr(outside, "SCALE", scale)
        assert_matches(ours(X), eager, X)


def test_a_function_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    model.set_attn_implementation("eager")
    ours = ORTModule(model)
    ids = torch.arange(6).reshape(2, 3)
    before = ours(ids).last_hidden_state

    def patched(module: Any, query: Any, key: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return value.transpose(1, 2) * outside.SCALE, None

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", patched)
    for scale in (1.5, 4.0):  # the replacement is user code, which is followed
        monkeypatch.setattr(outside, "SCALE", scale)
        output = ours(ids).last_hidden_state
        assert not torch.equal(output, before)
        assert_matches(output, lambda model, ids: model(ids).last_hidden_state, model, ids)
