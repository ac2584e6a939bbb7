"""The safetensors file: values survive a round trip, and every damage is reported."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from onnxtrain.device import safetensors_file
from onnxtrain.errors import CheckpointError
from onnxtrain.system import atomic_file
from tests.thinned import slow_but_every

ROOT = Path(__file__).parents[2]
DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    result = {name: rng.integers(0, 2, (3, 5)).astype(name) for name in DTYPES}
    result["half"] = np.array([1.0, -0.0, np.inf, np.nan, 3.3895e38, 1e-40]).astype(ml_dtypes.bfloat16)
    result["eighth"] = np.array([1.0, -0.5], ml_dtypes.float8_e4m3fn)
    result |= {"scalar": np.array(3.5), "empty": np.zeros((0, 7), np.int32), "ünï/cödé\n": np.ones(1, np.float32)}
    result["transposed"] = np.arange(6.0).reshape(2, 3).T
    result["big endian"] = np.arange(3, dtype=">f8")
    return result


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    safetensors_file.write(tmp_path / "file", tensors(), {"who": "me"})
    read, metadata = safetensors_file.read(tmp_path / "file")
    assert metadata == {"who": "me"}
    assert read.keys() == tensors().keys()
    for name, array in tensors().items():
        assert read[name].dtype == array.dtype.newbyteorder("="), name
        assert read[name].shape == array.shape, name
        assert read[name].tobytes() == array.astype(array.dtype.newbyteorder("=")).tobytes(), name
        assert read[name].flags.writeable
        assert read[name].flags.aligned


def test_the_safetensors_package_reads_and_writes_the_same(tmp_path: Path) -> None:
    ours = {name: array for name, array in tensors().items() if array.dtype.name in DTYPES}
    safetensors_file.write(tmp_path / "ours", ours)
    theirs = load_file(tmp_path / "ours")
    save_file(theirs, tmp_path / "theirs", {"a": "b"})
    back, metadata = safetensors_file.read(tmp_path / "theirs")
    assert metadata == {"a": "b"}
    for name, array in ours.items():
        np.testing.assert_array_equal(theirs[name], array)
        np.testing.assert_array_equal(back[name], array)
    with safetensors.safe_open(tmp_path / "ours", "numpy") as file:
        assert safetensors_file.CHECKSUM in file.metadata()


def test_a_type_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex128"):
        safetensors_file.write(tmp_path / "file", {"z": np.zeros(2, complex)})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("file") / "file"
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, bool)}
    safetensors_file.write(path, arrays, {"k": "v"})
    return path.read_bytes()


def test_every_truncation_is_noticed(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            safetensors_file.read(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="damaged"):
        safetensors_file.read(path)


def test_every_flipped_bit_is_noticed(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    undamaged = safetensors_file.read(_written(path, content))
    start = content.index(safetensors_file.CHECKSUM.encode())
    name = range(start, start + len(safetensors_file.CHECKSUM))
    for index in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[index] ^= 1 << bit
            try:
                result = safetensors_file.read(_written(path, bytes(damaged)))
            except CheckpointError:
                continue
            # A space carries nothing, and the checksum's own name only switches the check off.
            assert _same(result, undamaged), f"bit {bit} of byte {index}"
            assert content[index : index + 1].isspace() or index in name


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _same(a: tuple, b: tuple) -> bool:
    return (
        a[1].items() >= b[1].items()
        and a[0].keys() == b[0].keys()
        and all(np.array_equal(a[0][n], b[0][n]) for n in a[0])
    )


def crafted(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: list, offsets: list, dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "nothing": b"",
    "a header longer than the file": crafted({}, length=10**6),
    "a header of 16 EiB": b"\xff" * 8 + b"{}",
    "no JSON": crafted(b"{'w': 1}"),
    "no UTF-8": crafted(b'{"\xff": 1}'),
    "a list": crafted([]),
    "nested deeply": crafted(b"[" * 200_000),
    "a name twice": crafted(b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' * 1 + b'"w":1}'),
    "an overlap": crafted({"a": entry([2], [0, 8]), "b": entry([1], [4, 8])}, b"12345678"),
    "a gap": crafted({"a": entry([1], [0, 4]), "b": entry([1], [8, 12])}, b"123456789012"),
    "an end before the start": crafted({"a": entry([1], [8, 4])}, b"12345678"),
    "an end beyond the file": crafted({"a": entry([10**12], [0, 4 * 10**12])}, b"1234"),
    "negative sizes": crafted({"a": entry([-1, -1], [0, 4])}, b"1234"),
    "sizes that overflow": crafted({"a": entry([2**62, 8], [0, 0])}),
    "an empty tensor of endless size": crafted({"a": entry([0, 2**62, 2**62], [0, 0])}),
    "a size that is a truth": crafted({"a": entry([True], [0, 4])}, b"1234"),
    "a size that is a fraction": crafted({"a": entry([1.0], [0, 4])}, b"1234"),
    "a size with a million digits": crafted(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 10**6 + b'],"data_offsets":[0,0]}}'
    ),
    "an unknown type": crafted({"a": entry([1], [0, 4], "F33")}, b"1234"),
    "a type that is a list": crafted({"a": entry([1], [0, 4], ["F32"])}, b"1234"),
    "one offset": crafted({"a": entry([1], [4])}, b"1234"),
    "a further key": crafted({"a": entry([1], [0, 4]) | {"__reduce__": "os.system"}}, b"1234"),
    "an entry that is a text": crafted({"a": "F32"}),
    "metadata that is not text": crafted({"__metadata__": {"k": 1}}),
    "metadata that is a list": crafted({"__metadata__": []}),
    "a wrong checksum": crafted({"__metadata__": {safetensors_file.CHECKSUM: "00000000"}}),
    "a pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a zip": b"PK\x03\x04" + b"\0" * 30,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(case: str, tmp_path: Path) -> None:
    path = _written(tmp_path / "file", HOSTILE[case])
    with pytest.raises(CheckpointError, match="damaged") as error:
        safetensors_file.read(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 1000


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4
            )
        ),
    ),
    st.binary(max_size=16),
)
def test_no_header_leads_to_another_error(tmp_path: Path, header: object, data: bytes) -> None:
    path = _written(tmp_path / "file", crafted(header, data))
    with contextlib.suppress(CheckpointError):
        safetensors_file.read(path)


def test_a_header_cannot_ask_for_more_memory_than_the_file_is_long(tmp_path: Path) -> None:
    """2000 entries for the same gigabyte, of which not a byte is there."""
    header = {str(n): entry([2**28], [0, 2**30]) for n in range(2000)}
    script = f"""
