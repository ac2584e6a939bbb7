"""Configs of transformers at a size that trains in milliseconds: width 32, two layers, images of 32 x 32.

A field is set by its name, in nested configs as well. `overrides` holds the fields of single classes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import CONFIG_MAPPING

from tests.model_sweep.overrides import CONFIG_OVERRIDES

WIDTH, HEADS, LAYERS, VOCABULARY, IMAGE, PATCH = 32, 4, 2, 64, 32, 8

_WIDTHS = (
    "hidden_size d_model dim embed_dim embedding_dim n_embd embedding_size projection_dim hidden_dim "
    "encoder_hidden_size decoder_hidden_size decoder_dim hidden_sizes_dim text_embed_dim q_hidden_size "
    "k_hidden_size v_hidden_size attention_hidden_size cross_attention_hidden_size word_embed_proj_dim "
    "decoder_embed_dim adapter_dim model_dim lm_hidden_size vision_hidden_size mask_feature_size "
    "feature_size conv_dim_single output_hidden_size out_hidden_size d_embed codebook_dim emb_dim d_latents "
    "audio_hidden_size text_hidden_size pred_hidden_size fusion_hidden_size head_hidden_size image_token_embed_dim "
    "vision_output_dim projector_input_dim projector_output_dim projector_hidden_size base_channels latent_channels "
    "encoder_hidden_dim hidden_size_global"
)
_INNER = (
    "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim dim_feedforward moe_intermediate_size "
    "shared_expert_intermediate_size feedforward_dim d_inner hidden_dim_ff encoder_intermediate_size "
    "shared_intermediate_size dense_intermediate_size decoder_intermediate_size pooler_hidden_size mlp_dim "
    "expert_ffn_size ffn_hidden_size expert_ffn_hidden_size intermediate_dim block_ff_dim"
)
_LAYERS = (
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "encoder_num_hidden_layers decoder_num_hidden_layers num_self_attends_per_block predictor_num_hidden_layers "
    "num_fusion_layers num_decoder_blocks layers num_blocks depth pred_num_hidden_layers"
)
_HEADS = (
    "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_cross_attention_heads num_self_attention_heads "
    "heads decoder_num_attention_heads encoder_num_attention_heads predictor_num_attention_heads "
    "linear_num_value_heads pred_num_attention_heads"
)
_KEY_HEADS = (
    "num_key_value_heads n_kv_heads multi_query_group_num encoder_num_key_value_heads "
    "decoder_num_key_value_heads linear_num_key_heads num_kv_heads"
)
_HEAD_DIMS = (
    "head_dim d_kv kv_channels attention_head_dim d_head global_head_dim attention_key_value_dim "
    "linear_key_head_dim linear_value_head_dim v_head_dim qk_nope_head_dim qk_head_dim"
)
_POSITIONS = (
    "max_position_embeddings n_positions n_ctx max_target_positions max_source_positions max_seq_len "
    "max_sequence_length max_seq_length original_max_position_embeddings seq_length max_encoder_position_embeddings "
    "max_decoder_position_embeddings max_2d_position_embeddings max_length_positions"
)
_VOCABULARIES = (
    "vocab_size encoder_vocab_size decoder_vocab_size text_vocab_size n_token vocabulary_size "
    "vocab_size_per_layer_input num_embeddings codebook_size"
)

SIZES: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), WIDTH),
    **dict.fromkeys(_INNER.split(), 48),
    **dict.fromkeys(_LAYERS.split(), LAYERS),
    **dict.fromkeys(_HEADS.split(), HEADS),
    **dict.fromkeys(_HEAD_DIMS.split(), WIDTH // HEADS),
    **dict.fromkeys(_POSITIONS.split(), 128),
    **dict.fromkeys(_VOCABULARIES.split(), VOCABULARY),
    "qk_rope_head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
    "num_mel_bins": 16,
    "num_queries": 6,
    "mamba_d_state": 8,
    "state_size": 8,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "n_mels": 16,
    "time_step_rank": 4,
    "ssm_state_size": 8,
    "num_codebooks": 2,
    "use_cache": False,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "speech_encoder_layerdrop": 0.0,
    "num_frames": 4,
    "frames_per_clip": 4,
    "crop_size": IMAGE,
    "num_filters": 4,
    "num_kv_shared_layers": 0,
    "rotary_dim": 4,
    "attention_window": 4,
    "n_groups": 2,
    "mm_tokens_per_image": 4,
    "mask_time_length": 2,
    "mask_feature_length": 2,
    "feature_projection_input_dim": 16,
    "context_length": 16,
    "prediction_length": 4,
    "image_grid_pinpoints": [[IMAGE, IMAGE]],
}
# Special tokens beyond the small vocabulary would index outside of the embeddings.
_TOKENS = ("_token_id", "_token_index", "_token_ids", "_idx")
# Frequencies of time, height and width: together half of a head.
_MULTIMODAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def set_layers(count: int) -> None:
    """Let the configs of this process have this number of layers where no override says otherwise.

    Layers from the third on are copies of the second in a graph, and from ten on some of them are omitted: two layers
    show neither.
    """
    SIZES.update(dict.fromkeys(_LAYERS.split(), count))


def small_config(config_class: Any, overrides: Mapping[str, Any]) -> Any:
    """An instance of a config class of transformers, small, with some fields given."""
    return config_class(**_small_values(config_class, {}, overrides))


def _small_values(config_class: Any, from_parent: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a config class. `from_parent` holds what the config around it sets by default."""
    nested = config_class.sub_configs
    overrides = CONFIG_OVERRIDES.get(config_class.__name__, {}) | overrides
    values: dict[str, Any] = {}
    special_tokens = itertools.cycle(range(3, 11))
    for field in dataclasses.fields(config_class):
        if field.init and field.name not in nested:
            default = from_parent.get(field.name, _default(field))
            value = _small(field.name, default, special_tokens)
            if field.name == "rope_parameters" and "mrope_section" in config_class.ignore_keys_at_rope_validation:
                value = _MULTIMODAL_ROPE
            if value is not None:
                values[field.name] = value
            elif field.name in from_parent:
                values[field.name] = default
    if from_parent.get("out_indices"):
        values["out_indices"] = from_parent["out_indices"]
    values |= _key_heads(config_class, from_parent)
    _select_backbone_stages(values)
    for name, sub_class in nested.items():
        sub_overrides = dict(overrides.get(name, {}))
        sub_class, sub_from_parent = _sub_config(config_class, name, sub_class, sub_overrides.pop("model_type", None))
        if sub_class is not None:
            values[name] = sub_class(**_small_values(sub_class, sub_from_parent, sub_overrides))
    return values | {name: value for name, value in overrides.items() if name not in nested}


