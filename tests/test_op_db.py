"""PyTorch's own operator database: what each differentiable operator becomes, and that its numbers are eager's.

A fixed sample runs always, the whole database under --slow. `python -m tests.op_db_sweep` prints the counts.
"""

import pytest
from torch.testing._internal.opinfo.core import OpInfo

from tests.op_db_sweep import Form, check_operator, differentiable, full_name

OPERATORS = {full_name(op): op for op in differentiable()}

SAMPLE = {
    "nn.functional.linear": Form.NATIVE,
    "nn.functional.cross_entropy": Form.NATIVE,
    "softmax": Form.NATIVE,
    "scatter_add": Form.NATIVE,
    "trapezoid": Form.NATIVE,
    "to": Form.NATIVE,
    "cdist": Form.TRACED,
    "erfinv": Form.TRACED,
    "fft.fft": Form.TRACED,
    "linalg.solve": Form.TRACED,
    "kthvalue": Form.TRACED,
    "nn.functional.rrelu": Form.RUN_TIME,
    "linalg.svdvals": Form.RUN_TIME,
}

# Why these run in PyTorch.
FALLS_BACK = {
    **dict.fromkeys(
        ("combinations", "narrow", "tensor_split"), "a size depends on elements, in a way that PyTorch's export refuses"
    ),
    **dict.fromkeys(("corrcoef", "cov"), "PyTorch's fake implementation compares elements"),
    **dict.fromkeys(("linalg.lstsq", "linalg.lstsq.grad_oriented"), "PyTorch has no fake implementation"),
    "nn.functional.ctc_loss": "PyTorch has no fake implementation",
    "nn.functional.gaussian_nll_loss": "its Python decides on elements",
    **dict.fromkeys(("sparse.sampled_addmm", "sparse.mm.reduce"), "takes sparse tensors"),
    "to_sparse": "gives a sparse tensor",
    "chalf": "ONNX has no complex32",
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), "results that its definition does not give"),
    "_batch_norm_with_update": "writes a value that has a gradient into a buffer",
    "nn.functional.instance_norm": "PyTorch's export loses the update of running statistics",
}

_TALL_OR_WIDE = "one formula for tall matrices and one for wide ones"
_FIXES_SIZES = "PyTorch's formula decides on sizes, or fixes them"
_PLAIN_SIZES = "PyTorch's formula takes plain sizes only"

# Why these take their gradient at run time, in some of their samples.
AT_RUN_TIME = {
    **dict.fromkeys(("lu", "lu_unpack", "norm.nuc", "ormqr", "pca_lowrank", "pinverse", "qr"), _TALL_OR_WIDE),
    **dict.fromkeys(("svd", "svd_lowrank", "linalg.cond", "linalg.lu", "linalg.lu_factor"), _TALL_OR_WIDE),
    **dict.fromkeys(("linalg.lu_factor_ex", "linalg.matrix_norm", "linalg.qr"), _TALL_OR_WIDE),
    **dict.fromkeys(("linalg.svd", "linalg.svdvals", "linalg.tensorinv", "linalg.tensorsolve"), _TALL_OR_WIDE),
    **dict.fromkeys((f"index_reduce.{how}" for how in ("mean", "prod", "amin", "amax")), _FIXES_SIZES),
    **dict.fromkeys((f"fft.{name}{n}" for name in ("hfft", "irfft") for n in ("", "2", "n")), _FIXES_SIZES),
    **dict.fromkeys(("fft.rfft", "cumprod", "masked.cumprod", "diff", "diagonal_scatter", "put"), _FIXES_SIZES),
    **dict.fromkeys(("as_strided_copy", "linalg.householder_product", "nn.functional.pad.circular"), _FIXES_SIZES),
    "_unsafe_masked_index_put_accumulate": _FIXES_SIZES,
    "nn.functional.linear_cross_entropy.chunked_none": _FIXES_SIZES,
    **dict.fromkeys(
        (
            f"nn.functional.interpolate.{mode}"
            for mode in ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear")
        ),
        _PLAIN_SIZES,
    ),
    **dict.fromkeys((f"nn.functional.upsample_{mode}" for mode in ("bilinear", "nearest")), _PLAIN_SIZES),
    **dict.fromkeys((f"nn.functional.fractional_max_pool{n}d" for n in (2, 3)), _PLAIN_SIZES),
    **dict.fromkeys((f"nn.functional.conv{n}d" for n in (1, 3)), _PLAIN_SIZES),  # a kernel whose size is open
    "linalg.eig": "its formula checks for singular matrices on the way",
    "nn.functional.rrelu": "draws random numbers inside",
}


def test_the_tables_know_their_operators() -> None:
    assert {*SAMPLE, *FALLS_BACK, *AT_RUN_TIME} <= OPERATORS.keys()


def test_few_operators_fall_back_and_few_are_differentiated_at_run_time() -> None:
    assert len(FALLS_BACK) <= 0.05 * len(OPERATORS)
    assert len(AT_RUN_TIME) <= 0.10 * len(OPERATORS)


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name: str) -> None:
    outcome = check_operator(OPERATORS[name], samples=2)
    assert outcome.form == SAMPLE[name], outcome.error or outcome.operators
    assert outcome.resized, "no sample was compared at a second size"


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATORS.values(), ids=full_name)
def test_all(op: OpInfo) -> None:
    outcome = check_operator(op, samples=2)
    name = full_name(op)
    if name in FALLS_BACK:
        assert outcome.form == Form.FAILED, f"{name} becomes a graph now: take it out of FALLS_BACK"
        return
    assert outcome.form != Form.FAILED, outcome.error
    assert outcome.form < Form.RUN_TIME or name in AT_RUN_TIME, outcome.reasons
