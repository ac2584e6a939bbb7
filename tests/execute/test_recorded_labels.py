"""Programs that skip tokens with ignored labels are recorded: few numbers of rows, and no label is skipped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.packed_variants import PackedVariants
from onnxtrain.execute.recorded_program import CALLS
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.index.labelled_rows import LABELLED_ROWS, rounded_up
from onnxtrain.ops.interfaces.host_reads import HOST_READS
from onnxtrain.ops.registry import definition_of
from onnxtrain.plan import streams
from onnxtrain.plan.cut import Part
from onnxtrain.testing import assert_no_worse_than_eager
from tests.execute.cpu_recorder import Recorders
from tests.passes.test_pack_tokens import FORMS, Encoder, bool_mask
from tests.passes.test_pack_tokens import batch_of as batch_of_form
from tests.passes.test_pack_tokens import check as packed_check

WORDS, STEPS, BATCH = 11, 40, 8
SHARES = (0.1, 0.15, 0.3, 0.12, 0.14, 0.13, 1.0, 0.2, 0.0, 0.9, 0.16, 0.11)  # of tokens with a label


class Masked(nn.Module):
    """A loss of the tokens with a label, of `reduction`; dividing by the norm makes NaN of a row of zeros."""

    def __init__(self, reduction: str = "mean", smoothing: float = 0.0) -> None:
        super().__init__()
        self.options = {"reduction": reduction, "label_smoothing": smoothing}
        self.embed, self.mix, self.score = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        hidden = self.mix(hidden + hidden.mean(1, keepdim=True))
        logits = self.score(hidden / hidden.norm(dim=-1, keepdim=True))
        return nn.functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1), **self.options)


def batch_of(share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (BATCH, STEPS), generator=generator)
    return words, words.masked_fill(torch.rand(BATCH, STEPS, generator=generator) >= share, -100)


def step(model: nn.Module, words: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(words, labels)
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check(wrapped: nn.Module, eager: nn.Module, words: torch.Tensor, labels: torch.Tensor) -> None:
    exact = step(copy.deepcopy(eager).double(), words, labels)
    results = step(wrapped, words, labels), step(eager, words, labels)
    largest = max(t.abs().nan_to_num().max().item() for t in exact)
    for index, (ours, theirs, right) in enumerate(zip(*results, exact, strict=True)):
        if right.isnan().all():  # the mean of no label
            assert ours.isnan().all()
        else:
            assert_no_worse_than_eager(f"result {index}", ours, theirs, right, largest)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "DEVICES", frozenset({"cpu"}))


@pytest.mark.parametrize(("reduction", "smoothing"), [("mean", 0.0), ("sum", 0.2)])
def test_any_number_of_labels_equals_eager_with_few_recordings(
    reduction: str, smoothing: float, log: Recorders, as_on_gpu: None
) -> None:
    torch.manual_seed(0)
    eager = Masked(reduction, smoothing)
    wrapped = ORTModule(copy.deepcopy(eager), cuda_graphs=True, skip_padding="never")
    rows = []
    for seed, share in enumerate(SHARES):
        words, labels = batch_of(share, seed)
        check(wrapped, eager, words, labels)
        log.poison()
        rows.append(min(rounded_up(int((labels >= 0).sum())), labels.numel()))
    recorded = sum(max(0, rows.count(count) - CALLS) for count in set(rows))
    assert recorded > 2
    assert len(set(rows)) < len(rows)
    assert log.since() == (2 * sum(rows.count(count) > CALLS for count in set(rows)), 2 * recorded)
    report = engine_of(wrapped).newest().report
    assert not [text for stage in report.stages for text in stage.refused if "cuda_graphs" in str(text)]


@pytest.mark.parametrize("count", [0, 1, 64, 65, 319, 320])
def test_rows_without_a_label_follow_all_with_one(count: int) -> None:
    labelled = torch.zeros(320, dtype=torch.bool)
    labelled[torch.randperm(320)[:count]] = True
    read = HOST_READS.entries[LABELLED_ROWS.domain, LABELLED_ROWS.name]
    assert read.fill is not None
    rows = read.fill(labelled, read.finish(labelled, read.start(labelled)))
    assert torch.equal(rows[:count], labelled.nonzero().flatten())
    assert not labelled[rows[count:]].any()
    assert rows.unique().numel() == rows.numel() == min(320, rounded_up(count))


def test_rows_that_the_model_selects_are_exact(log: Recorders, as_on_gpu: None) -> None:
    """Its results read all of them: nothing is recorded."""

    class Selects(Masked):
        def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.score(self.embed(words)[labels >= 0]).square().sum()

    torch.manual_seed(0)
    eager = Selects()
    wrapped = ORTModule(copy.deepcopy(eager), cuda_graphs=True, skip_padding="never")
    for seed in range(CALLS + 2):
        check(wrapped, eager, *batch_of(0.3, seed))
    part = engine_of(wrapped).newest().unit.forward.part
    assert streams.split_at_reads(part) is None
    assert LABELLED_ROWS not in map(definition_of, part.nodes)


def test_rows_of_a_batch_without_padding_are_exact(
    log: Recorders, as_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that are not kept are zeros there, of which a layer may make NaN: none may follow."""
    parts = list[Part]()
    compile_packed = PackedVariants._compile

    def compiled(self: PackedVariants, *arguments: Any) -> None:
        compile_packed(self, *arguments)
        parts.extend(packed.unit.forward.part for packed in self._units.values() if packed is not None)

    monkeypatch.setattr(PackedVariants, "_compile", compiled)
    torch.manual_seed(0)
    eager = Encoder(bool_mask, head="labels")
    wrapped = ORTModule(eager, cuda_graphs=True, skip_padding="always")
    for seed in range(CALLS + 2):
        packed_check(wrapped, eager, *batch_of_form(FORMS["right"], seed))
    (part,) = parts
    assert part.early_reads
    assert streams.split_at_reads(part) is None
