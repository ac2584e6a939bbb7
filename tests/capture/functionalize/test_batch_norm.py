"""Batch norms are captured without PyTorch's functionalization, as the same graph."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.functionalize.compared_captures import ComparedCaptures
from tests.reference import assert_each_no_worse


class Function(nn.Module):
    """A module that calls a function with itself and its input; it has a weight and three buffers."""

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


def images(dims: int, batch: int = 5) -> torch.Tensor:
    return torch.randn(batch, 3, *[9] * dims)


def partly_frozen() -> nn.Module:
    model = net(2)
    model[1].eval()  # type: ignore[operator, index]  # a Sequential
    return model


def updated_twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.batch_norm(x, m.mean, m.var, m.w, None, True, 0.1)
    return F.batch_norm(y * 2, m.mean, m.var, None, None, True, 0.3) + m.mean


def statistics_read_before_and_after(m: Any, x: torch.Tensor) -> torch.Tensor:
    before = m.mean * x
    y = F.batch_norm(x, m.mean, m.var, m.w, None, True, 0.1)
    return F.batch_norm(y, m.mean, m.var, None, None, False) + before


def called_by_keywords(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.batch_norm(
        input=x, weight=m.w, bias=None, running_mean=m.mean, running_var=m.var, training=True, momentum=0.2, eps=1e-3,
        cudnn_enabled=False,
    )  # fmt: skip


def statistics_computed_in_forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    mean, var = m.mean.clone(), m.var.abs()
    return F.batch_norm(x, mean, var, m.w, None, True, 0.1) + mean + var


def eval_mode_under_no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = F.batch_norm(x, m.mean, m.var, None, None, False)
    return y * m.w + x


def updated_under_no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = F.batch_norm(x, m.mean, m.var, None, None, True, 0.1)
    return y * m.w + x


def statistics_that_are_rows_of_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, m.both[0], m.both[1], m.w, None, True, 0.1) + m.both.sum()


def statistics_read_through_an_older_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    view = m.mean[:]
    return F.batch_norm(x, m.mean, m.var, m.w, None, True, 0.1) + view


def result_written_while_a_view_is_used(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.batch_norm(x, m.mean, m.var, m.w, None, True, 0.1)
    first = y[:1]
    return y.relu_().sum() + first.sum()


Case = tuple[str, Callable[[], nn.Module], Callable[[], torch.Tensor]]


def rows() -> torch.Tensor:
    return torch.randn(6, 4)


REWRITTEN: list[Case] = [
    *((f"{d}d", lambda d=d: net(d), lambda d=d: images(d)) for d in (1, 2, 3)),
    *((f"{d}d in eval mode", lambda d=d: net(d).eval(), lambda d=d: images(d)) for d in (1, 2, 3)),
    ("without statistics", lambda: net(2, track_running_stats=False), lambda: images(2)),
    ("without weights", lambda: net(2, affine=False), lambda: images(2)),
    ("another momentum and eps", lambda: net(2, momentum=0.3, eps=1e-3), lambda: images(2)),
    ("cumulative average, in eval mode", lambda: net(2, momentum=None).eval(), lambda: images(2)),
    ("partly frozen", partly_frozen, lambda: images(2)),
    ("one image", lambda: net(2), lambda: images(2, 1)),
    ("1d of a matrix", lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), rows),
    ("float64", lambda: net(2).double(), lambda: images(2).double()),
    (
        "channels_last",
        lambda: net(2).to(memory_format=torch.channels_last),
        lambda: images(2).contiguous(memory_format=torch.channels_last),
    ),
    ("SyncBatchNorm", lambda: net(2, nn.SyncBatchNorm), lambda: images(2)),
    *(
        (call.__name__, lambda call=call: Function(call), rows)
        for call in (
            updated_twice,
            statistics_read_before_and_after,
            called_by_keywords,
            statistics_computed_in_forward,
            eval_mode_under_no_grad,
        )
    ),
]
RETRACED: list[Case] = [
    ("bfloat16", lambda: net(2).bfloat16(), lambda: images(2).bfloat16()),
    ("empty batch, in eval mode", lambda: net(2).eval(), lambda: images(2, 0)),
    *(
        (call.__name__, lambda call=call: Function(call), rows)
        for call in (
            updated_under_no_grad,
            statistics_that_are_rows_of_a_buffer,
            statistics_read_through_an_older_view,
            result_written_while_a_view_is_used,
        )
    ),
]


LIKE_OTHERS = (
    *("1d", "3d", "1d in eval mode", "3d in eval mode", "without weights", "another momentum and eps", "partly frozen"),
    *("1d of a matrix", "channels_last", "SyncBatchNorm", "called_by_keywords", "eval_mode_under_no_grad"),
    *("one image", "float64", "without statistics", "cumulative average, in eval mode"),
)
TESTED_UNDER_NO_GRAD = ("2d", "statistics_read_before_and_after", "updated_under_no_grad")


@pytest.mark.parametrize(
    ("case", "gradients"),
    [
        *(pytest.param(c, True, marks=[pytest.mark.slow] if c[0] in LIKE_OTHERS else []) for c in REWRITTEN + RETRACED),
        *((c, False) for c in REWRITTEN + RETRACED if c[0] in TESTED_UNDER_NO_GRAD),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_the_graph_matches_pytorchs_functionalization(
    case: Case, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, make, example = case
    captures = ComparedCaptures(monkeypatch)
    torch.manual_seed(0)
    model, x = make(), example()
    copies, wide = [copy.deepcopy(model) for _ in range(2)], copy.deepcopy(model).double()
    with torch.set_grad_enabled(gradients):
        results = [captures.call_twice(copies[i], x, functionalize=i == 1) for i in range(2)]
        eager = [model(x), model(x)]
        exact = [wide(x.double()), wide(x.double())]
    # If gradients are off everywhere, torch.export makes no region for `no_grad`.
    assert captures.is_retraced == (case in RETRACED and gradients)
    assert captures.graphs[0] == captures.graphs[1]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert_each_no_worse("result", results[0], eager, exact)
    for (name, buffer), (_, other) in zip(copies[0].named_buffers(), copies[1].named_buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=0, atol=0, msg=name)
        assert_each_no_worse(name, buffer, model.get_buffer(name), wide.get_buffer(name))
