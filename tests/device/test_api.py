"""The training API: the semantics of onnxruntime-training, with its bugs fixed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime import OrtValue

from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxtrain.device import inference_export
from onnxtrain.device.values import to_numpy
from onnxtrain.errors import CheckpointError, OnnxTrainError, TrainingError
from tests.device import ort_training_files
from tests.device.small_artifacts import SHAPES, TRAINABLE, batch, fresh, gradients, trained, write_artifacts
from tests.reference import assert_matches_float64

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_artifacts(tmp_path)


class Training:
    """State, module and optimizer of one folder of artifacts."""

    def __init__(self, folder: Path, checkpoint: str | Path = "checkpoint", device: str = "cpu") -> None:
        self.state = CheckpointState.load_checkpoint(folder / checkpoint)
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx", device=device)
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)

    def step(self, seed: int) -> float:
        loss = self.module.train()(*batch(seed))
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return float(loss)

    def values(self) -> dict[str, bytes]:
        return {name: parameter.data.tobytes() for name, parameter in self.state.parameters}

    def data(self) -> dict[str, np.ndarray]:
        return {name: parameter.data.copy() for name, parameter in self.state.parameters}


@pytest.fixture
def training(folder: Path) -> Training:
    return Training(folder)


# Without PyTorch.


def test_it_requires_only_onnxruntime_and_numpy(folder: Path) -> None:
    script = f"""
import sys
blocked = ["torch", "onnx", "onnx_ir", "ml_dtypes", "safetensors", "sympy"]
sys.modules.update(dict.fromkeys(blocked))  # None: an import of them fails
import numpy as np
from onnxtrain.api import CheckpointState, Module, Optimizer, LinearLRScheduler
import onnxtrain.api
folder = {str(folder)!r}
state = CheckpointState.load_checkpoint(folder + "/checkpoint")
module = Module(folder + "/training_model.onnx", state, folder + "/eval_model.onnx")
optimizer = Optimizer(folder + "/optimizer_model.onnx", module)
scheduler = LinearLRScheduler(optimizer, 1, 5, 0.1)
x, target = np.ones((2, 4), np.float32), np.ones((2, 3), np.float32)
for _ in range(3):
    loss = module(x, target)
    optimizer.step()
    scheduler.step()
    module.lazy_reset_grad()
assert module.eval()(x, target) < loss
CheckpointState.save_checkpoint(state, folder + "/saved", True)
try:
    module.export_model_for_inferencing(folder + "/exported.onnx", ["y"])
except RuntimeError as error:
    assert "pip install onnx-ir" in str(error)
else:
    raise AssertionError("onnx_ir was imported")
assert all(sys.modules.get(name) is None for name in blocked)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=100)


# Steps.


def test_gradients_are_those_of_the_loss_and_sum_up(training: Training) -> None:
    module, state = training.module, training.state
    before = training.data()
    first = gradients(*batch(1), before)
    module(*batch(1))
    assert_matches_float64({name: state.parameters[name].grad for name in TRAINABLE}, first, "gradient")
    module(*batch(2, size=7))
    second = gradients(*batch(2, size=7), before)
    sums = {name: first[name] + second[name] for name in TRAINABLE}
    assert_matches_float64({name: state.parameters[name].grad for name in TRAINABLE}, sums, "sum of gradients")


def test_a_reset_waits_for_the_next_call(training: Training) -> None:
    module, parameter = training.module, training.state.parameters["weight"]
    module(*batch(1))
    once = parameter.grad.copy()
    module(*batch(1))
    np.testing.assert_array_equal(parameter.grad, once + once)
    module.lazy_reset_grad()
    np.testing.assert_array_equal(parameter.grad, once + once)
    module(*batch(1))
    np.testing.assert_array_equal(parameter.grad, once)


def test_the_first_call_does_not_read_uninitialized_memory(training: Training) -> None:
    training.state.parameters["weight"].grad[...] = np.nan
    training.module(*batch(1))
    assert np.isfinite(training.state.parameters["weight"].grad).all()


