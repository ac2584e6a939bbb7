"""Parametrizations of which `make test` runs a part, and `make test-all` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Mark the parameters as slow, except some that show the same."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
