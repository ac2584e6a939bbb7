"""The model sweep: its page, from the outcomes of a run, and its command line."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.model_sweep import __main__ as command
from tests.model_sweep import catalog as model_catalog
from tests.model_sweep import diffusers_models, training
from tests.model_sweep import page as model_page
from tests.model_sweep.catalog import Entry
from tests.model_sweep.in_float64 import in_float64
from tests.model_sweep.page import page, read_outcomes
from tests.model_sweep.torch_modules import MODULES, TorchModule
from tests.model_sweep.training import SIZES, Outcome, trained
from tests.zoo.checks import Comparison, ours
from tests.zoo.entry import Call, Draw

OUTCOMES = [
    Outcome(Entry("BertForMaskedLM", "masked language", "BertConfig"), "graph", "", 1.234, 0.056, 1, "abc1234"),
    Outcome(Entry("LEDModel", "language", "LEDConfig"), "pieces", "a `u0` |\nsize", 12.0, 0.25, 3),
    Outcome(Entry("TimmBackbone", "backbone", "TimmBackboneConfig"), "unset", "ImportError: timm"),
    Outcome(Entry("LSTM, packed", "recurrent", library="torch"), "graph", "", 0.5, 0.01, 1),
    Outcome(Entry("UNet2DModel", "unet", library="diffusers"), "graph", "", 3.0, 0.02, 1),
]
VERSIONS = {"transformers": "5.23", "torch": "2.13", "diffusers": "0.42.1"}


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (command, model_page):
        monkeypatch.setattr(module, "entries", lambda: [outcome.entry for outcome in OUTCOMES])
    monkeypatch.setattr(diffusers_models, "installed", lambda: True)
    monkeypatch.setattr(command, "_versions", lambda: VERSIONS)


@pytest.mark.usefixtures("catalog")
def test_page_of_outcomes(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    file.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in OUTCOMES))
    outcomes = read_outcomes(file)
    assert outcomes == OUTCOMES
    text = page(outcomes, VERSIONS)
    assert "on commit abc1234;" in text
    assert "transformers 5.23, PyTorch 2.13's own" in text
    assert "models of diffusers 0.42.1 (`pip install 'onnxtrain[diffusers]'`)" in text
    assert "Of 3 classes, 2 run in eager PyTorch" in text
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("## ")] == ["## transformers", "## PyTorch", "## diffusers"]
    assert "| LSTM, packed | recurrent | one graph |  | 0.50 | 0.01 |" in lines
    assert lines.count("| 1 | 100.0% | train as one graph |") == 2
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
    assert "have no outcome, such as UNet2DModel" in capsys.readouterr().err


@pytest.mark.usefixtures("catalog")
def test_an_incomplete_page_names_the_classes_that_were_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "models.md"
    monkeypatch.setattr(command, "PAGE", written)
    monkeypatch.setattr(command, "isolated", lambda entry, limit, layers: Outcome(entry, "graph"))
    arguments = ["--only", "Bert", "--out", str(tmp_path / "outcomes.jsonl"), "--write", "--incomplete"]
    assert command.main(arguments) == 0
    assert "Classes that were not run with this version of the sweep: 1 (UNet2DModel)." in written.read_text()


@pytest.mark.usefixtures("catalog")
def test_a_page_names_no_folder_of_the_machine() -> None:
    reason = "in /home/me/.venv/lib/python3.11/site-packages/transformers/x.py:3 and /home/me/onnxtrain/tests/y.py:4"
    outcome = Outcome(OUTCOMES[0].entry, "pieces", reason)
    text = page([outcome], {"transformers": "5", "torch": "2", "diffusers": "0"})
    assert "`in transformers/x.py:3 and tests/y.py:4`" in text


@pytest.mark.usefixtures("catalog")
def test_a_name_of_no_class_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "Bert", "LedMdel"])
    error = capsys.readouterr().err
    assert "--only LedMdel: no class of the sweep has this text in its name" in error
    assert "similar names: LEDModel" in error


@pytest.mark.usefixtures("catalog")
def test_a_part_replaces_its_outcomes_and_their_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, written = tmp_path / "outcomes.jsonl", tmp_path / "models.md"
    file.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in OUTCOMES))
    monkeypatch.setattr(command, "PAGE", written)
    monkeypatch.setattr(command, "isolated", lambda entry, limit, layers: Outcome(entry, "graph", "", 2.0, 0.1, 1))
    monkeypatch.setattr(command, "measured_commit", lambda: "def5678")
    assert command.main(["--keep", "--only", "LED", "--out", str(file), "--write"]) == 0
    lines = written.read_text().splitlines()
    assert "| 2 | 100.0% | train as one graph |" in lines
    assert "| LEDModel | language | one graph |  | 2.00 | 0.10 |" in lines
    assert "| BertForMaskedLM | masked language | one graph |  | 1.23 | 0.06 |" in lines
    assert any("on commits abc1234, def5678;" in line for line in lines)
    assert [outcome.kind for outcome in read_outcomes(file)] == ["graph", "graph", "unset", "graph", "graph"]


@pytest.mark.usefixtures("catalog")
def test_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "isolated", lambda entry, limit, layers: Outcome(entry, "graph"))
    file = tmp_path / "outcomes.jsonl"
    assert command.main(["--library", "torch", "diffusers", "--out", str(file)]) == 0
    assert [outcome.entry.name for outcome in read_outcomes(file)] == ["LSTM, packed", "UNet2DModel"]


@pytest.mark.usefixtures("catalog")
def test_outcomes_without_a_library_are_of_transformers(tmp_path: Path) -> None:
    rows = [asdict(outcome) for outcome in OUTCOMES[:3]]
    for row in rows:
        del row["entry"]["library"]
    file = tmp_path / "outcomes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_outcomes(file) == OUTCOMES[:3]


@pytest.mark.usefixtures("catalog")
def test_the_page_needs_diffusers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(diffusers_models, "installed", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["--write"])
    assert "pip install 'onnxtrain[diffusers]'" in capsys.readouterr().err


@pytest.mark.parametrize("installed", [False, True])
def test_the_catalog_has_diffusers_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers_models, "installed", lambda: installed)
    every = model_catalog.entries()
    assert len({entry.key for entry in every}) == len(every)
    assert {entry.library for entry in every} == {"transformers", "torch", *(["diffusers"] if installed else [])}


@pytest.mark.parametrize("name", sorted(diffusers_models.MODELS))
def test_calls_of_diffusers_models(name: str) -> None:
    """Both calls have the same arguments, of different sizes, and can be made without diffusers."""
    calls = [diffusers_models.MODELS[name].call(Draw(0), *size) for size in SIZES]
    first, second = (dict(call.to(torch.float64).tensors()) for call in calls)
    assert list(first) == list(second)
    assert any(first[name].shape != second[name].shape for name in first)


def test_nested_tensors_of_a_call_are_converted() -> None:
    call = Call(([torch.ones(2)], (torch.ones(1, dtype=torch.long), None)))
    [floats], (ints, nothing) = call.to(torch.float64).args
    assert (floats.dtype, ints.dtype, nothing) == (torch.float64, torch.long, None)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("GRU, bidirectional, two layers, dropout, batch first", marks=pytest.mark.slow),  # as the last
        "LSTM, projected, bidirectional, two layers",
        "MultiheadAttention, causal",
        "RNN, bidirectional, two layers, dropout, batch first",
    ],
)
def test_modules_of_torch_train_as_one_graph(name: str) -> None:
    """The loss that the sweep makes of the outputs of the last one nearly cancels, and is not compared."""
    outcome = trained(next(entry for entry in model_catalog.entries() if entry.key == ("torch", name)))
    assert (outcome.kind, outcome.detail) == ("graph", "")


class _OnlyInFloat32(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("no kernel for Double")
        return super().forward(x)


class _SetOnce(torch.nn.Linear):
    scaled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.scaled:
            self.scaled = True
            return super().forward(x)
        return super().forward(x) * 2


def test_a_module_that_its_first_call_changes_is_a_graph_from_the_second_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TorchModule("linear", lambda: _SetOnce(4, 4), lambda draw, batch, _: Call((draw.floats(batch, 4),)))
    monkeypatch.setitem(MODULES, "SetOnce", module)
    outcome = trained(Entry("SetOnce", "linear", library="torch"))
    assert outcome.kind == "settles", outcome.detail
    assert "scaled: absent" in outcome.detail


class _NamesFloat32(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x.float()).masked_fill(x > 2, torch.finfo(x.dtype).min)
        return torch.softmax(scores, -1, dtype=torch.float32).to(torch.float32) @ self.weight


def test_a_module_that_names_float32_runs_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TorchModule("linear", lambda: _NamesFloat32(4, 4), lambda draw, batch, _: Call((draw.floats(batch, 4),)))
    monkeypatch.setitem(MODULES, "NamesFloat32", module)
    outcome = trained(Entry("NamesFloat32", "linear", library="torch"))
    assert outcome.kind == "graph", outcome.detail
    with in_float64():
        exact = module.make().double()(torch.full((2, 4), 3.0, dtype=torch.float64))
    assert exact.dtype == torch.float64
    assert exact.isfinite().all()


@pytest.mark.parametrize(("calls", "kind"), [(2, "graph"), (100, "wrong")])
def test_chance_is_told_from_an_error_of_each_call(calls: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of the first calls are off by some 25 roundings."""
    left = itertools.repeat(1 + 3e-6, calls)

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        wrapped = ours(module)
        wrapped.register_forward_hook(lambda _module, _args, output: output * next(left, 1.0))
        return wrapped

    module = TorchModule("linear", lambda: torch.nn.Linear(4, 4), lambda draw, b, _: Call((draw.floats(b, 4),)))
    monkeypatch.setitem(MODULES, "Linear", module)
    monkeypatch.setattr(training, "Comparison", partial(Comparison, wrap=wrap))
    outcome = trained(Entry("Linear", "linear", library="torch"))
    assert outcome.kind == kind, outcome.detail


def test_a_module_that_does_not_run_in_float64_is_not_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TorchModule("linear", lambda: _OnlyInFloat32(4, 4), lambda draw, batch, _: Call((draw.floats(batch, 4),)))
    monkeypatch.setitem(MODULES, "OnlyInFloat32", module)
    outcome = trained(Entry("OnlyInFloat32", "linear", library="torch"))
    assert outcome.kind == "unset"
    assert outcome.detail.startswith("in float64: RuntimeError: ")
