"""Run tests in environments that differ from this one, and print a table.

    python -m tools.matrix                                       the tests marked `everywhere`, in all environments
    python -m tools.matrix --only no-compiler --only machine-amx    in some of them
    python -m tools.matrix --only folder-torch tests/cli         other tests
    python -m tools.matrix --full                                the whole suite in each: hours

An environment is a folder, variables, a machine of tests/machines.py, or a system without some feature. Each row is one
pytest process. Exits with 1 if a test fails or does not run.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.machines import MACHINES
from tools.working_copy import ROOT, copy_working_tree

MARK = "everywhere"
COMPILER = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|clang|clang\+\+|c89|c99)(-[\d.]+)?")
# Variables that only the environments set.
DROPPED = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS", "PYTEST_ADDOPTS")
ROW_LIMIT_S = 900
DEAD_PROXY = "http://127.0.0.1:9"
# The loopback interface of a fresh network namespace is down: SIOCSIFFLAGS with IFF_UP.
LOOPBACK = (
    "import fcntl, os, socket, struct, sys\n"
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 1))\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True)
class Setting:
    """The settings of a row's process.

    Attributes:
        variables: environment variables.
        prefix: a command to start the interpreter with; () for none.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """A row of the table.

    Attributes:
        name: for `--only`.
        meaning: its description in the table.
        folder: the name of the folder with a copy of the repository; None for the repository itself.
        setting: creates the setting, given a scratch folder.
        options: options of pytest.
        tests: prefixes of the paths of the marked tests that it affects.
    """

    name: str
    meaning: str
    folder: str | None = None
    setting: Callable[[Path], Setting] = lambda scratch: Setting()
    options: tuple[str, ...] = ()
    tests: tuple[str, ...] = ("",)


def variables(**values: str) -> Callable[[Path], Setting]:
    return lambda scratch: Setting(values)


def no_compiler(scratch: Path) -> Setting:
    """Return a search path with all programs except compilers."""
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).glob("*"):
            link = scratch / program.name
            if not COMPILER.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    return Setting({"PATH": str(scratch), "CC": "", "CXX": ""})


def read_only_home(scratch: Path) -> Setting:
    """Return a read-only home.

    For root, permissions do not apply: a read-only mount, or a file system without folders.
    """
    if os.getuid():
        scratch.chmod(0o555)
        return Setting({"HOME": str(scratch)})
    mount = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro tmpfs "$HOME" && exec "$@"', "sh")
    home = Setting({"HOME": str(scratch)}, mount)
    return home if runs(home) else Setting({"HOME": "/proc/self"})


def no_network(scratch: Path) -> Setting:
    """Return a network namespace with loopback only, or if the system refuses that, proxies that do not exist."""
    for namespace in (("unshare", "--net"), ("unshare", "--map-root-user", "--net")):
        setting = Setting(prefix=(*namespace, sys.executable, "-c", LOOPBACK))
        if runs(setting):
            return setting
    return Setting(dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), DEAD_PROXY))


def runs(setting: Setting) -> bool:
    """Return whether a program can run with this setting on this system."""
    if shutil.which(setting.prefix[0]) is None:
        return False
    command = [*setting.prefix, "true"]
    return not subprocess.run(
        command, env={**os.environ, **setting.variables}, capture_output=True, check=False
    ).returncode


# The tests whose kernels depend on the machine.
CHOOSING = ("tests/execute/test_kernel_choice", "tests/native", "tests/ops", "tests/trainers", "tests/zoo")

