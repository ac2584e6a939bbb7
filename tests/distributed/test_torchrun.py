"""The examples for torchrun; a run in which a rank is killed goes on with the losses of an undisturbed one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
    ),
]


def torchrun(module: str, *arguments: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    # PyTorch 2.13 keeps the store of the first start, where ranks that start again find the addresses of the killed.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "runs in PyTorch" not in done.stderr
    return done


def assert_learns(done: subprocess.CompletedProcess[str]) -> None:
    losses = [float(text) for text in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["torchrun_ddp", "torchrun_tp", "torchrun_pipeline"])
def test_examples_learn(name: str) -> None:
    assert_learns(torchrun(f"examples.{name}"))


def test_the_example_of_sharded_graphs_learns_and_saves(tmp_path: Path) -> None:
    assert_learns(torchrun("examples.torchrun_sharded_graph", str(tmp_path / "checkpoint")))
    assert (tmp_path / "checkpoint" / ".metadata").exists()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_the_example_of_zero_stage_3_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert_learns(torchrun("tests.distributed.zero3"))


def test_a_killed_run_goes_on_with_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    losses = r"rank (\d)  step (\d)  loss (\d\.\d+)"  # another rank may print before the end of the line
    undisturbed = re.findall(losses, torchrun("examples.torchrun_fsdp2", str(tmp_path / "undisturbed")).stdout)
    done = torchrun("tests.distributed.killed", str(tmp_path / "killed"), restarts=1)
    assert "exitcode: -9" in done.stderr
    assert len(undisturbed) == 12
    assert set(re.findall(losses, done.stdout)) == set(undisturbed)
