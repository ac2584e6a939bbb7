"""The model sweep: its page, from the outcomes of a run, and its command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.model_sweep import __main__ as command
from tests.model_sweep import page as model_page
from tests.model_sweep.catalog import Entry
from tests.model_sweep.page import page, read_outcomes
from tests.model_sweep.training import Outcome

OUTCOMES = [
    Outcome(Entry("BertForMaskedLM", "masked language", "BertConfig"), "graph", "", 1.234, 0.056, 1, "abc1234"),
    Outcome(Entry("LEDModel", "language", "LEDConfig"), "pieces", "a `u0` |\nsize", 12.0, 0.25, 3),
    Outcome(Entry("TimmBackbone", "backbone", "TimmBackboneConfig"), "unset", "ImportError: timm"),
]


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (command, model_page):
        monkeypatch.setattr(module, "entries", lambda: [outcome.entry for outcome in OUTCOMES])


@pytest.mark.usefixtures("catalog")
def test_page_of_outcomes(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    file.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in OUTCOMES))
    outcomes = read_outcomes(file)
    assert outcomes == OUTCOMES
    text = page(outcomes, "5.23")
    assert "on commit abc1234;" in text
    assert "Of 3 classes, 2 run in eager PyTorch" in text
    lines = text.splitlines()
    assert "| 1 | 50.0% | train as one graph |" in lines
    assert "| 1 | 50.0% | train in pieces: several graphs, with PyTorch between them |" in lines
    assert "| BertForMaskedLM | masked language | one graph |  | 1.23 | 0.06 |" in lines
    assert "| LEDModel | language | pieces | `a 'u0' \\| size` | 12.00 | 0.25 |" in lines
    assert "| TimmBackbone | backbone | `ImportError: timm` |" in lines
    assert not any("wrong" in line for line in lines)


@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize("selection", [["--only", "Bert"], ["--every", "3"]], ids=["only", "every"])
def test_a_partial_run_writes_no_page(selection: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--write", *selection])
    assert "--write needs all classes, and 2 have no outcome, such as LEDModel" in capsys.readouterr().err


@pytest.mark.usefixtures("catalog")
def test_a_name_of_no_class_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "Bert", "LedMdel"])
    error = capsys.readouterr().err
    assert "--only LedMdel: no class of transformers' auto mappings has this text in its name" in error
    assert "similar names: LEDModel" in error


@pytest.mark.usefixtures("catalog")
def test_a_part_replaces_its_outcomes_and_their_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, written = tmp_path / "outcomes.jsonl", tmp_path / "models.md"
    file.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in OUTCOMES))
    monkeypatch.setattr(command, "PAGE", written)
    monkeypatch.setattr(command, "isolated", lambda entry, limit: Outcome(entry, "graph", "", 2.0, 0.1, 1))
    monkeypatch.setattr(command, "measured_commit", lambda: "def5678")
    assert command.main(["--keep", "--only", "LED", "--out", str(file), "--write"]) == 0
    lines = written.read_text().splitlines()
    assert "| 2 | 100.0% | train as one graph |" in lines
    assert "| LEDModel | language | one graph |  | 2.00 | 0.10 |" in lines
    assert "| BertForMaskedLM | masked language | one graph |  | 1.23 | 0.06 |" in lines
    assert any("on commits abc1234, def5678;" in line for line in lines)
    assert [outcome.kind for outcome in read_outcomes(file)] == ["graph", "graph", "unset"]
