"""Apply known faults to copies of the repository, one at a time, and report which tests detect them.

    python -m tools.faults                              every fault of tests/faults, with the tests that it names
    python -m tools.faults --only NAME [NAME ...]       some faults
    python -m tools.faults --all                        with the whole default suite instead: hours
    python -m tools.faults --ref COMMIT                 at that commit as well, for comparison
    python -m tools.faults --check                      only check that each fault applies and its tests exist: seconds

Exits with 1 if a fault is not detected or cannot be applied.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools import forked_pytest
from tools.working_copy import ROOT, copy_commit, copy_working_tree

FAULTS = "tests/faults"
LIMIT_S = 900
KEYS = {"name", "breaks", "file", "find", "replace", "tests"}

NOTICED = "noticed"
UNNOTICED = "UNNOTICED"
SKIPPED = "tests skipped"
DID_NOT_RUN = "tests did not run"
DOES_NOT_APPLY = "does not apply"
NO_TEST = "no such test"
BROKEN = "tests fail without the fault"


@dataclass(frozen=True)
class Fault:
    """A fault that the code once had, or almost.

    Attributes:
        name: for `--only`.
        breaks: its effect, in one sentence.
        file: the source file.
        find: a text that occurs exactly once in the file.
        replace: the faulty text.
        tests: the node ids or files of the default run that detect it.
        listed_in: the file that lists this fault.
    """

    name: str
    breaks: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    listed_in: str

    def apply(self, source: str) -> str:
        return source.replace(self.find, self.replace)


def read_faults(root: Path = ROOT) -> list[Fault]:
    """Read the faults of all files, in order.

    Raises:
        ValueError: an entry lacks a key or has an unknown one.
    """
    faults: list[Fault] = []
    for path in sorted((root / FAULTS).glob("*.toml")):
        listed_in = str(path.relative_to(root))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            if entry.keys() != KEYS:
                raise ValueError(f"{listed_in}: {entry.get('name')}: expected {sorted(KEYS)}, got {sorted(entry)}")
            faults.append(Fault(**{**entry, "tests": tuple(entry["tests"])}, listed_in=listed_in))
    return faults


# --check


def complaints_about(faults: Sequence[Fault], root: Path = ROOT) -> Iterator[str]:
    """Yield the reasons why faults cannot be tried: the fault, the file, and what to update."""
    for name, count in Counter(fault.name for fault in faults).items():
        if count > 1:
            yield f"{name}: {count} faults have this name; rename all but one in {FAULTS}"
    for fault in faults:
        for complaint in (*_about_text(fault, root), *_about_tests(fault, root)):
            yield f"{fault.listed_in}: {fault.name}: {complaint}"


def _about_text(fault: Fault, root: Path) -> Iterator[str]:
    path = root / fault.file
    if not path.is_file():
        yield f"{fault.file} does not exist; set `file` to the file that now holds the code"
        return
    source = path.read_text(encoding="utf-8")
    count = source.count(fault.find)
    if count != 1:
        yield (
            f"`find` occurs {count} times in {fault.file}, expected once; copy the code as it is now into `find`, "
            f"and into `replace` with the fault ({fault.breaks})"
        )
    elif fault.find == fault.replace:
        yield "`find` and `replace` are the same"
    elif path.suffix == ".py":
        try:
            ast.parse(fault.apply(source))
        except SyntaxError as error:
            yield f"`replace` is invalid Python in {fault.file}, line {error.lineno}: {error.msg}"


def _about_tests(fault: Fault, root: Path) -> Iterator[str]:
    if not fault.tests:
        yield "`tests` is empty; name the tests that detect the fault"
    for test in fault.tests:
        file, function = _split(test)
        if not (root / file).exists():
            yield f"{file} does not exist; set `tests` to where the test is now"
        elif function and function not in _tests_in(root / file):
            yield f"{file} has no test {function}; set `tests` to a test that detects the fault"
        elif function and _tests_in(root / file)[function]:
            yield f"{test} is slow, so the default run does not detect the fault; name a test that is not slow"


def _split(test: str) -> tuple[str, str]:
    """Return the file and the function of a node id, without parameters; "" as the function of a file."""
    file, _, function = test.partition("::")
    return file, function.partition("[")[0]


@functools.cache
def _tests_in(file: Path) -> Mapping[str, bool]:
    """The test functions of a file, as written in node ids, and whether each is marked slow."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assigned = [s for s in tree.body if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)]
    values = {ast.unparse(s.targets[0]): s.value for s in assigned}

    def is_slow(marks: Sequence[ast.expr]) -> bool:
        each = [m for mark in marks for m in (mark.elts if isinstance(mark, ast.List) else [mark])]
        return any(ast.unparse(values.get(ast.unparse(m), m)).startswith("pytest.mark.slow") for m in each)

    def functions(body: Sequence[ast.stmt], prefix: str, slow: bool) -> Iterator[tuple[str, bool]]:
        for statement in body:
            if isinstance(statement, ast.FunctionDef):
                yield prefix + statement.name, slow or is_slow(statement.decorator_list)
            elif isinstance(statement, ast.ClassDef):
                inner = slow or is_slow(statement.decorator_list)
                yield from functions(statement.body, f"{prefix}{statement.name}::", inner)

    return dict(functions(tree.body, "", is_slow([values["pytestmark"]] if "pytestmark" in values else [])))


