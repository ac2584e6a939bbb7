"""The key detects every change of a module, its inputs or PyTorch's switches, and nothing else."""

from __future__ import annotations

import copy
import enum
import math
import sys
import threading
import timeit
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from onnxtrain import ORTModule
from onnxtrain.capture.key.key import (
    ModuleState,
    attribute_reads,
    environment,
    environment_difference,
    tensor_difference,
    tensor_facts,
)
from onnxtrain.capture.structure import flatten_call
from onnxtrain.errors import CaptureError
from tests.reference import assert_matches


class Mode(enum.Enum):
    A = 1
    B = 2


class Inner:
    def __init__(self) -> None:
        self.depth = 1
        self.names = ["a", "b"]


class Config:
    def __init__(self) -> None:
        self.rate = 0.1
        self.labels = {0: "no", 1: "yes"}
        self.inner = Inner()


class Other(torch.nn.Linear):
    pass


def function(x: torch.Tensor) -> torch.Tensor:
    return x


class Block(torch.nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.dropout = torch.nn.Dropout(0.1)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)])
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("absent", None)
        self.eps = 1e-5
        self.zero = 0.0
        self.nothing = math.nan
        self.flag = True
        self.count = 2
        self.name = "block"
        self.none = None
        self.mode = Mode.A
        self.dtype_of_scores = torch.float32
        self.sizes = (1, (2, 3))
        self.items = [1, {"k": [2.0]}]
        self.chosen = {"a", "b"}
        self.activation = function
        self.table = torch.arange(4.0)
        self.hidden = [torch.ones(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x)) * self.eps
        return self.dropout(x) * self.scale + self.table * self.config.rate


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = Config()
        self.first = Block(config)
        self.second = Block(config)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.head.weight = self.first.layers[0].weight  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.first(x))))


NAMES = ["first.layers.0.weight", "first.layers.0.bias", "head.weight", "norm.running_mean", "second.table"]


def take(model: Model) -> ModuleState:
    return ModuleState(model, NAMES)


def replace_weight(model: Model, **facts: Any) -> None:
    old = model.second.layers[1].weight
    facts = {"size": (4, 4), "dtype": old.dtype, "device": "cpu"} | facts
    model.second.layers[1].weight = torch.nn.Parameter(torch.zeros(**facts))


def setattr_(target: Any, name: str, value: Any) -> None:
    setattr(target, name, value)


def swap_data(model: Model) -> None:
    model.norm.weight.data = torch.ones(5)


