"""FSDP2 (`fully_shard`) over prepared blocks: two processes on gloo, bit for bit FSDP2 over eager blocks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import onnxtrain
from tests.module.test_prepare import WIDTH, Tower

WORLD = 2
STEPS = 6


def train(prepared: str, regional: bool | str = True) -> tuple[list[float], Tower]:
    """Train with dropout; `prepared` is "before" or "after" sharding, or "never"."""
    torch.manual_seed(0)
    model, mesh = Tower(), init_device_mesh("cpu", (WORLD,))
    if prepared == "before":
        onnxtrain.prepare(model, regional, rng="torch")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if prepared == "after":
        onnxtrain.prepare(model, regional, rng="torch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(WORLD * step + dist.get_rank())
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    eager, plain = train("never")
    for prepared, regional in (("before", True), ("after", True), ("after", "auto")):
        losses, model = train(prepared, regional)
        assert losses == eager, (prepared, regional)
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(got.to_local(), expected.to_local()), (prepared, regional)  # type: ignore[attr-defined]
        report = onnxtrain.report_of(model)
        assert report.by_block
        assert all(region.compiled is not None for region in report.regions), str(report)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_training_is_bitwise_that_of_fsdp_over_eager(tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"),), WORLD, start_method="forkserver")
