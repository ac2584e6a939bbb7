"""Capture calls of Python's random module that return a number, as PythonOps.

    x * random.random()     ──>     python_op([], [], "random#0") -> [p];  x * p.item()

The node samples in every run, as eager does. Forward gets a symbolic number: it can compute with it and pass it to
PyTorch's functions. Where it branches on it, the answer has to be the same for all samples, as that of LayerDrop at
probability 0 is; otherwise the branch is refused (`guards.element_decisions`).
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onnxtrain.capture import source_location
from onnxtrain.capture.effects.sampling_class import sampling_class
from onnxtrain.capture.export.checkpoint_regions import current_region
from onnxtrain.capture.python_functions.calls import FunctionCalls
from onnxtrain.errors import CaptureError
from onnxtrain.ops.python_function.run_context import is_uncaptured
from onnxtrain.torch_compat.symbols import bound_float

_DTYPES = {float: torch.float64, int: torch.int64}
_FLOATS = ("random", "uniform", "gauss", "normalvariate", "lognormvariate", "triangular", "betavariate")
_MORE_FLOATS = ("expovariate", "gammavariate", "vonmisesvariate", "paretovariate", "weibullvariate")
_INTEGERS = ("randint", "randrange")
_NAMES = frozenset({*_FLOATS, *_MORE_FLOATS, *_INTEGERS})
_LARGEST = 2**62  # of arguments, so that samples are int64


def samples_number(value: Any) -> bool:
    """Return whether a value is a function of Python's random module that returns a number."""
    return getattr(value, "__self__", None) is _GENERATOR and value.__name__ in _NAMES


_GENERATOR = random.random.__self__  # type: ignore[attr-defined]  # of a method


def capturing_number(function: Callable[..., Any], calls: FunctionCalls) -> Callable[..., Any]:
    """Return a function that captures each call by the user's code as a node, and returns a symbolic number."""

    def call(*args: Any, **kwargs: Any) -> Any:
        is_by_user = source_location.is_user_file(sys._getframe(2).f_code.co_filename)  # 1 is `in_thread`
        is_repeated = current_region() != ""  # eager samples again when backward recomputes a checkpoint
        is_constant = all(isinstance(v, int | float) and abs(v) < _LARGEST for v in (*args, *kwargs.values()))
        if is_uncaptured() or is_repeated or not is_by_user or not is_constant:
            return function(*args, **kwargs)
        number = calls.apply(_sampling(function), (args, kwargs), {}).item()
        if (bounds := _bounds(function.__name__, args, kwargs)) is not None:
            bound_float(number, *bounds)
        return number

    return call


def _bounds(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the least and the largest sample, if comparisons with them are to be answered."""
    if name == "random":
        return 0.0, math.nextafter(1.0, 0.0)
    if name == "uniform":
        ends = [float(end) for end in (*args, *kwargs.values())]
        return min(ends), max(ends)
    return None


def _sampling(function: Callable[..., Any]) -> Any:
    def sample(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        number = function(*args, **kwargs)
        if type(number) not in _DTYPES:
            raise CaptureError(f"random.{function.__name__} returned a {type(number).__name__} in place of a number")
        return torch.tensor(number, dtype=_DTYPES[type(number)])

    return sampling_class(function, "random", sample)