ENVIRONMENTS = (
    *(
        Environment(f"folder-{n.replace(' ', '-')}", f"a clone in a folder {n!r}", n)
        for n in ("onnxtrain", "torch", "a b")
    ),
    Environment("aten-default", "PyTorch's kernels without vectors", setting=variables(ATEN_CPU_CAPABILITY="default")),
    Environment("aten-avx2", "PyTorch's kernels with AVX2", setting=variables(ATEN_CPU_CAPABILITY="avx2")),
    Environment("onednn-avx2", "oneDNN with AVX2", setting=variables(ONEDNN_MAX_CPU_ISA="AVX2")),
    Environment(
        "avx2",
        "PyTorch, oneDNN and MKL with AVX2",
        setting=variables(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2"),
    ),
    Environment("one-thread", "OMP_NUM_THREADS=1", setting=variables(OMP_NUM_THREADS="1")),
    Environment("four-threads", "OMP_NUM_THREADS=4", setting=variables(OMP_NUM_THREADS="4")),
    Environment("no-compiler", "no C++ compiler on the path", setting=no_compiler),
    Environment("read-only-home", "a home that cannot be written", setting=read_only_home),
    Environment("locale-c", "LC_ALL=C", setting=variables(LC_ALL="C", LANG="C")),
    Environment("no-network", "no network", setting=no_network),
    *(
        Environment(f"machine-{name}", machine.processor, options=("--machine", name), tests=CHOOSING)
        for name, machine in MACHINES.items()
    ),
)


@dataclass(frozen=True)
class Row:
    """The results of a row.

    Attributes:
        environment: the row's environment.
        passed, skipped: the numbers of such tests.
        failed: the ids of the tests that failed.
        seconds: the duration of the process.
        log: its output.
        ran: whether pytest finished.
    """

    environment: Environment
    passed: int
    skipped: int
    failed: tuple[str, ...]
    seconds: float
    log: Path
    ran: bool

    @property
    def good(self) -> bool:
        return self.ran and not self.failed and self.passed > 0


def marked_files() -> list[str]:
    """Return the files of tests that are marked for all environments."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if f"mark.{MARK}" in f.read_text(encoding="utf-8")]


def run(environment: Environment, tests: Sequence[str], scratch: Path, limit_s: float | None) -> Row:
    """Run these tests in an environment, or the marked ones that it affects."""
    arguments = tests or ("-m", MARK, *(file for file in marked_files() if file.startswith(environment.tests)))
    own = scratch / environment.name
    (own / "setting").mkdir(parents=True)
    folder = ROOT
    if environment.folder is not None:
        folder = own / environment.folder
        copy_working_tree(folder)
    setting = environment.setting(own / "setting")
    inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
    # Idle threads of several processes on few cores sleep instead of spinning.
    process = {**inherited, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(folder), **setting.variables}
    report, log = own / "report.xml", own / "log.txt"
    options = ("-q", "-p", "no:cacheprovider", "-n0", f"--junit-xml={report}", *environment.options)
    started = time.monotonic()
    with log.open("wb") as output:
        try:
            subprocess.run(
                [*setting.prefix, sys.executable, "-m", "pytest", *options, *arguments],
                cwd=folder,
                env=process,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            output.write(f"\ntimed out after {limit_s:g} s".encode())
    return read_report(environment, report, log, time.monotonic() - started)


def read_report(environment: Environment, report: Path, log: Path, seconds: float) -> Row:
    if not report.exists():
        return Row(environment, 0, 0, (), seconds, log, ran=False)
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case not in failed and case.find("skipped") is not None]
    names = tuple(dict.fromkeys(f"{case.get('classname')}::{case.get('name')}" for case in failed))
    return Row(environment, len(cases) - len(failed) - len(skipped), len(skipped), names, seconds, log, ran=True)


def table_of(rows: Sequence[Row]) -> Table:
    table = Table("environment", "difference", box=None, pad_edge=False)
    for heading in ("passed", "failed", "skipped", "seconds"):
        table.add_column(heading, justify="right")
    for row in rows:
        counts = (str(row.passed), str(len(row.failed)), str(row.skipped)) if row.ran else ("did not run", "", "")
        style = "" if row.good else "bold red"
        table.add_row(row.environment.name, escape(row.environment.meaning), *counts, f"{row.seconds:.0f}", style=style)
    return table


def failures_of(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.good:
            continue
        yield f"{row.environment.name}: {row.log}"
        yield from (f"    {name}" for name in row.failed)
        if not row.ran or not row.failed:
            yield from (f"    {line}" for line in row.log.read_text(errors="replace").splitlines()[-15:])


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m tools.matrix", description=(__doc__ or "").split("\n\n")[0])
    names = [environment.name for environment in ENVIRONMENTS]
    result.add_argument("tests", nargs="*", help=f"the tests to run; default: those marked {MARK}")
    result.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of: {', '.join(names)}")
    result.add_argument("--full", action="store_true", help="the whole suite in each environment")
    result.add_argument("--jobs", type=int, default=2, help="environments to run in parallel (default: 2)")
    result.add_argument("--keep", action="store_true", help="keep the copies, logs and reports")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen environments, print the table, and return the exit status."""
    options = parser().parse_args(arguments)
    chosen = [e for e in ENVIRONMENTS if not options.only or e.name in options.only]
    tests = options.tests or (["tests"] if options.full else [])
    scratch = Path(tempfile.mkdtemp(prefix="onnxtrain-matrix-"))
    console = Console()
    started = time.monotonic()
    work = functools.partial(run, tests=tests, scratch=scratch, limit_s=None if options.full else ROW_LIMIT_S)
    rows: list[Row] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(work, chosen):
            rows.append(row)
            result = "passed" if row.good else "FAILED"
            console.print(f"{len(rows)}/{len(chosen)} {row.environment.name}: {result} in {row.seconds:.0f} s")
    console.print(table_of(rows))
    console.print(f"{time.monotonic() - started:.0f} s in all")
    for line in failures_of(rows):
        console.print(escape(line), highlight=False, soft_wrap=True)
    good = all(row.good for row in rows)
    if options.keep or not good:
        console.print(f"Copies, logs and reports are in {scratch}")
    else:
        shutil.rmtree(scratch)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
