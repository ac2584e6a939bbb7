"""FSDP2 with one graph per block, and checkpoints: after a failure, the run resumes from the last one.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 -m examples.torchrun_fsdp2 FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import onnxtrain
from examples.torchrun_ddp import build


def last_checkpoint(folder: Path) -> int:
    """Return the number of steps that the last complete checkpoint contains; 0 if there is none."""
    return max((int(file.parent.name) for file in folder.glob("*/.metadata")), default=0)


def main(folder: Path, steps: int = 6) -> None:
    """Train from the last checkpoint in the folder, and save one after each step."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same parameters on each rank
    model = onnxtrain.prepare(build(), rng="torch")
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = last_checkpoint(folder)
    if start:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder / str(start))  # also one that another number of ranks saved
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    for step in range(start, steps):
        torch.manual_seed(1 + rank + step * dist.get_world_size())  # different masks in each step and rank
        x = torch.randn(8, 5, 32)
        loss = nn.functional.mse_loss(model(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank}  step {step}  loss {loss.item()!r}", flush=True)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=folder / str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
