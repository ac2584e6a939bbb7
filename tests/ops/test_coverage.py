"""Every operator of ONNX and of ONNX Runtime Training has a definition, or a reason in tools/unsupported.py."""

import onnx
import pytest
import torch

from onnxtrain.ops import FROM_TORCH, NOT_DIFFERENTIABLE, OPS
from tools.unsupported import (
    ONNX_OPERATORS,
    PYTORCH_OPERATORS,
    PYTORCH_USES,
    TRAINING_OPERATORS,
    TRAINING_SIGNATURES,
)


def words(text: str) -> list[str]:
    return text.split()


# The gradients of onnxruntime-training 1.19.2, by the names of the operators that they are of.
GRADIENTS = words("""
    Cast Sin Cos Log Tanh Sqrt Erf MatMul Split Relu Pow ReduceMean ReduceSum ReduceLogSumExp ReduceL2 Add Sub Mul Div
    Neg Concat ConcatTraining Reshape Transpose Gemm MaxPool Gather ShrunkenGather Conv Squeeze Unsqueeze Sigmoid
    QuickGelu Softmax LogSoftmax SoftmaxCrossEntropy SparseSoftmaxCrossEntropy SoftmaxCrossEntropyLoss
    SoftmaxCrossEntropyLossInternal GlobalAveragePool AveragePool Dropout GatherND GatherElements Gelu BiasGelu FastGelu
    LayerNormalization SimplifiedLayerNormalization BatchNormInternal MegatronF MegatronG Slice Where Send Recv Expand
    Exp Flatten TopK Clip Abs Min Max Tile Pad Identity PythonOp ScatterND ScatterElements Trilu FakeQuant LSTMTraining
    ExternalGradient PadAndUnflatten FlattenAndUnpad GRUTraining Reciprocal LeakyRelu ConvTranspose Resize ScaledSum
    MatMulBnb4
""")

# Its training operators, those of recurrent networks, 4-bit weights and collectives among them.
TRAINING = words("""
    ShrunkenGather PadAndUnflatten FlattenAndUnpad GatherGrad GatherElementsGrad GatherNDGrad SliceGrad ConcatTraining
    SplitTraining BroadcastGradientArgs ReduceSumTraining View Trilu SoftmaxCrossEntropyLossInternal
    SoftmaxCrossEntropyLossInternalGrad SoftmaxCrossEntropyLossGrad NegativeLogLikelihoodLossInternal
    NegativeLogLikelihoodLossInternal2 SoftmaxCrossEntropy SoftmaxCrossEntropyGrad SparseSoftmaxCrossEntropy
    SparseSoftmaxCrossEntropyGrad Gelu GeluGrad FastGelu FastGeluGrad QuickGelu QuickGeluGrad BiasGelu BiasGeluGrad_dX
    BiasFastGeluGrad_dX ReluGrad SigmoidGrad TanhGrad LeakyReluGrad SoftmaxGrad SoftmaxGrad_13 LogSoftmaxGrad
    LogSoftmaxGrad_13 DropoutGrad BitmaskDropout BitmaskDropoutGrad BiasDropout BitmaskBiasDropout BiasSoftmax
    BiasSoftmaxDropout SoftmaxDropoutGrad LayerNormalizationGrad SimplifiedLayerNormalization
    SimplifiedLayerNormalizationGrad InvertibleLayerNormalizationGrad BatchNormInternal BatchNormalizationGrad
    SkipLayerNormalization SkipSimplifiedLayerNormalization FusedMatMul TransposeMatMul FusedGemm FusedConv MatMulBnb4
    ConvGrad ConvTransposeGrad MaxPoolGrad AveragePoolGrad ResizeGrad FakeQuant FakeQuantGrad ScaledSum BatchScale
    DivGrad LSTMTraining LSTMGrad GRUTraining GRUGrad ReduceAllL2 IsFinite IsAllFinite All Scale YieldOp TritonOp Group
    PassThrough RecordEvent WaitEvent MegatronF MegatronG Send Recv NcclAllReduce NcclAllGather NcclReduceScatter
    AdasumAllReduce ExternalGradient AdamWOptimizer SGDOptimizerV2 InplaceClipGradNorm InPlaceAccumulatorV2
    InPlaceAccumulator ZeroGradient AdamOptimizer LambOptimizer SGDOptimizer MixedPrecisionScale GistBinarizeEncoder
    GistBinarizeDecoder GistPack1Encoder GistPack1Decoder GistPack8Encoder GistPack8Decoder GistPack16Encoder
    GistPack16Decoder GistPackMsfp15Encoder GistPackMsfp15Decoder SummaryScalar SummaryHistogram SummaryText
    SummaryMerge
""")


