"""Axes that are merged and then split again stay separate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain.graph import sizes
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.passes.cancel_axis_merges import cancel_axis_merges
from onnxtrain.passes.changes import Changes
from tests.passes.less_work import applied_by, check_equals_eager, wrap
from tests.passes.test_rewrites import closed, graph_of
from tests.zoo.entry import Call, Draw

Build = Callable[[Any, ir.Value], ir.Value]


def heads(op: Any, x: ir.Value) -> ir.Value:
    """[s, b, 8] as [b, 4, s, 2], as nn.MultiheadAttention does it."""
    merged = reshaped(op, x, ("s", sizes.multiply("b", 4), 2))
    return reshaped(op, op.Transpose(merged, perm=[1, 0, 2]), ("b", 4, "s", 2))


def through_ops(op: Any, x: ir.Value) -> ir.Value:
    merged = reshaped(op, x, (sizes.multiply("s", "b"), 8))
    return reshaped(op, op.Add(op.Tanh(merged), op.constant([1.0] * 8, ir.DataType.FLOAT)), ("s", "b", 8))


def transposed_twice(op: Any, x: ir.Value) -> ir.Value:
    merged = op.Transpose(reshaped(op, x, (sizes.multiply("s", "b"), 8)), perm=[1, 0])
    return reshaped(op, op.Transpose(op.Tanh(merged), perm=[1, 0]), ("s", "b", 8))


def views_only(op: Any, x: ir.Value) -> ir.Value:
    return reshaped(op, reshaped(op, x, (sizes.multiply("s", "b"), 8)), ("s", "b", 4, 2))


def split_otherwise(op: Any, x: ir.Value) -> ir.Value:
    return reshaped(op, op.Tanh(reshaped(op, x, (sizes.multiply("s", "b"), 8))), ("b", "s", 8))


def read_twice(op: Any, x: ir.Value) -> ir.Value:
    merged = op.Tanh(reshaped(op, x, (sizes.multiply("s", "b"), 8)))
    return op.Mul(reshaped(op, merged, ("s", "b", 8)), op.ReduceSum(merged, keepdims=0))


def never_merged(op: Any, x: ir.Value) -> ir.Value:
    activated = op.Tanh(reshaped(op, x, ("s", "b", 4, 2)))
    return reshaped(op, activated, ("s", "b", 2, 2, 2))


def mixed(op: Any, x: ir.Value) -> ir.Value:
    merged = op.Softmax(reshaped(op, x, (sizes.multiply("s", "b"), 8)), axis=0)
    return reshaped(op, merged, ("s", "b", 8))


def both_merged(op: Any, x: ir.Value) -> ir.Value:
    merged = reshaped(op, x, (sizes.multiply("s", "b"), 8))
    return reshaped(op, op.Add(merged, op.Tanh(merged)), ("s", "b", 8))


@pytest.mark.parametrize(
    ("build", "ranks"),
    [
        (heads, [3, 4, 4]),
        (through_ops, [3, 3, 3]),
        (transposed_twice, [3, 3, 3, 3]),
        (views_only, [3, 4]),
        (split_otherwise, None),
        (read_twice, None),
        (never_merged, None),
        (mixed, None),
        (both_merged, None),
    ],
)
def test_axes_that_are_split_as_they_were_merged(build: Build, ranks: list[int] | None) -> None:
    """`ranks`: of the values on the way; None where nothing changes."""
    op, x = graph_of(("s", "b", 8))
    graph = closed(op, build(op, x))
    result = graph.outputs[0].shape
    before = [node.op_type for node in graph]
    changes = Changes("cancel_axis_merges")
    cancel_axis_merges(graph, changes)
    assert bool(changes.applied) == (ranks is not None)
    assert graph.outputs[0].shape == result
    if ranks is None:
        assert [node.op_type for node in graph] == before
        return
    on_the_way: list[ir.Value] = []
    value: ir.Value | None = graph.outputs[0].producer().inputs[0]  # type: ignore[union-attr]  # Exp has an input
    while value is not None:
        on_the_way.append(value)
        producer = value.producer()
        value = None if producer is None else producer.inputs[0]
    assert [len(sizes.dims_of(v)) for v in reversed(on_the_way)] == ranks


class Merging(nn.Module):
    """Heads and tokens are merged and split as nn.MultiheadAttention does it, and once as it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 12), nn.Linear(12, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, _ = x.shape
        x = self.inner(x.transpose(0, 1))
        y = x.reshape(steps, batch * 4, 3).transpose(0, 1).view(batch, 4, steps, 3)
        y = torch.tanh(y).permute(2, 0, 1, 3).reshape(steps * batch, 12)
        other = self.outer(x.reshape(steps * batch, 12)).view(batch, steps, 6)  # steps and batch are mixed up
        return self.outer(y).view(steps, batch, 6).transpose(0, 1).exp() * other


class LinearOfPixels(nn.Module):
    """A linear layer on the channels of images, between two transposes of images with merged axes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return self.outer(inner.reshape(x.shape)).mean((2, 3))


def test_two_transposes_equal_eager(tmp_path: Path) -> None:
    check_equals_eager(LinearOfPixels, lambda draw, batch, length: Call((draw.floats(batch, 4, length, 3, grad=True),)))
    model = wrap(LinearOfPixels(), tmp_path)
    model(torch.randn(3, 4, 5, 6)).sum().backward()
    assert applied_by(model, "cancel_axis_merges")


def test_equals_eager(tmp_path: Path) -> None:
    def rows(draw: Draw, batch: int, length: int) -> Call:
        return Call((draw.floats(batch, length, 8, grad=True),))

    check_equals_eager(Merging, rows)
    model = wrap(Merging(), tmp_path)
    model(torch.randn(3, 5, 8)).sum().backward()
    assert applied_by(model, "cancel_axis_merges")
