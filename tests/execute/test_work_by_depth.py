"""What is done once for the layers of a model, however many there are: counted, not timed."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.kernel_choice import expected
from onnxtrain.execute.kernel_choice.expected import CachedExpectations, expected_seconds
from onnxtrain.graph import sizes
from onnxtrain.ops import builder, definition_of
from onnxtrain.plan import default_recompute
from onnxtrain.plan.default_recompute import choose_by_default


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.gate(x)) * self.out(x)  # type: ignore[no-any-return]


def stack(depth: int) -> nn.Module:
    """Every third block is of another kind."""
    return nn.Sequential(*(Gated() if i % 3 == 2 else Narrow() for i in range(depth)))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the nodes with several kernels whose kernels are compared, and the sizes that the recompute evaluates."""
    count: Counter[str] = Counter()

    def asked(node: ir.Node, device: str) -> object:
        count["kernels"] += definition_of(node).has_alternatives
        return expected_seconds(node, device)

    def evaluate(size: sizes.Size, symbol_values: dict[str, int]) -> int:
        count["sizes"] += 1
        return sizes_evaluate(size, symbol_values)

    sizes_evaluate = sizes.evaluate
    monkeypatch.setattr(expected, "expected_seconds", asked)

    def choose(*arguments: object, **keywords: object) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(default_recompute.sizes, "evaluate", evaluate)
            return choose_by_default(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr("onnxtrain.plan.memory_plan.choose_by_default", choose)
    return count


def test_kernels_and_sizes_are_not_asked_for_each_layer(counted: Counter[str]) -> None:
    counts: list[Counter[str]] = []
    for depth in (12, 24):
        counted.clear()
        ORTModule(stack(depth))(torch.randn(4, 8)).sum().backward()
        counts.append(counted.copy())
    assert counts[0]["kernels"] == counts[1]["kernels"] > 0
    assert counts[0]["sizes"] >= counts[1]["sizes"] > 0  # of a deeper model, fewer values are a sizable share of all


def test_nodes_of_other_types_or_attributes_are_asked_for_themselves() -> None:
    op = builder(ir.Graph([], [], nodes=[], opset_imports={"": 21}))

    def tensor(*shape: int | str) -> ir.Value:
        value = ir.Value(
            name=f"x{len(op.graph.inputs)}", shape=sizes.shape(shape), type=ir.TensorType(ir.DataType.FLOAT)
        )
        op.graph.inputs.append(value)
        return value

    outputs = [
        op.MatMul(tensor("s", 8), tensor(8, 4)),
        op.MatMul(tensor("s", 8), tensor(8, 4)),
        op.MatMul(tensor("s", 8), tensor(8, 4096)),
        op.ms.FusedMatMul(tensor(8, "s"), tensor(8, 4), transA=1),
        op.ms.FusedMatMul(tensor(8, 8), tensor(8, 4), transA=0),
        op.ms.FusedMatMul(tensor(8, 8), tensor(8, 4), transA=1),
    ]
    cached = CachedExpectations()
    nodes = [value.producer() for value in outputs]
    seconds = [cached.seconds(node, "cpu") for node in nodes]
    assert seconds == [expected_seconds(node, "cpu") for node in nodes]
    assert seconds[0] is seconds[1]
    assert len({id(s) for s in seconds}) == len(nodes) - 1
