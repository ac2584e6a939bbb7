"""Operators that this package knows of and leaves out, with the reason: what `docs/operators.md` tells its readers.

A test holds that every operator of ONNX is defined or stands here, and every one of ONNX Runtime Training's too. Which
of PyTorch's stay as they are shows by running its own database of operators (tests/op_db_sweep.py).
"""

from __future__ import annotations

from collections.abc import Mapping

_CONTROL = "a loop or branch: no gradient passes it; a branch of a known condition is taken when a model is imported"
_SEQUENCES = "sequences and optionals are no tensors; PyTorch keeps such structure in Python"
_STRINGS = "strings are no tensors: text is prepared before the model"
_INTEGERS = "integer inference, of which there is no gradient: a model is trained before it is quantized"
_SIGNALS = "complex numbers, which live between ATen nodes (PyTorch's own FFT and its gradient)"
_DETECTION = "an operator of torchvision, not of PyTorch"
_LATER = "of a later opset than the one used inside"

# Of ai.onnx
ONNX_OPERATORS: Mapping[str, str] = {
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _CONTROL),
    **dict.fromkeys(
        (
            "ConcatFromSequence",
            "Optional",
            "OptionalGetElement",
            "OptionalHasElement",
            "SequenceAt",
            "SequenceConstruct",
            "SequenceEmpty",
            "SequenceErase",
            "SequenceInsert",
            "SequenceLength",
            "SplitToSequence",
        ),
        _SEQUENCES,
    ),
    **dict.fromkeys(("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"), _STRINGS),
    **dict.fromkeys(
        ("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"), _INTEGERS
    ),
    **dict.fromkeys(("BlackmanWindow", "DFT", "HammingWindow", "HannWindow", "MelWeightMatrix", "STFT"), _SIGNALS),
    **dict.fromkeys(("DeformConv", "MaxRoiPool", "NonMaxSuppression", "RoiAlign"), _DETECTION),
    **dict.fromkeys(
        ("BitCast", "CausalConvWithState", "CumProd", "LinearAttention", "SwiGLU", "TensorScatter"), _LATER
    ),
    "Constant": "a constant is an initializer of the graph",
    "Det": "its gradient needs the inverse, which ONNX lacks: torch.det stays an ATen node",
    "EyeLike": "a constant where its size is known; torch.eye is written with Range and Equal",
    "ImageDecoder": "images are decoded before the model",
    "Unique": "how many there are only the data tell, and PyTorch gives it no gradient",
}

_PLANNED = "buffers, events and the cut between forward and backward are the executor's plan, not nodes of the graph"
_COLLECTIVE = "collectives come with distributed training"
_CODEC = "an obsolete codec for activations: half precision and recomputation save more and lose less"
_SUMMARY = "TensorBoard's summaries are written from Python"
_OPTIMIZER = "the optimizers are optim.FusedAdam and, on devices, graphs of standard operators"
_ACCUMULATOR = "gradients are accumulated by PyTorch and, on devices, by graphs of standard operators"
_REPLACED = "replaced by"

