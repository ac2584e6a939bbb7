"""Captures of PyTorch's pools, which run its own kernels: results are bitwise equal."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import ORTModule
from tests.op_case import Spec
from tests.ops.captures import check_capture
from tests.ops.modules import check_module, ops_of

X = {1: (4, 9), 2: (4, 9, 8), 3: (4, 6, 5, 7)}
IMAGES = (Spec("n 4 h w"),)
SIZES = ({"n": 3, "h": 9, "w": 8}, {"n": 2, "h": 10, "w": 7}, {"n": 1, "h": 6, "w": 6})


def calls(rank: int, *batches: int) -> list[list[torch.Tensor]]:
    """Return inputs of several batch sizes; every second one has larger images."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(n, X[rank][0], *(s + number % 2 for s in X[rank][1:])) for number, n in enumerate(batches)]
    return [[torch.randn(shape, generator=generator)] for shape in shapes]


POOLS = {
    "onnxtrain::MaxPool": [
        (1, nn.MaxPool1d(3, 2, 1, return_indices=True)),
        (2, nn.MaxPool2d(2)),
        (2, nn.MaxPool2d(3, 2, 1, 2, ceil_mode=True)),
        (2, nn.MaxPool2d((3, 2), (1, 2), return_indices=True)),
        (3, nn.MaxPool3d(2, return_indices=True)),
    ],
    "ai.onnx::AveragePool": [
        (1, nn.AvgPool1d(3, 2, 1)),
        (2, nn.AvgPool2d(2)),
        (2, nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
        (2, nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
        (2, nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)),
        (3, nn.AvgPool3d((2, 1, 2))),
    ],
    "ai.onnx::GlobalAveragePool": [
        (1, nn.AdaptiveAvgPool1d(1)),
        (2, nn.AdaptiveAvgPool2d(1)),
        (3, nn.AdaptiveAvgPool3d((1, 1, 1))),
    ],
    "onnxtrain::AdaptiveAveragePool": [
        (1, nn.AdaptiveAvgPool1d(4)),
        (2, nn.AdaptiveAvgPool2d((3, 5))),
        (2, nn.AdaptiveAvgPool2d((None, 3))),
        (3, nn.AdaptiveAvgPool3d(2)),
    ],
    "onnxtrain::AdaptiveMaxPool": [
        (1, nn.AdaptiveMaxPool1d(4)),
        (2, nn.AdaptiveMaxPool2d((3, 5), return_indices=True)),
        (3, nn.AdaptiveMaxPool3d(2)),
    ],
}


@pytest.mark.parametrize(
    ("name", "rank", "module"), [(name, *pool) for name, pools in POOLS.items() for pool in pools], ids=str
)
def test_pool(name, rank, module):
    ours = check_module(module, *calls(rank, 3, 2, 1), exact=not name.endswith("GlobalAveragePool"))
    assert name in ops_of(ours)


def test_max_pool1d_is_captured_for_each_length():
    """PyTorch's export makes the length static for this operator."""
    pool = nn.MaxPool1d(3, 2, 1)
    ours = ORTModule(pool)
    for batch, length in ((3, 9), (2, 9), (2, 10)):
        x = torch.randn(batch, 4, length, requires_grad=True)
        y, expected = ours(x), pool(x)
        assert torch.equal(y, expected)
        [dx], [expected_dx] = torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x)
        assert torch.equal(dx, expected_dx)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", [nn.MaxPool2d(2), nn.AvgPool2d(3, 2), nn.AdaptiveAvgPool2d(1)], ids=str)
def test_other_types(module, dtype):
    check_module(module, *calls(2, 3, 2), dtype=dtype)


def test_divisor_override():
    check_capture(lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), *IMAGES, sizes=SIZES)
    check_capture(
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=5), *IMAGES, sizes=SIZES, aten=True
    )


def test_sample_without_a_batch_axis():
    for module in (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2)):
        check_module(module, *([x[0]] for [x] in calls(2, 3, 2)), exact=True)


def test_local_response_norm():
    """PyTorch computes it as an average pool over channels."""
    check_capture(lambda x: F.local_response_norm(x, 2), *IMAGES, sizes=SIZES)


class Net(nn.Module):
    """Pools between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = F.max_pool2d(self.first(x), 2)
        x = F.avg_pool2d(self.second(x), 2)
        return self.last(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_channels_last():
    net = Net().to(memory_format=torch.channels_last)
    check_module(net, *([x.to(memory_format=torch.channels_last)] for [x] in calls(2, 3, 2)))


def test_pools_save_no_input():
    """Backward needs the indices of max pooling, and otherwise only shapes."""
    ours = check_module(nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2)), *calls(2, 3, 2), exact=True)
    saved: list[torch.Size] = []
    [x] = calls(2, 3)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        ours(x.requires_grad_())
    assert saved == [torch.Size([3, 4, 4, 4])]


def unpool(x):
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y * 2, indices, 2)


def test_max_unpool():
    sizes = [{"n": 2, "c": 3, "h": 4, "w": 6}, {"n": 1, "c": 2, "h": 8, "w": 2}]
    check_capture(unpool, Spec("n c h w"), sizes=sizes)
