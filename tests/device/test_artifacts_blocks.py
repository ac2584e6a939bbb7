"""onnxblock: training graphs built from blocks; and the proof that updates may be bound in place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_state

from onnxtrain import onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.device import checkpoint
from onnxtrain.device.from_onnx.prepare import constant_number
from onnxtrain.device.in_place import verify_updates
from onnxtrain.device.portable import PORTABLE_OPS, PORTABLE_TYPES
from onnxtrain.device.stock import KNOWN_TO_ONNXRUNTIME
from onnxtrain.errors import ArtifactError
from onnxtrain.graph.values import MICROSOFT
from onnxtrain.ops import OPS
from tests.device.generated import artifacts, usual_artifacts
from tests.device.models import MODELS, batches, make
from tests.device.stock import Stock, clipped, session
from tests.device.test_artifacts_imports import by_hand, node, weight
from tests.reference import assert_matches, with_gradients
from tests.thinned import covering, slow_except


def two_headed() -> onnx.ModelProto:
    weights = {"w": weight(4, 6), "first": weight(6, 3), "second": weight(6, 3), "unused": weight(2)}
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Tanh", ["h"], ["t"]),
        node("MatMul", ["t", "first"], ["a"]),
        node("MatMul", ["t", "second"], ["b"]),
    ]
    model = by_hand(nodes, weights, ["n", 4], output="a")
    model.graph.output.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, ["n", 3]))
    return model


class Weighted(onnxblock.Block):
    """The documented example of a custom loss: a weighted sum of two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = onnxblock.loss.MSELoss()
        self.second = onnxblock.loss.CrossEntropyLoss(weight=np.array([0.2, 0.3, 0.5]), ignore_index=1)
        self.share = onnxblock.blocks.Constant(0.4)
        self.mul = onnxblock.blocks.Mul()
        self.add = onnxblock.blocks.Add()

    def build(self, a: str, b: str) -> str:
        return self.add(self.mul(self.share(), self.first(a, "target_a")), self.second(b, labels_name="target_b"))


def in_torch(model: onnx.ModelProto) -> dict[str, torch.Tensor]:
    tensors = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    return {name: t.requires_grad_() if t.is_floating_point() else t for name, t in tensors.items()}


