"""The predicted memory of a step against what PyTorch's allocator gives out."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.plan.lifetimes import Kind, Timeline, timeline
from onnxtrain.plan.storage import Storages, known_sizes
from tests.plan.measured import made, peak_of, step

SIZES = ((8, 16), (3, 33), (16, 24))


def predicted(model: ORTModule, known: dict[str, int]) -> Timeline:
    """The plan's memory at these sizes."""
    parts = model.__dict__["_engine"].newest().parts
    return timeline(parts, Storages([*parts.forward.nodes, *parts.backward.nodes], known, "cpu"))


@pytest.mark.parametrize("name", ["minilm", "gpt2", "t5", "cnn"])
def test_the_peak_is_predicted_within_a_tenth(name: str) -> None:
    """Measured is what the allocator gives out in a step whose gradients are there and whose outputs are held."""
    module, make = made(name)
    model = ORTModule(module, rng="torch")
    for size in SIZES:
        batch = make(*size)
        step(model, batch)
        known = sizes_of(model, batch)
        measured = peak_of(lambda batch=batch: step(model, batch))  # type: ignore[misc]
        found = predicted(model, known).peak
        assert abs(found - measured) <= 0.1 * measured, f"{size}: {found} bytes predicted, {measured} measured"


def sizes_of(model: ORTModule, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """The number of each symbol in the sizes of the graph's inputs."""
    captured = model.__dict__["_engine"].newest().captured
    tensors = list(batch.values())
    sources = zip(captured.sources, captured.model.graph.inputs, strict=True)
    inputs = [(value, tensors[source.index]) for source, value in sources if source.kind == "input"]
    return known_sizes(*zip(*inputs, strict=True))


def test_workspace_and_views_count() -> None:
    """A Reshape of a Transpose is a copy, one of a fresh tensor is none."""
    x = ir.Value(name="x")
    set_type(x, TensorType(ir.DataType.FLOAT, ("n", 4)))
    op = builder(ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name="example"))
    fresh = op.Exp(x)
    view = op.Reshape(fresh, op.constant([-1], ir.DataType.INT64))
    turned = op.Transpose(fresh, perm=[1, 0])
    copy = op.Reshape(turned, op.constant([-1], ir.DataType.INT64))
    storages = Storages(op.graph, {"n": 3}, "cpu")
    assert storages.bytes_of(fresh) == 48
    assert storages.source(view) is fresh
    assert storages.source(turned) is fresh
    assert storages.source(copy) is None
    assert storages.root(view) is fresh


def test_sizes_that_are_no_plain_symbol() -> None:
    """`2*n` alone says what n is; `n*m` says nothing."""
    values = [ir.Value(name=name) for name in "abc"]
    for value, size in zip(values, ("2*n + 1", "m", "n*k"), strict=True):
        set_type(value, TensorType(ir.DataType.FLOAT, (size, 3)))
    tensors = [torch.empty(rows, 3) for rows in (9, 5, 12)]
    assert known_sizes(values, tensors) == {"n": 4, "m": 5, "k": 3}
    assert known_sizes(values[2:], tensors[2:]) == {}


def test_what_is_held_and_for_what() -> None:
    module, make = made("minilm")
    model = ORTModule(module, rng="torch")
    batch = make(4, 8)
    step(model, batch)
    line = predicted(model, sizes_of(model, batch))
    kinds = {a.value.name: a.kind for a in line.allocations if a.kind is not Kind.TEMPORARY}
    gradients = sum(a.nbytes for a in line.allocations if a.kind is Kind.GRADIENT)
    assert gradients == sum(p.nbytes for p in module.parameters())
    assert set(kinds.values()) == {Kind.KEPT, Kind.RESULT, Kind.GRADIENT}
    assert max(line.held()) == line.peak >= line.kept > 0
    ends = {a.last for a in line.allocations if a.kind in (Kind.RESULT, Kind.GRADIENT)}
    assert ends == {len(line.nodes)}
