"""Token-level results of a module: padding is skipped, and is zeros, if it is dead."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule
from onnxtrain.testing import assert_no_worse_than_eager
from tests.passes.less_work import CLASSES, WIDTH
from tests.passes.test_pack_models import llama
from tests.passes.test_pack_tokens import (
    FORMS,
    IGNORED,
    Encoder,
    MaskOf,
    batch_of,
    bool_mask,
    causal_mask,
    check,
    decisions,
)
from tests.reference import assert_matches
from tests.thinned import slow_except

__all__ = ["decisions"]  # a fixture

RIGHT, LEFT, INSIDE = FORMS["right"], FORMS["left"], FORMS["inside"]


class Tagger(Encoder):
    """The scores of each token beside their loss.

    Args:
        form: how the loss reads the scores.
    """

    def __init__(self, form: str = "rows", mask_of: MaskOf = bool_mask) -> None:
        super().__init__(mask_of)
        self.form = form

    def _read(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.score(x)
        if self.form == "rows":
            loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        elif self.form == "classes second":
            loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="sum")
        elif self.form == "weighted":
            weight = torch.arange(1.0, 1 + CLASSES, dtype=logits.dtype)
            loss = F.nll_loss(logits.log_softmax(-1).view(-1, CLASSES), labels.view(-1), weight)
        else:
            assert self.form == "each token"
            loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), reduction="none").sum()
        return {"loss": loss, "logits": logits, "hidden": x}


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def train(run: nn.Module, module: nn.Module, *batch: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits of a step, and its loss and gradients."""
    module.zero_grad()
    output = run(*batch)
    output["loss"].backward()
    return output["logits"].detach(), [output["loss"].detach(), *gradients(module)]


def is_packed(wrapped: nn.Module, module: nn.Module, *batch: torch.Tensor) -> bool:
    """Compare a step with eager's; return whether it ran without padding."""
    real = batch[1].bool()
    (logits, got), (eager_logits, eager) = train(wrapped, module, *batch), train(module, module, *batch)
    dtype = next(module.parameters()).dtype
    exact_logits, exact = train(module.double(), module, *batch)
    module.to(dtype)
    largest = max(t.nan_to_num().abs().max().item() for t in exact)
    for index, (ours, theirs, right) in enumerate(zip(got, eager, exact, strict=True)):
        assert_no_worse_than_eager(f"result {index}", ours, theirs, right, largest)
    assert_no_worse_than_eager("logits", logits[real], eager_logits[real], exact_logits[real])
    zeros = not logits[~real].any()
    if not zeros:
        assert_no_worse_than_eager("padding", logits, eager_logits, exact_logits)
    return zeros


@pytest.mark.parametrize(
    ("form", "packs"),
    [
        ("rows", True),
        pytest.param("classes second", True, marks=pytest.mark.slow),
        pytest.param("weighted", True, marks=pytest.mark.slow),
        ("each token", False),
    ],
)
def test_scores_beside_their_loss_are_zero_in_padding_from_the_second_step_on(form: str, packs: bool) -> None:
    torch.manual_seed(0)
    module = Tagger(form)
    wrapped = ORTModule(module, skip_padding="always")
    steps = [is_packed(wrapped, module, *batch_of(FORMS[each])) for each in ("right", "left", "inside", "an empty row")]
    assert steps == [False, packs, packs, packs]


def test_labels_on_padding_keep_it() -> None:
    torch.manual_seed(0)
    module = Tagger()
    wrapped = ORTModule(module, skip_padding="always")
    batches = [batch_of(RIGHT), batch_of(RIGHT, 1, labels_on_padding=True), batch_of(LEFT)]
    assert [is_packed(wrapped, module, *batch) for batch in batches] == [False, False, True]


def test_a_sequence_without_labels_keeps_its_real_tokens() -> None:
    torch.manual_seed(0)
    module = Tagger()
    wrapped = ORTModule(module, skip_padding="always")
    words, mask, labels = batch_of(RIGHT)
    labels[1] = IGNORED
    assert [is_packed(wrapped, module, words, mask, labels) for _ in range(2)] == [False, True]


def test_a_causal_mask() -> None:
    torch.manual_seed(0)
    module = Tagger(mask_of=causal_mask)
    wrapped = ORTModule(module, skip_padding="always")
    assert [is_packed(wrapped, module, *batch_of(form)) for form in (RIGHT, RIGHT, INSIDE)] == [False, True, True]


# A loss of the user's own


