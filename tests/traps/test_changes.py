"""Whatever a capture depends on changes after the first step: the next step equals eager's, and so does the one after.

One test for each item of the key (`capture/key/`): the call, the module, PyTorch's switches. Every model is made so
that the graph of the first step would be wrong after the change.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.reference import assert_each_no_worse
from tests.thinned import covering, slow_but_every, slow_except
from tests.traps.test_capture import TwoLayers
from tests.zoo.checks import Comparison, compared
from tests.zoo.entry import Call, Draw, ZooModel, mean_square, wide

WIDTH = 8
SIZES = (3, 0)


def features(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH, grad=True),))


def loss(output: Any) -> torch.Tensor:
    """Return the sum of the mean squares of all output tensors that have a gradient."""
    means = [wide(t).square().mean() for t in tensors(output) if t.requires_grad]
    return torch.stack([t.double() for t in means]).sum()


def tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from tensors(part)


# The call


class Function(nn.Module):
    """Call a function with a linear layer and the arguments of the call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.inner, *args, **kwargs)


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    scale: float = 1.0
    bias: torch.Tensor | None = None


def either(inner: Any, a: Any = None, b: Any = None) -> torch.Tensor:
    return inner(a) if b is None else -inner(b)  # type: ignore[no-any-return]


def by_kind(inner: Any, container: Any) -> torch.Tensor:
    values = [*container.values()] if isinstance(container, dict) else container
    return (
        inner(values[0])
        * (1 + len(type(container).__name__))
        * (2 if isinstance(container, dict) and "b" in container else 1)
    )  # type: ignore[no-any-return]


def in_order(inner: Any, container: dict[str, torch.Tensor]) -> torch.Tensor:
    x = container["a"]
    for value in container.values():
        x = inner(x + value)
    return x


def nested(inner: Any, container: Any) -> torch.Tensor:
    first, second = container
    return inner(first[0]) - second if isinstance(first, list) else inner(first) + second[0]  # type: ignore[no-any-return]


def of_batch(inner: Any, batch: Batch) -> torch.Tensor:
    y = inner(batch.x) * batch.scale
    return y if batch.bias is None else y + batch.bias  # type: ignore[no-any-return]


def constant(inner: Any, x: torch.Tensor, argument: Any) -> Any:
    """Return a different result for each kind of constant argument."""
    y = inner(x)
    if isinstance(argument, Mode):
        return y.sum(0) if argument is Mode.SUM else y.mean(0)
    if isinstance(argument, torch.dtype):
        return y.to(argument)
    if isinstance(argument, slice):
        return y[:, argument]
    if isinstance(argument, (str, range, torch.Size)):
        return y * len(argument)
    if argument is None or callable(argument):
        return y if argument is None else argument(y)
    return (
        y * torch.arange(WIDTH).mul(argument).to(x.dtype),
        math.copysign(1.0, argument),
        torch.ones(2, dtype=torch.int64) * argument,
    )


