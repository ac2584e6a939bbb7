"""Checkpoints: ours, and those of onnxruntime-training 1.17 to 1.19."""

import contextlib
import json
from pathlib import Path

import flatbuffers
import ml_dtypes
import numpy as np
import pytest

from onnxtrain.device import checkpoint, safetensors_file
from onnxtrain.errors import CheckpointError
from tests.device import ort_training_files
from tests.device.small_artifacts import TRAINABLE, fresh
from tests.reference import assert_matches_float64
from tests.thinned import slow_except


def full() -> checkpoint.Checkpoint:
    content = fresh()
    rng = np.random.default_rng(3)
    values = {name: rng.standard_normal(content.parameters[name].shape).astype(np.float32) for name in TRAINABLE}
    content.optimizer = {"first_order_moment": values, "second_order_moment": {n: v * v for n, v in values.items()}}
    content.gradients = {name: -value for name, value in values.items()}
    content.step, content.learning_rate, content.seed, content.draws = 7, 0.1 + 0.2, 2**62, 11
    content.properties = {"epoch": 3, "best": 0.1, "note": "hé\n", "big": 2**40, "nan": float("nan"), "minus": -2}
    content.parameters["words"] = np.array([["a", "bé"], ["", "\0"]], dtype=object)
    content.parameters["half"] = np.array([1.5, np.nan], ml_dtypes.bfloat16)
    return content


def assert_same(a: checkpoint.Checkpoint, b: checkpoint.Checkpoint) -> None:
    assert list(a.parameters) == list(b.parameters)
    groups = [(a.parameters, b.parameters), (a.gradients, b.gradients)]
    groups += [(a.optimizer[state], b.optimizer[state]) for state in a.optimizer]
    for ours, theirs in groups:
        for name, array in ours.items():
            assert array.dtype == theirs[name].dtype
            assert array.tolist() == theirs[name].tolist() or array.tobytes() == theirs[name].tobytes()
    assert a.optimizer.keys() == b.optimizer.keys()
    assert set(a.trainable) == set(b.trainable)
    assert (a.step, a.learning_rate, a.seed, a.draws) == (b.step, b.learning_rate, b.seed, b.draws)
    assert repr(a.properties) == repr(b.properties)


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    checkpoint.save(full(), tmp_path / "file")
    assert_same(checkpoint.load(tmp_path / "file"), full())


def test_without_optimizer_state(tmp_path: Path) -> None:
    checkpoint.save(full(), tmp_path / "file", include_optimizer_state=False)
    read = checkpoint.load(tmp_path / "file")
    assert (read.optimizer, read.gradients, read.step, read.learning_rate) == ({}, {}, 0, None)
    assert (read.seed, read.draws, read.properties["epoch"]) == (2**62, 11, 3)


def test_parameters_stand_under_their_own_names(tmp_path: Path) -> None:
    checkpoint.save(fresh(), tmp_path / "file")
    tensors, _ = safetensors_file.read(tmp_path / "file")
    assert tensors.keys() == fresh().parameters.keys()


def test_a_nominal_checkpoint_holds_types_and_shapes(tmp_path: Path) -> None:
    content = fresh(nominal=True)
    content.parameters["half"] = np.zeros((2, 3), ml_dtypes.bfloat16)
    checkpoint.save(content, tmp_path / "file")
    read = checkpoint.load(tmp_path / "file")
    assert read.nominal
    assert safetensors_file.read(tmp_path / "file")[0] == {}
    assert {n: (a.dtype, a.shape) for n, a in read.parameters.items()} == {
        n: (a.dtype, a.shape) for n, a in content.parameters.items()
    }


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    content = checkpoint.Checkpoint({"onnxtrain:x": np.ones(1)}, frozenset())
    with pytest.raises(CheckpointError, match="reserved"):
        checkpoint.save(content, tmp_path / "file")


