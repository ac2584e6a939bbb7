"""A residual CNN on scikit-learn's digits: batch norm in training and evaluation, channels_last inside the graph.

pip install . scikit-learn
python -m examples.cnn
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from onnxtrain import ORTModule


class Residual(nn.Module):
    """Add the input to the result of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_first, self.norm_second = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm_first(self.first(x)))
        return torch.relu(x + self.norm_second(self.second(hidden)))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        Residual(16),
        nn.MaxPool2d(2),
        Residual(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def main(epochs: int = 4) -> float:
    """Train; return the accuracy on images that were held out."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train, test = order[:1400], order[1400:]

    model = ORTModule(network())  # the only change
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        model.train()
        for chosen in train[torch.randperm(len(train))].split(50):
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        print(f"epoch {epoch}  loss {loss.item():.3f}  accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
