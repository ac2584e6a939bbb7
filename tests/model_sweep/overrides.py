"""Fields of single configs and models beside the sizes of `small_configs`."""

from __future__ import annotations

from typing import Any

_DECODER_START = {"decoder_start_token_id": 0}
# A quarter of the channels of EfficientNet-B0; the last convolution has round_filters(1280) of them.
_EFFICIENTNET = {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}

# By the name of a config class, wherever it is nested.
CONFIG_OVERRIDES: dict[str, dict[str, Any]] = {
    "AlignConfig": {"projection_dim": 80},  # round_filters(320) of its vision model
    "AlignVisionConfig": _EFFICIENTNET,
    "BitConfig": {"num_groups": 4},
    "BltConfig": {"encoder_hash_byte_group_vocab": 64},
    "BrosConfig": {"hidden_size": 64},  # the sinusoids have an eighth of a quarter of it
    "ChameleonConfig": {"vocabulary_map": {"<image>": 3}},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "CvtConfig": {"depth": [1, 2, 3]},  # a stage reads the dropout rate at its own index among its layers
    "DINOv3ConvNextConfig": {"hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1]},
    "DeepseekVLConfig": {"image_token_id": 3},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DepthProConfig": {"patch_size": 32},
    "Dots1Config": {"n_shared_experts": 1},
    "Data2VecVisionConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "DbrxAttentionConfig": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0},
    "DepthAnythingConfig": {"reassemble_hidden_size": 32},
    "DPTConfig": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "DonutSwinConfig": {"patch_size": 2, "window_size": 2},
    "EfficientNetConfig": _EFFICIENTNET,
    "Emu3Config": {"vocabulary_map": {"<image>": 3, "<|extra_200|>": 4}},
    "Ernie4_5_VLMoeTextConfig": {"moe_intermediate_size": [48, 48]},
    "Florence2VisionConfig": {  # two stages, as for Hiera
        "depths": [1, 1],
        "embed_dim": [32, 64],
        "num_heads": [4, 4],
        "num_groups": [4, 4],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "window_size": 4,
    },
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},  # a quarter of the text model's width
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "GlmAsrEncoderConfig": {"intermediate_size": 128},  # four frames make an embedding
    "GraniteSpeechEncoderConfig": {"input_dim": 16},
    "GraniteSpeechPlusEncoderConfig": {"input_dim": 16},
    "HGNetV2Config": {
        "stage_in_channels": [48, 32, 32, 64],
        "stage_mid_channels": [16, 16, 16, 16],
        "stage_out_channels": [32, 32, 64, 64],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    # Two stages: each one divides the symbolic sizes again, and the capture of four takes minutes.
    "HieraConfig": {
        "image_size": [32, 32],
        "masked_unit_size": [2, 2],
        "depths": [1, 1],
        "num_heads": [4, 4],
        "num_query_pool": 1,
        "masked_unit_attention": [True, False],
        "decoder_depth": 1,
        "decoder_num_heads": 4,
    },
    "LayoutLMv3Config": {
        "coordinate_size": 4,
        "shape_size": 8,
        "input_size": 32,
    },  # four and two of them make the width
    "JanusConfig": {"image_token_id": 3},
    "LevitConfig": {"patch_size": 16, "image_size": 64},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LiltConfig": {"hidden_size": 48},  # six embeddings of coordinates make the width
    "LongT5Config": _DECODER_START,
    "LongcatFlashConfig": {"zero_expert_num": 2, "moe_topk": 2, "head_dim": 4, "qk_head_dim": 12},
    "LukeConfig": {"entity_vocab_size": 20, "entity_emb_size": 32},
    "LwDetrViTConfig": {"num_windows": 4},
    "Mamba2Config": {"head_dim": 16},
    "MimiConfig": {"upsample_groups": 32, "vector_quantization_hidden_dimension": 32, "num_quantizers": 2},
    "Molmo2VisionConfig": {"image_size": [32, 32], "num_position_embeddings": 16},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4},
    "MobileViTV2Config": {"image_size": 128},
    "MllamaVisionConfig": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    "NemotronConfig": {"num_key_value_heads": 4},
    "NeoMMEConfig": {"head_dim": 16},
    "PromptDepthAnythingConfig": {"reassemble_hidden_size": 32},
    "PerceiverConfig": {"num_cross_attention_heads": 1, "num_latents": 8},
    # Training takes lengths that are multiples of the chunks: both of the sweep's are.
    "ReformerConfig": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 3,
        "lsh_attn_chunk_length": 3,
        "num_buckets": 2,
    },
    "Qwen3ASREncoderConfig": {"output_dim": 32},
    "Sapiens2HeadConfig": {
        "upsample_out_channels": [32],
        "upsample_kernel_sizes": [4],
        "conv_out_channels": [32],
        "conv_kernel_sizes": [1],
    },
    # With 0.02 the scores of all pixels are equal but for rounding, which then decides which of them are keypoints.
    "SuperPointConfig": {"initializer_range": 0.2},
    "SwitchTransformersConfig": _DECODER_START,
    "ShieldGemma2Config": {"yes_token_index": 11, "no_token_index": 12},
    "SwinConfig": {"patch_size": 2, "window_size": 2},
    "Swinv2Config": {"patch_size": 2, "window_size": 2},
    "T5Config": _DECODER_START,
    "TextNetConfig": {"hidden_sizes": [64, 64, 128, 256, 512], "image_size": [64, 64]},
    "UdopConfig": _DECODER_START,
    "VipLlavaConfig": {"vision_feature_layers": [-2, -1]},
    "VitPoseBackboneConfig": {"num_experts": 1},
    "VoxtralConfig": {"audio_token_id": 10},
    "VoxtralEncoderConfig": {"intermediate_size": 128},  # four frames make an embedding
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {"layers_block_type": ["mamba", "hybrid"]},
    "ZambaConfig": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "ZoeDepthConfig": {"bottleneck_features": 32},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
# By the name of a model class.
MODEL_OVERRIDES: dict[str, dict[str, Any]] = {
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Gemma4AssistantForCausalLM": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
}
