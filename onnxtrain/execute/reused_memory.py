"""Memory of a program's tensors, kept from step to step: `process_wide="reuse_memory"`.

What a step frees, the C library gives back to the system, which clears it anew for the next step: of MiniLM's step of
1.25 s that took 0.16 (40,000 pages of 4 KB; 2 threads of an AMD EPYC). While a program runs, its tensors come from
memory that earlier ones have left (`native/allocator.cpp`). For that an allocator stands in front of PyTorch's, for the
whole process, from the first program's first run until the last program is collected. So a process holds between steps,
too, what a step needs at most, and up to a quarter more. It goes back when a program is collected.
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
    short=True,
    torch_headers=True,
)
_LEAST = 16 << 10  # bytes of a tensor, as there
_UNKNOWN = 32  # for a size that is not known yet


def reuse_memory(program: Program) -> None:
    """Lets a program reuse memory, as soon as what it takes is compiled; not where all its tensors are small."""
    if not _has_large(program.part):
        return
    LIBRARY.request()
    ordinary = program.run
    joined = threading.Event()

    def run(tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        native = LIBRARY.functions
        if native is None:
            return ordinary(tensors, given)
        if not joined.is_set():
            native.add_program()
            weakref.finalize(program, native.remove_program).atexit = False
            joined.set()
        native.begin_run()
        try:
            return ordinary(tensors, given)
        finally:
            native.end_run()

    program.run = run


def _has_large(part: Part) -> bool:
    """Whether a tensor in it is large, or may be: sizes that are not known yet count as moderately large."""
    read = (v for node in part.nodes for v in node.inputs if v is not None and v not in part.host)
    return any(math.prod(map(_number, sizes.dims_of(v))) * dtype_of(v).itemsize >= _LEAST for v in read)


def _number(size: sizes.Size) -> int:
    return size if isinstance(size, int) else _UNKNOWN
