"""The most floating-point operations a second that the processor makes: multiply-adds on registers, and nothing else.

No matrix product can be faster: it makes the same multiply-adds, and reads memory besides.
"""

from __future__ import annotations

import math
import time

import torch

from onnxtrain.native import Library, read_sources

_SOURCE = r"""
// Twelve sums: enough for two units of a latency of four or five.
extern "C" void multiply_adds(int64_t threads, int64_t rounds, int64_t *operations, float *kept) {
    parallel_team(threads, [&](int64_t thread, int64_t team) {
        Vec<float> sums[12], factor = Vec<float>{} + 0.999f, addend = Vec<float>{} + 0.001f;
        for (int i = 0; i < 12; i++) sums[i] = Vec<float>{} + float(i + thread);
        for (int64_t r = 0; r < rounds; r++) {
            #pragma GCC unroll 12
            for (int i = 0; i < 12; i++) sums[i] = sums[i] * factor + addend;
        }
        for (int i = 0; i < 12; i++) kept[thread] += sums[i][0];  // else nothing need be computed
        if (thread == 0) *operations = team * rounds * 12 * LANES<float> * 2;
    });
}
"""
_LIBRARY = Library("peak", read_sources("vectors.h") + _SOURCE, {"multiply_adds": "iipp"})
_ROUNDS, _TRIALS = 2_000_000, 3


def peak_flops() -> float | None:
    """Operations a second in float32, with the threads that PyTorch has; None where nothing can be compiled."""
    if not _LIBRARY.wait():
        return None
    threads, operations = torch.get_num_threads(), torch.zeros((), dtype=torch.int64)
    kept = torch.zeros(threads)
    best = math.inf
    for _ in range(_TRIALS):
        started = time.perf_counter()
        _LIBRARY.functions.multiply_adds(threads, _ROUNDS, operations.data_ptr(), kept.data_ptr())
        best = min(best, time.perf_counter() - started)
    return operations.item() / best