import resource
from onnxtrain.device import safetensors_file
from onnxtrain.errors import CheckpointError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    safetensors_file.read({str(_written(tmp_path / "file", crafted(header)))!r})
except CheckpointError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(ran.stdout) < 100_000  # KiB


# Whole or not at all.

WRITER = """
import itertools, sys
import numpy as np
from onnxtrain.device import safetensors_file
for number in itertools.count(1):
    arrays = {str(index): np.full(100_000, number, np.float32) for index in range(10)}
    safetensors_file.write(sys.argv[1], arrays, {"number": str(number)})
    print(number, flush=True)
"""


@pytest.mark.parametrize("attempt", slow_but_every(3, range(3)))
def test_a_killed_writer_leaves_a_whole_file(attempt: int, tmp_path: Path) -> None:
    """Kills writers at many moments of a write; the file is that of the last finished write, or of the next one."""
    path = tmp_path / "file"
    rng = np.random.default_rng(attempt)
    partial = 0
    for count in range(60):
        if partial and count >= 6:
            break
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        os.kill(writer.pid, signal.SIGKILL)
        said = [int(line) for line in writer.stdout.read().split()]
        writer.wait()
        arrays, metadata = safetensors_file.read(path)
        number = int(metadata["number"])
        assert number in range(said[-1] if said else 1, (said[-1] if said else 1) + 2)
        assert all((array == number).all() for array in arrays.values())
        partial += len([entry for entry in tmp_path.iterdir() if entry != path])
    assert partial > 0, "no writer was killed within a write: the test shows nothing"


def test_the_data_reaches_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, _o=original, _n=name: (calls.append(_n), _o(*args))[1])
    safetensors_file.write(tmp_path / "file", {"w": np.ones(3)})
    assert calls == ["fsync", "replace", "fsync"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = _written(tmp_path / "file", b"old")

    def interrupted() -> None:
        with atomic_file.replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError), atomic_file.replacing(tmp_path / "missing" / "file"):
        pass


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    safetensors_file.write(link, {"w": np.ones(3)})
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