Change = Callable[[Model], Any]
CHANGES: dict[str, tuple[Change, str]] = {
    # training flags
    "training of all": (lambda m: m.eval(), "training of the module: True → False"),
    "training of one": (lambda m: m.first.dropout.eval(), "training of first.dropout: True → False"),
    # plain attributes
    "float": (lambda m: setattr_(m.second.dropout, "p", 0.2), "p of second.dropout: 0.1 → 0.2"),
    "small float": (lambda m: setattr_(m.first, "eps", 1e-6), "eps of first: 1e-05 → 1e-06"),
    "negative zero": (lambda m: setattr_(m.first, "zero", -0.0), "zero of first: 0.0 → -0.0"),
    "nan to number": (lambda m: setattr_(m.first, "nothing", 0.0), "nothing of first: nan → 0.0"),
    "bool": (lambda m: setattr_(m.first, "flag", False), "flag of first: True → False"),
    "bool to int": (lambda m: setattr_(m.first, "flag", 1), "flag of first: True → 1"),
    "int to float": (lambda m: setattr_(m.first, "count", 2.0), "count of first: 2 → 2.0"),
    "float to int": (lambda m: setattr_(m.first, "zero", 0), "zero of first: 0.0 → 0"),
    "string": (lambda m: setattr_(m.first, "name", "x"), "name of first: 'block' → 'x'"),
    "None": (lambda m: setattr_(m.first, "none", 0), "none of first: None → 0"),
    "enum": (lambda m: setattr_(m.first, "mode", Mode.B), "mode of first"),
    "dtype": (lambda m: setattr_(m.first, "dtype_of_scores", torch.float64), "dtype_of_scores of first"),
    "tuple": (lambda m: setattr_(m.first, "sizes", (1, (2, 4))), "sizes[1][1] of first: 3 → 4"),
    "list": (lambda m: m.first.items.append(3), "items of first"),
    "list element": (lambda m: m.first.items.__setitem__(0, 5), "items[0] of first: 1 → 5"),
    "list element type": (lambda m: m.first.items.__setitem__(0, True), "items[0] of first: 1 → True"),
    "nested list": (lambda m: m.first.items[1]["k"].__setitem__(0, 9.0), "items[1]['k'][0] of first: 2.0 → 9.0"),
    "nested dict": (lambda m: m.first.items[1].update(j=1), "items[1] of first"),
    "set": (lambda m: m.first.chosen.add("c"), "chosen of first"),
    "function": (lambda m: setattr_(m.first, "activation", torch.relu), "activation of first"),
    "added": (lambda m: setattr_(m.first, "fresh", 1), "fresh of first: absent → 1"),
    "removed": (lambda m: delattr(m.first, "flag"), "flag of first: True → absent"),
    "removed and added": (lambda m: (delattr(m.first, "flag"), setattr_(m.first, "g", 1)), "flag of first"),
    "tensor in a list": (lambda m: m.first.hidden.__setitem__(0, torch.ones(2)), "hidden[0] of first"),
    "tensor attribute not read": (lambda m: setattr_(m.first, "table", torch.arange(4.0)), "table of first"),
    "shape of a tensor attribute": (lambda m: setattr_(m.second, "table", torch.ones(5)), "shape of second.table"),
    "forward of an object": (lambda m: setattr_(m.first, "forward", function), "forward of first: absent"),
    # objects
    "config": (lambda m: setattr_(m.first.config, "rate", 0.3), "config.rate of first: 0.1 → 0.3"),
    "config added": (lambda m: setattr_(m.first.config, "fresh", 1), "config of first"),
    "dict of config": (lambda m: m.first.config.labels.update({2: "maybe"}), "config.labels of first"),
    "config in config": (lambda m: setattr_(m.first.config.inner, "depth", 2), "config.inner.depth of first: 1 → 2"),
    "list in config in config": (lambda m: m.first.config.inner.names.pop(), "config.inner.names of first"),
    "other config": (lambda m: setattr_(m.second, "config", Config()), "config of second"),
    # submodules
    "submodule": (lambda m: setattr_(m.first, "dropout", torch.nn.Dropout(0.1)), "submodule dropout of first"),
    "submodule added": (lambda m: m.first.add_module("x", torch.nn.ReLU()), "names of submodules of first"),
    "submodule removed": (lambda m: delattr(m.first, "dropout"), "names of submodules of first"),
    "submodule None": (lambda m: setattr_(m.first, "dropout", None), "submodule dropout of first"),
    "list of modules": (lambda m: m.first.layers.append(torch.nn.ReLU()), "first.layers"),
    "order": (
        lambda m: m.first.layers._modules.update({"0": m.first.layers._modules.pop("0")}),
        "names of submodules of first.layers: 0, 1 → 1, 0",
    ),
    "class": (lambda m: setattr_(m.first.layers[0], "__class__", Other), "class of first.layers.0: Linear → Other"),
    "parametrization": (lambda m: parametrizations.weight_norm(m.second.layers[0]), "second.layers.0"),
    # hooks
    "forward hook": (lambda m: m.first.register_forward_hook(lambda *a: None), "forward hooks of first"),
    "forward pre-hook": (lambda m: m.first.register_forward_pre_hook(lambda *a: None), "forward pre hooks of first"),
    "backward hook": (lambda m: m.norm.register_full_backward_hook(lambda *a: None), "backward hooks of norm"),
    "backward pre-hook": (lambda m: m.norm.register_full_backward_pre_hook(lambda *a: None), "backward pre hooks"),
    "other table of hooks": (
        lambda m: m.first.__dict__.update(_forward_hooks=OrderedDict({1: function})),
        "forward hooks of first",
    ),
    # parameters and buffers
    "requires_grad": (lambda m: m.norm.weight.requires_grad_(False), "requires_grad of norm.weight: True → False"),
    "dtype of all": (lambda m: m.double(), "dtype of first.scale: torch.float32 → torch.float64"),
    "dtype of one": (lambda m: replace_weight(m, dtype=torch.float64), "dtype of second.layers.1.weight"),
    "shape": (lambda m: replace_weight(m, size=(4, 5)), "shape of second.layers.1.weight"),
    "shape of data": (swap_data, "shape of norm.weight: torch.Size([4]) → torch.Size([5])"),
    "device": (lambda m: replace_weight(m, device="meta"), "device of second.layers.1.weight: cpu → meta"),
    "parameter None": (lambda m: setattr_(m.first.layers[0], "bias", None), "first.layers.0.bias"),
    "parameter added": (lambda m: setattr_(m.second.layers[1], "bias", torch.nn.Parameter(torch.ones(4))), "bias"),
    "parameter removed": (lambda m: delattr(m.norm, "weight"), "of norm.weight"),
    "buffer": (lambda m: setattr_(m.first, "scale", torch.ones(1)), "shape of first.scale"),
    "buffer dtype": (lambda m: setattr_(m.first, "scale", torch.ones(4).half()), "dtype of first.scale"),
    "buffer no longer None": (lambda m: setattr_(m.first, "absent", torch.ones(1)), "first.absent"),
    "buffer None": (lambda m: setattr_(m.first, "scale", None), "first.scale"),
    "untied": (
        lambda m: setattr_(m.head, "weight", torch.nn.Parameter(torch.ones(4, 4))),
        "the tensor it is tied to of head.weight: first.layers.0.weight → absent",
    ),
    "subclass": (
        lambda m: m.norm._parameters.update(weight=transformed(m.norm.weight)),
        "type of norm.weight: Tensor → Special",
    ),
}


