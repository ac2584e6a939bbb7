from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtrain.execute import recorded_program
from onnxtrain.execute.recorded_program import RecordedProgram, Recorder
from onnxtrain.execute.regions import build
from onnxtrain.native import background
from tests.execute.cpu_recorder import CpuRecorder, Recorders


@pytest.fixture
def regions_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of compiled regions, no refusals of other tests, and no pauses after throttled work."""
    monkeypatch.setenv("ONNXTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_refused", {})
    monkeypatch.setattr(background, "_PAUSE", 0.0)
    return tmp_path / "cache" / "regions"


@pytest.fixture(scope="module")
def everything() -> Iterator[Recorders]:
    log = Recorders()

    class Watched(RecordedProgram):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            log.programs.append(self)

    def recorder_for(device: torch.device) -> Recorder:
        return CpuRecorder(log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onnxtrain.execute.cuda_recorder.recorder_for", recorder_for)
        patch.setattr(recorded_program, "RecordedProgram", Watched)
        yield log


@pytest.fixture
def log(everything: Recorders, monkeypatch: pytest.MonkeyPatch) -> Recorders:
    """Forget all calls and warnings."""
    monkeypatch.setattr("onnxtrain.log._logged", set())
    for program in everything.programs:
        program.entries.clear()
    everything.busy, everything.error, everything.settled = False, None, 0
    everything.since()
    return everything
