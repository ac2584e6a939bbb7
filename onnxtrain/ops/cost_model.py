"""Expected times on a machine, before anything is measured."""

from __future__ import annotations

import torch

from onnxtrain.system.machine import Machine

Shapes = tuple[tuple[int, ...], ...]  # of a node's inputs; () for an absent input


def expected_seconds(library: str, flops: float, machine: Machine, dtype: torch.dtype = torch.float32) -> float:
    """Return the expected seconds of a GEMM in this element type by one of the libraries in `Rates.gflops`."""
    rates = machine.rates
    gflops = rates.gflops[library] * rates.narrow.get(dtype, 1.0) * machine.threads
    return rates.overheads[library] + flops / gflops / 1e9


def widening_seconds(elements: int, machine: Machine) -> float:
    """Return the expected seconds for widening or rounding this many elements."""
    rates = machine.rates
    return 2 * rates.overheads["aten"] + elements / rates.conversions / machine.threads


def moving_seconds(byte_count: int, machine: Machine) -> float:
    """Return the expected seconds for reading or writing this many bytes of tensors."""
    rates = machine.rates
    return rates.overheads["aten"] + byte_count / rates.bandwidth / machine.threads
