"""Captures of F.grid_sample and F.affine_grid."""

import pytest
import torch.nn.functional as F

from tests.op_case import Spec
from tests.ops.captures import check_capture

SIZES = [{"n": 2, "h": 5, "w": 4, "p": 3}, {"n": 1, "h": 7, "w": 6, "p": 5}]


MODES = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")
# Each padding mode once; cases_grid_sample.py has all combinations. Tracing the bicubic mode takes seconds.
OFTEN = {("bilinear", "zeros"), ("nearest", "border"), ("bilinear", "reflection")}
COMBINATIONS = [
    pytest.param(mode, padding, marks=[] if (mode, padding) in OFTEN else [pytest.mark.slow])
    for mode in MODES
    for padding in PADDINGS
]


@pytest.mark.parametrize(("mode", "padding"), COMBINATIONS)
def test_grid_sample(mode: str, padding: str) -> None:
    def sample(x, grid):
        return F.grid_sample(x, grid, mode, padding, align_corners=False)

    check_capture(sample, Spec("n 3 h w"), Spec("n p 4 2", low=-1.5, high=1.5), sizes=SIZES)


def test_spatial_transformer() -> None:

    def transform(x, theta):
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)

    check_capture(transform, Spec("2 3 h w"), Spec("2 2 3"), sizes=[{"h": 5, "w": 4}])
