"""Captures of PyTorch's interpolation, which run its own kernels: results are bitwise equal."""

import pytest
import torch
from torch import nn

from tests.ops.modules import check_module, ops_of

SHAPES = {1: (4, 7), 2: (4, 5, 6), 3: (4, 3, 5, 4)}


def calls(rank: int, *batches: int) -> list[list[torch.Tensor]]:
    """Return inputs of several batch sizes; every second one has larger spatial sizes."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(n, SHAPES[rank][0], *(s + number % 2 for s in SHAPES[rank][1:])) for number, n in enumerate(batches)]
    return [[torch.randn(shape, generator=generator)] for shape in shapes]


@pytest.mark.parametrize(
    ("rank", "mode"),
    [(rank, mode) for rank in (1, 2, 3) for mode in ("nearest", "nearest-exact")]
    + [(1, "linear"), (2, "bilinear"), (2, "bicubic"), (3, "trilinear")],
)
def test_interpolation_to_a_size(rank, mode):
    for align in (None, True) if "near" not in mode else (None,):
        sized = nn.Upsample(size=(9, 8, 7)[:rank], mode=mode, align_corners=align)
        ours = check_module(sized, *calls(rank, 3, 2), exact=True)
        assert "onnxtrain::Interpolate" in ops_of(ours)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_interpolation_by_a_scale(mode):
    ours = check_module(nn.Upsample(scale_factor=2, mode=mode), *calls(2, 3, 2), exact=True)
    assert "onnxtrain::Interpolate" in ops_of(ours)


def test_area_mode_is_an_adaptive_pool():
    ours = check_module(nn.Upsample(size=(3, 4), mode="area"), *calls(2, 3, 2), exact=True)
    assert "onnxtrain::AdaptiveAveragePool" in ops_of(ours)


def test_interpolation_in_bfloat16():
    check_module(nn.Upsample(size=(9, 8), mode="bilinear"), *calls(2, 3, 2), dtype=torch.bfloat16, exact=True)