# Trying


@dataclass(frozen=True)
class Trial:
    """The result of the tests for a fault.

    Attributes:
        fault: the fault.
        verdict: one of the constants above.
        by: the first test that failed, or how the process ended.
        seconds: the duration.
        output: the end of the tests' output.
    """

    fault: Fault
    verdict: str
    by: str = ""
    seconds: float = 0.0
    output: str = ""

    @property
    def good(self) -> bool:
        return self.verdict in (NOTICED, SKIPPED)


@dataclass(frozen=True)
class Run:
    """One process of pytest.

    Attributes:
        code: its exit status, negative for a signal; None if it timed out.
        failed: the node ids of the tests that failed.
        passed: the number of tests that passed.
        seconds: the duration.
        output: the end of its output.
    """

    code: int | None
    failed: tuple[str, ...]
    passed: int
    seconds: float
    output: str


@dataclass
class Copy:
    """A copy of the repository in which one fault at a time is applied.

    Attributes:
        folder: the copy.
        cache: the compiled kernels of a clean run; each run gets a copy of them, and no measured times.
        broken: the tests that fail without a fault.
    """

    folder: Path
    cache: Path
    broken: tuple[str, ...] = ()
    _runs: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    def run(self, tests: Sequence[str], *, clean: bool = False) -> Run:
        """Run tests up to the first failure; with `clean`, run all of them and fill the cache."""
        number = next(self._runs)
        report = self.folder.parent / f"{self.folder.name}-{number}.xml"
        cache = self.cache
        if not clean:
            cache = self.folder.parent / f"{self.folder.name}-{number}-cache"
            if (self.cache / "native").exists():
                shutil.copytree(self.cache / "native", cache / "native")
        options = ["-q", "-p", "no:cacheprovider", "-n0", "--tb=short", f"--junit-xml={report}"]
        options += [] if clean else ["-x"]
        options += [f"--deselect={test}" for test in self.broken]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ONNXTRAIN_", "PYTEST_"))}
        variables = {**inherited, "PYTHONPATH": str(self.folder), "ONNXTRAIN_CACHE_DIR": str(cache)}
        printed = report.with_suffix(".txt")
        limit = None if clean or not tests else LIMIT_S
        started = time.monotonic()
        code = forked_pytest.run(tests, options, self.folder, variables, printed, limit)
        seconds = time.monotonic() - started
        if not clean:
            shutil.rmtree(cache, ignore_errors=True)
        failed, passed = self._read(report)
        output = printed.read_text(encoding="utf-8", errors="replace")
        return Run(code, failed, passed, seconds, output[-3000:])

    def _read(self, report: Path) -> tuple[tuple[str, ...], int]:
        if not report.exists():
            return (), 0
        cases = list(ElementTree.parse(report).iter("testcase"))
        failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
        skipped = [c for c in cases if c.find("skipped") is not None]
        names = dict.fromkeys(map(self._node_id, failed))
        return tuple(names), len(cases) - len(failed) - len(skipped)

    def _node_id(self, case: ElementTree.Element) -> str:
        """Return the node id of a test; pytest's report has `tests.package.test_file.Class` and a name."""
        parts = (case.get("classname") or "").split(".")
        lengths = range(len(parts), 0, -1)
        length = next((n for n in lengths if self.folder.joinpath(*parts[:n]).with_suffix(".py").exists()), len(parts))
        file = "/".join(parts[:length]) + ".py"
        return "::".join([file, *parts[length:], case.get("name") or ""])

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        path = self.folder / fault.file
        clean = path.read_text(encoding="utf-8")
        try:
            self._write(path, fault.apply(clean))
            yield
        finally:
            self._write(path, clean)

    def _write(self, path: Path, source: str) -> None:
        """Write a file, and remove its bytecode, whose time stamp has a resolution of one second only."""
        path.write_text(source, encoding="utf-8")
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            bytecode.unlink()


