"""The predicted memory of a step against what PyTorch's allocator gives out."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.plan.lifetimes import Allocation, Kind, Timeline
from onnxtrain.plan.storage import Storages, bind_symbols
from tests.plan.measured import Batch, ConvNet, model_and_batches, peak_of, step
from tests.thinned import slow_except

SIZES = ((8, 16), (3, 33), (16, 24))


def predicted(model: ORTModule, sizes: dict[str, int]) -> Timeline:
    """The plan's memory at these sizes."""
    timeline: Timeline = engine_of(model).newest().timeline(sizes)[0]
    return timeline


class LossOnly(torch.nn.Module):
    """Returns the loss alone: no logits are held."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.module(**batch)["loss"]}


class Features(torch.nn.Module):
    """Return images in the user's memory format, and read them in it."""

    def __init__(self, module: ConvNet) -> None:
        super().__init__()
        self.layers = module.features

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.layers(images)
        return {"loss": features.flatten(1).softmax(1).square().sum() + 0 * labels.sum(), "features": features}


@pytest.mark.parametrize("name", slow_except(["minilm", "gpt2", "t5", "cnn"], "cnn"))
def test_the_peak_is_predicted(name: str) -> None:
    assert_predicted(*model_and_batches(name))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in ("minilm", "gpt2", "t5")] + ["cnn"])
def test_the_peak_without_logits_is_predicted(name: str) -> None:
    module, make = model_and_batches(name)
    assert_predicted(LossOnly(module), make)


def test_the_peak_of_images_that_are_put_in_order_is_predicted() -> None:
    module, make = model_and_batches("cnn")
    assert isinstance(module, ConvNet)
    assert_predicted(Features(module), make)


class Wide(torch.nn.Module):
    """A step's peak is its gradients."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(8) for layer in (torch.nn.Linear(128, 128), torch.nn.Tanh())]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


@pytest.mark.parametrize("early", [False, True])
def test_the_peak_of_gradients_is_predicted(early: bool) -> None:
    assert_predicted(Wide(), lambda batch, length: {"x": torch.randn(batch, 128)}, early_gradients=early)


def assert_predicted(module: torch.nn.Module, make: Callable[[int, int], Batch], **options: bool) -> None:
    """Within a twentieth of what the allocator gives out, in a step whose gradients are there and outputs are held."""
    model = ORTModule(module, rng="torch", **options)
    for size in SIZES:
        batch = make(*size)
        step(model, batch)
        sizes = sizes_of(model, batch)
        measured = peak_of(lambda batch=batch: step(model, batch))  # type: ignore[misc]
        planned = predicted(model, sizes).peak
        assert abs(planned - measured) <= 0.05 * measured, f"{size}: {planned} bytes predicted, {measured} measured"


def sizes_of(model: ORTModule, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """The number of each symbol in the sizes of the graph's inputs."""
    captured = engine_of(model).newest().captured
    tensors = list(batch.values())
    sources = zip(captured.sources, captured.model.graph.inputs, strict=True)
    inputs = [(value, tensors[source.index]) for source, value in sources if source.kind == "input"]
    return bind_symbols(*zip(*inputs, strict=True))


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


def test_workspace_is_held_during_its_node() -> None:
    value = ir.Value(name="x")
    nodes = tuple(ir.Node("", "Exp", [value]) for _ in range(3))
    allocations = (Allocation(value, 10, 0, 1, Kind.KEPT), Allocation(value, 5, 1, 2, Kind.GRADIENT))
    line = Timeline(nodes, 1, allocations, workspace=(7, 0, 20))
    assert line.live_bytes() == [17, 15, 25]
    assert (line.peak, line.kept) == (25, 10)


def test_sizes_that_are_no_plain_symbol() -> None:
    """`2*n` alone says what n is; `n*m` says nothing."""
    values = [ir.Value(name=name) for name in "abc"]
    for value, size in zip(values, ("2*n + 1", "m", "n*k"), strict=True):
        set_type(value, TensorType(ir.DataType.FLOAT, (size, 3)))
    tensors = [torch.empty(rows, 3) for rows in (9, 5, 12)]
    assert bind_symbols(values, tensors) == {"n": 4, "m": 5, "k": 3}
    assert bind_symbols(values[2:], tensors[2:]) == {}


def test_bytes_held_by_band() -> None:
    module, make = model_and_batches("minilm")
    model = ORTModule(module, rng="torch")
    batch = make(4, 8)
    step(model, batch)
    line = predicted(model, sizes_of(model, batch))
    kinds = {a.value.name: a.kind for a in line.allocations if a.kind is not Kind.TEMPORARY}
    gradients = sum(a.nbytes for a in line.allocations if a.kind is Kind.GRADIENT)
    assert gradients == sum(p.nbytes for p in module.parameters())
    assert set(kinds.values()) == {Kind.KEPT, Kind.RESULT, Kind.GRADIENT}
    assert max(line.live_bytes()) == line.peak >= line.kept > 0
    ends = {a.last for a in line.allocations if a.kind in (Kind.RESULT, Kind.GRADIENT)}
    assert ends == {len(line.nodes)}
