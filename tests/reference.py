"""Compare results with a function of PyTorch by the one tolerance. Float64 judges, never a kernel in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from onnxtrain.testing import assert_no_worse_than_eager


def assert_matches(
    got: Any, reference: Callable[..., Any], *arguments: Any, name: str = "result", together: bool = False
) -> None:
    """Compare results with `reference(*arguments)` in the dtype of the arguments, and both with it in float64.

    Args:
        got: a tensor, an array or a number; a list of numbers for one tensor; or a mapping or sequence of these.
        reference: a function of PyTorch or a module, whose results have the same structure. It is called twice.
        arguments: arrays become tensors. Each call gets copies of tensors and modules, the second call in float64;
            a reference that is a module is copied too.
        name: of the result, for the message.
        together: judge rounding of tensors that are nearly zero by the largest of all, as for gradients of a model.
    """
    eager, exact = in_both(reference, *arguments)
    assert_each_no_worse(name, got, eager, exact, _largest(exact) if together else 0.0)


def in_both(reference: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Return the results of eager PyTorch in the dtype of the arguments, and those in float64."""
    eager, exact = (
        _copied(reference, dtype)(*(_copied(argument, dtype) for argument in arguments))
        for dtype in (None, torch.float64)
    )
    return eager, exact


def assert_matches_float64(got: Any, exact: Any, name: str = "result") -> None:
    """Compare results with those of numpy in float64, as if eager's only error were the rounding of its results.

    This is the one tolerance at its strictest, for references that are not in PyTorch and for short computations.
    """
    if isinstance(exact, Mapping):
        assert got.keys() == exact.keys(), f"{name}: got {', '.join(got)}, expected {', '.join(exact)}"
        for key, each in exact.items():
            assert_matches_float64(got[key], each, f"{name} {key!r}")
    else:
        wide = torch.from_numpy(np.array(exact))
        assert wide.dtype == torch.float64, f"{name}: the reference is in {wide.dtype}, not in float64"
        assert_each_no_worse(name, got, wide.float(), wide)


def with_gradients(loss: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a loss and its gradients by name, for parameters that require them."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    return {"loss": loss, **dict(zip(trained, torch.autograd.grad(loss.sum(), trained.values()), strict=True))}


def assert_each_no_worse(name: str, got: Any, eager: Any, exact: Any, largest: float = 0.0) -> None:
    """Apply `assert_no_worse_than_eager` to each tensor of mappings and sequences."""
    if isinstance(eager, Mapping):
        assert got.keys() == eager.keys(), f"{name}: got {', '.join(got)}, expected {', '.join(eager)}"
        for key, each in eager.items():
            assert_each_no_worse(f"{name} {key!r}", got[key], each, exact[key], largest)
    elif isinstance(eager, (list, tuple)):
        assert len(got) == len(eager), f"{name}: got {len(got)} results, expected {len(eager)}"
        for index, (mine, theirs, right) in enumerate(zip(got, eager, exact, strict=True)):
            assert_each_no_worse(f"{name} {index}", mine, theirs, right, largest)
    elif not isinstance(eager, torch.Tensor):
        assert got == eager, f"{name}: got {got}, expected {eager}"
    else:
        if isinstance(got, (float, list)):
            got = torch.tensor(got, dtype=eager.dtype)
        elif not isinstance(got, torch.Tensor):
            got = torch.from_numpy(np.array(got))
        assert_no_worse_than_eager(name, got.detach(), eager.detach(), exact.detach(), largest)


def _largest(results: Any) -> float:
    leaves = (t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor) and t.is_floating_point())
    return max((t.abs().max().item() for t in leaves if t.numel()), default=0.0)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Let PyTorch make tensors of float64, in a function that makes its inputs."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _copied(argument: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(argument, dict):
        return {key: _copied(each, dtype) for key, each in argument.items()}
    if isinstance(argument, (list, tuple)):
        return type(argument)(_copied(each, dtype) for each in argument)
    if isinstance(argument, torch.nn.Module):
        return copy.deepcopy(argument).to(dtype)
    if isinstance(argument, (np.ndarray, np.generic)):
        argument = torch.from_numpy(np.array(argument))
    if isinstance(argument, torch.Tensor):
        copied = argument.detach().clone()
        copied = copied.to(dtype) if dtype and copied.is_floating_point() else copied
        return copied.requires_grad_(argument.requires_grad)
    return argument
