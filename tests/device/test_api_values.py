"""Strings and half precision in the training API, and its memory."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.device import checkpoint
from onnxtrain.device.values import copied_to_ort, dtype_named, to_numpy, to_ort
from onnxtrain.errors import TrainingError
from tests.device.small_artifacts import Sketch, write_artifacts

ROOT = Path(__file__).parents[2]
GRADIENT = "w_grad.accumulation"
FACTS = {"trainable": ["w"], "frozen": [], "buffers": []}


def save_w(folder: Path) -> None:
    content = checkpoint.Checkpoint({"w": np.float32(2).reshape(())}, {"w"})
    checkpoint.save(content, folder / "checkpoint")


def opened(folder: Path) -> tuple[CheckpointState, Module]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return state, Module(folder / "training_model.onnx", state)


def finish(g: Sketch, kind: int, path: Path, inputs: list[str], outputs: list[str]) -> None:
    """Add the parameter `w` and the sum of its gradient `d_w`."""
    g.take("w", [], kind)
    g.take(f"{GRADIENT}.buffer", [], kind)
    g.take("lazy_reset_grad", [1], TensorProto.BOOL)
    g.add("Cast", f"{GRADIENT}.buffer", "wide_buffer", to=TensorProto.FLOAT)
    g.add("Add", "wide_buffer d_w", "sum")
    g.add("Where", "lazy_reset_grad d_w sum", "chosen")
    g.constant("scalar", np.zeros(0), "int64")
    g.add("Reshape", "chosen scalar", "reshaped")
    g.add("Cast", "reshaped", f"{GRADIENT}.out", to=kind)
    g.give(f"{GRADIENT}.out", [], kind)
    facts = {
        "kind": "training",
        "inputs": inputs,
        "outputs": outputs,
        "updates": {f"{GRADIENT}.out": f"{GRADIENT}.buffer"},
    }
    g.save(path, FACTS | facts)


def texts(folder: Path) -> None:
    """The loss is w times the sum of the words' numbers; the words are given back."""
    g = Sketch()
    g.take("words", ["n"], TensorProto.STRING)
    g.add(
        "LabelEncoder",
        "words",
        "numbers",
        domain="ai.onnx.ml",
        keys_strings=["one", "zwei", "drei ü"],
        values_floats=[1.0, 2.0, 3.0],
        default_float=0.0,
    )
    g.add("ReduceSum", "numbers", "d_w", keepdims=0)
    g.add("Mul", "d_w w", "loss")
    g.add("Identity", "words", "echo")
    g.give("loss", [])
    g.give("echo", ["n"], TensorProto.STRING)
    finish(g, TensorProto.FLOAT, folder / "training_model.onnx", ["words"], ["loss", "echo"])
    save_w(folder)


def test_strings_as_inputs_and_outputs(tmp_path: Path) -> None:
    texts(tmp_path)
    state, module = opened(tmp_path)
    for words in (["one", "drei ü", "four"], np.array(["zwei", "zwei"]), []):
        words = np.asarray(words, dtype=object if isinstance(words, list) else None)
        loss, echo = module(words)
        expected = sum({"one": 1, "zwei": 2, "drei ü": 3}.get(word, 0) for word in words)
        assert loss == 2 * expected
        assert echo.tolist() == words.tolist()
    assert state.parameters["w"].grad == 8
    module.lazy_reset_grad()
    module(np.array(["one"], dtype=object))
    assert state.parameters["w"].grad == 1
    with pytest.raises(TrainingError, match=r"(?s)'words' has the wrong dtype or shape.*object \(n\).*int64 \(1,\)"):
        module(np.array([1]))


