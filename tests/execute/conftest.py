from __future__ import annotations

from pathlib import Path

import pytest

from onnxtrain.execute.regions import build
from onnxtrain.native import background


@pytest.fixture
def regions_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of compiled regions, no refusals of other tests, and no pauses after throttled work."""
    monkeypatch.setenv("ONNXTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_refused", {})
    monkeypatch.setattr(background, "_PAUSE", 0.0)
    return tmp_path / "cache" / "regions"
