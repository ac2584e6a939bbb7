"""The peak memory of a step: what it holds at once on top of what was there before it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(step: Callable[[], object], device: str = "cpu") -> int:
    """The highest sum of what PyTorch's allocator gave out and took back during `step`.

    On a GPU the allocator counts; on a CPU the profiler's events do. Memory that a library takes by itself (oneDNN's
    scratch space, say) is not seen.
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