def test_every_onnx_operator_has_a_definition_or_a_reason() -> None:
    names = {s.name for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated}
    missing = {n for n in names if ("", n) not in OPS and n not in ONNX_OPERATORS}
    assert not missing, f"define these, or add the reason to tools/unsupported.py: {sorted(missing)}"


def test_every_training_operator_has_a_definition_or_a_reason() -> None:
    missing = {n for n in TRAINING if ("com.microsoft", n) not in OPS and n not in TRAINING_OPERATORS}
    assert not missing, f"define these, or add the reason to tools/unsupported.py: {sorted(missing)}"


@pytest.mark.parametrize("name", GRADIENTS)
def test_every_op_with_a_gradient_in_onnxruntime_training_has_one(name: str) -> None:
    if name in TRAINING_OPERATORS:
        return
    definitions = [definition for (_, op_name), definition in OPS.items() if op_name == name]
    assert definitions, f"{name} has no definition"
    assert all(definition.gradient is not NOT_DIFFERENTIABLE for definition in definitions)


def test_no_operator_is_both_defined_and_unsupported() -> None:
    both = [n for n in ONNX_OPERATORS if ("", n) in OPS]
    both += [n for n in PYTORCH_OPERATORS if any(overload.startswith(f"aten.{n}.") for overload in FROM_TORCH)]
    both += [n for n in PYTORCH_USES if not any(overload.startswith(f"aten.{n}.") for overload in FROM_TORCH)]
    both += [n for n in TRAINING_OPERATORS if ("com.microsoft", n) in OPS]
    both += [n for n in TRAINING_SIGNATURES if ("com.microsoft", n) not in OPS]
    assert not both, both


def test_listed_pytorch_operators_exist() -> None:
    names = [n for n in (*PYTORCH_OPERATORS, *PYTORCH_USES) if "::" not in n]  # others depend on imported packages
    missing = [n for n in names if not hasattr(torch.ops.aten, n)]
    assert not missing, missing


def test_definitions_have_all_attributes_inputs_and_outputs_of_onnx() -> None:
    """An ONNX model may use all of them, except those that `device/from_onnx` resolves."""
    resolved_on_import = {
        "AveragePool": {"auto_pad", "dilations"},
        "BatchNormalization": {"running_mean", "running_var"},
        "Conv": {"auto_pad", "kernel_shape"},
        "ConvTranspose": {"auto_pad", "kernel_shape", "output_shape"},
        "MaxPool": {"auto_pad", "storage_order"},
    }
    lacking = {}
    for (domain, name), definition in OPS.items():
        if domain or name == "Swish":
            continue
        schema = onnx.defs.get_schema(name, 23, "")
        missing = set(schema.attributes) - set(definition.attributes)
        extra = set(definition.attributes) - set(schema.attributes)
        assert not extra, f"{name} has attributes that ONNX lacks: {extra}"
        variadic = definition.inputs[-1:] and definition.inputs[-1].endswith("...")
        assert variadic or len(definition.inputs) == len(schema.inputs), name
        if len(definition.outputs) < len(schema.outputs):
            missing |= {o.name for o in schema.outputs[len(definition.outputs) :]}
        if missing:
            lacking[name] = missing
    assert lacking == resolved_on_import
