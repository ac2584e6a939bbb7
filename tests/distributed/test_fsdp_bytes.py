"""The bytes that FSDP2 gathers and holds with graphs of the blocks, counted: at most those with eager blocks."""

from __future__ import annotations

import multiprocessing
import warnings
from contextlib import nullcontext
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
from onnxtrain.torch_compat.replacement import replaced
from tests.module.test_prepare import WIDTH, Tower
from tests.plan.measured import peak_of

ROWS = 64


def measure(graphs: bool, world: int) -> tuple[int, int, nn.Module]:
    """Return the most bytes of gathered parameters at a time in the fourth step, and the most bytes of the fifth.

    FSDP2 resizes the storages of gathered parameters.
    """
    torch.manual_seed(0)
    model = Tower()
    if graphs:
        onnxtrain.prepare(model, True, rng="torch")
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(ROWS, WIDTH)
    held: dict[int, int] = {}
    largest = 0
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        nonlocal largest
        held[id(storage)] = size
        largest = max(largest, sum(held.values()))
        return original(storage, size)

    for step in range(4):
        with replaced(torch.UntypedStorage, "resize_", resize) if step == 3 else nullcontext():
            model(x).square().mean().backward()
        model.zero_grad()
    return largest, peak_of(lambda: model(x).square().mean().backward()), model


def compare(world: int) -> None:
    (eager, live_in_eager, _), (ours, live, model) = measure(False, world), measure(True, world)
    assert 0 < ours <= eager
    assert 0 < live <= 1.01 * live_in_eager, (live, live_in_eager)
    blocks: Any = model.blocks
    of_blocks = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks]
    root = sum(p.numel() * p.element_size() for p in model.parameters()) - sum(of_blocks)
    padding = world * WIDTH * 4 * len([*model.parameters()])
    assert ours <= max(of_blocks) + root + padding, (ours, of_blocks, root)
    for parameter in model.parameters():
        assert parameter.to_local().numel() <= -(-len(parameter) // world) * parameter[0].numel()  # type: ignore[attr-defined]
    report = onnxtrain.report_of(model)
    assert all(region.compiled is not None for region in report.regions), str(report)


def work(rank: int, store: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    warnings.filterwarnings("error", message=".*runs in PyTorch")
    compare(world)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_one_block_and_the_root_are_gathered_at_a_time_and_no_more_is_held(world: int, tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"), world), world, start_method="forkserver")
