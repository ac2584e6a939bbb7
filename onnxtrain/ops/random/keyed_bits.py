"""The random bits of `rng="fast"` on a CPU: a pure function of a key, which is sampled from torch's generator.

    key      int64 [2], from the default generator, so that manual_seed and saved RNG states apply
    word c   SplitMix64 of counter c (Steele et al. 2014, https://doi.org/10.1145/2660193.2660195), with the second half
             of the key between its two rounds
    bits e   16 bits per element: the e % 4-th lowest of word e // 4, as a signed integer; e is the logical index

A key gives the same bits in forward, backward and recompute, in the compiled kernels and in PyTorch's operators, for
any number of threads. Two Dropouts share no bits: a key has 128 random bits.

Milliseconds for the bits of 3.1 million elements, 2 threads of a Xeon at 2.8 GHz: bernoulli_ 21.3, random_ over int64
3.1, the words below 2.0 by PyTorch's operators.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from onnxtrain.native import Library, pointers, read_sources
from onnxtrain.ops import huge_pages

DROP_LEVELS = 65536  # values of 16 bits
GAMMA, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64's, as signed integers
SHIFTS = (30, 27, 31)
_CHUNK = 65536  # words per block, so that a block stays in the cache

_TYPES = {torch.float32: "float", torch.float64: "double"}
LIBRARY = Library(
    "dropout",
    read_sources("vectors.h", "keyed_bits.h", "dropout.cpp"),
    {
        "kept": "ppiii",
        **{
            f"{name}_{type_name}": letters
            for type_name in _TYPES.values()
            for name, letters in (
                ("dropout", "ppppidii"),
                ("relu_dropout", "pppidii"),
                ("relu_dropout_backward", "pppdii"),
            )
        },
    },
)


def sample_key() -> torch.Tensor:
    """Sample a new key: int64 [2]."""
    return torch.empty(2, dtype=torch.int64).random_(-(2**63), None)


def keep_threshold(dropped: int) -> int:
    """Return the smallest 16-bit value that is kept if `dropped` of the 65536 values are dropped."""
    return dropped - DROP_LEVELS // 2


@functools.cache
def _counters() -> torch.Tensor:
    return torch.arange(_CHUNK).mul_(GAMMA)


def random_words(key: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` words of a key's stream: int64 [count]."""
    first, second = key.tolist()
    stream = torch.empty(count, dtype=torch.int64)
    shifted = torch.empty(min(count, _CHUNK), dtype=torch.int64)
    for start in range(0, count, _CHUNK):
        z = stream[start : start + _CHUNK]
        other = shifted[: z.numel()]
        torch.add(_counters()[: z.numel()], _signed(first + start * GAMMA), out=z)
        _mix(z, SHIFTS[0], other).mul_(FIRST).bitwise_xor_(second)
        _mix(z, SHIFTS[1], other).mul_(SECOND)
        _mix(z, SHIFTS[2], other)
    return stream


def _mix(z: torch.Tensor, shift: int, other: torch.Tensor) -> torch.Tensor:
    """Compute z ^= z >> shift, logically. PyTorch's shift of int64 is arithmetic: the copies of the sign are masked."""
    torch.bitwise_right_shift(z, shift, out=other)
    return z.bitwise_xor_(other.bitwise_and_((1 << (64 - shift)) - 1))


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def keep_mask(key: torch.Tensor, count: int, dropped: int) -> torch.Tensor:
    """Return which of `count` elements are kept: uint8 [count], 1 or 0."""
    mask = torch.empty(count, dtype=torch.uint8)
    bits = random_words(key, (count + 3) // 4).view(torch.int16)[:count]
    torch.ge(bits, keep_threshold(dropped), out=mask)
    return mask


def keep_mask_compiled(key: torch.Tensor, count: int, dropped: int) -> torch.Tensor:
    """Do the same with the compiled kernel, once it is ready: 1.1 ms for 10.3 million elements instead of 21."""
    native: Any = LIBRARY.functions
    if native is None:
        return keep_mask(key, count, dropped)
    mask = torch.empty(count, dtype=torch.uint8)
    native.kept(*pointers(mask, key), keep_threshold(dropped), count, torch.get_num_threads())
    return mask


def drop(
    x: torch.Tensor, key: torch.Tensor, dropped: int, scale: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply some elements of x by `scale` and the others by 0; the result has the strides of x.

    Args:
        x: floating-point, any shape and strides, on a CPU.
        key: int64 [2].
        dropped: for how many of its 65536 possible values an element is dropped.
        scale: the factor of the kept elements, rounded to the type of x.
        residual: added to the result; shape and type of x.
    """
    return _scaled(x, keep_mask(key, x.numel(), dropped), scale, residual)


def drop_(
    x: torch.Tensor, key: torch.Tensor, dropped: int, scale: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Do the same in place."""
    return _scaled(x, keep_mask(key, x.numel(), dropped), scale, residual, in_place=True)


def _scaled(
    x: torch.Tensor, mask: torch.Tensor, scale: float, residual: torch.Tensor | None, *, in_place: bool = False
) -> torch.Tensor:
    factor = mask.view(x.shape).to(x.dtype)
    if in_place:
        y = x.mul_(factor).mul_(scale)
    elif x.is_contiguous():
        y = factor.mul_(x).mul_(scale)
    else:
        y = torch.mul(x, factor, out=torch.empty_like(x)).mul_(scale)
    return y if residual is None else y.add_(residual)


def compiled_function(name: str, x: torch.Tensor, *others: torch.Tensor | None) -> Any:
    """Return the compiled function for these tensors; None if it is not ready or does not take them."""
    native: Any = LIBRARY.functions
    if native is None or x.dtype not in _TYPES:
        return None
    if not (x.is_contiguous() and all(other is None or other.is_contiguous() for other in others)):
        return None
    return getattr(native, f"{name}_{_TYPES[x.dtype]}")


def drop_compiled(
    x: torch.Tensor, key: torch.Tensor, dropped: int, scale: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Do the same as `drop` with the compiled kernel, once it is ready: 0.17 ms for [2048, 384] instead of 0.98."""
    return _compiled(x, key, dropped, scale, residual)


def drop_compiled_(
    x: torch.Tensor, key: torch.Tensor, dropped: int, scale: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Do the same in place."""
    return _compiled(x, key, dropped, scale, residual, in_place=True)


def _compiled(
    x: torch.Tensor,
    key: torch.Tensor,
    dropped: int,
    scale: float,
    residual: torch.Tensor | None,
    *,
    in_place: bool = False,
) -> torch.Tensor:
    run = compiled_function("dropout", x, residual)
    if run is None:
        return _scaled(x, keep_mask_compiled(key, x.numel(), dropped), scale, residual, in_place=in_place)
    y = x if in_place else huge_pages.empty_like(x)
    run(*pointers(x, residual, y, key), keep_threshold(dropped), scale, x.numel(), torch.get_num_threads())
    return y
