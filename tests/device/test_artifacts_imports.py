"""Models of other exporters and handwritten ones become training graphs, or are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.device.seeded_dropout import SEED
from onnxtrain.errors import ArtifactError
from onnxtrain.graph.values import TensorType
from onnxtrain.onnxblock.optim import SGD, AdamW
from tests.device.models import Transformer
from tests.device.stock import Stock, facts
from tests.reference import assert_matches, assert_matches_float64, with_gradients
from tests.thinned import slow_except

RNG = np.random.default_rng(0)


def by_hand(
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    shape: list[int | str],
    opset: int = 21,
    output: str = "y",
    domains: tuple[str, ...] = (),
    dtype: int = TensorProto.FLOAT,
    inner: list[onnx.ValueInfoProto] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "by_hand",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [onnx.ValueInfoProto(name=output)],
        [numpy_helper.from_array(w, n) for n, w in weights.items()],
        value_info=inner or [],
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def weight(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32) / 3


def gradients(model: onnx.ModelProto, names: list[str], inputs: list[np.ndarray], folder: Path, **options: Any) -> Any:
    """Loss and gradients of artifacts with the squared error."""
    options = {"loss": LossType.MSELoss, **options}
    generate_artifacts(model, requires_grad=names, artifact_directory=folder, **options)
    run = Stock(folder)
    loss = run.step(*inputs)[0]
    return loss.copy(), run.gradients()


def in_float64(model: onnx.ModelProto, x: np.ndarray, **weights: np.ndarray) -> np.ndarray:
    """The output by ONNX's own reference implementation, with other weights in place of some."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for tensor in wide.graph.initializer:
        array = weights.get(tensor.name, numpy_helper.to_array(tensor))
        if array.dtype == np.float32:
            array = array.astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    y: np.ndarray = onnx.reference.ReferenceEvaluator(wide).run(None, {"x": x.astype(np.float64)})[0]
    assert y.dtype == np.float64
    return y


