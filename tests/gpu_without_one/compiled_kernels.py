"""Compile the Triton kernel of cross entropy for architectures of GPUs: the machine code is made without a GPU.

python -m tests.gpu_without_one.compiled_kernels bf16 80 90 100
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from onnxtrain.native import row_kernel

_CLASSES = 50257
_ELF = b"\x7fELF"

_WARPS = 8


def variants(dtype: str) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Yield the types of the kernel's arguments, and its constants."""
    pointers = {"logits": f"*{dtype}", "labels": "*i64", "factors": "*fp32", "losses": "*fp32"}
    sizes = dict.fromkeys(("row_stride", "classes", "columns"), "i32")
    for writes in (True, False):
        constants = {"writes": writes, "block": row_kernel.block_of(_CLASSES)}
        yield {**pointers, **sizes}, constants


def check(dtype: str, *capabilities: str) -> None:
    for types, constants in variants(dtype):
        signature = {**types, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(fn=row_kernel.run_row, signature=signature, constexprs=constants)
        for capability in capabilities:
            made = compile(source, target=GPUTarget("cuda", int(capability), 32), options={"num_warps": _WARPS})
            assert made.asm["cubin"].startswith(_ELF), (dtype, constants, capability)


if __name__ == "__main__":
    check(*sys.argv[1:])
