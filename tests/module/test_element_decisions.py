"""Forwards that branch in Python on elements of their arguments have one graph per decision."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches

DISABLED = {"fallback_policy": "FALLBACK_DISABLE"}


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, *args: torch.Tensor, flag: Any = None, **kwargs: torch.Tensor) -> torch.Tensor:
        total = x + sum(args) * len(args)
        if flag:
            total = total + flag
        if (x > 1).all():
            total = total * 2
        return total + sum(kwargs.values()) + self.bias


def test_each_decision_has_its_graph() -> None:
    eager = Sums()
    ours = ORTModule(copy.deepcopy(eager), **DISABLED)
    one, zero = torch.ones(1), torch.zeros(1)
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]] = [
        ((one,), {}),
        ((one, one), {}),
        ((one, one, one), {"flag": one}),
        ((one, one, one), {"flag": zero}),
        ((one * 2, one, one), {"flag": one}),
        ((one,), {"more": one}),
    ]
    for _ in range(4):
        for args, kwargs in calls:
            assert torch.equal(ours(*args, **kwargs), eager(*args, **kwargs))
            ours(*args, **kwargs).backward()
    assert engine_of(ours).captures == len(calls)


def test_the_graph_of_a_decision_is_used_at_other_sizes() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            filled = torch.zeros_like(mask, dtype=x.dtype).masked_fill_(mask, -1.0)
            return x if bool((filled == 0).all()) else x + filled

    ours = ORTModule(Masked(), **DISABLED)
    for length in (3, 4, 7):
        for mask in (torch.zeros(length, dtype=torch.bool), torch.ones(length, dtype=torch.bool)):
            x = torch.randn(2, length)
            assert torch.equal(ours(x, mask), Masked()(x, mask))
    assert engine_of(ours).captures == 2


class AsksAfterDropout(nn.Module):
    """As Longformer: a truth value is read by `item()`, of a mask that is written through a view, behind a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = nn.functional.dropout(self.linear(x), 0.5)
        marks = torch.zeros(2, *mask.shape)
        marks[0][mask == 2] = 1.0
        return hidden * 2 if (marks > 0).flatten().any().item() else hidden


def test_a_decision_leaves_out_what_it_does_not_read() -> None:
    eager = AsksAfterDropout()
    ours = ORTModule(copy.deepcopy(eager), **DISABLED, rng="torch")
    for length in (3, 5):
        for mark in (0, 2, 1):
            x, mask = torch.randn(2, length, 4), torch.zeros(2, length)
            mask[1, 1] = mark
            outputs = []
            for module in (ours, eager):
                torch.manual_seed(length)
                outputs.append(module(x, mask))
            torch.testing.assert_close(*outputs)
    assert engine_of(ours).captures == 2


class AsksAfterWrites(nn.Module):
    """What depends on parameters is written in place before the decision, which does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(x)
        marks = torch.zeros_like(hidden)
        marks[:, 0] = hidden[:, 0]
        marks.view(-1)[1:].mul_(2.0)
        flags = torch.zeros_like(mask)
        flags.view(-1)[0] = mask.sum()
        return hidden + marks if flags.any() else hidden


def test_a_decision_leaves_out_writes_to_other_memory() -> None:
    eager = AsksAfterWrites()
    ours = ORTModule(copy.deepcopy(eager), **DISABLED)
    for length in (3, 5):
        for mark in (0, 2, 1):
            x, mask = torch.randn(length, 4), torch.full((length,), mark)
            assert_matches(ours(x, mask), eager, x, mask)
    assert engine_of(ours).captures == 2


def test_a_transformer_with_a_mask() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)
    eager = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    ours = ORTModule(copy.deepcopy(eager), **DISABLED)
    x = torch.randn(2, 5, 8).transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for mask in (causal, torch.zeros(5, 5)):
        assert_matches(ours(x, mask), eager, x, mask)


class AsksItsLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = nn.functional.dropout(self.linear(x), 0.5)
        if hidden.sum() > 0:
            hidden = hidden * 2
        return hidden


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(()) > 0.5 else -x


class DropsLayers(nn.Module):
    """As LayerDrop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(x * layer.bias, 0.5)
            if torch.rand([]) >= 0.1:
                x = layer(x)
        return x


