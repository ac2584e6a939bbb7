"""Batch norms are captured without PyTorch's functionalization, and the graph is the one that it gives."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.functionalize.both_ways import BothWays


class Function(nn.Module):
    """A function of the input, a weight and three buffers."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.w = nn.Parameter(torch.linspace(-1.0, 2.0, 4))
        self.register_buffer("mean", torch.linspace(-0.5, 0.5, 4))
        self.register_buffer("var", torch.linspace(0.5, 1.5, 4))
        self.register_buffer("both", torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


def net(dims: int, norm: type[nn.Module] | None = None, **options: Any) -> nn.Module:
    conv = getattr(nn, f"Conv{dims}d")
    norm = norm or getattr(nn, f"BatchNorm{dims}d")
    return nn.Sequential(conv(3, 4, 3), norm(4, **options), nn.ReLU(inplace=True), conv(4, 4, 3), norm(4, **options))


def pictures(dims: int, batch: int = 5) -> torch.Tensor:
    return torch.randn(batch, 3, *[9] * dims)


def partly_frozen() -> nn.Module:
    model = net(2)
    model[1].eval()  # type: ignore[operator, index]  # a Sequential
    return model


def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.batch_norm(x, m.mean, m.var, m.w, None, True, 0.1)
    return F.batch_norm(y * 2, m.mean, m.var, None, None, True, 0.3) + m.mean


def then_read(m: Any, x: torch.Tensor) -> torch.Tensor:
    before = m.mean * x
    y = F.batch_norm(x, m.mean, m.var, m.w, None, True, 0.1)
    return F.batch_norm(y, m.mean, m.var, None, None, False) + before


def by_keywords(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.batch_norm(
        input=x, weight=m.w, bias=None, running_mean=m.mean, running_var=m.var, training=True, momentum=0.2, eps=1e-3,
        cudnn_enabled=False,
    )  # fmt: skip


def of_own_statistics(m: Any, x: torch.Tensor) -> torch.Tensor:
    mean, var = m.mean.clone(), m.var.abs()
    return F.batch_norm(x, mean, var, m.w, None, True, 0.1) + mean + var


def frozen_without_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = F.batch_norm(x, m.mean, m.var, None, None, False)
    return y * m.w + x


def updated_without_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = F.batch_norm(x, m.mean, m.var, None, None, True, 0.1)
    return y * m.w + x


def statistics_are_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, m.both[0], m.both[1], m.w, None, True, 0.1) + m.both.sum()


def statistics_are_read_through_a_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    view = m.mean[:]
    return F.batch_norm(x, m.mean, m.var, m.w, None, True, 0.1) + view


def written_over_with_a_view_left(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.batch_norm(x, m.mean, m.var, m.w, None, True, 0.1)
    first = y[:1]
    return y.relu_().sum() + first.sum()


Case = tuple[str, Callable[[], nn.Module], Callable[[], torch.Tensor]]


def rows() -> torch.Tensor:
    return torch.randn(6, 4)


PLAIN: list[Case] = [
    *((f"{d}d", lambda d=d: net(d), lambda d=d: pictures(d)) for d in (1, 2, 3)),
    *((f"{d}d in eval mode", lambda d=d: net(d).eval(), lambda d=d: pictures(d)) for d in (1, 2, 3)),
    ("of no statistics", lambda: net(2, track_running_stats=False), lambda: pictures(2)),
    ("of no weights", lambda: net(2, affine=False), lambda: pictures(2)),
    ("of other numbers", lambda: net(2, momentum=0.3, eps=1e-3), lambda: pictures(2)),
    ("of an average of all, in eval mode", lambda: net(2, momentum=None).eval(), lambda: pictures(2)),
    ("partly frozen", partly_frozen, lambda: pictures(2)),
    ("of one picture", lambda: net(2), lambda: pictures(2, 1)),
    ("of rows", lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), rows),
    ("of doubles", lambda: net(2).double(), lambda: pictures(2).double()),
    (
        "channels last",
        lambda: net(2).to(memory_format=torch.channels_last),
        lambda: pictures(2).contiguous(memory_format=torch.channels_last),
    ),
    ("over all processes", lambda: net(2, nn.SyncBatchNorm), lambda: pictures(2)),
    *(
        (call.__name__, lambda call=call: Function(call), rows)
        for call in (twice, then_read, by_keywords, of_own_statistics, frozen_without_gradients)
    ),
]
NOT_PLAIN: list[Case] = [
    ("in half precision", lambda: net(2).bfloat16(), lambda: pictures(2).bfloat16()),
    ("of no picture, in eval mode", lambda: net(2).eval(), lambda: pictures(2, 0)),
    *(
        (call.__name__, lambda call=call: Function(call), rows)
        for call in (
            updated_without_gradients,
            statistics_are_rows,
            statistics_are_read_through_a_view,
            written_over_with_a_view_left,
        )
    ),
]


WITHOUT_GRADIENTS = ("2d", "2d in eval mode", "then_read", "updated_without_gradients")


@pytest.mark.parametrize(
    ("case", "gradients"),
    [*((c, True) for c in (*PLAIN, *NOT_PLAIN)), *((c, False) for c in PLAIN + NOT_PLAIN if c[0] in WITHOUT_GRADIENTS)],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_the_graph_is_that_of_pytorchs_functionalization(
    case: Case, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, make, example = case
    both = BothWays(monkeypatch)
    torch.manual_seed(0)
    model, x = make(), example()
    copies = [copy.deepcopy(model) for _ in range(2)]
    with torch.set_grad_enabled(gradients):
        results = [both.calls(each, x, functionalized=way) for each, way in zip(copies, (False, True), strict=True)]
        eager = [model(x), model(x)]
    assert both.is_plain == (case in PLAIN or not gradients)  # without gradients there is no region for `no_grad`
    assert both.graphs[0] == both.graphs[1]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[0], eager)
    for (name, buffer), (_, other) in zip(copies[0].named_buffers(), copies[1].named_buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=0, atol=0, msg=name)
        torch.testing.assert_close(buffer, model.get_buffer(name), msg=name)
