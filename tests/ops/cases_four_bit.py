"""MatMulBnb4 against the formulas of bitsandbytes, written out per element."""

import contextlib
from typing import Any

import torch

from onnxtrain.ops.quantization.four_bit_matmul import LEVELS
from tests.op_case import OpCase, Spec

with contextlib.suppress(ImportError):
    import bitsandbytes  # noqa: F401  # so that its kernels are candidates


def weight(b: Any, scale: Any, n: int, k: int, block: int, quant_type: int) -> Any:
    """Dequantize W[n, k] element by element."""
    packed = b.reshape(-1).tolist()  # reading 130 * 65 elements of a tensor would take 70 ms
    levels = [LEVELS[quant_type][packed[i // 2] // 16 if i % 2 == 0 else packed[i // 2] % 16] for i in range(n * k)]
    blocks = torch.tensor([i // block for i in range(n * k)], device=scale.device)
    w = torch.tensor(levels, device=scale.device) * scale[blocks]
    return w.view(n, k)


def case(n: int, k: int, block: int, quant_type: int, trans: int, nested: bool = False, label: str = "") -> OpCase:
    blocks = -(-n * k // block)
    packed = Spec(str((n * k + 1) // 2), torch.uint8, low=0, high=256)
    scales: tuple[Spec, ...] = (Spec(str(blocks), torch.float32, low=0.1, high=2.0, grad=False),)
    if nested:
        scales = (
            Spec(str(-(-blocks // 256)), torch.float32, low=0.1, high=2.0, grad=False),
            Spec(str(blocks), torch.uint8, low=0, high=256),
            Spec("256", torch.float32, low=-1.0, high=1.0, grad=False),
            Spec("", torch.float32, low=1.0, high=2.0, grad=False),
        )

    def reference(a: Any, b: Any, absmax: Any, *quantized: Any) -> Any:
        scale = absmax
        if quantized:
            levels, code, offset = quantized
            scale = torch.stack([code[int(levels[i])] * absmax[i // 256] + offset for i in range(blocks)])
        w = weight(b, scale, n, k, block, quant_type).to(a.dtype)
        return a @ (w.T if trans else w)

    return OpCase(
        "com.microsoft",
        "MatMulBnb4",
        (Spec(f"b s {k if trans else n}"), packed, *scales),
        reference,
        {"N": n, "K": k, "block_size": block, "quant_type": quant_type, "transB": trans},
        label=f"{('fp4', 'nf4')[quant_type]}-{n}x{k}-{trans}{'-nested' if nested else ''}",
    )


CASES = [
    *(case(6, 64, 32, quant_type, trans) for quant_type in (0, 1) for trans in (0, 1)),  # supported by bitsandbytes
    case(5, 64, 64, 1, 0, nested=True),
    *(case(6, 16, 32, quant_type, trans) for quant_type in (0, 1) for trans in (0, 1)),
    case(3, 7, 16, 1, 1),  # an odd number of elements, and a partial block
    case(3, 7, 16, 0, 0),
    case(8, 8, 64, 1, 0),  # a square weight: a kernel that ignores transB fails
    case(4, 16, 32, 1, 1, nested=True),
    case(3, 7, 16, 0, 0, nested=True),
    case(130, 65, 32, 1, 1, nested=True),  # 265 blocks: two scales of scales
]
