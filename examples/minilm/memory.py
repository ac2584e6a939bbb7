"""The peak memory of one step: what forward and backward hold on top of parameters, gradients and optimizer state."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from examples.minilm.data import Batch


def peak_bytes(model: torch.nn.Module, batch: Batch) -> int:
    """The highest sum of what PyTorch's allocator gave out and took back during one forward and backward.

    The gradients are there before, and are added to: what is counted are activations and temporary tensors.
    """
    model(**batch).loss.backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(**batch).loss.backward()
    model.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    held, peak = 0, 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
