"""Sessions of training graphs on stock onnxruntime, bound to shared memory.

All sessions of a process allocate temporary CPU memory from one arena: training, evaluation and optimizer step share
it. Parameters, gradients and optimizer state are bound once: a step copies none of them.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime import OrtValue
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from onnxtrain.device.values import Array, copied_to_ort, dtype_name, is_text, numpy_name, to_numpy, to_ort, write
from onnxtrain.errors import TrainingError

METADATA = "onnxtrain"
VERSION = 1
_PREPACKING = "session.disable_prepacking"
_SHARED_ALLOCATORS = "session.use_env_allocators"
_ORT_ERRORS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
    RuntimeError,
    ValueError,
)
_LISTS = ("inputs", "outputs", "trainable", "frozen", "buffers", "state", "in_chunks")  # in the metadata
_CHUNK = 2**15  # elements of a parameter updated at a time: with gradient and moments they fit into a cache
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@dataclass(frozen=True)
class Device:
    """The device of graphs and parameters: `cpu`, `cuda` or `cuda:1`."""

    kind: str = "cpu"
    index: int = 0

    @classmethod
    def named(cls, name: str) -> Device:
        """Parse a device name.

        Raises:
            TrainingError: the name is invalid, or this onnxruntime has no execution provider for the device.
        """
        kind, colon, index = name.partition(":")
        if kind not in _PROVIDERS or (colon and not index.isdecimal()):
            raise TrainingError("Unknown device.", "device=", "'cpu', 'cuda' or 'cuda:<number>'", repr(name))
        available = ort.get_available_providers()
        if _PROVIDERS[kind] not in available:
            todo = "Install onnxruntime-gpu in place of onnxruntime, or use device='cpu'."
            problem = f"This onnxruntime cannot run on {name!r}."
            raise TrainingError(problem, "device=", _PROVIDERS[kind], ", ".join(available), todo)
        return cls(kind, int(index or 0))

    @property
    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """The execution providers by preference; the CPU runs ops that others do not support."""
        if self.kind == "cpu":
            return [_PROVIDERS["cpu"]]
        return [(_PROVIDERS[self.kind], {"device_id": str(self.index)}), _PROVIDERS["cpu"]]

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


class Buffer:
    """A tensor that training updates in place. All sessions that use it are bound to the same memory."""

    def __init__(self, array: Array, device: Device) -> None:
        self.dtype = dtype_name(array)
        self.shape = array.shape
        self._array = _own(array) if device.kind == "cpu" else None
        self.value: Any  # bound by sessions: an OrtValue, or an array of strings
        if self._array is None:
            self.value = _on_device(array, device)
        else:
            self.value = self._array if is_text(array) else to_ort(self._array)

    def numpy(self) -> Array:
        """Return a view of the memory on the CPU, so writing to it changes the model; a copy on other devices."""
        return self._array if self._array is not None else to_numpy(self.value)

    def fill(self, array: Array) -> None:
        """Copy values to the memory.

        Raises:
            TrainingError: the array has another shape or dtype.
        """
        if (dtype_name(array), array.shape) != (self.dtype, self.shape):
            got = f"{dtype_name(array)} {array.shape}"
            raise TrainingError("The values have the wrong shape or dtype.", None, self, got, "Convert them first.")
        if self._array is not None:
            self._array[...] = array
        else:
            write(array, self.value)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def _chunks(size: int) -> int:
    """Return the number of equal chunks of about `_CHUNK` elements that `size` divides into; 1 if none is close."""
    fitting = [n for n in range(-(-size // (2 * _CHUNK)), 4 * size // _CHUNK + 1) if size % n == 0]
    return min(fitting, key=lambda n: abs(math.log(size / n / _CHUNK)), default=1)


def _own(array: Array) -> Array:
    """Return the array itself if training may write to it, else a copy."""
    flags = array.flags
    return array if flags.c_contiguous and flags.writeable and flags.aligned else np.array(array, order="C")


def _on_device(array: Array, device: Device) -> OrtValue:
    if is_text(array):
        raise TrainingError("String tensors are supported on the CPU only.", "device=", "cpu", str(device))
    return copied_to_ort(array, device.kind, device.index)


@dataclass(frozen=True)
class ArtifactMetadata:
    """The metadata of an artifact, stored in it as JSON."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    updates: Mapping[str, str] = field(default_factory=dict)
    draws: bool = False
    state: tuple[str, ...] = ()
    in_chunks: tuple[str, ...] = ()
    sequences: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def taken_in_chunks(self) -> frozenset[str]:
        """The inputs of an optimizer graph of shape [chunks, elements], independent of the parameter's shape."""
        ends = ("", "_grad", *(f".{state}" for state in self.state))
        return frozenset(f"{name}{end}" for name in self.in_chunks for end in ends)

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameters and buffers, in the graph's order."""
        return (*self.trainable, *self.frozen, *self.buffers)