def numeric(model: onnx.ModelProto, name: str, x: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The gradient by central differences in float64."""
    start = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == name).astype(np.float64)

    def loss(w: np.ndarray) -> float:
        return float(((in_float64(model, x, **{name: w}) - target) ** 2).mean())

    gradient = np.zeros(start.size)
    for index in range(start.size):
        step = np.zeros(start.size)
        step[index] = 1e-6
        gradient[index] = (loss(start + step.reshape(start.shape)) - loss(start - step.reshape(start.shape))) / 2e-6
    return gradient.reshape(start.shape)


node = helper.make_node

# Mixes of ops as Keras and TensorFlow, older PyTorch and hand-written models have them: nodes, weights, input, opset.
MIXES: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], list[int], int]] = {
    "keras-conv": (
        [
            node("Transpose", ["x"], ["nchw"], perm=[0, 3, 1, 2]),
            node("Conv", ["nchw", "w"], ["c"], auto_pad="SAME_UPPER", strides=[2, 2]),
            node("Reshape", ["b", "shape"], ["broad"]),
            node("Add", ["c", "broad"], ["s"]),
            node("Clip", ["s", "low", "high"], ["r"]),
            node("MaxPool", ["r"], ["m"], kernel_shape=[2, 2], auto_pad="SAME_UPPER"),
            node("AveragePool", ["m"], ["a"], kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
            node("ReduceMean", ["a", "axes"], ["y"], keepdims=0),
        ],
        {
            "w": weight(4, 3, 3, 3),
            "b": weight(4),
            "shape": np.array([1, -1, 1, 1]),
            "low": np.float32(-2.0),
            "high": np.float32(2.0),
            "axes": np.array([2, 3]),
        },
        [2, 5, 5, 3],
        18,
    ),
    "asymmetric-pads": (
        [
            node("Conv", ["x", "w"], ["c"], pads=[0, 1, 1, 0]),
            node("LeakyRelu", ["c"], ["r"], alpha=0.1),
            node("MaxPool", ["r"], ["y"], kernel_shape=[2, 2], pads=[0, 0, 1, 1], strides=[2, 2]),
        ],
        {"w": weight(2, 3, 2, 2)},
        [2, 3, 5, 5],
        11,
    ),
    "opset-9": (
        [
            node("Gemm", ["x", "w", "b"], ["g"], transB=1),
            node("Unsqueeze", ["g"], ["u"], axes=[1]),
            node("Softmax", ["u"], ["p"], axis=2),
            node("Squeeze", ["p"], ["s"], axes=[1]),
            node("ReduceSum", ["s"], ["t"], axes=[1], keepdims=1),
            node("Mul", ["s", "t"], ["y"]),
        ],
        {"w": weight(4, 6), "b": weight(4)},
        [3, 6],
        9,
    ),
    "norms": (
        [
            node("LayerNormalization", ["x", "w", "b"], ["n"], axis=-1),
            node("InstanceNormalization", ["n", "iw", "ib"], ["i"]),
            node("Softplus", ["i"], ["y"]),
        ],
        {"w": weight(5), "b": weight(5), "iw": weight(3), "ib": weight(3)},
        [2, 3, 5],
        17,
    ),
    "shapes": (
        [
            node("Shape", ["x"], ["shape"]),
            node("Gather", ["shape", "zero"], ["batch"]),
            node("Unsqueeze", ["batch", "zero_axis"], ["batch1"]),
            node("Concat", ["batch1", "rest"], ["wanted"], axis=0),
            node("Reshape", ["x", "wanted"], ["r"]),
            node("MatMul", ["r", "w"], ["m"]),
            node("Slice", ["m", "zero_axis", "two", "two"], ["s"]),
            node("Max", ["s", "b", "zero_f"], ["y"]),
        ],
        {
            "zero": np.array(0),
            "zero_axis": np.array([0]),
            "rest": np.array([2, 3]),
            "two": np.array([2]),
            "w": weight(3, 4),
            "b": weight(2),
            "zero_f": np.float32(0.0),
        },
        [2, 6],
        13,
    ),
}


@pytest.mark.parametrize("portable", slow_except([False, True], True))
@pytest.mark.parametrize("name", list(MIXES))
def test_gradients_of_mixed_ops(name: str, portable: bool, tmp_path: Path) -> None:
    nodes, weights, shape, opset = MIXES[name]
    model = by_hand(nodes, weights, list(shape), opset)
    trained = [n for n, w in weights.items() if w.dtype == np.float32 and w.ndim]
    x = RNG.standard_normal(shape).astype(np.float32)
    y = in_float64(model, x)
    target = (y + RNG.standard_normal(y.shape)).astype(np.float32)
    loss, grads = gradients(model, trained, [x, target], tmp_path, portable=portable)
    assert_matches_float64(loss, ((y - target) ** 2).mean(), "loss")
    assert_matches_float64(grads, {key: numeric(model, key, x, target) for key in trained}, "gradient")


def test_batch_norm_of_onnx_updates_by_its_own_rule(tmp_path: Path) -> None:
    """ONNX's running variance is the biased one; a model that PyTorch exported gets PyTorch's."""
    weights = {"s": weight(3), "b": weight(3), "mean": weight(3), "var": np.abs(weight(3))}
    nodes = [node("BatchNormalization", ["x", *weights], ["y", "m", "v"], training_mode=1, momentum=0.8)]
    model = by_hand(nodes, weights, ["n", 3, 4])
    x = RNG.standard_normal((5, 3, 4)).astype(np.float32)
    generate_artifacts(model, requires_grad=["s", "b"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    run = Stock(tmp_path)
    assert run.facts["buffers"] == ["mean", "var"]
    run.step(x, x)
    wide = x.astype(np.float64)
    assert_matches_float64(run.parameter("mean"), 0.8 * np.float64(weights["mean"]) + 0.2 * wide.mean((0, 2)), "mean")
    assert_matches_float64(run.parameter("var"), 0.8 * np.float64(weights["var"]) + 0.2 * wide.var((0, 2)), "variance")


def test_a_branch_with_a_known_condition_is_taken(tmp_path: Path) -> None:
    y = helper.make_tensor_value_info("t", TensorProto.FLOAT, None)
    then = helper.make_graph([node("Mul", ["x", "w"], ["t"])], "then", [], [y])
    other = helper.make_graph([node("Neg", ["x"], ["e"])], "else", [], [onnx.ValueInfoProto(name="e", type=y.type)])
    weights = {"w": weight(4), "condition": np.array(True)}
    model = by_hand([node("If", ["condition"], ["y"], then_branch=then, else_branch=other)], weights, [3, 4])
    x = np.ones((3, 4), np.float32)
    loss, grads = gradients(model, ["w"], [x, np.zeros((3, 4), np.float32)], tmp_path)
    assert_matches_float64(loss, (np.float64(weights["w"]) ** 2).mean(), "loss")
    assert_matches_float64(grads["w"], np.float64(weights["w"]) / 2, "gradient")


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    model = by_hand([node("Scaled", ["x", "w"], ["y"], domain="mine")], {"w": weight(4)}, [3, 4], domains=("mine",))
    body = [node("Mul", ["a", "b"], ["m"]), node("Relu", ["m"], ["c"])]
    model.functions.append(
        helper.make_function("mine", "Scaled", ["a", "b"], ["c"], body, [helper.make_opsetid("", 21)])
    )
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4]))
    _, grads = gradients(model, ["w"], [np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32)], tmp_path)
    assert grads["w"].shape == (4,)


# Ops that nothing is known of


def unknown_op(trained_before: bool) -> onnx.ModelProto:
    """A model with ai.onnx.ml's Scaler, which has no definition, before or after the trained weight."""
    scaler = node("Scaler", ["h" if trained_before else "x"], ["s"], domain="ai.onnx.ml", offset=[1.0], scale=[2.0])
    nodes = (
        [node("MatMul", ["x", "w"], ["h"]), scaler, node("Relu", ["s"], ["y"])]
        if trained_before
        else [scaler, node("MatMul", ["s", "w"], ["y"])]
    )
    model = by_hand(nodes, {"w": weight(4, 2)}, ["n", 4], domains=("ai.onnx.ml",))
    model.graph.value_info.append(
        helper.make_tensor_value_info("s", TensorProto.FLOAT, ["n", 2 if trained_before else 4])
    )
    return model


def test_an_unknown_op_before_the_trained_weight_is_kept(tmp_path: Path) -> None:
    model = unknown_op(trained_before=False)
    x, target = weight(3, 4), weight(3, 2)
    loss, grads = gradients(model, ["w"], [x, target], tmp_path)
    w = torch.from_numpy(numpy_helper.to_array(model.graph.initializer[0]).copy()).requires_grad_()

    def reference(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return with_gradients(F.mse_loss((x - 1) * 2 @ w, target), {"w": w})

    assert_matches({"loss": loss, **grads}, reference, x, w, target)
    assert "Scaler" in [n.op_type for n in onnx.load(tmp_path / "training_model.onnx").graph.node]


def test_an_unknown_op_after_the_trained_weight_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no gradient for ai.onnx.ml::Scaler") as caught:
        gradients(unknown_op(trained_before=True), ["w"], [], tmp_path)
    assert "train only parameters after it" in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing is written"


# Refusals


def linear(**changes: Any) -> onnx.ModelProto:
    return by_hand([node("MatMul", ["x", "w"], ["y"])], {"w": weight(4, 2), "v": weight(3)}, ["n", 4], **changes)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": 3}, RuntimeError, "Unknown kind of model"),
    ({"model": "nowhere.onnx"}, RuntimeError, "does not exist"),
    ({"loss": "cross"}, RuntimeError, "Unknown loss"),
    ({"optimizer": "adam"}, TypeError, "Unknown optimizer"),
    ({"frozen_params": ["w"]}, RuntimeError, "both trained and frozen"),
    ({"additional_output_names": ("y",)}, RuntimeError, "list of names"),
    ({"additional_output_names": ["z"]}, RuntimeError, "no such outputs"),
    ({"requires_grad": ["weight"]}, RuntimeError, "no such parameters"),
    ({"requires_grad": None}, RuntimeError, "No parameter is chosen for training"),
    ({"requires_grad": ["v"]}, RuntimeError, "does not depend"),
    ({"ort_format": True}, RuntimeError, "ORT-format"),
    ({"custom_op_library": "nowhere.so"}, RuntimeError, "does not exist"),
    ({"loss_input_names": ["nothing"]}, RuntimeError, "cannot be inferred"),
]


@pytest.mark.parametrize(("arguments", "error", "says"), REFUSED, ids=lambda v: str(v)[:40])
def test_refusals(arguments: dict[str, Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": linear(),
        "requires_grad": ["w"],
        "loss": LossType.MSELoss,
        "artifact_directory": tmp_path / "out",
        **arguments,
    }
    with pytest.raises(error, match=says):
        generate_artifacts(**given)
    assert not (tmp_path / "out").exists(), "nothing is written"


def test_a_loss_that_is_not_a_scalar_is_refused(tmp_path: Path) -> None:
    model = by_hand([node("MatMul", ["x", "w"], ["h"]), node("ArgMax", ["h"], ["y"])], {"w": weight(4, 2)}, [3, 4])
    with pytest.raises(ArtifactError, match="must have a floating-point dtype"):
        generate_artifacts(model, requires_grad=["w"], artifact_directory=tmp_path)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (by_hand([node("Mul", ["x", "w"], ["y"])], {"w": weight(4).astype(np.float64)}, [3, 4], dtype=11), "double"),
        (unknown_op(trained_before=False), "Scaler"),
    ],
)
def test_ops_that_are_not_portable_are_refused(model: onnx.ModelProto, says: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=rf"is not portable[^\n]*{says}|{says}[^\n]* is not portable") as caught:
        generate_artifacts(
            model, requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path, portable=True
        )
    assert caught.value.todo is not None
    generate_artifacts(model, requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)


