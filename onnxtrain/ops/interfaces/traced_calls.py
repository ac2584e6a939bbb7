"""Operators that stand for functions of kernels in a trace (`execute/inductor_program`).

Such a function chooses its kernel in each call by strides, enabled backends and elements. A trace of it would fix the
choice of one call. Its operator is one node of the trace, and runs the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TRACED_CALLS: dict[Callable[..., Any], Callable[..., Any]] = {}
