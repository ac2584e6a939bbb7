"""Operators without a definition, each with its reason. The operators page of the docs is generated from this file.

A test checks that every operator of ONNX and of ONNX Runtime Training is either defined or listed here. The lists of
PyTorch operators that stay ATen nodes come from running PyTorch's operator database (tests/ops/op_db_sweep.py).
"""

from __future__ import annotations

from collections.abc import Mapping


def _each(names: str, reason: str) -> dict[str, str]:
    """Give one reason to each of these names, which are separated by white space."""
    return dict.fromkeys(names.split(), reason)


_CONTROL = "a loop or branch, which is not differentiated; a branch with a constant condition is inlined on import"
_SEQUENCES = "sequences and optionals are not tensors; PyTorch keeps such structure in Python"
_STRINGS = "strings are not tensors: preprocess text before the model"
_INTEGERS = "integer inference, which has no gradient: train the model before quantizing it"
_SIGNALS = "complex values, which pass between ATen nodes (PyTorch's FFT and its gradient)"
_DETECTION = "an operator of torchvision, not of PyTorch"
_LATER = "added in a later opset than onnxtrain uses internally"

# ai.onnx
ONNX_OPERATORS: Mapping[str, str] = {
    **_each("If Loop SequenceMap", _CONTROL),
    **_each(
        """
        ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt SequenceConstruct SequenceEmpty
        SequenceErase SequenceInsert SequenceLength SplitToSequence
    """,
        _SEQUENCES,
    ),
    **_each("RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer", _STRINGS),
    **_each("ConvInteger DynamicQuantizeLinear MatMulInteger QLinearConv QLinearMatMul", _INTEGERS),
    **_each("BlackmanWindow DFT HammingWindow HannWindow MelWeightMatrix STFT", _SIGNALS),
    **_each("DeformConv MaxRoiPool NonMaxSuppression RoiAlign", _DETECTION),
    **_each("BitCast CausalConvWithState CumProd LinearAttention SwiGLU TensorScatter", _LATER),
    "Constant": "a constant is an initializer of the graph",
    "Det": "its gradient needs the matrix inverse, which ONNX lacks: torch.det stays an ATen node",
    "EyeLike": "a constant if its size is static; torch.eye is captured as Range and Equal",
    "ImageDecoder": "decode images before the model",
    "Unique": "its output size depends on data, and PyTorch defines no gradient",
}

_PLANNED = "the executor plans buffers, events and the cut between forward and backward outside the graph"
_COLLECTIVE = "the graph has PyTorch's collectives, as ATen nodes or inside custom autograd functions"
_CODEC = "an obsolete codec for activations: half precision and recomputation save more memory at less loss"
_SUMMARY = "TensorBoard summaries are written from Python"
_OPTIMIZER = "optimizers are optim.FusedAdam and, on devices, graphs of standard operators"
_ACCUMULATOR = "gradients are accumulated by PyTorch and, on devices, by graphs of standard operators"
_REPLACED = "replaced by"

# com.microsoft, as in ONNX Runtime Training
TRAINING_OPERATORS: Mapping[str, str] = {
    **_each("YieldOp Group PassThrough RecordEvent WaitEvent View", _PLANNED),
    **_each("AdasumAllReduce MegatronF MegatronG NcclAllGather NcclAllReduce NcclReduceScatter Recv Send", _COLLECTIVE),
    **_each(
        """
        GistBinarizeDecoder GistBinarizeEncoder GistPack1Decoder GistPack1Encoder GistPack8Decoder GistPack8Encoder
        GistPack16Decoder GistPack16Encoder GistPackMsfp15Decoder GistPackMsfp15Encoder
    """,
        _CODEC,
    ),
    **_each("SummaryHistogram SummaryMerge SummaryScalar SummaryText", _SUMMARY),
    **_each(
        "AdamOptimizer AdamWOptimizer InplaceClipGradNorm LambOptimizer MixedPrecisionScale SGDOptimizer "
        "SGDOptimizerV2",
        _OPTIMIZER,
    ),
    **_each("InPlaceAccumulator InPlaceAccumulatorV2 ZeroGradient", _ACCUMULATOR),
    "BroadcastGradientArgs": f"{_REPLACED} SumTo: the axes to sum follow from the sizes",
    "ExternalGradient": f"{_REPLACED} ATen, whose gradient is PyTorch's",
    "TritonOp": "Inductor compiles fused regions, which the graph does not show",
}

