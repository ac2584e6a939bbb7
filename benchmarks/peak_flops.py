"""Measure the processor's peak FLOP/s, by multiply-adds on registers and nothing else.

No GEMM can be faster: it does the same multiply-adds, and also reads memory.
"""

from __future__ import annotations

import math
import time

import torch

from onnxtrain.native import Library, read_sources

_SOURCE = r"""
// Twelve sums: enough for two FMA units with a latency of four or five cycles.
extern "C" void multiply_adds(int64_t threads, int64_t rounds, int64_t *operations, float *kept) {
    parallel_team(threads, [&](int64_t thread, int64_t team) {
        Vec<float> sums[12], factor = Vec<float>{} + 0.999f, addend = Vec<float>{} + 0.001f;
        for (int i = 0; i < 12; i++) sums[i] = Vec<float>{} + float(i + thread);
        for (int64_t r = 0; r < rounds; r++) {
            #pragma GCC unroll 12
            for (int i = 0; i < 12; i++) sums[i] = sums[i] * factor + addend;
        }
        for (int i = 0; i < 12; i++) kept[thread] += sums[i][0];  // else the compiler removes the loop
        if (thread == 0) *operations = team * rounds * 12 * LANES<float> * 2;
    });
}
"""
_LIBRARY = Library("peak", read_sources("vectors.h") + _SOURCE, {"multiply_adds": "iipp"})
_ROUNDS, _TRIALS = 2_000_000, 3


def peak_flops() -> float | None:
    """Return the peak FLOP/s in float32, with PyTorch's number of threads; None without a compiler."""
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
