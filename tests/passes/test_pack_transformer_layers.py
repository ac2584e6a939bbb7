"""Models of PyTorch's own transformer layers are packed too, and equal eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onnxtrain import ORTModule
from onnxtrain.testing import assert_no_worse_than_eager
from tests.passes.less_work import CLASSES, WIDTH, WORDS, applied_by, refusals, wrap
from tests.passes.test_pack_tokens import FORMS, check
from tests.passes.test_pack_without_mask import PADDING, batch_of, kept
from tests.reference import assert_matches

__all__ = ["kept"]  # a fixture


class Sentences(nn.Module):
    """Two layers and a head that reads some tokens; [steps, batch, ..] from the words on unless `batch_first`."""

    def __init__(
        self, batch_first: bool = True, norm_first: bool = False, head: str = "mean", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.batch_first, self.head = batch_first, head
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.score = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> Any:
        padding = words == PADDING
        steps = 1 if self.batch_first else 0
        words = words if self.batch_first else words.t()
        x = self.encoder(self.words(words), src_key_padding_mask=padding)
        if self.head == "first":
            return self.score(x.select(steps, 0)).square().mean()
        if self.head == "all":
            return self.score(x.mean(steps)).square().mean()
        real = (words != PADDING)[..., None].to(x.dtype)
        if self.head == "largest":
            return self.score(x.masked_fill(real == 0, -100.0).amax(steps)).square().mean()
        pooled = (x * real).sum(steps) / real.sum(steps).clamp(min=1)
        loss = self.score(pooled).square().mean()
        return (loss, x) if self.head == "output" else loss


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("batch_first", "norm_first", "head", "dtype"),
    [
        (True, False, "mean", torch.float32),
        (False, True, "largest", torch.float64),
        pytest.param(True, False, "mean", torch.float64, marks=SLOW),
        pytest.param(False, True, "largest", torch.float32, marks=SLOW),
        pytest.param(True, True, "first", torch.float32, marks=SLOW),
        pytest.param(False, False, "first", torch.float64, marks=SLOW),
    ],
    ids=str,
)
def test_an_encoder_equals_eager(
    batch_first: bool, norm_first: bool, head: str, dtype: torch.dtype, kept: list[int | None]
) -> None:
    torch.manual_seed(0)
    module = Sentences(batch_first, norm_first, head).to(dtype)
    wrapped = ORTModule(module, skip_padding="always", rng="torch")
    for seed, form in enumerate(form for name, form in FORMS.items() if name != "one token"):
        words, labels = batch_of(form, seed)
        if head == "first":
            words[:, 0] = 1
        check(wrapped, module, words, labels)
        assert kept.pop() == (int((words != PADDING).sum()) or None), form
    assert not kept


@SLOW
def test_layers_by_themselves_and_attention_equal_eager(kept: list[int | None]) -> None:
    class Mixed(Sentences):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True, activation="gelu", bias=False)
            self.encoder, self.attention = layer, nn.MultiheadAttention(WIDTH, 4, batch_first=True)

        def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            padding = words == PADDING
            x = self.encoder(self.words(words), src_key_padding_mask=padding)
            x = x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
            return self.score(x.masked_fill(padding[..., None], 0.0).sum(1)).square().mean()

    torch.manual_seed(0)
    module = Mixed()
    wrapped = ORTModule(module, skip_padding="always")
    for form in ("right", "inside"):
        check(wrapped, module, *batch_of(FORMS[form]))
    assert kept == [12, 10]


@SLOW
def test_a_causal_encoder_equals_eager(kept: list[int | None]) -> None:
    class Causal(Sentences):
        def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(words.size(1), words.size(1), dtype=torch.bool).triu(1)
            x = self.encoder(self.words(words), mask=mask, src_key_padding_mask=words == PADDING, is_causal=True)
            labels = torch.where(words == PADDING, -100, labels.abs() % CLASSES)
            return F.cross_entropy(self.score(x).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    module = Causal()
    wrapped = ORTModule(module, skip_padding="always")
    check(wrapped, module, *batch_of(FORMS["right"]))
    assert kept == [12]


@SLOW
def test_a_batch_without_padding_runs_as_it_is(kept: list[int | None]) -> None:
    torch.manual_seed(0)
    module = Sentences(batch_first=False)
    wrapped = ORTModule(module)
    padded, dense = ([[1] * real + [0] * (40 - real)] * 16 for real in (20, 40))
    for form in (padded, dense, padded):
        check(wrapped, module, *batch_of(form))
    assert kept == [320, None, 320]


def test_dropout_of_real_tokens_does_not_depend_on_padding(kept: list[int | None]) -> None:
    module = Sentences(dropout=0.3).double()
    wrapped = ORTModule(module, skip_padding="always")
    words, labels = batch_of(FORMS["right"])
    losses = []
    for seed, padding in ((5, 0), (5, 3), (6, 0)):
        torch.manual_seed(seed)
        losses.append(wrapped(F.pad(words, (0, padding), value=PADDING), F.pad(labels, (0, padding))))
        losses[-1].backward()
    assert_no_worse_than_eager("loss", losses[1], losses[0], losses[0])
    assert not torch.equal(losses[0], losses[2])
    assert kept == [12] * 3


@pytest.mark.parametrize("batch_first", [pytest.param(True, marks=SLOW), False])
def test_hidden_states_that_are_returned_are_zero_in_padding(batch_first: bool, kept: list[int | None]) -> None:
    torch.manual_seed(0)
    module = Sentences(batch_first, head="output")
    wrapped = ORTModule(module, skip_padding="always")
    for form in ("right", "inside"):  # the first runs with padding: it shows that padding of the output is not read
        check(wrapped, module, *batch_of(FORMS[form]))
    words, labels = batch_of(FORMS["left"])

    def hidden(run: nn.Module) -> torch.Tensor:
        return run(words, labels)[1].transpose(0, int(not batch_first)) * (words != PADDING)[..., None]

    states = wrapped(words, labels)[1].transpose(0, int(not batch_first))
    assert_matches(states, hidden, module)
    assert kept == [12, 10, 12]


@SLOW
@pytest.mark.parametrize("batch_first", [True, False])
def test_readers_of_padding_are_named(batch_first: bool, kept: list[int | None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Sentences(batch_first, head="all")
    wrapped = wrap(module, tmp_path, skip_padding="always")
    check(wrapped, module, *batch_of(FORMS["right"]))
    assert not kept
    assert any("padding is used: ReduceMean" in text for text in refusals(wrapped, "pack_tokens"))


def test_it_is_packed_because_axes_stay_separate(kept: list[int | None], tmp_path: Path) -> None:
    wrapped = wrap(Sentences(), tmp_path, skip_padding="always", disabled_passes=("cancel_axis_merges",))
    wrapped(*batch_of(FORMS["right"]))
    assert not applied_by(wrapped, "cancel_axis_merges")
    assert not kept
