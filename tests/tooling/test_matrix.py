"""The matrix of environments: its rows run, failures are reported, and each environment differs as its row says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import matrix

PASSES = "tests/package/test_cache_folder.py::test_default"


def environment(name: str) -> matrix.Environment:
    (match,) = (e for e in matrix.ENVIRONMENTS if e.name == name)
    return match


@pytest.mark.slow
def test_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--only", "folder-a-b", PASSES]) == 0
    assert "1/1 folder-a-b: passed" in capsys.readouterr().out


def test_report_of_a_failure(tmp_path: Path) -> None:
    report, log = tmp_path / "report.xml", tmp_path / "log.txt"
    log.write_text("what pytest printed")
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a" name="good"/>'
        '<testcase classname="tests.a" name="bad[x]"><failure/></testcase>'
        '<testcase classname="tests.a" name="left"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    row = matrix.read_report(environment("locale-c"), report, log, 1.0)
    assert (row.passed, row.skipped, row.failed) == (1, 1, ("tests.a::bad[x]",))
    assert not row.good
    assert "    tests.a::bad[x]" in list(matrix.failures_of([row]))


def test_process_that_writes_no_report(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("no such file")
    row = matrix.read_report(environment("locale-c"), tmp_path / "report.xml", log, 1.0)
    assert not row.good
    assert "    no such file" in list(matrix.failures_of([row]))


def test_path_without_compilers(tmp_path: Path) -> None:
    assert matrix.no_compiler(tmp_path).variables["PATH"] == str(tmp_path)
    names = {program.name for program in tmp_path.iterdir()}
    assert "sh" in names
    assert not names & {"c++", "g++", "gcc", "cc", "clang", "clang++"}


@pytest.mark.parametrize(
    ("name", "is_compiler"),
    [
        ("g++", True),
        ("x86_64-linux-gnu-g++-14", True),
        ("clang-18", True),
        ("cc", True),
        ("grep", False),
        ("gcov", False),
    ],
)
def test_names_of_compilers(name: str, is_compiler: bool) -> None:
    assert bool(matrix.COMPILER.fullmatch(name)) == is_compiler


def test_tests_are_marked_for_all_environments() -> None:
    assert len(matrix.marked_files()) >= 10
