"""Keep the memory of a program's tensors from step to step: `process_wide="reuse_memory"`.

The C library returns the memory that a step frees to the system, which clears it again for the next step: 0.16 s of
MiniLM's step of 1.25 s (40,000 pages of 4 KB; 2 threads of an AMD EPYC). While a program runs, its tensors reuse the
memory of earlier ones (`native/allocator.cpp`). This needs a caching allocator in front of PyTorch's, for the whole
process, from the first run of the first program until the last program is collected. Between steps, too, the process
then holds a step's peak and up to a quarter more. The memory is returned when a program is collected.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Sequence

import torch

from onnxtrain.execute.program import Program, Results
from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of
from onnxtrain.native import Library, read_sources
from onnxtrain.plan.cut import Part

LIBRARY = Library(
    "memory",
    read_sources("allocator.cpp"),
    {"add_program": "", "remove_program": "", "begin_run": "", "end_run": "", "trim": "", "count_bytes": "pp"},
    keeps_gil=True,
    torch_headers=True,
)
_MIN_BYTES = 16 << 10  # bytes of a tensor, as in allocator.cpp
_DYNAMIC_SIZE = 32  # for a symbolic dimension


def reuse_memory(program: Program) -> None:
    """Make a program reuse memory as soon as the allocator is compiled, unless all its tensors are small."""
    if not _has_large(program.part):
        return
    LIBRARY.request()
    ordinary = program.run
    is_registered = threading.Event()

    def run(tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        native = LIBRARY.functions
        if native is None:
            return ordinary(tensors, sizes_in)
        if not is_registered.is_set():
            native.add_program()
            weakref.finalize(program, native.remove_program).atexit = False
            is_registered.set()
        native.begin_run()
        try:
            return ordinary(tensors, sizes_in)
        finally:
            native.end_run()

    program.run = run


def _has_large(part: Part) -> bool:
    """Return whether a tensor is large, or may be: dynamic sizes count as moderately large."""
    read = (v for node in part.nodes for v in node.inputs if v is not None and v not in part.host)
    return any(math.prod(map(_expected_size, sizes.dims_of(v))) * dtype_of(v).itemsize >= _MIN_BYTES for v in read)


def _expected_size(size: sizes.Size) -> int:
    return size if isinstance(size, int) else _DYNAMIC_SIZE
