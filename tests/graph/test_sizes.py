"""Sizes as integers."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from onnxtrain.graph import sizes


def test_values_of_sizes() -> None:
    symbols = {"s0": 5, "s1": 3}
    assert [sizes.evaluate(size, symbols) for size in (7, "s1", "2*s0 + s1", "max(1, s0//2)")] == [7, 3, 13, 2]
    with pytest.raises(NameError, match="s2"):
        sizes.evaluate("s2", symbols)


def test_a_size_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def count(source: str, *others: Any) -> Any:
        compiled.append(source)
        return builtins.compile(source, *others)

    monkeypatch.setattr(sizes, "compile", count, raising=False)
    for batch in (1, 2, 3):
        assert sizes.evaluate("7*batch_size_of_this_test", {"batch_size_of_this_test": batch}) == 7 * batch
    assert compiled == ["7*batch_size_of_this_test"]
