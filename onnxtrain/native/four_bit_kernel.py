"""A Triton kernel for the matmul of a few rows with a 4-bit weight, which it dequantizes in registers.

    y[rows, K] = a[rows, N] @ W[N, K]

W[n, k] = levels[index] * scale[block]; two indices are in a byte, that of an even k in its upper half. The weight is
read once for each 128 rows: 0.5 bytes an element. To dequantize it for a GEMM reads 0.5, writes 2 and reads 2.
Only `ops/quantization/four_bit_matmul.py` imports this module, where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_COLUMN_PAIRS, _REDUCED = 32, 32  # pairs of columns of a tile of y; rows of W that are in registers at a time
_MAX_ROWS = 128  # of a tile of y


@triton.jit  # type: ignore[untyped-decorator]
def run_tile(  # type: ignore[no-untyped-def]
    a,
    packed,
    scale,
    levels,
    y,
    rows,
    n,
    k,
    half_block: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_pairs: tl.constexpr,
    reduced: tl.constexpr,
):
    """Compute a tile of y: all arrays are contiguous, `packed` has k // 2 bytes a row, `scale` k // (2 half_block)."""
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    pair = tl.program_id(1) * tile_pairs + tl.arange(0, tile_pairs)
    pairs = k // 2
    blocks = pairs // half_block
    even = tl.zeros((tile_rows, tile_pairs), dtype=tl.float32)
    odd = tl.zeros((tile_rows, tile_pairs), dtype=tl.float32)
    for start in range(0, n, reduced):
        i = start + tl.arange(0, reduced)
        in_a = (row[:, None] < rows) & (i[None, :] < n)
        x = tl.load(a + row[:, None].to(tl.int64) * n + i[None, :], mask=in_a, other=0.0)
        in_weight = (i[:, None] < n) & (pair[None, :] < pairs)
        weight_row = i[:, None].to(tl.int64)
        byte = tl.load(packed + weight_row * pairs + pair[None, :], mask=in_weight, other=0)
        factor = tl.load(scale + weight_row * blocks + pair[None, :] // half_block, mask=in_weight, other=0.0)
        upper = tl.load(levels + (byte >> 4)) * factor
        lower = tl.load(levels + (byte & 15)) * factor
        even = tl.dot(x, upper.to(x.dtype), even, input_precision="ieee")
        odd = tl.dot(x, lower.to(x.dtype), odd, input_precision="ieee")
    in_y = (row[:, None] < rows) & (pair[None, :] < pairs)
    target = y + row[:, None].to(tl.int64) * k + 2 * pair[None, :]
    tl.store(target, even.to(y.dtype.element_ty), mask=in_y)
    tl.store(target + 1, odd.to(y.dtype.element_ty), mask=in_y)


def constants_of(rows: int, block: int) -> dict[str, int]:
    """Return the compile-time arguments for a number of rows and a block size of the weight."""
    tile_rows = triton.next_power_of_2(min(max(rows, 16), _MAX_ROWS))
    return {"half_block": block // 2, "tile_rows": tile_rows, "tile_pairs": _COLUMN_PAIRS, "reduced": _REDUCED}


def run(a: Any, packed: Any, scale: Any, levels: Any, y: Any, block: int) -> None:
    """Compute y[rows, K] from a[rows, N], the packed weight, the float32 scale of each block and the 16 levels."""
    rows, n = a.shape
    constants = constants_of(rows, block)
    grid = (triton.cdiv(rows, constants["tile_rows"]), triton.cdiv(y.shape[1] // 2, _COLUMN_PAIRS))
    run_tile[grid](a, packed, scale, levels, y, rows, n, y.shape[1], **constants, num_warps=4)