def try_fault(fault: Fault, copy: Copy, whole_suite: bool) -> Trial:
    """Apply a fault and run its tests."""
    path = copy.folder / fault.file
    if not path.is_file() or path.read_text(encoding="utf-8").count(fault.find) != 1:
        return Trial(fault, DOES_NOT_APPLY)
    tests = [] if whole_suite else tests_at(fault, copy.folder)
    if not tests and not whole_suite:
        return Trial(fault, NO_TEST)
    with copy.with_fault(fault):
        run = copy.run(tests)
    verdict, by = _verdict(run)
    if run.code == pytest.ExitCode.NO_TESTS_COLLECTED:
        # `_test_at` found the function, so it has other parameters at this commit, or was deselected.
        failing = any(forked_pytest.matches(node_id, test) for node_id in copy.broken for test in tests)
        verdict, by = (BROKEN if failing else NO_TEST), ""
    return Trial(fault, verdict, by, run.seconds, run.output)


def _verdict(run: Run) -> tuple[str, str]:
    if run.code is None:
        return NOTICED, f"timed out after {LIMIT_S} s"
    if run.code < 0:
        return NOTICED, f"the process ended by {signal.Signals(-run.code).name}"
    if run.failed:
        return NOTICED, run.failed[0]
    if run.code:
        return DID_NOT_RUN, f"pytest ended with {run.code}"
    return (UNNOTICED, "") if run.passed else (SKIPPED, "")


def tests_at(fault: Fault, folder: Path) -> list[str]:
    """Return the tests of a fault that exist in a tree.

    If a file is missing, the only test of the same name is used.
    """
    return [path for test in fault.tests if (path := _test_at(test, folder))]


def _test_at(test: str, folder: Path) -> str:
    file, function = _split(test)
    if (folder / file).exists() and (not function or function in _tests_in(folder / file)):
        return test
    elsewhere = [f for f in sorted((folder / "tests").rglob("test_*.py")) if function in _tests_in(f)]
    if len(elsewhere) != 1:
        return ""
    return f"{elsewhere[0].relative_to(folder)}::{test.partition('::')[2]}"


def take_compiled_kernels(cache: Path) -> None:
    """Copy the compiled kernels of this machine to `cache`; their names are hashes of their sources.

    The folder is determined in another process, because forks of this one import the package of their copy.
    """
    code = "from onnxtrain.system.cache_folder import cache_folder; print(cache_folder('native'))"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    folder = Path(child.stdout.strip())
    if folder.exists():
        shutil.copytree(folder, cache / "native")