def add_to_first(inner: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.add_(1)
    return inner(y), x.clone()


def types_of(inner: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return inner(x) * y.to(x.dtype), ~y if y.dtype != torch.float64 else y / 3


def strides_of(inner: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return inner.weight[0, 0] * x * (2 if x.is_contiguous() else x.stride().index(min(x.stride()))), torch.relu(x)


# The function, and the calls in order: each makes the arguments from a new tensor.
Arguments = Callable[[torch.Tensor], Call]
CALLS: dict[str, tuple[Callable[..., Any], list[Arguments]]] = {
    "position": (either, [lambda x: Call((x,)), lambda x: Call((None, x)), lambda x: Call((x, None))]),
    "keyword": (either, [lambda x: Call((), {"a": x}), lambda x: Call((), {"b": x}), lambda x: Call((x,))]),
    "container": (by_kind, [lambda x: Call(([x],)), lambda x: Call(((x,),)), lambda x: Call((Pair(x, None),))]),
    "key of a dict": (by_kind, [lambda x: Call(({"a": x},)), lambda x: Call(({"b": x},))]),
    "kind of dict": (
        by_kind,
        [lambda x: Call(({"a": x},)), lambda x: Call((collections.OrderedDict(a=x),))],
    ),
    "order of a dict": (
        in_order,
        [lambda x: Call(({"a": x, "b": x * 2},)), lambda x: Call(({"b": x * 2, "a": x},))],
    ),
    "nesting": (nested, [lambda x: Call(([[x], x * 2],)), lambda x: Call(([x, [x * 2]],))]),
    "constant of a dataclass": (of_batch, [lambda x: Call((Batch(x),)), lambda x: Call((Batch(x, 3.0),))]),
    "None of a dataclass": (
        of_batch,
        [lambda x: Call((Batch(x),)), lambda x: Call((Batch(x, bias=torch.ones_like(x)),))],
    ),
    "number": (constant, [lambda x, c=c: Call((x, c)) for c in (2, 2.0, True, 1, 1.0, 0.0, -0.0, 0, False)]),
    "nan": (constant, [lambda x, c=c: Call((x, c)) for c in (3.0, math.nan, math.inf)]),
    "text": (constant, [lambda x, c=c: Call((x, c)) for c in ("a", "bc", None)]),
    "enum": (constant, [lambda x, c=c: Call((x, c)) for c in (Mode.SUM, Mode.MEAN)]),
    "dtype as a constant": (constant, [lambda x, c=c: Call((x, c)) for c in (torch.float64, torch.bfloat16)]),
    "slice": (constant, [lambda x, c=c: Call((x, c)) for c in (slice(1, None), slice(None, None, 2))]),
    "size": (constant, [lambda x, c=c: Call((x, c)) for c in (torch.Size([1]), torch.Size([1, 1]), range(3))]),
    "function": (constant, [lambda x, c=c: Call((x, c)) for c in (torch.tanh, torch.sigmoid)]),
    "requires_grad": (
        lambda inner, x, y: inner(x) * y,
        [lambda x, n=n: Call((x.detach(), (x.detach() * 2).requires_grad_(n))) for n in (False, True)],
    ),
    "dtype": (
        types_of,
        [
            lambda x, d=d: Call((x, (x.detach() > 0).to(d)))
            for d in (torch.bool, torch.uint8, torch.int64, torch.float64)
        ],
    ),
    "memory format": (
        strides_of,
        [
            lambda x: Call((image(x),)),
            lambda x: Call((image(x).contiguous(memory_format=torch.channels_last),)),
            lambda x: Call((image(x).transpose(1, 3),)),
            lambda x: Call((image(x)[:, :1].expand(-1, 2, -1, -1),)),
        ],
    ),
    "same tensor twice": (
        add_to_first,
        [lambda x: Call((y := x.detach().clone(), y.clone())), lambda x: Call((y := x.detach().clone(), y))],
    ),
    "overlapping tensors": (
        add_to_first,
        [
            lambda x: Call((y := x.detach().clone(), y.clone())),
            lambda x: Call(((y := torch.cat([x.detach(), x.detach()]))[:3], y[2:5])),
        ],
    ),
    "number of dimensions": (
        lambda inner, x: inner(x).sum(0),
        [lambda x: Call((x,)), lambda x: Call((x[None],)), lambda x: Call((x[0],))],
    ),
}


def image(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(2.0 * x.shape[0] * 4 * 4).view(x.shape[0], 2, 4, 4).to(x.dtype)


@pytest.mark.parametrize("name", slow_but_every(3, CALLS))
def test_another_kind_of_call(name: str) -> None:
    function, calls = CALLS[name]
    now = SimpleNamespace(arguments=calls[0])
    compare = Comparison(ZooModel(name, lambda: Function(function), features, loss))

    def run(side: Any) -> Any:
        torch.manual_seed(0)
        side.module.zero_grad()
        x = Draw(3).floats(3, WIDTH).to(side.dtype).requires_grad_()
        call = now.arguments(x)
        output = side.run(*call.args, **call.kwargs)
        if any(t.requires_grad for t in tensors(output)):
            loss(output).backward()  # type: ignore[no-untyped-call]
        gradients = [x.grad, *(t.grad for _, t in call.tensors() if t.is_leaf)]
        return [output, gradients, [p.grad for p in side.module.parameters()], [t.detach() for _, t in call.tensors()]]

    for _ in range(2):
        for now.arguments in calls:
            assert_same(*map(run, compare.sides()))


def assert_same(got: Any, eager: Any, exact: Any) -> None:
    assert type(got) is type(eager)
    if isinstance(eager, torch.Tensor):
        assert_each_no_worse("result", got, eager, exact)
        assert got.requires_grad == eager.requires_grad
        assert got.stride() == eager.stride()
    elif isinstance(eager, (list, tuple)):
        for each in zip(got, eager, exact, strict=True):
            assert_same(*each)
    else:
        assert got == eager


# The module


class Config:
    def __init__(self) -> None:
        self.rate = 1.0
        self.inner = SimpleNamespace(power=1)


class Block(nn.Module):
    """Read a parameter, buffer, submodule and attribute of every kind."""

    factor = 1.0
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()])
        self.adapters = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.active = "a"
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.linspace(1, 2, WIDTH))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))
        self.scale = 1.0
        self.powers = [1]
        self.table = {"shift": 0.0}
        self.skipped = {0}
        self.config = Config()
        self.mask = torch.ones(WIDTH)

    @property
    def slope(self) -> float:
        return 0.5

    def bend(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.first(x))
        for index, layer in enumerate(self.layers):
            hidden = hidden if index in self.skipped else layer(hidden)
        hidden = self.norm(self.bend(hidden) * self.slope + self.adapters[self.active](x))
        hidden = sum(hidden**p for p in self.powers) * self.factor * self.scale
        hidden = hidden * self.config.rate**self.config.inner.power + self.table["shift"]
        hidden = hidden * self.gain * self.gain.numel() * self.mask.to(x.dtype)
        return hidden - self.shift * self.shift.numel()


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


