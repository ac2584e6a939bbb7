"""C++ is compiled in the background, once per machine; failures are logged once and stop nothing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onnxtrain import log
from onnxtrain.native import Library, background, build, compiler
from onnxtrain.system.machine import current_machine
from tests.limits import WAIT_LIMIT_S
from tests.machines import Describe

pytestmark = pytest.mark.compiler

COUNT = """
extern "C" void count(int64_t *seen, int64_t n, int64_t threads) {
    parallel_for(threads, n, [&](int64_t begin, int64_t end) {
        for (; begin < end; begin++) seen[begin] += begin + 1;
    });
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("ONNXTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


def counter(source: str = COUNT) -> Library:
    return Library("count", source, {"count": "pii"})


def check(library: Library) -> None:
    """Check that every item is visited once, on any number of threads."""
    assert library.wait(WAIT_LIMIT_S), library.failure
    for n, threads in ((0, 2), (1, 4), (7, 2), (1000, 1), (1000, 3), (5, 64)):
        seen = torch.zeros(n, dtype=torch.int64)
        library.functions.count(seen.data_ptr(), n, threads)
        assert torch.equal(seen, torch.arange(n) + 1)


@pytest.mark.everywhere
def test_source_in_functions_out(cache: Path) -> None:
    library = counter()
    assert library.functions is None
    check(library)
    (file,) = cache.iterdir()
    assert build.is_intact(file)


@pytest.mark.everywhere
def test_the_threads_are_those_of_pytorch() -> None:
    """No second OpenMP library is loaded. Other packages, such as scikit-learn, load their own."""
    before = openmp_libraries()
    check(counter())
    assert openmp_libraries() == before


def openmp_libraries() -> set[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line or "libomp." in line}


def test_a_cached_library_is_not_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(counter())
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    check(counter())


@pytest.mark.parametrize("other", ["source", "flags", "compiler", "processor"])
def test_the_cache_key_contains_all_that_affects_the_code(
    other: str, cache: Path, monkeypatch: pytest.MonkeyPatch, described_machine: Describe
) -> None:
    check(counter())
    if other == "flags":
        monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-DOTHER"))
    if other == "compiler":
        installed = compiler.find()
        assert installed is not None
        monkeypatch.setattr(compiler, "find", lambda: compiler.Compiler(installed.command, "another version"))
    if other == "processor":
        described_machine(current_machine(), code_target="another processor")
    check(counter(COUNT + "// changed" if other == "source" else COUNT))
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:99] + b"x" + data[100:]]
)
def test_a_damaged_file_is_compiled_again(damage, cache: Path) -> None:
    check(counter())
    (file,) = cache.iterdir()
    content = file.read_bytes()
    file.unlink()  # this process has it mapped
    file.write_bytes(damage(content))
    assert not build.is_intact(file)
    check(counter())
    assert build.is_intact(file)


