"""DeepSpeed's ZeRO stage 3: each block of the model is one graph.

torchrun --nproc-per-node 2 -m examples.torchrun_zero3
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import onnxtrain
from examples.torchrun_ddp import build

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3},
}


def main(steps: int = 6) -> list[float]:
    """Train; return the losses of this rank."""
    deepspeed.init_distributed(verbose=False)
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same parameters on each rank
    model = onnxtrain.prepare(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=CONFIG
    )
    torch.manual_seed(1 + rank)  # different data and dropout masks on each rank
    losses = []
    for step in range(steps):
        x = torch.randn(8, 5, 32, device=engine.device)
        loss = nn.functional.mse_loss(engine(x), x.roll(1, 1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