def parameter(module: Any, *size: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a new parameter, by default of the module's dtype."""
    return nn.Parameter(torch.full(size, 0.75, dtype=dtype or module.norm.weight.dtype))


def replaced_config(m: Any) -> None:
    m.config = Config()
    m.config.rate = 0.5


def other_data(m: Any) -> None:
    m.gain.data = m.gain.data * 2


def transposed_data(m: Any) -> None:
    m.first.weight.data = m.first.weight.data.t().contiguous().t()


def loaded(m: Any, assign: bool) -> None:
    state = {name: value.clone() * 0.5 for name, value in m.state_dict().items()}
    m.load_state_dict(state, assign=assign)


def stepped(m: Any) -> None:
    with torch.no_grad():
        for parameter in m.parameters():
            parameter.add_(0.125)


def tied(m: Any) -> None:
    m.adapters["a"].weight = m.first.weight


Edits = list[Callable[[Any], Any]]
EDITS: dict[str, Edits] = {
    # submodules
    "training of all": [lambda m: m.eval(), lambda m: m.train()],
    "training of one": [lambda m: m.drop.eval(), lambda m: m.drop.train()],
    "class": [lambda m: setattr(m.first, "__class__", Doubled), lambda m: setattr(m.first, "__class__", nn.Linear)],
    "submodule": [lambda m: m.layers.__setitem__(1, nn.Sigmoid()), lambda m: setattr(m, "drop", nn.Identity())],
    "submodule added": [lambda m: m.layers.append(nn.Sigmoid())],
    "submodule removed": [lambda m: m.layers.__delitem__(1)],
    "submodules in another order": [lambda m: setattr(m, "layers", nn.ModuleList([m.layers[1], m.layers[0]]))],
    "one submodule twice": [lambda m: m.adapters.update({"a": m.first})],
    "forward of a submodule": [
        lambda m: setattr(m.first, "forward", torch.tanh),
        lambda m: delattr(m.first, "forward"),
    ],
    "method of the module": [lambda m: setattr(m, "bend", torch.tanh)],
    # attributes
    "probability of dropout": [lambda m: setattr(m.drop, "p", 0.75), lambda m: setattr(m.drop, "p", 0.25)],
    "eps of a norm": [lambda m: setattr(m.norm, "eps", 0.5)],
    "active adapter": [lambda m: setattr(m, "active", "b"), lambda m: setattr(m, "active", "a")],
    "number": [lambda m: setattr(m, "scale", 3.0), lambda m: setattr(m, "scale", -1.0)],
    "list": [lambda m: m.powers.append(2), lambda m: m.powers.__setitem__(0, 3)],
    "dict": [lambda m: m.table.update(shift=0.5), lambda m: m.table.clear() or m.table.update(shift=0.0)],
    "set": [lambda m: m.skipped.add(1), lambda m: m.skipped.clear()],
    "config": [lambda m: setattr(m.config, "rate", 0.5), replaced_config],
    "config of a config": [
        lambda m: (setattr(m.config, "rate", 0.5), setattr(m.config.inner, "power", 2)),
        lambda m: setattr(m.config.inner, "power", 3),
    ],
    "attribute over the class's": [lambda m: setattr(m, "factor", 3.0), lambda m: delattr(m, "factor")],
    "tensor attribute": [lambda m: setattr(m, "mask", torch.arange(WIDTH) % 2), lambda m: m.mask[:3].zero_()],
    # parametrizations
    "weight_norm": [
        lambda m: parametrizations.weight_norm(m.first),
        lambda m: m.first.parametrizations.weight.original0.data.mul_(2),
        lambda m: parametrize.remove_parametrizations(m.first, "weight"),
    ],
    "parametrization": [
        lambda m: parametrize.register_parametrization(m.first, "weight", Symmetric()),
        lambda m: parametrize.remove_parametrizations(m.first, "weight", leave_parametrized=False),
    ],
    # parameters
    "requires_grad of one": [lambda m: m.gain.requires_grad_(False), lambda m: m.gain.requires_grad_(True)],
    "requires_grad of all": [lambda m: m.requires_grad_(False), lambda m: m.requires_grad_(True)],
    "shape": [lambda m: setattr(m, "gain", parameter(m, 1)), lambda m: setattr(m, "gain", parameter(m))],
    "shape of data": [lambda m: setattr(m.gain, "data", torch.ones(1, dtype=m.gain.dtype))],
    "dtype": [lambda m: setattr(m, "gain", parameter(m, WIDTH, dtype=torch.float64))],
    "dtype of all": [lambda m: m.double()],
    "strides": [transposed_data],
    "None": [lambda m: setattr(m.first, "bias", None)],
    "no longer None": [lambda m: setattr(m.layers[0], "bias", parameter(m, WIDTH)), lambda m: m.skipped.clear()],
    "another parameter": [lambda m: setattr(m, "gain", parameter(m, WIDTH)), other_data],
    "loaded": [lambda m: loaded(m, assign=False), lambda m: loaded(m, assign=True)],
    "elements": [stepped],
    "tied": [tied, lambda m: setattr(m.adapters["a"], "weight", nn.Parameter(m.first.weight.detach() * 2))],
    # buffers
    "another buffer": [lambda m: setattr(m, "shift", m.shift * 2), lambda m: m.shift.mul_(2)],
    "shape of a buffer": [lambda m: setattr(m, "shift", m.shift[:1]), lambda m: setattr(m, "shift", m.shift.sum())],
    "dtype of a buffer": [lambda m: setattr(m, "shift", m.shift.double())],
    "a buffer that becomes a parameter": [
        lambda m: (delattr(m, "shift"), setattr(m, "shift", parameter(m, WIDTH))),
    ],
}


@pytest.mark.parametrize("name", slow_but_every(4, EDITS))
def test_a_change_of_the_module(name: str) -> None:
    compare = Comparison(ZooModel(name, Block, features, mean_square))
    compare.train(*SIZES)
    for edit in EDITS[name]:
        compare.change(edit)
        for side in compare.sides():
            side.dtype = side.run.get_parameter("adapters.a.bias").dtype
        for _ in range(2):
            compare.train(*SIZES)


def test_parameters_that_come_to_need_gradients() -> None:
    compare = Comparison(ZooModel("thawed", Block, features, mean_square))
    for needed in ({"gain"}, {"first.weight"}, set(), {"gain", "norm.bias"}):
        for side in compare.sides():
            for name, parameter in side.module.named_parameters():
                parameter.requires_grad_(name in needed)
        compare.train(*SIZES)


# Hooks


def doubled(*arguments: Any) -> Any:
    last = arguments[-1]
    return tuple(part * 2 for part in last) if isinstance(last, tuple) else last * 2


def with_kwargs(module: Any, args: Any, kwargs: Any) -> Any:
    return tuple(a * 2 for a in args), kwargs


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda m: m.register_forward_hook(doubled),
    "forward, always called": lambda m: m.register_forward_hook(doubled, always_call=True),
    "forward, with kwargs": lambda m: m.register_forward_hook(doubled, with_kwargs=True),
    "forward pre": lambda m: m.register_forward_pre_hook(doubled),
    "forward pre, with kwargs": lambda m: m.register_forward_pre_hook(with_kwargs, with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(lambda _, gradients, __: doubled(gradients)),
    "backward pre": lambda m: m.register_full_backward_pre_hook(doubled),
}


@pytest.mark.parametrize(("submodule", "name"), covering(["first", "layers.1"], HOOKS))
def test_a_hook_that_is_added_and_removed(submodule: str, name: str) -> None:
    with compared(ZooModel(name, Block, features, mean_square, falls_back="hook")) as compare:
        compare.train(*SIZES)
        handles = [HOOKS[name](side.run.get_submodule(submodule)) for side in compare.sides()]
        for _ in range(2):
            compare.train(*SIZES)
        for handle in handles:
            handle.remove()
        compare.train(*SIZES)


GLOBAL_HOOKS: dict[str, Callable[[], Any]] = {
    "forward": lambda: torch_module.register_module_forward_hook(
        lambda m, _, output: output * 2 if isinstance(m, nn.Linear) else None
    ),
    "forward pre": lambda: torch_module.register_module_forward_pre_hook(
        lambda m, args: (args[0] * 2,) if isinstance(m, nn.Linear) else None
    ),
    "backward": lambda: torch_module.register_module_full_backward_hook(
        lambda m, gradients, _: doubled(gradients) if isinstance(m, nn.Tanh) else None
    ),
    "backward pre": lambda: torch_module.register_module_full_backward_pre_hook(
        lambda m, gradients: doubled(gradients) if isinstance(m, nn.Tanh) else None
    ),
}


@pytest.mark.parametrize("name", slow_except(GLOBAL_HOOKS, "forward", "backward"))
def test_a_global_hook_that_is_added_and_removed(name: str) -> None:
    compare = Comparison(ZooModel(name, Block, features, mean_square))
    compare.train(*SIZES)
    handle = GLOBAL_HOOKS[name]()
    try:
        for _ in range(2):
            compare.train(*SIZES)
    finally:
        handle.remove()
    compare.train(*SIZES)


# PyTorch's switches


@contextmanager
def switched(switch: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(back)


class Triples(TorchFunctionMode):
    """Change the result of a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is F.linear else result


class Records(TorchDispatchMode):
    """Record the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def depends_on(question: Callable[[], Any]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Return a forward whose result depends on the answer of `question`."""
    return lambda inner, x: inner(x) * (2 if question() in (True, "medium") else 3)


def attends(inner: Any, x: torch.Tensor) -> torch.Tensor:
    heads = inner(x).view(1, 1, -1, WIDTH)
    return F.scaled_dot_product_attention(heads, heads, heads)


def makes(inner: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return inner(x), torch.ones(2)


def multiplies(inner: Any, x: torch.Tensor) -> torch.Tensor:
    return inner(x) * 2.0


def has_constant_factor(inner: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a forward whose factor a graph would compute once."""
    return inner(x) * (torch.ones(WIDTH) + 1)


Context = Callable[[], AbstractContextManager[Any]]
CONTEXTS: dict[str, tuple[Callable[..., Any], list[Context]]] = {
    "no_grad": (multiplies, [torch.no_grad]),
    "inference mode": (multiplies, [torch.inference_mode]),
    "grad mode, read in forward": (depends_on(torch.is_grad_enabled), [torch.no_grad]),
    "autocast": (
        multiplies,
        [lambda d=d: torch.autocast("cpu", d) for d in (torch.bfloat16, torch.float16)],
    ),
    "autocast, read in forward": (
        depends_on(lambda: torch.is_autocast_enabled("cpu")),
        [lambda: torch.autocast("cpu")],
    ),
    "default dtype": (makes, [lambda: switched(torch.set_default_dtype, torch.float64, torch.float32)]),
    "attention backend": (attends, [lambda: sdpa_kernel(SDPBackend.MATH)]),
    "flash attention, read in forward": (
        depends_on(torch.backends.cuda.flash_sdp_enabled),
        [lambda: sdpa_kernel(SDPBackend.MATH)],
    ),
    "math attention, read in forward": (
        depends_on(torch.backends.cuda.math_sdp_enabled),
        [lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)],
    ),
    "memory-efficient attention, read in forward": (
        depends_on(torch.backends.cuda.mem_efficient_sdp_enabled),
        [lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])],
    ),
    "cuDNN attention, read in forward": (
        depends_on(torch.backends.cuda.cudnn_sdp_enabled),
        [lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])],
    ),
    "sums of math attention, read in forward": (
        depends_on(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed),
        [lambda: switched(torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, True, False)],
    ),
    "fast path of attention layers, read in forward": (
        depends_on(torch.backends.mha.get_fastpath_enabled),
        [lambda: switched(torch.backends.mha.set_fastpath_enabled, False, True)],
    ),
    "matmul precision, read in forward": (
        depends_on(torch.get_float32_matmul_precision),
        [lambda: switched(torch.set_float32_matmul_precision, "medium", "highest")],
    ),
    "determinism, read in forward": (
        depends_on(torch.are_deterministic_algorithms_enabled),
        [lambda: switched(torch.use_deterministic_algorithms, True, False)],
    ),
    "warnings of determinism, read in forward": (
        depends_on(torch.is_deterministic_algorithms_warn_only_enabled),
        [
            lambda: switched(torch.use_deterministic_algorithms, True, False),
            lambda: switched(lambda v: torch.use_deterministic_algorithms(v, warn_only=v), True, False),
        ],
    ),
    "function mode": (multiplies, [Triples]),
    "dispatch mode": (has_constant_factor, [Records]),
}


