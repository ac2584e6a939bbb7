"""Every op in bfloat16 and float16, forward and backward, against eager PyTorch in the same type."""

import pytest
import torch

from onnxtrain.testing import CaseCheck, OpCase
from tests.ops.test_every_op_is_whole import CASES

# Their float32 statistics are inputs or outputs of a type of their own: tests/ops/test_attention.py, test_norm.py.
OTHERS = {"FlashAttention", "FlashAttentionGrad", "WeightNormGrad"}
HALF = [case for case in CASES if case.name not in OTHERS]


def check(case: OpCase, dtype: torch.dtype) -> None:
    if not CaseCheck(case, dtype).check_sizes(next(iter(case.size_sets()))):
        pytest.skip("PyTorch refuses the type")


@pytest.mark.everywhere
@pytest.mark.parametrize("case", HALF, ids=str)
def test_bfloat16(case: OpCase) -> None:
    check(case, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("case", HALF, ids=str)
def test_float16(case: OpCase) -> None:
    check(case, torch.float16)
