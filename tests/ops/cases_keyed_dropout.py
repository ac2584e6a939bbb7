"""Cases of keyed dropout, alone and after relu. The reference computes SplitMix64 in Python integers."""

import torch

from tests.op_case import OpCase, Spec

_MASK_64 = 2**64 - 1


def word(key: list[int], counter: int) -> int:
    """Return word `counter` of a key's stream: SplitMix64 as published, with the second half of the key mixed in."""
    z = (counter * 0x9E3779B97F4A7C15 + key[0]) & _MASK_64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9 ^ key[1]) & _MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK_64
    return z ^ z >> 31


def keyed_samples(key: torch.Tensor, count: int) -> torch.Tensor:
    """Return 16 random bits per element as signed integers: int64 [count]."""
    halves = key.tolist()
    words = [word(halves, c) for c in range((count + 3) // 4)]
    bits = torch.tensor([w >> 16 * lane & 0xFFFF for w in words for lane in range(4)][:count], dtype=torch.int64)
    return torch.where(bits >= 2**15, bits - 2**16, bits)


def keyed_dropout(dropped: int):
    def reference(x: torch.Tensor, key: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        mask = keyed_samples(key, x.numel()).view(x.shape) >= dropped - 2**15
        y = x * mask * torch.ones((), dtype=x.dtype).div_(1 - dropped / 2**16)
        return y if residual is None else y + residual

    return reference


def relu_dropout(dropped: int):
    def reference(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return keyed_dropout(dropped)(torch.relu(x), key)

    return reference


def relu_dropout_grad(dropped: int):
    def reference(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = torch.ones((), dtype=dy.dtype).div_(1 - dropped / 2**16)
        return torch.where(y > 0, dy * scale, torch.zeros_like(dy))

    return reference


def _sampled_key() -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64).random_(-(2**63), None)


KEY = Spec("2", dtype="int64", make=lambda sizes, dtype, g: torch.tensor([-(2**62) - 12345, 987654321987654321]))

CASES = [
    OpCase("onnxtrain", "DropoutKey", (), _sampled_key, bodies=False),
    *(
        OpCase(
            "onnxtrain",
            "KeyedDropout",
            (Spec("b s h"), KEY, *residual),
            keyed_dropout(dropped),
            attributes={"dropped": dropped},
            label=f"{dropped}{'-residual' * len(residual)}",
        )
        for dropped in (6554, 49152)
        for residual in ((), (Spec("b s h"),))
    ),
    *(
        case
        for dropped in (6554, 49152)
        for case in (
            OpCase(
                "onnxtrain",
                "ReluDropout",
                (Spec("b s h"), KEY),
                relu_dropout(dropped),
                attributes={"dropped": dropped},
                label=str(dropped),
            ),
            OpCase(
                "onnxtrain",
                "ReluDropoutGrad",
                (Spec("b s h"), Spec("b s h")),
                relu_dropout_grad(dropped),
                attributes={"dropped": dropped},
                label=str(dropped),
            ),
        )
    ),
]
