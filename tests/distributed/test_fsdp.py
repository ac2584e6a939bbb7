"""FSDP2 (`fully_shard`) over graphs of blocks: 2 and 4 processes on gloo, bit for bit FSDP2 over eager blocks."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import onnxtrain
from onnxtrain import ORTModule
from onnxtrain.frontend.engine import Engine
from tests.module.test_prepare import WIDTH, Tower

STEPS = 6
SHARDED, HYBRID = "sharded", "hybrid"  # hybrid: replicated over the first axis, sharded over the second
WAYS: list[tuple[str, Any, str]] = [
    ("before", True, SHARDED),
    ("before", "auto", SHARDED),
    ("after", True, SHARDED),
    ("after", "auto", HYBRID),
    ("wrapped", None, SHARDED),
]


class LongWay:
    """Counts the calls that do not take the fast path."""

    def __init__(self) -> None:
        self.calls = 0
        original = Engine._run_slow_path

        def counting(*args: Any) -> Any:
            self.calls += 1
            return original(*args)

        Engine._run_slow_path = counting  # type: ignore[method-assign]


def train(prepared: str, regional: Any, layout: str, long_way: LongWay) -> tuple[list[Any], nn.Module]:
    """Train with dropout; `prepared` is "before" or "after" sharding, "wrapped" (an ORTModule after it), or "never"."""
    torch.manual_seed(0)
    model = Tower()
    world = dist.get_world_size()
    mesh_shape = (world,) if layout == SHARDED else (2, world // 2)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    if prepared == "before":
        onnxtrain.prepare(model, regional, rng="torch")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if prepared == "after":
        onnxtrain.prepare(model, regional, rng="torch")
    subject = ORTModule(model, rng="torch") if prepared == "wrapped" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    results: list[Any] = []
    for step in range(STEPS):
        if step == 2:
            long_way.calls = 0
        torch.manual_seed(world * step + dist.get_rank())
        loss = subject(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
    return [*results, *(p.to_local() for p in model.parameters())], subject  # type: ignore[attr-defined]


def work(rank: int, store: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    warnings.filterwarnings("error", message=".*runs in PyTorch")
    long_way = LongWay()
    eager = {layout: train("never", None, layout, long_way)[0] for layout in (SHARDED, HYBRID)}
    for way in WAYS:
        results, model = train(*way, long_way)
        assert results[:STEPS] == eager[way[2]][:STEPS], way
        assert all(map(torch.equal, results[STEPS:], eager[way[2]][STEPS:])), way
        report = onnxtrain.report_of(model)
        assert report.by_block
        assert all(region.compiled is not None for region in report.regions), str(report)
        assert long_way.calls == 0, way
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_training_is_bitwise_that_of_fsdp_over_eager(world: int, tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"), world), world, start_method="forkserver")
