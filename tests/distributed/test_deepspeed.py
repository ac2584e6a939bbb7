"""ORTModule under DeepSpeed's ZeRO, one process on a CPU; skipped where DeepSpeed is not installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 5
PROGRAM = """
import sys

import deepspeed
import torch

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of

stage, wrapped = int(sys.argv[1]), sys.argv[2] == "wrapped"
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
model = ORTModule(model, rng="torch", kernels="pytorch") if wrapped else model
optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
config = {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(int(sys.argv[3])):
    loss = torch.nn.functional.mse_loss(engine(torch.randn(4, 8)), torch.randn(4, 4))
    engine.backward(loss)
    engine.step()
    print("loss", loss.item())
print("captures", engine_of(model).captures if wrapped else 0)
torch.distributed.destroy_process_group()
"""


def trained(stage: int, how: str, port: int) -> tuple[list[float], int, str]:
    """The losses, the number of captures, and what was written to the error stream."""
    rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(stage), how, str(STEPS)],
        env={**os.environ, **rank, "DS_ACCELERATOR": "cpu", "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    losses = [float(words[1]) for words in lines if words[:1] == ["loss"]]
    (captures,) = (int(words[1]) for words in lines if words[:1] == ["captures"])
    return losses, captures, done.stderr


@pytest.mark.slow  # DeepSpeed compiles an extension at first: minutes
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_eagers(stage: int) -> None:
    eager, _, _ = trained(stage, "plain", 29700 + stage)
    ours, captures, said = trained(stage, "wrapped", 29710 + stage)
    assert len(ours) == STEPS
    assert ours == eager
    assert captures == (0 if stage == 3 else 1)
    assert ("submodules have hooks" in said) == (stage == 3)  # ZeRO 3 gathers parameters in hooks: PyTorch runs them
