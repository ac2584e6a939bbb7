"""A CUDA device that is not there: tensors with shapes, dtypes and a device, and no memory.

PyTorch's FakeTensorMode computes the metadata of CUDA tensors wherever the CUDA build of PyTorch is installed; without
a driver it cannot run a kernel. Operators on two devices raise, and so does reading an element on the host
(`.item()`, `nonzero`), which on a GPU would wait for it.

Not shown by this: speed, CUDA-graph recording, races between streams, and the values of CUDA kernels.
"""

from __future__ import annotations

import sys
import unittest.mock
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend

from onnxtrain.capture.structure import PLAIN_TENSORS
from onnxtrain.execute import program
from onnxtrain.torch_compat import aten_kernels

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs the CUDA build of PyTorch on a machine without a GPU: make test-gpu-plans",
)

H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


def fake_mode() -> FakeTensorMode:
    """A mode in which CUDA tensors can be made; tensors of the CPU stay real."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True)


@contextmanager
def fake_gpu(mode: FakeTensorMode) -> Iterator[None]:
    """PyTorch says that there is an H100, and onnxtrain takes fake tensors for tensors."""
    replaced: dict[str, Any] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda *device: (9, 0),
        "torch.cuda.get_device_name": lambda *device: H100.name,
        "torch.cuda.get_device_properties": lambda *device: H100,
        "torch.cuda.is_bf16_supported": lambda *args, **kwargs: True,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.cuda.get_rng_state": lambda *device: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "torch.cuda.set_rng_state": lambda *state: None,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(unittest.mock.patch(name, value))
        for module in [m for name, m in sys.modules.items() if name.startswith("onnxtrain.")]:
            if "PLAIN_TENSORS" in vars(module):
                stack.enter_context(unittest.mock.patch.object(module, "PLAIN_TENSORS", PLAIN_TENSORS | {FakeTensor}))
        real_constant = program.constant_tensor
        stack.enter_context(unittest.mock.patch.object(aten_kernels.SDP_CHOICE, "get", return_value=_attention_backend))
        on_gpu = lambda value: FakeConstant(real_constant(value), mode)
        stack.enter_context(unittest.mock.patch.object(program, "constant_tensor", on_gpu))
        yield


def _attention_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> int:
    """Return the kernel that `_fused_sdp_choice` chooses on an H100, as in PyTorch 2.13's sdp_utils.cpp."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and mask is None and q.size(-1) == v.size(-1) <= 256 and not (is_causal and q.size(2) != k.size(2)):
        return int(SDPBackend.FLASH_ATTENTION.value)
    if not enable_gqa and (half or q.dtype == torch.float32):
        return int(SDPBackend.EFFICIENT_ATTENTION.value)
    return int(SDPBackend.MATH.value)


class FakeConstant:
    """A constant of a program, which is moved to the device before it runs.

    `real` maps the id of the moved one to it.
    """

    def __init__(self, tensor: torch.Tensor, mode: FakeTensorMode, real: dict[int, torch.Tensor] | None = None) -> None:
        self._tensor, self._mode, self._real = tensor, mode, real

    def to(self, device: torch.device) -> torch.Tensor:
        with self._mode:
            fake = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, device=device)
        if self._real is not None:
            self._real[id(fake)] = self._tensor
        return fake


@contextmanager
def cuda_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast for CUDA tensors; `torch.autocast("cuda")` switches itself off without a GPU. None: no autocast."""
    if dtype is None:
        yield
        return
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_dtype("cuda", before)
        torch.set_autocast_enabled("cuda", False)
