"""Each item of the capture key is changed after 1, 2, 3 and 300 calls, and the next call equals eager's."""

from __future__ import annotations

import copy
import enum
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_each_no_worse, assert_matches
from tests.thinned import slow_but_every, slow_except

# The second call compiles the fast path, and the third takes it. What a new fast path detects is tested in
# tests/capture/key/test_fast_path.py.
AFTER = pytest.mark.parametrize("calls", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)), 300])


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


class Inner:
    def __init__(self) -> None:
        self.shift = 0.5


class Config:
    def __init__(self) -> None:
        self.rate = 2.0
        self.inner = Inner()


@dataclass(slots=True)
class Slots:
    bias: float = 0.25


class Model(nn.Module):
    in_class = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.drop = nn.Dropout(1.0)  # its result in training is deterministic
        self.norm = nn.BatchNorm1d(3, momentum=0.0)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.table = torch.full((3,), 0.5, dtype=torch.float64)
        self.hidden = [torch.full((3,), 0.75, dtype=torch.float64)]
        self.flag, self.count, self.factor, self.name = True, 2, 1.25, "sum"
        self.sizes, self.items, self.labels, self.chosen = (1, 2), [1.0, [2.0]], {"a": 1.0}, {"a"}
        self.mode, self.dtype = Mode.PLAIN, torch.float64
        self.config, self.slots = Config(), Slots()
        self.activation = torch.relu

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.in_class

    @property
    def offset(self) -> float:
        return 0.125

    def forward(self, x: torch.Tensor, times: float = 1.0, *, plus: float = 0.0) -> torch.Tensor:
        x = self.layers(self.first(x)) * self.scale + self.table + self.hidden[0]
        x = self.norm(x) + self.drop(x)
        x = x * self.factor if self.flag else x - self.factor
        x = x * self.count + self.sizes[1] + self.items[0] * self.items[1][0] + self.labels["a"]  # type: ignore[index]
        x = x * self.config.rate + self.config.inner.shift + self.slots.bias
        x = x * 2 if self.mode is Mode.DOUBLED else x
        x = x + (1.0 if "b" in self.chosen else 0.0)
        x = self.part(self.activation(x)) + self.offset
        x = x.sum(1) if self.name == "sum" else x.mean(1)
        return x.to(self.dtype) * times + plus


def assign(owner: Any, name: str, value: Any) -> None:
    for step in name.split(".")[:-1]:
        owner = getattr(owner, step)
    setattr(owner, name.rpartition(".")[2], value)


def doubled(module: nn.Module, args: Any, output: torch.Tensor | None = None) -> Any:
    """A forward hook, or a pre-hook."""
    return tuple(2 * x for x in args) if output is None else 2 * output


def gradients_doubled(module: nn.Module, inputs: Any, outputs: Any = None) -> Any:
    """A full backward hook, or a pre-hook."""
    return tuple(None if g is None else 2 * g for g in inputs)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value * 1.5 for name, value in model.state_dict().items()}


def in_float32(model: Model) -> None:
    model.float()
    model.table, model.hidden[0] = model.table.float(), model.hidden[0].float()


def in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


