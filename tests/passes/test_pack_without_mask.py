"""Padding is skipped without an attention mask: the op that reads the tokens decides which of them count."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onnxtrain import ORTModule
from onnxtrain.execute.packing import PackingCheck
from tests.passes.less_work import WIDTH, WORDS, applied_by, refusals, wrap
from tests.passes.test_pack_tokens import FORMS, IGNORED, check
from tests.thinned import covering

PADDING = 0


class Tokens(nn.Module):
    """A feed-forward layer for each token, between what may mix tokens and a head that reads some of them.

    Args:
        mixes: what each token learns of the others: "nothing", "earlier" ones by causal attention, or more.
        head: what reads the hidden states.
        dropout: of hidden states.
    """

    def __init__(self, mixes: str, head: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.mixes, self.head, self.p = mixes, head, dropout
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.kinds, self.places = nn.Embedding(3, WIDTH), nn.Embedding(40, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.wide, self.narrow, self.norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH)
        self.mix = {
            "earlier": lambda: nn.Linear(WIDTH, 3 * WIDTH),
            "all by attention": lambda: nn.Linear(WIDTH, 3 * WIDTH),
            "all by LSTM": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
            "all by GRU": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
            "neighbours": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            "batch statistics": lambda: nn.BatchNorm1d(WIDTH),
        }.get(mixes, nn.Identity)()
        self.score = nn.Linear(WIDTH, WORDS, bias=False)
        self.score.weight = self.words.weight

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.words(words) + self.kinds(words % 3) + self.places(torch.arange(words.size(1))) + self.bias
        x = self._mixed(self._each(x))
        return self._read(self._each(x), words, labels)

    def _each(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + F.dropout(self.narrow(torch.tanh(self.wide(x))), self.p, self.training))

    def _mixed(self, x: torch.Tensor) -> torch.Tensor:
        if self.mixes in ("earlier", "all by attention"):
            batch, steps, _ = x.shape
            q, k, v = (y.view(batch, steps, 4, -1).transpose(1, 2) for y in self.mix(x).split(WIDTH, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.mixes == "earlier")
            return x + y.transpose(1, 2).reshape(batch, steps, -1)
        if self.mixes in ("neighbours", "batch statistics"):
            return self.mix(x.transpose(1, 2)).transpose(1, 2)
        if self.mixes in ("all by LSTM", "all by GRU"):
            return self.mix(x)[0]
        if self.mixes == "weights of steps":
            return x * x.mean(-1, keepdim=True).softmax(1)
        if self.mixes == "running sum":
            return x.cumsum(1)
        if self.mixes == "distance from the mean":
            return x - x.mean(1, keepdim=True)
        return self.mix(x)

    def _read(self, x: torch.Tensor, words: torch.Tensor, labels: torch.Tensor) -> Any:
        mask = words != PADDING
        weights = mask[..., None].to(x.dtype)
        pooled = (x * weights).sum(1) / weights.sum(1).clamp(min=1)
        if self.head == "mean":
            return self.score(pooled).square().mean()
        if self.head == "largest":
            return self.score(x.masked_fill(~mask[..., None], -100.0).amax(1)).square().mean()
        if self.head == "picked":
            return self.score(x[mask]).square().sum()
        if self.head == "last":
            return self.score(x[torch.arange(x.size(0)), (mask.sum(1) - 1).clamp(min=0)]).square().mean()
        if self.head == "labels":
            return F.cross_entropy(self.score(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        if self.head == "a loss for each":  # of padding too, which has the label 0
            losses = F.cross_entropy(self.score(x).flatten(0, 1), words.flatten(), reduction="none")
            return (losses.view(words.shape) * mask).sum() / mask.sum()
        if self.head == "mean of all":
            return self.score(x.mean(1)).square().mean()
        if self.head == "mean, and all":
            return self.score(pooled).square().mean() + x.square().mean()
        assert self.head == "output"
        return self.score(pooled).square().mean(), x


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Record the number of tokens that each batch ran with; None if it was not packed."""
    counts: list[int | None] = []
    kept_tokens = PackingCheck.kept_tokens

    def asked(self: PackingCheck, *arguments: Any) -> Any:
        answer = kept_tokens(self, *arguments)
        counts.append(None if answer is None else answer.rows.numel())
        return answer

    monkeypatch.setattr(PackingCheck, "kept_tokens", asked)
    return counts


