"""The ops that PyTorch's einsum, tensordot, inner and bilinear are captured as."""

import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from tests.op_case import Spec
from tests.ops.captures import check_capture
from tests.thinned import slow_but_every

SIZES = ({"b": 3, "i": 4, "j": 5, "k": 6}, {"b": 2, "i": 4, "j": 7, "k": 6}, {"b": 1, "i": 2, "j": 5, "k": 6})
EQUATIONS = {
    "bij,bjk->bik": ("b i j", "b j k"),
    "bij,bjk,k->bi": ("b i j", "b j k", "k"),
    "...ij,...jk->...ik": ("b 2 i j", "2 j k"),
    "...ij,jk": ("b i j", "j k"),
    "bi...->b": ("b i j k",),
    " i j , j -> i ": ("i j", "j"),
    "Ba,Ca": ("i j", "k j"),
    "ij->ji": ("i j",),
    "ij->": ("i j",),
    "iiji->ij": ("j j k j",),
    "i,->i": ("i", ""),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_captured_einsum(equation):
    check_capture(lambda *xs: torch.einsum(equation, *xs), *map(Spec, EQUATIONS[equation]), sizes=SIZES)


@pytest.mark.parametrize("equation", slow_but_every(2, EQUATIONS))
def test_captured_einsum_in_bfloat16(equation):
    """ONNX's Einsum does not support bfloat16."""
    if equation != "iiji->ij":  # eager's own result is wrong
        specs = map(Spec, EQUATIONS[equation])
        check_capture(lambda *xs: torch.einsum(equation, *xs), *specs, dtype=torch.bfloat16, sizes=SIZES)


def test_an_axis_of_size_1_broadcasts():
    check_capture(
        lambda a, b: torch.einsum("ij,ij->i", a.sum(1, keepdim=True), b), Spec("i j"), Spec("i k"), sizes=SIZES
    )


def test_captured_tensordot_and_inner():
    def products(a, b, c):
        return (
            torch.tensordot(a, b, dims=([0, 2], [1, -3])),
            torch.tensordot(a, c, dims=0),
            torch.inner(a, c),
            torch.inner(a, c.sum()),
        )

    check_capture(products, Spec("b i j"), Spec("j b k"), Spec("k j"), sizes=SIZES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_captured_bilinear(dtype):
    def products(a, b, w, bias):
        return F.bilinear(a, b, w, bias), F.bilinear(a[0], b[0], w)

    check_capture(products, Spec("b i j"), Spec("b i k"), Spec("3 j k"), Spec("3"), dtype=dtype, sizes=SIZES)


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: torch.einsum("...i,ij->...j", a, b),
        lambda a, b: torch.addbmm(b, a[:0, None], a[:0, :, None].mT),
    ],
    ids=["einsum", "addbmm"],
)
def test_operands_of_two_dtypes(product):
    """Eager accepts them if a dimension has size 1 or 0."""

    class Products(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(1, 1))

        def forward(self, x):
            return product(x, self.weight)

    module = Products()
    x = torch.randn(3, 1, dtype=torch.float64)
    assert torch.equal(ORTModule(module)(x), module(x))  # one product, rounded once
