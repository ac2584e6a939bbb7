"""The portable profile: graphs in float32 and standard ops that also train on onnxruntime's WebGPU and wasm.

onnxtrain's ops are inlined, constants folded, and MaxPool's gradient computed without indices, which WebGPU does not
return. All remaining ops must be in PORTABLE_OPS.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.device.pool_gradient import pool_without_indices
from onnxtrain.errors import ArtifactError
from onnxtrain.graph import traversal
from onnxtrain.graph.values import ONNX, OWN, dtype_of, rank_of, type_of
from onnxtrain.ops import builder, definition_of, unknown_node
from onnxtrain.ops.bodies import inline_bodies
from onnxtrain.ops.reshape.movement import constant_ints
from onnxtrain.passes import JOINT, optimize

# One node of each op ran in wasm and in a WebGPU session of onnxruntime-web 1.30 (Chromium, SwiftShader), with equal
# values to 1e-5 (Sin and Cos: 2e-4). Ops without a WebGPU kernel ran on the CPU there. LSTM, GRU, RNN and Scan were
# compared in whole trainings, on both.
PORTABLE_OPS = frozenset(
    {
        *("Abs", "Acos", "Acosh", "Add", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh"),
        *("AveragePool", "BatchNormalization", "Cast", "Ceil", "Celu", "Clip", "Concat", "Constant"),
        *("ConstantOfShape", "Conv", "ConvTranspose", "Cos", "Cosh", "CumSum", "Div", "Einsum", "Elu", "Equal"),
        *("Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm"),
        *("GlobalAveragePool", "Greater", "GreaterOrEqual", "GRU", "GroupNormalization", "HardSigmoid", "HardSwish"),
        *("Identity", "If", "InstanceNormalization", "IsInf", "IsNaN", "LayerNormalization", "LeakyRelu"),
        *("LSTM", "Less", "LessOrEqual", "Log", "LogSoftmax", "MatMul", "Max", "MaxPool", "Min", "Mish", "Mod", "Mul"),
        *("Neg", "NonZero", "Not", "OneHot", "Or", "PRelu", "Pad", "Pow", "RNN", "Range", "Reciprocal", "ReduceL1"),
        *("ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"),
        *("Relu", "Reshape", "Resize", "Round", "Scan", "ScatterElements", "ScatterND", "Selu", "Shape", "Sigmoid"),
        *("Sign", "Sin", "Sinh", "Size", "Slice", "Softmax", "Softplus", "Softsign", "Split", "Sqrt"),
        *("Squeeze", "Sub", "Sum", "Tan", "Tanh", "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu"),
        *("Unsqueeze", "Where", "Xor"),
    }
)
PORTABLE_TYPES = frozenset(
    {ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.UINT8}
)


def make_portable(model: ir.Model) -> ir.Model:
    """Copy the model into portable ops.

    Raises:
        ArtifactError: an op or a dtype is not portable; the error gives the reason and the alternative.
    """
    model = traversal.with_graph(model, traversal.clone(model.graph)[0])
    _refuse_foreign(model.graph)
    drop_unused_outputs(model.graph)
    pool_without_indices(model.graph, overlapping=True)
    model = inline_bodies(model)
    _pad_all_axes(model.graph)
    optimize(model, JOINT)
    drop_unused_outputs(model.graph)
    for node in model.graph.all_nodes():
        _check(node)
    return model


def _refuse_foreign(graph: ir.Graph) -> None:
    for node in graph:
        if (node.domain, node.op_type) == (OWN, unknown_node.NAME):
            raise ArtifactError(
                f"{traversal.describe(unknown_node.original(node))} is not portable: it is unknown to onnxtrain.",
                where=traversal.origin(node),
                todo="compute it outside of the model, or write the artifacts without portable=True",
            )


def drop_unused_outputs(graph: ir.Graph) -> None:
    """Remove unused optional outputs at the end of nodes' outputs.

    MaxPool's indices cost time, and so do the values that LSTMTraining keeps for its gradient.
    """
    for node in graph:
        declared = definition_of(node).outputs
        if len(node.outputs) < 2 or declared[-1].endswith("..."):
            continue
        needed = 1 if node.domain == ONNX else sum(not name.endswith("?") for name in declared)
        used = [index + 1 for index, value in enumerate(node.outputs) if traversal.is_used(value)]
        node.resize_outputs(max(needed, *used))


def _check(node: ir.Node) -> None:
    reason = None
    if node.domain != ONNX or node.op_type not in PORTABLE_OPS:
        reason = "has no kernel in the runtimes of the portable profile"
    elif node.op_type == "MaxPool" and len(node.outputs) > 1:
        reason = "has indices as an output, which WebGPU does not compute"
    else:
        wrong = {dtype_of(v) for v in (*node.inputs, *node.outputs) if v is not None} - PORTABLE_TYPES
        if wrong:
            reason = f"computes in {', '.join(sorted(t.name.lower() for t in wrong))}"
    if reason is not None:
        where = traversal.origin(node) or node.metadata_props.get("gradient_of")
        way_out = "convert the model to float32" if "computes in" in reason else "replace the op in the model"
        todo = f"{way_out}, or write the artifacts without portable=True"
        raise ArtifactError(
            f"{traversal.describe(node)} is not portable: it {reason}.", where, "ops of the portable profile", todo=todo
        )


# Pad: onnxruntime-web 1.30 does not support its axes


def _pad_all_axes(graph: ir.Graph) -> None:
    """Rewrite each Pad with axes to one over all axes, with 0 for the others. The widths may be computed."""
    op = builder(graph)
    for node in [n for n in graph if (n.domain, n.op_type) == (ONNX, "Pad") and len(n.inputs) > 3]:
        n = definition_of(node).view(node)
        if n.axes is None:
            continue
        rank, axes = rank_of(n.x), constant_ints(n.axes, "the axes of Pad")
        indices = [2 * len(axes)] * (2 * rank)  # into the widths, with a 0 appended
        for position, axis in enumerate(axes):
            indices[axis % rank], indices[axis % rank + rank] = position, position + len(axes)
        with op.at(node.metadata_props):
            widths = op.Concat(n.pads, op.constant([0], ir.DataType.INT64), axis=0)
            widths = op.Gather(widths, op.constant(indices, ir.DataType.INT64), axis=0)
            inputs, attributes = (n.x, widths, n.value), {"mode": n.mode}
            padded = op.node(ONNX, "Pad", inputs, attributes, types=[type_of(node.outputs[0])]).outputs[0]
        traversal.replace(graph, node.outputs[0], padded)
        graph.remove(node, safe=True)
    traversal.sort(graph)
    traversal.name_uniquely(graph)
