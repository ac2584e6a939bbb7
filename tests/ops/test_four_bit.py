"""MatMulBnb4: the kernels of bitsandbytes and stock onnxruntime against ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onnxtrain.ops.interfaces.stock_kernels import has_stock_kernel
from onnxtrain.ops.quantization.four_bit_matmul import (
    LEVELS,
    TYPES,
    bnb_matmul,
    bnb_matmul_transposed,
    dequantize_and_matmul,
)
from tests.op_case import CaseCheck, run_model
from tests.ops.cases_four_bit import CASES, case


@pytest.mark.parametrize("quant_type", [0, 1])
def test_kernel_of_stock_onnxruntime_computes_the_same(quant_type: int) -> None:
    """With attributes that `has_stock_kernel` accepts. K is a multiple of the block size, as onnxruntime requires."""
    check = CaseCheck(case(24, 32, 32, quant_type, 1), torch.float32)
    node = check.model.graph[0]
    assert has_stock_kernel(node)
    sizes = next(iter(check.case.size_sets()))
    tensors = check.tensors(sizes)
    eager, exact = (check.reference(tensors, sizes, dtype) for dtype in (torch.float32, torch.float64))
    check._compare("native", run_model(check.model, tensors), eager.outputs, exact.outputs)


def test_attributes_that_onnxruntime_lacks_have_no_stock_kernel() -> None:
    for op_case in CASES:
        check = CaseCheck(op_case, torch.float32)
        assert has_stock_kernel(check.model.graph[0]) == (
            op_case.attributes["transB"] == 1 and "nested" not in op_case.label
        )


def arguments(nested: bool, n: int = 48, k: int = 32, block: int = 32) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(5)
    blocks = n * k // block
    b = torch.randint(256, (n * k // 2,), dtype=torch.uint8, generator=generator)
    if not nested:
        return b, torch.rand(blocks, generator=generator), None, None, None, (n, k), block
    coarse = torch.rand(-(-blocks // 256), generator=generator)
    levels = torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator)
    return b, coarse, levels, torch.rand(256, generator=generator), torch.tensor(0.3), (n, k), block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", [0, 1])
def test_kernels_of_bitsandbytes_compute_the_same_bits(quant_type: int, nested: bool, dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
    b, absmax, levels, code, offset, shape, block = arguments(nested)
    layout = (shape, block, quant_type)
    for trans_b, kernel in ((1, bnb_matmul_transposed), (0, bnb_matmul)):
        a = torch.randn(5, shape[1] if trans_b else shape[0]).to(dtype)
        ours = dequantize_and_matmul(a, b, (absmax, levels, code, offset), layout, trans_b)
        theirs = kernel(a, b, absmax, (levels, code, offset), layout)
        assert torch.equal(ours, theirs)


def test_levels_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs the extra qlora")
    for quant_type, name in enumerate(TYPES):
        assert torch.equal(torch.tensor(LEVELS[quant_type]), functional.get_4bit_type(name, device="cpu"))


def test_weight_is_dequantized_in_float32_and_rounded_once() -> None:
    b, absmax, _, _, _, shape, block = arguments(False)
    a = torch.randn(3, shape[1], dtype=torch.bfloat16)
    eye = torch.eye(shape[1])
    weight = dequantize_and_matmul(eye, b, (absmax, None, None, None), (shape, block, 1), 1).T
    expected = a @ weight.bfloat16().T
    assert torch.equal(dequantize_and_matmul(a, b, (absmax, None, None, None), (shape, block, 1), 1), expected)
