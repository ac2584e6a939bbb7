"""Padding is skipped: results equal eager's for every form of padding, and it is skipped only if it is dead."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnxtrain import ORTModule
from onnxtrain.execute.packing import PackingCheck
from onnxtrain.testing import assert_no_worse_than_eager
from tests.passes.less_work import CLASSES, WIDTH, WORDS, refusals, wrap
from tests.reference import assert_matches
from tests.thinned import slow_except

IGNORED = -100
MaskOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# Masks of attention, from hidden states and the mask of tokens


def bool_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask.bool()[:, None, None, :]


def full_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return bool_mask(x, mask).expand(-1, 1, x.size(1), -1)


def infinite_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask == 0, -math.inf)[:, None, None, :]


def lowest_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (1 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min


def causal_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    steps = x.size(1)
    return bool_mask(x, mask) & torch.ones(steps, steps, dtype=torch.bool).tril()


def window_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.size(1))
    return bool_mask(x, mask) & ((positions[:, None] - positions).abs() < 3)


def soft_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Padding counts less, but it counts."""
    return (mask[:, None, None, :].to(x.dtype) - 1) * 0.5


class Encoder(nn.Module):
    """Two layers and a head that reads some rows.

    Args:
        mask_of: what attention adds or is told to see; one for each layer.
        head: what reads the hidden states.
        dropout: of attention and of hidden states.
    """

    def __init__(self, *mask_of: MaskOf, head: str = "mean", dropout: float = 0.0) -> None:
        super().__init__()
        self.mask_of, self.head, self.p = mask_of * (2 if len(mask_of) == 1 else 1), head, dropout
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(40, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in mask_of * 2)
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in mask_of * 2)
        self.norm = nn.LayerNorm(WIDTH)
        self.score = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        batch, steps = words.shape
        x = self.words(words) + self.places(torch.arange(steps))
        for mask_of, qkv, out in zip(self.mask_of, self.qkv, self.out, strict=False):
            q, k, v = (y.view(batch, steps, 4, -1).transpose(1, 2) for y in qkv(x).split(WIDTH, -1))
            p = self.p if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, mask_of(x, mask), p)
            x = self.norm(x + F.dropout(out(y.transpose(1, 2).reshape(batch, steps, -1)), self.p, self.training))
        return self._read(x, mask, labels)

    def _read(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.head == "mean":
            weights = mask[..., None].to(x.dtype)
            return self.score((x * weights).sum(1) / weights.sum(1).clamp(min=1)).square().mean()
        if self.head == "mean of words":  # another mask than attention's
            return self.score((x * (labels != IGNORED)[..., None]).sum(1)).square().mean()
        if self.head == "chosen":
            return self.score(x.masked_fill((mask == 0)[..., None], 0.0).sum(1)).square().mean()
        if self.head == "chosen by labels":
            return self.score(torch.where((labels != IGNORED)[..., None], x, 0.0).sum(1)).square().mean()
        if self.head == "first":
            return self.score(x[:, 0]).square().mean()
        if self.head == "labels":
            return F.cross_entropy(self.score(x).view(-1, CLASSES), labels.view(-1))
        if self.head == "all":
            return self.score(x.sum(1)).square().mean()
        assert self.head == "output"
        return self.score((x * mask[..., None]).sum(1)).square().mean(), x


FORMS: dict[str, list[list[int]]] = {
    "right": [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]],
    "left": [[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]],
    "inside": [[1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 0, 1]],
    "none": [[1] * 6] * 3,
    "an empty row": [[1, 1, 1, 1, 0, 0], [0] * 6, [1, 1, 1, 1, 1, 1]],
    "all empty": [[0] * 6] * 2,
    "one token": [[1]],
}


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each batch whether it ran packed."""
    packed: list[bool] = []
    kept_tokens = PackingCheck.kept_tokens

    def asked(self: PackingCheck, *arguments: Any) -> Any:
        kept = kept_tokens(self, *arguments)
        packed.append(kept is not None)
        return kept

    monkeypatch.setattr(PackingCheck, "kept_tokens", asked)
    return packed


def batch_of(form: list[list[int]], seed: int = 0, labels_on_padding: bool = False) -> tuple[torch.Tensor, ...]:
    mask = torch.tensor(form)
    generator = torch.Generator().manual_seed(seed)
    words, labels = (torch.randint(0, n, mask.shape, generator=generator) for n in (WORDS, CLASSES))
    ignored = torch.rand(mask.shape, generator=generator) < 0.5
    if not labels_on_padding:
        ignored |= mask == 0
    return words, mask, labels.masked_fill(ignored, IGNORED)


def results(run: nn.Module, module: nn.Module, *batch: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    loss = run(*batch)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def check(wrapped: nn.Module, module: nn.Module, *batch: torch.Tensor) -> None:
    """The one tolerance, in the module's dtype."""
    got, eager = results(wrapped, module, *batch), results(module, module, *batch)
    dtype = next(module.parameters()).dtype
    exact = results(module.double(), module, *batch)
    module.to(dtype)
    largest = max(t.nan_to_num().abs().max().item() for t in exact)
    for index, (ours, theirs, right) in enumerate(zip(got, eager, exact, strict=True)):
        assert_no_worse_than_eager(f"result {index}", ours, theirs, right, largest)