def containers(folder: Path) -> None:
    """The loss is w times the sum of the parts, and of the extra part if there is one; the parts are given back."""
    g = Sketch()
    parts = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"]))
    extra = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["m"]))
    g.inputs += [helper.make_value_info("parts", parts), helper.make_value_info("extra", extra)]
    g.add("ConcatFromSequence", "parts", "joined", axis=0)
    g.add("ReduceSum", "joined", "total", keepdims=0)
    g.add("OptionalHasElement", "extra", "has_extra")
    value = [helper.make_node("OptionalGetElement", ["extra"], ["value"])]
    value.append(helper.make_node("ReduceSum", ["value"], ["more"], keepdims=0))
    more, none = (helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("more", "none"))
    zero = [helper.make_node("Constant", [], ["none"], value_float=0.0)]
    g.add(
        "If",
        "has_extra",
        "added",
        then_branch=helper.make_graph(value, "then", [], [more]),
        else_branch=helper.make_graph(zero, "else", [], [none]),
    )
    g.add("Add", "total added", "d_w")
    g.add("Mul", "d_w w", "loss")
    g.add("SequenceConstruct", "joined d_w", "both")
    g.give("loss", [])
    g.outputs.append(
        helper.make_value_info(
            "both", helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
        )
    )
    finish(g, TensorProto.FLOAT, folder / "training_model.onnx", ["parts", "extra"], ["loss", "both"])
    save_w(folder)


def test_sequences_and_optionals_as_inputs_and_outputs(tmp_path: Path) -> None:
    containers(tmp_path)
    state, module = opened(tmp_path)
    one, two = np.array([1, 2], np.float32), np.array([4], np.float32)
    loss, both = module([one, two], None)
    assert loss == 14
    assert [part.tolist() for part in both] == [[1, 2, 4], 7]
    loss, _ = module([one], two)
    assert loss == 14
    assert state.parameters["w"].grad == 14
    with pytest.raises(TrainingError, match=r"(?s)could not run the graph.*training_model"):
        module([one.astype(np.int64)], None)
    assert state.parameters["w"].grad == 14


def test_onnxruntime_cannot_create_an_ortvalue_of_strings() -> None:
    """If it can one day, strings need no path of their own."""
    with pytest.raises(RuntimeError, match="non-string"):
        ort.OrtValue.ortvalue_from_numpy(np.array(["one"]))


def halves(folder: Path, dtype: np.dtype, kind: int) -> None:
    """The loss is w · sum(x), computed in float32; x · w is given back in half precision."""
    g = Sketch()
    g.take("x", ["n"], kind)
    g.add("Cast", "x", "wide_x", to=TensorProto.FLOAT)
    g.add("Cast", "w", "wide_w", to=TensorProto.FLOAT)
    g.add("Mul", "wide_x wide_w", "wide_y")
    g.add("ReduceSum", "wide_y", "loss", keepdims=0)
    g.add("ReduceSum", "wide_x", "d_w", keepdims=0)
    g.add("Cast", "wide_y", "y", to=kind)
    g.give("loss", [])
    g.give("y", ["n"], kind)
    finish(g, kind, folder / "training_model.onnx", ["x"], ["loss", "y"])
    o = Sketch()
    o.take("learning_rate", [1])
    o.take("step", [1], TensorProto.INT64)
    o.take("w", [], kind)
    o.take("w_grad", [], kind)
    o.add("Cast", "w", "wide_w", to=TensorProto.FLOAT)
    o.add("Cast", "w_grad", "wide_g", to=TensorProto.FLOAT)
    o.add("Mul", "learning_rate wide_g", "change")
    o.add("Sub", "wide_w change", "new")
    o.constant("scalar", np.zeros(0), "int64")
    o.add("Reshape", "new scalar", "reshaped")
    o.add("Cast", "reshaped", "w.out", to=kind)
    o.give("w.out", [], kind)
    facts = {"kind": "optimizer", "inputs": ["learning_rate", "step"], "outputs": [], "updates": {"w.out": "w"}}
    o.save(folder / "optimizer_model.onnx", FACTS | facts)
    checkpoint.save(checkpoint.Checkpoint({"w": np.array(1.5).astype(dtype)}, {"w"}), folder / "checkpoint")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(np.dtype(np.float16), TensorProto.FLOAT16), (np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16)],
    ids=str,
)
def test_half_precision_inputs_and_outputs(dtype: np.dtype, kind: int, tmp_path: Path) -> None:
    halves(tmp_path, dtype, kind)
    state, module = opened(tmp_path)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.25)
    x = np.array([0.5, 1.25, -3, 7, 0.1], np.float32).astype(dtype)
    w = state.parameters["w"].data
    loss, y = module(x)
    assert loss == np.float32(1.5) * x.astype(np.float32).sum()
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, (x.astype(np.float32) * 1.5).astype(dtype))
    gradient = x.astype(np.float32).sum().astype(dtype)
    assert state.parameters["w"].grad == gradient
    optimizer.step()
    expected = (np.float32(1.5) - np.float32(0.25) * gradient.astype(np.float32)).astype(dtype)
    assert state.parameters["w"].data is w
    assert w == expected
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    saved = CheckpointState.load_checkpoint(tmp_path / "saved").parameters["w"].data
    assert saved.dtype == dtype
    assert saved == expected
    buffer = module.get_contiguous_parameters()
    module.copy_buffer_to_parameters(buffer)
    assert w == expected


