"""A node of an imported ONNX model whose op has no definition here: it passes through unchanged.

    Foreign(inputs...) -> outputs...        node: the node as a serialized NodeProto; version: of its domain's opset

Custom ops, and standard ops without a definition, are allowed where no gradient is needed: before or after the trained
part. `device/from_onnx` creates these nodes, and `unwrap` restores the originals before a file is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import KernelError
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, type_of
from onnxtrain.ops.definition import NOT_DIFFERENTIABLE, REQUIRED, Call, Effects, Kernel, NoBody, NodeView, OpDef
from onnxtrain.ops.registry import define

NAME = "Foreign"


def wrap(
    op: Builder, node: ir.Node, inputs: Sequence[ir.Value | None], types: Sequence[TensorType], version: int
) -> ir.Node:
    """Append a Foreign node for `node`; `types` are those of its outputs, `version` the opset version of its domain."""
    proto = ir.to_proto(node)
    content = np.frombuffer(proto.SerializeToString(), np.uint8)
    return op.node(OWN, NAME, inputs, {"node": ir.Tensor(content), "version": version}, types=types)


def original(node: ir.Node) -> ir.Node:
    """Return the node that a Foreign node represents, with the same inputs and new outputs."""
    proto = onnx.NodeProto.FromString(node.attributes["node"].as_tensor().tobytes())
    stored = ir.from_proto(proto)
    return ir.Node(
        stored.domain,
        stored.op_type,
        node.inputs,
        list(stored.attributes.values()),
        num_outputs=len(node.outputs),
        name=node.name,
        doc_string=stored.doc_string,
        metadata_props=dict(node.metadata_props),
    )


def unwrap(graph: ir.Graph) -> None:
    """Replace each Foreign node by the original."""
    for node in list(graph):
        if (node.domain, node.op_type) != (OWN, NAME):
            continue
        replacement = original(node)
        for old, new in zip(node.outputs, replacement.outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.insert_before(node, replacement)
        graph.remove(node, safe=True)
        graph.opset_imports.setdefault(replacement.domain, node.attributes["version"].as_int())


def _no_kernel(n: NodeView, *inputs: object) -> Call:
    raise KernelError(
        f"{original(n.node).op_type} has no kernel in onnxtrain",
        where=n.node.name,
        todo="run the graph with onnxruntime, or remove the op from the model",
    )


def _outputs(n: NodeView) -> Sequence[TensorType]:
    return [type_of(value) for value in n.node.outputs]


define(
    OpDef(
        domain=OWN,
        name=NAME,
        inputs=("inputs...",),
        outputs=("outputs...",),
        attributes={"node": REQUIRED, "version": 1},
        from_torch={},
        shapes=_outputs,
        body=NoBody("a custom op, or a standard op without a definition in onnxtrain"),
        gradient=NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=_no_kernel),),
        axes=lambda n: NO_AXES,
        effects=Effects.HOST_SYNC,  # neither folded nor merged: its effects are unknown
        aliases={},
    )
)