def batch_of(form: list[list[int]], seed: int = 0, share: float = 0.5, on_padding: bool = False) -> list[torch.Tensor]:
    """Words and labels; a share of them has none, and padding has some only if asked for."""
    mask, generator = torch.tensor(form), torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, mask.shape, generator=generator) * mask
    labels = torch.randint(0, WORDS, mask.shape, generator=generator)
    ignored = torch.rand(mask.shape, generator=generator) >= share
    return [words, labels.masked_fill(ignored if on_padding else ignored | (mask == 0), IGNORED)]


def expected(module: Tokens, words: torch.Tensor, labels: torch.Tensor) -> int:
    """Count the tokens that are read: by the head, and by attention that looks back."""
    read = labels != IGNORED if module.head == "labels" else words != PADDING
    if module.head == "last":
        read = F.one_hot((read.sum(1) - 1).clamp(min=0), words.size(1)).bool()
    if module.mixes == "earlier":
        read = torch.stack([read[:, step:].any(1) for step in range(words.size(1))], 1)
    return int(read.sum())


# Equal to eager


READ = [
    pytest.param("nothing", "mean"),
    pytest.param("nothing", "largest", marks=pytest.mark.slow),
    pytest.param("nothing", "picked"),
    pytest.param("earlier", "mean", marks=pytest.mark.slow),
    pytest.param("nothing", "a loss for each"),
    pytest.param("earlier", "labels"),
    pytest.param("earlier", "last"),
]


@pytest.mark.parametrize(("mixes", "head", "dtype"), covering(READ, [torch.float32, torch.float64]), ids=str)
def test_only_tokens_that_are_read_are_computed(
    mixes: str, head: str, dtype: torch.dtype, kept: list[int | None]
) -> None:
    torch.manual_seed(0)
    module = Tokens(mixes, head).to(dtype)
    wrapped = ORTModule(module, skip_padding="always", rng="torch")
    for seed, form in enumerate(FORMS.values()):
        batch = batch_of(form, seed)
        check(wrapped, module, *batch)
        assert kept.pop() == (expected(module, *batch) or None), form
    assert not kept


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=12, deadline=None)
def test_any_words_and_labels_equal_eager(data: st.DataObject) -> None:
    """Lengths from 0, padding anywhere, any share of labels, also of padding."""
    batch, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    bits = st.lists(st.integers(0, 1), min_size=steps, max_size=steps)
    form = data.draw(st.lists(bits, min_size=batch, max_size=batch))
    share, on_padding = data.draw(st.sampled_from([0.0, 0.3, 1.0])), data.draw(st.booleans())
    for mixes, head in (("nothing", "mean"), ("earlier", "labels")):
        wrapped, module = _pair(mixes, head)
        check(wrapped, module, *batch_of(form, data.draw(st.integers(0, 99)), share, on_padding))


@functools.cache
def _pair(mixes: str, head: str) -> tuple[ORTModule, nn.Module]:
    torch.manual_seed(0)
    module = Tokens(mixes, head).double()
    return ORTModule(module, skip_padding="always", rng="torch"), module


def test_a_label_of_padding_keeps_all_before_it(kept: list[int | None]) -> None:
    torch.manual_seed(0)
    module = Tokens("earlier", "labels")
    wrapped = ORTModule(module, skip_padding="always")
    words, labels = batch_of([[1, 1, 0, 0, 0, 0]] * 2)
    labels[0, 4] = PADDING
    check(wrapped, module, words, labels)
    assert kept == [expected(module, words, labels)]
    assert kept[0] is not None
    assert kept[0] > 4


def test_without_padding_idx_the_number_means_nothing(kept: list[int | None]) -> None:
    """Which rows are read decides: 0 is a word like others, and its gradient is there."""
    torch.manual_seed(0)
    module = Tokens("nothing", "mean")
    module.words.padding_idx = None
    wrapped = ORTModule(module, skip_padding="always")
    check(wrapped, module, *batch_of(FORMS["inside"]))
    assert kept == [10]