def test_a_step_leaves_the_gradients(training: Training) -> None:
    training.module(*batch(1))
    before = training.state.parameters["weight"].grad.copy()
    training.optimizer.step()
    np.testing.assert_array_equal(training.state.parameters["weight"].grad, before)


def test_updates_follow_the_gradients(training: Training) -> None:
    before = training.data()
    training.optimizer.set_learning_rate(0.5)
    training.step(1)
    after = training.data()
    assert_matches_float64(after, trained([1], learning_rate=0.5))
    np.testing.assert_array_equal(after["scale"], before["scale"])


def test_eval_changes_nothing(training: Training) -> None:
    training.step(1)
    before = training.values() | {"grad": training.state.parameters["weight"].grad.tobytes()}
    training.module.eval()
    assert not training.module.training
    loss = training.module(*batch(2))
    assert before == training.values() | {"grad": training.state.parameters["weight"].grad.tobytes()}
    assert training.module.train().training
    assert loss == training.module(*batch(2))


def test_a_step_copies_no_parameter(training: Training) -> None:
    """The memory stays the same, and an array taken before sees all later steps."""
    arrays = {name: parameter.data for name, parameter in training.state.parameters}
    grads = {name: training.state.parameters[name].grad for name in TRAINABLE}
    old = {name: array.copy() for name, array in arrays.items()}
    training.step(1)
    for name, array in arrays.items():
        assert training.state.parameters[name].data is array
        assert (array != old[name]).any() == (name != "scale")
    assert all(training.state.parameters[name].grad is grad for name, grad in grads.items())


def test_results_are_not_overwritten_by_the_next_call(training: Training) -> None:
    losses = [training.module(*batch(seed)) for seed in range(5)]
    again = [float(training.module(*batch(seed))) for seed in range(5)]
    assert [float(loss) for loss in losses] == again
    assert len(set(again)) == 5


def test_arrays_give_arrays_and_ortvalues_give_ortvalues(training: Training) -> None:
    x, target = batch(1)
    loss = training.module(x, target)
    assert (type(loss), loss.shape, loss.dtype) == (np.ndarray, (), np.float32)
    as_ort = training.module(OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(target))
    assert isinstance(as_ort, OrtValue)
    assert as_ort.numpy() == loss
    assert isinstance(training.module(x, OrtValue.ortvalue_from_numpy(target)), np.ndarray)


def test_inputs_may_have_any_strides_and_alignment(training: Training) -> None:
    x, target = batch(1, size=6)
    expected = training.module(x, target)
    strided = np.repeat(x, 2, axis=0)[::2]
    frozen = target.copy(order="F")
    frozen.flags.writeable = False
    assert training.module(strided, frozen) == expected
    assert training.module(*batch(1, size=0)).shape == ()
    assert training.module(*batch(1, size=1)).shape == ()


def test_names(training: Training) -> None:
    module = training.module
    assert (module.input_names(), module.output_names()) == (["x", "target"], ["loss"])
    module.eval()
    assert (module.input_names(), module.output_names()) == (["x", "target"], ["loss"])


# Parameters and properties.


def test_parameters_are_named_in_alphabetical_order(training: Training) -> None:
    parameters = training.state.parameters
    assert [name for name, _ in parameters] == sorted(SHAPES)
    assert len(parameters) == 4
    assert "weight" in parameters
    assert "other" not in parameters
    assert repr(parameters) == "Parameters(bias, mean, scale, weight)"
    assert repr(parameters["bias"]) == "Parameter(name=bias, requires_grad=True)"
    assert {name for name, parameter in parameters if parameter.requires_grad} == set(TRAINABLE)
    assert parameters["scale"].grad is None
    with pytest.raises(KeyError, match="Unknown parameter"):
        parameters["other"]
    with pytest.raises(KeyError, match="Unknown parameter"):
        parameters["other"] = np.ones(3, np.float32)


