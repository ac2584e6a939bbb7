"""The default recomputation: results are bitwise equal, nothing else is saved, and less memory is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.plan.recompute import RECOMPUTED, recomputable_nodes
from tests.plan import measured
from tests.plan.measured import Batch, peak_of, step
from tests.thinned import slow_except


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "minilm": (measured.minilm, measured.sentences),
    "gpt2": (measured.gpt2, measured.words),
    "t5": (measured.t5, measured.words),
    "llama": (llama, measured.words),
}


@pytest.mark.parametrize("name", slow_except(TRANSFORMERS, "gpt2"))
def test_a_transformer_holds_three_quarters_of_eagers_peak(name: str) -> None:
    """Drawn as in eager PyTorch, so that masks are kept; gradients are there before."""
    make, batches = TRANSFORMERS[name]
    torch.manual_seed(0)
    module, batch = make().train(), batches(16, 48)
    model = ORTModule(module, rng="torch")
    eager = peak_of(lambda: step(module, batch))
    assert peak_of(lambda: step(model, batch)) <= 0.75 * eager


class Gated(nn.Module):
    """A gated product; its input goes through an activation that needs no gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 64), nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        hidden = nn.functional.silu(self.gate(x)) * self.up(x)
        return self.down(hidden)


def run(**options: Any) -> tuple[list[str], list[torch.Tensor]]:
    """Return the values recomputed at the first sizes, and outputs and gradients at all sizes."""
    torch.manual_seed(0)
    model = ORTModule(Gated(), rng="torch", **options)
    tensors: list[torch.Tensor] = []
    recomputed_ops: list[str] = []
    for rows in (64, 1, 0, 33):
        x = torch.randn(rows, 8)
        output = model(x)
        x.zero_()  # forward kept no input that backward computes from
        output.square().sum().backward()
        tensors += [output.detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
        recomputed_ops = recomputed_ops or recomputed(model)
    return recomputed_ops, tensors


def recomputed(model: ORTModule) -> list[str]:
    nodes = engine_of(model).newest().parts.backward.nodes
    return [node.op_type for node in nodes if RECOMPUTED in node.metadata_props]


def test_no_bit_changes_and_no_input_is_kept() -> None:
    recomputed_ops, tensors = run()
    nothing, expected = run(recompute="none")
    assert all(map(torch.equal, tensors, expected))
    assert recomputed_ops == ["GatedActivation"]  # no Tanh: it is of the input alone, which the user may change
    assert not nothing


def test_a_convolution_of_few_channels_is_not_cheap() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3))
    model = ORTModule(net, rng="torch")
    model(torch.randn(2, 1, 12, 12)).sum().backward()
    assert recomputed(model) == ["Gelu"]


def test_no_reader_of_a_changed_input_is_recomputed() -> None:
    """It would read what forward left there."""
    x, count = ir.Value(name="x"), ir.Value(name="count")
    for value in (x, count):
        set_type(value, TensorType(ir.DataType.FLOAT, ("n", 4)))
    op = builder(ir.Graph([x, count], [], nodes=[], opset_imports={"": OPSET}, name="example"))
    flat = op.Reshape(count, op.constant([-1], ir.DataType.INT64))
    reads_x, reads_count, reads_view = op.Exp(x), op.Mul(x, count), op.Exp(flat)
    nodes = list(op.graph)
    again = recomputable_nodes(nodes, [count])
    assert reads_x.producer() in again
    assert again.isdisjoint((reads_count.producer(), reads_view.producer()))
    assert recomputable_nodes(nodes, []) == set(nodes)
