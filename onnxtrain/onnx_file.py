"""Writes a graph as a file that other people's tools open: valid ONNX, training ops as model-local functions.

    write(model, "bert_optimized_training.onnx")

Names are kept: weights have those of the module, values those of PyTorch's own graph; each node carries the module and
the user's line it comes from. An op whose function has several cases (ranks, types, attributes) has a name for each:
GeluGrad, GeluGrad_case2. Of overloads with one name, onnxruntime up to 1.24.1 calls the first for all, without a word.
The file appears whole or not at all.
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
from onnxtrain.graph.opset import convert_opset
from onnxtrain.graph.values import ONNX
from onnxtrain.log import warn_once
from onnxtrain.ops.bodies import IR_VERSION, close, import_opsets
from onnxtrain.ops.local_functions import as_functions

PRODUCER = "onnxtrain"
LARGEST_BYTES = 2**31 - 2**24  # a protobuf message ends at 2 GiB; the rest is for nodes and names


def write(
    model: ir.Model, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], opset: int | None = None
) -> None:
    """Writes `model` to a file; beside it `<path>.data` with the tensors, where they are too large for one file.

    Args:
        model: it stays as it is.
        paths: the file, or several that shall hold the same; their folders are made where they are missing.
        opset: the opset of ai.onnx in the file; None keeps the model's. Where the model has no form in it, the file has
            the nearest later one in which it has, and a warning is logged.

    Raises:
        OptionError: the opset does not exist.
        GraphError: onnx.checker does not accept the result.
    """
    written = _nearest_form(model, opset)
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        place(written, path)


def _nearest_form(model: ir.Model, opset: int | None) -> ir.Model:
    present = model.graph.opset_imports[ONNX]
    if opset is None or not 1 <= opset < present:
        return file_model(model, opset)
    refusal = ""
    for later in range(opset, present):
        try:
            written = file_model(model, later)
        except OptionError as error:
            refusal = refusal or str(error)
            continue
        if later > opset:
            _warn_of_opset(opset, later, refusal)
        return written
    _warn_of_opset(opset, present, refusal)
    return file_model(model)


def _warn_of_opset(wanted: int, given: int, refusal: str) -> None:
    warn_once(f"Files are written in opset {given}, not {wanted}, in which the graph has no form: {refusal}")


def place(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Writes a model that has the form of a file already; see `write`."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: only within one file system is a move atomic.
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
    """The model as it stands in a file: functions beside it, each output a value of its own, documented nodes."""
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
    """The same model, in which no two functions have one name."""
    for node in model.graph.all_nodes():
        if node.overload:
            node.op_type, node.overload = _case_name(node.op_type, node.overload), ""
    for function in model.functions.values():
        if function.overload:
            function.name, function.overload = _case_name(function.name, function.overload), ""
    return traversal.with_graph(model, model.graph, list(model.functions.values()))


def _case_name(name: str, overload: str) -> str:
    return f"{name}_case{int(overload) + 1}"


def known_name(name: str) -> str:
    """The name by which an op is known, from its name in a file, where each case of it has one of its own."""
    return re.sub(r"_case\d+$", "", name)


def _output_names(outputs: list[ir.Value]) -> list[str]:
    """The outputs' own names; one that is an input or an output already gets a name of its own."""
    names: list[str] = []
    for value in outputs:
        name = str(value.name)
        taken = value.producer() is None or name in names
        names.append(f"{name}_output_{len(names)}" if taken else name)
    return names


def _save(model: ir.Model, path: Path) -> None:
    initializers = (v.const_value for v in model.graph.initializers.values())
    bytes_needed = sum(tensor.nbytes for tensor in initializers if tensor is not None)
    if bytes_needed > LARGEST_BYTES:
        ir.save(model, path, external_data=f"{path.name}.data")
        return
    ir.external_data.load_to_model(model)  # tensors of an imported model lie in its own files
    ir.save(model, path)


def _check(model: ir.Model, path: Path) -> None:
    # Shape inference stops at ops of other domains that are no functions.
    whole = all(node.op_identifier() in model.functions for node in model.graph.all_nodes() if node.domain)
    try:
        onnx.checker.check_model(str(path), full_check=whole)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError("the graph would be no valid ONNX file", where=path.name, got=str(error)) from error
