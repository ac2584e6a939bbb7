"""The workloads of published size, on a CPU: a step takes seconds on two cores.

    real             in float32; also in bfloat16 under autocast, where the processor has instructions for it
    real-rehearsal   the same code with tiny sizes, in float32 and bfloat16

Configurations are those of the published models, except Mixtral's: its experts, their number per token and the ratio of
their width are the published ones; width and layers are smaller. Weights are random.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from benchmarks import models
from benchmarks.variants import COMPILE, EAGER, ONNXTRAIN
from benchmarks.workload import Batch, Workload, autocast_loss, count_samples, count_tokens, model_loss

if TYPE_CHECKING:
    from onnxtrain.system.machine import Machine

_MAX_WARM_UP_S = 90.0
_ROUNDS = 5
_ROUNDS_OF_QWEN = 3  # its step takes longest
_REPEATS = 1  # a process takes up to a minute, most of it for the import and the weights


@dataclass(frozen=True)
class _Size:
    """The size of a model and of its batch.

    Attributes:
        config: the arguments of its configuration.
        rows: the number of sequences, images or audio clips in a batch.
        length: tokens of a sequence, pixels along each side of an image, or tokens of a transcript.
    """

    config: Mapping[str, Any]
    rows: int
    length: int


@dataclass(frozen=True)
class _Model:
    """A model to train.

    Attributes:
        title: with fields for `rows` and `length`.
        make_model: returns it for a size; with `narrow`, for autocast to bfloat16.
        make_batch: returns one batch for a size.
        published, tiny: its size in "real" and in "real-rehearsal".
        fields: further fields of its workloads.
    """

    name: str
    title: str
    make_model: Callable[[_Size, bool], nn.Module]
    make_batch: Callable[[_Size], Batch]
    published: _Size
    tiny: _Size
    fields: Mapping[str, Any] = field(default_factory=dict)


def _bert(size: _Size, narrow: bool) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**size.config))


def _gpt2(size: _Size, narrow: bool) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **size.config))


def _vit(size: _Size, narrow: bool) -> nn.Module:
    # Without a problem type, the first forward writes it into the configuration.
    config = transformers.ViTConfig(problem_type="single_label_classification", **size.config)
    return transformers.ViTForImageClassification(config)


def _whisper(size: _Size, narrow: bool) -> nn.Module:
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(use_cache=False, **size.config))


def _mixtral(size: _Size, narrow: bool) -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(use_cache=False, **size.config))


def _qwen(size: _Size) -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(use_cache=False, **size.config))


def _qwen_lora(size: _Size, narrow: bool) -> nn.Module:
    return _with_adapters(_qwen(size))


def _qwen_qlora(size: _Size, narrow: bool) -> nn.Module:
    """Return it with 4-bit weights: as the documentation of PEFT does, from a checkpoint."""
    import peft  # noqa: PLC0415  # an optional package

    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if narrow else torch.float32,
    )
    with tempfile.TemporaryDirectory() as folder:
        _qwen(size).bfloat16().save_pretrained(folder)
        model = transformers.Qwen2ForCausalLM.from_pretrained(
            folder, quantization_config=quantization, device_map="cpu"
        )
    return _with_adapters(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))


def _with_adapters(model: transformers.PreTrainedModel) -> nn.Module:
    import peft  # noqa: PLC0415  # an optional package

    adapters = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted: nn.Module = peft.get_peft_model(model, adapters)
    return adapted


def _masked_tokens(size: _Size) -> Batch:
    return models.masked_tokens(size.rows, size.length, size.config["vocab_size"])


def _next_tokens(size: _Size) -> Batch:
    return models.next_tokens(size.rows, size.length, size.config["vocab_size"])


def _images(size: _Size) -> Batch:
    return models.classified_images(size.rows, size.length, "pixel_values")


def _transcripts(size: _Size) -> Batch:
    """Return spectrograms of clips, each of the full length, and transcripts."""
    frames = 2 * size.config["max_source_positions"]  # a convolution halves their number
    return {
        "input_features": torch.randn(size.rows, size.config["num_mel_bins"], frames),
        "labels": torch.randint(1, size.config["vocab_size"], (size.rows, size.length)),
    }


_TINY_QWEN = _Size(
    {
        "vocab_size": 96,
        "hidden_size": 64,  # bitsandbytes quantizes in blocks of 64
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    rows=1,
    length=16,
)
_QWEN = _Size(
    {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    rows=1,
    length=512,
)
_MODELS = (
    _Model(
        name="bert-base",
        title="BERT-base, masked language model, {rows} × {length} tokens",
        make_model=_bert,
        make_batch=_masked_tokens,
        published=_Size({"vocab_size": 30522}, rows=8, length=128),  # the rest is the default
        tiny=_Size(
            {
                "vocab_size": 96,
                "hidden_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 3,
                "intermediate_size": 32,
            },
            rows=2,
            length=16,
        ),
    ),
    _Model(
        name="gpt2-124m",
        title="GPT-2 of 124 million parameters, {rows} × {length} tokens",
        make_model=_gpt2,
        make_batch=_next_tokens,
        published=_Size({"vocab_size": 50257}, rows=4, length=256),  # the rest is the default
        tiny=_Size(
            {"vocab_size": 96, "n_embd": 24, "n_layer": 1, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0},
            rows=2,
            length=16,
        ),
    ),
    _Model(
        name="vit-base",
        title="ViT-base, {rows} images of {length} × {length} in patches of 16 × 16",
        make_model=_vit,
        make_batch=_images,
        published=_Size({"num_labels": 1000}, rows=8, length=224),  # the rest is the default
        tiny=_Size(
            {
                "num_labels": 10,
                "image_size": 32,
                "hidden_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 3,
                "intermediate_size": 32,
            },
            rows=2,
            length=32,
        ),
        fields={"unit": "images", "items": count_samples},
    ),
    _Model(
        name="whisper-tiny",
        title="Whisper-tiny, {rows} clips of 30 s to {length} tokens each",
        make_model=_whisper,
        make_batch=_transcripts,
        # The rest is the default.
        published=_Size({"vocab_size": 51865, "num_mel_bins": 80, "max_source_positions": 1500}, rows=4, length=64),
        tiny=_Size(
            {
                "vocab_size": 96,
                "num_mel_bins": 8,
                "max_source_positions": 12,
                "max_target_positions": 16,
                "d_model": 24,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 3,
                "decoder_attention_heads": 3,
                "encoder_ffn_dim": 32,
                "decoder_ffn_dim": 32,
                **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
            },
            rows=2,
            length=8,
        ),
        fields={"unit": "clips", "items": count_samples},
    ),
    _Model(
        name="qwen-lora",
        title="Qwen2.5-like, 0.5 billion parameters, LoRA, {rows} × {length} tokens",
        make_model=_qwen_lora,
        make_batch=_next_tokens,
        published=_QWEN,
        tiny=_TINY_QWEN,
        fields={"packages": ("peft",), "rounds": _ROUNDS_OF_QWEN},
    ),
    _Model(
        name="qwen-qlora",
        title="Qwen2.5-like, 0.5 billion parameters, LoRA on 4-bit weights, {rows} × {length} tokens",
        make_model=_qwen_qlora,
        make_batch=_next_tokens,
        published=_QWEN,
        tiny=_TINY_QWEN,
        fields={"packages": ("peft", "bitsandbytes", "accelerate"), "rounds": _ROUNDS_OF_QWEN},
    ),
    _Model(
        name="mixtral",
        title="Mixtral-like (4 × 512, 8 experts, 2 per token), {rows} × {length} tokens",
        make_model=_mixtral,
        make_batch=_next_tokens,
        published=_Size(
            {
                "vocab_size": 32000,
                "hidden_size": 512,
                "intermediate_size": 1792,  # 3.5 times the width, as published
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            rows=8,
            length=128,
        ),
        tiny=_Size(
            {
                "vocab_size": 96,
                "hidden_size": 24,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            rows=2,
            length=16,
        ),
    ),
)


def _training(model: _Model, *, narrow: bool, rehearsal: bool) -> Workload:
    size = model.tiny if rehearsal else model.published
    title = model.title.format(rows=size.rows, length=size.length)
    fields: dict[str, Any] = {"items": count_tokens, "rounds": _ROUNDS, **model.fields}
    return Workload(
        name=f"{model.name}{'-bf16' if narrow else ''}{'-rehearsal' if rehearsal else ''}",
        title=f"{title}{', autocast to bfloat16' if narrow else ''}{', tiny' if rehearsal else ''}",
        make_model=functools.partial(model.make_model, size, narrow),
        make_batches=lambda: [model.make_batch(size)],
        loss=autocast_loss if narrow else model_loss,
        narrow=narrow,
        variants=(EAGER, ONNXTRAIN, COMPILE),
        max_warm_up_s=_MAX_WARM_UP_S,
        repeats=_REPEATS,
        **fields,
    )


REAL = tuple(_training(model, narrow=narrow, rehearsal=False) for narrow in (False, True) for model in _MODELS)
REAL_REHEARSAL = tuple(_training(model, narrow=narrow, rehearsal=True) for narrow in (False, True) for model in _MODELS)
REAL_WORKLOADS = {workload.name: workload for workload in (*REAL, *REAL_REHEARSAL)}


def real_group(machine: Machine) -> tuple[Workload, ...]:
    """Return the workloads that "real" selects on a machine.

    Without instructions for bfloat16, a step in it takes tens of seconds; those are then measured by name only.
    """
    has_bfloat16 = machine.rates.narrow[torch.bfloat16] > 1
    return tuple(workload for workload in REAL if has_bfloat16 or not workload.narrow)
