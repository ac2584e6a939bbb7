"""Turns an eval graph and trained parameters into a model for inference."""

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

LARGEST_BYTES = 2**31 - 2**24  # a protobuf message ends at 2 GiB; the rest is for the nodes


def export_for_inferencing(
    eval_model: Path, parameters: Mapping[str, Array], target: str | os.PathLike[str], output_names: Sequence[str]
) -> None:
    """Writes what computes the named values, the parameters as initializers, beside `<target>.data` where it is large.

    Args:
        eval_model: the eval graph, whose inputs the parameters are.
        parameters: their values by name.
        target: the file to write.
        output_names: any values of the graph, in the order that the model shall give them.

    Raises:
        TrainingError: the graph has no value of such a name, or the package onnx-ir is missing.
    """
    try:
        import onnx_ir as ir  # noqa: PLC0415  the rest of the training API does without it
        from onnx_ir.passes import common as passes  # noqa: PLC0415
    except ImportError as error:
        what = "The export edits an ONNX file, which takes the package onnx-ir."
        raise TrainingError(what, todo="pip install onnx-ir") from error
    model = ir.load(eval_model)
    ir.external_data.load_to_model(model)  # its own files are not those of the target
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
    known = sorted(str(name) for name in values if name)
    if unknown := [name for name in output_names if name not in values]:
        what = "The eval graph has no such values."
        raise TrainingError(what, str(path), ", ".join(known), ", ".join(unknown), "Give names of values in the graph.")
    if not output_names:
        raise TrainingError("An inference model needs an output.", "graph_output_names=", ", ".join(known), "none")
    graph.outputs[:] = [values[name] for name in output_names]


def _save(model: ir.Model, target: Path) -> None:
    """Puts the model in place, and before it the tensors that it reads from a file of their own."""
    import onnx_ir as ir  # noqa: PLC0415  as above

    needed = sum(tensor.nbytes for value in model.graph.initializers.values() if (tensor := value.const_value))
    # Beside the target: only within one file system is a move atomic.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        external = f"{target.name}.data" if needed > LARGEST_BYTES else None
        ir.save(model, Path(folder, target.name), external_data=external)
        for name in filter(None, (external, target.name)):
            os.replace(Path(folder, name), target.parent / name)
