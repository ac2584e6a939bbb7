"""Measure the peak memory of a step, above the memory held before it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(step: Callable[[], object], device: str = "cpu") -> int:
    """Return the peak of the bytes that PyTorch's allocator allocated and had not freed during `step`.

    On a GPU the allocator counts them, on a CPU they come from profiler events. Memory that a library allocates itself,
    such as oneDNN's scratchpad, is not included.
    """
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
