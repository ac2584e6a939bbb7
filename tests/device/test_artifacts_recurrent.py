"""Recurrent layers on stock onnxruntime: other lengths than the example's, sequences of several lengths, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.errors import ArtifactError
from onnxtrain.onnxblock.optim import SGD
from tests.device.models import Recurrent
from tests.device.stock import Stock, train_torch
from tests.reference import assert_matches
from tests.thinned import slow_but_every, slow_except

WIDTH, HIDDEN = 3, 4


def ids(samples: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples * 100 + steps)
    words = torch.randint(0, 50, (samples, steps), generator=generator)
    return words, torch.randint(0, 10, (samples,), generator=generator)


@pytest.mark.parametrize("portable", slow_except([False, True], True), ids=["functions", "portable"])
@pytest.mark.parametrize("kind", slow_but_every(2, [nn.LSTM, nn.GRU, nn.RNN]))
def test_all_lengths_train_as_in_torch(kind: type[nn.RNNBase], portable: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Recurrent(kind)
    generate_artifacts(
        module,
        example_args=ids(3, 5)[:1],
        loss=LossType.CrossEntropyLoss,
        optimizer=SGD(),
        artifact_directory=tmp_path,
        portable=portable,
    )
    operators = {node.op_type for node in onnx.load(tmp_path / "training_model.onnx").graph.node}
    assert (kind.__name__ if portable else f"{kind.__name__}LayerGrad") in operators
    data = [ids(3, 5), ids(2, 9), ids(4, 1), ids(1, 1)]
    run = Stock(tmp_path, lr=0.1)
    losses = run.train_on(data)
    results = {"losses": losses} | {name: run.parameter(name) for name, _ in module.named_parameters()}

    def reference(module: nn.Module) -> dict[str, torch.Tensor]:
        losses = train_torch(module, F.cross_entropy, data, lambda p: torch.optim.SGD(p, lr=0.1))
        return {"losses": losses, **dict(module.named_parameters())}

    assert_matches(results, reference, module)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


class LastStep(nn.Module):
    """The output of a GRU after the last step, with time as the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][-1]


def test_the_last_step_of_sequences_of_any_length(tmp_path: Path) -> None:
    module = LastStep()
    loss, example = LossType.CrossEntropyLoss, (torch.randn(5, 2, WIDTH),)
    generate_artifacts(module, example_args=example, loss=loss, optimizer=SGD(), artifact_directory=tmp_path)
    data = [(torch.randn(steps, 3, WIDTH), torch.randint(0, HIDDEN, (3,))) for steps in (5, 9, 1)]
    losses = Stock(tmp_path, lr=0.5).train_on(data)
    assert_matches(losses, train_torch, module, F.cross_entropy, data, sgd, name="losses")