# Equal to eager


MASKS: dict[str, MaskOf] = {
    "bool": bool_mask, "full": full_mask, "infinite": infinite_mask, "lowest": lowest_mask, "causal": causal_mask,
}  # fmt: skip
HEADS = {"bool": "mean", "full": "labels", "infinite": "chosen", "causal": "labels"}
COMBINATIONS = [
    pytest.param(mask_of, head, id=f"{name}-{head}", marks=() if HEADS.get(name) == head else (pytest.mark.slow,))
    for name, mask_of in MASKS.items()
    for head in ("mean", "chosen", "labels")
]


@pytest.mark.parametrize(("mask_of", "head"), COMBINATIONS)
def test_every_form_of_padding_equals_eager(mask_of: MaskOf, head: str, decisions: list[bool]) -> None:
    dtypes = (torch.float32, torch.float64) if mask_of is causal_mask else (torch.float32,)
    for dtype in dtypes:
        torch.manual_seed(0)
        module = Encoder(mask_of, head=head).to(dtype)
        wrapped = ORTModule(module, skip_padding="always")
        for seed, form in enumerate(FORMS.values()):
            check(wrapped, module, *batch_of(form, seed))
    assert all(decisions[: len(FORMS) - 2]), decisions


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=10, deadline=None)
def test_any_mask_equals_eager(data: st.DataObject) -> None:
    """On one model; a batch runs packed or not, as is right for it."""
    batch, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    bits = st.lists(st.integers(0, 1), min_size=steps, max_size=steps)
    form = data.draw(st.lists(bits, min_size=batch, max_size=batch))
    labels_on_padding = data.draw(st.booleans())
    if not _PAIRS:
        torch.manual_seed(0)
        for head in ("first", "labels"):
            module = Encoder(bool_mask, head=head)
            _PAIRS.append((ORTModule(module, skip_padding="always"), module))
    for wrapped, module in _PAIRS:
        check(wrapped, module, *batch_of(form, data.draw(st.integers(0, 99)), labels_on_padding))


_PAIRS: list[tuple[ORTModule, nn.Module]] = []


# Not packed where somebody reads the padding: without the condition the numbers are wrong


