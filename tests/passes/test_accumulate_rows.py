"""A weight that is an embedding's table and something else too: the rows are added to the other gradient, in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.testing import assert_no_worse_than_eager

VOCABULARY, WIDTH = 11, 6


class Tied(nn.Module):
    """A language model of an embedding (looked up once or twice), a layer, and the embedding's table as the last."""

    def __init__(self, lookups: int = 1, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, **options)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(lookups))

    def forward(self, *tokens: torch.Tensor) -> torch.Tensor:
        h: Any = sum(torch.tanh(layer(self.table(t))) for layer, t in zip(self.layers, tokens, strict=True))
        return F.linear(h, self.table.weight)


def adds(ours: nn.Module) -> list[bool]:
    """For each EmbeddingGrad of backward, whether it adds to another gradient."""
    nodes = ours.__dict__["_engine"].newest().parts.backward.nodes
    return [len(n.inputs) > 3 and n.inputs[3] is not None for n in nodes if n.op_type == "EmbeddingGrad"]


def source(ours: nn.Module) -> str:
    unit = ours.__dict__["_engine"].newest().unit
    return "\n".join(b.program.source for b in unit._backwards.values())


def gradients(model: nn.Module, inputs: tuple[torch.Tensor, ...], dy: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(*inputs).backward(dy)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("lookups", [1, 2])
def test_tied_gradients_are_eagers(lookups: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    """On one graph, at sizes 0, 1 and others, with tokens that repeat."""
    eager = Tied(lookups, **options).to(dtype)
    ours, exact = ORTModule(copy.deepcopy(eager)), copy.deepcopy(eager).double()
    for batch, length in ((3, 5), (1, 1), (0, 5), (2, 40)):
        tokens = tuple(torch.randint(0, VOCABULARY, (batch, length)) for _ in range(lookups))
        dy = torch.randn(batch, length, VOCABULARY, dtype=dtype)
        got, theirs = gradients(ours, tokens, dy), gradients(eager, tokens, dy)
        known = gradients(exact, tokens, dy.double())
        largest = max((g.abs().max().item() for g in known), default=0.0)
        for name, *three in zip(dict(eager.named_parameters()), got, theirs, known, strict=True):
            assert_no_worse_than_eager(name, *three, largest=largest)
    assert adds(ours) == [True] * lookups


def test_no_second_tensor_of_the_vocabularys_size() -> None:
    ours = ORTModule(Tied(lookups=2))
    ours(torch.tensor([[1, 2]]), torch.tensor([[2, 2]])).sum().backward()
    assert source(ours).count("index_add_(0,") == 2
    assert "embedding_dense_backward" not in source(ours)


def test_it_accumulates_over_batches() -> None:
    """The first batch's gradient has left the program: the second may not be added to it inside."""
    eager = Tied()
    ours = ORTModule(copy.deepcopy(eager))
    for tokens in (torch.tensor([[1, 2, 2]]), torch.tensor([[4, 1, 1]])):
        for model in (eager, ours):
            model(tokens).square().sum().backward()
    torch.testing.assert_close(ours.table.weight.grad, eager.table.weight.grad)


class LookedUpTwice(nn.Module):
    """Two tables of one size, whose gradients meet only where the weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.table(a) * self.table(b).sin()


def test_two_lookups_share_one_tensor() -> None:
    eager = LookedUpTwice()
    ours = ORTModule(copy.deepcopy(eager))
    tokens = (torch.randint(0, VOCABULARY, (4, 7)), torch.randint(0, VOCABULARY, (4, 7)))
    dy = torch.randn(4, 7, WIDTH)
    for got, theirs in zip(gradients(ours, tokens, dy), gradients(eager, tokens, dy), strict=True):
        torch.testing.assert_close(got, theirs)
    assert adds(ours) == [True]  # the other is a GatherGrad


def test_bfloat16_is_summed_on_its_own() -> None:
    """Small rows that are added to a large gradient one by one would be lost."""
    ours = ORTModule(Tied().to(torch.bfloat16))
    ours(torch.tensor([[1, 2, 2]])).sum().backward()
    assert not any(adds(ours))
    refused = ours.__dict__["_engine"].newest().report.refused
    assert [r.pass_name for r in refused if "BFLOAT16" in r.reason] == ["accumulate_rows"]


def test_rows_outside_the_table_are_an_error() -> None:
    ours = ORTModule(Tied())
    with pytest.raises(IndexError):
        ours(torch.tensor([[VOCABULARY]]))
