"""The process that compiles regions, and the cache on disk. No compiler runs."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxtrain.execute.regions import build as building
from onnxtrain.execute.regions import child, request
from onnxtrain.execute.regions import process as processes
from onnxtrain.execute.regions.process import Process
from onnxtrain.log import LOG
from onnxtrain.native import build
from onnxtrain.native.build import BuildError, append_digest, is_intact
from onnxtrain.options import Options
from tests.execute.region_cases import a_request, gated, nodes_as_kernel, part_of, regions_of, written

pytestmark = [
    pytest.mark.usefixtures("regions_cache"),
    pytest.mark.compiler,
]


@pytest.fixture
def made_up_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the module of the compiling process. Its source may use `answer`, with a function for each request."""

    def put(source: str) -> None:
        folder = tmp_path / "modules"
        folder.mkdir()
        folder.joinpath("made_up_child.py").write_text(ANSWER + textwrap.dedent(source))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setattr(processes, "_MODULE", "made_up_child")

    return put


ANSWER = """
import sys
from multiprocessing.connection import Connection
from pathlib import Path

def answer(compiled):
    connection = Connection(int(sys.argv[1]))
    try:
        while True:
            connection.send(compiled(Path(connection.recv())))
    except EOFError:
        pass
"""
SEALS = """
def sealed(folder, data):
    from onnxtrain.native.build import append_digest
    library = folder / "library.so"
    library.write_bytes(data)
    append_digest(library)
    return ""
"""


def outcomes(count: int = 1) -> list[Path | BuildError]:
    """The results of `build` for this many requests."""
    return [library for _, library in building.build([a_request(width) for width in range(8, 8 + count)])]


def failure() -> str:
    (reason,) = outcomes()
    assert isinstance(reason, BuildError)
    return str(reason)


CRASHES = """
    import os, signal
    answer(lambda folder: os.kill(os.getpid(), signal.SIGSEGV))
"""
HANGS = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answer(lambda folder: time.sleep(3600))
"""


@pytest.mark.parametrize(
    ("source", "limit_s", "message"),
    [
        (CRASHES, 600, r"exited with status -11: Fatal Python error: Segmentation fault\nFile .* in answer"),
        (HANGS, 1, "did not finish within 1 s"),
        ("1 / 0", 600, "exited with status 1: .*ZeroDivisionError"),
        ("answer(lambda folder: 'it broke')", 600, "failed: it broke"),
        ("answer(lambda folder: '')", 600, "no complete library"),
    ],
    ids=["crashes", "hangs", "does not start", "fails", "writes nothing"],
)
def test_a_process_that_ends_early_gives_no_kernel(
    source: str, limit_s: float, message: str, made_up_child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_child(source)
    monkeypatch.setattr(building, "_LIMIT_S", limit_s)
    assert re.search(message, failure(), re.DOTALL)


def test_one_process_compiles_all_regions_in_order(made_up_child: Callable[[str], None]) -> None:
    """Also for two programs at the same time. It ends after the last."""
    made_up_child(f"import os\n{SEALS}\nanswer(lambda folder: sealed(folder, b'%d' % os.getpid()))")
    requests = [a_request(width) for width in range(8, 12)]
    first, second = building.build(requests[1:]), building.build(requests[:2])
    results = [next(first), *second, *first]
    assert [request for request, _ in results] == [requests[1], requests[0], requests[1], *requests[2:]]
    written_by = {path.read_bytes()[: -build.DIGEST_BYTES] for _, path in results if isinstance(path, Path)}
    assert len(written_by) == 1
    assert building._process._running is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(written_by.pop()), 0)


def test_after_a_crash_the_next_region_gets_another_process(made_up_child: Callable[[str], None]) -> None:
    made_up_child(f"""
{SEALS}
import json, os, signal
def compiled(folder):
    if json.loads((folder / "region.json").read_text())["shapes"][0][1] == 8:
        os.kill(os.getpid(), signal.SIGSEGV)
    return sealed(folder, b"a library")
