"""Pipelines (`torch.distributed.pipelining`) of graphs: bit for bit those of eager stages, on two processes."""

from __future__ import annotations

import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

import onnxtrain
from tests.module.test_prepare import WIDTH, Block

WORLD = 2
STEPS = 3
BATCH, MICROBATCHES = 8, 4


def run_step(schedule: Any, step: int) -> list[torch.Tensor]:
    """Run a step of a schedule; returns the losses of the microbatches on the last stage's rank."""
    torch.manual_seed(step)
    x = torch.randn(BATCH, WIDTH)
    if dist.get_rank() == 0:
        schedule.step(x)
        return []
    losses: list[torch.Tensor] = []
    schedule.step(target=x, losses=losses)
    return losses


def train(schedule: Any, regional: bool | None) -> tuple[list[torch.Tensor], nn.Module]:
    """The losses, on the last stage, and this stage's gradients of each step."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(Block(), Block())
    if regional is not None:
        onnxtrain.prepare(nn.Sequential(model) if regional else model, regional, rng="torch")
    stage = PipelineStage(model, rank, WORLD, torch.device("cpu"))
    steps = schedule(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    results: list[torch.Tensor] = []
    for step in range(STEPS):
        results += run_step(steps, step)
        results += [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return results, model


def train_without_bubbles(prepared: bool) -> list[torch.Tensor]:
    """As `train`, of two stages on each rank, with weight gradients apart from input gradients."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    models = [nn.Sequential(Block(), Block()) for _ in range(2)]
    if prepared:
        for model in models:
            onnxtrain.prepare(model, False, rng="torch", early_gradients="inputs")
    stages = [PipelineStage(m, rank + WORLD * i, 2 * WORLD, torch.device("cpu")) for i, m in enumerate(models)]
    steps = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)  # type: ignore[arg-type]
    results: list[torch.Tensor] = []
    for step in range(STEPS):
        results += run_step(steps, step)
        for model in models:
            results += [p.grad for p in model.parameters() if p.grad is not None]
            model.zero_grad()
    if prepared:
        reports = [onnxtrain.report_of(model) for model in models]
        assert all(region.compiled is not None for report in reports for region in report.regions)
    return results


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    warnings.filterwarnings("error", message=".*runs in PyTorch")
    for schedule in (ScheduleGPipe, Schedule1F1B):
        expected, _ = train(schedule, None)
        for regional in (False, True):
            results, model = train(schedule, regional)
            assert len(results) == len(expected) == STEPS * (8 + (MICROBATCHES if rank else 0))
            assert all(map(torch.equal, results, expected)), (schedule, regional)
            report = onnxtrain.report_of(model)
            assert all(region.compiled is not None for region in report.regions), str(report)
    if torch.__version__ >= "2.13":  # before, PyTorch's zero-bubble schedules refuse custom autograd functions
        expected, results = (train_without_bubbles(prepared) for prepared in (False, True))
        assert len(results) == len(expected) == STEPS * (16 + (MICROBATCHES if rank else 0))
        assert all(map(torch.equal, results, expected))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_training_is_bitwise_that_of_eager_stages(tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"),), WORLD, start_method="forkserver")