def test_parameters_can_be_set_before_there_is_a_module(folder: Path) -> None:
    """ONNX Runtime Training's process died of it."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    assert state.parameters["bias"].grad is None
    state.parameters["bias"] = np.float32([1, 2, 3])
    x, target = batch(1)
    module = Module(folder / "training_model.onnx", state)
    with_bias = module(x, target)
    state.parameters["bias"].data[...] = 0
    assert module(x, target) != with_bias
    state.parameters["bias"].data = np.float32([1, 2, 3])
    assert module(x, target) == with_bias


@pytest.mark.parametrize("value", [np.ones(4, np.float32), np.ones(3), np.ones(3, np.float16), np.ones((3, 1), "f4")])
def test_a_parameter_keeps_shape_and_dtype(value: np.ndarray, training: Training) -> None:
    with pytest.raises(TrainingError, match="wrong shape or dtype"):
        training.state.parameters["bias"] = value


def test_properties(folder: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    given = {
        "epoch": 3,
        "best": 0.1,
        "note": "hi",
        "flag": True,
        "big": 2**40,
        "np": np.int32(5),
        "np float": np.float32(0.5),
    }
    for name, value in given.items():
        state.properties[name] = value
    state.properties["epoch"] = 4
    CheckpointState.save_checkpoint(state, folder / "saved")
    properties = CheckpointState.load_checkpoint(folder / "saved").properties
    assert dict(properties) == given | {"epoch": 4, "flag": 1}
    assert type(properties["flag"]) is int
    assert (len(properties), "epoch" in properties, "other" in properties) == (7, True, False)
    assert repr(properties).startswith("Properties({'best': 0.1")
    with pytest.raises(KeyError, match="Unknown property"):
        properties["other"]
    for wrong in ([1], None, 1j):
        with pytest.raises(TypeError, match="int, float or str"):
            properties["list"] = wrong


# Contiguous buffers.


def test_the_buffer_is_a_copy_in_the_graphs_order(training: Training) -> None:
    data = training.data()
    flat = training.module.get_contiguous_parameters()
    assert isinstance(flat, OrtValue)
    expected = np.concatenate([data[name].reshape(-1) for name in ("weight", "bias", "scale", "mean")])
    np.testing.assert_array_equal(flat.numpy(), expected)
    trainable = training.module.get_contiguous_parameters(trainable_only=True).numpy()
    np.testing.assert_array_equal(trainable, expected[:15])
    assert training.module.get_parameters_size() == 15
    assert training.module.get_parameters_size(trainable_only=False) == 22
    trainable[...] = 0
    np.testing.assert_array_equal(training.data()["weight"], data["weight"])


def test_a_buffer_can_be_copied_back(training: Training) -> None:
    flat = np.arange(22, dtype=np.float32)
    training.module.copy_buffer_to_parameters(OrtValue.ortvalue_from_numpy(flat), trainable_only=False)
    np.testing.assert_array_equal(training.module.get_contiguous_parameters().numpy(), flat)
    training.module.copy_buffer_to_parameters(-flat[:15])
    np.testing.assert_array_equal(training.state.parameters["bias"].data, [-12, -13, -14])
    np.testing.assert_array_equal(training.state.parameters["scale"].data, [15, 16, 17])


def test_an_update_shows_in_the_buffer_and_a_checkpoint_keeps_it(folder: Path, training: Training) -> None:
    before = training.module.get_contiguous_parameters().numpy()
    training.step(1)
    after = training.module.get_contiguous_parameters().numpy()
    assert (before != after).any()
    CheckpointState.save_checkpoint(training.state, folder / "saved")
    np.testing.assert_array_equal(Training(folder, "saved").module.get_contiguous_parameters().numpy(), after)


@pytest.mark.parametrize("buffer", [np.zeros(5, np.float32), np.zeros(15), np.zeros((15, 1), np.float32)])
def test_a_wrong_buffer_is_refused(buffer: np.ndarray, training: Training) -> None:
    with pytest.raises(TrainingError, match=r"expected: +float32 \(15,\)"):
        training.module.copy_buffer_to_parameters(buffer)


# A nominal checkpoint.


def test_a_nominal_state_is_filled_first(folder: Path) -> None:
    training = Training(folder, "nominal_checkpoint")
    assert training.module.get_parameters_size(trainable_only=False) == 22
    save = lambda: CheckpointState.save_checkpoint(training.state, folder / "saved")
    uses: list[Callable[[], object]] = [
        lambda: training.state.parameters["bias"],
        lambda: list(training.state.parameters),
        lambda: training.module(*batch(1)),
        lambda: training.module.eval()(*batch(1)),
        training.optimizer.step,
        training.module.get_contiguous_parameters,
        save,
    ]
    for use in uses:
        with pytest.raises(TrainingError, match="nominal"):
            use()
    training.module.train()
    full_training = Training(folder)
    buffer = full_training.module.get_contiguous_parameters()
    with pytest.raises(TrainingError, match="cannot be filled partially"):
        training.module.copy_buffer_to_parameters(buffer.numpy()[:15])
    training.module.copy_buffer_to_parameters(buffer, trainable_only=False)
    assert [training.step(seed) for seed in range(3)] == [full_training.step(seed) for seed in range(3)]
    save()


def test_ort_trainings_nominal_file_takes_its_shapes_from_the_graph(tmp_path: Path) -> None:
    folder = write_artifacts(tmp_path)
    renamed = ort_training_files.NOMINAL.replace(b"fc.weight", b"weight\0\0\0").replace(b"fc.bias", b"bias\0\0\0")
    (folder / "old").write_bytes(renamed)
    state = CheckpointState.load_checkpoint(folder / "old")
    with pytest.raises(CheckpointError, match="lacks parameters"):
        Module(folder / "training_model.onnx", state)


# Learning rate.


def test_the_learning_rate(training: Training) -> None:
    assert training.optimizer.get_learning_rate() == 1e-3
    training.optimizer.set_learning_rate(5e-4)
    assert training.optimizer.get_learning_rate() == 5e-4
    with pytest.raises(TrainingError, match="finite"):
        training.optimizer.set_learning_rate(float("nan"))


def rates(training: Training, scheduler: LinearLRScheduler, count: int) -> list[float]:
    result = [training.optimizer.get_learning_rate()]
    for seed in range(count):
        training.step(seed)
        scheduler.step()
        result.append(training.optimizer.get_learning_rate())
    return result


def test_the_scheduler_takes_its_counts_in_the_order_of_their_names(training: Training) -> None:
    scheduler = LinearLRScheduler(training.optimizer, warmup_step_count=3, total_step_count=10, initial_lr=1.0)
    expected = [0, 1 / 3, 2 / 3, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7, 0, 0, 0]
    assert rates(training, scheduler, 12) == expected


@pytest.mark.parametrize(
    ("warmup", "total", "expected"), [(0, 4, [1, 0.75, 0.5, 0.25, 0, 0]), (2, 2, [0, 0.5, 0, 0]), (0, 0, [0, 0])]
)
def test_edge_cases_of_the_scheduler(warmup: int, total: int, expected: list[float], training: Training) -> None:
    scheduler = LinearLRScheduler(training.optimizer, warmup, total, 1.0)
    assert rates(training, scheduler, len(expected) - 1) == expected


def test_the_scheduler_reads_the_optimizers_count(folder: Path, training: Training) -> None:
    scheduler = LinearLRScheduler(training.optimizer, 3, 10, 1.0)
    for _ in range(5):
        scheduler.step()
    assert training.optimizer.get_learning_rate() == 0
    rates(training, scheduler, 5)
    CheckpointState.save_checkpoint(training.state, folder / "saved", include_optimizer_state=True)
    resumed = Training(folder, "saved")
    LinearLRScheduler(resumed.optimizer, 3, 10, 1.0)
    assert resumed.optimizer.get_learning_rate() == training.optimizer.get_learning_rate() == 5 / 7


@pytest.mark.parametrize("counts", [(10, 3), (-1, 3), (0, -1)])
def test_counts_that_do_not_fit_are_refused(counts: tuple[int, int], training: Training) -> None:
    with pytest.raises(TrainingError, match="order of their names"):
        LinearLRScheduler(training.optimizer, *counts, 1.0)


# Resuming.


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("mid_accumulation", [False, True])
def test_a_resumed_training_equals_the_uninterrupted_one(draws: bool, mid_accumulation: bool, tmp_path: Path) -> None:
    folder = write_artifacts(tmp_path, draws)
    training = Training(folder)
    training.state.seed = 3
    training.optimizer.set_learning_rate(0.01)
    for seed in range(5):
        training.step(seed)
    if mid_accumulation:
        training.module(*batch(50))
    CheckpointState.save_checkpoint(training.state, folder / "saved", include_optimizer_state=True)
    resumed = Training(folder, "saved")
    assert [training.step(seed) for seed in range(5, 10)] == [resumed.step(seed) for seed in range(5, 10)]
    assert training.values() == resumed.values()
    assert resumed.optimizer.step_count == 10
    assert resumed.optimizer.get_learning_rate() == 0.01


def test_without_optimizer_state_the_moments_start_at_zero(folder: Path, training: Training) -> None:
    training.optimizer.set_learning_rate(0.01)
    for seed in range(3):
        training.step(seed)
    CheckpointState.save_checkpoint(training.state, folder / "saved")
    resumed = Training(folder, "saved")
    assert (resumed.optimizer.step_count, resumed.optimizer.get_learning_rate()) == (0, 1e-3)
    resumed.optimizer.set_learning_rate(0.01)
    assert training.step(3) == resumed.step(3)
    assert training.step(4) != resumed.step(4)


def test_each_call_samples_other_values_and_the_seed_reproduces_them(tmp_path: Path) -> None:
    training = Training(write_artifacts(tmp_path, draws=True))

    def drawn(count: int) -> list[bytes]:
        result = []
        for _ in range(count):
            training.module.lazy_reset_grad()
            training.module(*batch(1))
            result.append(training.state.parameters["weight"].grad.tobytes())
        return result

    training.state.seed = 5
    first = drawn(4)
    assert len(set(first)) == 4
    assert first != drawn(4)
    training.state.seed = 5
    assert first == drawn(4)


# Export.


def test_an_exported_model_runs_on_its_own(folder: Path, training: Training) -> None:
    training.step(1)
    path = folder / "exported.onnx"
    training.module.export_model_for_inferencing(path, ["y", "h"])
    session = ort.InferenceSession(path)
    assert [value.name for value in session.get_inputs()] == ["x"]
    assert [value.name for value in session.get_outputs()] == ["y", "h"]
    x, _ = batch(1)
    data = training.data()
    h = np.float64(x) @ data["weight"].T + data["bias"]
    y, hidden = session.run(None, {"x": x})
    assert_matches_float64({"y": y, "h": hidden}, {"y": h * data["scale"], "h": h})
    exported = path.read_bytes()
    training.step(2)
    assert path.read_bytes() == exported
    assert b"onnxtrain" not in exported


def test_constants_and_large_parameters_are_external_data_of_the_exported_model(
    folder: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a model of over 2 GB; external data of the eval graph is exported too."""
    model = onnx.load(folder / "eval_model.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "ones"))
    for node in model.graph.node:
        if node.op_type == "Mul" and node.output[0] == "y":
            node.op_type, node.input[1] = "Sub", "ones"
    onnx.save(model, folder / "outside.onnx", save_as_external_data=True, location="outside.data", size_threshold=0)
    module = Module(folder / "training_model.onnx", training.state, folder / "outside.onnx")
    target = folder / "elsewhere" / "exported.onnx"
    target.parent.mkdir()
    x, _ = batch(1)
    data = training.data()
    expected = np.float64(x) @ data["weight"].T + data["bias"] - 1
    for limit in (inference_export.MAX_TENSOR_BYTES, 10):
        monkeypatch.setattr(inference_export, "MAX_TENSOR_BYTES", limit)
        module.export_model_for_inferencing(target, ["y"])
        assert target.with_name("exported.onnx.data").exists() == (limit == 10)
        assert_matches_float64(ort.InferenceSession(target).run(None, {"x": x})[0], expected, "y")
    assert len(list(target.parent.iterdir())) == 2


def test_invalid_exports_are_refused(folder: Path, training: Training) -> None:
    with pytest.raises(TrainingError, match=r"(?s)no such values.*h, loss.*nope"):
        training.module.export_model_for_inferencing(folder / "exported.onnx", ["y", "nope"])
    with pytest.raises(TrainingError, match="No output of the inference model"):
        training.module.export_model_for_inferencing(folder / "exported.onnx", [])
    without = Module(folder / "training_model.onnx", training.state)
    with pytest.raises(TrainingError, match="eval_model_uri"):
        without.export_model_for_inferencing(folder / "exported.onnx", ["y"])
    assert not (folder / "exported.onnx").exists()


# Errors.


def test_a_call_in_eval_mode_without_an_eval_graph_is_an_error(folder: Path) -> None:
    """ONNX Runtime Training's process died of it."""
    module = Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / "checkpoint")).eval()
    for use in (lambda: module(*batch(1)), module.input_names):
        with pytest.raises(TrainingError, match="no eval graph"):
            use()