class SkipsEmptySelections(nn.Module):
    """As a mixture of experts that leaves out experts without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.where(self.router(x)[:, 0] > 0)[0]
        return x if chosen.numel() == 0 else x.index_add(0, chosen, x[chosen])


@pytest.mark.parametrize(
    ("module", "got"),
    [
        (AsksItsLayer(), "samples random numbers"),
        (Draws(), "samples random numbers"),
        (DropsLayers(), "samples random numbers"),
        (SkipsEmptySelections(), "the module's parameters"),
    ],
)
def test_decisions_that_depend_on_more_than_the_arguments_are_refused(module: nn.Module, got: str) -> None:
    with pytest.raises(CaptureError, match="branches in Python on tensor values") as refused:
        ORTModule(module, **DISABLED)(torch.ones(1, 2))
    assert refused.value.where is not None
    assert __file__ in refused.value.where
    assert got in str(refused.value.got)


class AsksABuffer(nn.Module):
    """As EoMT, whose masks are phased out by a buffer; the steps are counted as a learning-rate warm-up does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("share", torch.ones(2))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        if self.share[1] < 1:
            x = x * 2
        return x * self.scale if self.step % 3 == 0 else x - self.scale


def test_a_decision_reads_a_buffer_as_it_is_at_each_call() -> None:
    eager = AsksABuffer()
    ours = ORTModule(copy.deepcopy(eager), **DISABLED)
    for call in range(9):
        if call == 4:
            for module in (eager, ours.module):
                module.share[1] = 0.5
        if call == 6:
            for module in (eager, ours.module):
                module.share = torch.ones(2)
        x = torch.randn(1 + call % 3, 2)
        assert torch.equal(ours(x), eager(x))
        assert torch.equal(ours.module.step, eager.step)
    assert engine_of(ours).captures == 4, "two decisions, each with two answers"


def test_modules_that_share_a_graph_read_their_own_buffers() -> None:
    layers = [AsksABuffer(), AsksABuffer()]
    layers[1].share[1] = 0.5
    ours = [ORTModule(copy.deepcopy(layer), **DISABLED) for layer in layers]
    x = torch.randn(3, 2)
    for _ in range(3):
        for got, eager in zip(ours, layers, strict=True):
            assert torch.equal(got(x), eager(x))


class SplitsInEachLayer(nn.Module):
    """As the vision towers of Qwen2-VL, whose layers split by the lengths of images."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            lengths = ends[1:] - ends[:-1]
            x = torch.cat([part.cumsum(0) for part in torch.split(x, lengths.tolist()) if part.shape[0] > 1])
        return x


def test_layers_that_read_the_same_lengths_decide_once() -> None:
    eager = SplitsInEachLayer()
    ours = ORTModule(SplitsInEachLayer(), **DISABLED)
    for middle in (2, 3, 2):
        x = torch.randn(6, 2)
        ends = torch.tensor([0, middle, 6])
        assert_matches(ours(x, ends), eager, x, ends)
    newest = engine_of(ours).newest().captured
    assert len(newest.guards.elements) <= 4, "of one layer"


class ReadsAgain(nn.Module):
    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        counts = counts * 1
        first = counts[0].item()
        counts.view(-1)[0] += 2
        return torch.arange(first).sum() * x + torch.arange(counts[0].item()).sum()


def test_an_item_is_read_again_after_a_change() -> None:
    eager = ReadsAgain()
    ours = ORTModule(ReadsAgain(), **DISABLED)
    for count in (1, 2, 3):
        x, counts = torch.randn(7, 2), torch.tensor([count, 5])
        assert_matches(ours(x, counts), eager, x, counts)


class Writes(nn.Module):
    """As FSMT: the labels are changed in place before they decide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3 if x.add_(1).sum() > 0 else -x


def test_a_decision_after_a_change_of_an_argument_in_place() -> None:
    ours = ORTModule(Writes(), **DISABLED)
    for first in (-2.0, 1.0, -2.5, -0.5):
        given = [torch.tensor([first, -0.25]) for _ in range(2)]
        assert torch.equal(ours(given[0]), Writes()(given[1]))
        assert torch.equal(*given)
    assert engine_of(ours).captures == 2


class Counts(nn.Module):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x * torch.bincount(ids, minlength=4)


class Converts(nn.Module):
    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return x * int(times * 2.5)


@pytest.mark.parametrize(
    ("module", "values", "says"),
    [
        (Converts(), torch.tensor(3.0), "torch.where"),
        (Counts(), torch.arange(3), "one_hot"),
    ],
)
def test_a_number_that_only_elements_tell_is_refused_with_an_alternative(
    module: nn.Module, values: torch.Tensor, says: str
) -> None:
    x = torch.randn(2, 4)
    with pytest.raises(CaptureError, match=says):
        ORTModule(module, **DISABLED)(x, values)
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        assert torch.equal(ORTModule(module, pieces=False)(x, values), module(x, values))


# Decisions on data-dependent sizes and items


class Sized(nn.Module):
    """Compute with a layer's weight, so that gradients are compared, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class AnySelected(Sized):
    """As the head of DeBERTa."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(x[mask.nonzero().view(-1)]) if mask.nonzero().size(0) > 0 else self.layer(x) * 2


