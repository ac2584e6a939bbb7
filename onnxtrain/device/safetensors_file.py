"""Read and write safetensors files (huggingface.co/docs/safetensors) with strict validation, using numpy only.

Offsets may leave no gap and not overlap, the file must end with the last tensor, and a checksum in the metadata covers
every byte. No code in a file is executed, and no more memory is allocated than the file's size.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.device.checkpoint_data import corrupt_file_error
from onnxtrain.device.values import Array, dtype_named
from onnxtrain.errors import CheckpointError
from onnxtrain.system.atomic_file import replacing

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
CHECKSUM = "onnxtrain.crc32"

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_CODES = {name: code for code, name in _DTYPES.items()}
DTYPE_NAMES = frozenset(_CODES)


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the tensors by name, atomically, with a checksum of all bytes in the metadata.

    Raises:
        CheckpointError: the format does not support a tensor's dtype.
        OSError: the file cannot be written; an existing one is not changed.
    """
    # The widest dtypes first, as the format's own writer does: each tensor is then aligned to its width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    arrays = {name: _little_endian(name, array) for name, array in ordered}
    header: dict[str, object] = {}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype.name], "shape": [*array.shape], "data_offsets": [offset, end]}
        offset = end
    header["__metadata__"] = dict(metadata or {})
    checksum = _checksum(header, arrays.values())
    header["__metadata__"] = {**(metadata or {}), CHECKSUM: f"{checksum:08x}"}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the tensors to 8 bytes
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for array in arrays.values():
            file.write(_bytes(array))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors, each with its own memory, and the metadata without the checksum.

    Raises:
        CheckpointError: the file is corrupt, truncated or not a safetensors file.
        OSError: the file cannot be read.
    """
    path = Path(path)
    with open(path, "rb") as file:
        header = _read_header(file, path)
        metadata = _metadata(header, path)
        arrays = {slot.name: slot.read(file, path) for slot in _slots(header, file, path)}
    expected = metadata.pop(CHECKSUM, None)
    if expected is not None:
        _verify(expected, header | {"__metadata__": metadata}, arrays, path)
    return arrays, metadata


@dataclass(frozen=True)
class _Slot:
    """The position of a tensor in the data part of a file."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self, file: io.BufferedReader, path: Path) -> Array:
        array = np.empty(self.end - self.start, np.uint8)
        if file.readinto(array.data) != array.nbytes:
            raise corrupt_file_error(path, f"{array.nbytes} bytes for {self.name!r}", "the end of the file")
        try:
            typed = array.view(self.dtype.newbyteorder("<")).reshape(self.shape)
        except ValueError as error:  # an empty tensor with dimensions beyond numpy's limit
            raise corrupt_file_error(path, f"a valid shape for {self.name!r}", self.shape) from error
        return typed.astype(self.dtype, copy=False)


def _read_header(file: io.BufferedReader, path: Path) -> dict[str, Any]:
    prefix = file.read(8)
    rest = os.fstat(file.fileno()).st_size - 8
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(rest, MAX_HEADER_BYTES):
        raise corrupt_file_error(
            path, f"a header of at most {min(max(rest, 0), MAX_HEADER_BYTES)} bytes", f"{length} bytes"
        )
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise corrupt_file_error(path, "a header of JSON in UTF-8 with unique names", error) from error
    if not isinstance(header, dict):
        raise corrupt_file_error(path, "a JSON object as header", type(header).__name__)
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _metadata(header: Mapping[str, Any], path: Path) -> dict[str, str]:
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise corrupt_file_error(path, "metadata that maps names to texts", repr(metadata)[:80])
    return dict(metadata)


def _slots(header: Mapping[str, Any], file: io.BufferedReader, path: Path) -> list[_Slot]:
    """Return the tensors in the order of their offsets, validated before any allocation."""
    slots = [_slot(name, entry, path) for name, entry in header.items() if name != "__metadata__"]
    slots.sort(key=lambda slot: (slot.start, slot.end))
    edges = [0, *(edge for slot in slots for edge in (slot.start, slot.end))]
    size = os.fstat(file.fileno()).st_size - file.tell()
    if any(slot.start != before for slot, before in zip(slots, edges[::2], strict=False)):
        raise corrupt_file_error(path, "tensors that follow each other without gap or overlap", _first_jump(slots))
    if edges[-1] != size:
        raise corrupt_file_error(path, f"{edges[-1]} bytes of tensors", f"{size} bytes")
    return slots


def _first_jump(slots: list[_Slot]) -> str:
    jumps = (b for a, b in pairwise(slots) if a.end != b.start)
    slot = next(jumps, slots[0])
    return f"{slot.name!r} at {slot.start}"


def _slot(name: str, entry: Any, path: Path) -> _Slot:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise corrupt_file_error(path, f"dtype, shape and data_offsets for {name!r}", repr(entry)[:80])
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise corrupt_file_error(path, f"a dtype for {name!r} among " + ", ".join(_DTYPES), repr(code)[:80])
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise corrupt_file_error(path, f"a shape and two offsets for {name!r}", repr(entry)[:80])
    dtype = dtype_named(_DTYPES[code])
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise corrupt_file_error(path, f"{math.prod(shape) * dtype.itemsize} bytes for {name!r}", f"offsets {offsets}")
    return _Slot(name, dtype, tuple(shape), *offsets)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _little_endian(name: str, array: Array) -> Array:
    if array.dtype.name not in _CODES:
        expected = ", ".join(_CODES)
        raise CheckpointError("safetensors does not support the dtype of a tensor.", repr(name), expected, array.dtype)
    # Not ascontiguousarray, which turns a scalar into a vector.
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _checksum(header: Mapping[str, object], arrays: Iterable[Array]) -> int:
    value = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for array in arrays:
        value = zlib.crc32(_bytes(array), value)
    return value


def _verify(expected: str, header: Mapping[str, object], arrays: Mapping[str, Array], path: Path) -> None:
    stored = arrays if sys.byteorder == "little" else {n: _little_endian(n, a) for n, a in arrays.items()}
    actual = f"{_checksum(header, stored.values()):08x}"
    if actual != expected:
        error = corrupt_file_error(path, f"the checksum {expected}", actual)
        error.todo = f"Use another copy. If another tool changed the file, remove {CHECKSUM!r} from its metadata."
        raise error
