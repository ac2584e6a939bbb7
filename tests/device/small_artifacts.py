"""Training artifacts of a linear model, written by hand in numpy's and ONNX's terms alone.

The model is `y = (x · weightᵀ + bias) · scale`, the loss its mean squared error. `scale` is frozen; `mean`, a running
mean of x, is a buffer. With `draws` the gradient depends on the random seed too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.device import checkpoint

SHAPES = {"weight": (3, 4), "bias": (3,), "scale": (3,), "mean": (4,)}
TRAINABLE = ("weight", "bias")
FLOAT = TensorProto.FLOAT
GRADIENTS = {name: f"{name}_grad.accumulation" for name in TRAINABLE}


@dataclass
class Sketch:
    """Nodes, inputs and outputs of a graph in the making."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def take(self, name: str, shape: Sequence[int | str], kind: int = FLOAT) -> None:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))

    def give(self, name: str, shape: Sequence[int | str], kind: int = FLOAT) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def add(self, op: str, inputs: str, output: str, **attributes: object) -> None:
        self.nodes.append(helper.make_node(op, inputs.split(), [output], **attributes))

    def constant(self, name: str, value: object, dtype: str = "float32") -> None:
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))

    def save(self, path: Path, facts: dict[str, object]) -> None:
        graph = helper.make_graph(self.nodes, "small", self.inputs, self.outputs, self.constants)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)], ir_version=9
        )
        common = {"version": 1, "trainable": TRAINABLE, "frozen": ["scale"], "buffers": ["mean"]}
        model.metadata_props.add(key="onnxtrain", value=json.dumps(common | facts))
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, path)


def write_artifacts(folder: Path, draws: bool = False) -> Path:
    """Write the three graphs and the checkpoint, and return the folder."""
    _training(folder / "training_model.onnx", draws)
    _eval(folder / "eval_model.onnx")
    _optimizer(folder / "optimizer_model.onnx")
    checkpoint.save(fresh(), folder / "checkpoint")
    checkpoint.save(fresh(nominal=True), folder / "nominal_checkpoint")
    return folder


def fresh(nominal: bool = False) -> checkpoint.Checkpoint:
    """The checkpoint of an untrained model."""
    rng = np.random.default_rng(0)
    parameters = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return checkpoint.Checkpoint(parameters, frozenset(TRAINABLE), nominal=nominal)


