"""Graphs with the ops and names of onnxruntime-training 1.19.2 can be trained without conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from onnxtrain import onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import ArtifactError, TrainingError
from tests.device import ort_training_files
from tests.device.stock import clipped
from tests.device.test_api_training import Predecessor
from tests.reference import assert_matches, assert_matches_float64

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
FORWARD = """
h = Gemm <transB = 1> (x, fc__weight, fc__bias)
y = Mul (h, scale)
difference = Sub (y, target)
squares = Pow (difference, pow_exponent)
"""
LOSS = "loss = ReduceMean <keepdims = 0> (squares)\n"
TRAINING = f"""{HEAD}g (float[n,4] x, float[n,3] target, float[3,4] fc__weight, float[3] fc__bias, float[3] scale,
   float[3,4] fc__weight_grad__accumulation__buffer,
   float[3] fc__bias_grad__accumulation__buffer, bool[1] lazy_reset_grad)
=> (float loss, bool[1] fc__weight_grad__accumulation__out, bool[1] fc__bias_grad__accumulation__out)
<float[1] pow_exponent = {{2}}, float loss_grad = {{1}}, int64[1] ReduceAxes = {{0}}, float[1] OneConstant = {{1}}> {{
{FORWARD}
Sized_X = Size (squares)
Shaped_X = Shape <start = 0> (squares)
Sized_Grad = Size (loss_grad)
ByCount = Div (Sized_X, Sized_Grad)
Scaled_Grad = com.microsoft.Scale <scale_down = 1> (loss_grad, ByCount)
squares_grad = Expand (Scaled_Grad, Shaped_X)
Sub_I1 = Sub (pow_exponent, OneConstant)
Pow_I0 = Pow (difference, Sub_I1)
Mul_Pow_I0_I1 = Mul (Pow_I0, pow_exponent)
difference_grad = Mul (Mul_Pow_I0_I1, squares_grad)
y_grad = Identity (difference_grad)
h_grad = Mul (y_grad, scale)
fc__bias_grad = ReduceSum <keepdims = 0, noop_with_empty_axes = 0> (h_grad, ReduceAxes)
fc__weight_grad = Gemm <transA = 1> (h_grad, x)
{LOSS}
fc__weight_grad__accumulation__out =
  com.microsoft.InPlaceAccumulatorV2 (fc__weight_grad__accumulation__buffer, fc__weight_grad, lazy_reset_grad)
fc__bias_grad__accumulation__out =
  com.microsoft.InPlaceAccumulatorV2 (fc__bias_grad__accumulation__buffer, fc__bias_grad, lazy_reset_grad)
}}"""
EVALUATION = f"""{HEAD}g (float[n,4] x, float[n,3] target, float[3,4] fc__weight, float[3] fc__bias, float[3] scale)
=> (float loss) <float[1] pow_exponent = {{2}}> {{ {FORWARD} {LOSS} }}"""
UPDATE = """
flag = com.microsoft.AdamWOptimizer <adam_mode = 1, alpha = 0.9, beta = 0.999, correct_bias = 1, epsilon = 0.000001,
    weight_decay = 0.0> (learning_rate, step, params, gradients, first_order_moments, second_order_moments)
