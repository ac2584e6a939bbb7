"""Under autocast, modules are captured without PyTorch's functionalization, as the same graph with explicit casts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.functionalize.compared_captures import ComparedCaptures
from tests.reference import assert_each_no_worse
from tests.thinned import slow_except


class Layers(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.conv, self.batch_norm = nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


def feed_forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.norm(x + m.second(F.gelu(m.first(x)))).log_softmax(-1)


def attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    q = m.second(m.first(x))[:, None]
    mask = x.new_zeros(x.shape[1], x.shape[1])
    return F.scaled_dot_product_attention(q, x[:, None], m.norm(x)[:, None], mask) + q.softmax(-1)


def same_tensor_as_both_operands(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.norm(x)
    return torch.bmm(y, y.transpose(1, 2)) @ y + torch.matmul(y[..., :4, :4], y[..., :4, :4]).sum() + y @ y.mT @ y


def several_dtypes(m: Any, x: torch.Tensor) -> torch.Tensor:
    narrow = m.second(m.first(x))
    return torch.cat([narrow, x], -1) + torch.stack([x, narrow]).sum()


def float64(m: Any, x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return torch.bmm(wide, wide.transpose(1, 2)) @ wide + m.second(m.first(x))


def losses(m: Any, x: torch.Tensor) -> torch.Tensor:
    narrow = m.second(m.first(x))
    labels = torch.zeros(x.shape[0] * x.shape[1], dtype=torch.int64)
    return F.cross_entropy(narrow.flatten(0, 1), labels) + F.mse_loss(narrow, narrow.relu().detach())


def convolution_and_batch_norm(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.batch_norm(m.conv(x.transpose(1, 2))).relu_()


def in_place_writes(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.second(m.first(x))
    y += x.to(y.dtype)
    m.seen.add_(y.detach().sum((0, 1)))
    return y.mul_(2.0) + m.seen


def under_no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = m.second(m.first(x))
    return m.norm(x) * scale


def autocast_switched_off_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.second(m.first(x))


def cast_inside_a_composite(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bsh,bth->bst", x, m.norm(x))


REWRITTEN = [
    feed_forward,
    attention,
    same_tensor_as_both_operands,
    several_dtypes,
    float64,
    losses,
    convolution_and_batch_norm,
    in_place_writes,
    under_no_grad,
]
RETRACED = [autocast_switched_off_inside, cast_inside_a_composite]


@pytest.mark.parametrize(
    "call",
    slow_except([*REWRITTEN, *RETRACED], feed_forward, several_dtypes, autocast_switched_off_inside),
    ids=lambda call: call.__name__,
)
def test_the_graph_matches_pytorchs_functionalization(
    call: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = ComparedCaptures(monkeypatch)
    torch.manual_seed(0)
    model, x = Layers(call), torch.randn(3, 5, 6)
    start, *copies = (copy.deepcopy(model) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        results = [captures.call_twice(copies[i], x, functionalize=i == 1) for i in range(2)]
        eager = [model(x), model(x)]
    assert captures.is_retraced == (call in RETRACED)
    assert captures.graphs[0] == captures.graphs[1]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert [y.dtype for y in results[0]] == [y.dtype for y in eager]
    wide = copy.deepcopy(start).double()
    got, theirs = ([y.float() if call is float64 else y for y in ys] for ys in (results[0], eager))  # bfloat16 inside
    assert_each_no_worse("result", got, theirs, [wide(x.double()), wide(x.double())])
    gradients = []
    for result, module in zip(results, copies, strict=True):
        result[1].float().square().sum().backward()
        gradients.append([p.grad for p in module.parameters()])
        torch.testing.assert_close(list(module.buffers()), list(copies[0].buffers()), rtol=0, atol=0)
    for rewritten, retraced in zip(*gradients, strict=True):
        torch.testing.assert_close(rewritten, retraced, rtol=0, atol=0)
