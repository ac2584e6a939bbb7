"""The Triton kernels of generated programs compute what eager PyTorch does, in Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu_without_one.fake_gpu import needs_cuda_build
from tests.gpu_without_one.interpreted_step import MODELS

pytestmark = [needs_cuda_build, pytest.mark.slow]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_in_the_interpreter_is_no_worse_than_eager(name: str, dtype: str) -> None:
    """Loss, logits and all gradients, against float64. Triton decides for the whole process where kernels run."""
    step = subprocess.run(
        [sys.executable, "-m", "tests.gpu_without_one.interpreted_step", name, dtype],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert step.returncode == 0, step.stderr
    num_results, num_kernels = map(int, step.stdout.split())
    assert num_results > 10
    assert num_kernels > 20
