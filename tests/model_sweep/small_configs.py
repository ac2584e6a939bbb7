"""Configs of transformers at a size that trains in milliseconds: width 32, two layers, images of 32 x 32.

A field is set by its name, in nested configs as well. OVERRIDES holds what a class needs beside that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

WIDTH, HEADS, LAYERS, VOCABULARY, IMAGE, PATCH = 32, 4, 2, 64, 32, 8

_WIDTHS = (
    "hidden_size d_model dim embed_dim embedding_dim n_embd embedding_size projection_dim hidden_dim "
    "encoder_hidden_size decoder_hidden_size decoder_dim hidden_sizes_dim text_embed_dim q_hidden_size "
    "k_hidden_size v_hidden_size attention_hidden_size cross_attention_hidden_size word_embed_proj_dim "
    "decoder_embed_dim adapter_dim model_dim lm_hidden_size vision_hidden_size mask_feature_size "
    "feature_size conv_dim_single output_hidden_size out_hidden_size d_embed codebook_dim emb_dim"
)
_INNER = (
    "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim dim_feedforward moe_intermediate_size "
    "shared_expert_intermediate_size feedforward_dim d_inner hidden_dim_ff encoder_intermediate_size "
    "shared_intermediate_size dense_intermediate_size decoder_intermediate_size pooler_hidden_size mlp_dim "
    "expert_ffn_size ffn_hidden_size intermediate_dim block_ff_dim"
)
_LAYERS = (
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "encoder_num_hidden_layers decoder_num_hidden_layers num_self_attends_per_block predictor_num_hidden_layers "
    "num_fusion_layers num_decoder_blocks layers num_blocks depth"
)
_HEADS = (
    "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_cross_attention_heads num_self_attention_heads "
    "heads decoder_num_attention_heads encoder_num_attention_heads predictor_num_attention_heads linear_num_value_heads"
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
_VOCABULARIES = "vocab_size encoder_vocab_size decoder_vocab_size text_vocab_size n_token vocabulary_size"

SIZES: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), WIDTH),
    **dict.fromkeys(_INNER.split(), 48),
    **dict.fromkeys(_LAYERS.split(), LAYERS),
    **dict.fromkeys(_HEADS.split(), HEADS),
    **dict.fromkeys(_KEY_HEADS.split(), 2),
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
    "num_frames": 4,
    "context_length": 16,
    "prediction_length": 4,
}
# Special tokens beyond the small vocabulary would index outside of the embeddings.
_TOKENS = ("_token_id", "_token_index", "_token_ids", "_idx")


def small_config(config_class: Any, overrides: Mapping[str, Any] | None = None) -> Any:
    """An instance of a config class of transformers, small."""
    given = overrides or {}
    nested = config_class.sub_configs
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.init and field.name not in nested:
            value = _small(field.name, _default(field), len(values))
            if value is not None:
                values[field.name] = value
    for name, sub in nested.items():
        if dataclasses.is_dataclass(sub):
            values[name] = small_config(sub, given.get(name))
    values |= {name: value for name, value in given.items() if name not in nested}
    return config_class(**values)


def _small(name: str, default: Any, position: int) -> Any:
    """The small value of a field; None leaves its default."""
    if name in SIZES and default != 0 and (default is None or isinstance(default, (int, float, bool))):
        return SIZES[name]
    if name in _BY_STAGE and isinstance(default, (list, tuple)):
        return type(default)(_of_stage(name, stage) for stage in range(len(default)))
    if isinstance(default, int) and default >= VOCABULARY and name.endswith(_TOKENS):
        return position % 8 + 3
    return None


_BY_STAGE = frozenset(
    {
        "hidden_sizes", "embed_dims", "encoder_hidden_sizes", "depths", "num_heads", "num_attention_heads",
        "neck_hidden_sizes",
    }
)  # fmt: skip


def _of_stage(name: str, stage: int) -> int:
    if name == "depths":
        return 1
    return HEADS if "heads" in name else WIDTH * (1 + (stage > 1))


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None