@pytest.mark.parametrize(
    ("first", "name"),
    covering([pytest.param(False, id="later"), pytest.param(True, id="first")], slow_but_every(2, CONTEXTS)),
)
@pytest.mark.filterwarnings("ignore:.*runs in PyTorch:UserWarning")
def test_another_state_of_pytorch(first: bool, name: str) -> None:
    """The state is set at the first step and unset later, or set later."""
    function, contexts = CONTEXTS[name]
    compare = Comparison(ZooModel(name, lambda: Function(function), features, loss))

    def run(side: Any, context: Context) -> Any:
        side.module.zero_grad()
        x = Draw(3).floats(3, WIDTH).to(side.dtype).requires_grad_()
        with context() as entered:
            output = side.run(x)
        if any(t.requires_grad for t in tensors(output)):
            loss(output).backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in side.module.parameters()]
        return [
            [t.is_inference() for t in tensors(output)],
            str(getattr(entered, "operators", [])),
            output,
            x.grad,
            gradients,
        ]

    for context in [*contexts, nullcontext, *contexts] if first else [nullcontext, *contexts, nullcontext]:
        assert_same(*(run(side, context) for side in compare.sides()))


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch:UserWarning")
def test_forward_mode_differentiation_after_the_first_step() -> None:
    compare = Comparison(ZooModel("dual", lambda: Function(multiplies), features, mean_square))
    compare.train(*SIZES)
    x, tangent = Draw(3).floats(3, WIDTH, grad=True), Draw(4).floats(3, WIDTH)
    with torch.autograd.forward_ad.dual_level():
        results = []
        for side in compare.sides():
            dual = torch.autograd.forward_ad.make_dual(x.to(side.dtype), tangent.to(side.dtype))
            results.append([*torch.autograd.forward_ad.unpack_dual(side.run(dual))])
        assert results[1][1] is not None
        assert_each_no_worse("dual", *results)
    compare.train(*SIZES)