@pytest.mark.parametrize(
    ("masks", "head", "form", "labels_on_padding", "packed"),
    [
        ((bool_mask,), "first", "right", False, True),
        ((bool_mask,), "first", "left", False, False),
        pytest.param((bool_mask,), "first", "an empty row", False, False, marks=pytest.mark.slow),
        pytest.param((bool_mask,), "labels", "right", False, True, marks=pytest.mark.slow),
        ((bool_mask,), "labels", "right", True, False),
        ((bool_mask,), "mean of words", "right", False, True),
        pytest.param((bool_mask,), "mean of words", "right", True, False, marks=pytest.mark.slow),
        pytest.param((bool_mask,), "chosen by labels", "right", False, True, marks=pytest.mark.slow),
        pytest.param((bool_mask,), "chosen by labels", "right", True, False, marks=pytest.mark.slow),
        ((window_mask,), "mean", "right", False, False),
        pytest.param((soft_mask,), "mean", "right", False, False, marks=pytest.mark.slow),
        pytest.param((bool_mask, causal_mask), "mean", "right", False, False, marks=pytest.mark.slow),
        pytest.param((bool_mask, window_mask), "mean", "right", False, False, marks=pytest.mark.slow),
        ((causal_mask,), "mean", "left", False, True),
        pytest.param((causal_mask,), "mean", "inside", False, True, marks=pytest.mark.slow),
    ],
)
def test_readers_decide_whether_padding_is_skipped(
    masks: tuple[MaskOf, ...], head: str, form: str, labels_on_padding: bool, packed: bool, decisions: list[bool]
) -> None:
    torch.manual_seed(0)
    module = Encoder(*masks, head=head)
    wrapped = ORTModule(module, skip_padding="always")
    check(wrapped, module, *batch_of(FORMS[form], 1, labels_on_padding))
    assert decisions == [packed]


