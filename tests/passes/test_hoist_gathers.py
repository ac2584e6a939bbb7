"""Rows are selected before they are computed: results equal eager's, and the graph shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from onnxtrain.execute.program import Program
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.hoist_gathers import hoist_gathers
from onnxtrain.plan.cut import single_part
from tests.passes.less_work import CLASSES, WIDTH, applied_by, check_equals_eager, forward_graph, refusals, shapes, wrap
from tests.passes.test_rewrites import closed, graph_of
from tests.reference import assert_matches
from tests.thinned import slow_except
from tests.zoo.entry import Call, Draw, ragged_mask

Pick = Callable[[torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """The layers after the last attention of an encoder; `pick` selects rows of the result."""

    def __init__(self, pick: Pick, dropout: float = 0.0) -> None:
        super().__init__()
        self.pick = pick
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.heads = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("position", torch.randn(1, 40, WIDTH, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, _ = x.shape
        split = self.heads(x + self.position[:, :steps]).view(batch, steps, 4, -1).transpose(1, 2)
        joined = torch.tanh(split).transpose(1, 2).reshape(batch, steps, -1)
        x = self.norm(x + self.dropout(joined))
        return torch.sin(self.pick(self.last(x + self.down(F.gelu(self.up(x))))))


def _floats(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, length, WIDTH, grad=True),))


PICKS: dict[str, Pick] = {
    "first": lambda y: y[:, 0],
    "first kept": lambda y: y[:, :1],
    "last": lambda y: y[:, -1],
    "third": lambda y: y[:, 2],
    "one sequence": lambda y: y[0],
    "two picks": lambda y: y[:, 0] * y[:, 1],
    "index_select of one": lambda y: y.index_select(1, torch.tensor([1])),
}


FEW = ("first", "last", "two picks", "index_select of one")


@pytest.mark.parametrize(
    "pick",
    [pytest.param(pick, id=name, marks=() if name in FEW else (pytest.mark.slow,)) for name, pick in PICKS.items()],
)
def test_picked_rows_equal_eager(pick: Pick) -> None:
    check_equals_eager(lambda: Layer(pick), _floats, ((3, 9), (1, 6), (2, 4)))


@pytest.mark.parametrize("name", ["first", "last", "index_select of one"])
def test_the_layer_runs_on_one_row(name: str, tmp_path: Path) -> None:
    model = wrap(Layer(PICKS[name]), tmp_path)
    model(torch.randn(3, 9, WIDTH)).sum().backward()
    graph = forward_graph(tmp_path)
    assert all(",1," in shape for shape in shapes(graph, "Linear")), shapes(graph, "Linear")
    assert applied_by(model, "hoist_gathers")


@pytest.mark.parametrize("family", slow_except(["Bert", "Roberta"], "Roberta"))
def test_a_classifier_computes_its_last_layer_for_one_token(family: str, tmp_path: Path) -> None:
    """Keys and values of all tokens; queries, feed-forward and norms of the first."""
    model = wrap(_bert(getattr(transformers, f"{family}ForSequenceClassification")), tmp_path)
    call = _sentences(Draw(1), 3, 9)
    model(**call.kwargs).loss.backward()
    last = [
        (node.inputs[1].name, str(node.outputs[0].shape))
        for node in forward_graph(tmp_path)
        if node.op_type == "Linear" and "layer.1" in (node.inputs[1].name or "")
    ]
    for_all_tokens = {name.split("layer.1.")[1] for name, shape in last if ",1," not in shape}
    assert len(last) == 6
    assert for_all_tokens == {"attention.self.key.weight", "attention.self.value.weight"}


def _bert(kind: type[nn.Module], dropout: float = 0.0) -> nn.Module:
    config = kind.config_class(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=40, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return kind(config)


class LastToken(nn.Module):
    """A classifier that reads the last token that is not padding, as those of GPT-2 and Llama do."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5), nn.LayerNorm(WIDTH)
        self.flat = flat

    def forward(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        mixed = x.cumsum(1)
        hidden = self.norm(mixed + torch.tanh(self.first(mixed)))
        if self.flat:  # GPT-2's layers flatten tokens
            scores = self.second(hidden.flatten(0, 1)).unflatten(0, x.shape[:2])
        else:
            scores = self.second(hidden)
        return scores[torch.arange(x.size(0)), last]


def _with_last(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, length, WIDTH, grad=True), draw.ints(length, batch) - length // 2))


@pytest.mark.parametrize("flat", [False, True])
def test_the_last_token_of_each_sequence_is_picked_first(flat: bool, tmp_path: Path) -> None:
    """Places below 0 count from the end."""
    check_equals_eager(lambda: LastToken(flat), _with_last, ((3, 9), (1, 6), (2, 1)))
    model = wrap(LastToken(flat), tmp_path)
    model(*_with_last(Draw(0), 3, 9).args).sum().backward()
    of_products = shapes(forward_graph(tmp_path), "Linear")
    assert all(len(set(re.findall(r"s\d+", shape))) == 1 for shape in of_products), of_products
    assert applied_by(model, "hoist_gathers")


@pytest.mark.parametrize("batch_dims", [0, 1])
def test_gather_nd_of_one_token_of_each_sequence_moves(batch_dims: int) -> None:
    weight = (torch.arange(24.0) / 24).view(6, 4)

    def graph() -> ir.Graph:
        op, x = graph_of(("b", "s", 4))
        places = ir.Value(name="places")
        set_type(places, TensorType(ir.DataType.INT64, ("b", 2 - batch_dims)))
        op.graph.inputs.append(places)
        product = op.own.Linear(x, op.constant(weight.numpy(), ir.DataType.FLOAT))
        return closed(op, op.GatherND(product, places, batch_dims=batch_dims))

    before, after = graph(), graph()
    hoist_gathers(after, Changes("hoist_gathers"))
    kinds = [node.op_type for node in after if node.op_type in ("GatherND", "Linear")]
    assert kinds == ["GatherND", "Linear"]
    last = torch.tensor([[4], [0], [2]])
    places = last if batch_dims else torch.cat([torch.arange(3)[:, None], last], 1)
    tensors = [torch.randn(3, 5, 4), places]
    for each in (after, before):
        (got,) = run(each, tensors)
        assert_matches(got, lambda x, w: (x @ w.T)[torch.arange(3), last[:, 0]].exp(), tensors[0], weight)


def run(graph: ir.Graph, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    program = Program(single_part(ir.Model(graph, ir_version=10)), "test", torch.device("cpu"))
    results, _ = program.run(tensors, ())
    return [*results]


def _sentences(draw: Draw, batch: int, length: int) -> Call:
    words, mask = draw.ints(50, batch, length), ragged_mask(batch, length)
    return Call(kwargs={"input_ids": words, "attention_mask": mask, "labels": draw.ints(2, batch)})


@pytest.mark.slow  # the pick alone: test_the_last_token_of_each_sequence_is_picked_first
def test_a_decoders_classifier_equals_eager(tmp_path: Path) -> None:
    """The last layer's feed-forward for one token of each sequence: the last that is not padding."""

    def make() -> nn.Module:
        config = transformers.GPT2Config(
            vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=40, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2ForSequenceClassification(config)

    check_equals_eager(make, _sentences, ((3, 9), (2, 6)), loss=lambda y: y.loss)
    model = wrap(make(), tmp_path)
    model(**_sentences(Draw(1), 3, 9).kwargs).loss.backward()
    assert any(int(text.split()[1]) >= 8 for text in applied_by(model, "hoist_gathers")), applied_by(
        model, "hoist_gathers"
    )


def test_a_classifier_equals_eager() -> None:
    check_equals_eager(lambda: _bert(transformers.BertForSequenceClassification), _sentences, loss=lambda y: y.loss)


def test_dropout_is_crossed_where_any_numbers_will_do_and_not_where_eagers_are_asked_for(tmp_path: Path) -> None:
    x = torch.randn(3, 9, WIDTH)
    for rng in ("fast", "torch"):
        (tmp_path / rng).mkdir()
        model = wrap(Layer(PICKS["first"], dropout=0.5), tmp_path / rng, rng=rng)
        results = []
        for _ in range(2):
            torch.manual_seed(5)
            results.append(model(x))
        assert torch.equal(*results)
        one_row = [",1," in shape for shape in shapes(forward_graph(tmp_path / rng), "Linear")]
        assert one_row == ([True] * 3 if rng == "fast" else [False, True, True])
        assert any('rng="torch"' in text for text in refusals(model, "hoist_gathers")) == (rng == "torch")


def test_under_rng_torch_dropout_samples_as_eager() -> None:
    check_equals_eager(lambda: Layer(PICKS["first"], dropout=0.5), _floats)


# Ops that a selection does not pass


class Stopped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.inner(x))
        if self.kind == "output":
            return y[:, 0] * 2, y
        if self.kind == "read whole":
            return y[:, 0] + y.sum(1)
        if self.kind == "softmax over rows":
            return torch.softmax(y, 1)[:, 0] * 2
        if self.kind == "same tensor twice":
            return (y @ y.transpose(1, 2))[:, 0] * 2
        if self.kind == "unknown number":
            return y.index_select(1, rows)
        if self.kind == "chosen by the rows":
            return y.index_select(1, y[0, :, 0].argmax()[None])
        assert self.kind == "many"
        return y[:, 1:] * 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("output", "is an output of the module"),
        ("read whole", "needs all rows"),
        ("softmax over rows", "needs all rows at once"),
        ("same tensor twice", "needs all rows"),
        ("unknown number", "not proven"),
        ("chosen by the rows", "the selected rows depend on"),
        ("many", "not proven"),
    ],
)
def test_refused_forms_equal_eager_and_have_a_reason(kind: str, reason: str, tmp_path: Path) -> None:
    def call(draw: Draw, batch: int, length: int) -> Call:
        return Call((draw.floats(batch, length, WIDTH, grad=True), draw.ints(length, 4)))

    def loss(y: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        return sum((part.square().mean() for part in (y if isinstance(y, tuple) else (y,))), torch.zeros(()))

    check_equals_eager(lambda: Stopped(kind), call, ((3, 9), (2, 4)), loss)
    model = wrap(Stopped(kind), tmp_path)
    loss(model(*call(Draw(0), 3, 9).args)).backward()
    assert any(reason in text for text in refusals(model, "hoist_gathers")), refusals(model, "hoist_gathers")
    linear = shapes(forward_graph(tmp_path), "Linear")
    assert len(linear) == 1
    assert ",1," not in linear[0]


def test_a_selection_of_classes_takes_rows_of_the_weight() -> None:
    """Features are rows too, of the weight that makes them."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 2 * CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(torch.tanh(self.inner(x))[..., :CLASSES])

    check_equals_eager(Head, _floats)


@pytest.mark.parametrize("pick", [lambda h: h[0], lambda h: h[::2]], ids=["one", "half"])
def test_rows_of_two_merged_axes_are_no_rows_of_one(pick: Pick) -> None:
    """A gather along one axis cannot pick them before the axes are merged."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 4, WIDTH))
            self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            merged = torch.tanh(self.inner(self.table)).flatten(0, 1)
            return pick(torch.tanh(self.outer(merged))) * x.mean()

    check_equals_eager(Table, _floats, ((3, 9),))


def test_columns_of_a_view_with_other_rows_are_no_columns_of_its_source() -> None:
    """[b, 6, 4] viewed as [b, 4, 6]: neither of the last two axes is an axis of the source."""

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = torch.tanh(self.inner(x.mean(1))).unflatten(1, (6, 4)).transpose(1, 2).contiguous()
            return torch.sin(F.gelu(parts.view(-1, 6, 4))[..., 0])

    check_equals_eager(Viewed, _floats)


class NoChannels(nn.Module):
    """Takes none of the channels of a pool, which PyTorch computes for at least one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(F.avg_pool2d(x, 2)[:, 1:])


def test_an_empty_selection_stays_after_a_pool(tmp_path: Path) -> None:
    check_equals_eager(
        NoChannels, lambda draw, batch, size: Call((draw.floats(batch, 1, size, size, grad=True),)), ((2, 4),)
    )
    model = wrap(NoChannels(), tmp_path)
    model(torch.randn(2, 1, 4, 4, requires_grad=True)).sum().backward()
    assert any("selects no rows" in text for text in refusals(model, "hoist_gathers"))
