"""The form in which stock onnxruntime runs a training graph.

Training ops stay nodes under their known names, with their bodies beside them as model-local functions: the graph reads
in Netron as people know it. Where onnxruntime has an op of the same name, its own kernel would win over our function
without a word; such ops are written out unless they compute the same. A portable graph has no functions at all, and
nothing but ops that ran in every runtime that was tried (docs/how-to/on-device-training.md).
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from onnxtrain.device.pool_gradient import pool_without_indices
from onnxtrain.device.portable import drop_unused_outputs, make_portable
from onnxtrain.errors import ArtifactError, GraphError, OptionError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.opset import convert_opset
from onnxtrain.graph.values import MICROSOFT, ONNX, OWN, TensorType, dtype_of, set_type
from onnxtrain.onnx_file import file_model
from onnxtrain.ops import definition_of, foreign
from onnxtrain.ops.bodies import body_of, inline_bodies
from onnxtrain.ops.functions import as_functions

OPSET = 21  # of written artifacts: onnxruntime reads it since 1.18

# The ops of com.microsoft that stock onnxruntime has (1.31; a test compares it with the one that is installed).
KNOWN_TO_ONNXRUNTIME = frozenset(
    {
        *("Attention", "AttnLSTM", "BeamSearch", "BiasAdd", "BiasDropout", "BiasGelu", "BiasSoftmax"),
        *("BiasSplitGelu", "BifurcationDetector", "BitmaskBiasDropout", "BitmaskDropout", "BranchwiseRMSNorm"),
        *("CDist", "CausalConvWithState", "ComplexMul", "ComplexMulConj", "ConvTransposeWithDynamicPads"),
        *("CropAndResize", "DecoderAttention", "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention"),
        *("DequantizeBFP", "DequantizeLinear", "DequantizeWithOrder", "DynamicQuantizeLSTM"),
        *("DynamicQuantizeMatMul", "DynamicSparseAttention", "DynamicTimeWarping", "EPContext"),
        *("EmbedLayerNormalization", "EngramGate", "ExpandDims", "FastGelu", "FusedConv", "FusedGemm"),
        *("FusedMatMul", "FusedMatMulActivation", "GatedAdd", "GatedDeltaNet", "GatedRMSNorm"),
        *("GatedRelativePositionBias", "GatherBlockQuantized", "GatherND", "Gelu", "GemmFastGelu"),
        *("GemmFloat8", "GemmaRotaryEmbedding", "GreedySearch", "GridSample", "GroupNorm"),
        *("GroupQueryAttention", "HyperConnectionPostMix", "HyperConnectionPreMix", "Inverse", "Irfft"),
        *("IsAllFinite", "LinearAttention", "LinearAttentionGate", "LongformerAttention", "MRotaryEmbedding"),
        *("MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight", "MatMulBnb4", "MatMulFpQ4"),
        *("MatMulInteger16", "MatMulIntegerToFloat", "MatMulNBits", "MatMulNBitsMlp", "MatMulNBitsQkv"),
        *("MaxpoolWithMask", "MoE", "MulInteger", "MultiHeadAttention", "MurmurHash3", "NGramHashMapping"),
        *("NGramRepeatBlock", "NhwcConv", "NhwcFusedConv", "NhwcMaxPool", "PackedAttention"),
        *("PackedMultiHeadAttention", "PackedSparseAttentionIndexer", "Pad", "PagedAttention", "QAttention"),
        *("QEmbedLayerNormalization", "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat"),
        *("QLinearConv", "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul", "QLinearReduceMean"),
        *("QLinearSigmoid", "QLinearSoftmax", "QLinearWhere", "QMoE", "QOrderedAttention", "QOrderedGelu"),
        *("QOrderedLayerNormalization", "QOrderedLongformerAttention", "QOrderedMatMul", "QuantizeBFP"),
        *("QuantizeLinear", "QuantizeWithOrder", "QuickGelu", "Range", "ReduceSumInteger"),
        *("RelativePositionBias", "RemovePadding", "RestorePadding", "Rfft", "RotaryEmbedding", "SampleOp"),
        *("Sampling", "ScaledSiLU", "SkipGroupNorm", "SkipLayerNormalization"),
        *("SkipSimplifiedLayerNormalization", "Snpe", "SparseAttention", "SparseAttentionIndexer"),
        *("SparsePagedAttention", "SparseToDenseMatMul", "Tokenizer", "TorchEmbedding", "TransposeMatMul"),
        *("Trilu", "UnfoldTensor", "Unique", "VarlenCausalConvWithState", "VarlenNGramHashMapping"),
        *("WhisperBeamSearch", "WordConvEmbedding"),
    }
)


def for_stock(model: ir.Model, *, portable: bool) -> ir.Model:
    """A copy of the model that stock onnxruntime runs.

    Raises:
        ArtifactError: an op has no form in standard ops, or, where the graph shall be portable, none that is.
    """
    try:
        result = file_model(make_portable(model)) if portable else _with_functions(model)
        foreign.unwrap(result.graph)
        for graph in (result.graph, *(function.graph for function in result.functions.values())):
            _sum_axis_by_axis(graph)
            convert_opset(graph, OPSET)
        traversal.remove_unused(result.graph, keeps=lambda node: True)  # the axes of sums that were written out
    except (GraphError, OptionError) as error:
        raise ArtifactError(error.problem, error.where, error.expected, error.got, error.todo) from error
    return result


def _with_functions(model: ir.Model) -> ir.Model:
    """Each op as one function, for its commonest case (ranks, types, optional inputs); other cases are written out.

    So every function has the name of its op, by which runtimes and people know it.
    """
    model = traversal.with_graph(model, traversal.clone(model.graph)[0])
    pool_without_indices(model.graph, overlapping=False)
    model = inline_bodies(model, keep=_stays)
    drop_unused_outputs(model.graph)
    written_out: set[str | None] = set()

    def stays(node: ir.Node) -> bool:
        return _stays(node) and node.name not in written_out

    while others := _rarer_cases(as_functions(model).graph):
        written_out |= others
        model = inline_bodies(model, keep=stays)
    return file_model(model)


def _rarer_cases(graph: ir.Graph) -> set[str | None]:
    """The calls of functions that are not the commonest of their name."""
    cases: dict[tuple[str, str], Counter[str]] = {}
    for node in graph:
        cases.setdefault((node.domain, node.op_type), Counter())[node.overload] += 1
    commonest = {op: counts.most_common(1)[0][0] for op, counts in cases.items()}
    return {node.name for node in graph if node.overload != commonest[node.domain, node.op_type]}


def _stays(node: ir.Node) -> bool:
    """Whether the node stays a node: a training op that becomes a function, or one that has no body."""
    if (node.domain, node.op_type) == (OWN, foreign.NAME):
        return True
    definition = definition_of(node)
    if node.domain == ONNX or body_of(node) is None:
        return False
    if node.domain == MICROSOFT and node.op_type in KNOWN_TO_ONNXRUNTIME:
        return definition.native_ok(definition.view(node))
    return True


def _sum_axis_by_axis(graph: ir.Graph) -> None:
    """Writes a sum or mean over all elements as one over each axis in turn.

    onnxruntime adds all elements one after the other where it reduces all axes at once: 1.8e-4 of the sum is lost for
    200 x 1000 positive float32 numbers, against 6e-7 axis by axis (onnxruntime 1.31).
    """
    for node in list(graph):
        x = node.inputs[0] if node.inputs else None
        if node.domain != ONNX or node.op_type not in ("ReduceSum", "ReduceMean") or x is None or x.shape is None:
            continue
        rank = len(x.shape)
        if rank < 2 or len(_reduced(node, rank)) < rank:
            continue
        name, total = f"{node.name}/last_axis", x
        last = ir.Node(ONNX, "Constant", (), [ir.AttrTensor("value", ir.tensor([-1], name=name))], name=name)
        last.outputs[0].name = name
        set_type(last.outputs[0], TensorType(ir.DataType.INT64, (1,)))
        added = [last]
        for axis in reversed(range(rank)):
            how = [ir.AttrInt64("keepdims", 0)]
            added.append(ir.Node(ONNX, node.op_type, [total, last.outputs[0]], how, name=f"{node.name}/axis_{axis}"))
            total = added[-1].outputs[0]
            total.name = f"{node.name}/axis_{axis}"
            set_type(total, TensorType(dtype_of(x), sizes.dims_of(x)[:axis]))
        if node.attributes.get_int("keepdims", 1):
            shape = ir.Node(ONNX, "Constant", (), [ir.AttrInt64s("value_ints", [1] * rank)], name=f"{node.name}/shape")
            shape.outputs[0].name = str(shape.name)
            set_type(shape.outputs[0], TensorType(ir.DataType.INT64, (rank,)))
            added += [shape, ir.Node(ONNX, "Reshape", [total, shape.outputs[0]], name=f"{node.name}/keepdims")]
            total = added[-1].outputs[0]
        old = node.outputs[0]
        name, total.type, total.shape = str(old.name), old.type, old.shape
        graph.insert_before(node, added)
        old.replace_all_uses_with(total, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        total.name = name


def _reduced(node: ir.Node, rank: int) -> set[int]:
    """The axes that a reduction reduces; none where they are computed."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if axes is None:
        return set() if node.attributes.get_int("noop_with_empty_axes", 0) else set(range(rank))
    producer = axes.producer()
    tensor = axes.const_value
    if producer is not None and producer.op_type == "Constant" and "value" in producer.attributes:
        tensor = producer.attributes["value"].as_tensor()
    return set() if tensor is None else {int(axis) % rank for axis in tensor.numpy().reshape(-1)}
