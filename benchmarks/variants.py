"""The variants to time. Each prepares a model in its own way; all share the code of the training step."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from benchmarks.workload import Batch, Forward, Workload

Prepare = Callable[[nn.Module], Forward]

EAGER = "eager"
ONEDNN = "eager, oneDNN Linears"
ONNXTRAIN = "onnxtrain"
REGIONS = "onnxtrain, regions"
ALL_REGIONS = "onnxtrain, all regions"
INDUCTOR = "onnxtrain, Inductor"
CUDA_GRAPHS = "onnxtrain, CUDA graphs"
COMPILE = "torch.compile"
COMPILE_DYNAMIC = "torch.compile dynamic"


def _eager(model: nn.Module) -> Forward:
    return model


def _onnxtrain(model: nn.Module, **options: Any) -> Forward:
    # The time of this import counts as part of the first step.
    from onnxtrain import FallbackPolicy, ORTModule  # noqa: PLC0415

    # Falling back would time eager PyTorch against itself.
    return ORTModule(model, fallback_policy=FallbackPolicy.FALLBACK_DISABLE, **options)


# Dynamo caches compiled graphs by code object, and reuses a graph of equal sizes for any model. So each of these two
# has its own function, or the second would run the graph of the first.


def _compile(model: nn.Module) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return torch.compile(forward)


def _compile_dynamic(model: nn.Module) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return torch.compile(forward, dynamic=True)


class _OneDnnLinear(torch.autograd.Function):
    """y[t, n] = x[t, k] @ w[n, k]ᵀ + b[n] and its gradients, all by oneDNN's inner product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            narrow = torch.get_autocast_dtype("cpu")
            x, weight, bias = x.to(narrow), weight.to(narrow), None if bias is None else bias.to(narrow)
        ctx.save_for_backward(x, weight)
        return _inner_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, columns = dy.reshape(-1, dy.size(-1)), x.reshape(-1, x.size(-1))
        dx = _inner_product(rows, weight.t(), None).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, _inner_product(rows.t(), columns.t(), None), rows.sum(0) if ctx.needs_input_grad[2] else None


def _inner_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _with_onednn(model: nn.Module) -> Forward:
    """Run all Linears of a model, and the transposed ones of transformers, by oneDNN. Parameters are unchanged."""
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.forward = lambda x, own=part: _OneDnnLinear.apply(x, own.weight, own.bias)
        elif isinstance(part, Conv1D):
            part.forward = lambda x, own=part: _OneDnnLinear.apply(x, own.weight.t(), own.bias)
    return model


def can_compile() -> bool:
    """Return whether torch.compile finds a C++ compiler, which it requires on a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


VARIANTS: dict[str, Prepare] = {
    EAGER: _eager,
    ONEDNN: _with_onednn,
    ONNXTRAIN: _onnxtrain,
    REGIONS: functools.partial(_onnxtrain, kernels="fused"),
    ALL_REGIONS: functools.partial(_onnxtrain, kernels="fused-all"),
    INDUCTOR: functools.partial(_onnxtrain, kernels="inductor"),
    CUDA_GRAPHS: functools.partial(_onnxtrain, cuda_graphs=True),
    COMPILE: _compile,
    COMPILE_DYNAMIC: _compile_dynamic,
}
COMPILING = (COMPILE, COMPILE_DYNAMIC)
OWN = (ONNXTRAIN, REGIONS, ALL_REGIONS, INDUCTOR, CUDA_GRAPHS)  # those that tune themselves while they run
USUAL = (EAGER, ONEDNN, ONNXTRAIN, INDUCTOR, CUDA_GRAPHS, *COMPILING)  # those that are timed by default


def variants_of(workload: Workload) -> tuple[str, ...]:
    """Return the variants of a workload; if it names none, those of a CPU. oneDNN has bfloat16 only on some."""
    if workload.variants:
        return workload.variants
    onednn = workload.device == "cpu" and (not workload.narrow or onednn_has_bfloat16())
    return tuple(name for name in VARIANTS if name not in (INDUCTOR, CUDA_GRAPHS) and (onednn or name != ONEDNN))


def onednn_has_bfloat16() -> bool:
    """Return whether oneDNN's inner product supports bfloat16 on this processor; without AVX-512 it does not."""
    try:
        _inner_product(*torch.ones(2, 4, 4, dtype=torch.bfloat16), None)
    except RuntimeError:
        return False
    return True


PARTS = ("gradients cleared", "forward", "loss outside the model", "backward", "optimizer")


class Stepper:
    """One variant with its own copy of the model; all copies have the same weights and see the same batches."""

    def __init__(self, workload: Workload, variant: str, model: nn.Module) -> None:
        """Prepare a copy of `model`; the time is `prepare_s`."""
        plain = copy.deepcopy(model)
        self._loss = workload.loss
        self._on_gpu = workload.device == "cuda"
        # Not the frozen ones: 4-bit weights are bytes, and AdamW refuses them.
        self._parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-4, fused=True) if workload.optimized else None
        self.losses: list[float] = []
        started = time.perf_counter()
        self._forward = VARIANTS[variant](plain)
        self.prepare_s = time.perf_counter() - started

    def step(self, batch: Batch) -> float:
        """Clear the gradients, run forward, backward and the optimizer; return the seconds."""
        started = time.perf_counter()
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._loss(self._forward, batch)
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        if self._on_gpu:
            torch.cuda.synchronize()
        taken = time.perf_counter() - started
        self.losses.append(loss.item())
        return taken

    def parts(self, batch: Batch) -> tuple[float, ...]:
        """Return the seconds of each of `PARTS` in a step on a CPU."""
        forward_s = 0.0

        def forward(*inputs: Any, **named: Any) -> Any:
            nonlocal forward_s
            begun = time.perf_counter()
            result = self._forward(*inputs, **named)
            forward_s += time.perf_counter() - begun
            return result

        times = [time.perf_counter()]
        for parameter in self._parameters:
            parameter.grad = None
        times.append(time.perf_counter())
        loss = self._loss(forward, batch)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        if self._optimizer is not None:
            self._optimizer.step()
        times.append(time.perf_counter())
        clearing, both, backward, optimizer = (end - begin for begin, end in itertools.pairwise(times))
        return clearing, forward_s, both - forward_s, backward, optimizer


def make_model(workload: Workload) -> nn.Module:
    """Make the model that all variants copy, in training mode, on its device."""
    torch.manual_seed(0)
    return workload.make_model().to(workload.device).train()


def make_batches(workload: Workload) -> list[Batch]:
    """Make the batches, on their device."""
    torch.manual_seed(1)
    return [{k: v.to(workload.device) for k, v in batch.items()} for batch in workload.make_batches()]
