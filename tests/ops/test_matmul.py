"""Captures of PyTorch's matmul operators, and the kernels that differ from PyTorch's functions."""

import pytest
import torch
import torch.nn.functional as F

from onnxtrain.ops.interfaces.stock_kernels import has_stock_kernel
from onnxtrain.ops.matmul import is_exact_attribute, rows_times_matrix
from onnxtrain.ops.matmul.linear import linear
from onnxtrain.testing import assert_no_worse_than_eager
from tests.op_case import CaseCheck, Spec, run_model
from tests.ops.captures import check_capture
from tests.ops.cases_matmul import CASES, FULL

SIZES = ({"b": 3, "m": 4, "k": 5, "n": 6}, {"b": 2, "m": 7, "k": 5, "n": 6}, {"b": 1, "m": 2, "k": 5, "n": 6})
# Calls with the same operands are captured together: a capture takes far longer than the calls.
CALLS = {
    "batches": (lambda a, b: (torch.matmul(a, b), torch.bmm(a, b)), "b m k", "b k n"),
    "heads": (torch.matmul, "b 2 m k", "b 2 k n"),
    "shared": (lambda a, b: (torch.matmul(a, b), torch.matmul(b.mT, a.mT)), "b m k", "k n"),
    "matrices": (lambda a, b: (torch.matmul(a, b), torch.mm(a, b)), "m k", "k n"),
    "vectors": (lambda a, b: (a @ b, a.dot(b), torch.vdot(a, b), torch.outer(a, b), torch.ger(a, b)), "k", "k"),
    "vector": (lambda a, v: (a @ v, a[0].mv(v), v @ a.mT, v @ a[0].mT), "b m k", "k"),
    "linear": (lambda x, w, b: (F.linear(x, w, b), F.linear(x[0], w, b), F.linear(x, w)), "b m k", "n k", "n"),
    "linear-vector": (lambda x, w, b: (F.linear(x, w, b), F.linear(x, w)), "k", "n k", "n"),
    "linear-one-output": (lambda x, w, b: (F.linear(x, w, b), F.linear(x, w)), "b m k", "k", ""),
    "linear-transposed": (lambda x, w, b: F.linear(x.transpose(0, 1), w, b), "b m k", "n k", "n"),
    "addmm": (
        lambda c, a, b: (
            torch.addmm(c, a, b),
            torch.addmm(c, a, b, beta=0.5, alpha=2),
            torch.addmm(c, a, b, beta=0.3, alpha=1.1),
            torch.addmm(c, a, b, beta=0, alpha=0.1),
            torch.addmm(c, a, b, beta=0),
        ),
        "n",
        "m k",
        "k n",
    ),
    "baddbmm": (
        lambda c, a, b: (
            torch.baddbmm(c, a, b, beta=0.3, alpha=0.25),
            torch.baddbmm(c, a, b, alpha=0.3),
            torch.baddbmm(c, a, b, beta=0),
            torch.addbmm(c, a, b, beta=0.5, alpha=0.3),
        ),
        "m n",
        "b m k",
        "b k n",
    ),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b, beta=0.5, alpha=0.3), "m", "m k", "k"),
    "addr": (lambda c, a, b: torch.addr(c, a, b, beta=0.5, alpha=0.3), "m k", "m", "k"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_captured_matmul_matches_eager(call):
    function, *dims = call
    check_capture(function, *map(Spec, dims), sizes=SIZES)


def test_a_base_of_another_type_is_promoted():
    check_capture(torch.addr, Spec("m k", torch.bfloat16), Spec("m"), Spec("k"), sizes=SIZES)


def test_vectors_of_other_types_are_promoted():
    check_capture(lambda a, b: torch.outer(a, b) * 2, Spec("k"), Spec("n", torch.bfloat16), sizes=SIZES)


def test_a_base_larger_than_no_rows():
    """PyTorch returns the shape of the base if the matrix has no rows."""
    check_capture(
        lambda c, a, b: torch.addmv(c, a.detach(), b.detach()),
        Spec("1"),
        Spec("0 3"),
        Spec("3"),
        sizes=({},),
        aten=True,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_captured_matmul_matches_eager_in_other_types(dtype):
    def matmuls(x, w, b):
        y = F.linear(x, w, b)
        return y, torch.addmm(b, x[0], w.t()), x @ w.t(), torch.baddbmm(y, x, w.t().expand(x.shape[0], -1, -1))

    check_capture(matmuls, Spec("b m k"), Spec("n k"), Spec("n"), dtype=dtype, sizes=SIZES)


def test_matmul_of_integers():
    integers = [Spec("m k", dtype="int64", low=-9, high=9), Spec("k n", dtype="int64", low=-9, high=9)]
    check_capture(lambda a, b, x: (a @ b, x * 2), *integers, Spec("m"), sizes=SIZES)


def test_matmul_of_dtypes_that_onnx_lacks_stays_an_aten_node():
    narrow = [Spec("m k", dtype=torch.uint8, low=0, high=9), Spec("k n", dtype=torch.uint8, low=0, high=9)]
    check_capture(lambda a, b, x: (a @ b, x * 2), *narrow, Spec("m"), sizes=SIZES, aten=True)


def test_factors_that_float32_rounds_are_not_exact_attributes():
    assert is_exact_attribute(0.25)
    assert is_exact_attribute(3)
    assert not is_exact_attribute(0.1)


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 0, 5), (0, 4, 5), (3, 4, 0), (2, 3, 4, 5)], ids=str)
def test_linear_of_a_transposed_input_is_bitwise_equal(shape):
    x, w, b = torch.randn(shape).transpose(0, 1), torch.randn(6, shape[-1]), torch.randn(6)
    w.requires_grad_()  # eager PyTorch flattens the batch axes if the weight is trained
    torch.testing.assert_close(linear(x, w, b), F.linear(x, w, b), rtol=0, atol=0)
    torch.testing.assert_close(linear(x, w, None), F.linear(x, w), rtol=0, atol=0)
    torch.testing.assert_close(rows_times_matrix(x, w.t()), x @ w.t(), rtol=0, atol=0)


@pytest.mark.parametrize("case", [c for c in CASES if c.name == "FusedMatMul"], ids=str)
def test_stock_onnxruntime_has_the_same_fused_matmul(case):
    """The op has a stock kernel: onnxruntime's float32 kernel runs instead of our body."""
    check = CaseCheck(case, torch.float32)
    check.model.graph.opset_imports["com.microsoft"] = 1
    (node,) = check.model.graph
    assert has_stock_kernel(node) == ("batch_" not in case.label)
    if "batch_" in case.label:
        return
    for sizes in FULL if case.sizes else case.size_sets():
        tensors = check.tensors(sizes)
        (got,) = run_model(check.model, tensors)
        exact = case.reference(*(t.double() for t in tensors))
        assert_no_worse_than_eager(str(sizes), got, case.reference(*tensors), exact)
