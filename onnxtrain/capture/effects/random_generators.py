"""Refuse a forward that samples from a generator that a graph cannot sample from.

torch.export makes samples of Python and numpy (`random.random() < self.layerdrop`) constants, which would be repeated
at every step.
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

from onnxtrain.capture.key.surroundings import Surroundings
from onnxtrain.errors import CaptureError


@dataclass(frozen=True)
class _Generator:
    name: str
    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]


@contextmanager
def refuse_other_generators(module: torch.nn.Module, surroundings: Surroundings) -> Iterator[None]:
    """Restore the generators that forward advances while `module` is captured, and refuse such a forward.

    A sample that another thread takes at the same time counts as forward's.

    Raises:
        CaptureError: forward advanced a generator of Python or numpy, one that is an attribute of a submodule, or one
            that it reaches outside of the module.
    """
    before = [(generator, pickle.dumps(generator.get_state())) for generator in _generators(module, surroundings)]
    advanced: list[str] = []
    try:
        yield
    finally:
        for generator, state in before:
            if pickle.dumps(generator.get_state()) != state:
                generator.set_state(pickle.loads(state))  # pickled above
                advanced.append(generator.name)
    if advanced:
        raise CaptureError(
            "forward samples from a random generator other than PyTorch's, and a graph would repeat that sample",
            where=type(module).__name__,
            expected="samples from PyTorch's default generator",
            got=f"samples from {', '.join(advanced)}",
            todo="the module runs in PyTorch; sample by PyTorch's functions, such as torch.rand, without a generator",
        )


def _generators(module: torch.nn.Module, surroundings: Surroundings) -> Iterator[_Generator]:
    """Yield the global generators of Python and numpy, those that are attributes of submodules, and those outside."""
    yield _Generator("Python's random", random.getstate, random.setstate)
    yield _Generator("numpy.random", np.random.get_state, np.random.set_state)
    values = {id(reference.value): (reference.path, reference.value) for reference in surroundings.references}
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            values[id(value)] = f"{path}.{name}" if path else name, value
    for name, value in values.values():
        match value:
            case random.Random():
                yield _Generator(name, value.getstate, value.setstate)
            case np.random.RandomState():
                yield _Generator(name, value.get_state, value.set_state)
            case np.random.Generator():
                bits = value.bit_generator
                yield _Generator(name, partial(getattr, bits, "state"), partial(setattr, bits, "state"))
            case torch.Generator():
                yield _Generator(name, value.get_state, value.set_state)