X, TARGET = batch(1)
WRONG_CALLS: dict[str, tuple[tuple, str]] = {
    "one input": ((X,), "wrong number of inputs"),
    "three inputs": ((X, TARGET, X), "wrong number of inputs"),
    "float64": ((X.astype(float), TARGET), r"(?s)'x' has the wrong dtype.*float32 \(n, 4\).*float64 \(5, 4\)"),
    "another width": ((X[:, :3], TARGET), r"(?s)'x' has the wrong dtype.*float32 \(n, 4\).*float32 \(5, 3\)"),
    "another rank": ((X, TARGET[0]), "'target' has the wrong dtype or shape"),
    "an OrtValue of int64": ((OrtValue.ortvalue_from_numpy(X.astype(int)), TARGET), "'x' has the wrong dtype"),
    "rows that differ": (
        (X, TARGET[:2]),
        r"(?s)'x' and 'target' have inconsistent dimensions.*one size of 'n'.*5 and 2",
    ),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_inputs_are_named(case: str, training: Training) -> None:
    inputs, message = WRONG_CALLS[case]
    before = training.values()
    with pytest.raises(TrainingError, match=message):
        training.module(*inputs)
    assert before == training.values()
    assert training.step(1) == Training(training.module._train.path.parent).step(1)


def test_a_list_is_not_accepted_as_an_array(training: Training) -> None:
    with pytest.raises(TypeError, match="'x' must be a numpy array"):
        training.module(X.tolist(), TARGET)


def test_wrong_files_are_named(folder: Path, training: Training) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(TrainingError, match="cannot load"):
        Module(folder / "nope.onnx", state)
    with pytest.raises(TrainingError, match="cannot load"):
        Optimizer(folder / "checkpoint", training.module)
    with pytest.raises(TrainingError, match=r"(?s)not the expected artifact.*training graph.*eval"):
        Module(folder / "eval_model.onnx", state)
    training.module.export_model_for_inferencing(folder / "exported.onnx", ["y"])
    with pytest.raises(TrainingError, match="generate_artifacts"):
        Module(folder / "exported.onnx", state)


def _changed(**changes: object) -> CheckpointState:
    content = fresh()
    for name, value in changes.items():
        setattr(content, name, value)
    return CheckpointState(content)


def test_a_checkpoint_of_another_model_is_refused(folder: Path) -> None:
    path = folder / "training_model.onnx"
    parameters = fresh().parameters
    wrong = {
        "lacks parameters": {n: a for n, a in parameters.items() if n != "bias"},
        "differs from the graph in dtype or shape": parameters | {"bias": np.ones(4, np.float32)},
        "(?s)differs from the graph in dtype or shape.*float64": parameters | {"bias": np.ones(3)},
    }
    for message, arrays in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            Module(path, _changed(parameters=arrays))
    with pytest.raises(CheckpointError, match="other trainable"):
        Module(path, _changed(trainable=frozenset({"weight"})))


def test_the_state_of_another_optimizer_is_refused(folder: Path) -> None:
    moments = {name: np.zeros(SHAPES[name], np.float32) for name in TRAINABLE}
    module = Module(folder / "training_model.onnx", _changed(optimizer={"first_order_moment": moments}))
    with pytest.raises(CheckpointError, match="another optimizer"):
        Optimizer(folder / "optimizer_model.onnx", module)
    wide = {name: array.astype(np.float64) for name, array in moments.items()}
    module = Module(folder / "training_model.onnx", _changed(optimizer={"momentum_buffer": wide}))
    with pytest.raises(CheckpointError, match="differs from the graph in dtype or shape"):
        Optimizer(folder / "optimizer_model.onnx", module)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:", "CPU", "cuda:-1"])
def test_an_unknown_device_is_refused(device: str, folder: Path) -> None:
    with pytest.raises(TrainingError, match="Unknown device"):
        Module(folder / "training_model.onnx", _changed(), device=device)


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this onnxruntime has CUDA")
def test_a_device_that_onnxruntime_cannot_use_is_refused(folder: Path) -> None:
    with pytest.raises(TrainingError, match=r"(?s)cannot run on 'cuda:1'.*onnxruntime-gpu"):
        Module(folder / "training_model.onnx", _changed(), device="cuda:1")


needs_cuda = pytest.mark.skipif(
    "CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_cuda)])
def test_three_steps_on_a_device(device: str, folder: Path) -> None:
    training = Training(folder, device=device)
    for seed in range(3):
        training.step(seed)
    assert_matches_float64(training.data(), trained(range(3)))


# Sessions.


def test_prepacking_is_refused(folder: Path) -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "0")
    with pytest.raises(TrainingError, match="Prepacking is not supported for training"):
        Module(folder / "training_model.onnx", _changed(), session_options=options)


def test_sessions_run_with_the_callers_options(folder: Path) -> None:
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    module = Module(folder / "training_model.onnx", _changed(), folder / "eval_model.onnx", session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    # Sessions opened within the same second write the same file: its name holds the time.
    assert list(folder.glob("profile*"))
    for graph in (module._train, module._eval, optimizer._graph):
        assert graph._session.get_session_options().enable_profiling


def test_two_states_do_not_disturb_each_other(folder: Path) -> None:
    alone = Training(folder)
    expected = [alone.step(seed) for seed in range(4)]
    a, b = Training(folder), Training(folder)
    pairs = [(a.step(seed), b.step(seed)) for seed in range(4)]
    assert pairs == [(loss, loss) for loss in expected]


def test_errors_are_those_that_ort_trainings_users_catch() -> None:
    assert issubclass(TrainingError, RuntimeError)
    assert issubclass(CheckpointError, RuntimeError)
    assert issubclass(TrainingError, OnnxTrainError)


def test_values_are_converted_to_onnxruntime_and_back(training: Training) -> None:
    value = training.module(OrtValue.ortvalue_from_numpy(X), OrtValue.ortvalue_from_numpy(TARGET))
    assert to_numpy(value) == value.numpy()


def test_after_a_failed_step_the_gradients_are_reset(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some gradients may have been added and others not."""
    training.module(*batch(1))
    once = training.state.parameters["weight"].grad.copy()
    graph = training.module._train

    def fail(feeds: object) -> None:
        raise TrainingError("onnxruntime could not run the graph.")

    with monkeypatch.context() as patched:
        patched.setattr(graph, "run", fail)
        with pytest.raises(TrainingError, match="could not run"):
            training.module(*batch(1))
    training.module(*batch(1))
    np.testing.assert_array_equal(training.state.parameters["weight"].grad, once)
