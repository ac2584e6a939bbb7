"""Lightning: prepare the network inside the LightningModule.

pip install '.[trainers]'
python -m examples.lightning_module
"""

from __future__ import annotations

import lightning
import torch
from torch import nn

import onnxtrain


class Autoencoder(nn.Module):
    """Compress vectors to a few numbers and restore them."""

    def __init__(self, features: int = 32, code: int = 4) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(features, 64), nn.SiLU(), nn.Linear(64, code))
        self.decode = nn.Sequential(nn.Linear(code, 64), nn.SiLU(), nn.Linear(64, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


class Task(lightning.LightningModule):
    """Minimize the reconstruction error of an autoencoder."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (x,) = batch
        loss = nn.functional.mse_loss(self.network(x), x)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main(epochs: int = 5) -> list[float]:
    """Train; return the loss of each step."""
    lightning.seed_everything(0)
    samples = torch.randn(1024, 4) @ torch.randn(4, 32)  # 4 dimensions embedded in 32
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples), batch_size=64, shuffle=True)
    task = Task(onnxtrain.prepare(Autoencoder()))  # the only change
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, loader)
    print(f"loss {task.losses[0]:.3f} -> {task.losses[-1]:.3f}")
    return task.losses


if __name__ == "__main__":
    main()
