"""Scalar factors become part of GEMMs and attention, or move to smaller tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain.passes.changes import Changes
from onnxtrain.passes.fold_scalar_factors import fold_scalar_factors
from tests.passes.less_work import WIDTH, applied_by, check_equals_eager, forward_graph, refusals, wrap
from tests.passes.test_rewrites import closed, graph_of, kinds, rows, source_of_result
from tests.zoo.entry import Draw

SIZES = ((3, 9), (1, 6), (2, 1))
EMPTY = ((0, 5), (0, 2))


class Scaled(nn.Module):
    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.compute(self, torch.tanh(self.first(x))))


def chain(m: Scaled, y: torch.Tensor) -> torch.Tensor:
    return 3 * (y * 0.3 / 7)


def adapter(m: Scaled, y: torch.Tensor) -> torch.Tensor:
    """As LoRA's layers: the number moves to the low-rank tensor."""
    low: torch.Tensor = m.up(m.down(y))
    return y + low * 1.7


def contrast(m: Scaled, y: torch.Tensor) -> torch.Tensor:
    """Similarities over a temperature."""
    return y @ y.transpose(-2, -1) / 0.07


def before_product(m: Scaled, y: torch.Tensor) -> torch.Tensor:
    return (y * 0.3).unflatten(-1, (2, -1)).transpose(1, 2) @ y.unflatten(-1, (2, -1)).permute(0, 2, 3, 1)


def attention(m: Scaled, y: torch.Tensor) -> torch.Tensor:
    """As Whisper and OPT: the projection is scaled, and attention has scale 1."""
    q, k, v = ((y * s).unflatten(-1, (2, -1)).transpose(1, 2) for s in (WIDTH**-0.5, 1.0, 1.0))
    return nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)


COMPUTED = [chain, adapter, contrast, before_product, attention]


@pytest.mark.parametrize("compute", COMPUTED)
@pytest.mark.parametrize("sizes", [SIZES, EMPTY], ids=["some", "none"])
def test_scaled_models_train_as_in_eager(compute: Any, sizes: Any) -> None:
    check_equals_eager(lambda: Scaled(compute), rows, sizes)


@pytest.mark.parametrize("compute", COMPUTED)
def test_numbers_are_folded(compute: Any, tmp_path: Path) -> None:
    model = wrap(Scaled(compute), tmp_path)
    model(*rows(Draw(0), 3, 9).args).sum().backward()
    op_counts = kinds(tmp_path)
    assert applied_by(model, "fold_scalar_factors")
    assert not refusals(model, "fold_scalar_factors")
    assert op_counts["Div"] == 0
    assert op_counts["Mul"] == (1 if compute in (chain, adapter) else 0)
    if compute is adapter:
        (product,) = (node for node in forward_graph(tmp_path) if node.op_type == "Mul")
        assert product.outputs[0].shape is not None
        assert product.outputs[0].shape[-1] == 4, "the low-rank tensor is the smaller one"


def test_a_product_that_is_read_elsewhere_stays(tmp_path: Path) -> None:
    def twice(m: Scaled, y: torch.Tensor) -> torch.Tensor:
        product = y @ y.transpose(-2, -1)
        return product * 0.5 + product.exp()

    model = wrap(Scaled(twice), tmp_path)
    model(*rows(Draw(0), 3, 9).args).sum().backward()
    assert not applied_by(model, "fold_scalar_factors")


def test_a_square_takes_no_number_of_one_operand() -> None:
    op, x = graph_of(("b", 4, 4))
    scaled = op.Mul(x, op.scalar(3.0, like=x))
    graph = closed(op, op.MatMul(scaled, scaled))
    changes = Changes("fold_scalar_factors")
    fold_scalar_factors(graph, changes)
    assert not changes.applied


@pytest.mark.parametrize(
    ("number", "dtype", "reason"),
    [
        (1 / 0.07, "DOUBLE", "cannot hold its factor exactly"),
        (0.5, "FLOAT16", "float16"),
        (2.0**30, "FLOAT", None),
        (0.0, "FLOAT", None),
        (math.inf, "FLOAT", None),
    ],
)
def test_refused_forms(number: float, dtype: str, reason: str | None) -> None:
    op, x = graph_of(("b", 4, 4), ir.DataType[dtype])
    graph = closed(op, op.Mul(op.MatMul(x, x), op.scalar(number, like=x)))
    changes = Changes("fold_scalar_factors")
    fold_scalar_factors(graph, changes)
    assert not changes.applied
    assert bool(reason) == bool(changes.refused)
    assert all(reason in str(refusal) for refusal in changes.refused if reason)


def test_powers_of_two_are_folded_in_float64() -> None:
    op, x = graph_of(("b", 4, 4), ir.DataType.DOUBLE)
    graph = closed(op, op.Div(op.MatMul(op.Mul(op.scalar(0.5, like=x), x), x), op.scalar(8.0, like=x)))
    fold_scalar_factors(graph, Changes("fold_scalar_factors"))
    node = source_of_result(graph)
    assert node is not None
    assert node.op_type == "FusedMatMul"
    assert node.attributes["alpha"].as_float() == 1 / 16


def test_eagers_random_numbers_keep_eagers_order_of_operations(tmp_path: Path) -> None:
    def dropped(m: Scaled, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout((y @ y.transpose(-2, -1)) * 0.3, 0.5)

    model = wrap(Scaled(dropped), tmp_path, rng="torch")
    model(*rows(Draw(0), 3, 9).args).sum().backward()
    assert not applied_by(model, "fold_scalar_factors")
    assert [r for r in refusals(model, "fold_scalar_factors") if "order of operations" in str(r)]
