"""torch.distributed.checkpoint of sharded graphs: by other numbers of ranks, FSDP2 over eager, and asynchronously."""

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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from onnxtrain import ORTModule
from onnxtrain.distributed.parameters import shard_parameters
from onnxtrain.testing import assert_no_worse_than_eager
from tests.distributed.test_gathered_parameters import Model, batch

STEPS = 2
PHASES = [(2, True), (1, True), (4, True), (2, False), (2, True)]  # ranks, and whether they run a sharded graph
CHAINS = {"eager": torch.float32, "exact": torch.float64, "graphs": torch.float32}


def sharded(dtype: torch.dtype, as_graph: bool, world: int) -> nn.Module:
    model, mesh = Model(layers=2).to(dtype), init_device_mesh("cpu", (world,))
    if as_graph:
        return ORTModule(shard_parameters(model, mesh, least_bytes=1, bucket_bytes=1000), rng="torch")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def whole(state: Any) -> Any:
    """Return a copy of a state whose tensors are whole."""
    if isinstance(state, dict):
        return {name: whole(each) for name, each in state.items()}
    return state.full_tensor().clone() if isinstance(state, DTensor) else state


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    loss: torch.Tensor = model(*batch(seed, 4 + seed % 3))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(chain: str, phase: int, folder: Path) -> list[torch.Tensor]:
    """Load what the phase before has saved, train, save while training goes on; return losses and whole parameters."""
    world, as_graph = PHASES[phase]
    torch.manual_seed(phase)  # a loaded checkpoint replaces these parameters
    model = sharded(CHAINS[chain], as_graph and chain == "graphs", world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=0.01)
    if phase:
        states = states_of(model, optimizer)
        dcp.load(states, checkpoint_id=folder / str(phase - 1))
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        saved = torch.load(folder / f"{phase - 1}.pt")
        loaded = whole(states_of(model, optimizer))
        assert loaded["optimizer"].pop("param_groups") == saved["optimizer"].pop("param_groups")
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    seed = 100 * phase + dist.get_rank()
    losses = [step(model, optimizer, seed + world * number) for number in range(STEPS)]
    states = whole(states_of(model, optimizer))
    if dist.get_rank() == 0:
        torch.save(states, folder / f"{phase}.pt")
    states, apart = states_of(model, optimizer), dist.new_group()  # or its messages mix with those of training
    saving = dcp.async_save(states, checkpoint_id=folder / str(phase), process_group=apart)
    losses.append(step(model, optimizer, seed + world * STEPS))  # changes the parameters while they are saved
    saving.result()  # type: ignore[union-attr]  # a future
    return [*losses, *(p.full_tensor().detach() for p in model.parameters())]  # type: ignore[attr-defined]


def work(rank: int, phase: int, folder: Path) -> None:
    torch.set_num_threads(1)
    world = PHASES[phase][0]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{phase}", rank=rank, world_size=world)
    eager, exact, graphs = (train(chain, phase, folder / chain) for chain in CHAINS)
    for number, (ours, theirs, right) in enumerate(zip(graphs, eager, exact, strict=True)):
        if phase < 2:  # of more than two ranks, gloo adds the gradients in an order that offsets decide
            assert torch.equal(ours, theirs), (phase, number)
        assert_no_worse_than_eager(f"{phase} {number}", ours, theirs, right)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_training_goes_on_from_a_checkpoint_of_others(tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    for chain in CHAINS:
        (tmp_path / chain).mkdir()
    for phase, (world, _) in enumerate(PHASES):
        mp.start_processes(work, (phase, tmp_path), world, start_method="forkserver")