answer(compiled)
""")
    crashed, whole_one = outcomes(2)
    assert isinstance(crashed, BuildError)
    assert isinstance(whole_one, Path)


def test_the_process_imports_the_same_packages(
    made_up_child: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not import from the current folder."""
    made_up_child("answer(lambda folder: repr(sys.path))")
    (tmp_path / "multiprocessing.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    assert repr(sys.path[-1]) in failure()


def test_a_failed_request_is_answered_with_its_error_and_the_next_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []

    def compile_in(folder: Path) -> None:
        if folder.name == "bad":
            raise ValueError("it broke\nException raised from here.cpp\n" + "frame of C++\n" * 9)
        compiled.append(folder)

    monkeypatch.setattr(child, "compile_in", compile_in)
    ours, theirs = Pipe()
    for name in ("bad", "good"):
        ours.send(str(tmp_path / name))
    thread = threading.Thread(target=child.main, args=(theirs,))
    thread.start()
    assert "ValueError: it broke" in ours.recv()
    assert ours.recv() == ""
    ours.close()
    thread.join()
    assert compiled == [tmp_path / "good"]


def test_the_process_keeps_no_wrong_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the kernel before it writes the library."""
    part = regions_of(part_of(gated, ["b h", "b h"]))[1][0].part
    written(tmp_path, part)

    def compiled(traced: Any, package_path: str, inductor_configs: Any) -> None:
        with zipfile.ZipFile(package_path, "w") as archive:
            archive.writestr("data/model.so", b"a library")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiled)
    monkeypatch.setattr(child, "load", lambda path: lambda tensors: [tensors[0] * tensors[1]])
    with pytest.raises(BuildError, match="the kernel's error is"):
        child.compile_in(tmp_path)
    assert not (tmp_path / request.LIBRARY).exists()
    monkeypatch.setattr(child, "load", lambda path: nodes_as_kernel(tmp_path))
    child.compile_in(tmp_path)
    assert is_intact(tmp_path / request.LIBRARY)


def test_two_threads_warn_of_a_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    """As forward and backward do if no region compiles."""
    both, said = threading.Barrier(2), threading.Event()

    def slowly(record: logging.LogRecord) -> bool:
        said.wait(0.1)  # the other one's turn
        return True

    def refuse() -> None:
        both.wait()
        building.refuse(a_request(), "it broke")

    LOG.addFilter(slowly)
    threads = [threading.Thread(target=refuse) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    LOG.removeFilter(slowly)
    assert [r.getMessage() for r in caplog.records].count(caplog.records[0].getMessage()) == 1


# The cache


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The requests of a fake compiler, which writes a file with its digest."""
    folders: list[Path] = []

    def compiled(process: Process, folder: Path, cache: Path, limit_s: float) -> None:
        folders.append(folder)
        library = folder / request.LIBRARY
        library.write_bytes(b"a library")
        append_digest(library)

    monkeypatch.setattr(Process, "compile", compiled)
    return folders


def test_a_cached_region_is_not_compiled_again(compilations: list[Path]) -> None:
    assert outcomes() == outcomes()
    assert len(compilations) == 1


@pytest.mark.parametrize("damage", [lambda data: data[:5], lambda data: b"", lambda data: b"x" + data[1:]])
def test_a_damaged_entry_is_compiled_again(damage: Callable[[bytes], bytes], compilations: list[Path]) -> None:
    (path,) = outcomes()
    assert isinstance(path, Path)
    whole_file = path.read_bytes()
    path.write_bytes(damage(whole_file))
    assert outcomes() == [path]
    assert path.read_bytes() == whole_file
    assert len(compilations) == 2


def test_the_dump_folder_gets_graph_and_library(
    compilations: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTMODULE_TRITON_DEBUG", "0")
    assert Options.resolve().save_graphs is None
    monkeypatch.setenv("ORTMODULE_TRITON_DEBUG", "1")
    assert Options.resolve().save_graphs == Path("triton_debug", "model")
    folder = Path("triton_debug", "model_regions")
    ((_, path),) = building.build([a_request()], folder)
    assert isinstance(path, Path)
    assert sorted(f.name for f in (folder / path.stem).iterdir()) == ["library.so", "region.json", "region.onnx"]
    assert [n.op_type for n in ir.load(folder / path.stem / "region.onnx").graph] == ["QuickGelu", "Mul"]


def test_an_unwritable_cache_is_warned_of(regions_cache: Path) -> None:
    regions_cache.parent.mkdir()
    regions_cache.write_text("a file in the place of the folder")
    assert "cannot be used" in failure()


TWO = """
    import sys, time
    from pathlib import Path
    from onnxtrain.execute.regions import build as building, request
    from onnxtrain.native.build import append_digest

    class Wanted:
        key = "same"
        def write(self, folder): pass

    def compiled(folder, cache, limit_s):
        print("compiled", flush=True)
        time.sleep(0.3)
        library = folder / request.LIBRARY
        library.write_bytes(b"a library")
        append_digest(library)

    building._process.compile = compiled
    ((_, path),) = building.build([Wanted()])
    print(path.name)
"""


@pytest.mark.slow
def test_two_processes_compile_a_region_once() -> None:
    both = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(TWO)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [line for child in both for line in child.communicate()[0].split()]
    assert sorted(said) == ["compiled", "region-same.so", "region-same.so"]
