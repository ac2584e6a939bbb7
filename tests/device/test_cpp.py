"""The C++ example: artifacts train on onnxruntime's C API, to the same losses as in Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from examples.cpp.build import MissingError, build
from examples.web.artifacts import Network, digits
from onnxtrain.api import CheckpointState
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.onnxblock.optim import AdamW, ClipGradNorm
from tests.device.test_web import continued, in_python

STEPS = 30


def wide() -> nn.Module:
    """Has a parameter that is large enough to be updated in chunks, and dropout."""
    layers = nn.Flatten(), nn.Linear(64, 2100), nn.ReLU(), nn.Dropout(0.2), nn.Linear(2100, 10)
    return nn.Sequential(*layers)


def write_artifacts(folder: Path, network: nn.Module) -> None:
    generate_artifacts(
        network,
        loss=LossType.CrossEntropyLoss,
        optimizer=AdamW(eps=1e-8, mode="torch", weight_decay=0.01, clip_grad=ClipGradNorm(1.0)),
        artifact_directory=folder,
        example_args=(torch.zeros(2, 1, 8, 8),),
        output_names=["logits"],
    )
    (folder / "checkpoint").rename(folder / "untrained.safetensors")
    pixels, labels = digits()
    records = np.concatenate([pixels.reshape(len(pixels), 64), labels[:, None]], axis=1)
    (folder / "digits.bin").write_bytes(records.tobytes())


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.slow  # 16 s, of which building the program takes most
def test_cpp_trains_as_python_does(tmp_path: Path) -> None:
    """One test, so that the program is built once."""
    try:
        program = build(tmp_path / "build", "Debug")  # half the time of Release; onnxruntime computes
    except MissingError as error:
        pytest.skip(str(error))
    for name, make in (("cnn", Network), ("wide", wide)):
        folder = tmp_path / name
        torch.manual_seed(0)
        write_artifacts(folder, make())
        ran = run(program, folder, STEPS, folder / "trained")
        assert ran.returncode == 0, ran.stderr
        cpp_results = json.loads(ran.stdout)
        losses, state = in_python(folder, STEPS)
        assert losses[-1] < losses[0] - 0.1
        assert cpp_results["losses"] == losses, "the same library computes the same graphs"
        resumed = CheckpointState.load_checkpoint(folder / "trained")
        assert continued(folder, resumed, STEPS) == continued(folder, state, STEPS), "from the checkpoint of C++"

    (tmp_path / "cnn" / "untrained.safetensors").write_bytes(b"\xff" * 64)
    ran = run(program, tmp_path / "cnn")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "untrained.safetensors is not a safetensors file: its header is cut off" in ran.stderr
