"""DistributedDataParallel over one graph: gradients are exchanged while backward runs.

torchrun --nproc-per-node 2 -m examples.torchrun_ddp
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onnxtrain import ORTModule


def build(width: int = 32) -> nn.Module:
    """Return a small transformer that averages over the sequence."""
    layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def main(steps: int = 6) -> list[float]:
    """Train; return the losses of this rank."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same parameters on each rank; DDP broadcasts those of rank 0
    model = DistributedDataParallel(ORTModule(build()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # different data and dropout masks on each rank
    losses = []
    for step in range(steps):
        x = torch.randn(8, 5, 32)
        loss = nn.functional.mse_loss(model(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
