"""The cache is in the user's cache folder or, if that is not writable, in a private temporary folder."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest

from onnxtrain.system import cache_folder as module
from onnxtrain.system.cache_folder import cache_folder

pytestmark = pytest.mark.everywhere


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a folder of temporary files; no variable names another."""
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    for variable in (module.VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    module._usable.cache_clear()
    yield tmp_path
    module._usable.cache_clear()


def test_default(folders: Path) -> None:
    assert cache_folder("native") == folders / "home" / ".cache" / "onnxtrain" / "native"


def test_variables(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folders / "xdg"))
    assert cache_folder("native") == folders / "xdg" / "onnxtrain" / "native"
    monkeypatch.setenv(module.VARIABLE, str(folders / "own"))
    assert cache_folder("native") == folders / "own" / "native"


@pytest.mark.parametrize("home", ["a file", "~", "read-only"])
def test_home_that_cannot_be_written(
    home: str, folders: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if home == "a file":
        (folders / "file").touch()
        monkeypatch.setenv("HOME", str(folders / "file"))
    elif home == "~":  # no home is known
        monkeypatch.setattr(module.os.path, "expanduser", lambda path: path)
    else:
        monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        first, second = cache_folder("native"), cache_folder("regions")
    assert first.parent == second.parent
    assert first.parent.parent == folders / "temporary"
    assert first.parent.stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    assert str(first.parent) in record.getMessage()
    assert module.VARIABLE in record.getMessage()


def test_temporary_folder_of_another_user(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write to it: no library is loaded from there."""
    monkeypatch.setenv("HOME", "/dev/null")
    taken = folders / "temporary" / f"onnxtrain-{module._user()}"
    taken.mkdir()
    taken.chmod(0o777)
    chosen = cache_folder("native").parent
    assert chosen != taken
    assert chosen.parent == folders / "temporary"


def test_nothing_can_be_written(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    assert cache_folder("native") == Path("/dev/null/.cache/onnxtrain/native")
