"""Captures of F.unfold and F.fold."""

import torch.nn.functional as F

from tests.op_case import Spec
from tests.ops.captures import check_capture
from tests.ops.modules import ops_of

SIZES = ({"n": 3, "h": 8, "w": 6}, {"n": 2, "h": 6, "w": 8})


def test_unfold_and_fold():
    def unfold_and_fold(x):
        columns = F.unfold(x, 3, padding=1, stride=2)
        return columns, F.fold(columns * 2, x.shape[2:], 3, padding=1, stride=2)

    ours = check_capture(unfold_and_fold, Spec("n 4 h w"), sizes=SIZES)
    assert {"onnxtrain::Im2Col", "onnxtrain::Col2Im"} <= set(ops_of(ours))


def test_sample_without_a_batch_axis_stays_an_aten_node():
    check_capture(lambda x: F.unfold(x, 3), Spec("4 h w"), sizes=SIZES, aten=True)
