"""Who is timed. Each has a way to prepare a model; the step that follows is the same code for all."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.workloads import Forward, Workload

Prepare = Callable[[nn.Module], Forward]

EAGER = "eager"
ONNXTRAIN = "onnxtrain"
COMPILE = "torch.compile"


def _eager(model: nn.Module) -> Forward:
    return model


def _onnxtrain(model: nn.Module) -> Forward:
    # What this import costs is part of the first step's measurement.
    from onnxtrain import FallbackPolicy, ORTModule  # noqa: PLC0415

    # Falling back would time eager PyTorch against itself.
    return ORTModule(model, fallback_policy=FallbackPolicy.FALLBACK_DISABLE)


def _compile(model: nn.Module) -> Forward:
    return torch.compile(model)


def can_compile() -> bool:
    """Says whether torch.compile finds a C++ compiler, without which it cannot run on a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


CONTENDERS: dict[str, Prepare] = {EAGER: _eager, ONNXTRAIN: _onnxtrain, COMPILE: _compile}


class Stepper:
    """One contender with its own copy of the model; all copies have the same weights and see the same batch."""

    def __init__(self, workload: Workload, contender: str) -> None:
        torch.manual_seed(0)
        plain = workload.make_model().train()
        self._batch = workload.make_batch()
        self._loss = workload.loss
        self._parameters = list(plain.parameters())
        started = time.perf_counter()
        self._forward = CONTENDERS[contender](plain)
        self.prepare_s = time.perf_counter() - started

    def step(self) -> float:
        """Forward and backward onto cleared gradients; the seconds that they took."""
        started = time.perf_counter()
        for parameter in self._parameters:
            parameter.grad = None
        self._loss(self._forward, self._batch).backward()
        return time.perf_counter() - started
