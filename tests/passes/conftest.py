"""Under --slow, comparisons with eager run in float64 as well."""

from __future__ import annotations

import pytest
import torch

from tests.passes import less_work


@pytest.fixture(autouse=True)
def all_dtypes_under_slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--slow"):
        monkeypatch.setattr(less_work, "DTYPES", (torch.float32, torch.float64))
