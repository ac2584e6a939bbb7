"""Every op in bfloat16 and float16, forward and backward, against eager PyTorch in the same type."""

import pytest
import torch

from tests.op_case import CaseCheck, OpCase
from tests.ops.test_every_op_is_whole import CASES
from tests.thinned import slow_after

# Their statistics stay float32, which these cases do not support. See tests/ops/test_attention.py and test_norm.py.
WITH_FLOAT32_STATISTICS = {"FlashAttention", "FlashAttentionGrad", "VarlenFlashAttention", "WeightNormGrad"}
HALF_PRECISION_CASES = [case for case in CASES if case.name not in WITH_FLOAT32_STATISTICS]


def check(case: OpCase, dtype: torch.dtype) -> None:
    if not CaseCheck(case, dtype).check_sizes(next(iter(case.size_sets()))):
        pytest.skip("PyTorch does not support the type")


@pytest.mark.everywhere
@pytest.mark.parametrize("case", slow_after(1, HALF_PRECISION_CASES, OpCase.op), ids=str)
def test_bfloat16(case: OpCase) -> None:
    check(case, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("case", HALF_PRECISION_CASES, ids=str)
def test_float16(case: OpCase) -> None:
    check(case, torch.float16)
