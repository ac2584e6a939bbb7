"""Write a graph as a file that other tools can open: valid ONNX, with training ops as model-local functions.

    write(model, "bert_optimized_training.onnx")

Weights keep their names in the module, values those of PyTorch's exported graph. The doc_string of a node gives its
module and source location. If an op's function depends on ranks, dtypes or attributes, each case has a name of its own:
GeluGrad, GeluGrad_case2. Overloads of one name are not used: up to 1.24.1, onnxruntime silently calls the first of them
for all. Layers and other blocks that occur three times are functions, too. Files are written atomically.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphError, OptionError
from onnxtrain.graph import traversal
from onnxtrain.graph.block_functions import called_by_functions, fold_blocks
from onnxtrain.graph.opset import convert_opset
from onnxtrain.graph.values import ONNX
from onnxtrain.log import warn_once
from onnxtrain.ops.bodies import IR_VERSION, close, import_opsets
from onnxtrain.ops.local_functions import as_functions

PRODUCER = "onnxtrain"
MAX_BYTES = 2**31 - 2**24  # a protobuf message is limited to 2 GiB; 16 MiB are for nodes and names


def write(
    model: ir.Model, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], opset: int | None = None
) -> None:
    """Write `model` to a file, and its tensors to `<path>.data` if they are too large for one file.

    Args:
        model: not modified.
        paths: the file, or several files with the same content. Missing folders are created.
        opset: the opset of ai.onnx in the file; None keeps the model's. If the model cannot be converted to it, the
            file has the nearest later opset that can express the model, and a warning is logged.

    Raises:
        OptionError: the opset does not exist.
        GraphError: onnx.checker rejects the result.
    """
    converted = _in_nearest_opset(model, opset)
    fold_blocks(converted)
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        write_file_model(converted, path)


def _in_nearest_opset(model: ir.Model, opset: int | None) -> ir.Model:
    current = model.graph.opset_imports[ONNX]
    if opset is None or not 1 <= opset < current:
        return file_model(model, opset)
    reason = ""
    for later in range(opset, current):
        try:
            converted = file_model(model, later)
        except OptionError as error:
            reason = reason or str(error)
            continue
        if later > opset:
            _warn_of_opset(opset, later, reason)
        return converted
    _warn_of_opset(opset, current, reason)
    return file_model(model)


def _warn_of_opset(requested: int, used: int, reason: str) -> None:
    warn_once(f"Writing files in opset {used} instead of {requested}, which cannot express the graph: {reason}")


def write_file_model(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model that `file_model` returned; see `write`."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the target's folder: a rename is atomic only within one file system.
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _save(model, folder / target.name)
        _check(model, folder / target.name)
        for name in (f"{target.name}.data", target.name):  # the tensors first: the model reads them
            if (folder / name).exists():
                os.replace(folder / name, target.parent / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def file_model(model: ir.Model, opset: int | None = None) -> ir.Model:
    """Return the model in the form of a file: with functions, distinct outputs and the source location of each node."""
    result = _without_overloads(as_functions(model))
    result.ir_version = max(IR_VERSION, result.ir_version)
    result.producer_name = PRODUCER
    graph = result.graph
    outputs = list(graph.outputs)
    graph.outputs.clear()
    close(graph, outputs, _output_names(outputs))
    traversal.name_uniquely(graph)
    import_opsets(graph)
    for node in graph.all_nodes():
        node.doc_string = node.doc_string or traversal.origin(node)
    if opset is not None:
        convert_opset(graph, opset)
        for function in result.functions.values():
            convert_opset(function.graph, opset)
    return result


def _without_overloads(model: ir.Model) -> ir.Model:
    """Return the same model, with a distinct name for each function."""
    for node in model.graph.all_nodes():
        if node.overload:
            node.op_type, node.overload = _case_name(node.op_type, node.overload), ""
    for function in model.functions.values():
        if function.overload:
            function.name, function.overload = _case_name(function.name, function.overload), ""
    return traversal.with_graph(model, model.graph, list(model.functions.values()))


def _case_name(name: str, overload: str) -> str:
    return f"{name}_case{int(overload) + 1}"


def without_case_suffix(name: str) -> str:
    """Return the name of an op, from its name in a file."""
    return re.sub(r"_case\d+$", "", name)


def _output_names(outputs: list[ir.Value]) -> list[str]:
    """Return the outputs' names; a value that is also an input or an earlier output gets a new one."""
    names: list[str] = []
    for value in outputs:
        name = str(value.name)
        taken = value.producer() is None or name in names
        names.append(f"{name}_output_{len(names)}" if taken else name)
    return names


def _save(model: ir.Model, path: Path) -> None:
    initializers = (v.const_value for v in model.graph.initializers.values())
    bytes_needed = sum(tensor.nbytes for tensor in initializers if tensor is not None)
    if bytes_needed > MAX_BYTES:
        ir.save(model, path, external_data=f"{path.name}.data")
        return
    ir.external_data.load_to_model(model)  # tensors of an imported model may be in external files
    ir.save(model, path)


def _check(model: ir.Model, path: Path) -> None:
    # Shape inference stops at ops of other domains without a function.
    nodes = [*model.graph.all_nodes(), *called_by_functions(model.functions)]
    all_inferable = all(node.op_identifier() in model.functions for node in nodes if node.domain)
    try:
        onnx.checker.check_model(str(path), full_check=all_inferable)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError("The graph is not valid ONNX.", where=path.name, got=str(error)) from error
