"""Under autocast the casts are written into the capture, and the graph is the one of PyTorch's functionalization."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.functionalize.both_ways import BothWays


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


def one_tensor_twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.norm(x)
    return torch.bmm(y, y.transpose(1, 2)) @ y + torch.matmul(y[..., :4, :4], y[..., :4, :4]).sum() + y @ y.mT @ y


def of_several_types(m: Any, x: torch.Tensor) -> torch.Tensor:
    narrow = m.second(m.first(x))
    return torch.cat([narrow, x], -1) + torch.stack([x, narrow]).sum()


def of_doubles(m: Any, x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return torch.bmm(wide, wide.transpose(1, 2)) @ wide + m.second(m.first(x))


def losses(m: Any, x: torch.Tensor) -> torch.Tensor:
    narrow = m.second(m.first(x))
    labels = torch.zeros(x.shape[0] * x.shape[1], dtype=torch.int64)
    return F.cross_entropy(narrow.flatten(0, 1), labels) + F.mse_loss(narrow, narrow.relu().detach())


def statistics(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.batch_norm(m.conv(x.transpose(1, 2))).relu_()


def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.second(m.first(x))
    y += x.to(y.dtype)
    m.seen.add_(y.detach().sum((0, 1)))
    return y.mul_(2.0) + m.seen


def without_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = m.second(m.first(x))
    return m.norm(x) * scale


def switched_off_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.second(m.first(x))


def cast_inside_a_composite(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bsh,bth->bst", x, m.norm(x))


PLAIN = [feed_forward, attention, one_tensor_twice, of_several_types, of_doubles, losses, statistics, in_place]
PLAIN += [without_gradients]
NOT_PLAIN = [switched_off_inside, cast_inside_a_composite]


@pytest.mark.parametrize("call", [*PLAIN, *NOT_PLAIN], ids=lambda call: call.__name__)
def test_the_graph_is_that_of_pytorchs_functionalization(
    call: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = BothWays(monkeypatch)
    torch.manual_seed(0)
    model, x = Layers(call), torch.randn(3, 5, 6)
    copies = [copy.deepcopy(model) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        results = [both.calls(each, x, functionalized=way) for each, way in zip(copies, (False, True), strict=True)]
        eager = [model(x), model(x)]
    assert both.is_plain == (call in PLAIN)
    assert both.graphs[0] == both.graphs[1]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert [y.dtype for y in results[0]] == [y.dtype for y in eager]
    torch.testing.assert_close(results[0], eager, rtol=0.05, atol=0.1)  # two roundings to bfloat16 or three
    gradients = []
    for result, each in zip(results, copies, strict=True):
        result[1].float().square().sum().backward()
        gradients.append([p.grad for p in each.parameters()])
        torch.testing.assert_close(list(each.buffers()), list(copies[0].buffers()), rtol=0, atol=0)
    for ours, other in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=0)
