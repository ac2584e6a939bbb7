"""Check captured functions against eager PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.graph.values import ATEN
from onnxtrain.testing import assert_no_worse_than_eager
from tests.op_case import Spec
from tests.torch_version import max_captures

# The first sizes are captured, the others run on the same capture.
SIZES: tuple[Mapping[str, int], ...] = ({"b": 3, "s": 4, "h": 6}, {"b": 2, "s": 5, "h": 6}, {"b": 1, "s": 7, "h": 6})
X = Spec("b s h")


class FunctionModule(torch.nn.Module):
    """Wrap a function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def _run(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the outputs, and the gradients for fixed random cotangents."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    result = module(*leaves)
    outputs = list(_flat(result))
    generator = torch.Generator().manual_seed(5)
    pairs = [(o, torch.randn(o.shape, generator=generator).to(o.dtype)) for o in outputs if o.requires_grad]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not inputs:
        return outputs, []
    gradients = torch.autograd.grad([o for o, _ in pairs], inputs, [c for _, c in pairs], allow_unused=True)
    return outputs, list(gradients)


Functions = Mapping[str, tuple[Any, ...]]  # a name -> the function, and a spec for each of its tensors


def in_groups(functions: Functions, size: int = 8) -> list[Any]:
    """Return parameters of tests: functions of equal specs in groups of at most `size`, for `check_captures`."""
    by_specs: dict[tuple[Spec, ...], list[str]] = {}
    for name, (_, *specs) in functions.items():
        by_specs.setdefault(tuple(specs), []).append(name)
    groups = [names[i : i + size] for names in by_specs.values() for i in range(0, len(names), size)]
    return [pytest.param(names, id=f"{names[0]}..{names[-1]}" if names[1:] else names[0]) for names in groups]


def check_captures(functions: Functions, names: Sequence[str], sizes: Sequence[Mapping[str, int]] = SIZES) -> ORTModule:
    """Do as `check_capture` for each of these functions, with tensors of its own, in one graph of all.

    A capture takes most of the time of a test of one function.
    """
    calls = [functions[name][0] for name in names]
    specs: Sequence[Spec] = functions[names[0]][1:]

    def call_all(*stacked: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            result for i, call in enumerate(calls) for result in _flat(call(*(tensor[i] for tensor in stacked)))
        )

    return check_capture(call_all, *(Stacked(spec, len(calls)) for spec in specs), sizes=sizes, names=names)


@dataclass(frozen=True)
class Stacked:
    """Tensors of one spec for several functions, stacked in a new first axis."""

    spec: Spec
    count: int

    def tensor(self, symbols: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        return torch.stack([self.spec.tensor(symbols, dtype, generator) for _ in range(self.count)])


def _unstacked(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [part for gradient in gradients for part in ([None] if gradient is None else gradient.unbind())]


def _flat(result: Any) -> Sequence[torch.Tensor]:
    return result if isinstance(result, (tuple, list)) else [result]


def check_capture(
    function: Callable[..., Any],
    *specs: Spec | Stacked,
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[Mapping[str, int]] = SIZES,
    aten: bool = False,
    names: Sequence[str] = (),
) -> ORTModule:
    """Compare outputs and gradients of the captured `function` with eager's, at all sizes with one capture.

    Args:
        function: takes one tensor per spec.
        specs: the tensors; by default one float tensor [b, s, h].
        dtype: of the float tensors.
        sizes: values of the symbolic sizes, the first for the capture.
        aten: whether the graph may have ATen nodes.
        names: of functions that take a tensor each of stacked ones, whose gradients are compared one by one.
    """
    module = FunctionModule(function)
    ours = ORTModule(module)
    for size_values in sizes:
        generator = torch.Generator().manual_seed(17)
        tensors = [spec.tensor(size_values, dtype, generator) for spec in specs or (X,)]
        exact_tensors = [t.double() if t.is_floating_point() else t for t in tensors]
        with warnings.catch_warnings():  # a fallback is an error
            warnings.filterwarnings("error", message=".*runs in PyTorch")
            got = _run(ours, tensors)
        eager, exact = _run(module, tensors), _run(module, exact_tensors)
        if names:
            got, eager, exact = ((outputs, _unstacked(stacks)) for outputs, stacks in (got, eager, exact))
        for kind, g, e, x in zip(("output", "gradient"), got, eager, exact, strict=True):
            assert len(g) == len(e), f"{kind}s: {len(g)}, eager has {len(e)}"
            for index, (ours_value, eager_value, exact_value) in enumerate(zip(g, e, x, strict=True)):
                label = f"{kind} {index} of {', '.join(names) or 'the function'} at {dict(size_values)}"
                assert (ours_value is None) == (eager_value is None), f"{label}: {ours_value}, eager has {eager_value}"
                if eager_value is not None:
                    assert_no_worse_than_eager(label, ours_value, eager_value, exact_value)
    engine = engine_of(ours)
    assert 1 <= engine.captures <= max_captures(ours), f"{engine.captures} captures"
    calls = [n.attributes["operator"].as_string() for n in engine._newest.captured.model.graph if n.domain == ATEN]
    assert aten or not calls, f"not converted: {', '.join(calls)}"
    return ours
