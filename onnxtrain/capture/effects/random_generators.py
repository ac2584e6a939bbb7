"""Refuse a forward that samples from a generator that a graph cannot sample from: the first sample would be repeated.

Samples of Python and numpy (`random.random() < self.layerdrop`) are constants to torch.export.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from onnxtrain.errors import CaptureError


@dataclass(frozen=True)
class _Generator:
    name: str
    state: Callable[[], Any]
    restore: Callable[[Any], Any]


@contextmanager
def left_alone(module: torch.nn.Module) -> Iterator[None]:
    """Restore the generators that forward advances while `module` is captured.

    A sample that another thread takes meanwhile counts as forward's: nothing tells them apart.

    Raises:
        CaptureError: forward advanced one.
    """
    before = [(generator, pickle.dumps(generator.state())) for generator in _generators(module)]
    changed: list[str] = []
    try:
        yield
    finally:
        for generator, state in before:
            if pickle.dumps(generator.state()) != state:
                generator.restore(pickle.loads(state))  # written above
                changed.append(generator.name)
    if changed:
        raise CaptureError(
            "forward draws random numbers that a graph would repeat at every step",
            where=type(module).__name__,
            got=", ".join(changed),
            todo="the module runs in PyTorch; draw with PyTorch's own functions, as torch.rand, to have it captured",
        )


def _generators(module: torch.nn.Module) -> Iterator[_Generator]:
    """The global ones, and those that are attributes of submodules."""
    yield _Generator("Python's random", random.getstate, random.setstate)
    yield _Generator("numpy.random", np.random.get_state, np.random.set_state)
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            where = f"{path}.{name}" if path else name
            match value:
                case random.Random():
                    yield _Generator(where, value.getstate, value.setstate)
                case np.random.RandomState():
                    yield _Generator(where, value.get_state, value.set_state)
                case np.random.Generator():
                    bits = value.bit_generator
                    yield _Generator(where, partial(getattr, bits, "state"), partial(setattr, bits, "state"))
                case torch.Generator():
                    yield _Generator(where, value.get_state, value.set_state)
