"""The last layers and the loss skip tokens with ignored labels: results equal eager's, and the graph shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from onnxtrain import ORTModule
from onnxtrain.errors import OptionError, OutputNotKeptError
from onnxtrain.testing import assert_no_worse_than_eager
from tests.passes.less_work import (
    CLASSES,
    WIDTH,
    WORDS,
    applied_by,
    check_equals_eager,
    forward_graph,
    refusals,
    shapes,
    wrap,
)
from tests.thinned import slow_except
from tests.zoo.entry import Call, Draw, ragged_mask

IGNORED = -100


class Words(nn.Module):
    """Scores of each token, and the loss that `options` say; how scores lie says `layout`."""

    def __init__(self, layout: str = "flat", gives: str = "loss", **options: Any) -> None:
        super().__init__()
        self.layout, self.gives, self.options = layout, gives, options
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.score = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("weights", torch.linspace(0.5, 2, CLASSES))

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.embed(words)
        hidden = hidden + hidden.mean(1, keepdim=True)  # mixes tokens: here the rows end
        logits = self.score(self.norm(hidden + F.gelu(self.mix(hidden))))
        options = dict(self.options)
        if options.pop("weighted", False):
            options["weight"] = self.weights.to(logits.dtype)
        if self.layout == "flat":
            loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **options)
        elif self.layout == "classes second":
            loss = F.cross_entropy(logits.transpose(1, 2), labels, **options)
        elif self.layout == "log probabilities":
            loss = F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), labels.flatten(), **options)
        elif self.layout == "shifted by hand":
            logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
            loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **options)
        elif self.layout == "of inner steps":
            loss = F.cross_entropy(logits[:, 1:-2].flatten(0, 1), labels[:, 1:-2].flatten(), **options)
        else:
            assert self.layout == "shifted"
            following = F.pad(labels, (0, 1), value=options.get("ignore_index", IGNORED))[..., 1:]
            loss = F.cross_entropy(logits.view(-1, CLASSES), following.reshape(-1), **options)
        return loss if self.gives == "loss" else (loss, logits)


def labelled(draw: Draw, batch: int, length: int, share: float = 0.3, ignored: int = IGNORED) -> Call:
    words, labels = draw.ints(WORDS, batch, length), draw.ints(CLASSES, batch, length)
    keeps = draw.floats(batch, length).sigmoid() < share
    keeps[0, -1] = True
    return Call((words, labels.masked_fill(~keeps, ignored)))


VARIANTS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "weights": {"weighted": True},
    "smoothing": {"label_smoothing": 0.2},
    "smoothing sum": {"label_smoothing": 0.2, "reduction": "sum"},
    "smoothing with weights": {"label_smoothing": 0.2, "weighted": True},
    "another index": {"ignore_index": 0},
    "classes second": {"layout": "classes second"},
    "classes second, smoothing": {"layout": "classes second", "label_smoothing": 0.2},
    "shifted": {"layout": "shifted"},
    "shifted by hand": {"layout": "shifted by hand"},
    "shifted by hand, sum with weights": {"layout": "shifted by hand", "reduction": "sum", "weighted": True},
    "of inner steps": {"layout": "of inner steps"},
    "log probabilities": {"layout": "log probabilities"},
}


FEW = ("smoothing with weights", "another index", "classes second, smoothing", "shifted by hand")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in FEW else (pytest.mark.slow,))
        for name, options in VARIANTS.items()
    ],
)
def test_loss_and_gradients_equal_eager_on_labelled_rows(options: dict[str, Any], tmp_path: Path) -> None:
    ignored = options.get("ignore_index", IGNORED)

    def call(draw: Draw, batch: int, length: int) -> Call:
        return labelled(draw, batch, length, ignored=ignored)

    check_equals_eager(lambda: Words(**options), call)
    model = wrap(Words(**options), tmp_path)
    model(*call(Draw(0), 3, 9).args).backward()
    assert applied_by(model, "skip_ignored_labels")
    linear = shapes(forward_graph(tmp_path), "Linear")
    assert len(linear) == 2
    assert all(shape.startswith("[1,count_") for shape in linear), linear


@hypothesis.given(st.integers(1, 4), st.integers(1, 6), st.floats(0, 1), st.integers(0, 10**6))
@hypothesis.settings(max_examples=12, deadline=None)
def test_any_labels_equal_eager(batch: int, steps: int, share: float, seed: int) -> None:
    """No label at all, all of them, one: in any batch, on one graph."""
    _check(_trained(), *_random_labels(batch, steps, share, seed))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_without_labels_equals_eager(reduction: str) -> None:
    """The mean of nothing is NaN, the sum is 0."""
    torch.manual_seed(0)
    module = Words(reduction=reduction)
    words, labels = _random_labels(3, 5, 0.0, 1)
    _check((ORTModule(module), module), *_random_labels(3, 5, 1.0, 1))
    _check((ORTModule(module), module), words, labels)


def _random_labels(batch: int, steps: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words, labels = (torch.randint(0, n, (batch, steps), generator=generator) for n in (WORDS, CLASSES))
    return words, labels.masked_fill(torch.rand(batch, steps, generator=generator) >= share, IGNORED)


_TRAINED: list[tuple[ORTModule, nn.Module]] = []


def _trained() -> tuple[ORTModule, nn.Module]:
    if not _TRAINED:
        torch.manual_seed(0)
        module = Words(label_smoothing=0.1)
        _TRAINED.append((ORTModule(module), module))
    return _TRAINED[0]


def _check(pair: tuple[ORTModule, nn.Module], words: torch.Tensor, labels: torch.Tensor) -> None:
    wrapped, module = pair
    results = []
    for run in (wrapped, module):
        module.zero_grad()
        loss = run(words, labels)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in module.parameters())])
    module.double().zero_grad()
    loss = module(words, labels)
    loss.backward()
    exact = [loss.detach(), *(p.grad.clone() for p in module.parameters())]
    module.float()
    largest = max(t.nan_to_num().abs().max().item() for t in exact)
    for got, eager, right in zip(*results, exact, strict=True):
        assert_no_worse_than_eager("result", got, eager, right, largest)


# Language models


class OnlyLoss(nn.Module):
    """ORTModule's users know it as ModuleWithLoss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.model(**inputs).loss  # type: ignore[no-any-return]