class Special(torch.Tensor):
    pass


def transformed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(Special).requires_grad_()


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_detected(name: str) -> None:
    model = Model()
    state = take(model)
    assert state.matches(model)
    change, text = CHANGES[name]
    change(model)
    assert text in state.difference(model)
    assert not state.matches(model)
    assert not state.matches(model)
    if not (name.startswith("parameter") or name in ("submodule removed", "parametrization")):
        assert take(model).matches(model)


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_detected_without_private_checks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.capture.key.tensor_checks._TensorGuards", None)
    test_each_change_is_detected(name)


def same_config(model: Model) -> None:
    model.first.config = model.second.config = copy.deepcopy(model.first.config)


def move_to_end(model: Model) -> None:
    del model.first.flag
    model.first.flag = True


def other_tensors(model: Model) -> None:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.head.weight = model.first.layers[0].weight


UNCHANGED: dict[str, Change] = {
    "nothing": lambda m: None,
    "train again": lambda m: m.eval().train(),
    "equal float": lambda m: setattr_(m.first.dropout, "p", float("0.1")),
    "nan again": lambda m: setattr_(m.first, "nothing", float("nan")),
    "zero again": lambda m: setattr_(m.first, "zero", float("0")),
    "equal string": lambda m: setattr_(m.first, "name", "".join(["bl", "ock"])),
    "equal list": lambda m: setattr_(m.first, "items", [1, {"k": [2.0]}]),
    "equal tuple": lambda m: setattr_(m.first, "sizes", (1, (2, int("3")))),
    "equal set": lambda m: setattr_(m.first, "chosen", {"b", "a"}),
    "equal config": same_config,
    "removed and set again": move_to_end,
    "elements of a parameter": lambda m: torch.nn.init.ones_(m.norm.weight),
    "elements of a buffer": lambda m: m.first.scale.add_(1),
    "gradient": lambda m: setattr_(m.norm.weight, "grad", torch.ones(4)),
    "hook on a tensor": lambda m: m.norm.weight.register_hook(lambda g: g),
    "hook of state_dict": lambda m: m.first.register_load_state_dict_post_hook(lambda *a: None),
    "hook added and removed": lambda m: m.first.register_forward_hook(lambda *a: None).remove(),
    "other tensors": other_tensors,
    "other data": lambda m: setattr_(m.norm.weight, "data", torch.zeros(4)),
    "memory format": lambda m: setattr_(m.second.layers[1].weight, "data", torch.ones(4, 4).t()),
    "other tensor that is read": lambda m: setattr_(m.second, "table", torch.ones(4)),
    "tied": lambda m: setattr_(m.second.layers[1], "weight", m.first.layers[1].weight),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_nothing_else_is_a_change(name: str) -> None:
    model = Model()
    state = take(model)
    assert state.matches(model)
    UNCHANGED[name](model)
    assert state.difference(model) == ""
    assert state.matches(model)
    tensors = state.read(model)
    assert tensors is not None
    assert tensors[0] is tensors[2] is model.first.layers[0].weight
    assert tensors[3] is model.norm.running_mean
    assert tensors[4] is model.second.table


class SameText:
    def __repr__(self) -> str:
        return "the same text"


def test_objects_with_the_same_repr_are_distinguished() -> None:
    model = torch.nn.Linear(2, 2)
    first, second = SameText(), SameText()
    model.table, model.chosen = {first: 1, second: 2}, {first}
    state = ModuleState(model, ["weight"])
    assert state.matches(model)
    model.table[second] = 3
    assert not state.matches(model)
    model.table[second] = 2
    assert state.matches(model)
    model.chosen.add(second)
    assert not state.matches(model)


def test_tensors_are_read_through_the_module() -> None:
    model = Model()
    state = take(model)
    replaced = {name: t.detach() + 1 for name, t in model.named_parameters()}
    seen: list[Any] = []
    model.forward = lambda x: seen.append(state_of_class.read(model)) or x  # type: ignore[method-assign, func-returns-value]
    state_of_class = take(model)
    torch.func.functional_call(model, replaced, torch.ones(2, 4))
    assert seen[0] is None  # these do not require grad
    replaced = {name: t.requires_grad_() for name, t in replaced.items()}
    torch.func.functional_call(model, replaced, torch.ones(2, 4))
    assert seen[1][1] is replaced["first.layers.0.bias"]
    del model.forward
    assert state.read(model)[1] is model.first.layers[0].bias  # type: ignore[index]


def test_the_state_does_not_depend_on_grad_mode_and_autocast() -> None:
    model = Model()
    state = take(model)
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with context:
            assert state.matches(model)
            taken_inside = take(model)
            assert taken_inside.matches(model)
        assert taken_inside.matches(model)
        model.norm.weight.requires_grad_(False)
        with context:
            assert not state.matches(model)
            assert not taken_inside.matches(model)
        model.norm.weight.requires_grad_(True)


def test_a_copy_of_the_module_is_another_state() -> None:
    model = Model()
    state = take(model)
    assert not state.matches(copy.deepcopy(model))
    assert "another object" in state.difference(copy.deepcopy(model))


def test_hooks_that_exist_from_the_start() -> None:
    model = Model()
    handle = model.first.register_forward_hook(lambda *a: None)
    state = take(model)
    assert state.matches(model)
    handle.remove()
    assert not state.matches(model)
    model.first.register_forward_hook(lambda *a: None)
    assert not state.matches(model)
    assert "forward hooks of first" in state.difference(model)


@pytest.mark.parametrize("name", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_global_hooks(name: str) -> None:
    model = Model()
    state = take(model)
    handle = getattr(torch_module, f"register_module_{name}_hook")(lambda *a: None)
    try:
        assert not state.matches(model)
        assert "hooks of all modules" in state.difference(model)
        assert take(model).matches(model)
    finally:
        handle.remove()
    assert state.matches(model)


def test_forward_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    state = take(model)
    monkeypatch.setattr(Block, "forward", function)
    assert not state.matches(model)
    assert "forward of class Block" in state.difference(model)


def test_only_attributes_that_forward_reads_matter() -> None:
    model = Model()
    model.steps = 0  # type: ignore[assignment]
    original = torch.nn.Module.__getattribute__
    with attribute_reads() as reads:
        model(torch.ones(2, 4))
    assert torch.nn.Module.__getattribute__ is original
    assert "__getattribute__" not in torch.nn.Module.__dict__
    state = ModuleState(model, NAMES, frozenset(reads))
    model.steps = 1  # type: ignore[assignment]
    model.losses = [1.0]  # type: ignore[assignment]
    model.first.name = "other"
    model.first.items.append(3)
    assert state.difference(model) == ""
    assert state.matches(model)
    for change, undo in (
        (lambda: setattr_(model.first, "eps", 1.0), lambda: setattr_(model.first, "eps", 1e-5)),
        (lambda: setattr_(model.first.config, "rate", 1.0), lambda: setattr_(model.first.config, "rate", 0.1)),
        (model.first.dropout.eval, model.first.dropout.train),
        (lambda: setattr_(model.first, "forward", function), lambda: delattr(model.first, "forward")),
        (lambda: model.norm.weight.requires_grad_(False), lambda: model.norm.weight.requires_grad_(True)),
    ):
        change()
        assert not state.matches(model)
        undo()
        assert state.matches(model)


def test_reads_of_another_thread_are_not_recorded() -> None:
    model = Model()
    with attribute_reads() as reads:
        thread = threading.Thread(target=lambda: model.first.name)
        thread.start()
        thread.join()
    assert not reads


class Looks(torch.nn.Module):
    scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "bonus"):
            x = x + self.bonus
        return x * self.scale * len(vars(self.part))

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.ReLU()


def test_attributes_that_forward_does_not_find_matter() -> None:
    model = Looks()
    with attribute_reads() as reads:
        model(torch.ones(2))
    for change in (
        lambda m: setattr_(m, "bonus", 1.0),
        lambda m: setattr_(m, "scale", 3.0),
        lambda m: setattr_(m.part, "anything", 3.0),  # forward read all attributes
    ):
        state = ModuleState(model, (), frozenset(reads))
        assert state.matches(model)
        change(model)
        assert state.difference(model)
        assert not state.matches(model)
        model.__dict__.pop("bonus", None), model.__dict__.pop("scale", None)
    other = Looks()
    with attribute_reads() as reads:
        other(torch.ones(2))
    state = ModuleState(other, (), frozenset(reads))
    other.unread = 1  # type: ignore[assignment]
    assert state.matches(other)
    other.scale = 2.0  # as in the class
    assert state.difference(other) == ""
    assert state.matches(other)
    other.scale = 3.0
    assert not state.matches(other)


def test_a_missing_name_is_an_error() -> None:
    model = Model()
    with pytest.raises(CaptureError, match="nowhere"):
        ModuleState(model, ["first.nowhere"]).read(model)


# The environment

BACKENDS = {
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
}


class FunctionMode(TorchFunctionMode):
    pass


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SWITCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "no_grad": (torch.no_grad, "grad mode: True → False"),
    "inference mode": (torch.inference_mode, "grad mode"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
    "autocast in float16": (lambda: torch.autocast("cpu", torch.float16), "autocast"),
    "autocast without cache": (lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False), "autocast"),
    "math attention": (lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), "attention"),
    "flash attention": (
        lambda: torch.nn.attention.sdpa_kernel([*BACKENDS - {SDPBackend.FLASH_ATTENTION}]),
        "flash attention: True → False",
    ),
    "memory-efficient attention": (
        lambda: torch.nn.attention.sdpa_kernel([*BACKENDS - {SDPBackend.EFFICIENT_ATTENTION}]),
        "memory-efficient attention: True → False",
    ),
    "no math attention": (
        lambda: torch.nn.attention.sdpa_kernel([*BACKENDS - {SDPBackend.MATH}]),
        "math attention: True → False",
    ),
    "cuDNN attention": (
        lambda: torch.nn.attention.sdpa_kernel([*BACKENDS - {SDPBackend.CUDNN_ATTENTION}]),
        "cuDNN attention: True → False",
    ),
    "forward mode": (torch.autograd.forward_ad.dual_level, "forward-mode differentiation"),
    "default device": (lambda: torch.device("meta"), "default device or mode"),
    "function mode": (FunctionMode, "default device or mode"),
    "dispatch mode": (DispatchMode, "dispatch modes"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_each_context_is_detected(name: str) -> None:
    before = environment()
    context, text = SWITCHES[name]
    with context():
        inside = environment()
        assert inside != before
        assert text in environment_difference(before, inside)
    assert environment() == before
    assert hash(environment()) == hash(before)
    assert environment_difference(before, environment()) == ""


@pytest.mark.parametrize(
    ("change", "undo", "text"),
    [
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
            "default dtype",
        ),
        (
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: torch.set_float32_matmul_precision("highest"),
            "float32 matmul precision",
        ),
        (
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
            "deterministic algorithms: False → True",
        ),
        (
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            lambda: torch.use_deterministic_algorithms(False),
            "deterministic algorithms: False → True",
        ),
        (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None), "default device"),
        (
            lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
            lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False),
            "reduced-precision math attention: False → True",
        ),
        (
            lambda: torch.backends.mha.set_fastpath_enabled(False),
            lambda: torch.backends.mha.set_fastpath_enabled(True),
            "fast path of attention layers: True → False",
        ),
    ],
)
def test_each_switch_is_detected(change: Callable[[], None], undo: Callable[[], None], text: str) -> None:
    before = environment()
    change()
    try:
        assert text in environment_difference(before, environment())
    finally:
        undo()
    assert environment() == before


