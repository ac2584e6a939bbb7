"""The command line."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest

from onnxtrain import cli
from onnxtrain.cli import ops
from onnxtrain.errors import GraphError
from onnxtrain.ops import OPS

ROOT = pathlib.Path(__file__).parent.parent


def test_operators_page_is_current() -> None:
    committed = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    assert committed == ops.page(), "run: python -m onnxtrain ops --write docs/operators.md"


def test_page_lists_every_operator_once() -> None:
    text = ops.page()
    for _, name in OPS:
        assert f"| **{name}** `(" in text, name
    assert text.count("| **") == len(OPS)


def test_ops_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", "^com.microsoft::GeluGrad$"]) == 0
    shown = capsys.readouterr().out
    assert "GeluGrad" in shown
    assert "written out" in shown
    assert "1 operators" in shown


def test_ops_finds_by_aten_overload(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", r"aten\.silu\.default"]) == 0
    assert "QuickGelu" in capsys.readouterr().out


def test_ops_writes_the_page(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "page.md"
    assert cli.main(["ops", "--write", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == ops.page()


@pytest.mark.parametrize(("pattern", "message"), [("nosuchop", "no operator"), ("(", "regular expression")])
def test_ops_says_what_is_wrong_with_a_pattern(pattern: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", pattern]) == cli.FAILED
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["nosuchcommand"]])
def test_unknown_commands_are_refused_with_the_known_ones(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == cli.FAILED == 2
    assert "command" in capsys.readouterr().err


def test_errors_of_the_package_are_shown_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: Any) -> int:
        raise GraphError("it broke", todo="mend it")

    monkeypatch.setattr(ops, "run", fail)
    assert cli.main(["ops"]) == cli.FAILED
    assert "mend it" in capsys.readouterr().err


def test_every_command_has_its_module() -> None:
    folder = pathlib.Path(cli.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8")}
    assert modules == {name.replace("-", "_") for name in cli.COMMANDS}


def test_help_needs_no_torch() -> None:
    code = """
import sys
from onnxtrain import cli
try:
    cli.main(["--help"])
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "ops" in done.stdout


@pytest.mark.parametrize("command", [["ops", "--write"], ["options", "--write"], ["run"]], ids=" ".join)
def test_a_path_that_is_not_there(command: list[str], tmp_path: pathlib.Path) -> None:
    file = str(tmp_path / "missing" / "page.md")
    done = subprocess.run(
        [sys.executable, "-m", "onnxtrain", *command, file], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert file in said.replace("\n", "")
    assert "to do:" in said
    assert "Traceback" not in said