def batch(seed: int = 1, size: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (size, 4) and targets (size, 3)."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((size, 4)).astype(np.float32), rng.standard_normal((size, 3)).astype(np.float32)


def gradients(x: np.ndarray, target: np.ndarray, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradients of the loss, in float64."""
    values = {name: array.astype(np.float64) for name, array in parameters.items()}
    y = (x @ values["weight"].T + values["bias"]) * values["scale"]
    dh = 2 * (y - target) / y.size * values["scale"]
    return {"weight": dh.T @ x, "bias": dh.sum(0)}


def trained(seeds: Iterable[int], learning_rate: float = 1e-3) -> dict[str, np.ndarray]:
    """The values after one step on the batch of each seed, in float64."""
    values = {name: array.astype(np.float64) for name, array in fresh().parameters.items()}
    momenta = {name: np.zeros(SHAPES[name]) for name in TRAINABLE}
    for seed in seeds:
        x, target = batch(seed)
        for name, gradient in gradients(x, target, values).items():
            momenta[name] = 0.9 * momenta[name] + gradient
        values |= {name: values[name] - learning_rate * momenta[name] for name in TRAINABLE}
        values["mean"] = values["mean"] + 0.1 * (np.float64(x).mean(0) - values["mean"])
    return values


def _forward(g: Sketch) -> None:
    g.take("x", ["n", 4])
    g.take("target", ["n", 3])
    g.add("Gemm", "x weight bias", "h", transB=1)
    g.add("Mul", "h scale", "y")
    g.add("Sub", "y target", "error")
    g.add("Mul", "error error", "squares")
    g.add("ReduceMean", "squares", "loss", keepdims=0)


def _parameters(g: Sketch, names: Sequence[str]) -> None:
    for name in names:
        g.take(name, SHAPES[name])


def _training(path: Path, draws: bool) -> None:
    g = Sketch()
    _forward(g)
    if draws:
        g.take("random_seed", [1], TensorProto.INT64)
    _parameters(g, list(SHAPES))
    for name in TRAINABLE:
        g.take(f"{GRADIENTS[name]}.buffer", SHAPES[name])
    g.take("lazy_reset_grad", [1], TensorProto.BOOL)
    g.give("loss", [])
    g.constant("two", 2)
    g.add("Size", "y", "count")
    g.add("CastLike", "count y", "float_count")
    g.add("Div", "two float_count", "factor")
    g.add("Mul", "error factor", "dy")
    g.add("Mul", "dy scale", "dh")
    if draws:
        g.constant("seven", [7], "int64")
        g.add("Mod", "random_seed seven", "drawn")
        g.add("CastLike", "drawn dh", "noise")
        g.add("Mul", "dh noise", "dh_drawn")
    dh = "dh_drawn" if draws else "dh"
    g.add("Gemm", f"{dh} x", "d_weight", transA=1)
    g.constant("rows", [0], "int64")
    g.add("ReduceSum", f"{dh} rows", "d_bias", keepdims=0)
    for name in TRAINABLE:
        buffer = f"{GRADIENTS[name]}.buffer"
        g.add("Add", f"{buffer} d_{name}", f"sum_{name}")
        g.add("Where", f"lazy_reset_grad d_{name} sum_{name}", f"{GRADIENTS[name]}.out")
        g.give(f"{GRADIENTS[name]}.out", SHAPES[name])
    g.add("ReduceMean", "x rows", "batch_mean", keepdims=0)
    g.constant("tenth", 0.1)
    g.add("Sub", "batch_mean mean", "moved")
    g.add("Mul", "moved tenth", "part")
    g.add("Add", "mean part", "mean.out")
    g.give("mean.out", SHAPES["mean"])
    updates = {f"{gradient}.out": f"{gradient}.buffer" for gradient in GRADIENTS.values()} | {"mean.out": "mean"}
    facts = {"kind": "training", "inputs": ["x", "target"], "outputs": ["loss"], "updates": updates, "draws": draws}
    g.save(path, facts)


def _eval(path: Path) -> None:
    g = Sketch()
    _forward(g)
    _parameters(g, ["weight", "bias", "scale"])
    g.give("loss", [])
    g.give("y", ["n", 3])
    facts = {"kind": "eval", "inputs": ["x", "target"], "outputs": ["loss"], "forward_outputs": ["y"]}
    g.save(path, facts | {"buffers": []})


def _optimizer(path: Path) -> None:
    """SGD with momentum 0.9."""
    g = Sketch()
    g.take("learning_rate", [1])
    g.take("step", [1], TensorProto.INT64)
    _parameters(g, TRAINABLE)
    for name in TRAINABLE:
        g.take(f"{name}_grad", SHAPES[name])
    for name in TRAINABLE:
        g.take(f"{name}.momentum_buffer", SHAPES[name])
    g.constant("beta", 0.9)
    for name in TRAINABLE:
        g.add("Mul", f"{name}.momentum_buffer beta", f"kept_{name}")
        g.add("Add", f"kept_{name} {name}_grad", f"{name}.momentum_buffer.out")
        g.add("Mul", f"learning_rate {name}.momentum_buffer.out", f"change_{name}")
        g.add("Sub", f"{name} change_{name}", f"{name}.out")
        g.give(f"{name}.out", SHAPES[name])
        g.give(f"{name}.momentum_buffer.out", SHAPES[name])
    updates = {f"{name}{suffix}.out": f"{name}{suffix}" for name in TRAINABLE for suffix in ("", ".momentum_buffer")}
    facts = {
        "kind": "optimizer",
        "inputs": ["learning_rate", "step"],
        "outputs": [],
        "updates": updates,
        "optimizer": "SGD",
        "state": ["momentum_buffer"],
        "state_dtype": dict.fromkeys(TRAINABLE, "float32"),
    }
    g.save(path, facts)
