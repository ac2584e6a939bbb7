"""Parametrizations: `make test` runs a part of the cases, `make test-all` all of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
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


def covering(*parameters: Iterable[Any]) -> list[ParameterSet]:
    """Combine the values of several parameters; mark as slow all but so few that each value is in one of them.

    A value that is marked slow is in slow combinations only. The ids are those of one `parametrize` per parameter, if
    the first one here is the one next to the function.
    """
    columns = [[v if isinstance(v, ParameterSet) else pytest.param(v) for v in values] for values in parameters]
    fast = [[i for i, v in enumerate(c) if not any(mark.name == "slow" for mark in v.marks)] for c in columns]
    rows = _rows(fast)

    def combined(places: tuple[int, ...]) -> ParameterSet:
        chosen = [column[place] for column, place in zip(columns, places, strict=True)]
        values, marks = [v for each in chosen for v in each.values], [m for each in chosen for m in each.marks]
        named = any(each.id is not None for each in chosen)
        id_of = "-".join(str(each.values[0]) if each.id is None else str(each.id) for each in chosen) if named else None
        together = pytest.param(*values, marks=marks, id=id_of)
        return together if places in rows else _slow(together)

    return [combined(places) for places in itertools.product(*(range(len(column)) for column in columns))]


def _rows(columns: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """As many rows as the longest column has values, with each value of each column; different values meet in them."""
    rows: list[tuple[int, ...]] = []

    def uses(*places: tuple[int, int]) -> int:
        return sum(all(row[column] == value for column, value in places) for row in rows)

    def least_used(before: Sequence[int], column: int) -> int:
        def cost(value: int) -> tuple[int, int]:
            return uses((column, value)), sum(uses(place, (column, value)) for place in enumerate(before))

        return min(columns[column], key=cost)

    for _ in range(max(map(len, columns))):
        row: list[int] = []
        for column in range(len(columns)):
            row.append(least_used(row, column))
        rows.append(tuple(row))
    return rows


def _slow(value: Any) -> ParameterSet:
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
    return pytest.param(value, marks=pytest.mark.slow)
