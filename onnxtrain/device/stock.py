"""Lower a training graph to what stock onnxruntime runs.

Training ops remain nodes with their usual names, which Netron shows, and their bodies become model-local functions. If
onnxruntime has an op of the same name, its kernel silently takes precedence over the function: such ops are inlined
unless both compute the same. A portable graph has no functions, and only ops that were tested in every runtime
(docs/how-to/on-device-training.md).
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
from onnxtrain.ops import unknown_node
from onnxtrain.ops.bodies import body_of, inline_bodies
from onnxtrain.ops.interfaces.stock_kernels import has_stock_kernel
from onnxtrain.ops.local_functions import as_functions

OPSET = 21  # of artifacts: supported since onnxruntime 1.18

# The ops of com.microsoft in stock onnxruntime 1.31; a test compares them with the installed version.
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
    """Copy the model into a form that stock onnxruntime runs.

    Raises:
        ArtifactError: an op cannot be expressed in standard ops or, with `portable`, in portable ones.
    """
    try:
        result = file_model(make_portable(model)) if portable else _with_functions(model)
        unknown_node.unwrap(result.graph)
        for graph in (result.graph, *(function.graph for function in result.functions.values())):
            _split_full_reductions(graph)
            convert_opset(graph, OPSET)
        traversal.remove_unused(result.graph, keeps=lambda node: True)  # the axes of reductions that were split
    except (GraphError, OptionError) as error:
        raise ArtifactError(error.problem, error.where, error.expected, error.got, error.todo) from error
    return result


def _with_functions(model: ir.Model) -> ir.Model:
    """Make each op one function, for its most frequent variant (ranks, dtypes, optional inputs); inline the others.

    Every function then has the name of its op.
    """
    model = traversal.with_graph(model, traversal.clone(model.graph)[0])
    pool_without_indices(model.graph, overlapping=False)
    model = inline_bodies(model, keep=_remains_node)
    drop_unused_outputs(model.graph)
    inlined: set[str | None] = set()

    def keep(node: ir.Node) -> bool:
        return _remains_node(node) and node.name not in inlined

    while others := _rare_variants(as_functions(model).graph):
        inlined |= others
        model = inline_bodies(model, keep=keep)
    return file_model(model)


def _rare_variants(graph: ir.Graph) -> set[str | None]:
    """Return the calls of functions that are not the most frequent variant of their op."""
    variants: dict[tuple[str, str], Counter[str]] = {}
    for node in graph:
        variants.setdefault((node.domain, node.op_type), Counter())[node.overload] += 1
    most_frequent = {op: counts.most_common(1)[0][0] for op, counts in variants.items()}
    return {node.name for node in graph if node.overload != most_frequent[node.domain, node.op_type]}


def _remains_node(node: ir.Node) -> bool:
    """Return whether the node is not inlined: a training op that becomes a function, or an op without body."""
    if (node.domain, node.op_type) == (OWN, unknown_node.NAME):
        return True
    if node.domain == ONNX or body_of(node) is None:
        return False
    if node.domain == MICROSOFT and node.op_type in KNOWN_TO_ONNXRUNTIME:
        return has_stock_kernel(node)
    return True


def _split_full_reductions(graph: ir.Graph) -> None:
    """Split a sum or mean over all axes into one reduction per axis.

    onnxruntime 1.31 accumulates sequentially when it reduces all axes at once: its relative error is 1.8e-4 for
    200 x 1000 positive float32 elements, against 6e-7 axis by axis.
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
            keepdims = [ir.AttrInt64("keepdims", 0)]
            added.append(
                ir.Node(ONNX, node.op_type, [total, last.outputs[0]], keepdims, name=f"{node.name}/axis_{axis}")
            )
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
    """Return the axes of a reduction; none if they are computed."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if axes is None:
        return set() if node.attributes.get_int("noop_with_empty_axes", 0) else set(range(rank))
    producer = axes.producer()
    tensor = axes.const_value
    if producer is not None and producer.op_type == "Constant" and "value" in producer.attributes:
        tensor = producer.attributes["value"].as_tensor()
    return set() if tensor is None else {int(axis) % rank for axis in tensor.numpy().reshape(-1)}
