"""All workloads by name."""

from __future__ import annotations

from benchmarks.cpu_workloads import CPU_WORKLOADS
from benchmarks.gpu_workloads import GPU_WORKLOADS
from benchmarks.real_workloads import REAL_WORKLOADS

WORKLOADS = {**CPU_WORKLOADS, **GPU_WORKLOADS, **REAL_WORKLOADS}
