"""A pipeline of two stages, each of which is a graph.

torchrun --nproc-per-node 2 -m examples.torchrun_pipeline
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import onnxtrain
from examples.torchrun_ddp import build


def main(steps: int = 6, microbatches: int = 4) -> list[float]:
    """Train; return the losses of the last stage."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(rank)
    model = onnxtrain.prepare(build().to(device), regional=False)
    stage = PipelineStage(model, rank, dist.get_world_size(), device)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for step in range(steps):
        torch.manual_seed(100 + step)  # the first stage reads x, the last one its target
        x = torch.randn(8, 5, 32, device=device)
        of_microbatches: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.roll(1, 1), losses=of_microbatches)
            losses.append(torch.stack(of_microbatches).mean().item())
            print(f"step {step}  loss {losses[-1]:.4f}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
