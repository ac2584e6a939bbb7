"""Small rewrites of pointwise convolutions, transposes and casts: results equal eager's, and the graph shows them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.reshape.join import concatenated, split
from onnxtrain.passes.cancel_casts import cancel_casts
from onnxtrain.passes.cancel_transposes import cancel_transposes
from onnxtrain.passes.changes import Changes
from onnxtrain.testing import assert_no_worse_than_eager
from tests.passes.less_work import WIDTH, applied_by, check_equals_eager, forward_graph, refusals, wrap
from tests.thinned import slow_but_every
from tests.zoo.entry import Call, Draw


class Adapted(nn.Module):
    """A projection with a low-rank branch, as LoRA's merged layers have it: rows go through Conv1d of size 1."""

    def __init__(self, bias: bool = False, groups: int = 2, in_rows: bool = True, **options: Any) -> None:
        super().__init__()
        self.in_rows = in_rows
        self.base = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Conv1d(WIDTH, 6, 1, bias=bias)
        self.up = nn.Conv1d(6, 3 * WIDTH, 1, groups=groups, bias=bias, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_rows:
            return self.up(torch.tanh(self.down(x)))
        low = self.up(self.down(x.transpose(-2, -1)))
        return torch.tanh(self.base(x)) + low.transpose(-2, -1)


def rows(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, length, WIDTH, grad=True),))


def channels(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH, length, grad=True),))


def kinds(folder: Path) -> Counter[str]:
    return Counter(node.op_type for node in forward_graph(folder))


# Convolutions


@pytest.mark.parametrize(
    "options",
    slow_but_every(2, [{}, {"bias": True}, {"groups": 1, "bias": True}, {"groups": 3}, {"groups": 3, "bias": True}]),
    ids=str,
)
def test_convolutions_of_rows_are_products(options: dict[str, Any], tmp_path: Path) -> None:
    check_equals_eager(lambda: Adapted(**options), rows)
    model = wrap(Adapted(**options), tmp_path)
    model(*rows(Draw(0), 3, 9).args).sum().backward()
    op_counts = kinds(tmp_path)
    assert not op_counts["Conv"]
    assert op_counts["Linear"] == 2 + options.get("groups", 2), "one for each group"
    assert not op_counts["Transpose"], "the transposes around the convolutions are left"
    assert len(applied_by(model, "convert_pointwise_convolutions")) == 2


@pytest.mark.parametrize(
    "result",
    [
        *(lambda y: y, torch.tanh, lambda y: y[:, 1:], lambda y: (y, y.transpose(1, 2)), lambda y: y.flatten(1)),
        *(lambda y: y.transpose(1, 2), lambda y: y.transpose(1, 2)[:, 1:]),
    ],
    ids=["itself", "elementwise", "slice", "both", "flat", "rows", "slice of rows"],
)
def test_results_keep_the_strides_of_a_convolution(result: Any) -> None:
    class Result(Adapted):
        def forward(self, x: torch.Tensor) -> Any:
            return result(self.down(x.transpose(-2, -1)))

    check_equals_eager(Result, rows, loss=lambda y: sum(t.square().mean() for t in (y if type(y) is tuple else (y,))))


