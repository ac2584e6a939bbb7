"""Parametrizations: `make test` runs a part of the cases, `make test-all` all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Mark the parameters as slow, except some that show the same."""
    return [value if value in fast else _slow(value) for value in values]


def slow_but_every(step: int, values: Iterable[Any]) -> list[Any]:
    """Mark the parameters as slow, except the first and each `step`-th after it: neighbours show much the same."""
    return [_slow(value) if index % step else value for index, value in enumerate(values)]


def slow_after(count: int, values: Iterable[Any], kind: Callable[[Any], Hashable]) -> list[Any]:
    """Mark the parameters as slow, except the first `count` of each kind."""
    seen: Counter[Hashable] = Counter()

    def is_slow(value: Any) -> bool:
        seen[kind(value)] += 1
        return seen[kind(value)] > count

    return [_slow(value) if is_slow(value) else value for value in values]


def _slow(value: Any) -> ParameterSet:
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
    return pytest.param(value, marks=pytest.mark.slow)
