"""Graphs under DeepSpeed's ZeRO: 2 and 4 processes on gloo, bit for bit DeepSpeed over eager modules.

Skipped if DeepSpeed is not installed.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import onnxtrain
from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.module.test_prepare import WIDTH, Tower

STEPS = 6
KEEPS_GATHERED = ("stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")


def initialize(model: nn.Module, stage: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **dict.fromkeys(KEEPS_GATHERED, 0)},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config)[0]


def train(stage: int, prepared: str, regional: Any = "auto") -> tuple[list[float], list[torch.Tensor], nn.Module]:
    """Train with dropout; `prepared` is "before" or "after" initialize, "late" in training, "wrapped", or "never"."""
    import deepspeed

    torch.manual_seed(0)
    model: nn.Module = Tower()
    subject = ORTModule(model, rng="torch") if prepared == "wrapped" else model
    if prepared == "before":
        onnxtrain.prepare(model, regional, rng="torch")
    engine = initialize(subject, stage)
    losses = []
    for step in range(STEPS):
        if (prepared, step) in (("after", 0), ("late", 3)):
            onnxtrain.prepare(model, regional, rng="torch")
        torch.manual_seed(dist.get_world_size() * step + dist.get_rank())
        loss = engine(torch.randn(4, WIDTH)).square().mean()
        if stage == 3 and regional is not False:
            assert not any(p.numel() for p in model.blocks.parameters()), "not released after forward"  # type: ignore[operator,union-attr]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters([*model.parameters()] if stage == 3 else []):
        return losses, [p.detach().clone() for p in model.parameters()], subject


def compare(stage: int, prepared: str, regional: Any, eager: tuple[list[float], list[torch.Tensor], nn.Module]) -> None:
    losses, parameters, model = train(stage, prepared, regional)
    assert losses == eager[0]
    assert all(map(torch.equal, parameters, eager[1]))
    if isinstance(model, ORTModule) and stage < 3:
        assert engine_of(model).captures == 1
        return
    report = onnxtrain.report_of(model)
    assert report.by_block == (regional is not False)
    assert all(region.compiled is not None for region in report.regions), str(report)
    if isinstance(model, ORTModule):
        assert model.report() is report.regions[-1].compiled
        return
    hooks = [len(m._forward_hooks) for m in model.modules()]
    onnxtrain.unprepare(model)
    assert all(m._forward_hooks for m in model.modules() if not isinstance(m, nn.ModuleList)) == (stage == 3), hooks
    assert not any(hasattr(m, "_z3_leaf") for m in model.modules())


def work(rank: int, store: str, world: int, stage: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    import deepspeed

    # DeepSpeed would compile an extension for its own reductions on a CPU, which takes minutes. If that is killed, it
    # leaves a lock for which each later process waits forever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    rendezvous = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, **rendezvous)
    warnings.filterwarnings("error", message=".*runs in PyTorch")
    eager = train(stage, "never")
    for prepared, regional in WAYS if stage == 3 else WAYS[:3]:
        try:
            compare(stage, prepared, regional, eager)
        except Exception as error:
            raise AssertionError(f"rank {rank}, prepared {prepared}, regional={regional}") from error
    dist.destroy_process_group()


WAYS = [("wrapped", "auto"), ("before", "auto"), ("after", True), ("before", True), ("late", "auto"), ("before", False)]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_bitwise_that_of_deepspeed_over_eager(tmp_path: Path, stage: int, world: int) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"), world, stage), world, start_method="forkserver")