def model_file(name: str, weights: dict[str, np.ndarray], **attributes: Any) -> onnx.ModelProto:
    """Put x, times `first`, and the lengths of its sequences through the layer."""
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["s", "b", WIDTH]),
        helper.make_tensor_value_info("lengths", TensorProto.INT32, ["b"]),
    ]
    nodes = [
        helper.make_node("Mul", ["x", "first"], ["scaled"]),
        helper.make_node(name, ["scaled", "w", "r", "b", "lengths"], ["y"], hidden_size=HIDDEN, **attributes),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["s", 1, "b", HIDDEN])
    arrays = [numpy_helper.from_array(array, key) for key, array in weights.items()]
    graph = helper.make_graph(nodes, "layer", inputs, [output], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def layer(kind: type[nn.RNNBase]) -> tuple[nn.RNNBase, dict[str, np.ndarray]]:
    """A layer of PyTorch's, and its weights as ONNX has them."""
    torch.manual_seed(0)
    module = kind(WIDTH, HIDDEN)
    order = {nn.LSTM: (0, 3, 1, 2), nn.GRU: (1, 0, 2), nn.RNN: (0,)}[kind]

    def turned(weight: torch.Tensor) -> torch.Tensor:
        blocks = weight.detach().chunk(len(order))
        return torch.cat([blocks[gate] for gate in order])

    biases = torch.cat([turned(module.bias_ih_l0), turned(module.bias_hh_l0)])
    weights = {"w": turned(module.weight_ih_l0), "r": turned(module.weight_hh_l0), "b": biases}
    return module, {"first": np.ones(1, np.float32)} | {key: v[None].numpy().copy() for key, v in weights.items()}


class Packed(nn.Module):
    """The model of `model_file` in PyTorch."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.first = layer, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x * self.first, lengths, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], total_length=len(x))[0][:, None]


def trained(module: Packed, data: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    return {"losses": train_torch(module, F.mse_loss, data, sgd), "first": module.first}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_sequences_of_several_lengths(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    module, weights = layer(kind)
    attributes = {"linear_before_reset": 1} if kind is nn.GRU else {}
    generate_artifacts(
        model_file(kind.__name__, weights, **attributes),
        requires_grad=list(weights),
        loss=LossType.MSELoss,
        optimizer=SGD(),
        artifact_directory=tmp_path,
    )
    run = Stock(tmp_path, lr=0.5)
    data = [
        (
            torch.randn(steps, len(lengths), WIDTH),
            torch.tensor(lengths, dtype=torch.int32),
            torch.randn(steps, 1, len(lengths), HIDDEN),
        )
        for steps, lengths in ((5, [2, 5, 1]), (7, [7, 3]))
    ]
    results = {"losses": run.train_on(data), "first": run.parameter("first")}
    assert_matches(results, trained, Packed(module), data)


def test_a_size_that_only_an_example_had_is_not_believed(tmp_path: Path) -> None:
    """The file declares one sample behind an input of any number."""
    _, weights = layer(nn.RNN)
    model = model_file("RNN", weights)
    model.graph.value_info.append(helper.make_tensor_value_info("scaled", TensorProto.FLOAT, ["s", 1, WIDTH]))
    settings = {"loss": LossType.MSELoss, "artifact_directory": tmp_path}
    generate_artifacts(model, requires_grad=["first"], optimizer=SGD(), **settings)
    run = Stock(tmp_path, lr=0.5)
    data = [(torch.randn(4, 3, WIDTH), torch.full((3,), 4, dtype=torch.int32), torch.randn(4, 1, 3, HIDDEN))]
    results = {"losses": run.train_on(data), "first": run.parameter("first")}
    assert_matches(results, trained, Packed(layer(nn.RNN)[0]), data)


def test_ops_that_pytorch_lacks_run_only_if_frozen(tmp_path: Path) -> None:
    _, weights = layer(nn.GRU)
    model = model_file("GRU", weights)  # linear_before_reset is 0
    with pytest.raises(ArtifactError, match="linear_before_reset=0"):
        generate_artifacts(model, requires_grad=["first"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    after = helper.make_node("Mul", ["y", "last"], ["z"])
    model.graph.node.append(after)
    model.graph.initializer.append(numpy_helper.from_array(np.full(1, 2, np.float32), "last"))
    model.graph.output[0].name = "z"
    generate_artifacts(model, requires_grad=["last"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    operators = [node.op_type for node in onnx.load(tmp_path / "training_model.onnx").graph.node]
    assert "GRU" in operators
    assert "GRUTraining" not in operators


def test_a_scan_of_a_model_is_refused(tmp_path: Path) -> None:
    parts = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("total", "x_t", "sum", "y_t")]
    body = helper.make_graph(
        [helper.make_node("Add", ["total", "x_t"], ["sum"]), helper.make_node("Identity", ["sum"], ["y_t"])],
        "body",
        parts[:2],
        parts[2:],
    )
    nodes = [
        helper.make_node("Mul", ["x", "first"], ["scaled"]),
        helper.make_node("Scan", ["start", "scaled"], ["end", "y"], body=body, num_scan_inputs=1),
    ]
    arrays = [numpy_helper.from_array(np.ones(2, np.float32), name) for name in ("first", "start")]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["s", 2]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "scan", infos[:1], infos[1:], arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(ArtifactError, match="loops"):
        generate_artifacts(model, requires_grad=["first"], loss=LossType.MSELoss, artifact_directory=tmp_path)