def test_a_gradient_by_frequency_counts_unread_words(kept: list[int | None]) -> None:
    torch.manual_seed(0)
    module = Tokens("earlier", "labels")
    module.words.scale_grad_by_freq = True
    wrapped = ORTModule(module, skip_padding="always")
    batch = batch_of([[1] * 30] * 3)
    batch[1][:, 10:] = IGNORED
    check(wrapped, module, *batch)
    assert kept == [expected(module, *batch)]


def test_a_batch_without_padding_runs_as_it_is(kept: list[int | None]) -> None:
    torch.manual_seed(0)
    module = Tokens("nothing", "mean")
    wrapped = ORTModule(module)
    padded, dense = ([[1] * real + [0] * (40 - real)] * 16 for real in (20, 40))
    for form in (padded, dense, padded[:2], padded):  # the third has few tokens at all
        check(wrapped, module, *batch_of(form))
    assert kept == [320, None, None, 320]


# Never packed where somebody reads the padding


@pytest.mark.parametrize(
    ("mixes", "head", "reason"),
    [
        ("nothing", "mean of all", "padding is used: ReduceMean"),
        pytest.param("nothing", "mean, and all", "needs all rows", marks=pytest.mark.slow),
        ("nothing", "output", "keep_outputs"),
        ("all by attention", "mean", "it uses padding: it has no mask and is not causal"),
        ("all by LSTM", "mean", "LSTM"),
        pytest.param("neighbours", "mean", "Conv needs all rows at once", marks=pytest.mark.slow),
        ("weights of steps", "mean", "Softmax needs all rows at once"),
        pytest.param("all by GRU", "mean", "GRU", marks=pytest.mark.slow),
        pytest.param("running sum", "mean", "CumSum needs all rows at once", marks=pytest.mark.slow),
        pytest.param("distance from the mean", "mean", "needs all rows", marks=pytest.mark.slow),
        pytest.param("batch statistics", "mean", "BatchNormInternal", marks=pytest.mark.slow),
    ],
)
def test_readers_of_padding_are_named(
    mixes: str, head: str, reason: str, kept: list[int | None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Tokens(mixes, head)
    wrapped = wrap(module, tmp_path, skip_padding="always")
    check(wrapped, module, *batch_of(FORMS["right"]))
    assert not kept
    assert any(reason in text for text in refusals(wrapped, "pack_tokens")), refusals(wrapped, "pack_tokens")


def test_an_embedding_that_is_only_averaged_says_that_nothing_would_be_saved(tmp_path: Path) -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.score = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING), nn.Linear(WIDTH, 2)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.score((self.words(words) * (words != PADDING)[..., None]).sum(1)).square().mean()

    wrapped = wrap(Averaged(), tmp_path, skip_padding="always")
    wrapped(batch_of(FORMS["right"])[0])
    assert any("skipping padding would save nothing" in text for text in refusals(wrapped, "pack_tokens"))


def test_dropout_of_eager_is_refused(kept: list[int | None], tmp_path: Path) -> None:
    wrapped = wrap(Tokens("nothing", "mean", dropout=0.1), tmp_path, skip_padding="always", rng="torch")
    wrapped(*batch_of(FORMS["right"]))
    assert not kept
    assert any('rng="torch"' in text for text in refusals(wrapped, "pack_tokens"))


@pytest.mark.parametrize(("head", "by"), [("labels", "skip_ignored_labels"), ("last", "hoist_gathers")])
def test_rows_that_were_picked_already_are_no_padding(
    head: str, by: str, tmp_path: Path, kept: list[int | None]
) -> None:
    """If tokens do not mix, the tokens that are read are selected at the embedding."""
    wrapped = wrap(Tokens("nothing", head), tmp_path, skip_padding="always")
    wrapped(*batch_of(FORMS["right"]))
    assert applied_by(wrapped, by)
    assert not kept
    assert not refusals(wrapped, "pack_tokens")
