"""The device on which ops and models are compared with eager PyTorch: the CPU, or that of `pytest --device`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_devices = [torch.device("cpu")]


def set_device(name: str) -> None:
    """Compare on a device; called once, before tests are collected."""
    _devices[:] = [torch.device(name)]


def device() -> torch.device:
    """Return the device on which to compare."""
    return _devices[0]


@contextmanager
def on_cpu() -> Iterator[None]:
    """Compare on the CPU in between."""
    name = str(device())
    set_device("cpu")
    try:
        yield
    finally:
        set_device(name)


def random_state() -> torch.Tensor:
    """Return the state of the device's default generator."""
    return torch.cuda.get_rng_state() if device().type == "cuda" else torch.get_rng_state()


def drop_comparably(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Switch off the dropout that cannot be compared on this device, in place.

    On a GPU the mask depends on the dtype, so that float64 is a reference for float64 only; and recurrent layers drop
    by a state of cuDNN, which manual_seed does not reset.
    """
    if device().type == "cuda":
        for part in module.modules():
            if dtype != torch.float64 or isinstance(part, torch.nn.RNNBase):
                for name, value in vars(part).items():
                    if (name == "p" or "drop" in name) and isinstance(value, float):
                        setattr(part, name, 0.0)
    return module


@contextmanager
def exact_functions() -> Iterator[None]:
    """Keep eager PyTorch from the inference path of nn.TransformerEncoder, whose GELU on a GPU is approximate."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled and device().type == "cpu")
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
