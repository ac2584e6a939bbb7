"""Operators that stand for functions of kernels in a trace (`execute/inductor_program`).

Such a function chooses its kernel by what it is called with: strides, enabled backends, elements. A trace of it would
keep the choice for one call. Its operator is one node of the trace, and runs the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TRACED_CALLS: dict[Callable[..., Any], Callable[..., Any]] = {}
