"""`onnxtrain artifacts`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain import cli
from tests.device.stock import Stock
from tests.device.test_artifacts_imports import by_hand, node, weight


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = {"body.w": weight(4, 6), "fc.w": weight(6, 3), "fc.b": weight(3)}
    nodes = [
        node("MatMul", ["x", "body.w"], ["h"]),
        node("MatMul", ["h", "fc.w"], ["m"]),
        node("Add", ["m", "fc.b"], ["y"]),
    ]
    path = tmp_path / "model.onnx"
    onnx.save(by_hand(nodes, weights, ["n", 4]), path)
    return path


def test_trains_the_parameters_that_match_the_patterns(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = [
        "--loss",
        "cross-entropy",
        "--optimizer",
        "adamw",
        "--train",
        "fc.*",
        "--freeze",
        "body.*",
        "--clip-norm",
        "1",
    ]
    assert cli.main(["artifacts", str(model), *given, "-o", str(out), "--portable"]) == 0
    assert "2 trainable parameters, 21 elements: fc.w, fc.b" in capsys.readouterr().out
    run = Stock(out)
    assert (run.facts["trainable"], run.facts["frozen"]) == (["fc.w", "fc.b"], ["body.w"])
    assert run.facts["portable"]
    x, labels = weight(5, 4), np.array([0, 1, 2, 0, 1])
    before = float(run.step(x, labels)[0])
    run.update()
    assert float(run.step(x, labels)[0]) < before


def test_frozen_parameters_are_not_trained_by_default(model: Path, tmp_path: Path) -> None:
    assert cli.main(["artifacts", str(model), "--freeze", "body.*", "-o", str(tmp_path / "out")]) == 0
    facts = Stock(tmp_path / "out").facts
    assert (facts["trainable"], facts["frozen"]) == (["fc.w", "fc.b"], ["body.w"])


def test_trains_all_by_default(model: Path, tmp_path: Path) -> None:
    given = ["--loss", "mse", "--optimizer", "sgd", "--momentum", "0.9", "--prefix", "a_", "-o", str(tmp_path)]
    assert cli.main(["artifacts", str(model), *given]) == 0
    assert Stock(tmp_path, "a_").facts["trainable"] == ["body.w", "fc.w", "fc.b"]


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        (["--train", "nothing*"], cli.USAGE, "one of body.w, fc.w, fc.b"),
        (["--learn-scales"], cli.USAGE, "add --qat"),
        (["--freeze", "*"], cli.FAILED, "No parameter is chosen for training"),
        (["--loss-input", "nowhere"], cli.FAILED, "no value of this name"),
        (["--also-output", "nowhere"], cli.FAILED, "no such outputs"),
        (["--clip-norm", "0"], cli.FAILED, "must be positive"),
        (["-o", __file__], cli.FAILED, "folder for the artifacts cannot be created"),
    ],
)
def test_invalid_arguments_are_named(
    model: Path, given: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["artifacts", str(model), *given]) == code
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("content", [b"no model", b""])
def test_a_file_that_is_not_a_model(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some.onnx"
    path.write_bytes(content)
    assert cli.main(["artifacts", str(path)]) == cli.FAILED
    assert "not an ONNX model" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [[], [1]])
def test_a_loss_that_does_not_fit_the_output(
    columns: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    onnx.save(by_hand(nodes, {"w": weight(4, *columns)}, ["n", 4]), tmp_path / "model.onnx")
    assert cli.main(["artifacts", str(tmp_path / "model.onnx"), "-o", str(tmp_path)]) == cli.FAILED
    assert "at least two classes, got 'y'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "training_model.onnx").exists()
