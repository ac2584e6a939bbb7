"""Makes what the page trains: a small convolutional network, its training graphs, and the digits it starts from.

    training_model.onnx, eval_model.onnx, optimizer_model.onnx      portable: they also run on WebGPU
    untrained.safetensors                                           the checkpoint before the first step
    checkpoint.safetensors                                          trained for some seconds on 1400 digits
    inference.onnx                                                  the same as a model for inference
    digits.bin                                                      1797 records: 64 pixels 0…16, one label

`python -m examples.web` puts them into build/web/artifacts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts

TRAINING_DIGITS = 1400  # the first records of digits.bin; the others are for testing
STEPS, BATCH = 350, 50


class Network(nn.Module):
    """Two convolutions and two linear layers on images of 8 x 8 pixels from 0 to 1; returns ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(16 * 4 * 4, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.pool(torch.relu(self.conv2(torch.relu(self.conv1(image)))))
        return self.head(torch.relu(self.hidden(features.flatten(1))))


def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits in a fixed random order: pixels (1797, 8, 8) from 0 to 16, and labels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return data.images[order].astype(np.uint8), data.target[order].astype(np.uint8)


def make(folder: Path, network: nn.Module | None = None) -> float:
    """Write all files into the folder, and return the accuracy on held-out digits.

    Args:
        folder: where they go.
        network: another module that takes images (n, 1, 8, 8) and returns logits (n, 10).
    """
    torch.manual_seed(0)
    generate_artifacts(
        network or Network(),
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=folder,
        portable=True,
        example_args=(torch.zeros(2, 1, 8, 8),),
        output_names=["logits"],
    )
    pixels, labels = digits()
    records = np.concatenate([pixels.reshape(len(pixels), 64), labels[:, None]], axis=1)
    (folder / "digits.bin").write_bytes(records.tobytes())
    return _train(folder, (pixels[:, None] / 16).astype(np.float32), labels.astype(np.int64))


def _train(folder: Path, images: np.ndarray, labels: np.ndarray) -> float:
    (folder / "checkpoint").rename(folder / "untrained.safetensors")
    state = CheckpointState.load_checkpoint(folder / "untrained.safetensors")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    scheduler = LinearLRScheduler(optimizer, 20, STEPS, 5e-3)
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        batch = rng.choice(TRAINING_DIGITS, BATCH, replace=False)
        module(images[batch], labels[batch])
        optimizer.step()
        scheduler.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, folder / "checkpoint.safetensors")
    module.export_model_for_inferencing(folder / "inference.onnx", ["logits"])
    session = onnxruntime.InferenceSession(folder / "inference.onnx")
    logits = session.run(None, {"image": images[TRAINING_DIGITS:]})[0]
    return float((logits.argmax(1) == labels[TRAINING_DIGITS:]).mean())