def test_a_loss_that_leaves_padding_out_is_packed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnxtrain")
    torch.manual_seed(0)
    module = Encoder(bool_mask, head="output")
    wrapped = ORTModule(module, skip_padding="always")
    words, mask, labels = batch_of(RIGHT)

    def step(run: nn.Module, module: nn.Module, mask: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        module.zero_grad()
        _, x = run(words, mask, labels)
        (x * mask[..., None]).sum(1).square().mean().backward()
        return gradients(module), x.detach()

    for number in range(3):
        grads, hidden = step(wrapped, module, mask)
        assert_matches(grads, lambda module: step(module, module, mask)[0], module, together=True)
        assert bool(hidden[mask == 0].any()) == (number == 0)
    assert "the loss does not read the padding of" in caplog.text


def test_a_loss_that_reads_padding_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnxtrain")
    torch.manual_seed(0)
    module = Encoder(bool_mask, head="output")
    wrapped = ORTModule(module, skip_padding="always")
    batch = batch_of(RIGHT)

    def step(run: nn.Module, module: nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        run(*batch)[1].mean(1).square().sum().backward()
        return gradients(module)

    for _ in range(3):
        assert_matches(step(wrapped, module), lambda module: step(module, module), module, together=True)
    assert caplog.text.count("runs with padding: the loss reads the padding of the result") == 1
    assert list(wrapped.report().variants) == []


def test_a_loss_that_reads_padding_later_is_warned_of_and_padding_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    module = Encoder(bool_mask, head="output")
    wrapped = ORTModule(module, skip_padding="always")
    batch = batch_of(RIGHT)
    padding = batch[1] == 0
    for _ in range(2):
        wrapped(*batch)[0].backward()
    assert not caplog.records
    wrapped(*batch)[1].mean(1).square().sum().backward()
    x = wrapped(*batch)[1]
    (warning,) = caplog.messages
    assert 'skip_padding="never"' in warning
    assert_matches(x, lambda module: module(*batch)[1], module)
    assert x[padding].any()


def test_a_result_without_a_gradient_keeps_padding(caplog: pytest.LogCaptureFixture) -> None:
    class Detached(Encoder):
        def _read(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
            return super()._read(x, mask, labels)[0], x.detach()

    caplog.set_level(logging.INFO, "onnxtrain")
    module = Detached(bool_mask, head="output")
    wrapped = ORTModule(module, skip_padding="always")
    batch = batch_of(RIGHT)
    for _ in range(2):
        loss, x = wrapped(*batch)
        loss.backward()
        assert_matches(x, lambda module: module(*batch)[1], module)
    assert "has no gradient that could tell" in caplog.text


def test_evaluation_keeps_padding() -> None:
    module = Encoder(bool_mask, head="output").eval()
    wrapped = ORTModule(module, skip_padding="always")
    batch = batch_of(RIGHT)
    with torch.no_grad():
        for _ in range(2):
            assert_matches(wrapped(*batch), module, *batch)


def test_causality_alone_says_nothing_about_padding() -> None:
    module = Tagger(mask_of=lambda x, mask: torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril())
    wrapped = ORTModule(module, skip_padding="always")
    assert [is_packed(wrapped, module, *batch_of(RIGHT)) for _ in range(2)] == [False, False]


def test_a_checkpoint_around_the_module_reruns_the_same_program() -> None:
    torch.manual_seed(0)
    module = Encoder(bool_mask, head="output")
    wrapped = ORTModule(module, skip_padding="always")
    words, mask, labels = batch_of(RIGHT)
    outputs = [checkpoint(wrapped, words, mask, labels, use_reentrant=False) for _ in range(3)]
    for loss, _ in outputs:
        loss.backward()
    for output in (outputs[0], wrapped(words, mask, labels)):
        assert_matches(output, module, words, mask, labels)


# Models of Hugging Face, as users call them


def bert() -> tuple[nn.Module, int]:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), 50


def causal() -> tuple[nn.Module, int]:
    model = llama()
    model.config.use_cache = True  # as by default: keys and values of all layers are results too
    return model, 50


def step(
    run: nn.Module, module: nn.Module, words: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The loss, all gradients and the logits of words; the logits of padding."""
    module.zero_grad()
    output = run(words, mask, labels=labels)
    output.loss.backward()
    logits = output.logits.detach()
    return [output.loss.detach(), *gradients(module), logits[mask == 1]], logits[mask == 0]


@pytest.mark.parametrize("make", slow_except([bert, causal], causal))
def test_models_need_no_option(make: Any) -> None:
    torch.manual_seed(0)
    module, vocabulary = make()
    wrapped = ORTModule(module.train())
    for seed in range(3):
        torch.manual_seed(seed)
        mask = (torch.arange(40) < torch.randint(5, 30, (16, 1))).long()  # 43 % are real
        words = torch.randint(3, vocabulary, mask.shape) * mask
        labels = words.masked_fill((torch.rand(mask.shape) < 0.7) | (mask == 0), IGNORED)
        results, padding = step(wrapped, module, words, mask, labels)
        assert_matches(results, lambda m, *batch: step(m, m, *batch)[0], module, words, mask, labels, together=True)
        assert bool(padding.any()) == (seed == 0)
    assert list(wrapped.report().variants) != []


# Second operands of elementwise ops


class Shifted(Encoder):
    """Adds what has fewer or broadcast axes, or those of the tokens, to hidden states."""

    def __init__(self) -> None:
        super().__init__(bool_mask, head="labels")
        self.steps, self.sequence = nn.Parameter(torch.randn(1, 8, WIDTH)), nn.Linear(1, WIDTH)

    def _read(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        x = torch.tanh(x + self.steps[:, : x.size(1)])  # [1, steps, width]
        x = x * self.sequence(mask.sum(1, keepdim=True).to(x.dtype))[:, None]  # [batch, 1, width]
        x = x + self.words(labels.clamp(min=0))  # [batch, steps, width]
        return super()._read(x * self.norm.bias.exp(), mask, labels)  # [width]


def test_each_form_of_a_second_operand(decisions: list[bool]) -> None:
    torch.manual_seed(0)
    module = Shifted()
    wrapped = ORTModule(module, skip_padding="always")
    for form in (RIGHT, LEFT, INSIDE):
        check(wrapped, module, *batch_of(form))
    assert decisions == [True] * 3
