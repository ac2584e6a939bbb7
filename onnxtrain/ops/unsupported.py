"""Operators that this package knows of and leaves out, with the reason: what the page of operators tells its readers.

A test holds that every operator of ONNX is defined or stands here, and every one of ONNX Runtime Training's too. Which
of PyTorch's stay as they are shows by running its own database of operators (tests/ops/op_db_sweep.py).
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
    **dict.fromkeys(("If", "Loop", "SequenceMap"), _CONTROL),
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
_COLLECTIVE = "PyTorch's own collectives stand in the graph, as ATen nodes or inside custom autograd functions"
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

_SHAPE_TOO = "its last input is the shape of x, which does not follow from the others"
_TOTAL_WEIGHT = "the weight that a mean is divided by is a value too, last: backward does not add it up again"

# Those of com.microsoft that take or give more than ONNX Runtime Training's
TRAINING_SIGNATURES: Mapping[str, str] = {
    **dict.fromkeys(("AveragePoolGrad", "MaxPoolGrad"), _SHAPE_TOO),
    **dict.fromkeys(
        (
            "NegativeLogLikelihoodLossInternal2",
            "SoftmaxCrossEntropyLossInternal",
            "SoftmaxCrossEntropyLossInternalGrad",
        ),
        _TOTAL_WEIGHT,
    ),
    "ResizeGrad": "it takes the shape of x in place of x, which is not kept for it",
    "MatMulBnb4": "three inputs more, for scales that are quantized themselves",
}

_LINEAR_ALGEBRA = "a decomposition or a solver: ONNX has none"
_RANK = "of a decomposition, or chosen by sizes: taken apart it would hold for some sizes only"
_CHECK = "raises where elements are not as they should be (a singular matrix): a check without a result"
_SPECIAL = "a special function that ONNX lacks, and that no short formula computes precisely"
_ORDER = "an order or a running extreme, which ONNX lacks"
_BITS = "takes apart the bits of a float, or counts in its last one"
_DRAWS = "random numbers of a distribution that ONNX lacks, or draws in another way"
_COMPLEX = "complex numbers live between ATen nodes"
_WINDOWS = "windows, pairs or bags that ONNX has no operator for"
_STRIDES = "reads or writes memory by strides, of which a graph has none"
_PADDED = "reads outside of a tensor by a mask: Inductor's own form of padding"
_CHUNKED = "a layer and its loss chunk by chunk, in PyTorch's own loop"
_BACKWARD = "a step of PyTorch's own backward: it stands where the operator's gradient was traced"

CHECKS = ("_assert_async", "_linalg_check_errors")

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
            "linalg_pinv",
            "linalg_qr",
            "linalg_solve_triangular",
            "linalg_tensorinv",
            "linalg_tensorsolve",
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
    "linalg_matrix_norm": _RANK,
    **dict.fromkeys(CHECKS, _CHECK),
    **dict.fromkeys(
        (
            "digamma",
            "erfinv",
            "i0",
            "igamma",
            "igammac",
            "lgamma",
            "mvlgamma",
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
        ("cummax", "cummin", "logcumsumexp", "median", "mode", "nanmedian", "segment_reduce"),
        _ORDER,
    ),
    **dict.fromkeys(("frexp", "nextafter"), _BITS),
    **dict.fromkeys(
        (
            "exponential",
            "multinomial",
            "normal",
            "poisson",
            "randint",
            "rrelu",
            "rrelu_with_noise",
        ),
        _DRAWS,
    ),
    "ldexp": "its gradient for whole exponents is 0 in PyTorch where the exponent is negative",
    **dict.fromkeys(
        (
            "_conj_physical",
            "_fft_c2c",
            "_fft_c2r",
            "_fft_r2c",
            "complex",
            "conj_physical",
            "polar",
            "view_as_complex",
            "view_as_real",
        ),
        _COMPLEX,
    ),
    **dict.fromkeys(
        (
            "_cdist_forward",
            "_ctc_loss",
            "_embedding_bag",
            "_pdist_forward",
            "fractional_max_pool2d",
            "fractional_max_pool3d",
            "multi_margin_loss",
            "multilabel_margin_loss_forward",
        ),
        _WINDOWS,
    ),
    **dict.fromkeys(("as_strided", "as_strided_copy", "as_strided_scatter"), _STRIDES),
    **dict.fromkeys(("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"), _PADDED),
    "put": "writes at places in the flat tensor that may be equal, in no order: PyTorch's own choice of the last",
    **dict.fromkeys(
        (
            "torch_nn::_linear_cross_entropy_batch_chunked",
            "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
        ),
        _CHUNKED,
    ),
    **dict.fromkeys(
        (
            "_cdist_backward",
            "_embedding_bag_backward",
            "_embedding_bag_per_sample_weights_backward",
            "_pdist_backward",
            "_segment_reduce_backward",
            "_upsample_bilinear2d_aa_backward",
            "max_pool2d_with_indices_backward",
            "multilabel_margin_loss_backward",
            "slice_backward",
        ),
        _BACKWARD,
    ),
}

_OF_COMPLEX = "of complex numbers, which live between ATen nodes"

# Of PyTorch: what has a form in ONNX, but for these uses.
PYTORCH_USES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "_to_copy",
            "abs",
            "angle",
            "clone",
            "constant_pad_nd",
            "copy",
            "detach",
            "mul",
            "new_zeros",
            "roll",
            "sgn",
            "slice",
            "slice_scatter",
            "squeeze",
            "to",
            "transpose",
            "unsqueeze",
        ),
        _OF_COMPLEX,
    ),
    **dict.fromkeys(
        ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        "with aligned corners, or by a scale that float32 rounds: ONNX's Resize has its scales in float32",
    ),
    **dict.fromkeys(
        ("bernoulli", "rand_like", "randn_like"),
        "for a tensor that is not contiguous: PyTorch draws in the order of memory. `bernoulli_(p)` on a GPU too",
    ),
    "cosine_similarity": "of 0-dimensional tensors",
    "diff": "of an order above 2: each order would be two more slices",
    "linalg_norm": "of a matrix by its singular values, or one whose formula depends on sizes",
    "pad": "circular, with a padding that is negative or longer than the tensor",
    "repeat_interleave": "with a tensor of counts: how many elements there are only the data tell",
}

_SIZE_OF_DATA = "a size depends on elements, in a way that PyTorch's export refuses"
_SPARSE = "sparse tensors"

# Entries of PyTorch's operator database (torch.testing._internal.common_methods_invocations) that run in PyTorch, some
# of their samples at least.
PYTORCH_RUNS: Mapping[str, str] = {
    **dict.fromkeys(("combinations", "narrow", "tensor_split"), _SIZE_OF_DATA),
    "cov": "with weights, of which PyTorch asks whether any is negative",
    "nn.functional.gaussian_nll_loss": "its Python decides on elements",
    **dict.fromkeys(("sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"), _SPARSE),
    "chalf": "ONNX has no complex32",
    "_batch_norm_with_update": "writes a value that has a gradient into a buffer",
    "nn.functional.instance_norm": "with running statistics, whose update PyTorch's export loses",
}

_TALL_OR_WIDE = "one formula for tall matrices and one for wide ones"
_FIXES_SIZES = "PyTorch's formula decides on sizes, or fixes them"
_PLAIN_SIZES = "PyTorch's formula takes plain sizes only"

# Entries of that database whose gradient is taken at run time, in some of their samples.
PYTORCH_AT_RUN_TIME: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "linalg.cond",
            "linalg.lu",
            "linalg.lu_factor",
            "linalg.lu_factor_ex",
            "linalg.matrix_norm",
            "linalg.qr",
            "linalg.svd",
            "linalg.svdvals",
            "linalg.tensorinv",
            "linalg.tensorsolve",
            "lu",
            "lu_unpack",
            "norm.nuc",
            "ormqr",
            "pca_lowrank",
            "pinverse",
            "qr",
            "svd",
            "svd_lowrank",
        ),
        _TALL_OR_WIDE,
    ),
    **dict.fromkeys((f"fft.{name}{n}" for name in ("hfft", "irfft") for n in ("", "2", "n")), _FIXES_SIZES),
    **dict.fromkeys(
        (
            "_unsafe_masked_index_put_accumulate",
            "as_strided_copy",
            "diff",
            "fft.rfft",
            "linalg.householder_product",
            "nn.functional.linear_cross_entropy.chunked_none",
            "nn.functional.pad.circular",
            "put",
        ),
        _FIXES_SIZES,
    ),
    **dict.fromkeys(("linalg.lstsq", "linalg.lstsq.grad_oriented"), _FIXES_SIZES),
    **dict.fromkeys((f"nn.functional.fractional_max_pool{n}d" for n in (2, 3)), _PLAIN_SIZES),
    "nn.functional.ctc_loss": "its backward has no implementation for fake tensors",
    "linalg.eig": "its formula checks for singular matrices on the way",
    "nn.functional.rrelu": "draws random numbers inside",
}
