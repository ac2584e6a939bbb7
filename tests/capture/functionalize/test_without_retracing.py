"""Exports with writes to new tensors or buffers, and with no_grad regions, are functionalized without retracing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import FallbackPolicy, ORTModule
from onnxtrain.capture import capture
from onnxtrain.errors import ORTModuleFallbackException
from tests.reference import assert_each_no_worse, assert_matches
from tests.thinned import slow_but_every


def shifted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Shift x as T5 shifts its labels."""
    y = x.new_zeros(x.shape)
    y[..., 1:] = (x * w)[..., :-1].clone()
    y[..., 0] = 3.0
    return y.masked_fill_(y > 2.5, 0.5) * w


def written_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    y += x
    y[1:, 2] *= 3.0
    return y.sin() + y[0]


def written_and_returned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    return (y.add_(1.0) + y) * y.add_(2.0)


def through_two_slices(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x + w
    y[:, 1:][1:].add_(x[1:, :-1])
    return y * y


def through_a_reshape(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    flat = y.view(-1)
    flat[3:].mul_(2.0)
    return y.sin() + flat.view(y.shape)


def through_a_reshape_of_a_slice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x * w)[1:]
    y.reshape(-1, 1)[2:] += 1.0
    y.reshape(-1).mul_(3.0)
    return y * w


def through_a_reshape_that_copies(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    flat = y[:, 1:].reshape(-1)
    flat.add_(1.0)
    return y * flat.sum()


def raised_to_powers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    y.pow_(2)
    return y.add_(w.abs() + 1.0).pow_(w)


def read_before(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    before = y + 1.0
    y.add_(5.0)
    return before * y.detach()


def in_a_no_grad_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale, other = (x * w).cos(), w.exp()
    return x * scale + w * other


def read_through_another_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    row = y[1]
    y.add_(1.0)
    return y + row


def written_through_a_transposed_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    y.t()[1].add_(1.0)
    return y * w


def written_in_a_no_grad_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    with torch.no_grad():
        z = x.exp()
        z.add_(1.0)
    return y * z


def read_through_a_detached_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    z = y.detach()
    y.add_(2.0)
    return y + z


class Function(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.w = nn.Parameter(torch.linspace(-1.0, 2.0, 5, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x, self.w) * self.scale


REWRITTEN = [
    shifted,
    written_twice,
    written_and_returned,
    through_two_slices,
    through_a_reshape,
    through_a_reshape_of_a_slice,
    through_a_reshape_that_copies,
    raised_to_powers,
    read_before,
    in_a_no_grad_region,
]
RETRACED = [
    read_through_another_view,
    written_through_a_transposed_view,
    written_in_a_no_grad_region,
    read_through_a_detached_view,
]


@pytest.mark.parametrize(
    "call",
    [*REWRITTEN, *slow_but_every(2, RETRACED)],
    ids=lambda call: call.__name__,
)
def test_results_match_eager_and_simple_writes_are_not_traced_again(
    call: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    retraced = record_retracing(monkeypatch)
    eager = Function(call)
    ours = ORTModule(Function(call), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    for rows in (4, 7):  # one graph for both
        x = torch.randn(rows, 5, dtype=torch.float64)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        results = [model(x) for model, x in zip((eager, ours), xs, strict=True)]
        assert_each_no_worse("result", results[1], results[0], results[0])
        cotangent = torch.randn_like(results[0])
        for result in results:
            result.backward(cotangent)
        assert_each_no_worse("gradient of x", xs[1].grad, xs[0].grad, xs[0].grad)
    assert_each_no_worse("gradient of w", ours.get_parameter("w").grad, eager.w.grad, eager.w.grad)
    assert bool(retraced) == (call in RETRACED)


def record_retracing(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list of the programs that are functionalized by PyTorch from now on."""
    programs: list[object] = []
    functionalize = capture.functionalize

    def recording(program: Any) -> Any:
        programs.append(program)
        return functionalize(program)

    monkeypatch.setattr(capture, "functionalize", recording)
    return programs


def moving_average(m: "Buffers", x: torch.Tensor) -> torch.Tensor:
    m.a.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
    return x * m.a


def read_before_and_after(m: "Buffers", x: torch.Tensor) -> torch.Tensor:
    y = x * (m.a * 2)  # of x * m.a, eager could not compute the gradient after the write
    m.a.add_(1.0)
    return y + m.a


def slices_of_a_buffer(m: "Buffers", x: torch.Tensor) -> torch.Tensor:
    m.a[1:].add_(x.detach().sum(0)[1:])
    m.a[0] = 3.0
    return x * m.a + m.a[1:].sum()


def counted_and_emptied(m: "Buffers", x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    m.b.zero_()
    m.b.add_(m.count)
    m.a.copy_(m.b * 2)
    return x * m.b + m.a


def buffers_that_share_memory(m: "Buffers", x: torch.Tensor) -> torch.Tensor:
    m.left.add_(1.0)
    return x * m.left + m.right


def read_through_an_older_view(m: "Buffers", x: torch.Tensor) -> torch.Tensor:
    row = m.a[1:]
    m.a.add_(1.0)
    return x * m.a + row.sum()


def written_through_detach(m: "Buffers", x: torch.Tensor) -> torch.Tensor:
    m.a.detach().add_(1.0)
    return x * m.a


def written_through_a_reshape(m: "Buffers", x: torch.Tensor) -> torch.Tensor:
    m.a.view(5, 1).add_(1.0)
    return x * m.a


def written_under_no_grad(m: "Buffers", x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.a.add_(x.sum(0))
    return x * m.a


def returned(m: "Buffers", x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m.a.add_(1.0)
    return x * m.a, m.a[2:]


class Buffers(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.w = nn.Parameter(torch.linspace(-1.0, 2.0, 5, dtype=torch.float64))
        memory = torch.linspace(0.0, 1.0, 10, dtype=torch.float64)
        self.register_buffer("a", torch.ones(5, dtype=torch.float64))
        self.register_buffer("b", torch.ones(5, dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("left", memory[:5])
        self.register_buffer("right", memory[5:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x * self.w)


REWRITTEN_BUFFERS = [
    moving_average,
    read_before_and_after,
    slices_of_a_buffer,
    counted_and_emptied,
    written_through_a_reshape,
]
RETRACED_BUFFERS = [
    buffers_that_share_memory,
    read_through_an_older_view,
    written_through_detach,
    written_under_no_grad,
    returned,
]


@pytest.mark.parametrize(
    "call", [*REWRITTEN_BUFFERS, *slow_but_every(2, RETRACED_BUFFERS)], ids=lambda call: call.__name__
)
def test_buffers_are_written_as_in_eager(call: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    retraced = record_retracing(monkeypatch)
    eager, wrapped = Buffers(call), Buffers(call)
    ours = ORTModule(wrapped, fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    for rows in (4, 7, 4):  # one graph for all
        x = torch.randn(rows, 5, dtype=torch.float64)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        results = [model(x) for model, x in zip((eager, ours), xs, strict=True)]
        assert_each_no_worse("result", results[1], results[0], results[0])
        cotangent = torch.randn(rows, 5, dtype=torch.float64)
        for result in results:
            (result[0] if isinstance(result, tuple) else result).backward(cotangent)
        assert_each_no_worse("gradient of x", xs[1].grad, xs[0].grad, xs[0].grad)
        for name, buffer in eager.named_buffers():
            assert_each_no_worse(name, wrapped.get_buffer(name), buffer, buffer)
    assert_each_no_worse("gradient of w", wrapped.w.grad, eager.w.grad, eager.w.grad)
    assert bool(retraced) == (call in RETRACED_BUFFERS)


def test_a_parameter_that_is_written_is_refused() -> None:
    def written(m: Buffers, x: torch.Tensor) -> torch.Tensor:
        m.w.detach().add_(1.0)
        return x

    with pytest.raises(ORTModuleFallbackException, match="changes a parameter"):
        ORTModule(Buffers(written), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)(torch.randn(4, 5).double())


def test_a_written_buffer_next_to_a_batch_norm() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(5))
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.detach().sum(0))
            return self.norm(x) * self.seen

    torch.manual_seed(0)
    ours = ORTModule(Counts(), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)

    def twice(module: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        return [module(x), module(x)], dict(module.named_buffers())

    x = torch.randn(6, 5)
    assert_matches(twice(ours, x), twice, Counts(), x)


def test_a_functional_operator_without_symbolic_sizes_is_left_to_pytorch() -> None:
    """`addcmul` of a 0-dimensional tensor takes only concrete sizes."""

    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return y.addcmul_(x, w)

    ours = ORTModule(Adds(), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    for rows in (3, 5):
        x, w = torch.randn(rows), torch.randn(())
        assert_matches(ours(x, w), Adds(), x, w)
