"""Export an eval graph with trained parameters as a model for inference."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onnxtrain.device.sessions import METADATA
from onnxtrain.device.values import Array
from onnxtrain.errors import TrainingError

if TYPE_CHECKING:
    import onnx_ir as ir

MAX_TENSOR_BYTES = 2**31 - 2**24  # a protobuf message is limited to 2 GiB; the rest is for the nodes


def export_for_inferencing(
    eval_model: Path, parameters: Mapping[str, Array], target: str | os.PathLike[str], output_names: Sequence[str]
) -> None:
    """Write a model that computes the named values, with the parameters as initializers.

    Args:
        eval_model: the eval graph, with the parameters as inputs.
        parameters: their values by name.
        target: the file to write; large tensors go to `<target>.data`.
        output_names: values of the graph, in the order of the model's outputs.

    Raises:
        TrainingError: the graph has no value of such a name, or the package onnx-ir is not installed.
    """
    try:
        import onnx_ir as ir  # noqa: PLC0415  the rest of the training API does not need it
        from onnx_ir.passes import common as passes  # noqa: PLC0415
    except ImportError as error:
        problem = "The export for inference needs the package onnx-ir, which is not installed."
        raise TrainingError(problem, todo="pip install onnx-ir") from error
    model = ir.load(eval_model)
    ir.external_data.load_to_model(model)  # the target has external data of its own
    _cut(model.graph, output_names, eval_model)
    passes.RemoveUnusedNodesPass()(model)
    for value in list(model.graph.inputs):
        name = str(value.name)
        if name in parameters or not value.uses():
            model.graph.inputs.remove(value)
        if name in parameters and value.uses():
            value.const_value = ir.tensor(parameters[name], name=name)
            model.graph.register_initializer(value)
    ir.passes.Sequential(passes.RemoveUnusedFunctionsPass(), passes.RemoveUnusedOpsetsPass())(model)
    model.metadata_props.pop(METADATA, None)
    _save(model, Path(target))


def _cut(graph: ir.Graph, output_names: Sequence[str], path: Path) -> None:
    values = {value.name: value for node in graph for value in node.outputs}
    available = sorted(str(name) for name in values if name)
    if unknown := [name for name in output_names if name not in values]:
        problem = "The eval graph has no such values."
        todo = "Pass names of values in the graph."
        raise TrainingError(problem, str(path), ", ".join(available), ", ".join(unknown), todo)
    if not output_names:
        raise TrainingError(
            "No output of the inference model is named.", "graph_output_names=", ", ".join(available), "none"
        )
    graph.outputs[:] = [values[name] for name in output_names]


def _save(model: ir.Model, target: Path) -> None:
    """Move the model into place, after its external data."""
    import onnx_ir as ir  # noqa: PLC0415  as above

    needed = sum(tensor.nbytes for value in model.graph.initializers.values() if (tensor := value.const_value))
    # In the target's folder: a move is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        external = f"{target.name}.data" if needed > MAX_TENSOR_BYTES else None
        ir.save(model, Path(folder, target.name), external_data=external)
        for name in filter(None, (external, target.name)):
            os.replace(Path(folder, name), target.parent / name)
