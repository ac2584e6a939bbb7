"""Convert the artifacts of onnxruntime-training 1.17 to 1.19, which stock onnxruntime does not run.

A training graph is cut back to its forward part and loss, and differentiated anew. An optimizer graph is one node of
`com.microsoft`, whose attributes hold all settings: it is built anew for the parameters of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.device.accumulation import ACCUMULATED, BUFFER, RESET
from onnxtrain.device.block import Base
from onnxtrain.device.light_model import hold_out
from onnxtrain.device.optimizers import SGD, AdamW, ClipGradNorm, Optimizer
from onnxtrain.device.training_block import ForwardWithLoss, ParameterChoice
from onnxtrain.device.training_graph import METADATA
from onnxtrain.errors import ArtifactError
from onnxtrain.graph.values import MICROSOFT, ONNX, TensorType

_CLIP = "InplaceClipGradNorm"
_MODES = {0: "torch", 1: "huggingface"}


def converted_graph(path: Path, kind: str, parameters: Sequence[str], trainable: Collection[str]) -> bytes | None:
    """Convert a training or evaluation graph; None if the file is not one of ONNX Runtime Training's.

    Args:
        path: the file.
        kind: `training` or `eval`.
        parameters: the names in the checkpoint.
        trainable: those of them that are trained.

    Raises:
        ArtifactError: the graph has an op that cannot be in a training graph.
    """
    model = _read(path)
    if model is None or (kind == "training") != _accumulates(model):
        return None
    outputs = _cut(model, parameters)
    model.graph.name = model.graph.name or path.stem
    extended = ForwardWithLoss(Base(*hold_out(model)), outputs, [])
    parameter_names = [name for name in parameters if name in extended.parameters()]
    choice = ParameterChoice(
        [name for name in parameter_names if name in trainable],
        [name for name in parameter_names if name not in trainable and name not in extended.buffers],
    )
    result = extended.training(choice) if kind == "training" else extended.evaluation(choice)
    return ir.to_proto(result).SerializeToString()


def converted_optimizer(path: Path, parameters: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> bytes | None:
    """Convert an optimizer graph for parameters of these dtypes and shapes; None if it is another file.

    Raises:
        ArtifactError: it has nodes besides one optimizer and one clipping of gradients.
    """
    model = _read(path)
    nodes = {} if model is None else {node.op_type: node for node in model.graph if node.domain == MICROSOFT}
    name = next((name for name in _OPTIMIZERS if name in nodes), None)
    if model is None or name is None:
        return None
    others = [node.op_type for node in model.graph if node.op_type not in (name, _CLIP)]
    if others:
        raise ArtifactError(
            "The optimizer graph has nodes besides an optimizer and the clipping of gradients.",
            str(path),
            got=", ".join(others),
            todo="write the artifacts again with onnxtrain.artifacts.generate_artifacts",
        )
    clip = ClipGradNorm(_attribute(nodes[_CLIP], "max_norm", 1.0)) if _CLIP in nodes else None
    kinds = [(each, TensorType(ir.DataType.from_numpy(d), shape)) for each, (d, shape) in parameters.items()]
    result = _OPTIMIZERS[name](nodes[name], clip).model(kinds)
    return ir.to_proto(result).SerializeToString()


def _read(path: Path) -> ir.Model | None:
    """Return the model; None for a file of onnxtrain or of another format."""
    try:
        model = ir.load(path)
    except Exception:  # noqa: BLE001  protobuf's errors; onnxruntime's own error about the file is the one to show
        return None
    return None if METADATA in model.metadata_props else model


def _accumulates(model: ir.Model) -> bool:
    return any(node.op_type == "InPlaceAccumulatorV2" for node in model.graph)


def _cut(model: ir.Model, parameters: Collection[str]) -> list[str]:
    """Reduce the model to forward and loss, with the parameters as initializers. Return the names of its outputs."""
    graph = model.graph
    kept = [value for value in graph.outputs if not str(value.name).endswith(ACCUMULATED)]
    graph.outputs[:] = kept
    common.RemoveUnusedNodesPass()(model)
    for node in list(graph):
        if (node.domain, node.op_type) == (MICROSOFT, "BatchNormInternal"):
            node.domain, node.op_type = ONNX, "BatchNormalization"
            node.resize_outputs(3)
        if node.op_type == "BatchNormalization":
            _fix_statistics(graph, node, parameters)
    for value in list(graph.inputs):
        name = str(value.name)
        if name == RESET or name.endswith(BUFFER):
            graph.inputs.remove(value)
        elif name in parameters:
            graph.inputs.remove(value)
            value.const_value = _zeros(value)
            graph.register_initializer(value)
    return [str(value.name) for value in kept]


def _fix_statistics(graph: ir.Graph, node: ir.Node, parameters: Collection[str]) -> None:
    """Make running statistics that are not in the checkpoint constants: nothing updates them."""
    if not node.attributes.get_int("training_mode", 0):
        node.resize_outputs(1)
    for index in (3, 4):
        value = node.inputs[index]
        if value is not None and value.const_value is not None and value.name not in parameters:
            constant = ir.Node(ONNX, "Constant", [], [ir.AttrTensor("value", value.const_value)])
            graph.insert_before(node, constant)
            node.replace_input_with(index, constant.outputs[0])


def _zeros(value: ir.Value) -> ir.TensorProtocol:
    """Return a tensor of the value's type that takes no memory: the checkpoint has the values."""
    if value.dtype is None or value.shape is None or not value.shape.is_static():
        raise ArtifactError("A parameter of the graph has no fixed type.", got=f"{value.name}: {value.type}")
    shape = tuple(int(size) for size in value.shape.numpy())
    return ir.tensor(np.broadcast_to(np.zeros((), value.dtype.numpy()), shape), dtype=value.dtype, name=value.name)


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _adamw(node: ir.Node, clip: ClipGradNorm | None) -> Optimizer:
    numbers = [_float(_attribute(node, *each)) for each in (("alpha", 0.9), ("beta", 0.999), ("epsilon", 1e-8))]
    return AdamW(
        bias_correction=bool(_attribute(node, "correct_bias", 1)),
        betas=(numbers[0], numbers[1]),
        eps=numbers[2],
        weight_decay=_float(_attribute(node, "weight_decay", 0.01)),
        clip_grad=clip,
        mode=_MODES[_attribute(node, "adam_mode", 0)],  # type: ignore[arg-type]  # one of both
    )


def _float(number: float) -> float:
    """Return the shortest decimal number that is this one in float32, in which files have it: 0.9, not 0.89999998."""
    return float(str(np.float32(number)))


_OPTIMIZERS: dict[str, Callable[[ir.Node, ClipGradNorm | None], Optimizer]] = {
    "AdamWOptimizer": _adamw,
    "SGDOptimizerV2": lambda node, clip: SGD(clip),
}
