"""Transformers built from their classes: two layers of width 32."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.zoo.entry import Call, Draw, ZooModel, own_loss, ragged_mask, wide

VOCABULARY = 50
CLASSES = 3
IGNORED = -100  # the label of a token that has none

_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "attention_dropout": 0.1,
    "use_cache": False,
}


def _bert_classifier() -> torch.nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**_ENCODER, num_labels=CLASSES))


def _bert_masked_lm() -> torch.nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_ENCODER))


def _roberta() -> torch.nn.Module:
    config = transformers.RobertaConfig(**_ENCODER, num_labels=CLASSES, type_vocab_size=1, pad_token_id=1)
    return transformers.RobertaForSequenceClassification(config)


def _distilbert() -> torch.nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=40
    )
    return transformers.DistilBertForTokenClassification(config)


def _gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=40, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def _qwen2() -> torch.nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_DECODER, tie_word_embeddings=True))


def _mistral() -> torch.nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_DECODER, sliding_window=4))


def _t5() -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _bart() -> torch.nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=40,
        attention_dropout=0.1,
        activation_dropout=0.1,
        use_cache=False,
    )
    return transformers.BartForConditionalGeneration(config)


def _vit() -> torch.nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        image_size=12,
        patch_size=4,
        num_labels=CLASSES,
    )
    return transformers.ViTForImageClassification(config)


def _tokens(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return {
        "input_ids": draw.ints(VOCABULARY, batch, length, low=4),
        "attention_mask": ragged_mask(batch, length),
    }


def _padded(draw: Draw, batch: int, length: int, padding: int) -> dict[str, Any]:
    batch_arguments = _tokens(draw, batch, length)
    batch_arguments["input_ids"] = batch_arguments["input_ids"].masked_fill(
        batch_arguments["attention_mask"] == 0, padding
    )
    return batch_arguments


def _for_class(draw: Draw, batch: int, length: int) -> Call:
    return Call(kwargs={**_padded(draw, batch, length, 1), "labels": draw.ints(CLASSES, batch)})


def _for_pair(draw: Draw, batch: int, length: int) -> Call:
    kinds = (torch.arange(length) >= length // 2).long().expand(batch, length)
    tokens = _padded(draw, batch, length, 0)
    return Call(kwargs={**tokens, "token_type_ids": kinds.contiguous(), "labels": draw.ints(CLASSES, batch)})


def _for_tags(draw: Draw, batch: int, length: int) -> Call:
    tokens = _tokens(draw, batch, length)
    return Call(kwargs={**tokens, "labels": draw.ints(2, batch, length)})


def _for_words(draw: Draw, batch: int, length: int) -> Call:
    """Labels at tokens only, and of those at every second."""
    tokens = _tokens(draw, batch, length)
    unlabeled = (tokens["attention_mask"] == 0) | (torch.arange(length) % 2 == 1)
    return Call(kwargs={**tokens, "labels": tokens["input_ids"].masked_fill(unlabeled, IGNORED)})


def _for_next_word(draw: Draw, batch: int, length: int) -> Call:
    tokens = _tokens(draw, batch, length)
    labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, IGNORED)
    return Call(kwargs={**tokens, "labels": labels})


def _without_mask(draw: Draw, batch: int, length: int) -> Call:
    words = draw.ints(VOCABULARY, batch, length)
    return Call(kwargs={"input_ids": words, "labels": words.clone()})


def _translation(draw: Draw, batch: int, length: int) -> Call:
    target = length + 2
    labels = draw.ints(VOCABULARY, batch, target, low=4).masked_fill(ragged_mask(batch, target) == 0, IGNORED)
    return Call(kwargs={**_tokens(draw, batch, length), "labels": labels})


def _images(draw: Draw, batch: int, length: int) -> Call:
    return Call(kwargs={"pixel_values": draw.floats(batch, 3, 12, 12), "labels": draw.ints(CLASSES, batch)})


def _with_logits(output: Any) -> torch.Tensor:
    """Two outputs have a gradient, and at length 1, where no next word is left to predict, the logits still have one.

    The model's own loss is NaN there, in eager too: it is skipped by its value.
    """
    loss = own_loss(output)
    return torch.where(loss.isnan(), 0.0, loss) + 0.01 * wide(output.logits).logsumexp(-1).square().mean()


MODELS = (
    ZooModel("bert-classifier", _bert_classifier, _for_pair),
    ZooModel("bert-masked-lm", _bert_masked_lm, _for_words),
    ZooModel("roberta", _roberta, _for_class),
    ZooModel("distilbert", _distilbert, _for_tags),
    ZooModel("gpt2", _gpt2, _without_mask, _with_logits),
    ZooModel("llama", _llama, _for_next_word, _with_logits),
    ZooModel("qwen2", _qwen2, _without_mask, _with_logits),
    ZooModel("mistral", _mistral, _for_next_word, _with_logits),
    ZooModel("t5", _t5, _translation),
    ZooModel("bart", _bart, _translation),
    ZooModel("vit", _vit, _images, sizes=((3, 0), (1, 0), (5, 0))),  # the model fixes the size of its images
)
