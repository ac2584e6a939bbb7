"""Which attention kernels PyTorch may choose, and in which order: `torch.nn.attention.sdpa_kernel` sets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnxtrain.torch_compat.internal import Internal

Kernels: TypeAlias = tuple[SDPBackend, ...]

_SWITCHES: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}
PRIORITY = Internal[Callable[[], Sequence[int]]](
    "sdp_priority",
    lambda: torch._C._get_sdp_priority_order,
    why="tells which attention kernel eager tries first, where sdpa_kernel(.., set_priority=True) changed it",
    fallback=lambda: (),
    cost="backward takes another kernel than forward if set_priority=True holds for forward alone",
    check=lambda part: {kernel.value for kernel in _SWITCHES} <= set(part()),
)


def enabled_kernels() -> Kernels:
    """Return the kernels that PyTorch may choose now, the first choice first."""
    enabled = [kernel for kernel, is_enabled in _SWITCHES.items() if is_enabled()]
    order = [int(kernel) for kernel in PRIORITY.get()()]
    return tuple(sorted(enabled, key=lambda k: order.index(k.value) if k.value in order else len(order)))


def only(kernels: Kernels) -> AbstractContextManager[object]:
    """Let PyTorch choose among these kernels only, in this order."""
    return sdpa_kernel([*kernels], set_priority=True)
