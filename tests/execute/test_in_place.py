"""A result overwrites an input only if the input is not read afterwards."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.activation import compiled_kernels as kernels
from onnxtrain.testing import assert_no_worse_than_eager
from tests.reference import assert_each_no_worse, assert_matches

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]


class Model(nn.Module):
    def __init__(self, call: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.call(x, self.weight)


def reads_both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return y.relu() + y


def reads_a_view_later(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    turned = y.t()
    return y.relu() @ turned


def writes_over_a_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return y.t().relu() @ y


def of_an_expanded_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum(0, keepdim=True).expand(3, 5).relu()


def of_an_argument(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.relu() + w.exp()[0]


def given_out(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ w
    return y, y.relu()


def with_itself(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return y * y.t() if y.shape[0] == y.shape[1] else y * y


def of_another_shape(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum(0) + x


def of_another_type(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).float() * x


def reads_a_reshape_later(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).view(-1, 5, 1)
    return y.relu().sum() + y.view(-1, 5)


def reads_what_it_reshaped_later(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return y.view(-1, 1, 5).relu().sum() + y


def of_a_reshape_of_a_part(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w)[1:].view(-1, 1, 5).relu().sum((0, 1)) + x


def of_a_reshape_of_an_expanded_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum(0, keepdim=True).expand(3, 5).view(3, 5, 1).relu()


def of_a_reshaped_argument(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 1, 5).relu() + w.view(1, 5, 5).exp()[:, 0]


def with_its_reshape(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return y.view(-1, 1, 5) * y[:, None] + y.view(1, -1, 5).sum(1)


def with_a_size(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.shape[0] * 3 - (x @ w > 0).sum()


SEEN = {f.__name__: f for f in (
    reads_both, reads_a_view_later, writes_over_a_view, of_an_expanded_view, of_an_argument, given_out, with_itself,
    of_another_shape, of_another_type, reads_a_reshape_later, reads_what_it_reshaped_later, of_a_reshape_of_a_part,
    of_a_reshape_of_an_expanded_view, of_a_reshaped_argument, with_its_reshape, with_a_size,
)}  # fmt: skip


def sources(module: ORTModule) -> str:
    unit = engine_of(module).newest().unit
    return "\n".join([unit.forward.source, *(b.program.source for b in unit._backwards.values())])


@pytest.mark.parametrize("name", SEEN)
def test_a_value_with_another_reader_is_not_overwritten(name: str) -> None:
    model = Model(SEEN[name])
    ours = ORTModule(model)
    for rows in (3, 5):
        x = torch.randn(rows, 5, dtype=torch.float64)
        results = []
        for module in (model, ours):
            mine = x.clone().requires_grad_()
            model.zero_grad()
            result = module(mine)
            outputs = result if isinstance(result, tuple) else (result,)
            if outputs[0].requires_grad:
                sum((o * o.detach().cos()).sum() for o in outputs).backward()
            results.append([*outputs, mine, mine.grad, model.weight.grad])
        assert_each_no_worse("result", results[1], results[0], results[0])
        with torch.no_grad():
            assert_matches(ours(x), model, x)


def test_a_value_after_its_last_use_is_overwritten() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).relu() @ w + 1).sigmoid() * 2

    model = Model(call)
    ours = ORTModule(model)
    x = torch.randn(3, 5, dtype=torch.float64)
    assert_matches(ours(x), model, x)
    assert ".relu_()" in sources(ours)
    assert ".add_(" in sources(ours)


def test_a_reshaped_value_after_its_last_use_is_overwritten() -> None:
    """As after the matmuls of GPT-2, which flatten rows."""
    model = Model(lambda x, w: (x @ w).view(-1, 5, 1).unsqueeze(0).relu().view(-1, 5))
    ours = ORTModule(model)
    x = torch.randn(3, 5, dtype=torch.float64)
    assert_matches(ours(x), model, x)
    assert ".relu_()" in sources(ours)


def test_a_custom_function_may_keep_its_result() -> None:
    kept: list[torch.Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            kept.extend(real(y))
            return y

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    model = Model(lambda x, w: Keeps.apply(x @ w).relu())  # type: ignore[no-untyped-call]
    ours = ORTModule(model, fallback_policy="FALLBACK_DISABLE")
    x = torch.randn(3, 5, dtype=torch.float64)
    ours(x)
    assert_matches(kept[-1], lambda x, w: x @ w * 2, x, ours.weight)


def real(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Keep the tensors of a step; a module whose forward keeps a tensor of the capture falls back."""
    return [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]


