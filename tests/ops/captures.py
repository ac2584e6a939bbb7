"""Checks what PyTorch's functions become when a module is captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.graph.values import ATEN
from onnxtrain.testing import Spec, assert_no_worse_than_eager
from tests.torch_version import most_captures

# The first sizes are captured, the others run on the same capture.
SIZES: tuple[Mapping[str, int], ...] = ({"b": 3, "s": 4, "h": 6}, {"b": 2, "s": 5, "h": 6}, {"b": 1, "s": 7, "h": 6})
X = Spec("b s h")


class OfTensors(torch.nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def _run(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs, and gradients under fixed random cotangents."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    result = module(*leaves)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    generator = torch.Generator().manual_seed(5)
    pairs = [(o, torch.randn(o.shape, generator=generator).to(o.dtype)) for o in outputs if o.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return outputs, []
    found = torch.autograd.grad([o for o, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
    return outputs, list(found)


def check_capture(
    function: Callable[..., Any],
    *specs: Spec,
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[Mapping[str, int]] = SIZES,
    aten: bool = False,
) -> ORTModule:
    """Runs `function` captured and in PyTorch: outputs and gradients agree, at all sizes, on one capture.

    Args:
        function: of one tensor per spec.
        specs: the tensors; one float tensor [b, s, h] where none are given.
        dtype: of the float tensors.
        sizes: what the symbolic sizes are, the first for the capture.
        aten: whether an ATen node may stand in the graph.
    """
    module = OfTensors(function)
    ours = ORTModule(module)
    for known in sizes:
        generator = torch.Generator().manual_seed(17)
        tensors = [spec.tensor(known, dtype, generator) for spec in specs or (X,)]
        exact_tensors = [t.double() if t.is_floating_point() else t for t in tensors]
        with warnings.catch_warnings():  # not captured
            warnings.filterwarnings("error", message=".*runs in PyTorch")
            got = _run(ours, tensors)
        eager, exact = _run(module, tensors), _run(module, exact_tensors)
        for kind, g, e, x in zip(("output", "gradient"), got, eager, exact, strict=True):
            assert len(g) == len(e), f"{kind}s: {len(g)}, eager has {len(e)}"
            for index, (mine, theirs, right) in enumerate(zip(g, e, x, strict=True)):
                assert (mine is None) == (theirs is None), f"{kind} {index}: {mine}, eager has {theirs}"
                if theirs is not None:
                    assert_no_worse_than_eager(f"{kind} {index} at {dict(known)}", mine, theirs, right)
    engine = engine_of(ours)
    assert 1 <= engine.captures <= most_captures(ours), f"{engine.captures} captures"
    calls = [n.attributes["operator"].as_string() for n in engine._newest.captured.model.graph if n.domain == ATEN]
    assert aten or not calls, f"not converted: {', '.join(calls)}"
    return ours
