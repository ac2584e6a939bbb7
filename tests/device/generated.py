"""Artifacts of the models in tests/device/models.py; the usual ones are generated once in a process."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import torch

from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.onnxblock.optim import AdamW
from tests.device.models import MODELS, batches, export, make

DECAY = 0.01
_GENERATED = tempfile.TemporaryDirectory()


def adamw() -> AdamW:
    return AdamW(eps=1e-8, weight_decay=DECAY, mode="torch")


def usual_artifacts(name: str, folder: Path, exporter: str = "torch", *, portable: bool = False) -> None:
    """Write the artifacts of a model with cross-entropy and AdamW."""
    shutil.copytree(_usual(name, exporter, portable), folder, dirs_exist_ok=True)


@functools.cache
def _usual(name: str, exporter: str, portable: bool) -> Path:
    folder = Path(_GENERATED.name) / f"{name}-{exporter}-{portable}"
    folder.mkdir()
    module = make(name)
    if exporter == "torch":
        artifacts(name, module, folder, portable=portable)
    else:
        path = folder / "forward.onnx"
        path.write_bytes(_exported(name, exporter))
        trained = [n for n, p in module.named_parameters() if p.requires_grad]
        _generate(path, folder, requires_grad=trained, portable=portable)
    return folder


def artifacts(name: str, module: torch.nn.Module, folder: Path, **options: object) -> None:
    """Write the artifacts of a module that takes the inputs of a model, with cross-entropy and AdamW by default."""
    _generate(module, folder, example_args=batches(name, 1)[0][:-1], **options)


def _generate(model: torch.nn.Module | Path, folder: Path, **options: object) -> None:
    options = {"loss": LossType.CrossEntropyLoss, "optimizer": adamw(), "artifact_directory": folder, **options}
    generate_artifacts(model, **options)  # type: ignore[arg-type]


@functools.cache
def _exported(name: str, exporter: str) -> bytes:
    """The ONNX file of a model by one of PyTorch's exporters."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forward.onnx"
        export(make(name), batches(name, 1)[0][:-1], MODELS[name][2], path, exporter)
        return path.read_bytes()
