"""Files show the repeated blocks of a graph as functions, and compute what the graph computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from onnxtrain import DebugOptions, ORTModule, onnx_file
from onnxtrain.graph.block_functions import DOMAIN, fold_blocks
from onnxtrain.graph.builder import Builder
from tests.graph.small import graph_of

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z: Tensor = x + self.attention(y, y, y, need_weights=False)[0]
        return z


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(self.norm(x))
        return y


class Encoder(nn.Module):
    def __init__(self, kinds: Sequence[Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.ModuleList([kind() for kind in kinds])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layer:
            x = layer(x)
        return x


def functions(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the names of the functions of blocks, and how often each is called."""
    called = [node.op_type for node in proto.graph.node if node.domain == DOMAIN]
    return {f.name: called.count(f.name) for f in proto.functions if f.domain == DOMAIN}


def run(proto: onnx.ModelProto) -> list[np.ndarray]:
    """Run a file in onnxruntime as it is written, for inputs that depend on their names only."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {}
    for value in session.get_inputs():
        shape = [size if isinstance(size, int) else 3 + axis for axis, size in enumerate(value.shape)]
        seed = sum(value.name.encode())
        feeds[value.name] = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    results: list[np.ndarray] = session.run(None, feeds)
    return results


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> list[onnx.ModelProto]:
    """The files without functions of blocks, in the order in which they are written."""
    written: list[onnx.ModelProto] = []

    def keep_and_fold(model: ir.Model) -> None:
        written.append(ir.serde.serialize_model(model))
        fold_blocks(model)

    monkeypatch.setattr(onnx_file, "fold_blocks", keep_and_fold)
    return written


@pytest.mark.parametrize(
    ("kinds", "forward"),
    [
        pytest.param([Layer] * 4, {"layer": 4}, marks=pytest.mark.slow),
        ([Layer, Feedforward] * 3, {"layer": 3, "layer_2": 3}),
        pytest.param([Feedforward, *[Layer] * 3], {"layer": 3}, marks=pytest.mark.slow),
        ([Layer] * 2, {}),
    ],
    ids=["equal", "every second another", "the first another", "too few"],
)
def test_files_of_a_model(
    kinds: Sequence[Callable[[], nn.Module]], forward: dict[str, int], flat: list[onnx.ModelProto], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    ours = ORTModule(Encoder(kinds), DebugOptions(save_onnx=True, save_path=str(tmp_path), onnx_prefix="m"))
    ours(torch.randn(3, 4, WIDTH)).sum().backward()
    stages = ("torch_exported", "optimized_pre_grad", "optimized", "execution_model")
    for stage, before in zip(stages, flat, strict=True):
        proto = onnx.load(tmp_path / f"m_{stage}_training.onnx")
        onnx.checker.check_model(proto, full_check=True)
        counts = functions(proto)
        assert {name: count for name, count in counts.items() if "gradient" not in name} == forward
        if "pre_grad" not in stage and stage != "torch_exported":
            assert sorted(counts.values()) == sorted([*forward.values(), *forward.values()])
        for result, expected in zip(run(proto), run(before), strict=True):
            np.testing.assert_array_equal(result, expected)


def test_a_function_has_the_names_of_its_module(tmp_path: Path) -> None:
    ours = ORTModule(Encoder([Feedforward] * 3), DebugOptions(save_onnx=True, save_path=str(tmp_path), onnx_prefix="m"))
    ours(torch.randn(3, 4, WIDTH))
    proto = onnx.load(tmp_path / "m_torch_exported_training.onnx")
    (function,) = (f for f in proto.functions if f.domain == DOMAIN)
    assert {"norm.weight", "layers.0.weight", "layers.2.bias"} <= set(function.input)
    assert not any("layer." in name for node in function.node for name in (*node.input, *node.output))
    calls = [node for node in proto.graph.node if node.domain == DOMAIN]
    assert [node.name for node in calls] == ["layer.0", "layer.1", "layer.2"]
    assert "layer.1.norm.weight" in calls[1].input


def layered(layers: Callable[[Builder, ir.Value, int], ir.Value], count: int = 3) -> ir.Model:
    op, (x,) = graph_of(x=("b", 4))
    y = x
    for index in range(count):
        y = layers(op, y, index)
    op.graph.outputs.append(y)
    return ir.Model(op.graph, ir_version=10)


def test_blocks_with_other_attributes_are_no_function() -> None:
    def layer(op: Builder, x: ir.Value, index: int) -> ir.Value:
        with op.at({"module": f"layer.{index}"}):
            return op.Elu(op.Neg(op.Exp(op.Abs(x))), alpha=1.0 + index)  # type: ignore[no-any-return]  # a value

    model = layered(layer)
    before = len(model.graph)
    fold_blocks(model)
    assert (len(model.graph), len(model.functions)) == (before, 0)


def test_blocks_around_another_node_are_no_function() -> None:
    """The call would read what it computes."""

    def layer(op: Builder, x: ir.Value, index: int) -> ir.Value:
        with op.at({"module": f"layer.{index}.first"}):
            y = op.Exp(op.Abs(x))
        with op.at({"module": "shared"}):
            z = op.Neg(y)
        with op.at({"module": f"layer.{index}.second"}):
            return op.Tanh(op.Add(z, y))  # type: ignore[no-any-return]  # a value

    model = layered(layer)
    before = copy.copy(list(model.graph))
    fold_blocks(model)
    assert list(model.graph) == before
