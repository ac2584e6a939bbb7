"""The device on which ops and models are compared with eager PyTorch: the CPU, or that of `pytest --device`."""

from __future__ import annotations

import torch

_devices = [torch.device("cpu")]


def set_device(name: str) -> None:
    """Compare on a device; called once, before tests are collected."""
    _devices[:] = [torch.device(name)]


def device() -> torch.device:
    """Return the device on which to compare."""
    return _devices[0]


def random_state() -> torch.Tensor:
    """Return the state of the device's default generator."""
    return torch.cuda.get_rng_state() if device().type == "cuda" else torch.get_rng_state()