MODULE: dict[str, Callable[[Model], Any]] = {
    "training of all": lambda m: m.eval(),
    "training of the module alone": lambda m: assign(m, "training", False),
    "training of dropout": lambda m: m.drop.eval(),
    "training of BatchNorm": lambda m: m.norm.eval(),
    "p of dropout": lambda m: assign(m, "drop.p", 0.0),
    "parameter": lambda m: assign(m, "first.weight", nn.Parameter(torch.eye(3).double())),
    "data of a parameter": lambda m: assign(m, "first.weight.data", torch.eye(3).double()),
    "elements of a parameter": lambda m: in_place(m.first.weight),
    "requires_grad": lambda m: m.first.weight.requires_grad_(False),
    "requires_grad of all": lambda m: m.requires_grad_(False),
    "parameter None": lambda m: assign(m, "first.bias", None),
    "dtype of all": in_float32,
    "assigned state": lambda m: m.load_state_dict(state_of(m), assign=True),
    "loaded state": lambda m: m.load_state_dict(state_of(m)),
    "tied": lambda m: assign(m, "layers.0.weight", m.first.weight),
    "buffer": lambda m: assign(m, "scale", torch.ones(3).double()),
    "shape of a buffer": lambda m: assign(m, "scale", torch.full((1,), 3.0).double()),
    "elements of a buffer": lambda m: in_place(m.scale),
    "tensor attribute": lambda m: assign(m, "table", torch.ones(3).double()),
    "elements of a tensor attribute": lambda m: in_place(m.table),
    "tensor in a list": lambda m: m.hidden.__setitem__(0, torch.ones(3).double()),
    "elements of a tensor in a list": lambda m: in_place(m.hidden[0]),
    "submodule": lambda m: assign(m, "first", nn.Linear(3, 3).double()),
    "submodule in a Sequential": lambda m: m.layers.__setitem__(1, nn.Sigmoid()),
    "submodule added": lambda m: m.layers.append(nn.Linear(3, 3).double()),
    "submodule removed": lambda m: m.layers.pop(1),
    "class of a submodule": lambda m: assign(m, "layers.1.__class__", nn.Sigmoid),
    "bool": lambda m: assign(m, "flag", False),
    "int": lambda m: assign(m, "count", 3),
    "float": lambda m: assign(m, "factor", 3.0),
    "string": lambda m: assign(m, "name", "mean"),
    "tuple": lambda m: assign(m, "sizes", (1, 3)),
    "list element": lambda m: m.items.__setitem__(0, 3.0),
    "list": lambda m: assign(m, "items", [3.0, [4.0]]),
    "nested list": lambda m: m.items[1].__setitem__(0, 3.0),
    "dict": lambda m: m.labels.update(a=3.0),
    "set": lambda m: m.chosen.add("b"),
    "enum": lambda m: assign(m, "mode", Mode.DOUBLED),
    "dtype attribute": lambda m: assign(m, "dtype", torch.float32),
    "config": lambda m: assign(m, "config.rate", 3.0),
    "config in config": lambda m: assign(m, "config.inner.shift", 3.0),
    "other config": lambda m: assign(m, "config.inner", type("Other", (), {"shift": 4.0})()),
    "attribute in a slot": lambda m: assign(m, "slots.bias", 3.0),
    "function in an attribute": lambda m: assign(m, "activation", torch.sigmoid),
    "attribute of the class, in the module": lambda m: assign(m, "in_class", 3.0),
    "method, in the module": lambda m: assign(m, "part", lambda x: x - 1),
    "forward, in the module": lambda m: assign(m, "forward", m.first.forward),
    "__dict__": lambda m: m.__dict__.update(factor=3.0),
    "other __dict__": lambda m: assign(m, "__dict__", {**m.__dict__, "factor": 3.0}),
    "forward hook": lambda m: m.first.register_forward_hook(doubled),
    "forward pre-hook": lambda m: m.first.register_forward_pre_hook(doubled),
    "full backward hook": lambda m: m.first.register_full_backward_hook(gradients_doubled),
    "full backward pre-hook": lambda m: m.first.register_full_backward_pre_hook(gradients_doubled),
}