def try_all(
    faults: Sequence[Fault],
    make: Callable[[Path], None],
    scratch: Path,
    jobs: int,
    whole_suite: bool,
    console: Console,
) -> list[Trial]:
    """Try each fault in one of `jobs` copies, after a run without a fault."""
    take_compiled_kernels(scratch / "cache")
    copies: queue.Queue[Copy] = queue.Queue()
    for number in range(jobs):
        folder = scratch / str(number) / "onnxtrain"
        folder.mkdir(parents=True)
        make(folder)
        copies.put(Copy(folder, scratch / "cache"))
    first = copies.get()
    listed = sorted({test for fault in faults for test in tests_at(fault, first.folder)})
    console.print(f"without a fault: {'the default suite' if whole_suite else f'{len(listed)} tests'} ...")
    clean = first.run([] if whole_suite else listed, clean=True)
    console.print(f"without a fault: {clean.passed} passed, {len(clean.failed)} failed in {clean.seconds:.0f} s")
    for test in clean.failed:
        console.print(f"    not counted, as it fails without a fault: {escape(test)}", highlight=False, soft_wrap=True)
    if clean.code not in (0, 1):
        console.print(escape(clean.output), highlight=False, soft_wrap=True)
    copies.put(first)
    for copy in list(copies.queue):
        copy.broken = clean.failed

    def attempt(fault: Fault) -> Trial:
        copy = copies.get()
        try:
            return try_fault(fault, copy, whole_suite)
        finally:
            copies.put(copy)

    trials: list[Trial] = []
    with ThreadPoolExecutor(jobs) as pool:
        for trial in pool.map(attempt, faults):
            trials.append(trial)
            line = (
                f"{len(trials)}/{len(faults)} {trial.fault.name}: {trial.verdict} {trial.by} in {trial.seconds:.0f} s"
            )
            console.print(escape(line), highlight=False, soft_wrap=True)
    return trials


# Output


def table_of(trials: Sequence[Trial], before: Sequence[Trial] | None, commit: str) -> Table:
    table = Table("fault", "noticed by", box=None, pad_edge=False)
    table.add_column("seconds", justify="right")
    if before is not None:
        table.add_column(f"at {commit}")
    for index, trial in enumerate(trials):
        cells = [trial.fault.name, escape(trial.by if trial.verdict == NOTICED else f"{trial.verdict} {trial.by}")]
        cells.append(f"{trial.seconds:.0f}")
        if before is not None:
            cells.append(before[index].verdict)
        table.add_row(*cells, style="" if trial.good else "bold red")
    return table


def counts_of(trials: Sequence[Trial]) -> str:
    counts = Counter(trial.verdict for trial in trials)
    return f"{len(trials)} faults: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m tools.faults", description=(__doc__ or "").split("\n\n")[0])
    result.add_argument("--only", nargs="+", metavar="NAME", help="the faults to try; default: all")
    result.add_argument("--all", action="store_true", help="run the whole default suite instead of the named tests")
    result.add_argument("--ref", metavar="COMMIT", help="try the faults at this commit as well")
    result.add_argument("--check", action="store_true", help="only check that each fault applies and its tests exist")
    result.add_argument("--jobs", type=int, default=2, help="faults to try in parallel (default: 2)")
    return result


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Check or try the faults, print the results, and return the exit status."""
    options = parser().parse_args(arguments)
    console = Console()
    faults = read_faults(root)
    if options.only:
        unknown = set(options.only) - {fault.name for fault in faults}
        if unknown:
            console.print(f"no such faults in {FAULTS}: {', '.join(sorted(unknown))}")
            return 2
        faults = [fault for fault in faults if fault.name in options.only]
    complaints = list(complaints_about(faults, root))
    for complaint in complaints:
        console.print(escape(complaint), highlight=False, soft_wrap=True)
    if options.check:
        console.print(f"{len(faults)} faults, {len(complaints)} complaints")
        return int(bool(complaints))
    with tempfile.TemporaryDirectory(prefix="onnxtrain-faults-") as name:
        scratch = Path(name)
        before = None
        if options.ref:
            console.print(f"at {options.ref}")
            make = functools.partial(copy_commit, options.ref, root=root)
            before = try_all(faults, make, scratch / "ref", options.jobs, options.all, console)
            console.print("in the working tree")
        make = functools.partial(copy_working_tree, root=root)
        trials = try_all(faults, make, scratch / "now", options.jobs, options.all, console)
    console.print(table_of(trials, before, options.ref))
    if before is not None:
        console.print(f"at {options.ref}: {counts_of(before)}")
    console.print(counts_of(trials))
    for trial in trials:
        if not trial.good:
            report = f"\n{trial.fault.name} ({trial.fault.file}): {trial.fault.breaks}\n{trial.output}"
            console.print(escape(report), highlight=False, soft_wrap=True)
    return int(bool(complaints) or not all(trial.good for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