# One capture per state: a state that returns needs none


def test_dropout_switched_off_in_one_submodule() -> None:
    with compared(ZooModel("two", TwoLayers, features, mean_square), captures=2) as compare:
        compare.train(*SIZES)
        compare.change(lambda m: m.drop.eval())
        compare.train(*SIZES)
        compare.change(lambda m: m.drop.train())
        compare.train(*SIZES)


def test_the_probability_of_dropout_changed() -> None:
    with compared(ZooModel("two", TwoLayers, features, mean_square), captures=2) as compare:
        compare.train(*SIZES)
        compare.change(lambda m: setattr(m.drop, "p", 0.75))
        compare.train(*SIZES)


def test_layers_frozen_and_thawed() -> None:
    with compared(ZooModel("two", TwoLayers, features, mean_square), captures=3) as compare:
        for first, last in ((True, True), (False, True), (True, False), (True, True)):
            compare.change(lambda m, first=first: m.first.requires_grad_(first))
            compare.change(lambda m, last=last: m.last.requires_grad_(last))
            compare.train(*SIZES)


def test_an_input_that_comes_to_need_a_gradient() -> None:
    now = SimpleNamespace(needs=False)

    def call(draw: Draw, batch: int, length: int) -> Call:
        return Call((draw.floats(batch, WIDTH, grad=now.needs),))

    with compared(ZooModel("two", TwoLayers, call, mean_square), captures=2) as compare:
        for now.needs in (False, True, False):
            compare.train(*SIZES)


class Scaled(TwoLayers):
    def forward(self, x: torch.Tensor, scale: float = 1.0, mode: str = "sum") -> torch.Tensor:
        hidden = super().forward(x) * scale
        return hidden.sum(0) if mode == "sum" else hidden.mean(0)


def test_constants_among_the_arguments() -> None:
    now = SimpleNamespace(constants={})

    def call(draw: Draw, batch: int, length: int) -> Call:
        return Call((draw.floats(batch, WIDTH),), dict(now.constants))

    with compared(ZooModel("scaled", Scaled, call, mean_square), captures=4) as compare:
        for now.constants in ({}, {"scale": 2.0}, {"scale": 2}, {"mode": "mean"}, {"scale": 2.0}, {}):
            compare.train(*SIZES)