def test_a_custom_loss(tmp_path: Path) -> None:
    model = two_headed()
    trained = ["w", "first", "second"]
    generate_artifacts(model, requires_grad=trained, loss=Weighted(), artifact_directory=tmp_path)
    run = Stock(tmp_path)
    assert run.facts["inputs"] == ["x", "target_a", "target_b"]
    x, target, labels = weight(5, 4), weight(5, 3), np.array([0, 1, 2, 2, 1])
    loss = run.step(x, target, labels)[0]

    def reference(p: dict[str, torch.Tensor], x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        t = torch.tanh(x @ p["w"])
        of_classes = x.new_tensor([0.2, 0.3, 0.5])
        second = F.cross_entropy(t @ p["second"], torch.from_numpy(labels), of_classes, ignore_index=1)
        expected = 0.4 * F.mse_loss(t @ p["first"], target) + second
        return with_gradients(expected, {name: p[name] for name in trained})

    assert_matches({"loss": loss, **run.gradients()}, reference, in_torch(model), x, target)


LOSSES: dict[str, tuple[Any, Any, Any]] = {
    "mse": (onnxblock.loss.MSELoss(), None, F.mse_loss),
    "mse-sum": (onnxblock.loss.MSELoss("sum"), None, lambda y, t: F.mse_loss(y, t, reduction="sum")),
    "l1": (onnxblock.loss.L1Loss(), None, F.l1_loss),
    "l1-none": (onnxblock.loss.L1Loss("none"), None, lambda y, t: F.l1_loss(y, t, reduction="none")),
    "bce": (onnxblock.loss.BCEWithLogitsLoss(), None, F.binary_cross_entropy_with_logits),
    "bce-weights": (
        onnxblock.loss.BCEWithLogitsLoss(weight=[0.5, 1, 2, 3], reduction="sum", pos_weight=[1, 2, 3, 4]),
        None,
        lambda y, t: F.binary_cross_entropy_with_logits(
            y, t, y.new_tensor([0.5, 1, 2, 3]), reduction="sum", pos_weight=y.new_tensor([1, 2, 3, 4])
        ),
    ),
    "ce": (onnxblock.loss.CrossEntropyLoss(), "labels", F.cross_entropy),
    "ce-sum": (
        onnxblock.loss.CrossEntropyLoss(reduction="sum"),
        "labels",
        lambda y, t: F.cross_entropy(y, t, reduction="sum"),
    ),
}


@pytest.mark.parametrize(("name", "portable"), covering(LOSSES, [False, True]))
def test_losses(name: str, portable: bool, tmp_path: Path) -> None:
    block, labels, reference = LOSSES[name]
    model = by_hand([node("MatMul", ["x", "w"], ["y"])], {"w": weight(3, 4)}, ["n", 3])
    generate_artifacts(model, requires_grad=["w"], loss=block, artifact_directory=tmp_path, portable=portable)
    run = Stock(tmp_path)
    x = weight(5, 3)
    target = np.array([0, 3, 1, 2, 2]) if labels else np.abs(weight(5, 4))
    loss = run.step(x, target)[0]
    results = {"loss": loss, **run.gradients()}
    assert_matches(results, lambda x, p, t: with_gradients(reference(x @ p["w"], t), p), x, in_torch(model), target)


class OnlyLoss(onnxblock.TrainingBlock):
    def __init__(self) -> None:
        super().__init__()
        self.loss = onnxblock.loss.MSELoss()

    def build(self, name: str) -> str:
        return self.loss(name)


def test_building_all_graphs_as_with_onnxruntime_training(tmp_path: Path) -> None:
    """base, TrainingBlock, parameters, to_model_proto, empty_base, an optimizer, save_checkpoint."""
    model = by_hand(
        [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "b"], ["y"])],
        {"w": weight(4, 2), "b": weight(2)},
        ["n", 4],
    )
    block = OnlyLoss()
    block.requires_grad("w")
    block.requires_grad("b", False)
    for accessor in (block.parameters, block.to_model_proto):
        with pytest.raises(RuntimeError, match="has no graph"):
            accessor()
    with onnxblock.base(model) as handle:
        assert isinstance(handle, onnx.ModelProto)
        block("y")
        train, evaluate = block.to_model_proto()
        trainable, frozen = block.parameters()
    assert [t.name for t in trainable] == ["w"]
    assert [t.name for t in frozen] == ["b"]
    assert np.array_equal(numpy_helper.to_array(trainable[0]), numpy_helper.to_array(model.graph.initializer[0]))
    with onnxblock.empty_base():
        optimizer = onnxblock.optim.AdamW()
        optimizer(trainable)
        step = optimizer.to_model_proto()
    for name, proto in (("training", train), ("eval", evaluate), ("optimizer", step)):
        onnx.save(proto, tmp_path / f"{name}_model.onnx")
    onnxblock.save_checkpoint((trainable, frozen), tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    updates = Optimizer(tmp_path / "optimizer_model.onnx", module)
    batch = weight(3, 4), weight(3, 2)
    losses = [float(module(*batch))]
    for _ in range(20):
        updates.step()
        module.lazy_reset_grad()
        losses.append(float(module(*batch)))
    assert losses == sorted(losses, reverse=True)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((4, 2), np.float32), "w"))
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", copy)
    assert np.array_equal(numpy_helper.to_array(copy.graph.initializer[0]), numpy_helper.to_array(trainable[0]))


def test_a_nominal_checkpoint_has_names_and_shapes_only(tmp_path: Path) -> None:
    tensors = [numpy_helper.from_array(weight(64, 64), "w")], []
    onnxblock.save_checkpoint(tensors, tmp_path / "nominal", nominal_checkpoint=True)
    assert (tmp_path / "nominal").stat().st_size < 1000
    state = checkpoint.load(tmp_path / "nominal")
    assert state.nominal
    assert state.parameters["w"].shape == (64, 64)


