"""Compile onnxtrain's Triton kernels for architectures of GPUs: the machine code is made without a GPU.

python -m tests.gpu_without_one.compiled_kernels row_kernel bf16 80 90 100
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from onnxtrain.native import four_bit_kernel, row_kernel

_CLASSES = 50257
_ELF = b"\x7fELF"

Variant = tuple[Any, dict[str, str], dict[str, Any], int]  # the kernel, types, constants and warps


def of_cross_entropy(dtype: str) -> Iterator[Variant]:
    pointers = {"logits": f"*{dtype}", "labels": "*i64", "factors": "*fp32", "losses": "*fp32"}
    sizes = dict.fromkeys(("row_stride", "classes", "columns"), "i32")
    for writes in (True, False):
        constants = {"writes": writes, "block": row_kernel.block_of(_CLASSES)}
        yield row_kernel.run_row, {**pointers, **sizes}, constants, 8


def of_four_bit_weights(dtype: str) -> Iterator[Variant]:
    pointers = {"a": f"*{dtype}", "packed": "*u8", "scale": "*fp32", "levels": "*fp32", "y": f"*{dtype}"}
    sizes = dict.fromkeys(("rows", "n", "k"), "i32")
    for rows in (1, 128):
        yield four_bit_kernel.run_tile, {**pointers, **sizes}, four_bit_kernel.constants_of(rows, 64), 4


KERNELS = {"row_kernel": of_cross_entropy, "four_bit_kernel": of_four_bit_weights}


def check(name: str, dtype: str, *capabilities: str) -> None:
    for kernel, types, constants, warps in KERNELS[name](dtype):
        source = ASTSource(
            fn=kernel, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants
        )
        for capability in capabilities:
            made = compile(source, target=GPUTarget("cuda", int(capability), 32), options={"num_warps": warps})
            assert made.asm["cubin"].startswith(_ELF), (name, dtype, constants, capability)


if __name__ == "__main__":
    check(*sys.argv[1:])
