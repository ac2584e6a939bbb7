"""A tied embedding: the gradient of its lookup is added in place to that of its other use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.index import gather
from onnxtrain.testing import assert_no_worse_than_eager
from tests.ops.captures import FunctionModule
from tests.reference import assert_matches
from tests.thinned import slow_except

Tensor = torch.Tensor
WORDS, WIDTH = 11, 6


class Tied(nn.Module):
    """A language model of a table (looked up once or twice), layers, and the same table as the last, as in T5."""

    def __init__(self, lookups: int = 1, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, **options)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(lookups))

    def forward(self, *words: Tensor) -> Tensor:
        h: Any = sum(torch.tanh(layer(self.table(w))) for layer, w in zip(self.layers, words, strict=True))
        return F.linear(h, self.table.weight)


class LookedUpTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.table(a) * self.table(b).sin()


def adds(ours: nn.Module) -> list[bool]:
    """Return whether each gradient of a table in backward adds to another."""
    nodes = engine_of(ours).newest().parts.backward.nodes
    return [len(n.inputs) > 3 for n in nodes if n.op_type in ("EmbeddingGrad", "GatherGrad")]


def source(ours: nn.Module) -> str:
    unit = engine_of(ours).newest().unit
    return "\n".join(b.program.source for b in unit._backwards.values())


def gradients(model: nn.Module, words: tuple[Tensor, ...], dy: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(*words).backward(dy)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", slow_except([torch.float32, torch.float64, torch.bfloat16], torch.float32), ids=str)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=str)
def test_gradients_are_eagers(options: dict[str, Any], dtype: torch.dtype) -> None:
    """On one graph, at sizes 0, 1 and others, with words that repeat."""
    eager = Tied(2, **options).to(dtype)
    ours, exact = ORTModule(copy.deepcopy(eager)), copy.deepcopy(eager).double()
    for batch, length in ((3, 5), (1, 1), (0, 5), (2, 40)):
        words = tuple(torch.randint(0, WORDS, (batch, length)) for _ in range(2))
        dy = torch.randn(batch, length, WORDS).to(dtype)
        by_module = gradients(ours, words, dy), gradients(eager, words, dy), gradients(exact, words, dy.double())
        largest = max(g.abs().max().item() for g in by_module[2])
        for name, *three in zip(dict(eager.named_parameters()), *by_module, strict=True):
            assert_no_worse_than_eager(f"{name} of {batch} x {length}", *three, largest=largest)
    assert adds(ours) == [True, True]


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}], ids=str)
def test_no_second_tensor_of_the_tables_size(options: dict[str, Any]) -> None:
    ours = ORTModule(Tied(2, **options))
    ours(torch.tensor([[1, 2]]), torch.tensor([[2, 2]])).sum().backward()
    assert source(ours).count("= plus_row_sums_(") == 2
    assert "row_sums(" not in source(ours)


def test_two_lookups_share_one_tensor() -> None:
    eager = LookedUpTwice()
    ours = ORTModule(copy.deepcopy(eager))
    words, dy = (torch.randint(0, WORDS, (4, 7)), torch.randint(0, WORDS, (4, 7))), torch.randn(4, 7, WIDTH)
    assert_matches(gradients(ours, words, dy), gradients, eager, words, dy)
    assert sorted(adds(ours)) == [False, True]


def test_gradients_add_up_over_batches() -> None:
    """The first batch's has left the program: the second may not be added to it inside."""
    eager = Tied()
    ours = ORTModule(copy.deepcopy(eager))

    def accumulated(model: nn.Module) -> Tensor | None:
        for words in (torch.tensor([[1, 2, 2]]), torch.tensor([[4, 1, 1]])):
            model(words).square().sum().backward()
        return model.get_parameter("table.weight").grad

    assert_matches(accumulated(ours), accumulated, eager)


def test_a_gradient_that_the_caller_gave_is_not_overwritten() -> None:
    module = FunctionModule(lambda table, rows: (F.embedding(rows, table), table * 1))
    table, rows = torch.randn(7, 4, requires_grad=True), torch.tensor([[1, 3], [3, 0]])
    given = torch.randn(2, 2, 4), torch.randn(7, 4)
    copies = [t.clone() for t in given]

    def gradient(run: nn.Module, table: Tensor, rows: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        return torch.autograd.grad(run(table, rows), table, given)[0]

    assert_matches(gradient(ORTModule(module), table, rows, given), gradient, module, table, rows, given)
    assert all(map(torch.equal, given, copies))


def test_rows_outside_of_the_table_are_an_error() -> None:
    with pytest.raises(IndexError):
        ORTModule(Tied())(torch.tensor([[WORDS]]))


@pytest.mark.parametrize("words", [5, 20000])
def test_large_numbers_swallow_no_small_ones(words: int) -> None:
    """4096 times 2^-25 to one row of ones: each alone would be lost."""
    rows, dy = torch.full((64, 64), 3), torch.full((64, 64, 2), 2.0**-25)
    table, expected = torch.ones(words, 2), torch.ones(words, 2)
    assert torch.equal(gather.plus_row_sums(table, rows, dy, 3), expected)
    expected[3] += 4096 * 2.0**-25
    assert torch.equal(gather.plus_row_sums(table, rows, dy, -1), expected)


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize(("words", "searches"), [(7, False), (512, False), (5000, True)])
def test_rows_are_searched_in_large_tables_only(
    words: int, searches: bool, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Tensor] = []
    unique = torch.unique
    monkeypatch.setattr(torch, "unique", lambda rows, **options: calls.append(rows) or unique(rows, **options))  # type: ignore[func-returns-value]
    rows, dy, table = torch.randint(0, 7, (2, 20)), torch.randn(2, 20, 9), torch.randn(words, 9)
    expected = table + torch.ops.aten.embedding_dense_backward.default(dy, rows, words, padding, False)
    assert torch.equal(gather.plus_row_sums(table, rows, dy, padding), expected)
    assert len(calls) == searches


@pytest.mark.parametrize("padding", [-1, 2])
def test_sums_of_rows_are_those_of_aten(padding: int) -> None:
    rows, dy = torch.randint(0, 7, (5, 40)), torch.randn(5, 40, 9)
    expected = torch.ops.aten.embedding_dense_backward.default(dy, rows, 7, padding, False)
    assert torch.equal(gather.row_sums((7, 9), rows, dy, padding), expected)
    assert torch.equal(gather.row_sums((7, 9), rows[:0], dy[:0], padding), torch.zeros(7, 9))
