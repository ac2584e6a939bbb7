"""What Inductor generates for programs on a GPU, with kernels="inductor": few launches, for any sequence length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onnxtrain.torch_compat import program_compiler
from tests.gpu_without_one.fake_gpu import needs_cuda_build
from tests.gpu_without_one.inductor_code import CAPABILITIES, Code, cubin, inductor_step
from tests.gpu_without_one.models import MODELS

pytestmark = [needs_cuda_build, pytest.mark.slow]

MOST = {"bert": 43, "gpt2": 36, "llama": 44}  # launches of a layer, forward and backward, without dropout


def step(name: str, layers: int, folder: Path, dropout: float = 0.0) -> tuple[Code, Code]:
    make, inputs = MODELS[name]
    (folder / str(layers)).mkdir()
    return inductor_step(
        lambda: make(layers, dropout).to(torch.bfloat16), inputs, folder / str(layers), skip_padding="never"
    )


@pytest.mark.parametrize("name", MOST)
def test_a_layer_launches_few_kernels(name: str, tmp_path: Path) -> None:
    one, two = (step(name, layers, tmp_path) for layers in (1, 2))
    launches = [[program.launches for program in programs] for programs in (one, two)]
    assert sum(launches[1]) - sum(launches[0]) <= MOST[name]


def test_the_gradient_of_logits_is_one_kernel(tmp_path: Path) -> None:
    """A scatter would be another, and read and write the logits in float32."""
    _, backward = step("gpt2", 1, tmp_path)
    assert "scatter_add" not in backward.source


def test_dropout_samples_in_order(tmp_path: Path) -> None:
    forward, _ = step("bert", 1, tmp_path, dropout=0.1)
    assert program_compiler.samples_in_order(forward.source, 4)


@pytest.mark.parametrize("name", MOST)
def test_each_kernel_compiles_for_three_architectures(name: str, tmp_path: Path) -> None:
    kernels = [kernel for program in step(name, 1, tmp_path) for kernel in program.kernels]
    assert len(kernels) > 10
    for kernel in kernels:
        for capability in CAPABILITIES:
            assert cubin(kernel, capability, tmp_path).startswith(b"\x7fELF")
