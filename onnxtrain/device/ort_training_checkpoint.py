"""Read checkpoint files of onnxruntime-training 1.17 to 1.19: flatbuffers with the identifier `ODTC`.

The schema is onnxruntime's `ort_training_checkpoint.fbs`; stock onnxruntime still contains its Python classes in
`onnxruntime/tools/ort_format_model`. Tested with files of 1.19.2: with and without optimizer state, nominal, and large
enough for tensors in `<file>.data`. Offsets outside of the file are rejected.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flatbuffers import number_types
from flatbuffers.table import Table

from onnxtrain.device.checkpoint_data import Checkpoint, Property, corrupt_file_error
from onnxtrain.device.values import Array, dtype_named
from onnxtrain.errors import CheckpointError

_IDENTIFIER = b"ODTC"
_VERSION = 2
_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
}
_TEXT = 8
_MOMENTS = {"momentum0": "first_order_moment", "momentum1": "second_order_moment"}


def recognizes(start: bytes) -> bool:
    """Return whether the first eight bytes of a file are those of such a checkpoint."""
    return start[4:8] == _IDENTIFIER


def read(path: Path) -> Checkpoint:
    """Read the file, and `<file>.data` if it refers to it.

    The file has no learning rate. A nominal file has the names of its parameters, but not their shapes.

    Raises:
        CheckpointError: the file is corrupt, or of an unknown version.
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    try:
        root = _Fields(content, struct.unpack_from("<I", content)[0])
        version = root.number(0, number_types.Int32Flags, 0)
        if version != _VERSION:
            problem = "The version of the checkpoint format is not supported."
            todo = "Save it again with onnxruntime-training 1.19."
            raise CheckpointError(problem, str(path), _VERSION, version, todo)
        return _Reader(path, root).checkpoint()
    except (struct.error, IndexError, ValueError, TypeError, OverflowError) as error:
        raise corrupt_file_error(path, "offsets within the file", error) from error


class _Fields:
    """A table of the flatbuffer, with its fields numbered as in the schema."""

    def __init__(self, content: bytes, position: int) -> None:
        if not 0 <= position <= len(content) - 4:
            raise ValueError(f"a table at {position}")
        self._table = Table(content, position)

    def _offset(self, field: int) -> int:
        return int(self._table.Offset(4 + 2 * field))

    def number(self, field: int, flags: Any, default: int | float) -> Any:
        offset = self._offset(field)
        return self._table.Get(flags, offset + self._table.Pos) if offset else default

    def table(self, field: int) -> _Fields | None:
        offset = self._offset(field)
        return _Fields(self._table.Bytes, self._table.Indirect(offset + self._table.Pos)) if offset else None

    def text(self, field: int) -> str:
        offset = self._offset(field)
        return self._text_at(offset + self._table.Pos) if offset else ""

    def texts(self, field: int) -> list[str]:
        return [self._text_at(position) for position in self._entries(field)]

    def tables(self, field: int) -> Iterator[_Fields]:
        for position in self._entries(field):
            yield _Fields(self._table.Bytes, self._table.Indirect(position))

    def array(self, field: int, dtype: np.dtype[Any]) -> Array:
        """Return a numeric vector, as a view of the file's bytes."""
        if not self._offset(field):
            return np.empty(0, dtype)
        start, length = self._vector(field)
        return np.frombuffer(self._table.Bytes, dtype.newbyteorder("<"), length, start)

    def _entries(self, field: int) -> range:
        """Return the positions of the offsets in a vector."""
        if not self._offset(field):
            return range(0)
        start, length = self._vector(field)
        if length > (len(self._table.Bytes) - start) // 4:
            raise ValueError(f"a vector of {length} entries at {start}")
        return range(start, start + 4 * length, 4)

    def _vector(self, field: int) -> tuple[int, int]:
        offset = self._offset(field)
        start = int(self._table.Vector(offset))
        if start < 4:
            raise ValueError(f"a vector at {start}")
        return start, int(self._table.VectorLen(offset))

    def _text_at(self, position: int) -> str:
        start = position + struct.unpack_from("<I", self._table.Bytes, position)[0]
        length = struct.unpack_from("<I", self._table.Bytes, start)[0]
        if start + 4 + length > len(self._table.Bytes):
            raise ValueError(f"a text of {length} bytes at {start}")
        content: bytes = self._table.Bytes
        return content[start + 4 : start + 4 + length].decode()


