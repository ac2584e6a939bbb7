"""The Triton kernel of cross entropy: its values in Triton's interpreter, and code for three architectures."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from onnxtrain.ops.loss import row_losses
from tests.gpu_without_one.fake_gpu import needs_cuda_build
from tests.gpu_without_one.inductor_code import CAPABILITIES
from tests.gpu_without_one.launches import PendingRows, onnxtrain_step
from tests.gpu_without_one.models import MODELS

pytestmark = [needs_cuda_build, pytest.mark.slow]


def test_the_kernel_is_no_worse_than_eager_in_the_interpreter() -> None:
    check = subprocess.run(
        [sys.executable, "-m", "tests.gpu_without_one.row_kernel"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("writes", [True, False])
def test_the_kernel_compiles(capability: int, dtype: str, writes: bool) -> None:
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    kernel = importlib.import_module("onnxtrain.native.row_kernel")
    pointers = {"logits": f"*{dtype}", "labels": "*i64", "factors": "*fp32", "losses": "*fp32"}
    sizes = dict.fromkeys(("row_stride", "classes", "columns"), "i32")
    constants = {"writes": writes, "block": kernel.block_of(50257)}
    signature = {**pointers, **sizes, **dict.fromkeys(constants, "constexpr")}
    source = compiler.ASTSource(fn=kernel.run_row, signature=signature, constexprs=constants)
    assert compiler.compile(source, target=target, options={"num_warps": 8}).asm["cubin"].startswith(b"\x7fELF")


@pytest.mark.parametrize("kernels", ["native", "pytorch"])
def test_a_program_for_a_gpu_runs_it(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
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
