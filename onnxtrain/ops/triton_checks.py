"""Check a Triton kernel on the GPU that is to run it, in its first calls: the host waits for the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from onnxtrain.log import warn_once

Tensor = torch.Tensor
_TOLERANCE = 1e-3  # relative; a wrong kernel differs by more
_TIMED_RUNS = 5


def agrees(
    kernel: str,
    device: torch.device,
    run: Callable[[], Sequence[Tensor | None]],
    expected: Mapping[str, Tensor | None],
) -> bool:
    """Return whether a kernel runs, and its results are right up to rounding; a warning says so if not.

    Args:
        kernel: what it computes, for the warning.
        device: where.
        run: calls it; the results are in the order of `expected`.
        expected: the results of the operators that it replaces, by name; None for those that the call does not compute.
    """
    try:
        pairs = zip(expected.items(), run(), strict=True)
        wrong = [name for (name, right), got in pairs if not (right is None or got is None or _are_close(got, right))]
        problem = f"its {' and '.join(wrong)} differ from those of the operators that it replaces" if wrong else ""
    except Exception as error:  # noqa: BLE001  # whatever Triton, its compiler or the driver raises
        problem = f"{type(error).__name__}: {error}"
    if problem:
        warn_once(f"the Triton kernel of {kernel} is not used on {device}: {problem}")
    return not problem


def is_faster(run: Callable[[], object], other: Callable[[], object]) -> bool:
    """Return whether `run` takes less time on the current CUDA device than `other`, in the fastest of some runs."""
    times: dict[Callable[[], object], list[float]] = {run: [], other: []}
    for _ in range(_TIMED_RUNS):
        for each, of_each in times.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            each()
            end.record()
            end.synchronize()
            of_each.append(begin.elapsed_time(end))
    return min(times[run]) < min(times[other])


def _are_close(got: Tensor, expected: Tensor) -> bool:
    """Return whether the elements agree up to rounding of the largest finite one."""
    finite = expected[expected.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    tolerance = max(_TOLERANCE, 2 * torch.finfo(expected.dtype).eps)
    return torch.allclose(got, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
