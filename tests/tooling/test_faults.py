"""The list of faults and its tool: in a small repository, a fault is detected, missed, or out of date."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from tools import faults

SOURCE = "def add(a, b):\n    return a + b\n\n\ndef negate(a):\n    return -a\n"
TESTS = """
import os
import pytest
from package import add, negate

@pytest.mark.parametrize("a", [1, 2])
def test_add(a):
    assert add(a, 1) == a + 1

def test_negate_of_zero():
    assert negate(0) == 0

@pytest.mark.slow
def test_negate():
    assert negate(1) == -1

def test_fails_anyway():
    assert negate is None
"""


def entry(name: str, find: str, replace: str, *tests: str, file: str = "package.py") -> str:
    listed = ", ".join(f'"tests/{test}"' for test in tests)
    return (
        f'[[fault]]\nname = "{name}"\nbreaks = "It breaks."\nfile = "{file}"\n'
        f"find = '{find}'\nreplace = '{replace}'\ntests = [{listed}]\n"
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "tests" / "faults").mkdir(parents=True)
    (root / ".venv").mkdir()
    (root / ".gitignore").write_text(".venv\n__pycache__\n")
    (root / "package.py").write_text(SOURCE)
    (root / "tests" / "test_package.py").write_text(textwrap.dedent(TESTS))
    (root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nmarkers = ["slow"]\naddopts = "--import-mode=importlib"'
    )
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def lists(root: Path, *entries: str) -> None:
    (root / "tests" / "faults" / "area.toml").write_text("\n".join(entries))


ADD = entry("minus", "a + b", "a - b", "test_package.py::test_add[2*")
NEGATE = entry(
    "sign", "return -a", "return a", "test_package.py::test_negate_of_zero", "test_package.py::test_fails_anyway"
)


@pytest.mark.slow  # PyTorch is imported for each run
def test_detected_and_undetected_faults(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists(repository, ADD, NEGATE)
    assert faults.main(["--jobs", "1"], repository) == 1
    printed = capsys.readouterr().out
    assert "1/2 minus: noticed tests/test_package.py::test_add[2]" in printed
    assert "2/2 sign: UNNOTICED" in printed
    assert "not counted, as it fails without a fault: tests/test_package.py::test_fails_anyway" in printed
    assert (repository / "package.py").read_text() == SOURCE
    assert faults.main(["--only", "minus"], repository) == 0


@pytest.mark.slow  # PyTorch is imported for each run
def test_another_commit(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "package.py").write_text(SOURCE.replace("a + b", "b + a"))
    written = (repository / "tests" / "test_package.py").read_text()
    (repository / "tests" / "test_package.py").write_text(written.replace("[1, 2]", "[1, 2, 3]"))
    lists(
        repository,
        entry("minus", "b + a", "b - a", "test_package.py::test_add"),
        entry(
            "sign", "return -a", "return 1 - a", "test_package.py::test_add[3]", "test_package.py::test_negate_of_zero"
        ),
        entry("zero", "return -a", "return 0", "test_package.py::test_fails_anyway"),
        entry("one", "return -a", "return 1", "test_package.py::test_add[3]"),
    )
    assert faults.main(["--ref", "HEAD"], repository) == 1
    at_head, now = capsys.readouterr().out.split("in the working tree")
    for name, then, later in (
        ("minus", "does not apply", "noticed tests/test_package.py::test_add[1]"),
        ("sign", "noticed tests/test_package.py::test_negate_of_zero", "noticed"),
        ("zero", "tests fail without the fault", "tests fail without the fault"),
        ("one", "no such test", "UNNOTICED"),
    ):
        assert f" {name}: {then} " in at_head
        assert f" {name}: {later} " in now


@pytest.mark.parametrize(
    ("listed", "complaint"),
    [
        (entry("minus", "a * b", "a - b", "test_package.py"), "`find` occurs 0 times in package.py, expected once"),
        (entry("minus", "a", "b", "test_package.py"), "`find` occurs"),
        (entry("minus", "a + b", "a -", "test_package.py"), "`replace` is invalid Python in package.py, line 2"),
        (entry("minus", "a + b", "a - b", "test_package.py", file="moved.py"), "moved.py does not exist"),
        (entry("minus", "a + b", "a - b", "test_gone.py"), "tests/test_gone.py does not exist"),
        (entry("minus", "a + b", "a - b", "test_package.py::test_gone[1]"), "has no test test_gone"),
        (entry("minus", "a + b", "a - b", "test_package.py::test_negate"), "is slow"),
        (entry("minus", "a + b", "a - b"), "`tests` is empty"),
        (ADD + ADD, "2 faults have this name"),
    ],
)
def test_complaints_name_the_entry_to_update(
    repository: Path, capsys: pytest.CaptureFixture[str], listed: str, complaint: str
) -> None:
    lists(repository, listed)
    assert faults.main(["--check"], repository) == 1
    assert complaint in capsys.readouterr().out


def test_an_entry_without_a_key(repository: Path) -> None:
    lists(repository, '[[fault]]\nname = "minus"\n')
    with pytest.raises(ValueError, match=r"area.toml: minus: expected \['breaks', 'file'"):
        faults.read_faults(repository)


def test_an_unknown_name(repository: Path) -> None:
    lists(repository, ADD)
    assert faults.main(["--only", "plus"], repository) == 2