# Single values.

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_precision_value_is_preserved(dtype: np.dtype) -> None:
    """All 65536 values, including every NaN payload, infinities, subnormals and −0.0."""
    values = np.arange(2**16, dtype=np.uint16).view(dtype)
    for value in (to_ort(values), copied_to_ort(values)):
        assert value.data_type() == f"tensor({dtype.name})"
        assert to_numpy(value).tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_to_half_is_to_the_nearest_even(dtype: np.dtype) -> None:
    """Every midpoint between neighbours, and the numbers just below and above, against exact arithmetic."""
    halves = np.arange(0x8000, dtype=np.uint16).view(dtype)
    finite = halves[np.isfinite(halves.astype(np.float32))]
    low, high = (part.astype(np.float64) for part in (finite[:-1], finite[1:]))
    middle = ((low + high) / 2).astype(np.float32)
    exact = middle.astype(np.float64) == (low + high) / 2  # all but some bfloat16 subnormals
    even = (finite[:-1].view(np.uint16) & 1) == 0
    expected = np.where(even, finite[:-1].view(np.uint16), finite[1:].view(np.uint16))
    np.testing.assert_array_equal(middle.astype(dtype).view(np.uint16)[exact], expected[exact])
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    np.testing.assert_array_equal(below.astype(dtype)[exact], finite[:-1][exact])
    np.testing.assert_array_equal(above.astype(dtype)[exact], finite[1:][exact])


def test_a_value_with_its_own_memory_outlives_its_source() -> None:
    array = copied_to_ort(np.arange(10**6, dtype=np.float32)).numpy()
    noise = [np.full(10**6, -1, np.float32) for _ in range(5)]
    np.testing.assert_array_equal(array, np.arange(10**6))
    assert len(noise) == 5


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_shapes_stay(shape: tuple[int, ...]) -> None:
    for dtype in ("float32", "float16", "bfloat16", "int64", "bool"):
        array = np.zeros(shape, dtype_named(dtype))
        for value in (to_ort(array), copied_to_ort(array)):
            assert to_numpy(value).shape == shape
            assert to_numpy(value).dtype == array.dtype


# Memory.


def run(script: str, folder: Path) -> list[int]:
    """Run a script in a separate process, and return the integers that it prints."""
    lines = """
import sys
import numpy as np
from onnxtrain.api import CheckpointState, Module, Optimizer
folder = sys.argv[1]
state = CheckpointState.load_checkpoint(folder + "/checkpoint")
module = Module(folder + "/training_model.onnx", state, folder + "/eval_model.onnx")
optimizer = Optimizer(folder + "/optimizer_model.onnx", module)
def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // 10**6
def batch(size):
    return np.ones((size, 4), np.float32), np.ones((size, 3), np.float32)
"""
    command = [sys.executable, "-c", lines + script, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=200)
    return [int(line) for line in ran.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_sessions_use_the_same_temporary_memory(tmp_path: Path) -> None:
    """Eval needs 4 tensors of 36 MB after a training step that had as many: it takes those."""
    script = """
big = batch(3_000_000)
before = megabytes()
module(*big)
after = megabytes()
module.eval()(*big)
print(after - before, megabytes() - after)
"""
    train, evaluate = run(script, write_artifacts(tmp_path))
    assert train > 100
    assert evaluate < 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat_over_a_thousand_steps(tmp_path: Path) -> None:
    script = """
def steps(count):
    for size in range(count):
        module.train()(*batch(1000 + size % 7))
        optimizer.step()
        module.lazy_reset_grad()
        module.eval()(*batch(1000))
steps(200)
before = megabytes()
steps(1000)
print(megabytes() - before)
"""
    (growth,) = run(script, write_artifacts(tmp_path))
    assert growth < 2
