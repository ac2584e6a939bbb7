"""One graph of the whole model, which gathers sharded parameters where they are read and reduces their gradients.

torchrun --nproc-per-node 2 -m examples.torchrun_sharded_graph FOLDER
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from examples.torchrun_ddp import build
from onnxtrain import ORTModule
from onnxtrain.distributed.parameters import shard_parameters


def main(folder: str, steps: int = 6) -> list[float]:
    """Train, save a checkpoint meanwhile; return the losses of this rank."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, kind = dist.get_rank(), "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),))  # and selects the GPU of this rank
    checkpoint_group = dist.new_group(backend="gloo")  # separate from training's messages
    torch.manual_seed(0)  # the same parameters on each rank
    model = ORTModule(shard_parameters(build().to(kind), mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # different data and dropout masks on each rank
    losses, saving = [], None
    for step in range(steps):
        x = torch.randn(8, 5, 32, device=kind)
        loss = nn.functional.mse_loss(model(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.4f}", flush=True)
        if step == steps // 2:  # for any number of ranks, and for fully_shard
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            saving = dcp.async_save(states, checkpoint_id=folder, process_group=checkpoint_group)
    if saving is not None:
        saving.result()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(sys.argv[1])
