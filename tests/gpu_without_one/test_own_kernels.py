"""onnxtrain's Triton kernel of cross entropy: its values in Triton's interpreter, and code for three architectures."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtrain.ops.loss import row_losses
from tests.gpu_without_one.fake_gpu import needs_cuda_build
from tests.gpu_without_one.inductor_code import CAPABILITIES
from tests.gpu_without_one.launches import PendingRows, onnxtrain_step
from tests.gpu_without_one.models import MODELS

# PyTorch's CUDA build installs Triton. Beside the CPU build `make test` puts it into a folder of its own, so that all
# other tests run without it, as they do for users.
TRITON = Path(sys.prefix) / "triton"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None and not (TRITON / "triton").exists(),
    reason="Triton is not installed: make test puts it into .venv/triton if it has a wheel for this Python",
)

COMPILED = [
    pytest.param(dtype, capability, marks=[] if (dtype, capability) == ("bf16", 90) else pytest.mark.slow)
    for dtype in ("bf16", "fp16", "fp32")
    for capability in CAPABILITIES
]


def run(program: str, *arguments: str, **environment: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", f"tests.gpu_without_one.{program}", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TRITON), os.getcwd()]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


@needs_triton
def test_the_kernel_is_no_worse_than_eager_in_the_interpreter() -> None:
    run("row_kernel", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize(("dtype", "capability"), COMPILED)
def test_the_kernel_compiles(dtype: str, capability: int, tmp_path: Path) -> None:
    run("compiled_kernels", dtype, str(capability), TRITON_CACHE_DIR=str(tmp_path))


@needs_cuda_build
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "pytorch"])
def test_a_program_for_a_gpu_runs_the_kernel_of_cross_entropy(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """On fake tensors, which have no values, it calls PyTorch's operators instead."""
    make, inputs = MODELS["gpt2"]
    calls: list[torch.Tensor] = []
    by_pytorch = row_losses.rows_by_pytorch

    def count(logits: torch.Tensor, *others: Any) -> Any:
        calls.append(logits)
        return by_pytorch(logits, *others)

    monkeypatch.setattr(row_losses, "rows_by_pytorch", count)
    monkeypatch.setattr("onnxtrain.ops.index.labelled_rows.PendingInt", PendingRows)
    onnxtrain_step(
        lambda: make(1, 0.1).to(torch.bfloat16), inputs, skip_padding="never", keep_outputs=("loss",), kernels=kernels
    )
    assert bool(calls) == (kernels == "native")
    assert all(logits.dtype == torch.bfloat16 for logits in calls)
