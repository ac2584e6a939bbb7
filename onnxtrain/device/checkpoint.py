"""Checkpoints: parameters, optimizer state, step, learning rate and properties in one safetensors file.

Parameters are stored under their own names: other tools can read the file as the weights of the model. Other tensors
have names with the prefix `onnxtrain:`, and the rest is JSON in the metadata entry `onnxtrain`
(docs/reference/training-api.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from onnxtrain.device import ort_training_checkpoint, safetensors_file
from onnxtrain.device.checkpoint_data import Checkpoint, Property, corrupt_file_error
from onnxtrain.device.values import Array, dtype_named, is_text
from onnxtrain.errors import CheckpointError

__all__ = ["Checkpoint", "load", "save"]

ENTRY = "onnxtrain"
VERSION = 1
OWN = "onnxtrain:"  # a reserved prefix of tensor names
_GRADIENT = f"{OWN}gradient/"
_OPTIMIZER = f"{OWN}optimizer/"


def save(checkpoint: Checkpoint, path: str | os.PathLike[str], *, include_optimizer_state: bool = True) -> None:
    """Write the file atomically: if the process is killed, the old or the new file remains.

    Args:
        checkpoint: its arrays may be memory-mapped; they are not copied.
        path: the file, in an existing folder.
        include_optimizer_state: whether moments, gradients, step and learning rate are saved.

    Raises:
        CheckpointError: a name is reserved, or safetensors does not support a tensor's dtype.
        OSError: the file cannot be written; an existing one is not changed.
    """
    for name in checkpoint.parameters:
        if name.startswith(OWN):
            raise CheckpointError(f"Names that begin with {OWN!r} are reserved.", name, todo="Rename the parameter.")
        if checkpoint.nominal and is_text(checkpoint.parameters[name]):
            raise CheckpointError("A nominal checkpoint cannot hold string tensors.", name, todo="Save it with values.")
    tensors = {} if checkpoint.nominal else dict(checkpoint.parameters)
    if include_optimizer_state:
        tensors |= {f"{_GRADIENT}{name}": array for name, array in checkpoint.gradients.items()}
        for state, arrays in checkpoint.optimizer.items():
            tensors |= {f"{_OPTIMIZER}{state}/{name}": array for name, array in arrays.items()}
    strings = {name: [*array.shape] for name, array in tensors.items() if is_text(array)}
    tensors |= {name: _encode(tensors[name]) for name in strings}
    entry = _entry(checkpoint, include_optimizer_state) | {"strings": strings}
    safetensors_file.write(path, tensors, {ENTRY: json.dumps(entry)})


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file of `save`, or of onnxruntime-training 1.17 to 1.19. No code in it is executed.

    Raises:
        CheckpointError: the file is corrupt, truncated, not a checkpoint, or of a later version.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        problem = "Folders are not supported as checkpoints: onnxruntime-training wrote them up to 1.16."
        raise CheckpointError(
            problem, str(path), "one file", "a folder", "Save it again with onnxruntime-training 1.19."
        )
    with open(path, "rb") as file:
        if ort_training_checkpoint.recognizes(file.read(8)):
            return ort_training_checkpoint.read(path)
    tensors, metadata = safetensors_file.read(path)
    if ENTRY not in metadata:
        problem = "The safetensors file is not a training checkpoint."
        raise CheckpointError(
            problem, str(path), f"a metadata entry {ENTRY!r}", sorted(metadata), "Pass a training checkpoint."
        )
    return _Reader(path, tensors, metadata[ENTRY]).checkpoint()


def _entry(checkpoint: Checkpoint, include_optimizer_state: bool) -> dict[str, object]:
    """Return the metadata as JSON values. Properties are strings, which keep all digits in JavaScript."""
    entry: dict[str, object] = {
        "version": VERSION,
        "parameters": list(checkpoint.parameters),
        "trainable": sorted(checkpoint.trainable),
        "seed": checkpoint.seed,
        "draws": checkpoint.draws,
        "properties": {name: [type(value).__name__, str(value)] for name, value in checkpoint.properties.items()},
    }
    if include_optimizer_state:
        entry |= {"step": checkpoint.step, "learning_rate": checkpoint.learning_rate}
    if checkpoint.nominal:
        entry["nominal"] = {n: [array.dtype.name, [*array.shape]] for n, array in checkpoint.parameters.items()}
    return entry


def _encode(strings: Array) -> Array:
    """Encode strings as the bytes of a JSON list."""
    return np.frombuffer(json.dumps([str(text) for text in strings.flat]).encode(), np.uint8)


_PROPERTY: Mapping[str, Callable[[str], Property]] = {"int": int, "float": float, "str": str}


class _Reader:
    """Build a checkpoint from validated tensors and a metadata entry that is not validated yet."""

    def __init__(self, path: Path, tensors: dict[str, Array], text: str) -> None:
        self.path = path
        self.tensors = tensors
        try:
            self.entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            self.refuse("JSON in the metadata", error)
        if not isinstance(self.entry, dict):
            self.refuse("a JSON object in the metadata", type(self.entry).__name__)
        if self.entry.get("version") != VERSION:
            problem = "The version of the checkpoint format is not supported."
            todo = "Use the version of onnxtrain that wrote it, or a later one."
            raise CheckpointError(problem, str(path), VERSION, self.entry.get("version"), todo)

    def checkpoint(self) -> Checkpoint:
        self._restore_strings()
        names = self._texts("parameters")
        nominal = self._mapping("nominal")
        parameters = (
            {name: self._placeholder(name, nominal.get(name)) for name in names}
            if "nominal" in self.entry
            else {name: self._tensor(name) for name in names}
        )
        trainable = frozenset(self._texts("trainable"))
        if unknown := sorted(trainable - parameters.keys()):
            self.refuse("parameters for all trainable names", unknown)
        return Checkpoint(
            parameters=parameters,
            trainable=trainable,
            optimizer=self._optimizer(trainable),
            gradients={name: self._like(f"{_GRADIENT}{name}", parameters[name]) for name in self._gradients(trainable)},
            step=self._count("step"),
            learning_rate=self._learning_rate(),
            seed=self._integer("seed"),
            draws=self._count("draws"),
            properties={name: self._property(name, pair) for name, pair in self._mapping("properties").items()},
            nominal="nominal" in self.entry,
        )

    def refuse(self, expected: str, got: object) -> NoReturn:
        raise corrupt_file_error(self.path, expected, repr(got)[:200])

    def _restore_strings(self) -> None:
        for name, shape in self._mapping("strings").items():
            try:
                texts = json.loads(self._tensor(name).tobytes())
                array = np.array(texts, dtype=object).reshape(shape)
            except (ValueError, TypeError, RecursionError) as error:
                self.refuse(f"{name!r} as a JSON list of texts", error)
            if not all(isinstance(text, str) for text in array.flat):
                self.refuse(f"{name!r} as a JSON list of texts", "other values")
            self.tensors[name] = array

    def _gradients(self, trainable: Collection[str]) -> list[str]:
        names = [name.removeprefix(_GRADIENT) for name in self.tensors if name.startswith(_GRADIENT)]
        if set(names) - set(trainable):
            self.refuse("gradients of trainable parameters only", names)
        return names

    def _optimizer(self, trainable: Collection[str]) -> dict[str, dict[str, Array]]:
        states: dict[str, dict[str, Array]] = {}
        for name, array in self.tensors.items():
            if name.startswith(_OPTIMIZER):
                state, _, parameter = name.removeprefix(_OPTIMIZER).partition("/")
                states.setdefault(state, {})[parameter] = array
        for state, arrays in states.items():
            if arrays.keys() != set(trainable):
                self.refuse(f"{state!r} for each trainable parameter", sorted(arrays))
        return states

    def _tensor(self, name: str) -> Array:
        if name not in self.tensors:
            self.refuse(f"a tensor {name!r}", "none")
        return self.tensors[name]

    def _like(self, name: str, parameter: Array) -> Array:
        array = self._tensor(name)
        if array.shape != parameter.shape:
            self.refuse(f"{name!r} with the shape {parameter.shape}", array.shape)
        return array

    def _placeholder(self, name: str, value: Any) -> Array:
        """Return an array of this dtype and shape without memory of its own."""
        try:
            dtype, shape = value
            if dtype not in safetensors_file.DTYPE_NAMES:
                self.refuse(f"a numeric dtype for {name!r}", dtype)
            return np.broadcast_to(np.zeros((), dtype_named(dtype)), shape)
        except (ValueError, TypeError) as error:
            self.refuse(f"type and shape of {name!r}", error)

    def _property(self, name: str, pair: Any) -> Property:
        try:
            kind, text = pair
            return _PROPERTY[kind](text)
        except (ValueError, TypeError, KeyError) as error:
            self.refuse(f"type and value of the property {name!r}", error)

    def _mapping(self, key: str) -> dict[str, Any]:
        value = self.entry.get(key, {})
        return value if isinstance(value, dict) else self.refuse(f"an object as {key!r}", value)

    def _texts(self, key: str) -> list[str]:
        value = self.entry.get(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self.refuse(f"a list of names as {key!r}", value)
        return value

    def _integer(self, key: str) -> int:
        value = self.entry.get(key, 0)
        return value if type(value) is int and abs(value) < 2**63 else self.refuse(f"an integer as {key!r}", value)

    def _count(self, key: str) -> int:
        value = self._integer(key)
        return value if value >= 0 else self.refuse(f"an integer >= 0 as {key!r}", value)

    def _learning_rate(self) -> float | None:
        value = self.entry.get("learning_rate")
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        return self.refuse("a number as 'learning_rate'", value)
