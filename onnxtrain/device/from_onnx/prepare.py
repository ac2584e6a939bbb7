"""Normalize an imported model: no functions, typed values, ai.onnx at the internal opset."""

from __future__ import annotations

import re

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.errors import ArtifactError, OptionError
from onnxtrain.graph import traversal
from onnxtrain.graph.opset import convert_opset
from onnxtrain.graph.values import ONNX, constant_of
from onnxtrain.ops.definition import OPSET

_TRAINING_CALL = re.compile(r"aten\._native_batch_norm_legit_functional\.default\]\(args = \(.*, True, [^,]+, [^,]+\)")
_AI_ONNX = "ai.onnx"  # the domain's other name


def prepare(model: ir.Model) -> ir.Model:
    """Copy and normalize a model. Large tensors are shared, not copied.

    Raises:
        ArtifactError: the model has an op that the opset conversion does not support, or is invalid.
    """
    order = list(model.graph.initializers)
    model = traversal.with_graph(model, traversal.clone(model.graph)[0])
    for node in model.graph.all_nodes():
        if node.domain == _AI_ONNX:
            node.domain = ONNX
    opset = model.graph.opset_imports.setdefault(ONNX, model.graph.opset_imports.pop(_AI_ONNX, OPSET))
    common.InlinePass()(model)
    traversal.sort(model.graph)
    traversal.name_uniquely(model.graph)
    try:
        model = common.ShapeInferencePass(data_prop=True)(model).model
        convert_opset(model.graph, OPSET)
    except OptionError as error:
        todo = "export the model with a newer opset, preferably 18 to 23, or without this op"
        raise ArtifactError(f"The model has opset {opset}. {error.problem}", error.where, todo=todo) from error
    except (RuntimeError, onnx.shape_inference.InferenceError) as error:
        raise ArtifactError("The model is not valid ONNX.", model.graph.name, got=str(error)) from error
    traversal.name_uniquely(model.graph)
    initializers = model.graph.initializers
    for name in [n for n in order if n in initializers] + [n for n in initializers if n not in order]:
        initializers.add(initializers.pop(name))  # ONNX's tools reorder them; their order is that of the parameters
    return model


def trains(node: ir.Node) -> bool:
    """Return whether a BatchNormalization is in training mode.

    It uses batch statistics and updates the running ones.
    """
    flag = node.attributes.get("training_mode")
    if flag is not None and flag.as_int():
        return True
    # PyTorch's exporter (2.11 to 2.13) writes inference mode even for a module in training mode. The original call, in
    # the node's metadata, has the mode.
    return bool(_TRAINING_CALL.search(node.metadata_props.get("pkg.torch.onnx.fx_node", "")))


def statistics(model: ir.Model) -> list[str]:
    """Return the running statistics of BatchNormalization, which training updates: the names of their initializers."""
    names: dict[str, None] = {}
    for node in model.graph:
        if (node.domain, node.op_type) == (ONNX, "BatchNormalization") and trains(node):
            for value in node.inputs[3:5]:
                if value is not None and value.name in model.graph.initializers:
                    names[str(value.name)] = None
    return list(names)


def constant_number(value: ir.Value | None) -> float | int | bool | None:
    """Return the number in a constant of one element; None if the value is computed or absent."""
    array = constant_of(value)
    return None if array is None or array.size != 1 else array.reshape(()).item()
