"""Quantization-aware training: PyTorch's fake_quantize operators, and FakeQuant in place of Q/DQ pairs."""

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from onnxtrain import ORTModule
from onnxtrain.ops.quantization.fake_quantize import dequantize, fake_quantize, quantize
from tests.op_case import Spec
from tests.ops.captures import check_capture
from tests.ops.modules import ops_of

X = Spec("b s h", low=-3, high=3)


def test_fake_quantize() -> None:
    model = check_capture(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, 3, -8, 7), X)
    assert "com.microsoft::FakeQuant" in ops_of(model)


def test_fake_quantize_with_tensors() -> None:
    def quantize(x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(
            x, torch.tensor([0.25]), torch.tensor([3], dtype=torch.int32), 0, 15
        )

    check_capture(quantize, X)


@pytest.mark.parametrize(("x", "axis"), [("3 b s", 0), ("b 3 s", 1), ("b s 3", -1)])
def test_fake_quantize_by_channel(x: str, axis: int) -> None:
    def quantize(x: torch.Tensor) -> torch.Tensor:
        scale, zero_point = torch.tensor([0.25, 0.5, 1.0]), torch.tensor([3, -1, 0], dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis % 3, -8, 7)

    model = check_capture(quantize, Spec(x, low=-5, high=5))
    assert "com.microsoft::FakeQuant" in ops_of(model)


SCALE = torch.tensor(0.3)


def values_that_differ() -> torch.Tensor:
    """Make inputs of which only one of x / SCALE and x * (1 / SCALE) is a tie between two levels of int4."""
    ties = (torch.arange(-8, 8) + 0.5) * SCALE
    x = torch.cat([ties, *(ties.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf))])
    return x[(x / SCALE).round() != (x * SCALE.reciprocal()).round()]


def quantize_and_dequantize_by_onnxruntime(x: torch.Tensor) -> torch.Tensor:
    types = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in ("x", "y")]
    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [SCALE.item()]),
        helper.make_tensor("zero_point", TensorProto.INT8, [], [3]),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["levels"]),
        helper.make_node("DequantizeLinear", ["levels", "scale", "zero_point"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "pair", types[:1], types[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (y,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})
    return torch.from_numpy(np.asarray(y))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_division_rounds_as_onnxruntime_and_reciprocal_as_torch(requires_grad: bool) -> None:
    x = values_that_differ()
    assert x.numel() > 0
    zero = torch.tensor(3.0)
    by_torch = torch.fake_quantize_per_tensor_affine(x, SCALE.item(), 3, -128, 127)
    by_onnxruntime = quantize_and_dequantize_by_onnxruntime(x)
    assert ((by_torch - by_onnxruntime).abs() > SCALE / 2).all(), "one level apart"
    for divide, expected in ((False, by_torch), (True, by_onnxruntime)):
        leaf = x.clone().requires_grad_(requires_grad)
        y, mask = fake_quantize(leaf, SCALE, zero, -128, 127, divide=divide)
        assert torch.equal(y.detach(), expected)
        assert mask.all()
        if requires_grad:
            assert torch.equal(torch.autograd.grad(y.sum(), leaf)[0], torch.ones_like(x))
    levels = quantize(x, SCALE, torch.tensor(3, dtype=torch.int8), 0, torch.int8)
    assert torch.equal(dequantize(levels, SCALE, torch.tensor(3, dtype=torch.int8), 0), by_onnxruntime)


def test_captured_fake_quantize_rounds_ties_as_torch() -> None:
    class FakeQuantize(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fake_quantize_per_tensor_affine(x, SCALE.item(), 3, -128, 127) * 1.0

    x = values_that_differ().requires_grad_()
    expected = FakeQuantize()(x)
    assert torch.equal(ORTModule(FakeQuantize())(x), expected)
