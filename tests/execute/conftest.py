from __future__ import annotations

from pathlib import Path

import pytest

from onnxtrain.execute.regions import build


@pytest.fixture
def regions_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled regions, empty; and no region that did not compile in another test."""
    monkeypatch.setenv("ONNXTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_refused", {})
    return tmp_path / "cache" / "regions"