_SHAPE_INPUT = "its last input is the shape of x, which does not follow from the others"
_TOTAL_WEIGHT = "one more value, the last: the total weight of a mean, which backward then need not recompute"

# com.microsoft ops with more inputs or outputs than in ONNX Runtime Training
TRAINING_SIGNATURES: Mapping[str, str] = {
    **_each("AveragePoolGrad MaxPoolGrad", _SHAPE_INPUT),
    **_each(
        "NegativeLogLikelihoodLossInternal2 SoftmaxCrossEntropyLossInternal SoftmaxCrossEntropyLossInternalGrad",
        _TOTAL_WEIGHT,
    ),
    "ResizeGrad": "it takes the shape of x instead of x, which is not saved for backward",
    "MatMulBnb4": "three more inputs, for quantized scales",
}

_LINEAR_ALGEBRA = "a matrix decomposition or solver, which ONNX lacks"
_MATRIX_NORM = "computed by a decomposition, or by a formula that depends on sizes: decomposed, it would fix these"
_CHECK = "a check that returns nothing: it raises for invalid elements (a singular matrix)"
_SPECIAL = "a special function that ONNX lacks and no short formula computes precisely"
_ORDER = "an order statistic or running extreme, which ONNX lacks"
_BITS = "reads or increments the bits of floating-point values"
_RANDOM = "samples from a distribution that ONNX lacks or samples otherwise"
_COMPLEX = "complex values pass between ATen nodes"
_WINDOWS = "windows, pairs or bags that ONNX has no operator for"
_STRIDES = "accesses memory by strides, which a graph does not have"
_PADDED = "masked out-of-bounds reads: Inductor's form of padding"
_CHUNKED = "a layer and its loss in chunks, in a loop of PyTorch"
_BACKWARD = "part of PyTorch's backward: it appears if the gradient of an operator was traced"

# PyTorch operators that stay ATen nodes, with PyTorch's kernel and gradient. Names without `aten.` and overload.
PYTORCH_OPERATORS: Mapping[str, str] = {
    **_each(
        """
        cholesky cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex linalg_eig linalg_householder_product
        linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp
        linalg_pinv linalg_qr linalg_solve_triangular linalg_tensorinv linalg_tensorsolve lu_unpack ormqr
        triangular_solve _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd
    """,
        _LINEAR_ALGEBRA,
    ),
    "linalg_matrix_norm": _MATRIX_NORM,
    **_each("_assert_async _linalg_check_errors", _CHECK),
    **_each(
        """
        digamma erfinv i0 igamma igammac lgamma mvlgamma polygamma special_erfcx special_i0e special_i1 special_i1e
        special_log_ndtr special_ndtri special_zeta
    """,
        _SPECIAL,
    ),
    **_each("cummax cummin logcumsumexp median mode nanmedian segment_reduce", _ORDER),
    **_each("frexp nextafter", _BITS),
    **_each("exponential multinomial normal poisson randint rrelu rrelu_with_noise", _RANDOM),
    "ldexp": "in PyTorch its gradient is 0 for negative integer exponents",
    **_each(
        "_conj_physical _fft_c2c _fft_c2r _fft_r2c complex conj_physical polar view_as_complex view_as_real", _COMPLEX
    ),
    **_each(
        """
        _cdist_forward _ctc_loss _embedding_bag _pdist_forward fractional_max_pool2d fractional_max_pool3d
        multi_margin_loss multilabel_margin_loss_forward
    """,
        _WINDOWS,
    ),
    **_each("as_strided as_strided_copy as_strided_scatter", _STRIDES),
    **_each("_unsafe_masked_index _unsafe_masked_index_put_accumulate", _PADDED),
    "put": "writes to indices of the flattened tensor that may repeat: PyTorch chooses which write is the last",
    **dict.fromkeys(
        (
            "torch_nn::_linear_cross_entropy_batch_chunked",
            "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
        ),
        _CHUNKED,
    ),
    **_each(
        """
        _cdist_backward _embedding_bag_backward _embedding_bag_per_sample_weights_backward _pdist_backward
        _segment_reduce_backward _upsample_bilinear2d_aa_backward max_pool2d_with_indices_backward
        multilabel_margin_loss_backward slice_backward
    """,
        _BACKWARD,
    ),
}

