"""The command line."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest

from onnxtrain import cli
from onnxtrain.cli import ops
from onnxtrain.cli.page import write_page
from onnxtrain.errors import GraphError, OptionError
from onnxtrain.frontend.verification import Difference

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = pathlib.Path(cli.__file__).parent.parent


@pytest.mark.everywhere
def test_ops_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", "^com.microsoft::GeluGrad$"]) == 0
    shown = capsys.readouterr().out
    assert "GeluGrad" in shown
    assert "written out" in shown
    assert "1 operators" in shown


def test_ops_finds_by_aten_overload(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", r"aten\.silu\.default"]) == 0
    assert "QuickGelu" in capsys.readouterr().out


# Invalid arguments, and a part of the error for each.
WRONG: dict[str, dict[str, str]] = {
    "": {"": "show what each pass applied", "nosuchcommand": "invalid choice: 'nosuchcommand'"},
    "artifacts": {"": "required: model", "no.onnx": "file not found: no.onnx", "FILE --loss x": "invalid choice: 'x'"},
    "explain": {
        "": "required: MODEL", "none": "no such file or folder", "FILE": "something else",
        "FILE:no": "no function 'no'", "FILE:asks": "a function without required arguments",
        "FILE:crooked": "accepts its inputs", "FILE:f --batch x": "got x",
    },
    "memory": {"": "required: MODEL", "FILE:f --largest -3": "got -3", "FILE:f --html none/x": "got none/x"},
    "ops": {"nosuchop": "No operator matches", "(": "a regular expression"},
    "options": {"--json none": "file not found: none", "--json FILE": "Expecting value"},
    "plan-scale": {
        "": "required: MODEL", "FILE:f --world 8 --shard 3x2": "a product of 8", "FILE:f --world 8 --shard x": "8x128",
        "FILE:f --world 8 --link fast": "such as 400Gb",
    },
    "report": {"": "required: MODEL", "FILE:f --steps 0": "got 0", "FILE:f --html none/x": "an existing folder"},
    "run": {"": "required: script", "none.py": "Script not found", "-m nosuchmodule": "Module not found"},
    "train": {"": "required: folder", "no --data digits": "folder not found: no", "FOLDER --data x": "are missing"},
    "tune": {"--shapes 3x": "such as 2048x384x1536", "--dtype int": "invalid choice: 'int'"},
    "verify": {"": "required: MODEL", "none": "no such file or folder"},
}  # fmt: skip
USERS_FILE = """
import torch
def asks(argument): pass
def crooked(): return torch.nn.Linear(4, 4), torch.ones(2, 4, dtype=torch.long)
def raises(): return Net(), torch.ones(2, 4)
class Net(torch.nn.Linear):
    def __init__(self): super().__init__(4, 4)
    def forward(self, x): return x @ torch.ones(3, 3)
"""


@pytest.fixture
def users_file(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "users_file.py").write_text(USERS_FILE)
    return tmp_path / "users_file.py"


def test_every_command_has_invalid_arguments_here() -> None:
    assert WRONG.keys() == {"", *cli.COMMANDS}


@pytest.mark.parametrize(("command", "given"), [(c, g) for c, table in WRONG.items() for g in table])
def test_an_invalid_argument_is_named(
    command: str, given: str, users_file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{command} {given}".replace("FILE", str(users_file)).replace("FOLDER", str(users_file.parent)).split()
    try:
        code = cli.main(words)
    except SystemExit as stopped:
        code = int(str(stopped.code))
    shown = capsys.readouterr()
    assert code == cli.USAGE
    assert WRONG[command][given] in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert not shown.out


@pytest.mark.everywhere
def test_errors_of_the_users_code_are_shown_as_its_own(
    users_file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(model: str) -> str:
        assert cli.main(["explain", model]) == cli.FAILED
        text = capsys.readouterr().err
        assert str(PACKAGE) not in text
        return text

    assert "return x @ torch.ones(3, 3)" in shown(f"{users_file}:raises")
    (users_file.parent / "open.py").write_text("def f(")
    assert "SyntaxError" in shown(f"{users_file.parent / 'open.py'}:f")
    (users_file.parent / "imports.py").write_text("import nosuchmodule")
    assert shown(f"{users_file.parent / 'imports.py'}:f").count("File ") == 1


def test_verify_prints_the_verdict(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_linear.py").write_text("import torch\ndef f(): return torch.nn.Linear(4, 4), torch.ones(2, 4)")
    command = ["verify", f"{tmp_path / 'users_linear.py'}:f"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.startswith("right: 3 tensors agree")
    monkeypatch.setattr("onnxtrain.frontend.verification._differences", lambda *sides: [Difference("output", 1.0, 0.1)])
    monkeypatch.setattr("onnxtrain.frontend.verification._first_operator", lambda *facts: None)
    assert cli.main(command) == cli.FAILED
    assert "WRONG" in capsys.readouterr().out


def test_errors_of_the_package_are_shown_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: Any) -> int:
        raise GraphError("it broke", todo="fix it")

    monkeypatch.setattr(ops, "run", fail)
    assert cli.main(["ops"]) == cli.FAILED
    assert "fix it" in capsys.readouterr().err


def test_every_command_has_its_module() -> None:
    folder = pathlib.Path(cli.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8")}
    assert modules == {name.replace("-", "_") for name in cli.COMMANDS}


@pytest.mark.everywhere
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


@pytest.mark.everywhere
def test_a_page_that_cannot_be_written() -> None:
    with pytest.raises(OptionError, match="No space left"):
        write_page(pathlib.Path("/dev/full"), "text")


@pytest.mark.slow
def test_only_commands_that_need_an_extra_ask_for_it() -> None:
    """The extra `ort` installs flatbuffers and onnxruntime; commands about modules need neither."""
    program = """
import sys
sys.modules.update(flatbuffers=None, onnxruntime=None)
from onnxtrain import cli
from onnxtrain.cli import explain, memory, ops, options, report, verify
print("imported")
sys.exit(cli.main(["train", "--help"]))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("imported\n", 1), ran.stderr
    assert "pip install 'onnxtrain[ort]'" in ran.stderr
    assert "Traceback" not in ran.stderr
