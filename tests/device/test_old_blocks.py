"""Blocks and artifacts in the calls that scripts of ONNX Runtime Training make."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.device.onnx_module import OnnxModule
from tests.device.stock import clipped
from tests.device.test_artifacts_imports import by_hand, node
from tests.reference import assert_matches, assert_matches_float64

X, W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.linspace(0, 1, 8, dtype=np.float32).reshape(4, 2)


def linear() -> onnx.ModelProto:
    return by_hand([node("MatMul", ["x", "w"], ["y"])], {"w": W}, ["n", 4])


class Forward(onnxblock.ForwardBlock):
    def __init__(self, *blocks: onnxblock.Block) -> None:
        super().__init__()
        self.blocks = blocks

    def build(self, name: Any) -> Any:
        for block in self.blocks:
            name = block(name)
        return name


class Training(onnxblock.TrainingBlock):
    def __init__(self, loss: onnxblock.Block) -> None:
        super().__init__()
        self.loss = loss

    def build(self, name: str) -> str:
        return str(self.loss(name))


TARGET, LABELS = np.array([[0, 1], [1, 1], [0, 0]], np.float32), np.array([0, 1, 0])
LOSSES = {
    "MSELoss": (torch.nn.MSELoss(), TARGET),
    "L1Loss": (torch.nn.L1Loss(), TARGET),
    "BCEWithLogitsLoss": (torch.nn.BCEWithLogitsLoss(), TARGET),
    "CrossEntropyLoss": (torch.nn.CrossEntropyLoss(), LABELS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_blocks_model_is_complete(name: str, tmp_path: Path) -> None:
    reference, target = LOSSES[name]
    large = by_hand([node("MatMul", ["x", "w"], ["y"])], {"w": np.tile(W, (1, 400))[:, :2] + 0}, ["n", 4])
    with onnxblock.base(large):
        block = Forward(getattr(onnxblock.loss, name)())
        block("y")
        onnx.save(block.to_model_proto(), tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx")
    (loss,) = session.run(None, {"x": X, session.get_inputs()[1].name: target})
    assert_matches(loss, lambda x, w, t: reference(x @ w, t), X, W, target)


def test_large_weights_are_in_a_blocks_model(tmp_path: Path) -> None:
    wide = np.ones((4, 4096), np.float32)
    with onnxblock.base(by_hand([node("MatMul", ["x", "w"], ["y"])], {"w": wide}, ["n", 4])):
        block = Forward(onnxblock.loss.CrossEntropyLoss())
        block("y")
        onnx.save(block.to_model_proto(), tmp_path / "model.onnx")
    (loss,) = ort.InferenceSession(tmp_path / "model.onnx").run(None, {"x": X, "labels": LABELS})
    assert_matches_float64(loss, np.log(4096))


def test_an_optimizer_accepts_the_result_of_parameters() -> None:
    block = Training(onnxblock.loss.MSELoss())
    block.requires_grad("w")
    with pytest.raises(RuntimeError, match="not called yet"):
        block.parameters()
    with onnxblock.base(linear()):
        block("y")
        parameters = block.parameters()
    graphs = []
    for given in (parameters, parameters[0]):
        with onnxblock.empty_base():
            optimizer = Forward(onnxblock.optim.AdamW(clip_grad=onnxblock.optim.ClipGradNorm(1.0)))
            optimizer(given)
            graphs.append(optimizer.to_model_proto().SerializeToString())
    assert graphs[0] == graphs[1]
    ort.InferenceSession(graphs[0])


TWO_STATES = ("first_order_moment", "second_order_moment")
OPTIMIZERS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "AdamW": (
        onnxblock.optim.AdamW(mode="torch", weight_decay=0.1, clip_grad=onnxblock.optim.ClipGradNorm(1.0)),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, eps=1e-6, weight_decay=0.1),
        TWO_STATES,
    ),
    "SGD": (
        onnxblock.optim.SGD(clip_grad=onnxblock.optim.ClipGradNorm(1.0)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        (),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_block_takes_sequences(name: str) -> None:
    block, reference, states = OPTIMIZERS[name]
    values = [np.arange(3, dtype=np.float32), np.ones((2, 2), np.float32)]
    gradients = [np.full(3, 2, np.float32), np.full((2, 2), -1, np.float32)]
    with onnxblock.empty_base():
        block([numpy_helper.from_array(v, f"p{i}") for i, v in enumerate(values)])
        model = block.to_model_proto()
    session = ort.InferenceSession(model.SerializeToString())
    assert [v.name for v in session.get_inputs()] == ["learning_rate", "step", "params", "gradients", *_plural(states)]
    assert [v.name for v in session.get_outputs()] == [
        "updated_flag",
        *(f"{n}.out" for n in ("params", *_plural(states))),
    ]
    feeds: dict[str, Any] = {"learning_rate": np.array([0.1], np.float32), "params": values, "gradients": gradients}
    feeds |= {state: [np.zeros_like(v) for v in values] for state in _plural(states)}
    for step in range(3):
        flag, feeds["params"], *moments = session.run(None, {**feeds, "step": np.array([step])})
        feeds |= dict(zip(_plural(states), moments, strict=True))
    assert flag.tolist() == [True]

    def in_torch(values: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(v) for v in values]
        optimizer = reference(parameters)
        for _ in range(3):
            for parameter, gradient in zip(parameters, clipped(gradients, 1.0), strict=True):
                parameter.grad = gradient
            optimizer.step()
        return parameters

    assert_matches(feeds["params"], in_torch, values, gradients, name="parameter")


def _plural(states: tuple[str, ...]) -> list[str]:
    return [f"{state}s" for state in states]


def test_parameters_of_several_dtypes_are_refused_as_a_sequence() -> None:
    parameters = [
        numpy_helper.from_array(np.ones(2, dtype), np.dtype(dtype).name) for dtype in (np.float32, np.float64)
    ]
    with onnxblock.empty_base(), pytest.raises(RuntimeError, match="must have one dtype"):
        onnxblock.optim.AdamW()(parameters)


def test_clipping_a_sequence_of_gradients() -> None:
    with onnxblock.empty_base() as model:
        model.graph.input.append(helper.make_tensor_sequence_value_info("gradients", TensorProto.FLOAT, None))
        block = Forward(onnxblock.optim.ClipGradNorm(1.0))
        clipped_name = block("gradients")
        session = ort.InferenceSession(block.to_model_proto().SerializeToString())
    given = [torch.randn(3), torch.randn(2, 2)]
    (clipped_gradients,) = session.run([clipped_name], {"gradients": [gradient.numpy() for gradient in given]})
    assert_matches(clipped_gradients, clipped, given, 1.0)


def test_the_gradient_of_an_input() -> None:
    block = Training(onnxblock.loss.MSELoss())
    for name in ("w", "x"):
        block.requires_grad(name)
    with onnxblock.base(linear()):
        block("y")
        training, _ = block.to_model_proto()
    assert [tensor.name for tensor in block.parameters()[0]] == ["w"]
    assert "x_grad.accumulation.buffer" in [value.name for value in training.graph.input]
    assert "x_grad.accumulation.out" in [value.name for value in training.graph.output]
    zeros = {"w_grad.accumulation.buffer": np.zeros_like(W), "x_grad.accumulation.buffer": np.zeros_like(X)}
    feeds = {"x": X, "w": W, "target": TARGET, "lazy_reset_grad": np.array([True]), **zeros}
    (gradient,) = ort.InferenceSession(training.SerializeToString()).run(["x_grad.accumulation.out"], feeds)

    def reference(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(torch.nn.functional.mse_loss(x @ w, target), x)[0]

    assert_matches(gradient, reference, torch.from_numpy(X).clone().requires_grad_(), W, TARGET)


def test_a_model_with_nothing_to_train_is_evaluated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drops = by_hand(
        [node("Dropout", ["x", "ratio", "training"], ["y"])],
        {"ratio": np.array(0.5, np.float32), "training": np.array(True)},
        ["n", 4],
    )
    ones = {name: np.ones(4, np.float32) for name in ("scale", "bias", "mean", "var")}
    norm = by_hand(
        [node("BatchNormalization", ["x", *ones], ["y", "new_mean", "new_var"], training_mode=1)], ones, ["n", 4]
    )
    frozen: dict[str, Any] = {"frozen_params": ["scale", "bias"]}
    nothing: dict[str, Any] = {"requires_grad": []}
    for model, options in ((drops, {}), (norm, frozen), (drops, nothing), (norm, {**frozen, **nothing})):
        (tmp_path / "eval_model.onnx").unlink(missing_ok=True)
        generate_artifacts(model, artifact_directory=tmp_path, optimizer=OptimType.AdamW, **options)
        written = onnx.load(tmp_path / "eval_model.onnx")
        assert all(len(each.input) < 3 or not each.input[2] for each in written.graph.node if each.op_type == "Dropout")
        assert all(a.name != "training_mode" or not a.i for each in written.graph.node for a in each.attribute)
        assert not (tmp_path / "training_model.onnx").exists()
    assert "nothing to train" in caplog.text
    for options in ({}, nothing):
        with pytest.raises(RuntimeError, match="No parameter is chosen"):
            generate_artifacts(linear(), artifact_directory=tmp_path, **options)


class OwnOptimizer(onnxblock.Block):
    def __init__(self) -> None:
        super().__init__()
        self.adam = onnxblock.optim.AdamW(weight_decay=0.1, clip_grad=onnxblock.optim.ClipGradNorm(1.0))

    def build(self, parameters: Any) -> Any:
        assert [[p.name for p in each] for each in parameters] == [["w"], []]
        assert numpy_helper.to_array(parameters[0][0]).tolist() == W.tolist()
        return self.adam(parameters)


def test_an_optimizer_block_of_the_users_own(tmp_path: Path) -> None:
    weights = []
    for number, optimizer in enumerate((OwnOptimizer(), OwnOptimizer().adam)):
        folder = tmp_path / str(number)
        generate_artifacts(linear(), ["w"], loss=LossType.MSELoss, optimizer=optimizer, artifact_directory=folder)
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state)
        step = Optimizer(folder / "optimizer_model.onnx", module)
        for _ in range(3):
            module(X, TARGET)
            step.step()
            module.lazy_reset_grad()
        weights.append(state.parameters["w"].data)
    assert np.array_equal(*weights)
    assert not np.array_equal(weights[0], W)
    with pytest.raises(RuntimeError, match="not portable"):
        generate_artifacts(linear(), ["w"], optimizer=OwnOptimizer(), portable=True, artifact_directory=tmp_path)


def test_versions_of_other_domains_are_kept() -> None:
    class Encoded(onnxblock.TrainingBlock):
        def build(self, name: str) -> str:
            self.base.graph.input.append(helper.make_tensor_value_info("raw", TensorProto.INT64, ["n"]))
            encode = onnxblock.blocks.LabelEncoder(keys_int64s=[7, 9], values_int64s=[0, 1], default_int64=0)
            return str(onnxblock.loss.CrossEntropyLoss()(name, labels_name=encode("raw")))

    block = Encoded()
    block.requires_grad("w")
    with onnxblock.base(linear()):
        block("y")
        training, evaluation = block.to_model_proto()
    assert {o.domain: o.version for o in training.opset_import}["ai.onnx.ml"] == 2
    loss = ort.InferenceSession(evaluation.SerializeToString()).run(["loss"], {"x": X, "w": W, "raw": [7, 9, 7]})[0]
    assert_matches(loss, lambda x, w: torch.nn.functional.cross_entropy(x @ w, torch.tensor([0, 1, 0])), X, W)


def test_bfloat16_is_verified_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    value = numpy_helper.from_array(W.astype(ml_dtypes.bfloat16), "w")
    infos = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [3, n]) for name, n in (("x", 4), ("y", 2))]
    graph = helper.make_graph([node("MatMul", ["x", "w"], ["y"])], "g", infos[:1], infos[1:], [value])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "b.onnx")
    caplog.set_level(logging.WARNING)
    generate_artifacts(
        tmp_path / "b.onnx", requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path / "artifacts"
    )
    assert "CPU provider lacks" in caplog.text
    assert "MatMul" in caplog.text
    module = OnnxModule.load(tmp_path / "b.onnx")
    x = torch.from_numpy(X).bfloat16()
    assert_matches(module(x), torch.matmul, x, torch.from_numpy(W).bfloat16())


def test_sequences_and_optionals_are_refused(tmp_path: Path) -> None:
    constants = {"w": W, "zero": np.array(0)}
    inside = by_hand(
        [
            node("SequenceConstruct", ["x", "x"], ["s"]),
            node("SequenceAt", ["s", "zero"], ["h"]),
            node("MatMul", ["h", "w"], ["y"]),
        ],
        constants,
        ["n", 4],
    )
    given = by_hand([node("SequenceAt", ["x", "zero"], ["h"]), node("MatMul", ["h", "w"], ["y"])], constants, ["n", 4])
    given.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, ["n", 4]))
    for model, says in ((inside, "SequenceConstruct.* uses sequences"), (given, "the input 'x' is not one")):
        with pytest.raises(RuntimeError, match=says):
            generate_artifacts(model, requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)