KEPT: list[torch.Tensor] = []


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        KEPT.extend(real(x, y))
        return y

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@torch.library.custom_op("onnxtrain_tests::keeps", mutates_args=())
def keeps(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    KEPT.extend(real(x, y))
    return y


@keeps.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


USERS = {"function": Keeps.apply, "operator": keeps}
READERS: dict[str, Callable[..., torch.Tensor]] = {
    "of the result": lambda user, y: user(y).relu(),
    "of what it takes": lambda user, y: user(y) + y.relu(),
    "of what it takes a view of": lambda user, y: user(y.t()).t() + y.relu(),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("user", USERS)
def test_user_code_may_keep_its_arguments_and_results(user: str, name: str) -> None:
    model = Model(lambda x, w: READERS[name](USERS[user], x @ w))
    ours = ORTModule(model, fallback_policy="FALLBACK_DISABLE")
    x = torch.randn(3, 5, dtype=torch.float64)
    with torch.no_grad():
        ours(x)
    taken, result = KEPT[-2:]
    assert_matches(taken.t() if "view" in name else taken, torch.matmul, x, ours.weight)
    assert torch.equal(result, 2 * taken)


def test_backward_does_not_overwrite_saved_tensors() -> None:
    model = Model(lambda x, w: (x @ w).cos())
    x = torch.randn(3, 5, dtype=torch.float64)
    results = []
    for module in (model, ORTModule(model)):
        loss = module(x).sum()
        results.append([torch.autograd.grad(loss, model.weight, retain_graph=True) for _ in range(3)])
    assert_each_no_worse("gradients", results[1], results[0], results[0])


GRADIENTS = {
    "threshold_backward_": F.relu,
    "gelu_backward_": F.gelu,
    "tanh_gelu_backward_": lambda x: F.gelu(x, approximate="tanh"),
    "gated_backward_": lambda x: F.silu(x) * (x + 1),
}


def activated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, w: function(x @ w) @ w


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_activations_overwrite_dead_values(name: str, dtype: torch.dtype) -> None:
    """With the compiled kernel, which large tensors use once it is built, and with PyTorch's."""
    kernels.LIBRARY.wait()
    model = Model(activated(GRADIENTS[name])).to(dtype)
    ours, exact = ORTModule(model), copy.deepcopy(model).double()
    for rows in (3, 8000):
        x = torch.randn(rows, 5, dtype=dtype)
        dy = torch.randn(rows, 5, dtype=dtype)
        gradients = [
            torch.autograd.grad(run(x.to(wide)), [run.get_parameter("weight")], dy.to(wide))[0]
            for run, wide in ((ours, dtype), (model, dtype), (exact, torch.float64))
        ]
        assert_no_worse_than_eager(name, *gradients)
    assert f"{name}(" in sources(ours)


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_cotangent_with_another_reader_is_not_overwritten(name: str) -> None:
    """The caller's own cotangent, and one that another node of backward reads."""
    model = Model(lambda x, w: GRADIENTS[name](x * w[0]))
    branched = Model(lambda x, w: GRADIENTS[name](x @ w) + (x @ w).cos() @ w)
    x, dy = torch.randn(8000, 5, dtype=torch.float64), torch.randn(8000, 5, dtype=torch.float64)
    for each in (model, branched):
        held = dy.clone()
        ours = ORTModule(each)
        gradients = [torch.autograd.grad(run(x), list(run.parameters()), held)[0] for run in (ours, each)]
        assert_each_no_worse(name, *gradients, gradients[1])
        assert torch.equal(held, dy)
        assert f"{name}(" not in sources(ours)
