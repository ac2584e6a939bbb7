"""The Triton kernel of 4-bit weights in Triton's interpreter, against float64.

TRITON_INTERPRET=1 python -m tests.gpu_without_one.four_bit_kernel
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.language import bfloat16
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from onnxtrain.ops.quantization.four_bit_matmul import TYPES, dequantize_and_matmul, run_kernel
from onnxtrain.testing import assert_no_worse_than_eager

ROWS = (1, 3, 17, 130)  # one and several tiles, whole and partial
SHAPES = ((5, 64, 64), (33, 96, 32), (64, 256, 128), (1, 16, 16))  # N, K and block size of W
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dot(builder: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
    """`tl.dot` in float32: Triton's interpreter multiplies the bits of bfloat16 as integers."""
    operands = []
    for operand in (a, b):
        bits = operand.data
        is_bfloat16 = operand.dtype.scalar == bfloat16
        operands.append((bits.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else bits.astype(np.float32))
    return TensorHandle(np.matmul(*operands) + sums.data, sums.dtype.scalar)


def check(rows: int, n: int, k: int, block: int, quant_type: int, nested: bool, dtype: torch.dtype) -> None:
    blocks = n * k // block
    packed = torch.randint(256, (n * k // 2, 1), dtype=torch.uint8)
    absmax = torch.rand(-(-blocks // 256) if nested else blocks) + 0.1
    codes = (torch.randint(256, (blocks,), dtype=torch.uint8), torch.rand(256), torch.tensor(0.3))
    quantized = codes if nested else (None, None, None)
    layout = ((n, k), block, quant_type)
    a = torch.randn(2, rows, n).to(dtype)
    got = run_kernel(a, packed, absmax, quantized, layout)
    eager = dequantize_and_matmul(a, packed, (absmax, *quantized), layout, 0)
    weight = dequantize_and_matmul(torch.eye(n), packed, (absmax, *quantized), layout, 0).to(dtype)  # as eager has it
    name = f"{rows} rows, {n} x {k} in blocks of {block}, {TYPES[quant_type]}, nested {nested}, {dtype}"
    assert_no_worse_than_eager(name, got, eager, a.double() @ weight.double())


def check_all() -> None:
    """Compare all cases, on the default device."""
    torch.manual_seed(0)
    for rows, (n, k, block), nested, dtype in itertools.product(ROWS, SHAPES, (False, True), DTYPES):
        check(rows, n, k, block, rows % 2, nested, dtype)
    check(2, 5, 64, 64, 0, False, torch.bfloat16)


if __name__ == "__main__":
    with mock.patch.object(InterpreterBuilder, "create_dot", dot):
        check_all()
