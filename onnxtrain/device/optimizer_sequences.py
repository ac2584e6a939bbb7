"""The optimizer graph with sequences as inputs, which an optimizer block builds.

    (learning_rate, step, params, gradients, <state>s…) -> (updated_flag, params.out, <state>s.out…)

Each sequence has one tensor for each trainable parameter. onnxruntime cannot bind sequences: `onnxtrain.api` copies the
updates. `generate_artifacts` therefore writes the graph with a tensor for each input, which is updated in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.device.accumulation import GRADIENT
from onnxtrain.device.training_graph import UPDATED
from onnxtrain.device.values import Array
from onnxtrain.errors import ArtifactError
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, set_type, type_of

_FLAG = "updated_flag"


def sequence_names(names: Sequence[str], state: Sequence[str]) -> dict[str, list[str]]:
    """Return the tensors of each sequence, by the sequence's name."""
    ends = {"params": "", "gradients": GRADIENT} | {f"{each}s": f".{each}" for each in state}
    return {sequence: [f"{name}{end}" for name in names] for sequence, end in ends.items()}


def take_sequences(graph: ir.Graph, sequences: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Replace the inputs and outputs of a finished optimizer graph by sequences.

    Args:
        graph: modified in place. Its outputs are `<input>.out`.
        sequences: see `sequence_names`.

    Returns:
        For each new output, the input that it updates.

    Raises:
        ArtifactError: the tensors of a sequence have several dtypes.
    """
    inputs = {str(value.name): value for value in graph.inputs}
    outputs = {str(value.name): value for value in graph.outputs}
    graph.outputs.clear()
    flag = _constant(np.array([True]), _FLAG)
    graph.insert_before(graph[0], flag)
    graph.outputs.append(flag.outputs[0])
    updates = {}
    for sequence, names in sequences.items():
        _unpack(graph, sequence, [inputs[name] for name in names])
        updated = [outputs[f"{name}{UPDATED}"] for name in names if f"{name}{UPDATED}" in outputs]
        if updated:
            node = ir.Node(ONNX, "SequenceConstruct", updated, name=f"{sequence}{UPDATED}")
            node.outputs[0].name = f"{sequence}{UPDATED}"
            node.outputs[0].type = ir.SequenceType(ir.TensorType(dtype_of(updated[0])))
            graph.append(node)
            graph.outputs.append(node.outputs[0])
            updates[f"{sequence}{UPDATED}"] = sequence
    return updates


def _unpack(graph: ir.Graph, sequence: str, tensors: Sequence[ir.Value]) -> None:
    """Replace these inputs by the elements of one input, a sequence."""
    dtypes = {dtype_of(tensor).name.lower() for tensor in tensors}
    if len(dtypes) > 1:
        raise ArtifactError(
            "The parameters of an optimizer block must have one dtype, because they are one sequence.",
            got=", ".join(sorted(dtypes)),
            todo="pass the block to generate_artifacts(optimizer=...), whose graph has an input for each tensor",
        )
    sequence_value = ir.Value(name=sequence, type=ir.SequenceType(ir.TensorType(dtype_of(tensors[0]))))
    first = graph[0]
    for index, tensor in enumerate(tensors):
        position = _constant(np.array(index, np.int64), f"{tensor.name}/position")
        element = ir.Node(ONNX, "SequenceAt", [sequence_value, position.outputs[0]], name=f"{tensor.name}/SequenceAt")
        set_type(element.outputs[0], type_of(tensor))
        tensor.replace_all_uses_with(element.outputs[0])
        graph.inputs.remove(tensor)
        element.outputs[0].name = tensor.name
        graph.insert_before(first, [position, element])
    graph.inputs.append(sequence_value)


def _constant(array: Array, name: str) -> ir.Node:
    node = ir.Node(ONNX, "Constant", [], [ir.AttrTensor("value", ir.tensor(array))], name=name)
    node.outputs[0].name = name
    set_type(node.outputs[0], TensorType(ir.DataType.from_numpy(array.dtype), array.shape))
    return node