class Every(onnxblock.ForwardBlock):
    """All building blocks in one graph."""

    def build(self, x: str) -> list[str]:
        b = onnxblock.blocks
        shifted = b.Add()(b.Abs()(x), b.Constant(1.0)())
        powers = b.Div()(b.Pow(2.0)(shifted), b.Neg()(b.Log()(b.Sub()(shifted, b.Constant(-1.0)()))))
        clipped = b.Clip(-2.0, None)(b.Mul()(powers, b.Sigmoid()(x)))
        sums = b.Add()(b.ReduceMean()(clipped), b.ReduceSum(keepdims=False)(clipped))
        norm = b.ReduceAllL2()(x, clipped)
        wide = b.Cast(TensorProto.DOUBLE)(b.PassThrough()(sums))
        other = b.InputLike(x)("other")
        linear = b.Linear(3, 2, seed=1)(other)
        return [clipped, sums, norm, wide, linear]


def test_building_blocks(tmp_path: Path) -> None:
    with onnxblock.empty_base() as handle:
        handle.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3]))
        block = Every()
        names = block("x")
        proto = onnx.shape_inference.infer_shapes(block.to_model_proto())
    onnx.checker.check_model(proto, full_check=True)
    x = weight(2, 3)
    values = dict(
        zip(names, ort.InferenceSession(proto.SerializeToString()).run(names, {"x": x, "other": x}), strict=True)
    )

    def reference(x: torch.Tensor, p: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        shifted = x.abs() + 1
        clipped = (shifted**2 / -(shifted + 1).log() / (1 + (-x).exp())).clamp(min=-2)
        sums = (clipped.mean() + clipped.sum())[None, None]
        norm = (x.square().sum() + clipped.square().sum()).sqrt()
        return [clipped, sums, norm, x @ p["linear.weight"].T + p["linear.bias"]]

    clipped, sums, norm, wide, linear = (values[name] for name in names)
    assert_matches([clipped, sums, norm, linear], reference, x, in_torch(proto))
    assert wide.dtype == np.float64
    assert np.array_equal(wide, sums)


def test_label_encoder_and_sequences() -> None:
    with onnxblock.empty_base(17) as handle:
        handle.graph.input.append(helper.make_tensor_value_info("s", TensorProto.STRING, [None]))
        encoded = onnxblock.blocks.LabelEncoder(keys_strings=["a", "b"], values_int64s=[4, 5])("s")
        onnxblock.blocks.SequenceConstruct()(encoded, encoded)
        handle.graph.output.append(helper.make_tensor_value_info(encoded, TensorProto.INT64, [None]))
        run = ort.InferenceSession(handle.SerializeToString())
    assert run.run(None, {"s": np.array(["b", "a", "z"])})[0].tolist() == [5, 4, -1]
    with pytest.raises(ArtifactError, match="one list of keys"):
        onnxblock.blocks.LabelEncoder(keys_strings=["a"], values_int64s=[4, 5])


def test_errors_of_blocks(tmp_path: Path) -> None:
    model = by_hand([node("MatMul", ["x", "w"], ["y"])], {"w": weight(3, 4)}, ["n", 3])
    with pytest.raises(RuntimeError, match="without a model to extend"):
        onnxblock.blocks.Neg()("y")
    with onnxblock.base(model):
        with pytest.raises(RuntimeError, match="already set"), onnxblock.base(model):
            pass
        with pytest.raises(RuntimeError, match="'nothing', which no node or input of the graph provides"):
            onnxblock.blocks.Neg()("nothing")
    with onnxblock.base(model), pytest.raises(RuntimeError, match="cannot be appended to another graph"):
        onnxblock.optim.SGD()([numpy_helper.from_array(weight(2), "w")])
    with pytest.raises(RuntimeError, match="does not exist"), onnxblock.custom_op_library(tmp_path / "nowhere.so"):
        pass
    for wrong in (lambda: onnxblock.optim.ClipGradNorm(0), lambda: onnxblock.loss.MSELoss("middle")):
        with pytest.raises(RuntimeError):
            wrong()
    with pytest.raises(RuntimeError, match="out of range"):
        onnxblock.optim.AdamW(betas=(1.0, 0.9))


def test_clip_grad_norm_as_a_block() -> None:
    with onnxblock.empty_base() as handle:
        for name in "ab":
            handle.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]))
        names = onnxblock.optim.ClipGradNorm(1.0)("a", "b")
        handle.graph.output.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, [None]) for n in names)
        run = ort.InferenceSession(handle.SerializeToString())
    given = {"a": torch.randn(4), "b": torch.randn(4)}
    clipped_gradients = run.run(None, {name: gradient.numpy() for name, gradient in given.items()})
    assert_matches(clipped_gradients, clipped, list(given.values()), 1.0)


