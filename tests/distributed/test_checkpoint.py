"""torch.distributed.checkpoint: saved by 4 ranks, loaded by 2 in another wrapping, and by 4 again, as in eager."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onnxtrain
from onnxtrain import ORTModule
from tests.module.test_prepare import WIDTH, Tower

STEPS = 2
PHASES = [(4, "FSDP2"), (2, "DDP"), (4, "HSDP")]  # ranks and wrapping


def wrap(model: nn.Module, wrapping: str, graphs: bool, world: int) -> nn.Module:
    if wrapping == "DDP":
        return DistributedDataParallel(ORTModule(model, rng="torch") if graphs else model)
    if graphs:
        onnxtrain.prepare(model, rng="torch")
    hybrid = wrapping == "HSDP"
    mesh = (
        init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
        if hybrid
        else init_device_mesh("cpu", (world,))
    )
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    return model


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def train(phase: int, graphs: bool, folder: Path) -> list[Any]:
    """Load, train, save; return the losses and the whole parameters."""
    world, wrapping = PHASES[phase]
    torch.manual_seed(phase)  # a loaded checkpoint replaces these parameters
    model = Tower()
    parallel = wrap(model, wrapping, graphs, world)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.05)
    if phase:
        states = states_of(parallel, optimizer)
        dcp.load(states, checkpoint_id=folder / str(phase - 1))
        set_state_dict(parallel, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    results: list[Any] = []
    for step in range(STEPS):
        torch.manual_seed(1000 * phase + world * step + dist.get_rank())
        loss = parallel(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    states = states_of(parallel, optimizer)
    assert list(states["model"]) == list(Tower().state_dict())
    dcp.save(states, checkpoint_id=folder / str(phase))
    if graphs:
        subject = parallel.module if wrapping == "DDP" else parallel
        report = subject.report() if isinstance(subject, ORTModule) else onnxtrain.report_of(subject)
        assert "no graph" not in str(report)
    return results + [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def test_an_ortmodule_has_an_extra_state_only_if_its_module_has() -> None:
    class Counts(Tower):
        def get_extra_state(self) -> int:
            return 3

    assert ORTModule.get_extra_state is nn.Module.get_extra_state
    assert ORTModule(Counts()).get_extra_state() == 3
    wrapped, other = ORTModule(Tower()), ORTModule(Tower())
    set_model_state_dict(wrapped, get_model_state_dict(other))
    assert all(map(torch.equal, wrapped.parameters(), other.parameters()))


def work(rank: int, phase: int, folder: str) -> None:
    torch.set_num_threads(1)
    world = PHASES[phase][0]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{phase}", rank=rank, world_size=world)
    eager = train(phase, False, Path(folder) / "eager")
    results = train(phase, True, Path(folder) / "graphs")
    assert all(map(torch.equal, results, eager))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_other_numbers_of_ranks_and_wrappings_go_on_as_in_eager(tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    for phase, (world, _) in enumerate(PHASES):
        mp.start_processes(work, (phase, str(tmp_path)), world, start_method="forkserver")