@pytest.mark.parametrize("between", [nn.Identity(), nn.ReLU(), nn.Dropout(0.5)], ids=str)
def test_convolutions_after_elementwise_ops_are_matmuls(between: nn.Module, tmp_path: Path) -> None:
    class Between(Adapted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(between(self.down(x.transpose(-2, -1))) * 0.5)

    model = wrap(Between(), tmp_path)
    model(*rows(Draw(0), 3, 9).args).sum().backward()
    assert not kinds(tmp_path)["Conv"]
    between.eval()
    check_equals_eager(Between, rows)


@pytest.mark.parametrize("between", [nn.Identity(), nn.ReLU()], ids=str)
@pytest.mark.parametrize("sampled", [lambda y: nn.functional.dropout(y, 0.5), torch.bernoulli])
def test_a_convolution_before_a_dropout_keeps_its_strides(between: nn.Module, sampled: Any) -> None:
    """Eager samples in the order of memory."""

    class Sampled(Adapted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = between(self.up(self.down(x.transpose(-2, -1)))).sigmoid()
            return (low * sampled(low)).transpose(-2, -1)

    check_equals_eager(Sampled, rows)


@pytest.mark.parametrize(
    ("options", "refused"),
    [({"in_rows": False}, True), ({"stride": 2, "groups": 1}, False), ({"padding": 1, "groups": 1}, False)],
    ids=str,
)
def test_other_convolutions_stay(options: dict[str, Any], refused: bool, tmp_path: Path) -> None:
    class Only(Adapted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.down(x)[:, :6])

    model = wrap(Only(**options), tmp_path)
    model(*channels(Draw(0), 3, 8).args).sum().backward()
    assert kinds(tmp_path)["Conv"] == 2
    assert any("is not transposed" in text for text in refusals(model, "convert_pointwise_convolutions"))
    assert len(refusals(model, "convert_pointwise_convolutions")) == 1 + refused
    check_equals_eager(lambda: Only(**options), channels, ((3, 8), (1, 6)))


# Transposes and casts, on graphs


def graph_of(shape: tuple[Any, ...], dtype: ir.DataType = ir.DataType.FLOAT) -> tuple[Any, ir.Value]:
    x = ir.Value(name="x")
    set_type(x, TensorType(dtype, shape))
    return builder(ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name="example")), x


def closed(op: Any, result: ir.Value) -> ir.Graph:
    op.graph.outputs.append(op.Exp(result))
    for number, node in enumerate(op.graph):
        node.name = f"node_{number}"
        for value in node.outputs:
            value.name = f"value_{number}"
    graph: ir.Graph = op.graph
    return graph


def source_of_result(graph: ir.Graph) -> ir.Node | None:
    """Return the node that computes the argument of the last Exp."""
    last = graph.outputs[0].producer()
    assert last is not None
    assert last.inputs[0] is not None
    return last.inputs[0].producer()


def test_transposes_that_undo_each_other_go() -> None:
    op, x = graph_of(("b", "s", 4))
    graph = closed(op, op.Transpose(op.Transpose(x, perm=[1, 2, 0]), perm=[2, 0, 1]))
    cancel_transposes(graph, Changes("cancel_transposes"))
    assert source_of_result(graph) is None


def test_two_transposes_become_one() -> None:
    op, x = graph_of(("b", "s", 4))
    graph = closed(op, op.Transpose(op.Transpose(x, perm=[1, 0, 2]), perm=[0, 2, 1]))
    cancel_transposes(graph, Changes("cancel_transposes"))
    node = source_of_result(graph)
    assert node is not None
    assert list(node.attributes["perm"].as_ints()) == [1, 2, 0]
    assert node.inputs[0] is x


@pytest.mark.parametrize(
    ("shape", "perm", "kind"),
    [
        ((1, 1, 1024, 4096), [2, 0, 3, 1], "Reshape"),
        (("b", 1, "s"), [1, 0, 2], "Reshape"),
        (("b", 1, "s"), [2, 1, 0], "Transpose"),
        (("b", "s"), [1, 0], "Transpose"),
    ],
    ids=str,
)
def test_a_transpose_that_keeps_the_order_is_a_reshape(shape: tuple[Any, ...], perm: list[int], kind: str) -> None:
    op, x = graph_of(shape)
    graph = closed(op, op.Transpose(x, perm=perm))
    before = graph.outputs[0].shape
    cancel_transposes(graph, Changes("cancel_transposes"))
    node = source_of_result(graph)
    assert node is not None
    assert node.op_type == kind
    assert node.outputs[0].shape == before


def test_a_transpose_of_which_an_output_is_a_view_stays() -> None:
    """Users see strides, which a Reshape would change in axes of size 1."""
    op, x = graph_of(("b", 1, "s"))
    graph = closed(op, x)
    graph.outputs.append(op.Reshape(op.Transpose(x, perm=[0, 2, 1]), op.sizes(["b", "s", 1, 1])))
    cancel_transposes(graph, Changes("cancel_transposes"))
    assert "Transpose" in [node.op_type for node in graph]


class RowsAsImages(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x).transpose(1, 2).view(len(x), x.size(2), 1, 1).contiguous()


def test_strides_of_axes_of_size_1_are_eagers() -> None:
    x = torch.randn(2, 1, 8)
    assert ORTModule(RowsAsImages())(x).stride() == RowsAsImages()(x).stride() == (8, 1, 8, 8)


@pytest.mark.parametrize(
    ("narrow", "wide", "goes"),
    [("BFLOAT16", "FLOAT", True), ("FLOAT16", "FLOAT", True), ("FLOAT", "DOUBLE", True), ("FLOAT", "BFLOAT16", False)],
)
def test_casts_that_round_nothing_go(narrow: str, wide: str, goes: bool) -> None:
    op, x = graph_of(("b", "s", 4), ir.DataType[narrow])
    moved = op.Transpose(op.Reshape(op.Cast(x, to=ir.DataType[wide]), op.sizes(["b", 2, 2, "s"])), perm=[1, 0, 3, 2])
    graph = closed(op, op.Cast(moved, to=ir.DataType[narrow]))
    cancel_casts(graph, Changes("cancel_casts"))
    assert [node.op_type for node in graph if node.op_type == "Cast"] == ([] if goes else ["Cast", "Cast"])
    assert {v.dtype for node in graph for v in node.outputs if v.dtype != ir.DataType.INT64} == (
        {ir.DataType[narrow]} if goes else {ir.DataType[narrow], ir.DataType[wide]}
    )


def test_casts_stay_where_the_wide_value_is_read_or_computed_with() -> None:
    for other in (lambda op, wide: op.Exp(wide), lambda op, wide: wide):
        op, x = graph_of(("b", 4), ir.DataType.BFLOAT16)
        wide = op.Cast(x, to=ir.DataType.FLOAT)
        narrow = op.Cast(other(op, wide), to=ir.DataType.BFLOAT16)
        graph = closed(op, narrow)
        if narrow.producer().inputs[0] is wide:
            graph.outputs.append(op.Neg(wide))  # another reader
        cancel_casts(graph, Changes("cancel_casts"))
        assert sum(node.op_type == "Cast" for node in graph) == 2


def test_casts_by_way_of_a_wide_type_to_another_narrow_one_stay() -> None:
    op, x = graph_of(("b", 4), ir.DataType.BFLOAT16)
    turned = op.Transpose(op.Cast(x, to=ir.DataType.FLOAT), perm=[1, 0])
    graph = closed(op, op.Cast(turned, to=ir.DataType.FLOAT16))
    cancel_casts(graph, Changes("cancel_casts"))
    assert sum(node.op_type == "Cast" for node in graph) == 2


def moved_in_parts(op: Any, wide: ir.Value) -> ir.Value:
    """Split, transpose and concatenate, as models do with queries, keys and values."""
    first, second = split(op, wide, [1, 3], 1)
    turned: ir.Value = op.Transpose(second, perm=[1, 0])
    return concatenated(op, [turned, op.Transpose(first, perm=[1, 0])], 0)


def test_casts_around_splits_and_joins_go() -> None:
    op, x = graph_of(("b", 4), ir.DataType.BFLOAT16)
    moved = moved_in_parts(op, op.Cast(x, to=ir.DataType.FLOAT))
    graph = closed(op, op.Cast(moved, to=ir.DataType.BFLOAT16))
    cancel_casts(graph, Changes("cancel_casts"))
    assert not any(node.op_type == "Cast" for node in graph)
    assert {v.dtype for node in graph for v in node.outputs if v.dtype != ir.DataType.INT64} == {ir.DataType.BFLOAT16}


@pytest.mark.parametrize("spoiled", ["a reader", "another type", "a sum"])
def test_casts_around_splits_stay(spoiled: str) -> None:
    op, x = graph_of(("b", 4), ir.DataType.BFLOAT16)
    wide = op.Cast(x, to=ir.DataType.FLOAT)
    first, second = split(op, wide, [2, 2], 1)
    if spoiled == "a sum":
        second = op.Add(second, second)
    outer = ir.DataType.FLOAT16 if spoiled == "another type" else ir.DataType.BFLOAT16
    parts = [op.Cast(first, to=outer), op.Cast(second, to=ir.DataType.BFLOAT16)]
    if spoiled == "a reader":
        parts.append(op.Cast(op.Exp(second), to=ir.DataType.BFLOAT16))
    graph = closed(op, op.Cast(parts[0], to=ir.DataType.FLOAT))
    graph.outputs.extend(op.Exp(part) for part in parts[1:])
    before = sum(node.op_type == "Cast" for node in graph)
    cancel_casts(graph, Changes("cancel_casts"))
    assert sum(node.op_type == "Cast" for node in graph) == before


@pytest.mark.parametrize("narrows", [True, False])
def test_the_narrow_type_is_copied(narrows: bool) -> None:
    inner, outer = ir.DataType.FLOAT, ir.DataType.BFLOAT16
    if not narrows:
        inner, outer = outer, inner
    op, x = graph_of(("b", 4), inner)
    parts = [op.Exp(x), x, x] if narrows else [op.Cast(op.Exp(x), to=outer), op.Cast(x, to=outer)]
    joined = concatenated(op, parts, 1)
    graph = closed(op, op.Cast(joined, to=outer) if narrows else joined)
    cancel_casts(graph, Changes("cancel_casts"))
    (concat,) = (node for node in graph if node.op_type == "Concat")
    assert concat.outputs[0].dtype == ir.DataType.BFLOAT16
    casts = [node for node in graph if node.op_type == "Cast"]
    assert len(casts) == (len(parts) if narrows else 1), "no two gradients are joined"
    assert graph.outputs[0].dtype == outer


def test_under_autocast_the_result_is_bit_for_bit_the_same() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.first(x).float().unflatten(1, (2, 2)).transpose(1, 2).chunk(2, 1)
            return self.second(torch.cat([b, a, x.unflatten(1, (2, 2))[:, :1]], 1).flatten(1, 2))

    module, x = Moves(), torch.randn(3, 4, 8)
    model = ORTModule(module, rng="torch")
    results = []
    for run in (model, module):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        y.float().square().sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
    assert len(applied_by(model, "cancel_casts")) == 2, "two casts cancel, and the narrow type is joined"
    assert torch.equal(results[0][0], results[1][0])
    for got, eager in zip(*results, strict=True):
        assert_no_worse_than_eager("gradient", got.bfloat16(), eager.bfloat16(), eager.double(), 1.0)