def test_a_pytorch_operator_without_an_onnx_form_is_refused(tmp_path: Path) -> None:
    class Special(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(x * self.w)

    with pytest.raises(ArtifactError, match=r"i0"):
        generate_artifacts(
            Special(), loss=LossType.MSELoss, artifact_directory=tmp_path, example_args=(torch.ones(2, 3),)
        )


# Torch modules


class ReturnsLoss(torch.nn.Module):
    """Returns the loss first if it gets labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(6, 5).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(5)
        self.head = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(torch.tanh(self.frozen(x))))
        return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits}


def test_a_torch_module_that_returns_its_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = ReturnsLoss().eval()
    x, labels = torch.randn(4, 6), torch.tensor([0, 2, 1, 0])
    generate_artifacts(
        module,
        artifact_directory=tmp_path,
        optimizer=OptimType.AdamW,
        example_args=(x,),
        example_kwargs={"labels": labels},
        output_names=["loss", "logits"],
        additional_output_names=["logits"],
    )
    assert not module.norm.training, "the module is left as it was"
    run = Stock(tmp_path)
    assert run.facts["inputs"] == ["x", "labels"]
    assert run.facts["trainable"] == ["norm.weight", "norm.bias", "head.weight", "head.bias"]
    assert run.facts["frozen"] == ["frozen.weight", "frozen.bias"]
    assert run.facts["buffers"] == ["norm.running_mean", "norm.running_var"]
    loss, logits = run.step(x.numpy(), labels.numpy())

    def reference(module: ReturnsLoss, x: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = module.train()(x, labels)
        return {"logits": outputs["logits"], **with_gradients(outputs["loss"], dict(module.named_parameters()))}

    assert_matches({"loss": loss, "logits": logits, **run.gradients()}, reference, module, x)
    with pytest.raises(ArtifactError, match="number of output names differs"):
        generate_artifacts(module, example_args=(x, labels), output_names=["loss"], artifact_directory=tmp_path)
    with pytest.raises(ArtifactError, match="needs example arguments"):
        generate_artifacts(module, artifact_directory=tmp_path)


def test_half_precision_parameters_are_updated_in_float32(tmp_path: Path) -> None:
    start, gradient = weight(64).astype(np.float16), (1e-4 * weight(64)).astype(np.float16)
    parameters = [("p", TensorType(ir.DataType.FLOAT16, (64,)))]
    ir.save(AdamW(eps=1e-8, mode="torch", weight_decay=0.1).model(parameters), tmp_path / "optimizer_model.onnx")
    metadata = facts(tmp_path / "optimizer_model.onnx")
    assert metadata["state_dtype"] == {"p": "float32"}
    run = ort.InferenceSession(str(tmp_path / "optimizer_model.onnx"))
    zeros = np.zeros(64, np.float32)
    feeds = {"learning_rate": np.array([1e-2], np.float32), "step": np.array([0]), "p": start, "p_grad": gradient}
    outputs = run.run(None, {**feeds, "p.first_order_moment": zeros, "p.second_order_moment": zeros})
    wide = torch.nn.Parameter(torch.from_numpy(start.astype(np.float32)))
    wide.grad = torch.from_numpy(gradient.astype(np.float32))
    torch.optim.AdamW([wide], lr=1e-2, weight_decay=0.1).step()
    assert np.array_equal(outputs[0], wide.detach().numpy().astype(np.float16))
    assert outputs[0].dtype == np.float16
    assert outputs[2].dtype == np.float32


# Dropout


@pytest.mark.parametrize("portable", slow_except([False, True], True))
def test_the_seed_determines_dropout(portable: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Transformer(dropout=0.3).train()
    ids, labels = torch.randint(0, 50, (8, 12)), torch.randint(0, 10, (8,))
    options: dict[str, Any] = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.SGD, "portable": portable}
    generate_artifacts(module, artifact_directory=tmp_path, example_args=(ids,), **options)
    run = Stock(tmp_path)
    assert SEED in [v.name for v in run.train.get_inputs()]
    batch = ids.numpy(), labels.numpy()
    first, second = (float(run.step(*batch)[0]) for _ in range(2))
    gradient = run.gradients()["classify.weight"]
    run.draws = 0
    again = [float(run.step(*batch)[0]) for _ in range(2)]
    assert again == [first, second]
    assert first != second
    assert np.array_equal(gradient, run.gradients()["classify.weight"])
    loss = run.evaluate(*batch)["loss"]
    assert_matches(loss, lambda m: F.cross_entropy(m.eval()(ids), labels), module, name="loss in evaluation")
    for size in (1, 5):
        run.step(batch[0][:size], batch[1][:size])


def test_dropout_keeps_the_mean_and_its_gradient_has_the_mask(tmp_path: Path) -> None:
    """Y = dropout(x) * w: the gradient of w is the sum over rows of 2 (y - 0)/n * dropout(x)."""
    weights = {"w": np.ones(1, np.float32), "ratio": np.float32(0.25), "trains": np.array(True)}
    model = by_hand(
        [node("Dropout", ["x", "ratio", "trains"], ["d"]), node("Mul", ["d", "w"], ["y"])], weights, ["n", 1000]
    )
    x = np.ones((200, 1000), np.float32)
    generate_artifacts(
        model,
        requires_grad=["w"],
        loss=LossType.MSELoss,
        artifact_directory=tmp_path,
        additional_output_names=["y"],
    )
    run = Stock(tmp_path)
    loss, y = run.step(x, np.zeros_like(x))
    assert_matches_float64(np.unique(y), [0, 4 / 3], "values")
    # The variance of an element is 1/3. A standard deviation of n means is off by 1/sqrt(2 n): 5 of these are allowed.
    assert y.mean() == pytest.approx(1.0, abs=5 * np.sqrt(1 / 3 / x.size))
    assert y.mean(0).std() == pytest.approx(np.sqrt(1 / 3 / 200), rel=5 / np.sqrt(2 * 1000))
    assert y.mean(1).std() == pytest.approx(np.sqrt(1 / 3 / 1000), rel=5 / np.sqrt(2 * 200))
    assert_matches(
        {"loss": loss, **run.gradients()}, lambda y: {"loss": y.square().mean(), "w": 2 * y.square().mean()[None]}, y
    )


# Outputs, nominal checkpoints, prefix, frozen parameters


def test_files_and_their_metadata(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Mul", ["h", "v"], ["y"]), node("Add", ["y", "c"], ["z"])]
    weights = {"w": weight(4, 2), "v": weight(2), "c": weight(2)}
    model = by_hand(nodes, weights, ["n", 4])
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 2]))
    generate_artifacts(
        model,
        requires_grad=["w"],
        frozen_params=["v"],
        loss=LossType.MSELoss,
        optimizer=SGD(momentum=0.9),
        artifact_directory=tmp_path,
        prefix="first_",
        additional_output_names=["z"],
        loss_input_names=["y"],
        nominal_checkpoint=True,
    )
    names = {"training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint", "nominal_checkpoint"}
    assert {p.name for p in tmp_path.iterdir()} == {f"first_{name}" for name in names}
    run = Stock(tmp_path, "first_")
    assert [v.name for v in run.train.get_inputs()] == [
        *("x", "target", "w", "v", "w_grad.accumulation.buffer", "lazy_reset_grad"),
    ]
    assert [v.name for v in run.train.get_outputs()] == ["loss", "z", "w_grad.accumulation.out"]
    assert run.facts["trainable"] == ["w"]
    assert run.facts["frozen"] == ["v"]
    x, target = weight(3, 4), weight(3, 2)
    loss, z = run.step(x, target)
    assert_matches(z, lambda x, p: x @ p["w"] * p["v"] + p["c"], x, weights, name="z")
    run.update()
    evaluated = run.evaluate(x, target)
    assert list(evaluated) == ["loss", "z", "y"]
    assert float(evaluated["loss"]) < float(loss)
    for name in ("training", "eval", "optimizer"):
        written = onnx.load(tmp_path / f"first_{name}_model.onnx")
        assert written.ir_version == 10
        assert {o.domain: o.version for o in written.opset_import}[""] == 21
        assert json.loads({p.key: p.value for p in written.metadata_props}["onnxtrain"])["kind"] == name


def test_a_model_whose_first_output_is_its_loss(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("ReduceSumSquare", ["h"], ["y"], keepdims=0)]
    model = by_hand(nodes, {"w": weight(4, 2)}, [3, 4], opset=17)
    x = weight(3, 4)
    _, grads = gradients(model, ["w"], [x], tmp_path, loss=None)
    w = numpy_helper.to_array(model.graph.initializer[0])
    assert_matches(grads["w"], lambda x, w: 2 * x.T @ (x @ w), x, w, name="gradient")


def test_tensors_in_external_data(tmp_path: Path) -> None:
    """Like models of more than 2 GB; tensors that are not trained are written to the graphs' own files."""
    model = by_hand(
        [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "v"], ["y"])],
        {"w": weight(64, 512), "v": weight(512, 64)},
        ["n", 64],
    )
    path = tmp_path / "model.onnx"
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.save(copy, path, save_as_external_data=True, location="elsewhere.bin", size_threshold=0)
    generate_artifacts(path, requires_grad=["v"], loss=LossType.MSELoss, artifact_directory=tmp_path / "out")
    (tmp_path / "elsewhere.bin").unlink()
    run = Stock(tmp_path / "out")
    x = weight(3, 64)
    loss = run.step(x, np.zeros((3, 64), np.float32))[0]
    w, v = (numpy_helper.to_array(t) for t in model.graph.initializer)
    assert_matches(loss, lambda x, w, v: (x @ w @ v).square().mean(), x, w, v, name="loss")