"""


def optimizer_graph(nodes: str) -> str:
    names = ("params", "gradients", "first_order_moments", "second_order_moments")
    sequences = ", ".join(f"seq(float[]) {name}" for name in names)
    return f"{HEAD}g (float[1] learning_rate, int64[1] step, {sequences}) => (bool[1] flag) {{ {nodes} }}"


def save(text: str, path: Path) -> None:
    """Write the graph, with a dot for each `__` in its names, because the parser does not accept dots."""
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
        node.output[:] = [name.replace("__", ".") for name in node.output]
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace("__", ".")
    onnx.save(model, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(TRAINING, tmp_path / "training_model.onnx")
    save(EVALUATION, tmp_path / "eval_model.onnx")
    save(optimizer_graph(UPDATE), tmp_path / "optimizer_model.onnx")
    (tmp_path / "checkpoint").write_bytes(ort_training_files.INITIAL)
    (tmp_path / "after").write_bytes(ort_training_files.WITH_OPTIMIZER)
    return tmp_path


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Predecessor:
    return Predecessor(tmp_path_factory.mktemp("own"))


def loaded(folder: Path, checkpoint: str = "checkpoint") -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def test_old_artifacts_train_to_the_losses_of_1_19(folder: Path, old: Predecessor) -> None:
    _, module, optimizer = loaded(folder)
    assert module.input_names() == ["x", "target"]
    old.check(old.steps(module, optimizer, 5))
    evaluated = float(module.eval()(*old.batch))
    assert evaluated < old.losses[-1]
    module.export_model_for_inferencing(folder / "inference.onnx", ["y"])
    (y,) = ort.InferenceSession(folder / "inference.onnx").run(["y"], {"x": old.batch[0]})
    assert_matches_float64(evaluated, np.square(np.float64(y) - old.batch[1]).mean(), "loss in evaluation")


def test_old_artifacts_resume_from_a_checkpoint(folder: Path, old: Predecessor) -> None:
    _, module, optimizer = loaded(folder, "after")
    old.check(old.steps(module, optimizer, 2), after=3)


def test_an_old_optimizer_with_clipping(folder: Path, old: Predecessor) -> None:
    nodes = """clipped = com.microsoft.InplaceClipGradNorm <max_norm = 0.5> (gradients)
    flag = com.microsoft.SGDOptimizerV2 (learning_rate, params, clipped)"""
    save(optimizer_graph(nodes), folder / "optimizer_model.onnx")
    state, module, optimizer = loaded(folder)
    optimizer.set_learning_rate(0.1)
    module(*old.batch)
    optimizer.step()

    def updated(values: dict[str, torch.Tensor], x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        trained = {name: values[name].requires_grad_() for name in ("fc.weight", "fc.bias")}
        output = torch.nn.functional.linear(x, *trained.values()) * values["scale"]
        gradients = torch.autograd.grad(torch.nn.functional.mse_loss(output, target), trained.values())
        changes = zip(trained.items(), clipped(gradients, 0.5), strict=True)
        return {name: value - 0.1 * gradient for (name, value), gradient in changes}

    new_values = {name: state.parameters[name].data for name in ("fc.weight", "fc.bias")}
    assert_matches(new_values, updated, old.values, *old.batch)


def test_another_old_optimizer_graph_is_refused(folder: Path) -> None:
    nodes = f"{UPDATE}\nother = SequenceEmpty ()"
    save(optimizer_graph(nodes), folder / "optimizer_model.onnx")
    with pytest.raises(ArtifactError, match="nodes besides an optimizer"):
        loaded(folder)


def test_other_graphs_keep_their_error(folder: Path) -> None:
    save(f"{HEAD}g (float[n] x) => (float[n] y) {{ y = Abs (x) }}", folder / "training_model.onnx")
    with pytest.raises(TrainingError, match="not a training graph of onnxtrain"):
        loaded(folder)
    (folder / "training_model.onnx").write_bytes(b"no graph")
    with pytest.raises(TrainingError, match="onnxruntime cannot load the graph"):
        loaded(folder)


BATCH_NORM = f"""{HEAD}g (float[n,2] x, float[2] scale, float[2] bias STATISTICS,
   float[2] scale_grad__accumulation__buffer, bool[1] lazy_reset_grad)
=> (float loss, bool[1] scale_grad__accumulation__out) <CONSTANTS float loss_grad = {{1}}> {{
y, new_mean, new_var, saved_mean, saved_inv_std =
  com.microsoft.BatchNormInternal <epsilon = 0.00001, momentum = 0.9, training_mode = 1> (x, scale, bias, mean, var)
squares = Mul (y, y)
loss = ReduceMean <keepdims = 0> (squares)
scale_grad = Identity (saved_mean)
scale_grad__accumulation__out =
  com.microsoft.InPlaceAccumulatorV2 (scale_grad__accumulation__buffer, scale_grad, lazy_reset_grad)
}}"""
INPUTS, CONSTANTS = ", float[2] mean, float[2] var", "float[2] mean = {0, 0}, float[2] var = {1, 1},"


@pytest.mark.parametrize("kept", [True, False], ids=["in the checkpoint", "constants"])
def test_running_statistics_of_an_old_graph(kept: bool, tmp_path: Path) -> None:
    text = BATCH_NORM.replace("STATISTICS", INPUTS if kept else "").replace("CONSTANTS", "" if kept else CONSTANTS)
    save(text, tmp_path / "training_model.onnx")
    values = {"scale": [1, 2], "bias": [0, 1]} | ({"mean": [0, 0], "var": [1, 1]} if kept else {})
    tensors = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in values.items()]
    onnxblock.save_checkpoint((tensors[:1], tensors[1:]), tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    x = np.array([[1, 2], [3, 8], [5, 5]], np.float32)
    loss: Any = module(x)

    def reference(x: torch.Tensor) -> torch.Tensor:
        scale, bias = x.new_tensor(values["scale"]), x.new_tensor(values["bias"])
        return torch.nn.functional.batch_norm(x, None, None, scale, bias, training=True).square().mean()

    assert_matches(loss, reference, x, name="loss")
    if kept:  # the variance as ONNX has it: over the count of elements
        assert_matches_float64(state.parameters["mean"].data, 0.1 * np.float64(x).mean(0), "mean")
        assert_matches_float64(state.parameters["var"].data, 0.9 + 0.1 * np.float64(x).var(0), "variance")