_SMALL = {"vocab_size": 50, "use_cache": False}


def _language_model(kind: str, dropout: float = 0.0) -> nn.Module:
    if kind == "bert":
        return transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                max_position_embeddings=40, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
            )
        )  # fmt: skip
    if kind == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=40, eos_token_id=1, **drops, **_SMALL)
        )
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
            max_position_embeddings=40, **_SMALL,
        )
    )  # fmt: skip


def _prompted(draw: Draw, batch: int, length: int) -> Call:
    words, mask = draw.ints(50, batch, length), ragged_mask(batch, length)
    labels = words.masked_fill((mask == 0) | (torch.arange(length) < length // 2), IGNORED)
    return Call(kwargs={"input_ids": words, "attention_mask": mask, "labels": labels})


@pytest.mark.parametrize("kind", slow_except(["bert", "gpt2", "llama"], "bert"))
def test_a_language_model_equals_eager_and_scores_labelled_tokens_only(kind: str, tmp_path: Path) -> None:
    # Llama computes its norms in float32 also where the model is in float64: there is no other result to compare with.
    dtypes = (torch.float32,) if kind == "llama" else None
    check_equals_eager(lambda: OnlyLoss(_language_model(kind)), _prompted, ((3, 9), (2, 6)), dtypes=dtypes)
    model = wrap(OnlyLoss(_language_model(kind)), tmp_path)
    model(**_prompted(Draw(0), 3, 9).kwargs).backward()
    scores = [s for s in shapes(forward_graph(tmp_path), "Linear") if s.endswith(",50]")]
    assert len(scores) == 1
    assert scores[0].startswith("[1,count_")


# Refusals


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gives": "both"}, "keep_outputs"),
        ({"reduction": "none"}, "not reduced"),
    ],
)
def test_refused_forms_equal_eager_and_have_a_reason(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    def loss(output: Any) -> torch.Tensor:
        return output[0] if isinstance(output, tuple) else output.mean()

    check_equals_eager(lambda: Words(**options), labelled, ((3, 9), (2, 4)), loss)
    model = wrap(Words(**options), tmp_path)
    loss(model(*labelled(Draw(0), 3, 9).args)).backward()
    assert any(reason in text for text in refusals(model, "skip_ignored_labels"))
    assert not applied_by(model, "skip_ignored_labels")


def test_a_loss_over_samples_is_unchanged(tmp_path: Path) -> None:
    class Samples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.score(x), labels)

    model = wrap(Samples(), tmp_path)
    model(torch.randn(4, WIDTH), torch.tensor([1, 0, IGNORED, 2])).backward()
    assert any("not the tokens of sequences" in text for text in refusals(model, "skip_ignored_labels"))
    assert not applied_by(model, "skip_ignored_labels")


# keep_outputs


def test_outputs_that_are_not_kept_raise_and_name_the_option(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = wrap(_language_model("bert"), tmp_path, keep_outputs=("loss",))
    call = _prompted(Draw(0), 3, 9)
    output = model(**call.kwargs)
    output.loss.backward()
    assert type(output) is type(model.module(**call.kwargs))
    assert applied_by(model, "skip_ignored_labels")
    uses = (
        lambda logits: logits.shape, lambda logits: logits[0], lambda logits: logits + 1, torch.argmax, len, list,
        lambda logits: torch.ones(2) * logits, bool,
    )  # fmt: skip
    for use in uses:
        with pytest.raises(OutputNotKeptError, match="keep_outputs"):
            use(output.logits)


def test_kept_outputs_equal_eager() -> None:
    torch.manual_seed(0)
    module = Words(gives="both")
    words, labels = _random_labels(3, 5, 0.4, 1)
    wrapped = ORTModule(module, keep_outputs=("0",))
    results = []
    for run in (wrapped, module):
        module.zero_grad()
        loss, _ = run(words, labels)
        (loss**2).backward(create_graph=True)
        results.append([loss.detach(), *(p.grad.detach().clone() for p in module.parameters())])
    for got, eager in zip(*results, strict=True):
        assert_no_worse_than_eager("result", got, eager, eager.double(), 1.0)
    logits = ORTModule(module, keep_outputs="1")(words, labels)[1]
    assert_no_worse_than_eager("logits", logits, module(words, labels)[1], module(words, labels)[1].double())


def test_an_output_that_the_module_does_not_have_is_an_error() -> None:
    with pytest.raises(OptionError, match="loss"):
        ORTModule(_language_model("bert"), keep_outputs=("lost",))(**_prompted(Draw(0), 3, 9).kwargs)