ENTRY = {
    "version": 1,
    "parameters": ["w"],
    "trainable": ["w"],
    "seed": 0,
    "draws": 0,
    "properties": {},
    "step": 0,
    "learning_rate": None,
}
HOSTILE = {
    "no JSON": "{",
    "nested deeply": "[" * 200_000,
    "a list": "[]",
    "another version": ENTRY | {"version": 2},
    "no version": {},
    "a parameter without a tensor": ENTRY | {"parameters": ["w", "v"]},
    "names that are numbers": ENTRY | {"parameters": [1]},
    "a trainable stranger": ENTRY | {"trainable": ["v"]},
    "a step that is a text": ENTRY | {"step": "1"},
    "a negative step": ENTRY | {"step": -1},
    "a step too large": ENTRY | {"step": 2**70},
    "a learning rate that is a list": ENTRY | {"learning_rate": [1]},
    "a property of an unknown type": ENTRY | {"properties": {"p": ["eval", "1"]}},
    "a property of a type that is a list": ENTRY | {"properties": {"p": [[], "1"]}},
    "a property without a value": ENTRY | {"properties": {"p": ["int"]}},
    "a property that is not a number": ENTRY | {"properties": {"p": ["int", "x"]}},
    "a property of a million digits": ENTRY | {"properties": {"p": ["int", "9" * 10**6]}},
    "properties that are a list": ENTRY | {"properties": []},
    "texts that are none": ENTRY | {"strings": {"w": [1]}},
    "texts of a tensor that is not there": ENTRY | {"strings": {"v": [1]}},
    "a nominal type that is not there": ENTRY | {"nominal": {"w": ["float33", [1]]}},
    "a nominal shape below 0": ENTRY | {"nominal": {"w": ["float32", [-1]]}},
    "a nominal type of objects": ENTRY | {"nominal": {"w": ["object", [1]]}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_metadata_is_refused(case: str, tmp_path: Path) -> None:
    text = HOSTILE[case]
    metadata = {checkpoint.ENTRY: text if isinstance(text, str) else json.dumps(text)}
    safetensors_file.write(tmp_path / "file", {"w": np.ones(2, np.float32)}, metadata)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(tmp_path / "file")
    assert len(str(error.value)) < 1000


def test_moments_of_strangers_are_refused(tmp_path: Path) -> None:
    for name in ("onnxtrain:optimizer/m/stranger", "onnxtrain:gradient/stranger", "onnxtrain:optimizer/"):
        tensors = {"w": np.ones(2, np.float32), name: np.ones(2, np.float32)}
        safetensors_file.write(tmp_path / "file", tensors, {checkpoint.ENTRY: json.dumps(ENTRY)})
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.load(tmp_path / "file")


def test_files_that_are_not_checkpoints_are_refused(tmp_path: Path) -> None:
    safetensors_file.write(tmp_path / "weights", {"w": np.ones(2)})
    with pytest.raises(CheckpointError, match="not a training checkpoint"):
        checkpoint.load(tmp_path / "weights")
    with pytest.raises(CheckpointError, match="folder"):
        checkpoint.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "missing")


# ONNX Runtime Training's files.


def _read(tmp_path: Path, content: bytes) -> checkpoint.Checkpoint:
    (tmp_path / "file").write_bytes(content)
    return checkpoint.load(tmp_path / "file")


def test_ort_trainings_parameters_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    read = _read(tmp_path, ort_training_files.INITIAL)
    np.testing.assert_array_equal(read.parameters["fc.weight"], rng.standard_normal((3, 4)).astype(np.float32))
    np.testing.assert_array_equal(read.parameters["fc.bias"], rng.standard_normal(3).astype(np.float32))
    np.testing.assert_array_equal(read.parameters["scale"], np.float32([2, 3, 4]))
    assert read.trainable == {"fc.weight", "fc.bias"}
    assert (read.step, read.optimizer, read.properties, read.nominal) == (0, {}, {}, False)


def test_ort_trainings_moments_are_those_of_its_three_steps(tmp_path: Path) -> None:
    """Both moments, recomputed from the gradients in float64: so they are not mixed up."""
    exact = ort_training_files.in_float64(3)
    read = _read(tmp_path, ort_training_files.WITH_OPTIMIZER)
    assert read.step == 3
    assert_matches_float64(read.optimizer["first_order_moment"], exact.first_order_moment, "first moment")
    assert_matches_float64(read.optimizer["second_order_moment"], exact.second_order_moment, "second moment")
    assert_matches_float64({name: read.parameters[name] for name in exact.parameters}, exact.parameters, "parameter")


def test_ort_trainings_properties_are_read(tmp_path: Path) -> None:
    for content in (ort_training_files.PARAMETERS, ort_training_files.WITH_OPTIMIZER):
        properties = _read(tmp_path, content).properties
        assert properties == {"epoch": 7, "best": 0.25, "note": "hé", "big": 2**40, "neg": -2}


def test_ort_trainings_nominal_file_names_its_parameters(tmp_path: Path) -> None:
    read = _read(tmp_path, ort_training_files.NOMINAL)
    assert read.nominal
    assert read.parameters.keys() == {"fc.weight", "fc.bias", "scale"}
    assert read.trainable == {"fc.weight", "fc.bias"}


def test_ort_trainings_second_file_must_be_there_and_whole(tmp_path: Path) -> None:
    data = tmp_path / "file.data"
    with pytest.raises(FileNotFoundError):
        _read(tmp_path, ort_training_files.EXTERNAL)
    data.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(tmp_path / "file")


@pytest.mark.slow
@pytest.mark.large(gb=8)
def test_ort_trainings_second_file_is_read(tmp_path: Path) -> None:
    """1.9 GB that are holes but for the last number of each tensor."""
    with open(tmp_path / "file.data", "wb") as file:
        for index in range(1, 4):
            file.seek(index * 640_000_000 - 4)
            file.write(np.float32(index).tobytes())
    read = _read(tmp_path, ort_training_files.EXTERNAL)
    np.testing.assert_array_equal(read.parameters["small"], np.arange(5, dtype=np.float32))
    np.testing.assert_array_equal(read.parameters["tail"], np.arange(7))
    for index in range(3):
        array = read.parameters[f"big{index}"]
        assert array.shape == (160_000_000,)
        assert (array[0], array[-1]) == (0, index + 1)


def test_a_small_file_of_ort_training_does_not_become_a_large_model(tmp_path: Path) -> None:
    """Two thousand tensors that share the same 100 kB."""
    builder = flatbuffers.Builder()
    raw = builder.CreateByteVector(bytes(100_000))
    dims = builder.CreateNumpyVector(np.array([25_000]))
    tensors = []
    for number in range(2000):
        name = builder.CreateString(str(number))
        builder.StartObject(7)
        builder.PrependUOffsetTRelativeSlot(0, name, 0)
        builder.PrependUOffsetTRelativeSlot(2, dims, 0)
        builder.PrependInt32Slot(3, 1, 0)
        builder.PrependUOffsetTRelativeSlot(4, raw, 0)
        builder.PrependInt64Slot(6, -1, 0)
        tensors.append(builder.EndObject())
    builder.StartVector(4, len(tensors), 4)
    for tensor in tensors:
        builder.PrependUOffsetTRelative(tensor)
    frozen = builder.EndVector()
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(1, frozen, 0)
    module = builder.EndObject()
    builder.StartObject(4)
    builder.PrependInt32Slot(0, 2, 0)
    builder.PrependUOffsetTRelativeSlot(1, module, 0)
    builder.Finish(builder.EndObject(), b"ODTC")
    with pytest.raises(CheckpointError, match="more tensors than bytes"):
        _read(tmp_path, bytes(builder.Output()))


@pytest.mark.parametrize("name", slow_except(["WITH_OPTIMIZER", "NOMINAL", "EXTERNAL"], "WITH_OPTIMIZER"))
def test_a_damaged_file_of_ort_training_leads_to_no_other_error(name: str, tmp_path: Path) -> None:
    content = getattr(ort_training_files, name)
    rng = np.random.default_rng(0)
    for length in range(0, len(content), 3):
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            assert_same(_read(tmp_path, content[:length]), _read(tmp_path, content))
            assert length >= len(content) - 4, "only the zeros that fill up the last word may be missing"
    for _ in range(600):
        damaged = bytearray(content)
        for index in rng.integers(0, len(content), rng.integers(1, 4)):
            damaged[index] = rng.integers(256)
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            _read(tmp_path, bytes(damaged))
