"""Checkpoints of graphs built from blocks."""

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
    """Write the parameters of `TrainingBlock.parameters()` to a checkpoint.

    Args:
        parameters: (trainable, frozen).
        path: the file.
        nominal_checkpoint: whether to write only names and shapes.

    Raises:
        ArtifactError: `parameters` is not a pair.
    """
    if not isinstance(parameters, tuple) or len(parameters) != 2:
        raise ArtifactError("save_checkpoint expects the result of TrainingBlock.parameters(): (trainable, frozen).")
    trainable, frozen = parameters
    arrays = {t.name: ir.serde.deserialize_tensor(t).numpy() for t in (*trainable, *frozen)}
    state = Checkpoint(arrays, frozenset(t.name for t in trainable), nominal=nominal_checkpoint)
    checkpoint.save(state, path)


def load_checkpoint_to_model(path: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Copy the parameters of a checkpoint to the initializers of `model` with the same names.

    Raises:
        ArtifactError: an initializer has another shape or dtype, or no name matches.
        CheckpointError: the file is damaged.
    """
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    state = checkpoint.load(path)
    if not initializers.keys() & state.parameters.keys():
        raise ArtifactError("The model has none of the checkpoint's parameters.", str(path), got=len(initializers))
    for name, array in state.parameters.items():
        tensor = initializers.get(name)
        if tensor is None:
            continue
        new = ir.to_proto(ir.tensor(array, name=name))
        if (tensor.data_type, list(tensor.dims)) != (new.data_type, list(new.dims)):
            expected, got = (f"{t.data_type} {list(t.dims)}" for t in (tensor, new))
            raise ArtifactError(f"{name} differs from the model in dtype or shape.", str(path), expected, got)
        tensor.CopyFrom(new)