@dataclass(frozen=True)
class TensorType:
    """The dtype and shape of a graph input; of a sequence or an optional, the type as onnxruntime writes it."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]

    @property
    def is_tensor(self) -> bool:
        """Whether the input is a tensor."""
        return not _holds_tensors(self.dtype)

    def takes(self, dtype: str, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this dtype and shape can be fed."""
        return (
            dtype == self.dtype
            and len(shape) == len(self.shape)
            and all(size == actual for size, actual in zip(self.shape, shape, strict=True) if isinstance(size, int))
        )

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join('any' if size is None else str(size) for size in self.shape)})"


class Graph:
    """A session of one artifact, bound to the memory that it works on."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        device: Device,
        options: ort.SessionOptions,
        convert: Callable[[Path], bytes | None],
    ) -> None:
        """Load the artifact; `convert` converts a file of onnxruntime-training, and returns None for any other file."""
        self.path = Path(path)
        self._device = device
        try:
            self._session = open_session(self.path, device, options)
            self.metadata = _metadata(self._session, self.path, kind)
        except TrainingError:
            converted = convert(self.path)
            if converted is None:
                raise
            self._session = open_session(converted, device, options)
            self.metadata = _metadata(self._session, self.path, kind)
        self.types = dict(_types(self._session.get_inputs(), self.metadata.sequences))
        self.outputs = [name for name in self.metadata.outputs if name not in self.metadata.updates]
        self._binds = not self.metadata.sequences and all(map(_can_be_bound, self._session.get_inputs()))
        self._binds &= not any(_holds_tensors(arg.type) for arg in self._session.get_outputs())
        self._binding = self._session.io_binding()
        self._bound: dict[str, Buffer] = {}
        self._reset_outputs()  # bound first, to be the first results

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        """Bind these inputs, and the outputs that update them, to the same memory."""
        self._bound |= {name: buffer for name, buffer in buffers.items() if name in self.types}
        if not self._binds:
            return
        in_chunks = self.metadata.taken_in_chunks
        for name, buffer in self._bound.items():
            if name in in_chunks:
                self._binding.bind_input(name, *self._memory_in_chunks(buffer))
            else:
                self._binding.bind_ortvalue_input(name, buffer.value)
        for output, name in self.metadata.updates.items():
            if name in in_chunks:
                self._binding.bind_output(output, *self._memory_in_chunks(self._bound[name]))
            elif name in self._bound:
                self._binding.bind_ortvalue_output(output, self._bound[name].value)

    def _memory_in_chunks(self, buffer: Buffer) -> tuple[str, int, Any, list[int], int]:
        """Return a buffer as (device, index, element type, [chunks, elements], address)."""
        size = math.prod(buffer.shape)
        chunks = _chunks(size) if self._device.kind == "cpu" else 1  # on a GPU one chunk is fastest
        value = buffer.value
        # onnxruntime before 1.20 takes no integers here, and numpy has no bfloat16.
        element = value.element_type() if buffer.dtype == "bfloat16" else np.dtype(buffer.dtype).type
        return self._device.kind, self._device.index, element, [chunks, size // chunks], value.data_ptr()

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the graph, update bound memory in place, and return `outputs` in new memory on the CPU.

        Args:
            feeds: the inputs that are not bound: arrays, which are not copied, or OrtValues; for a sequence a list of
                arrays, for an optional a value or None.

        Raises:
            TrainingError: onnxruntime failed. Bound memory may be partially updated.
        """
        try:
            return self._run_bound(feeds) if self._binds else self._run_on_arrays(feeds)
        except _ORT_ERRORS as error:
            raise TrainingError("onnxruntime could not run the graph.", str(self.path), got=error) from error

    def check(self, feeds: Mapping[str, Any]) -> None:
        """Raise TrainingError if a tensor has the wrong dtype or shape, or two have inconsistent dimensions."""
        sizes: dict[str, tuple[int, str]] = {}
        for name, feed in feeds.items():
            expected = self.types[name]
            if not expected.is_tensor:
                continue  # onnxruntime checks it
            dtype, shape = _dtype_and_shape(feed)
            if not expected.takes(dtype, shape):
                problem = f"The input {name!r} has the wrong dtype or shape."
                raise TrainingError(problem, str(self.path), expected, f"{dtype} {shape}", "Convert it first.")
            for symbol, size in zip(expected.shape, shape, strict=True):
                first_size, first = sizes.setdefault(symbol, (size, name)) if isinstance(symbol, str) else (size, name)
                if first_size != size:
                    problem = f"The inputs {first!r} and {name!r} have inconsistent dimensions."
                    raise TrainingError(problem, str(self.path), f"one size of {symbol!r}", f"{first_size} and {size}")

    def _reset_outputs(self) -> None:
        """Request new memory: onnxruntime would otherwise overwrite the results of the last run."""
        for name in self.outputs:
            self._binding.bind_output(name, "cpu")

    def _run_bound(self, feeds: Mapping[str, Array | OrtValue]) -> list[Array | OrtValue]:
        values = {name: feed if isinstance(feed, OrtValue) else to_ort(feed) for name, feed in feeds.items()}
        for name, value in values.items():
            self._binding.bind_ortvalue_input(name, value)
        self._reset_outputs()
        self._session.run_with_iobinding(self._binding)
        results = self._binding.get_outputs_as_ortvaluevector()
        return [OrtValue(results[index]) for index in range(len(self.outputs))]

    def _run_on_arrays(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Run a graph that onnxruntime cannot bind from Python (strings, sequences, optionals): updates are copied."""
        sequences = self.metadata.sequences
        inside = {name for names in sequences.values() for name in names}
        bound: dict[str, Any] = {name: buffer.value for name, buffer in self._bound.items() if name not in inside}
        lists = {name: [self._bound[each].numpy() for each in names] for name, names in sequences.items()}
        updates = {o: name for o, name in self.metadata.updates.items() if name in bound or name in lists}
        results = self._session.run([*self.outputs, *updates], {**bound, **lists, **feeds})
        for name, result in zip(updates.values(), results[len(self.outputs) :], strict=True):
            targets, arrays = (sequences[name], result) if name in lists else ([name], [result])
            for target, array in zip(targets, arrays, strict=True):
                self._bound[target].fill(array)
        return list(results[: len(self.outputs)])


def open_session(graph: Path | bytes, device: Device, options: ort.SessionOptions) -> ort.InferenceSession:
    """Load a graph, from its file or its content, with the settings that all training sessions share.

    Raises:
        TrainingError: onnxruntime cannot load it, or the options enable prepacking.
    """
    _configure(options, _SHARED_ALLOCATORS, "1")
    if _configure(options, _PREPACKING, "1") != "1":
        # A packed copy of a weight would not follow its updates.
        problem = "Prepacking is not supported for training."
        raise TrainingError(problem, f"session_options, {_PREPACKING}", "'1', or not set", "'0'", "Leave it out.")
    _register_allocator()
    try:
        return ort.InferenceSession(graph, options, providers=device.providers)
    except _ORT_ERRORS as error:
        where = str(graph) if isinstance(graph, Path) else None
        raise TrainingError("onnxruntime cannot load the graph.", where, got=error) from error


def _configure(options: ort.SessionOptions, key: str, value: str) -> str:
    """Set a config entry unless it is set, and return its value."""
    try:
        return str(options.get_session_config_entry(key))
    except RuntimeError:  # onnxruntime raises for a missing entry
        options.add_session_config_entry(key, value)
        return value


@functools.cache
def _register_allocator() -> None:
    """Register one arena for the CPU memory of all sessions of the process that enable it."""
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)


def _metadata(session: ort.InferenceSession, path: Path, kind: str) -> ArtifactMetadata:
    text = session.get_modelmeta().custom_metadata_map.get(METADATA)
    if text is None:
        problem = "The model is not a training graph of onnxtrain."
        todo = "Write the artifacts with onnxtrain.artifacts.generate_artifacts."
        raise TrainingError(problem, str(path), f"a metadata entry {METADATA!r}", "none", todo)
    entry: dict[str, Any] = json.loads(text)
    if entry["version"] != VERSION:
        problem = "The version of the training graph is not supported."
        raise TrainingError(problem, str(path), VERSION, entry["version"], "Write the artifacts again.")
    if entry["kind"] != kind:
        raise TrainingError("The file is not the expected artifact.", str(path), f"the {kind} graph", entry["kind"])
    names = {key: tuple(entry.get(key, ())) for key in _LISTS}
    return ArtifactMetadata(
        kind=kind,
        draws=bool(entry.get("draws")),
        updates=entry.get("updates", {}),
        sequences=entry.get("sequences", {}),
        **names,
    )


def _dtype_and_shape(feed: Array | OrtValue) -> tuple[str, tuple[int, ...]]:
    if isinstance(feed, OrtValue):
        return numpy_name(feed.data_type()), tuple(feed.shape())
    return dtype_name(feed), feed.shape


def _holds_tensors(onnx_type: str) -> bool:
    """Return whether a type is a sequence, an optional or another container."""
    return onnx_type.startswith(("seq(", "optional(", "map("))


def _can_be_bound(arg: Any) -> bool:
    return arg.type != "tensor(string)" and not _holds_tensors(arg.type)


def _types(args: Sequence[Any], sequences: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, TensorType]]:
    """Return the types of a graph's inputs. A sequence has those of its tensors, without their shapes."""
    for arg in args:
        if arg.name in sequences:
            dtype = numpy_name(arg.type.removeprefix("seq(").removesuffix(")"))
            yield from ((name, TensorType(name, dtype, ())) for name in sequences[arg.name])
        else:
            yield arg.name, TensorType(arg.name, numpy_name(arg.type), tuple(arg.shape))
