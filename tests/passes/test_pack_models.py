"""Models of Hugging Face on padded batches: they run without padding, and equal eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import transformers
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.testing import assert_no_worse_than_eager
from tests.passes.test_pack_tokens import IGNORED, check, decisions, results

__all__ = ["decisions"]  # a fixture

VOCABULARY = 50
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}


class Loss(nn.Module):
    """The loss of a model, by position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=words, attention_mask=mask, labels=labels).loss
        assert isinstance(loss, torch.Tensor)
        return loss


def gpt2() -> nn.Module:
    size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **size, **_ENDS))


def llama() -> nn.Module:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **size, **_ENDS)
    )


def t5() -> nn.Module:
    size = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 32, "use_cache": False}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2, **size)
    )


def bart() -> nn.Module:
    size = {f"{part}_{setting}": n for part in ("encoder", "decoder") for setting, n in
            (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY, d_model=16, max_position_embeddings=32, decoder_start_token_id=2, **size, **_ENDS
        )
    )


RIGHT = [[1] * 8, [1] * 3 + [0] * 5, [1] * 6 + [0] * 2]
LEFT = [row[::-1] for row in RIGHT]
# Which forms of padding each model leaves out: a table of relative positions is read by places that padding on the
# left shifts.
MODELS: Mapping[str, tuple[Callable[[], nn.Module], dict[str, bool]]] = {
    "gpt2": (gpt2, {"right": True, "left": True}),
    "llama": (llama, {"right": True, "left": True}),
    "t5": (t5, {"right": True, "left": False}),
    "bart": (bart, {"right": True, "left": True}),
}


@pytest.mark.slow  # of Llama: test_any_padding_and_labels_of_a_decoder_equal_eager
@pytest.mark.parametrize("name", MODELS)
def test_equals_eager(name: str, decisions: list[bool]) -> None:
    make, packs = MODELS[name]
    torch.manual_seed(0)
    module = Loss(make()).eval()  # no dropout
    wrapped = ORTModule(module, skip_padding="always")
    for form in (RIGHT, LEFT):
        mask = torch.tensor(form)
        words = torch.randint(3, VOCABULARY, mask.shape)
        before = nn.functional.pad(mask[:, :-1], (1, 0))  # of a causal model: who predicts a word must be no padding
        labels = words.masked_fill((mask == 0) | (before == 0), IGNORED)
        if name in ("t5", "bart"):
            labels = torch.randint(3, VOCABULARY, (len(form), 5))
        check(wrapped, module, words * mask, mask, labels)
    assert decisions == [packs["right"], packs["left"]]


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=12, deadline=None)
def test_any_padding_and_labels_of_a_decoder_equal_eager(data: st.DataObject) -> None:
    """Lengths from 0, on either side; any labels, also of padding, also none at all."""
    batch, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 8))
    lengths = data.draw(st.lists(st.integers(0, steps), min_size=batch, max_size=batch))
    places = torch.arange(steps)
    if data.draw(st.booleans(), label="on the left"):
        places = places.flip(0)
    mask = (places < torch.tensor(lengths)[:, None]).long()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    words = torch.randint(3, VOCABULARY, mask.shape, generator=generator)
    share = data.draw(st.sampled_from([0.0, 0.3, 1.0]), label="share of labels")
    ignored = torch.rand(mask.shape, generator=generator) >= share
    if data.draw(st.booleans(), label="none on padding"):
        ignored |= (mask == 0) | (nn.functional.pad(mask[:, :-1], (1, 0)) == 0)
    wrapped, module = decoder()
    check(wrapped, module, words * mask, mask, words.masked_fill(ignored, IGNORED))


@functools.cache
def decoder() -> tuple[ORTModule, nn.Module]:
    torch.manual_seed(0)
    module = Loss(llama()).eval()
    return ORTModule(module, skip_padding="always"), module


def test_a_decoder_is_packed_under_autocast(decisions: list[bool]) -> None:
    torch.manual_seed(0)
    module = Loss(llama()).eval()
    wrapped = ORTModule(module, skip_padding="always")
    for form in (RIGHT, LEFT):
        mask = torch.tensor(form)
        words = torch.randint(3, VOCABULARY, mask.shape)
        labels = words.masked_fill((mask == 0) | (nn.functional.pad(mask[:, :-1], (1, 0)) == 0), IGNORED)
        batch = words * mask, mask, labels
        got, eager = (autocast_results(run, module, *batch) for run in (wrapped, module))
        exact = results(module.double(), module, *batch)
        module.float()
        largest = max(t.abs().max().item() for t in exact)
        for index, (ours, theirs, right) in enumerate(zip(got, eager, exact, strict=True)):
            # Weights are float32, but nothing that reaches them is finer than bfloat16.
            assert_no_worse_than_eager(f"result {index}", ours.bfloat16(), theirs.bfloat16(), right, largest)
    assert decisions == [True, True]


def autocast_results(run: nn.Module, module: nn.Module, *batch: torch.Tensor) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return results(run, module, *batch)