def test_a_compiler_error_is_logged_once(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = counter("this is no C++")
    with caplog.at_level(logging.INFO, "onnxtrain"):
        assert not library.wait(WAIT_LIMIT_S)
        assert not library.wait(WAIT_LIMIT_S)
    (record,) = [r for r in caplog.records if "the compiled kernel" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert "error" in record.getMessage()
    assert library.functions is None
    assert list(cache.iterdir()) == []


def test_a_missing_function_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    library = Library("count", COUNT, {"another": "p"})
    assert not library.wait(WAIT_LIMIT_S)
    assert "another" in (library.failure or "")
    assert any(r.levelno == logging.WARNING for r in caplog.records)


@pytest.mark.everywhere
def test_without_a_compiler_one_warning_says_what_to_install(
    described_machine: Describe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    described_machine("no-compiler")
    monkeypatch.setattr(log, "_logged", set())
    libraries = counter(), counter()
    with caplog.at_level(logging.INFO, "onnxtrain"):
        assert not any(library.wait(WAIT_LIMIT_S) for library in libraries)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "apt install g++" in warning
    assert "ONNXTRAIN_KERNELS=pytorch" in warning
    for library in libraries:
        assert "no C++ compiler" in (library.failure or "")


def test_a_compiler_that_does_not_run_is_named(described_machine: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false --fast")
    described_machine(current_machine(), compilers=(("false", "--fast"),))
    library = counter()
    assert not library.wait(WAIT_LIMIT_S)
    assert "'false --fast'" in (library.failure or "")


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_outside_linux_nothing_is_compiled(
    system: str, described_machine: Describe, caplog: pytest.LogCaptureFixture
) -> None:
    described_machine(current_machine(), system=system)
    library = counter()
    with caplog.at_level(logging.INFO, "onnxtrain"):
        assert not library.wait(WAIT_LIMIT_S)
    assert [r.levelno for r in caplog.records if r.name.startswith("onnxtrain")] == [logging.INFO]
    assert f"for Linux, this is {system}" in (library.failure or "")


def test_an_unwritable_cache_is_reported(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file in the place of the folder")
    library = counter()
    assert not library.wait(WAIT_LIMIT_S)
    assert "cannot be used" in (library.failure or "")


PYTHON = """
#include <Python.h>
extern "C" PyObject* both(PyObject* a, PyObject* b) {
    if (a == b) return PyErr_SetString(PyExc_ValueError, "twice the same"), nullptr;
    return PyTuple_Pack(2, a, b);
}
"""


def test_functions_of_python_objects() -> None:
    if not compiler.has_torch_headers():
        pytest.skip("needs Python's headers")
    library = Library("both", PYTHON, {"both": "oo>o"}, keeps_gil=True, torch_headers=True)
    assert library.wait(WAIT_LIMIT_S), library.failure
    first, second = object(), object()
    assert library.functions.both(first, second) == (first, second)
    with pytest.raises(ValueError, match="twice the same"):
        library.functions.both(first, first)


def test_another_pytorch_is_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes may have another memory layout, although it is in the same folder."""
    flags = compiler.flags(torch_headers=True)
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert compiler.flags(torch_headers=True) != flags
    assert compiler.flags() == compiler.flags(torch_headers=False)


def test_missing_headers_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a warning: many machines have no python3-dev."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    library = Library("both", PYTHON, {"both": "oo>o"}, keeps_gil=True, torch_headers=True)
    with caplog.at_level(logging.INFO, "onnxtrain"):
        assert not library.wait(WAIT_LIMIT_S)
    assert [r.levelno for r in caplog.records if "the compiled kernel" in r.getMessage()] == [logging.INFO]
    assert "python3-dev" in (library.failure or "")


def in_process(code: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


BUILD = """
from onnxtrain.native.background import take_ticket
from onnxtrain.native.build import build, is_intact
assert is_intact(build("count", "#include <cstdint>\\nextern \\"C\\" void nothing(int64_t) {}", take_ticket()))
"""


@pytest.mark.slow
def test_processes_build_concurrently(cache: Path) -> None:
    for process in [in_process(BUILD) for _ in range(3)]:
        output, _ = process.communicate(timeout=WAIT_LIMIT_S)
        assert process.returncode == 0, output
    assert len(list(cache.iterdir())) == 1  # and no incomplete file


def test_compilers_run_one_at_a_time_in_the_order_of_requests(tmp_path: Path, described_machine: Describe) -> None:
    notes, noting = tmp_path / "notes", tmp_path / "noting-c++"
    noting.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && echo noting && exit 0
for given in "$@"; do case $given in */source.cpp) name=$(tail -n 1 "$given") ;; esac; done
echo "begin $name" >> {notes}
sleep 0.1
echo "end $name" >> {notes}
exit 1
"""
    )
    noting.chmod(0o755)
    described_machine(current_machine(), compilers=((str(noting),),))
    libraries = [counter(f"// {number}\n") for number in range(4)]
    for library in libraries:
        library.request()
    for library in libraries:
        assert not library.wait(WAIT_LIMIT_S)
    assert notes.read_text().splitlines() == [f"{event} // {n}" for n in range(4) for event in ("begin", "end")]


def test_the_step_that_requests_a_library_runs_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock."""
    now = [5.0]
    slept: list[tuple[int, float]] = []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: slept.append((threading.get_ident(), s)))
    monkeypatch.setattr(background, "time", clock)
    first, second = background.take_ticket(1.0), background.take_ticket(1.0)
    now[0] += 0.25
    with first:
        now[0] += 2.0
    with second:
        pass
    assert [seconds for thread, seconds in slept if thread == threading.get_ident()] == [0.75, 0.0]


def test_an_interrupted_wait_gives_up_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(background, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=interrupt))
        interrupted = background.take_ticket()
        with pytest.raises(KeyboardInterrupt), interrupted:
            pass
    with background.take_ticket():
        pass


def test_throttled_work_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as long, with a fake clock. No other throttled work runs meanwhile."""
    now, slept = [5.0], []

    def sleep(seconds: float) -> None:
        slept.append((seconds, background.throttle_lock.locked()))

    monkeypatch.setattr(background, "time", SimpleNamespace(thread_time=lambda: now[0], sleep=sleep))
    for seconds in (0.5, 0.25):
        with background.throttled():
            assert background.throttle_lock.locked()
            now[0] += seconds
    assert slept == [(5.0, True), (2.5, True)]
    assert not background.throttle_lock.locked()


def test_a_cached_library_waits_for_no_compiler() -> None:
    check(counter())
    with background.take_ticket():
        check(counter())
        other = counter(COUNT + "// other")
        assert not other.wait(0.1)
    check(other)


@pytest.mark.slow
def test_the_compiler_is_of_low_priority_and_ends_with_the_program(cache: Path, tmp_path: Path) -> None:
    """A request returns immediately; a program that ends before the build leaves no process behind and starts none."""
    slow, notes = tmp_path / "slow-c++", tmp_path / "notes"
    slow.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && echo slow && exit 0
echo "$$ $(nice) $(cut -d" " -f6 /proc/$$/stat)" > {notes}.part
cat {notes}.part >> {notes}
sleep 100
"""
    )
    slow.chmod(0o755)
    code = f"""
    import pathlib, time
    from onnxtrain.native import Library
    library, another = Library("count", "", {{}}), Library("another", "", {{}})
    library.request()
    another.request()  # waiting here would exceed the timeout of the process
    assert library.functions is None
    notes = pathlib.Path({str(notes)!r})
    while not (notes.exists() and notes.read_text()):
        time.sleep(0.01)
    """
    output, _ = (process := in_process(code, CXX=str(slow), PYTHONWARNINGS="always")).communicate(timeout=WAIT_LIMIT_S)
    assert process.returncode == 0, output
    assert output == "", "an ended compiler must not be reported as a failure"
    pid, niceness, session = map(int, notes.read_text().split())
    assert niceness == min(os.nice(0) + int(background._NICENESS), 19)
    assert session == os.getsid(0), "Linux gives a separate session as much time as the program's"
    assert ends_soon(pid)
    assert list(cache.iterdir()) == []


def test_a_compiler_gets_no_signal_until_it_is_ended(tmp_path: Path) -> None:
    """A stopped and continued process would print it. Its children end with it."""
    noting = tmp_path / "noting"
    noting.write_text("trap 'echo continued' CONT\nsleep 100 & echo $!\nwhile :; do sleep 0.01; done\n")
    child = background.start(["sh", str(noting)], subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout as said:
        started = int(said.readline())
        assert background.process_groups() == [child.pid]
        time.sleep(0.5)
        assert background.end(child) == -signal.SIGTERM
        assert said.read() == b""
    assert background.process_groups() == []
    assert ends_soon(started)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Python itself says nothing
def test_an_ending_program_starts_no_compilation(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_ending", ending := threading.Event())
    ending.set()
    library = counter()
    assert not library.wait(WAIT_LIMIT_S)
    assert list(cache.iterdir()) == []
    assert not caplog.records
    ending.clear()
    check(counter())


def ends_soon(pid: int) -> bool:
    """Whether a process ends within seconds: a signal to its group reaches it when the system next runs it."""
    for _ in range(200):
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