class FirstOnly(nn.Module):
    """The first token of each sequence attends to all tokens that its mask shows; it is not a key itself."""

    def __init__(self, mask_of: MaskOf) -> None:
        super().__init__()
        self.mask_of = mask_of
        self.words, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query = nn.Parameter(torch.randn(1, 4, 1, WIDTH // 4))

    def forward(self, words: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        batch, steps = words.shape
        x = self.words(words)
        k = torch.tanh(self.inner(x)).view(batch, steps, 4, -1).transpose(1, 2)
        full = self.mask_of(x, mask)
        own = F.scaled_dot_product_attention(k, k, k, full)
        q = self.query.expand(batch, -1, -1, -1)
        return F.scaled_dot_product_attention(q, own, own, full).square().mean()


@pytest.mark.parametrize(("mask_of", "packed"), [(bool_mask, True), (infinite_mask, True), (lowest_mask, False)])
def test_a_row_that_sees_nothing_gives_zero_or_the_mean_of_all(
    mask_of: MaskOf, packed: bool, decisions: list[bool]
) -> None:
    torch.manual_seed(0)
    module = FirstOnly(mask_of)
    wrapped = ORTModule(module, skip_padding="always")
    check(wrapped, module, *batch_of(FORMS["an empty row"]))
    check(wrapped, module, *batch_of(FORMS["left"]))
    assert decisions == [packed, True]


@pytest.mark.parametrize(("head", "reason"), [("all", "needs all rows"), ("mean", 'rng="torch"')])
def test_models_that_are_never_packed_have_a_reason(
    head: str, reason: str, tmp_path: Path, decisions: list[bool]
) -> None:
    torch.manual_seed(0)
    eager_samples = head == "mean"
    module = Encoder(bool_mask, head=head, dropout=0.1 if eager_samples else 0.0)
    wrapped = wrap(module, tmp_path, skip_padding="always", rng="torch" if eager_samples else "fast")
    if eager_samples:
        wrapped(*batch_of(FORMS["right"]))
    else:
        check(wrapped, module, *batch_of(FORMS["right"]))
    assert not decisions
    assert any(reason in text for text in refusals(wrapped, "pack_tokens")), refusals(wrapped, "pack_tokens")


class Biased(Encoder):
    """An encoder that adds a learned bias to its scores: per pair of positions, per column, or shared by heads."""

    def __init__(self, form: str) -> None:
        super().__init__(self._mask)
        self.form = form
        self.table = nn.Parameter(torch.randn(1, 4, 8, 8))

    def _mask(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        steps = x.size(1)
        table = self.table[:, :, :steps, :steps]
        if self.form == "chosen":  # as T5 does
            return torch.where(bool_mask(x, mask), table, torch.finfo(x.dtype).min)
        if self.form == "of columns":
            return self.table[0, 0, 0, :steps] + lowest_mask(x, mask)
        if self.form == "shared by heads":
            return lowest_mask(x, mask) + table[:, :1]
        if self.form == "of the batch":
            return table * mask.sum(1)[:, None, None, None] + lowest_mask(x, mask)
        return table + lowest_mask(x, mask)


@pytest.mark.parametrize(
    "bias_form", slow_except(["added", "chosen", "of columns", "shared by heads"], "of columns", "shared by heads")
)
def test_a_table_of_biases_is_packed_with_the_tokens(bias_form: str, decisions: list[bool]) -> None:
    torch.manual_seed(0)
    module = Biased(bias_form)
    wrapped = ORTModule(module, skip_padding="always")
    for form in ("right", "left", "inside", "none", "an empty row"):
        check(wrapped, module, *batch_of(FORMS[form]))
    assert decisions == [True, False, False, True, True]


def test_a_bias_for_each_sequence_is_refused(tmp_path: Path, decisions: list[bool]) -> None:
    wrapped = wrap(Biased("of the batch"), tmp_path, skip_padding="always")
    wrapped(*batch_of(FORMS["right"]))
    assert not decisions
    assert any("differs between sequences" in text for text in refusals(wrapped, "pack_tokens"))


def test_a_learned_mask_is_refused(tmp_path: Path, decisions: list[bool]) -> None:
    module = Encoder(bool_mask)
    module.slope = nn.Parameter(torch.tensor(-3.0))
    module.mask_of = (lambda x, mask: module.slope * (1 - mask[:, None, None, :].to(x.dtype)),) * 2
    wrapped = wrap(module, tmp_path, skip_padding="always")
    check(wrapped, module, *batch_of(FORMS["right"]))
    assert not decisions
    assert any("integer and boolean inputs" in text for text in refusals(wrapped, "pack_tokens"))


# When


def test_auto_asks_how_much_there_is_to_save(decisions: list[bool]) -> None:
    module = Encoder(bool_mask)
    wrapped = ORTModule(module)
    padded, dense = torch.ones(16, 40, dtype=torch.long), torch.ones(16, 40, dtype=torch.long)
    padded[:, 20:] = 0
    for mask in (padded, dense, padded[:2], padded):
        check(wrapped, module, *batch_of(mask.tolist()))
    assert decisions == [True, False, False, True]


def test_never_asks_nothing(decisions: list[bool]) -> None:
    module = Encoder(bool_mask)
    check(ORTModule(module, skip_padding="never"), module, *batch_of(FORMS["right"]))
    assert not decisions


def test_dropout_is_drawn_again_from_the_same_seed_and_keeps_its_share(decisions: list[bool]) -> None:
    torch.manual_seed(0)
    module = Encoder(bool_mask, dropout=0.3)
    wrapped = ORTModule(module, skip_padding="always")
    batch = batch_of(FORMS["right"])
    by_seed = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        by_seed.append(results(wrapped, module, *batch))
    assert all(map(torch.equal, by_seed[0], by_seed[1]))
    assert not torch.equal(by_seed[0][0], by_seed[2][0])
    ours = torch.stack([wrapped(*batch).detach() for _ in range(300)])
    eagers = torch.stack([module(*batch).detach() for _ in range(300)])
    spread = (ours.var() / 300 + eagers.var() / 300).sqrt()
    assert (ours.mean() - eagers.mean()).abs() < 5 * spread
    assert all(decisions)


def test_second_derivatives_and_evaluation(decisions: list[bool]) -> None:
    torch.manual_seed(0)
    module = Encoder(bool_mask)
    wrapped = ORTModule(module, skip_padding="always")
    batch = batch_of(FORMS["right"])

    def second(run: nn.Module, module: nn.Module) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            (g,) = torch.autograd.grad(run(*batch), module.norm.weight, create_graph=True)
            return torch.autograd.grad(g.square().sum(), module.score.weight)[0]

    assert_matches(second(wrapped, module), lambda module: second(module, module), module)
    module.eval()
    with torch.no_grad():
        assert_matches(wrapped(*batch), module, *batch)
    assert decisions == [True, True]
