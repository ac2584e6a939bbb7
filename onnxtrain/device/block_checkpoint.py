"""Checkpoints of graphs that blocks built."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtrain.device import checkpoint
from onnxtrain.device.checkpoint_data import Checkpoint
from onnxtrain.errors import ArtifactError

Parameters = Sequence[onnx.TensorProto]


def save_checkpoint(
    parameters: tuple[Parameters, Parameters], path: str | os.PathLike[str], nominal_checkpoint: bool = False
) -> None:
    """Writes what `TrainingBlock.parameters()` gave.

    Args:
        parameters: the trainable and the frozen ones.
        path: the file.
        nominal_checkpoint: whether only names and shapes are written.

    Raises:
        ArtifactError: `parameters` is no such pair.
    """
    if not isinstance(parameters, tuple) or len(parameters) != 2:
        raise ArtifactError("save_checkpoint takes what TrainingBlock.parameters() gives: (trainable, frozen).")
    trainable, frozen = parameters
    arrays = {t.name: ir.serde.deserialize_tensor(t).numpy() for t in (*trainable, *frozen)}
    state = Checkpoint(arrays, frozenset(t.name for t in trainable), nominal=nominal_checkpoint)
    checkpoint.save(state, path)


def load_checkpoint_to_model(path: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Writes the parameters of a checkpoint into the initializers of `model` that have their names.

    Raises:
        ArtifactError: an initializer has another shape or element type, or none has a parameter's name.
        CheckpointError: the file is damaged.
    """
    known = {tensor.name: tensor for tensor in model.graph.initializer}
    state = checkpoint.load(path)
    if not known.keys() & state.parameters.keys():
        raise ArtifactError("The model has none of the checkpoint's parameters.", str(path), got=len(known))
    for name, array in state.parameters.items():
        tensor = known.get(name)
        if tensor is None:
            continue
        new = ir.to_proto(ir.tensor(array, name=name))
        if (tensor.data_type, list(tensor.dims)) != (new.data_type, list(new.dims)):
            expected, got = (f"{t.data_type} {list(t.dims)}" for t in (tensor, new))
            raise ArtifactError(f"{name} has another type or shape than in the model.", str(path), expected, got)
        tensor.CopyFrom(new)
