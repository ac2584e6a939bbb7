"""Import `ort_training_artifacts` lazily: it needs onnx and PyTorch, which a training device may lack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxtrain.device.state import TrainingState
from onnxtrain.device.values import dtype_named


def convert_graph(path: Path, kind: str, state: TrainingState) -> bytes | None:
    """Convert a graph of onnxruntime-training; None if it is not one, or where the packages are missing."""
    try:
        from onnxtrain.device.ort_training_artifacts import converted_graph  # noqa: PLC0415  see above
    except ImportError:
        return None
    return converted_graph(path, kind, list(state.names), state.trainable)


def convert_optimizer(path: Path, names: Sequence[str], state: TrainingState) -> bytes | None:
    """Convert an optimizer graph of onnxruntime-training, for these parameters; None as for `convert_graph`."""
    try:
        from onnxtrain.device.ort_training_artifacts import converted_optimizer  # noqa: PLC0415  see above
    except ImportError:
        return None
    types = {name: state.type_of(name) for name in names}
    return converted_optimizer(path, {name: (dtype_named(dtype), shape) for name, (dtype, shape) in types.items()})
