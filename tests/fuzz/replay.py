"""Run the program of a seed again and show it: forward, options, and each result on all sides with its bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from onnxtrain.execute.tolerance import error_and_bound
from tests.fuzz.differential import Sides, largest_gradient
from tests.fuzz.worker import case_of, judged

_ELEMENTS = 12  # of a result that are shown


def replayed(seed: int) -> Iterator[str]:
    """The lines of the report."""
    case = case_of(seed)
    program, configuration = case.program, case.configuration
    yield program.source(configuration.entry == "regional")
    for tensor in program.inputs:
        yield f"{tensor.name}: {tensor.dtype} {tensor.shapes}{' with a gradient' if tensor.trained else ''}"
    yield f"\n{configuration}"
    verdict = judged(case).verdict
    yield f"{verdict.kind}: {verdict.detail}"
    if verdict.kind not in ("equal", "wrong", "unstable"):
        return
    sides = Sides(program, configuration)
    eager, exact, ours = sides.eager(), sides.exact(), sides.ours()
    for call, (mine, theirs, right) in enumerate(zip(ours, eager, exact, strict=True)):
        for name in theirs:
            if name != "random state":
                yield f"\ncall {call}, {name}"
                yield from _shown(mine.get(name), theirs[name], right[name], largest_gradient(name, right))


def _shown(mine: Any, theirs: Any, right: Any, largest: float) -> Iterator[str]:
    for side, value in (("onnxtrain", mine), ("eager", theirs), ("float64", right)):
        if isinstance(value, torch.Tensor):
            elements = ", ".join(f"{v:.9g}" for v in value.flatten()[:_ELEMENTS].tolist())
            value = f"{value.dtype} {tuple(value.shape)} [{elements}{', …' if value.numel() > _ELEMENTS else ''}]"
        yield f"  {side:<10} {value}"
    if isinstance(theirs, torch.Tensor) and isinstance(mine, torch.Tensor) and mine.shape == theirs.shape:
        error, allowed, scale = error_and_bound(mine, theirs, right, largest) if theirs.numel() else (0.0, 0.0, 0.0)
        yield f"  error      {error:.3e}, allowed {allowed:.3e} (scale {scale:.3e})"