# Updates in place


def graph_of(nodes: list[onnx.NodeProto], outputs: list[str], **weights: np.ndarray) -> ir.Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in ("p", "g", "q")],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in outputs],
        [numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


AXIS = {"axes": np.array([0])}


def scan(reads: tuple[str, str], **directions: list[int]) -> onnx.NodeProto:
    """Compute p.out and dx from two inputs, one element at a time."""
    body = helper.make_graph(
        [node("Sub", ["a", "b"], ["a.out"]), node("Mul", ["b", "b"], ["d"])],
        "body",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, []) for n in ("a", "b")],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, []) for n in ("a.out", "d")],
    )
    return node("Scan", list(reads), ["p.out", "dx"], body=body, num_scan_inputs=2, **directions)


UNSAFE = {
    "a scan that writes from the other end": ([scan(("p", "g"), scan_output_directions=[1, 1])], {}),
    "a scan that reads each slice after its update": ([scan(("g", "p"))], {}),
    "a reader beside the update": ([node("Sub", ["p", "g"], ["p.out"]), node("Mul", ["p", "g"], ["dx"])], {}),
    "a reader of a view": (
        [node("Identity", ["p"], ["v"]), node("Sub", ["p", "g"], ["p.out"]), node("Mul", ["v", "g"], ["dx"])],
        {},
    ),
    "a reader after the update": ([node("Sub", ["p", "g"], ["p.out"]), node("Mul", ["p.out", "p"], ["dx"])], {}),
    "a writer that reads other places": (
        [node("Softmax", ["p"], ["p.out"], axis=0), node("Neg", ["g"], ["dx"])],
        {},
    ),
    "a branch that reads the other parameter": (
        [
            node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
            node(
                "If",
                ["c"],
                ["p.out", "dx"],
                **{
                    f"{kind}_branch": helper.make_graph(
                        [node("Add", ["p", "g"], [f"{kind}1"]), node("Mul", ["p", "g"], [f"{kind}2"])],
                        kind,
                        [],
                        [helper.make_tensor_value_info(f"{kind}{i}", TensorProto.FLOAT, [4]) for i in (1, 2)],
                    )
                    for kind in ("then", "else")
                },
            ),
        ],
        {"s": np.array(1.0, np.float32)},
    ),
}


@pytest.mark.parametrize("name", list(UNSAFE))
def test_an_unsafe_update_is_refused(name: str) -> None:
    nodes, weights = UNSAFE[name]
    with pytest.raises(ArtifactError, match="cannot be written to the memory of p"):
        verify_updates(graph_of(nodes, ["p.out", "dx"], **weights), {"p.out": "p"})


def test_a_safe_update_is_accepted() -> None:
    nodes = [
        node("Mul", ["p", "q"], ["decayed"]),
        node("Mul", ["p", "g"], ["h"]),
        node("Add", ["h", "decayed"], ["s"]),
        node("Sub", ["s", "g"], ["p.out"]),
        node("Neg", ["p.out"], ["dx"]),
    ]
    verify_updates(graph_of(nodes, ["p.out", "dx"]), {"p.out": "p"})
    verify_updates(graph_of([scan(("p", "g"))], ["p.out", "dx"]), {"p.out": "p"})
    verify_updates(
        graph_of([node("Sub", ["p", "g"], ["p.out"]), node("Neg", ["g"], ["dx"])], ["p.out", "dx"]), {"p.out": "p"}
    )