def check(ours: Callable[..., Any], plain: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Output, gradients and buffers of one call equal those of eager."""
    buffers = [b.clone() for b in plain.buffers()]
    with torch.inference_mode(False):
        wide = copy.deepcopy(plain).double()  # autocast leaves float64 as it is
    results = []
    for run, module in ((ours, plain), (plain, plain), (wide, wide)):
        with torch.no_grad():
            for buffer, before in zip(module.buffers(), buffers, strict=True):
                buffer.copy_(before)
        module.zero_grad()
        given = [a.double() if module is wide and isinstance(a, torch.Tensor) else a for a in args]
        inputs = [
            a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in given
        ]
        output = run(*inputs, **kwargs)
        if output.requires_grad:
            # Random, as a nearly equal one for all rows would cancel in batch norm, and exact in bfloat16.
            cotangent = torch.randint(-4, 9, output.shape, generator=torch.Generator().manual_seed(0)) / 4
            output.backward(cotangent.to(output.dtype))
        grads = {name: p.grad for name, p in module.named_parameters()}
        of_inputs = [a.grad for a in inputs if isinstance(a, torch.Tensor)]
        results.append((output.detach(), output.requires_grad, grads, of_inputs, [b.clone() for b in module.buffers()]))
    assert_each_no_worse("result", *results)


def prepared(calls: int, kind: type[nn.Module] = Model) -> tuple[Any, Any, torch.Tensor]:
    """Make a module that was called so many times, in training and in eval mode."""
    torch.manual_seed(0)
    x = 3 * torch.randn(4, 3)  # where tanh is straight, the gradients of biases before batch norm would cancel
    plain = kind()
    if kind is Model:
        plain, x = plain.double(), x.double()
    ours = ORTModule(plain)
    for _ in range(calls):
        ours(x)
    return plain, ours, x


@pytest.fixture(autouse=True)
def no_warning_of_fallbacks() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs in PyTorch")
        yield


@AFTER
@pytest.mark.parametrize("name", slow_except(MODULE, *[*MODULE][::7], "attribute in a slot"))
def test_a_change_of_the_module(calls: int, name: str) -> None:
    plain, ours, x = prepared(calls)
    MODULE[name](plain)
    x = x.to(plain.first.weight.dtype)
    for _ in range(3):
        check(ours, plain, x)


@AFTER
@pytest.mark.parametrize("name", slow_but_every(2, ["forward", "forward_pre", "full_backward", "full_backward_pre"]))
def test_hooks_that_are_removed(calls: int, name: str) -> None:
    hook = gradients_doubled if "backward" in name else doubled
    plain, ours, x = prepared(0)
    handle = getattr(plain.first, f"register_{name}_hook")(hook)
    for _ in range(calls):
        ours(x)
    check(ours, plain, x)
    handle.remove()
    for _ in range(calls):
        ours(x)
    check(ours, plain, x)
    getattr(plain.first, f"register_{name}_hook")(hook)
    check(ours, plain, x)


def of_linear(hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, *args: hook(module, *args) if isinstance(module, nn.Linear) else None


@AFTER
@pytest.mark.parametrize("name", slow_but_every(2, ["forward", "forward_pre", "full_backward", "full_backward_pre"]))
def test_hooks_of_all_modules(calls: int, name: str) -> None:
    hook = of_linear(gradients_doubled if "backward" in name else doubled)
    plain, ours, x = prepared(calls)
    handle = getattr(torch_module, f"register_module_{name}_hook")(hook)
    try:
        check(ours, plain, x)
    finally:
        handle.remove()
    check(ours, plain, x)


CLASS: dict[str, tuple[str, Any]] = {
    "attribute": ("in_class", 3.0),
    "method": ("part", lambda self, x: x - 1),
    "property": ("offset", property(lambda self: 5.0)),
    "forward": ("forward", lambda self, x: self.first(x)),
    "__call__": ("__call__", lambda self, x: self.forward(x) * 3),
}


@AFTER
@pytest.mark.parametrize("name", slow_but_every(3, CLASS))
def test_a_change_of_the_class(calls: int, name: str) -> None:
    plain, ours, x = prepared(calls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, *CLASS[name])
        check(ours, plain, x)
    check(ours, plain, x)


@contextmanager
def switched(set_to: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


class Constants(Model):
    """Depends on switches that forward does not name."""

    def forward(self, x: torch.Tensor, times: float = 1.0, *, plus: float = 0.0) -> torch.Tensor:
        heads = x[None, None]
        attention = nn.functional.scaled_dot_product_attention(heads, heads, heads)[0, 0]
        return self.first(x + attention) * torch.tensor(0.1) + torch.ones(3) * (2.0 if torch.is_grad_enabled() else 3.0)


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast in float16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "matmul precision": lambda: switched(torch.set_float32_matmul_precision, "high", "highest"),
    "determinism": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "math attention": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "dual level": torch.autograd.forward_ad.dual_level,
}


@AFTER
@pytest.mark.parametrize("name", slow_but_every(3, SWITCHES))
def test_a_switch(calls: int, name: str) -> None:
    plain, ours, x = prepared(calls, Constants)
    for context in (SWITCHES[name], nullcontext, SWITCHES[name]):
        with ExitStack() as stack:
            if name != "default dtype":
                stack.enter_context(context())
                check(ours, plain, x)
            else:  # the weights keep their dtype
                stack.enter_context(context())
                assert ours(x).dtype == plain(x).dtype
                # A result in float64 has the rounding of float32 weights.
                assert_matches(ours(x).float(), lambda plain, x: plain(x).float(), plain, x)


X = torch.linspace(-3, 3, 12, dtype=torch.float64).reshape(4, 3)
INPUTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "rows": ((X[:3].contiguous(),), {}),
    "one row": ((X.repeat(2, 1),), {}),
    "requires_grad": ((X.clone().requires_grad_(),), {}),
    "transposed": ((X.t().contiguous().t(),), {}),
    "every other row": ((X.repeat_interleave(2, 0)[::2],), {}),
    "expanded": ((X[:, :1].expand(4, 3),), {}),
    "dtype": ((X.float(),), {}),
    "a number": ((X, 2.0), {}),
    "a number by name": ((X,), {"times": 2.0}),
    "an int": ((X, 2), {}),
    "another name": ((X,), {"plus": 2.0}),
    "both names": ((X,), {"plus": 2.0, "times": 3.0}),
    "a tensor for a number": ((X, torch.tensor(2.0)), {}),
}


@AFTER
@pytest.mark.parametrize("name", slow_but_every(3, INPUTS))
def test_a_change_of_the_inputs(calls: int, name: str) -> None:
    args, kwargs = INPUTS[name]
    plain, ours, x = prepared(calls)
    if args[0].dtype == torch.float32:
        in_float32(plain)
    for _ in range(3):
        check(ours, plain, *args, **kwargs)
    if args[0].dtype == x.dtype:
        check(ours, plain, x)


@AFTER
def test_functional_call(calls: int) -> None:
    plain, ours, x = prepared(calls)
    state = {f"module.{name}": value.detach() * 2 for name, value in plain.named_parameters()}
    own = {name.removeprefix("module."): value for name, value in state.items()}
    got = torch.func.functional_call(ours, _names_of(ours, own), (x,))
    assert_matches(got, torch.func.functional_call, plain, own, (x,))
    check(ours, plain, x)


def _names_of(ours: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename the parameters as ORTModule does."""
    return {name: next(v for k, v in state.items() if name.endswith(k)) for name, _ in ours.named_parameters()}


def test_alternating_train_and_eval_without_another_capture() -> None:
    plain, ours, x = prepared(0)
    for calls in (1, 2, 3, 30, 1):
        for training in (True, False):
            ours.train(training)
            for _ in range(calls):
                ours(x)
            check(ours, plain, x)
    assert engine_of(ours).captures == 2
