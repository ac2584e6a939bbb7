"""An activation and the product that it gates become one op, which has the gradients of both."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from onnxtrain.errors import GraphError
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from tests.op_case import Spec
from tests.ops.captures import FunctionModule, check_capture
from tests.reference import assert_matches
from tests.thinned import covering

X, ROW = Spec("b s 6"), Spec("6")
ROOT = math.sqrt(2 / math.pi)


def kinds(ours: torch.nn.Module) -> list[str]:
    """The ops of the forward program's nodes."""
    return [node.op_type for node in engine_of(ours).newest().parts.forward.nodes]


def backward_kinds(ours: torch.nn.Module) -> list[str]:
    return [node.op_type for node in engine_of(ours).newest().parts.backward.nodes]


def silu(gate, up):
    return F.silu(gate) * up


def silu_behind(gate, up):
    return up * F.silu(gate)


def silu_written_out(gate, up):
    return gate * torch.sigmoid(gate) * up


def gelu(gate, up):
    return F.gelu(gate) * up


def tanh_gelu(gate, up):
    """As Gemma does."""
    return F.gelu(gate, approximate="tanh") * up


def tanh_gelu_written_out(gate, up):
    """As T5 v1.1 does."""
    return 0.5 * gate * (1.0 + torch.tanh(ROOT * (gate + 0.044715 * torch.pow(gate, 3.0)))) * up


def halves(gate, up):
    """As Phi-3 does."""
    both = torch.cat([gate, up], -1)
    gate, up = both.reshape(*both.shape[:-1], 12).chunk(2, dim=-1)  # a width that is known, as a Linear's is
    return up * F.silu(gate)


def of_itself(gate, up):
    return F.silu(gate) * gate + up


def inputs_read_elsewhere(gate, up):
    return F.silu(gate) * up + gate.sin() + up * gate


def two_activations(gate, up):
    return F.silu(gate) * F.gelu(up)


FORMS: tuple[Callable[..., torch.Tensor], ...] = (
    silu,
    silu_behind,
    silu_written_out,
    gelu,
    tanh_gelu,
    tanh_gelu_written_out,
    halves,
    of_itself,
    inputs_read_elsewhere,
    two_activations,
)


@pytest.mark.parametrize(
    ("form", "dtype"),
    covering(FORMS, [torch.float32, torch.float64]),
    ids=lambda v: v.__name__ if callable(v) else str(v),
)
def test_a_form_becomes_one_op(form: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    ours = check_capture(form, X, X, dtype=dtype)
    assert kinds(ours).count("GatedActivation") == 1
    assert not {"QuickGelu", "Sigmoid", "Tanh"} & set(kinds(ours))
    assert backward_kinds(ours).count("GatedActivationGrad") == 1


@pytest.mark.parametrize("form", [silu, gelu, tanh_gelu, halves], ids=lambda f: f.__name__)
def test_a_form_in_bfloat16(form: Callable[..., torch.Tensor]) -> None:
    assert kinds(check_capture(form, X, X, dtype=torch.bfloat16)).count("GatedActivation") == 1


def broadcast(gate, row):
    return F.silu(gate) * row


def broadcast_gate(gate, row):
    return gate * F.silu(row)


def squared(gate, row):
    return F.silu(gate) ** 2 + row


def other_alpha(gate, row):
    return gate * torch.sigmoid(1.702 * gate) * gate + row


@pytest.mark.parametrize("form", [broadcast, broadcast_gate, squared, other_alpha], ids=lambda f: f.__name__)
def test_similar_subgraphs_are_not_fused(form: Callable[..., torch.Tensor]) -> None:
    assert "GatedActivation" not in kinds(check_capture(form, X, ROW))


def test_an_activation_that_is_read_elsewhere_is_named() -> None:
    def both(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = F.silu(gate)
        return s * up, s

    ours = check_capture(both, X, X)
    assert "GatedActivation" not in kinds(ours)
    refused = engine_of(ours).newest().report.refused
    assert [r.reason for r in refused if r.pass_name == "fuse_gated_activations"] == [
        "not fused into GatedActivation: silu has other users"
    ]


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_gradient_alone(wanted: int) -> None:
    ours = ORTModule(FunctionModule(silu))
    inputs = [torch.randn(4, 6, requires_grad=i == wanted) for i in range(2)]
    dy = torch.randn(4, 6)

    def gradient(f: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dy: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(f(*inputs), inputs[wanted], dy)[0]

    assert_matches(gradient(ours, inputs, dy), gradient, silu, inputs, dy)
    assert "GatedActivationGrad" not in backward_kinds(ours)


def test_an_unknown_activation_is_refused() -> None:
    op = builder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="unknown"))
    x = op.constant([1.0, 2.0], ir.DataType.FLOAT)
    with pytest.raises(GraphError, match="unknown activation"):
        op.own.GatedActivation(x, x, activation="relu")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(32, 96), torch.nn.Linear(32, 96), torch.nn.Linear(96, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def test_gate_and_up_alone_are_kept() -> None:
    """The product, which the gradient of `down` reads, is recomputed."""
    ours = ORTModule(Block())
    ours(torch.randn(50, 32, requires_grad=True)).sum().backward()
    assert kinds(ours).count("GatedActivation") == 1
    assert backward_kinds(ours).count("GatedActivation") == 1
    kept = [tuple(map(str, v.shape)) for v in engine_of(ours).newest().parts.kept if v.shape is not None]
    assert sum(shape[-1:] == ("96",) and shape[0] != "32" for shape in kept) == 2, kept