def _sub_config(
    config_class: Any, name: str, declared: Any, model_type: str | None
) -> tuple[Any | None, dict[str, Any]]:
    """The class of a nested config, and the values that the outer class sets in it by default.

    AutoConfig is declared where any model may be nested: then the class of the default is used.
    """
    if model_type is not None:
        return CONFIG_MAPPING[model_type], {}
    if dataclasses.is_dataclass(declared):
        return declared, {}
    nested_default = getattr(config_class(), name, None)
    if nested_default is None:
        return None, {}
    sub_class = type(nested_default)
    defaults = sub_class()
    names = {field.name for field in dataclasses.fields(sub_class) if field.init} | {"out_indices"}
    return sub_class, {
        name: value
        for name in names - _DERIVED - sub_class.sub_configs.keys()
        if (value := getattr(nested_default, name, None)) != getattr(defaults, name, None)
    }


def _key_heads(config_class: Any, from_parent: Mapping[str, Any]) -> dict[str, int]:
    """Fewer heads of keys than of queries where the defaults have fewer."""
    defaults = {field.name: _default(field) for field in dataclasses.fields(config_class)} | dict(from_parent)
    heads = [defaults.get(name) for name in _HEADS.split()]
    names = [name for name in _KEY_HEADS.split() if defaults.get(name) is not None]
    return {name: HEADS if defaults[name] in heads else 2 for name in names}


def _select_backbone_stages(values: dict[str, Any]) -> None:
    """Read the features of a backbone behind its first layers where the default indices are those of a deeper one."""
    indices, layers = values.get("out_indices"), values.get("num_hidden_layers")
    if indices is not None and layers is not None and max(indices) > layers:
        values["num_hidden_layers"] = max(layers, len(indices))
        values["out_indices"] = list(range(1, len(indices) + 1))


def _small(name: str, default: Any, special_tokens: Iterator[int]) -> Any:
    """The small value of a field; None leaves its default."""
    if name == "pad_token_id" and default is None:
        return 0  # heads of sequence classification look for the last token that is no padding
    if name == "patch_size" and isinstance(default, int) and default < PATCH:
        return None
    if name in SIZES and default != 0 and (default is None or isinstance(default, (int, float, bool))):
        return SIZES[name]
    if name == "image_grid_pinpoints":
        return SIZES[name]
    if name in _BY_STAGE and isinstance(default, (list, tuple)):
        return [_of_stage(name, stage) for stage in range(len(default))]
    if isinstance(default, int) and default >= VOCABULARY and name.endswith(_TOKENS):
        return next(special_tokens)
    return None


# Computed from the number of layers and the widths, which get small, or from out_indices.
_DERIVED = frozenset(
    {
        "layer_types", "mlp_layer_types", "layers_block_type", "rope_parameters", "head_dim", "_out_features",
        "_out_indices",
    }
)  # fmt: skip
_DEPTHS_BY_STAGE = frozenset({"depths", "depth", "num_block_repeats", "stage_num_blocks"})
_BY_STAGE = _DEPTHS_BY_STAGE | {
    "hidden_sizes", "embed_dims", "embed_dim", "encoder_hidden_sizes", "num_heads", "num_groups", "num_attention_heads",
    "neck_hidden_sizes", "encoder_in_channels", "decoder_in_channels",
}  # fmt: skip


def _of_stage(name: str, stage: int) -> int:
    if name in _DEPTHS_BY_STAGE:
        return 1
    if "heads" in name or "groups" in name:
        return HEADS
    if name == "decoder_in_channels":
        return WIDTH
    first = 1 if name == "encoder_in_channels" else 0  # the encoder of a detector reads the stages behind the first
    return WIDTH * (1 + (stage + first > 1))


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None