def test_other_invalid_updates_are_refused() -> None:
    model = graph_of([node("Sub", ["p", "g"], ["a"]), node("Neg", ["g"], ["b"])], ["a", "b"])
    with pytest.raises(ArtifactError, match="bound to one input"):
        verify_updates(model, {"a": "p", "b": "p"})
    with pytest.raises(ArtifactError, match="lacks an output or input of an in-place binding"):
        verify_updates(model, {"c": "p"})


@pytest.mark.parametrize("name", slow_except(MODELS, next(iter(MODELS))))
def test_outputs_bound_in_place_equal_outputs_in_separate_memory(name: str, tmp_path: Path) -> None:
    """All of training graph and optimizer graph: the proof holds on onnxruntime, with its optimizations on."""
    data = batches(name, 3)
    usual_artifacts(name, tmp_path)
    bound, free = Stock(tmp_path), Stock(tmp_path)
    values = {n: v.numpy().copy() for n, v in free.values.items()}
    step = session(tmp_path / "optimizer_model.onnx")
    for number, batch in enumerate(data):
        bound.step(*(t.numpy() for t in batch))
        bound.update()
        feeds = dict(zip(free.facts["inputs"], (t.numpy() for t in batch), strict=True))
        feeds |= {"lazy_reset_grad": np.array([True])}
        values |= _run(free.train, {**values, **feeds}, free.facts["updates"])
        values |= {f"{n}_grad": values[f"{n}_grad.accumulation.buffer"] for n in free.facts["trainable"]}
        rates = {"learning_rate": np.array([1e-3], np.float32), "step": np.array([number])}
        missing = [v.name for v in step.get_inputs() if v.name not in values and v.name not in rates]
        zeros = {m: np.zeros_like(values[m.rpartition(".")[0]]) for m in missing}
        updates = {f"{v.name.removesuffix('.out')}.out": v.name.removesuffix(".out") for v in step.get_outputs()}
        values |= zeros | _run(step, {**values, **zeros, **rates}, updates)
    for key, value in values.items():
        if key in bound.values and key in free.facts["trainable"]:
            np.testing.assert_array_equal(bound.parameter(key), value, err_msg=key)


def _run(run: ort.InferenceSession, feeds: dict[str, np.ndarray], updates: dict[str, str]) -> dict[str, np.ndarray]:
    names = [v.name for v in run.get_outputs()]
    outputs = dict(zip(names, run.run(None, {v.name: feeds[v.name] for v in run.get_inputs()}), strict=True))
    return {target: outputs[output] for output, target in updates.items()}


# The form for stock onnxruntime


@pytest.mark.parametrize("name", slow_except(MODELS, next(iter(MODELS))))
def test_portable_graphs_have_portable_ops_only(name: str, tmp_path: Path) -> None:
    if name == "mlp":
        clips = onnxblock.optim.AdamW(clip_grad=onnxblock.optim.ClipGradNorm(1.0))
        artifacts(name, make(name), tmp_path, optimizer=clips, portable=True)
    else:
        usual_artifacts(name, tmp_path, portable=True)
    for kind in ("training", "eval", "optimizer"):
        proto = onnx.load(tmp_path / f"{kind}_model.onnx")
        assert not proto.functions
        assert [o.domain for o in proto.opset_import] == [""]
        assert 18 <= proto.opset_import[0].version <= 21
        model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
        for each in model.graph.all_nodes():
            assert each.op_type in PORTABLE_OPS, each
            assert each.op_type != "MaxPool" or len(each.outputs) == 1
            assert each.op_type != "Pad" or len(each.inputs) < 4, "onnxruntime-web takes no axes"
            for value in (*each.inputs, *each.outputs):
                assert value is None or value.dtype is None or value.dtype in PORTABLE_TYPES, value
        held = {v.dtype for v in (*model.graph.inputs, *model.graph.initializers.values())}
        assert held <= PORTABLE_TYPES