@pytest.mark.large(gb=12)
@pytest.mark.slow
def test_a_model_of_more_than_2_gb(tmp_path: Path) -> None:
    rows = 2**29 // 128 + 1000
    model = by_hand(
        [node("Gather", ["table", "x"], ["e"]), node("MatMul", ["e", "v"], ["y"])],
        {"v": weight(128, 4)},
        ["n"],
        dtype=TensorProto.INT64,
    )
    table = onnx.TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[rows, 128])
    table.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "table.bin"), ("offset", "0"), ("length", str(rows * 512))):
        table.external_data.add(key=key, value=value)
    model.graph.initializer.append(table)
    with open(tmp_path / "table.bin", "wb") as file:
        file.truncate(rows * 512)  # zeros, but for the last row
        file.seek((rows - 1) * 512)
        file.write(np.ones(128, np.float32).tobytes())
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4]))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    generate_artifacts(
        tmp_path / "model.onnx", requires_grad=["v"], loss=LossType.MSELoss, artifact_directory=tmp_path / "out"
    )
    assert (tmp_path / "out" / "training_model.onnx.data").stat().st_size >= rows * 512
    run = Stock(tmp_path / "out")
    loss = run.step(np.array([0, rows - 1]), np.zeros((2, 4), np.float32))[0]
    v = model.graph.initializer[0]
    assert_matches(loss, lambda v: v.sum(0).square().mean() / 2, numpy_helper.to_array(v), name="loss")
