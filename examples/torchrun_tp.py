"""Tensor parallelism: the ranks share each layer, and train on the same data.

torchrun --nproc-per-node 2 -m examples.torchrun_tp
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from onnxtrain import ORTModule


class FeedForward(nn.Module):
    """The layer of a transformer whose weights two matmuls share."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def main(steps: int = 6) -> list[float]:
    """Train; return the losses of this rank, which are those of all."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # the same parameters, and the same data, on each rank
    model = nn.Sequential(*(FeedForward() for _ in range(3))).to(kind)
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = ORTModule(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        x = torch.randn(8, 5, 32, device=kind)
        loss = nn.functional.mse_loss(model(x), x.flip(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}  loss {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