# Of com.microsoft, as ONNX Runtime Training had them
TRAINING_OPERATORS: Mapping[str, str] = {
    **dict.fromkeys(("YieldOp", "Group", "PassThrough", "RecordEvent", "WaitEvent", "View"), _PLANNED),
    **dict.fromkeys(
        (
            "AdasumAllReduce",
            "MegatronF",
            "MegatronG",
            "NcclAllGather",
            "NcclAllReduce",
            "NcclReduceScatter",
            "Recv",
            "Send",
        ),
        _COLLECTIVE,
    ),
    **dict.fromkeys(
        (
            "GistBinarizeDecoder",
            "GistBinarizeEncoder",
            "GistPack1Decoder",
            "GistPack1Encoder",
            "GistPack8Decoder",
            "GistPack8Encoder",
            "GistPack16Decoder",
            "GistPack16Encoder",
            "GistPackMsfp15Decoder",
            "GistPackMsfp15Encoder",
        ),
        _CODEC,
    ),
    **dict.fromkeys(("SummaryHistogram", "SummaryMerge", "SummaryScalar", "SummaryText"), _SUMMARY),
    **dict.fromkeys(
        (
            "AdamOptimizer",
            "AdamWOptimizer",
            "InplaceClipGradNorm",
            "LambOptimizer",
            "MixedPrecisionScale",
            "SGDOptimizer",
            "SGDOptimizerV2",
        ),
        _OPTIMIZER,
    ),
    **dict.fromkeys(("InPlaceAccumulator", "InPlaceAccumulatorV2", "ZeroGradient"), _ACCUMULATOR),
    "BroadcastGradientArgs": f"{_REPLACED} SumTo: which axes to sum follows from the sizes",
    "ExternalGradient": f"{_REPLACED} ATen, whose gradient is PyTorch's own",
    "TritonOp": "fused regions are compiled by Inductor, behind the graph",
}

_LINEAR_ALGEBRA = "a decomposition or a solver: ONNX has none"
_SPECIAL = "a special function that ONNX lacks, and that no short formula computes precisely"
_ORDER = "an order or a running extreme, which ONNX lacks or has only in a later opset"
_DRAWS = "random numbers: PyTorch draws them in the order of memory, which only its own tensors tell"
_COMPLEX = "complex numbers live between ATen nodes"
_WINDOWS = "windows or weights that ONNX has no operator for"

# Of PyTorch: what stays an ATen node, with PyTorch's own kernel and gradient. Names without `aten.` and overload.
PYTORCH_OPERATORS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "cholesky",
            "cholesky_inverse",
            "cholesky_solve",
            "geqrf",
            "linalg_cholesky_ex",
            "linalg_eig",
            "linalg_householder_product",
            "linalg_inv_ex",
            "linalg_ldl_factor_ex",
            "linalg_lstsq",
            "linalg_lu",
            "linalg_lu_factor_ex",
            "linalg_lu_solve",
            "linalg_matrix_exp",
            "linalg_qr",
            "linalg_solve_triangular",
            "lu_unpack",
            "ormqr",
            "triangular_solve",
            "_linalg_det",
            "_linalg_eigh",
            "_linalg_slogdet",
            "_linalg_solve_ex",
            "_linalg_svd",
        ),
        _LINEAR_ALGEBRA,
    ),
    **dict.fromkeys(
        (
            "digamma",
            "erfinv",
            "i0",
            "igamma",
            "igammac",
            "lgamma",
            "mvlgamma",
            "nextafter",
            "polygamma",
            "special_erfcx",
            "special_i0e",
            "special_i1",
            "special_i1e",
            "special_log_ndtr",
            "special_ndtri",
            "special_zeta",
        ),
        _SPECIAL,
    ),
    **dict.fromkeys(
        ("cummax", "cummin", "cumprod", "kthvalue", "logcumsumexp", "median", "mode", "nanmedian", "segment_reduce"),
        _ORDER,
    ),
    **dict.fromkeys(
        (
            "bernoulli",
            "exponential",
            "multinomial",
            "normal",
            "poisson",
            "rand_like",
            "randint",
            "randn_like",
            "rrelu_with_noise",
        ),
        _DRAWS,
    ),
    "ldexp": "its gradient for whole exponents is 0 in PyTorch where the exponent is negative",
    **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c", "view_as_complex", "view_as_real"), _COMPLEX),
    **dict.fromkeys(
        (
            "_cdist_forward",
            "_ctc_loss",
            "_embedding_bag",
            "_pdist_forward",
            "_upsample_bicubic2d_aa",
            "_upsample_bilinear2d_aa",
            "fractional_max_pool2d",
            "fractional_max_pool3d",
            "multi_margin_loss",
            "multilabel_margin_loss_forward",
            "renorm",
        ),
        _WINDOWS,
    ),
}
