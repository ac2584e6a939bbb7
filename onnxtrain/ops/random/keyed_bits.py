"""The random bits of `rng="fast"` on a CPU: a pure function of a key, which is drawn from torch's generator.

    key      int64 [2], from the default generator, so that manual_seed and saved states govern it
    word c   SplitMix64 of counter c (Steele et al. 2014, https://doi.org/10.1145/2660193.2660195), with the second half
             of the key between its two rounds
    draw e   16 bits an element: the e % 4-th lowest of word e // 4, as a signed number; elements count in logical order

What a key gives is the same in forward, backward and recompute, in the compiled kernels and in PyTorch's operators, on
one thread and on many. Two Dropouts share no bits, for their keys have 128.

Milliseconds for the draws of 3.1 million elements, 2 threads of a Xeon at 2.8 GHz: bernoulli_ 21.3, random_ over int64
3.1, the words below 2.0 by PyTorch's operators.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from onnxtrain.native import Library, pointers, read_sources
from onnxtrain.ops import huge_pages

DRAWS = 65536  # what 16 bits tell apart
GAMMA, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64's, as signed numbers
SHIFTS = (30, 27, 31)
_CHUNK = 65536  # words: what is computed on together stays in the cache

_TYPES = {torch.float32: "float", torch.float64: "double"}
LIBRARY = Library(
    "dropout",
    read_sources("vectors.h", "keyed_bits.h", "dropout.cpp"),
    {
        "kept": "ppiii",
        **{
            f"{name}_{of}": letters
            for of in _TYPES.values()
            for name, letters in (
                ("dropout", "ppppidii"),
                ("relu_dropout", "pppidii"),
                ("relu_dropout_backward", "pppdii"),
            )
        },
    },
)


KEY_BYTES = 16  # of a key


def draw_key() -> torch.Tensor:
    """A new key: int64 [2]."""
    return torch.empty(2, dtype=torch.int64).random_(-(2**63), None)


def least_kept(dropped: int) -> int:
    """The least draw that is kept where `dropped` of the 65536 are not."""
    return dropped - DRAWS // 2


@functools.cache
def _counters() -> torch.Tensor:
    return torch.arange(_CHUNK).mul_(GAMMA)


def words(key: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` words of a key's stream: int64 [count]."""
    first, second = key.tolist()
    found = torch.empty(count, dtype=torch.int64)
    shifted = torch.empty(min(count, _CHUNK), dtype=torch.int64)
    for start in range(0, count, _CHUNK):
        z = found[start : start + _CHUNK]
        other = shifted[: z.numel()]
        torch.add(_counters()[: z.numel()], _signed(first + start * GAMMA), out=z)
        _mix(z, SHIFTS[0], other).mul_(FIRST).bitwise_xor_(second)
        _mix(z, SHIFTS[1], other).mul_(SECOND)
        _mix(z, SHIFTS[2], other)
    return found


def _mix(z: torch.Tensor, shift: int, other: torch.Tensor) -> torch.Tensor:
    """Does z ^= z >> shift. PyTorch's shift of int64 keeps the sign: its copies are cut off."""
    torch.bitwise_right_shift(z, shift, out=other)
    return z.bitwise_xor_(other.bitwise_and_((1 << (64 - shift)) - 1))


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def kept(key: torch.Tensor, count: int, dropped: int) -> torch.Tensor:
    """Which of `count` elements are kept: uint8 [count], 1 or 0."""
    mask = torch.empty(count, dtype=torch.uint8)
    bits = words(key, (count + 3) // 4).view(torch.int16)[:count]
    torch.ge(bits, least_kept(dropped), out=mask)
    return mask


def kept_compiled(key: torch.Tensor, count: int, dropped: int) -> torch.Tensor:
    """The same by the compiled kernel where it is there: 1.1 ms for 10.3 million elements, not 21."""
    native: Any = LIBRARY.functions
    if native is None:
        return kept(key, count, dropped)
    mask = torch.empty(count, dtype=torch.uint8)
    native.kept(*pointers(mask, key), least_kept(dropped), count, torch.get_num_threads())
    return mask


def drop(
    x: torch.Tensor, key: torch.Tensor, dropped: int, scale: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Gives x with some elements times `scale` and the others times 0, in x's layout.

    Args:
        x: floating, of any shape and strides, on a CPU.
        key: int64 [2].
        dropped: of the 65536 numbers that an element can draw, how many make it 0.
        scale: what the others are multiplied by, rounded to x's type.
        residual: of x's shape and type: what is added then.
    """
    return _scaled(x, kept(key, x.numel(), dropped), scale, residual)


def drop_(
    x: torch.Tensor, key: torch.Tensor, dropped: int, scale: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The same, written over x."""
    return _scaled(x, kept(key, x.numel(), dropped), scale, residual, over=True)


def _scaled(
    x: torch.Tensor, mask: torch.Tensor, scale: float, residual: torch.Tensor | None, *, over: bool = False
) -> torch.Tensor:
    factor = mask.view(x.shape).to(x.dtype)
    if over:
        y = x.mul_(factor).mul_(scale)
    elif x.is_contiguous():
        y = factor.mul_(x).mul_(scale)
    else:
        y = torch.mul(x, factor, out=torch.empty_like(x)).mul_(scale)
    return y if residual is None else y.add_(residual)


def function(name: str, x: torch.Tensor, *others: torch.Tensor | None) -> Any:
    """The compiled function for tensors of x's type; None where it is not there, or is not for them."""
    native: Any = LIBRARY.functions
    if native is None or x.dtype not in _TYPES:
        return None
    if not (x.is_contiguous() and all(other is None or other.is_contiguous() for other in others)):
        return None
    return getattr(native, f"{name}_{_TYPES[x.dtype]}")


def drop_compiled(
    x: torch.Tensor, key: torch.Tensor, dropped: int, scale: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """What `drop` gives, by the compiled kernel as soon as it is there: 0.17 ms for [2048, 384], not 0.98."""
    return _compiled(x, key, dropped, scale, residual)


def drop_compiled_(
    x: torch.Tensor, key: torch.Tensor, dropped: int, scale: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The same, written over x."""
    return _compiled(x, key, dropped, scale, residual, over=True)


def _compiled(
    x: torch.Tensor, key: torch.Tensor, dropped: int, scale: float, residual: torch.Tensor | None, *, over: bool = False
) -> torch.Tensor:
    run = function("dropout", x, residual)
    if run is None:
        return _scaled(x, kept_compiled(key, x.numel(), dropped), scale, residual, over=over)
    y = x if over else huge_pages.empty_like(x)
    run(*pointers(x, residual, y, key), least_kept(dropped), scale, x.numel(), torch.get_num_threads())
    return y