class _Reader:
    """Build a checkpoint from the tables, copying at most as many bytes as the files have."""

    def __init__(self, path: Path, root: _Fields) -> None:
        self.path = path
        self.root = root
        self.external = Path(f"{path}.data")
        self.left = path.stat().st_size

    def checkpoint(self) -> Checkpoint:
        module = self.root.table(1)
        if module is None:
            raise ValueError("no module state")
        self.nominal = bool(module.number(2, number_types.BoolFlags, 0))
        if module.number(3, number_types.BoolFlags, 0):
            self.left += os.path.getsize(self.external)
        trainable = self._tensors(module.tables(0))
        frozen = self._tensors(module.tables(1))
        step, optimizer = self._optimizer(frozenset(trainable))
        return Checkpoint(
            parameters=_joined(trainable, frozen),
            trainable=frozenset(trainable),
            optimizer=optimizer,
            step=step,
            properties=self._properties(),
            nominal=self.nominal,
        )

    def _tensors(self, tables: Iterator[_Fields]) -> dict[str, Array]:
        return _unique((table.text(0), self._tensor(table)) for table in tables)

    def _tensor(self, table: _Fields) -> Array:
        shape = tuple(int(size) for size in table.array(2, np.dtype(np.int64)))
        number = table.number(3, number_types.Int32Flags, 0)
        if number == _TEXT:
            return np.array(table.texts(5), dtype=object).reshape(shape)
        if number not in _DTYPES:
            raise ValueError(f"the tensor type {number}")
        dtype = dtype_named(_DTYPES[number])
        if self.nominal:
            return np.zeros((), dtype)
        offset = table.number(6, number_types.Int64Flags, -1)
        raw = table.array(4, np.dtype(np.uint8)) if offset < 0 else self._outside(offset, shape, dtype)
        self.left -= raw.nbytes
        if self.left < 0:  # tables may share bytes: a small file must not become a large model
            raise ValueError("more tensors than bytes")
        return raw.view(dtype.newbyteorder("<")).reshape(shape).astype(dtype)

    def _outside(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        count = math.prod(shape) * dtype.itemsize
        if not 0 <= count <= os.path.getsize(self.external) - offset:
            raise ValueError(f"{count} bytes at {offset} of {self.external.name}")
        return np.fromfile(self.external, np.uint8, count, offset=offset)

    def _optimizer(self, trainable: frozenset[str]) -> tuple[int, dict[str, dict[str, Array]]]:
        groups = list(self.root.tables(2))
        if not groups:
            return 0, {}
        if len(groups) > 1:
            raise ValueError(f"{len(groups)} optimizer groups; expected one")
        moments: dict[str, dict[str, Array]] = {}
        for entry in groups[0].tables(3):
            for name, array in self._tensors(entry.tables(1)).items():
                moments.setdefault(_MOMENTS.get(name, name), {})[entry.text(0)] = array
        if moments.keys() == {_MOMENTS["momentum0"]}:  # of SGD, which did not use it
            moments.clear()
        if any(arrays.keys() != trainable for arrays in moments.values()):
            raise ValueError("moments that do not belong to the trainable parameters")
        return int(groups[0].number(1, number_types.Int64Flags, 0)), moments

    def _properties(self) -> dict[str, Property]:
        bag = self.root.table(3)
        if bag is None:
            return {}
        values: list[tuple[int, Callable[[_Fields], Property]]] = [
            (0, lambda entry: int(entry.number(1, number_types.Int64Flags, 0))),
            (1, lambda entry: float(entry.number(1, number_types.Float32Flags, 0.0))),
            (2, lambda entry: entry.text(1)),
        ]
        return _unique((entry.text(0), value(entry)) for field, value in values for entry in bag.tables(field))


def _unique(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r} occurs twice")
        result[name] = value
    return result


def _joined(trainable: dict[str, Array], frozen: dict[str, Array]) -> dict[str, Array]:
    return _unique(iter([*trainable.items(), *frozen.items()]))