@pytest.mark.parametrize(
    ("one", "other"),
    [("no_grad", "inference mode"), ("autocast", "autocast in float16"), ("autocast", "autocast without cache")],
)
def test_contexts_are_distinguished(one: str, other: str) -> None:
    environments = []
    for name in (one, other):
        with SWITCHES[name][0]():
            environments.append(environment())
    assert environments[0] != environments[1]


def test_warn_only_determinism_is_detected() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        strict = environment()
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert "warn only: False → True" in environment_difference(strict, environment())
    finally:
        torch.use_deterministic_algorithms(False)


def test_transforms_are_detected() -> None:
    before = environment()
    seen = []
    torch.func.vmap(lambda x: seen.append(environment()) or x)(torch.ones(2))  # type: ignore[func-returns-value]
    torch.func.grad(lambda x: seen.append(environment()) or x.sum())(torch.ones(2))  # type: ignore[func-returns-value]
    assert all("torch.func transforms" in environment_difference(before, inside) for inside in seen)


# Inputs

X = torch.ones(2, 3, 4, 5)
INPUTS: dict[str, tuple[torch.Tensor, str]] = {
    "dtype": (X.double(), "dtype: torch.float32 → torch.float64"),
    "device": (X.to("meta"), "device: cpu → meta"),
    "requires_grad": (X.clone().requires_grad_(), "requires_grad: False → True"),
    "dimensions": (X[0], "number of dimensions: 4 → 3"),
    "channels_last": (X.contiguous(memory_format=torch.channels_last), "memory format: contiguous → channels_last"),
    "transposed": (X.transpose(0, 1), "memory format"),
    "expanded": (X[:1].expand(2, 3, 4, 5), "memory format"),
    "subclass": (X.as_subclass(Special), "type: Tensor → Special"),
    "negated": (torch._neg_view(X), "negated view: False → True"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_each_fact_of_an_input_is_detected(name: str) -> None:
    tensor, text = INPUTS[name]
    assert text in tensor_difference(tensor_facts(X), tensor_facts(tensor))
    assert hash(tensor_facts(tensor)) == hash(tensor_facts(tensor))


def test_expanded_inputs_are_distinguished() -> None:
    """A write to an element of an expanded tensor changes others."""
    strided, expanded = torch.ones(2, 3, 8)[..., ::2], torch.ones(2, 3, 2)[..., :1].expand(2, 3, 4)
    assert "memory format" in tensor_difference(tensor_facts(strided), tensor_facts(expanded))


def test_inference_tensors_are_detected() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2, 3, 4, 5)
    assert "inference tensor" in tensor_difference(tensor_facts(X), tensor_facts(tensor))


def test_nothing_else_of_an_input_is_in_the_key() -> None:
    facts = tensor_facts(X)
    assert tensor_facts(torch.zeros(7, 1, 1, 9)) == facts
    assert tensor_facts(torch.nn.Parameter(X, requires_grad=False)) == facts
    assert tensor_facts(torch.ones(3, 3, 4, 5)[1:]) == facts
    wide, narrow = torch.ones(6, 4).t(), torch.ones(9, 8).t()
    assert tensor_facts(wide) == tensor_facts(narrow)
    assert tensor_difference(facts, tensor_facts(torch.zeros(1, 1, 1, 1))) == ""


# Speed


def microseconds(call: Callable[[], Any], number: int) -> float:
    return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6


def test_checking_is_fast(record_property: Any) -> None:
    linear = [torch.nn.Linear(32, 32) for _ in range(3)]
    mlp = torch.nn.Sequential(linear[0], torch.nn.ReLU(), linear[1], torch.nn.ReLU(), linear[2])
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=5, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    bert = transformers.BertForSequenceClassification(config)
    x, y = torch.ones(16, 32), torch.ones(16, 32)
    figures = {
        "environment": microseconds(environment, 1000),
        "facts of two inputs": microseconds(lambda: (tensor_facts(x), tensor_facts(y)), 1000),
        "flatten_call of two inputs": microseconds(lambda: flatten_call((x, y), {}), 1000),
    }
    for name, model, args in (("MLP", mlp, (x,)), ("BERT", bert, (torch.ones(2, 3, dtype=torch.long),))):
        names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
        with attribute_reads() as reads:
            model(*args)
        for title, read in (("all attributes", None), ("attributes that forward reads", frozenset(reads))):
            state = ModuleState(model, names, read)
            assert state.matches(model)
            figures[f"state of {name}, {title}"] = microseconds(lambda: state.read(model), 200)  # noqa: B023
    for name, figure in figures.items():
        sys.stdout.write(f"{name}: {figure:.2f} µs\n")
        record_property(name, figure)


class Scales(torch.nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @property
    def offset(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.linear(x)) + self.offset


@pytest.mark.parametrize("warm", [1, 4])
@pytest.mark.parametrize(
    ("name", "value"),
    [("factor", 3.0), ("scaled", lambda self, x: x - self.factor), ("offset", property(lambda self: 5.0))],
)
def test_class_attributes_that_forward_reads(
    name: str, value: object, warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Scales()
    ours = ORTModule(model)
    x = torch.ones(2, 3)
    for _ in range(warm):
        assert_matches(ours(x), model, x)
    monkeypatch.setattr(Scales, name, value)
    assert_matches(ours(x), model, x)
