"""Scripts from the guide of ONNX Runtime Training run unchanged."""

from __future__ import annotations

import json
import logging
import runpy
import sys
from pathlib import Path

import onnx
import pytest
import torch
from transformers import BertForSequenceClassification

from onnxtrain import cli
from onnxtrain.testing import assert_no_worse_than_eager

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def interpreter_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def run(name: str, *arguments: object) -> None:
    assert cli.main(["run", str(SCRIPTS / name), *map(str, arguments)]) == 0


def numbers(text: str, word: str) -> list[float]:
    (line,) = [line for line in text.splitlines() if line.startswith(word)]
    return [float(each) for each in line.split()[1:]]


def test_fine_tuning(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = BertForSequenceClassification.train
    caplog.set_level(logging.INFO, "onnxtrain")
    config = {"FallbackPolicy": ["FALLBACK_DISABLE"], "UseStaticShape": True, "OnnxOpsetVersion": 18}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"FP16_Optimizer does not change onnxtrain\.optim\.fused_adam\.FusedAdam"):
        run("fine_tune.py", "--ort", "--json", tmp_path / "config.json", "--output", tmp_path)
    by_graph = capsys.readouterr().out
    state = torch.load(tmp_path / "model.pt")
    with pytest.warns(UserWarning, match="FP16_Optimizer"):
        run("fine_tune.py", "--output", tmp_path)
    in_pytorch = capsys.readouterr().out
    state_in_pytorch = torch.load(tmp_path / "model.pt")
    monkeypatch.setattr(BertForSequenceClassification, "train", lambda model, mode=True: train(model.double(), mode))
    with pytest.warns(UserWarning, match="FP16_Optimizer"):
        run("fine_tune.py", "--output", tmp_path)
    losses, eager, exact = (numbers(text, "losses") for text in (by_graph, in_pytorch, capsys.readouterr().out))
    wide = torch.tensor(exact, dtype=torch.float64)
    assert_no_worse_than_eager("losses", torch.tensor(losses), torch.tensor(eager), wide)
    assert losses[-1] < losses[0]
    assert numbers(by_graph, "accuracy") == numbers(in_pytorch, "accuracy")
    assert state.keys() == state_in_pytorch.keys()
    assert "after training: process" in by_graph
    assert "BertForSequenceClassification: first capture" in caplog.text
    assert "UseStaticShape" in caplog.text
    stages = ("torch_exported", "optimized_pre_grad", "optimized", "execution_model")
    for stage in stages:
        (opset,) = [o.version for o in onnx.load(tmp_path / f"bert_{stage}_training.onnx").opset_import if not o.domain]
        assert opset == 18


def test_investigating(tmp_path: Path) -> None:
    for kind in ("pt", "ort"):
        run("investigate.py", tmp_path, kind)
    from onnxruntime.training.utils.hooks import GlobalSubscriberManager

    GlobalSubscriberManager.unsubscribe()
    files = [{p.relative_to(tmp_path / k) for p in (tmp_path / k).rglob("*")} for k in ("pt_out", "ort_out")]
    assert files[0] == files[1]
    assert {str(f).split("/")[0] for f in files[0]} == {"step_1", "step_2"}
    assert Path("step_1/hidden_backward") in files[0]
    module = "onnxruntime.training.utils.hooks.merge_activation_summary"
    arguments = [
        "--pt_dir",
        tmp_path / "pt_out",
        "--ort_dir",
        tmp_path / "ort_out",
        "--output_dir",
        tmp_path / "merged",
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "-m", module, *map(str, arguments)])
    assert ended.value.code == 0
    assert (tmp_path / "merged" / "merge_ort" / "step_2_.txt").exists()


def test_samplers(capsys: pytest.CaptureFixture[str]) -> None:
    run("samplers.py")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 4
    for epoch in ("0", "1"):
        of_ranks = [row for row in rows if row[1] == epoch]
        assert of_ranks[0][5] == of_ranks[1][5]  # as many batches
        assert all(int(row[7]) <= 64 for row in of_ranks)


def test_on_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("on_device.py", tmp_path)
    first, last, evaluated = (float(word) for word in capsys.readouterr().out.replace("eval", "").split()[1:])
    assert last < 0.5 * first
    assert evaluated < last


def test_parts_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs as `python -m onnxtrain run trainer_parts.py`."""
    sys.argv = ["onnxtrain", "run", str(SCRIPTS / "trainer_parts.py")]
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("onnxtrain", run_name="__main__")
    assert ended.value.code == 0
    rows = [[float(word) for word in line.split()] for line in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows] == [0, 5e-4, 1e-3, 8.75e-4, 7.5e-4, 6.25e-4]
    assert [row[2] for row in rows] == [1024, 1024, 2048, 2048, 1024, 1024]


def test_a_script_sees_its_own_arguments_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "script.py").write_text("import sys, beside\nprint(sys.argv[1:], beside.WORD, __name__)\n")
    assert cli.main(["run", str(tmp_path / "script.py"), "-m", "--help", "x"]) == 0
    assert capsys.readouterr().out == "['-m', '--help', 'x'] beside __main__\n"


def test_an_error_of_a_script_has_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch.distributed's writes the rank before each line
    script = tmp_path / "script.py"
    script.write_text("from onnxtrain.errors import CaptureError\nraise CaptureError('no luck')\n")
    assert cli.main(["run", str(script)]) == 1
    shown = capsys.readouterr().err
    assert f'File "{script}", line 2' in shown
    assert "no luck" in shown
    script.write_text("1 / 0\n")
    assert cli.main(["run", str(script)]) == cli.FAILED
    shown = capsys.readouterr().err.splitlines()
    assert (shown[1], shown[-1]) == (f'  File "{script}", line 1, in <module>', "ZeroDivisionError: division by zero")
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", str(script)])
    assert ended.value.code == 3
