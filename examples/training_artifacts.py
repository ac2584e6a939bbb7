"""Training artifacts: generate training graphs from a module, then train them with stock onnxruntime, without PyTorch.

pip install '.[ort]' scikit-learn
python -m examples.training_artifacts
"""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts


def write_artifacts(folder: str) -> None:
    """Write training, evaluation and optimizer graphs, and a checkpoint, on the workstation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    generate_artifacts(
        model,
        example_args=(torch.zeros(2, 64),),
        output_names=["logits"],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=folder,
    )


def train(folder: str, steps: int) -> list[float]:
    """Train on the device, with only onnxruntime and numpy."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    state = CheckpointState.load_checkpoint(f"{folder}/checkpoint")
    module = Module(f"{folder}/training_model.onnx", state, f"{folder}/eval_model.onnx")
    optimizer = Optimizer(f"{folder}/optimizer_model.onnx", module)
    optimizer.set_learning_rate(5e-3)
    random = np.random.default_rng(0)
    losses = []
    for _ in range(steps):
        chosen = random.choice(len(images), 64, replace=False)
        losses.append(float(module.train()(images[chosen], labels[chosen])))
        optimizer.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, f"{folder}/trained", include_optimizer_state=True)
    module.export_model_for_inferencing(f"{folder}/inference.onnx", ["logits"])
    return losses


def main(steps: int = 150) -> list[float]:
    """Generate the artifacts and train them; return the loss of each step."""
    folder = tempfile.mkdtemp()
    write_artifacts(folder)
    losses = train(folder, steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; inference.onnx and the trained checkpoint are in {folder}")
    return losses


if __name__ == "__main__":
    main()
