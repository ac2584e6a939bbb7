"""Of several processes that need the same capture, one makes it and the others load it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule, log
from onnxtrain.capture.stored import claim, folder
from onnxtrain.capture.stored.claim import Claim, claimed
from onnxtrain.frontend.ort_module import engine_of

fcntl = pytest.importorskip("fcntl")  # without file locks each process makes its captures


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """A function that runs another in a second thread: locks of files that are opened twice exclude each other, too."""
    threads: list[threading.Thread] = []

    def start(target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target)
        threads.append(thread)
        thread.start()
        return thread

    yield start
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("is_stored", [True, False])
def test_those_who_wait_learn_whether_the_capture_is_stored(is_stored: bool, tmp_path: Path, other: Any) -> None:
    file = tmp_path / "folder" / ".key.lock"
    seen: list[Claim] = []
    both_wait_no_more = threading.Barrier(2, timeout=60)

    def wait() -> None:
        with claimed(file) as second:
            seen.append(second)
            if not is_stored:  # they capture at the same time
                both_wait_no_more.wait()

    with claimed(file) as first:
        threads = [other(wait), other(wait)]
        threads[0].join(0.3)
        assert not seen
        first.is_stored = is_stored
    for thread in threads:
        thread.join()
    assert not first.waited
    assert [each.waited for each in seen] == [is_stored] * 2
    assert not file.exists()


def test_after_an_error_those_who_wait_capture(tmp_path: Path, other: Any) -> None:
    file, seen = tmp_path / ".key.lock", []

    def wait() -> None:
        with claimed(file) as second:
            seen.append(second.waited)

    with pytest.raises(ValueError, match="refused"), claimed(file):  # noqa: PT012
        thread = other(wait)
        thread.join(0.2)
        raise ValueError("refused")
    thread.join()
    assert seen == [False]


def test_waiting_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(claim, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(log, "_logged", set())
    with claimed(tmp_path / ".key.lock"), claimed(tmp_path / ".key.lock") as second:
        assert not second.waited
    assert "capturing in this one, too" in caplog.text


def test_a_module_loads_the_capture_that_another_process_has_made(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def step() -> None:
        module = ORTModule(nn.Linear(3, 2), cache_dir=tmp_path)
        module(torch.ones(1, 3))
        reports.append(engine_of(module).newest())

    reports: list[Any] = []
    step()
    (file,) = tmp_path.glob("*.capture")
    lock = tmp_path / f".{file.name.split('-')[0]}.lock"
    hidden = file.rename(tmp_path / "hidden")
    reached = threading.Event()
    original = folder.CaptureFolder.lock_file
    monkeypatch.setattr(folder.CaptureFolder, "lock_file", lambda *args: reached.set() or original(*args))
    caplog.set_level(logging.INFO, "onnxtrain")
    with claimed(lock) as first:
        thread = other(step)
        assert reached.wait(60)
        thread.join(0.2)
        hidden.rename(file)
        first.is_stored = True
    thread.join()
    assert "loaded the capture" in caplog.text
    assert reports[1].captured.stored_name == file.name