@pytest.mark.parametrize("name", slow_except(["mlp", "transformer"], "mlp"))
def test_training_ops_stay_nodes_with_functions(name: str, tmp_path: Path) -> None:
    usual_artifacts(name, tmp_path)
    proto = onnx.load(tmp_path / "training_model.onnx")
    called = {(n.domain, n.op_type) for n in proto.graph.node if n.domain}
    assert (MICROSOFT, "ReluGrad" if name == "mlp" else "GeluGrad") in called
    assert (MICROSOFT, "SoftmaxCrossEntropyLossInternalGrad") in called
    assert called == {(f.domain, f.name) for f in proto.functions}
    assert not [n for n in proto.graph.node if n.overload], "onnxruntime up to 1.24 takes the first function of a name"
    step = onnx.load(tmp_path / "optimizer_model.onnx")
    assert [n.op_type for n in step.graph.node].count("AdamWStep") >= 2, "the commonest rank stays a call"


def test_names_that_onnxruntime_knows_are_listed() -> None:
    """Its kernel would take precedence over our function: the list must contain all names of this onnxruntime."""
    onnxruntime_names = {s.name for s in onnxruntime_state.get_all_operator_schema() if s.domain == MICROSOFT}
    ours = {name for domain, name in OPS if domain == MICROSOFT}
    assert onnxruntime_names & ours <= KNOWN_TO_ONNXRUNTIME


def test_the_gelu_of_onnxruntime_is_inlined(tmp_path: Path) -> None:
    """com.microsoft::FastGelu: onnxruntime's kernel uses another approximation than our body."""
    model = by_hand(
        [node("MatMul", ["x", "w"], ["h"]), node("FastGelu", ["h"], ["y"], domain=MICROSOFT)],
        {"w": weight(3, 4)},
        ["n", 3],
        domains=(MICROSOFT,),
    )
    generate_artifacts(model, requires_grad=["w"], loss=onnxblock.loss.MSELoss(), artifact_directory=tmp_path)
    proto = onnx.load(tmp_path / "training_model.onnx")
    assert not re.search("FastGelu$", " ".join(n.op_type for n in proto.graph.node))


# Custom ops (F93)


def test_custom_ops_of_a_library(tmp_path: Path) -> None:
    """NegPos of onnxruntime-extensions before the trained weight; only onnxruntime can infer its types."""
    extensions = pytest.importorskip("onnxruntime_extensions")
    library = Path(extensions.get_library_path())
    model = by_hand(
        [node("NegPos", ["x"], ["n", "p"], domain="ai.onnx.contrib"), node("MatMul", ["p", "w"], ["y"])],
        {"w": weight(3, 4)},
        [5, 3],
        domains=("ai.onnx.contrib",),
    )
    options: dict[str, Any] = {"requires_grad": ["w"], "loss": onnxblock.loss.MSELoss()}
    with pytest.raises(ArtifactError, match="type or rank of the output 'n' is not known"):  # it tells no ranks
        generate_artifacts(model, artifact_directory=tmp_path, custom_op_library=library, **options)
    for name in ("n", "p"):
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [5, 3]))
    generate_artifacts(model, artifact_directory=tmp_path, custom_op_library=library, **options)
    run = Stock(tmp_path, library=library)
    x, target = weight(5, 3), weight(5, 4)
    loss = run.step(x, target)[0]
    results = {"loss": loss, **run.gradients()}
    assert_matches(
        results, lambda x, p, t: with_gradients(F.mse_loss(x.relu() @ p["w"], t), p), x, in_torch(model), target
    )
    with_library = ort.SessionOptions()
    with_library.register_custom_ops_library(str(library))
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    by_api = Module(tmp_path / "training_model.onnx", state, session_options=with_library)
    assert by_api(x, target) == loss


def test_numbers_of_constants() -> None:
    value = ir.Value(name="v", const_value=ir.tensor(np.array([3])))
    assert constant_number(value) == 3
    assert constant_number(ir.Value(name="v")) is None
    assert constant_number(None) is None