_OF_COMPLEX = "of complex values, which pass between ATen nodes"

# PyTorch operators that have an ONNX form, except in these uses.
PYTORCH_USES: Mapping[str, str] = {
    **_each(
        """
        _to_copy abs angle clone constant_pad_nd copy detach mul new_zeros roll sgn slice slice_scatter squeeze to
        transpose unsqueeze
    """,
        _OF_COMPLEX,
    ),
    **dict.fromkeys(
        ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        "with align_corners, or with a scale that float32 cannot represent: the scales of ONNX's Resize are float32",
    ),
    **dict.fromkeys(
        ("bernoulli", "rand_like", "randn_like"),
        "of a non-contiguous tensor, for which PyTorch samples in memory order; also `bernoulli_(p)` on a GPU",
    ),
    "cosine_similarity": "of scalars (0-dimensional tensors)",
    "diff": "of an order above 2: each order is two more slices",
    "linalg_norm": "of a matrix by its singular values, or by a formula that depends on sizes",
    "pad": "circular, with padding that is negative or longer than the tensor",
    "repeat_interleave": "with a tensor of repeats: the output size depends on data",
}

_DATA_DEPENDENT_SIZE = "a size depends on data in a way that torch.export rejects"
_SPARSE = "sparse tensors"

# Entries of PyTorch's operator database (torch.testing._internal.common_methods_invocations) of which at least some
# samples fall back to eager PyTorch.
PYTORCH_RUNS: Mapping[str, str] = {
    **_each("combinations narrow tensor_split", _DATA_DEPENDENT_SIZE),
    "cov": "with weights: PyTorch checks whether any is negative",
    "nn.functional.gaussian_nll_loss": "its Python code branches on elements",
    **_each("sparse.sampled_addmm sparse.mm.reduce to_sparse", _SPARSE),
    "chalf": "ONNX has no complex32",
    "_batch_norm_with_update": "writes a value that requires grad into a buffer",
    "nn.functional.instance_norm": "with running statistics, whose update torch.export loses",
}

_TALL_OR_WIDE = "different formulas for tall and for wide matrices"
_FIXES_SIZES = "PyTorch's formula branches on sizes, or fixes them"
_STATIC_SIZES = "PyTorch's formula supports static sizes only"

# Entries of that database of which some samples take their gradient at run time.
PYTORCH_AT_RUN_TIME: Mapping[str, str] = {
    **_each(
        """
        linalg.cond linalg.lu linalg.lu_factor linalg.lu_factor_ex linalg.matrix_norm linalg.qr linalg.svd
        linalg.svdvals linalg.tensorinv linalg.tensorsolve lu lu_unpack norm.nuc ormqr pca_lowrank pinverse qr svd
        svd_lowrank
    """,
        _TALL_OR_WIDE,
    ),
    **dict.fromkeys((f"fft.{name}{n}" for name in ("hfft", "irfft") for n in ("", "2", "n")), _FIXES_SIZES),
    **_each(
        """
        _unsafe_masked_index_put_accumulate as_strided_copy diff fft.rfft linalg.householder_product
        nn.functional.linear_cross_entropy.chunked_none nn.functional.pad.circular put
    """,
        _FIXES_SIZES,
    ),
    **_each("linalg.lstsq linalg.lstsq.grad_oriented", _FIXES_SIZES),
    **dict.fromkeys((f"nn.functional.fractional_max_pool{n}d" for n in (2, 3)), _STATIC_SIZES),
    "nn.functional.ctc_loss": "its backward has no implementation for fake tensors",
    "linalg.eig": "its formula contains a check for singular matrices",
    "nn.functional.rrelu": "samples inside its formula",
}
