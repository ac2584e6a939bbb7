"""A rank that captures other graphs than its peers, or falls back, trains on with them: no capture communicates."""

from __future__ import annotations

import multiprocessing
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onnxtrain
from onnxtrain import ORTModule
from tests.module.test_prepare import WIDTH, Tower

WORLD = 2
STEPS = 14


def train(engine: str, graphs: bool) -> tuple[list[float], nn.Module]:
    """Rank 1 changes a number and the batch size in each step, rank 0 does not."""
    torch.manual_seed(0)
    rank, model = dist.get_rank(), Tower()
    subject: nn.Module = model
    if engine == "FSDP2":
        if graphs:
            onnxtrain.prepare(model, rng="torch")
        for block in model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (WORLD,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    else:
        subject = DistributedDataParallel(ORTModule(model, rng="torch") if graphs else model)
    optimizer = torch.optim.AdamW(subject.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(WORLD * step + rank)
        loss = subject(torch.randn(4 + rank * step, WIDTH), scale=1.0 + rank * step / 8).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=240)
    )
    for engine in ("DDP", "FSDP2"):
        eager, _ = train(engine, graphs=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses, _ = train(engine, graphs=True)
        texts = [text for w in caught if "runs in PyTorch" in (text := str(w.message))]
        assert losses == eager, (engine, losses, eager)
        assert bool(texts) == (rank == 1), texts
        assert all("(rank 1 of 2)" in text for text in texts)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_a_rank_alone_captures_again_and_falls_back(tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"),), WORLD, start_method="forkserver")