class Asserts(Sized):
    """As XLM: the condition is between an item and the size of another argument."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        assert lengths.max().item() <= x.shape[0]
        positions = torch.arange(x.shape[0])
        return self.layer(x) * (positions < lengths.max())[:, None]


class Repeats(Sized):
    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        for _ in range(int(times.max())):
            x = self.layer(x)
        return x


class Thresholds(Sized):
    """An item of floats is compared as Python compares it, in float64."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if scale.item() > 0.1 else -self.layer(x)


class ThresholdOf17Digits(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x if scale.item() > 0.1 + 0.2 else -x


def test_an_item_is_compared_with_all_digits() -> None:
    ours = ORTModule(ThresholdOf17Digits(), **DISABLED)
    x = torch.ones(2)
    for value in (1.0, 0.1 + 0.2):  # 0.30000000000000004, which is above 0.3
        scale = torch.tensor(value, dtype=torch.float64)
        assert torch.equal(ours(x, scale), ThresholdOf17Digits()(x, scale))


class LastOfEach(Sized):
    """As the heads of BART and T5: each row has the same number of marks, which the view rests on."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        torch._check(torch.unique_consecutive(mask.sum(1)).numel() == 1)
        selected = hidden[mask, :]
        torch._check(selected.shape[0] // hidden.shape[0] >= 1)
        return selected.view(x.size(0), -1, x.size(-1))[:, -1, :]


def _marked(rows: int, *columns: int, length: int = 6) -> torch.Tensor:
    mask = torch.zeros(rows, length, dtype=torch.bool)
    mask[:, list(columns)] = True
    return mask


@pytest.mark.parametrize(
    ("module", "shapes", "values", "captures"),
    [
        (AnySelected, [(3, 4)] * 4, [torch.tensor(m) for m in ([1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1])], 2),
        (Asserts, [(3, 4), (3, 4), (7, 4)], [torch.tensor(n) for n in ([1, 3], [2, 2], [7, 1])], 1),
        (Repeats, [(3, 4)] * 3, [torch.tensor(n) for n in ([1, 2], [2, 0], [0, 3])], 2),
        (Thresholds, [(3, 4)] * 4, [torch.tensor(v) for v in (0.5, 0.1, 0.05, 0.2)], 2),
        pytest.param(
            LastOfEach,
            [(2, 6, 4), (2, 6, 4), (3, 6, 4), (1, 6, 4)],
            [_marked(2, 5), _marked(2, 1, 4), _marked(3, 2), _marked(1, 0, 3)],
            2,  # a batch of 1 is another graph: it has no rows that could differ
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_decisions_on_data_dependent_sizes(
    module: type[nn.Module], shapes: list[tuple[int, ...]], values: list[torch.Tensor], captures: int
) -> None:
    eager = module()
    ours = ORTModule(copy.deepcopy(eager), **DISABLED)
    for shape, value in [*zip(shapes, values, strict=True)] * 2:
        x = torch.randn(shape)
        assert_matches(ours(x, value), eager, x, value)
    assert engine_of(ours).captures == captures


def test_numbers_that_change_in_each_call_run_in_pytorch() -> None:
    eager = Repeats()
    ours = ORTModule(copy.deepcopy(eager), pieces=False)
    x = torch.randn(2, 4)
    for times in range(5):
        assert_matches(ours(x, torch.tensor([times])), eager, x, torch.tensor([times]))
    with pytest.warns(UserWarning, match="a number of a tensor that changes every few calls"):
        ours(x, torch.tensor([5]))
    assert_matches(ours(x, torch.tensor([6])), eager, x, torch.tensor([6]))
    assert engine_of(ours).captures == 5
    assert_matches(ours(x, torch.tensor([0])), eager, x, torch.tensor([0]))  # by its graph, which is kept


def test_a_check_of_data_dependent_sizes_raises_as_in_eager() -> None:
    ours = ORTModule(LastOfEach(), **DISABLED)
    x, mask = torch.randn(2, 6, 4), _marked(2, 3)
    ours(x, mask)
    mask[0, 5] = True
    with pytest.raises(RuntimeError):
        LastOfEach()(x, mask)
    with pytest.raises((RuntimeError, CaptureError)):
        ours(x, mask)


class SetsItsStateOnce(Sized):
    """As vision towers of transformers, which note in the first call that they collect hidden states."""

    is_set = False

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.is_set = True
        marked = mask.nonzero()
        return self.layer(x) if mask.any() and marked.size(0) < x.numel() else self.layer(x) * 2


def test_the_call_that_sets_state_is_a_graph_with_the_same_decisions() -> None:
    eager = SetsItsStateOnce()
    ours = ORTModule(copy.deepcopy(eager), **DISABLED)  # where the first call must not run in PyTorch
    for mask in (torch.tensor([1, 0, 1]), torch.tensor([0, 0, 0]), torch.tensor([0, 1, 0])):
        x = torch.randn(3, 4)
        assert_matches(ours(x, mask), eager, x, mask)
