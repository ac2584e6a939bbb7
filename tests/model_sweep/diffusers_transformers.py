"""Transformers of diffusers for images and videos."""

from __future__ import annotations

import torch

from tests.model_sweep.diffusers_base import (
    DIT,
    FLUX,
    FRAMES,
    HEADS,
    SD3,
    STEPS,
    WIDTH,
    DiffusersModel,
    cogview,
    flux,
    hunyuan_dit,
    image,
    masked,
    positions,
    rotary_of_axes,
    sd3,
    side,
    square,
    steps,
    text,
    times,
    transformed,
    transformed_video,
    video,
    without,
)
from tests.zoo.entry import ragged_mask

_COGVIEW = DIT | {
    "in_channels": 4,
    "out_channels": 4,
    "text_embed_dim": WIDTH,
    "time_embed_dim": 16,
    "condition_dim": 8,
    "pos_embed_max_size": 12,
    "sample_size": 24,
}
_WAN = DIT | {"in_channels": 4, "out_channels": 4, "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 48}

IMAGE_TRANSFORMERS = {
    "AuraFlowTransformer2DModel": DiffusersModel(
        "image transformer",
        {
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            **HEADS,
            "sample_size": 24,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": WIDTH,
            "pos_embed_max_size": 144,
        },
        lambda d, b, n: transformed(d, b, n) | {"hidden_states": square(d, b), "timestep": times(d, b)},
    ),
    "BriaTransformer2DModel": DiffusersModel(
        "image transformer", FLUX, lambda d, b, n: without(flux(d, b, n), "pooled_projections")
    ),
    "ChromaTransformer2DModel": DiffusersModel(
        "image transformer",
        FLUX | {"approximator_num_channels": 8, "approximator_hidden_dim": WIDTH, "approximator_layers": 1},
        lambda d, b, n: without(flux(d, b, n), "pooled_projections"),
    ),
    "CogView3PlusTransformer2DModel": DiffusersModel(
        "image transformer",
        _COGVIEW,
        cogview,
    ),
    "CogView4Transformer2DModel": DiffusersModel(
        "image transformer",
        _COGVIEW | {"rope_axes_dim": (12, 12)},
        cogview,
    ),
    "DiTTransformer2DModel": DiffusersModel(
        "image transformer",
        DIT | {"norm_num_groups": 8, "sample_size": 16, "num_embeds_ada_norm": STEPS, "dropout": 0.1},
        lambda d, b, n: {"hidden_states": square(d, b), "timestep": steps(d, b), "class_labels": d.ints(STEPS, b)},
    ),
    "Flux2Transformer2DModel": DiffusersModel(
        "image transformer",
        FLUX | {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16, "guidance_embeds": False},
        lambda d, b, n: (
            without(flux(d, b, n), "pooled_projections")
            | {"img_ids": positions(side(n), 4), "txt_ids": positions(n, 4)}
        ),
    ),
    "FluxTransformer2DModel": DiffusersModel("image transformer", FLUX | {"pooled_projection_dim": WIDTH}, flux),
    "HunyuanDiT2DModel": DiffusersModel(
        "image transformer",
        DIT
        | {
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 16,
            "hidden_size": WIDTH,
            "cross_attention_dim": WIDTH,
            "cross_attention_dim_t5": WIDTH,
            "pooled_projection_dim": WIDTH,
            "text_len": 6,
            "text_len_t5": 8,
        },
        hunyuan_dit,
    ),
    "Lumina2Transformer2DModel": DiffusersModel(
        "image transformer",
        {
            "sample_size": 24,
            "in_channels": 4,
            "hidden_size": WIDTH,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": (4, 4, 8),
            "axes_lens": (64, 32, 32),
            "cap_feat_dim": WIDTH,
        },
        lambda d, b, n: masked("encoder_attention_mask", transformed(d, b, n) | {"timestep": times(d, b)}, b, n),
    ),
    "LuminaNextDiT2DModel": DiffusersModel(
        "image transformer",
        {
            "sample_size": 16,
            "hidden_size": WIDTH,
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "cross_attention_dim": WIDTH,
        },
        lambda d, b, n: (
            masked("encoder_mask", transformed(d, b, n), b, n)
            | {
                "timestep": times(d, b),
                "image_rotary_emb": torch.polar(torch.ones(384, 384, 8), d.floats(384, 384, 8)),
                "cross_attention_kwargs": {},
            }
        ),
    ),
    "OmniGenTransformer2DModel": DiffusersModel(
        "image transformer",
        {
            "hidden_size": WIDTH,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 48,
            "num_layers": 2,
            "pad_token_id": 0,
            "vocab_size": 40,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 512,
            "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
            "pos_embed_max_size": 12,
            "time_step_dim": 16,
        },
        lambda d, b, n: {
            "hidden_states": image(d, b, n),
            "timestep": times(d, b),
            "input_ids": d.ints(40, b, n),
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": torch.ones(b, n + 1 + 4 * side(n), n + 1 + 4 * side(n)).tril(),
            "position_ids": torch.arange(n + 1 + 4 * side(n)).repeat(b, 1),
        },
    ),
    "PixArtTransformer2DModel": DiffusersModel(
        "image transformer",
        DIT | {"cross_attention_dim": WIDTH, "sample_size": 16, "caption_channels": WIDTH, "norm_num_groups": 8},
        lambda d, b, n: (
            masked("encoder_attention_mask", transformed(d, b, n), b, n)
            | {"hidden_states": square(d, b), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
        ),
    ),
    "PriorTransformer": DiffusersModel(
        "image transformer",
        DIT | {"embedding_dim": WIDTH, "num_embeddings": 9, "additional_embeddings": 4},
        lambda d, b, n: {
            "hidden_states": d.floats(b, WIDTH),
            "timestep": steps(d, b),
            "proj_embedding": d.floats(b, WIDTH),
            "encoder_hidden_states": text(d, b, 9),
            "attention_mask": ragged_mask(b, 9),
        },
    ),
    "PRXTransformer2DModel": DiffusersModel(
        "image transformer",
        {
            "in_channels": 4,
            "context_in_dim": WIDTH,
            "hidden_size": WIDTH,
            "mlp_ratio": 2.0,
            "num_heads": 2,
            "depth": 2,
            "axes_dim": [8, 8],
        },
        lambda d, b, n: masked("attention_mask", transformed(d, b, n) | {"timestep": times(d, b)}, b, n),
    ),
    "QwenImageTransformer2DModel": DiffusersModel(
        "image transformer",
        DIT | {"in_channels": 16, "out_channels": 4, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 4, 8)},
        lambda d, b, n: {
            "hidden_states": d.floats(b, 4 * side(n), 16),
            "encoder_hidden_states": text(d, b, n),
            "encoder_hidden_states_mask": ragged_mask(b, n),
            "timestep": times(d, b),
            "img_shapes": [[(1, side(n) // 2, 8)]] * b,
        },
    ),
    "SD3Transformer2DModel": DiffusersModel(
        "image transformer", SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}, sd3
    ),
    "SanaTransformer2DModel": DiffusersModel(
        "image transformer",
        DIT
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": WIDTH,
            "caption_channels": WIDTH,
            "sample_size": 16,
        },
        lambda d, b, n: masked("encoder_attention_mask", transformed(d, b, n), b, n) | {"hidden_states": square(d, b)},
    ),
    "Transformer2DModel": DiffusersModel(
        "image transformer",
        DIT | {"in_channels": WIDTH, "norm_num_groups": 8, "cross_attention_dim": WIDTH, "dropout": 0.1},
        lambda d, b, n: without(transformed(d, b, n), "timestep") | {"hidden_states": image(d, b, n, WIDTH)},
    ),
    "ZImageTransformer2DModel": DiffusersModel(
        "image transformer",
        {
            "in_channels": 4,
            "dim": WIDTH,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": WIDTH,
            "axes_dims": [4, 4, 8],
            "axes_lens": [256, 32, 32],
        },
        lambda d, b, n: {
            "x": [d.floats(4, 1, side(n), 16) for _ in range(b)],
            "t": times(d, b),
            "cap_feats": [d.floats(n, WIDTH) for _ in range(b)],
        },
    ),
}
VIDEO_TRANSFORMERS = {
    "AllegroTransformer3DModel": DiffusersModel(
        "video transformer",
        DIT
        | {
            "attention_head_dim": 24,  # rotary embeddings of three axes, an even part of it each
            "cross_attention_dim": 48,
            "sample_height": 16,
            "sample_width": 16,
            "sample_frames": FRAMES,
            "caption_channels": WIDTH,
        },
        lambda d, b, n: (
            masked("encoder_attention_mask", transformed_video(d, b, n), b, n)
            | {
                "hidden_states": d.floats(b, 4, FRAMES, 16, 16),
                "attention_mask": torch.ones(b, FRAMES, 16, 16, dtype=torch.long),
                "image_rotary_emb": rotary_of_axes(FRAMES, 8, 8),
            }
        ),
    ),
    "CogVideoXTransformer3DModel": DiffusersModel(
        "video transformer",
        DIT
        | {
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": WIDTH,
            "sample_width": 16,
            "sample_height": 16,
            "sample_frames": 5,
            "max_text_seq_length": 12,
            "dropout": 0.1,
        },
        lambda d, b, n: (
            transformed(d, b, n) | {"hidden_states": d.floats(b, 2, 4, 16, 16), "encoder_hidden_states": text(d, b, 12)}
        ),
    ),
    "CosmosTransformer3DModel": DiffusersModel(
        "video transformer",
        DIT
        | {
            "in_channels": 4,
            "out_channels": 4,
            "mlp_ratio": 2.0,
            "text_embed_dim": WIDTH,
            "adaln_lora_dim": 8,
            "max_size": (4, 32, 32),
            "concat_padding_mask": False,  # it is resized by torchvision
        },
        lambda d, b, n: transformed_video(d, b, n) | {"fps": 30},
    ),
    "HunyuanVideoTransformer3DModel": DiffusersModel(
        "video transformer",
        DIT
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "mlp_ratio": 2.0,
            "text_embed_dim": WIDTH,
            "pooled_projection_dim": WIDTH,
            "rope_axes_dim": (4, 4, 8),
            "guidance_embeds": False,
        },
        lambda d, b, n: (
            masked("encoder_attention_mask", transformed_video(d, b, n), b, n)
            | {"pooled_projections": d.floats(b, WIDTH)}
        ),
    ),
    "LTXVideoTransformer3DModel": DiffusersModel(
        "video transformer",
        DIT | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": WIDTH, "caption_channels": WIDTH},
        lambda d, b, n: (
            masked("encoder_attention_mask", transformed(d, b, n), b, n)
            | {
                "hidden_states": d.floats(b, 8 * side(n), 4),
                "num_frames": FRAMES,
                "height": side(n) // 2,
                "width": 8,
            }
        ),
    ),
    "LatteTransformer3DModel": DiffusersModel(
        "video transformer",
        DIT
        | {
            "in_channels": 4,
            "out_channels": 8,
            "cross_attention_dim": WIDTH,
            "attention_bias": True,
            "sample_size": 16,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": STEPS,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "caption_channels": WIDTH,
            "video_length": FRAMES,
        },
        lambda d, b, n: transformed(d, b, n) | {"hidden_states": d.floats(b, 4, FRAMES, 16, 16)},
    ),
    "MochiTransformer3DModel": DiffusersModel(
        "video transformer",
        DIT
        | {
            "pooled_projection_dim": WIDTH,
            "in_channels": 4,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 16,
            "max_sequence_length": 16,
        },
        lambda d, b, n: masked("encoder_attention_mask", transformed_video(d, b, n), b, n),
    ),
    "SkyReelsV2Transformer3DModel": DiffusersModel("video transformer", _WAN, transformed_video),
    "TransformerTemporalModel": DiffusersModel(
        "video transformer",
        DIT | {"in_channels": WIDTH, "norm_num_groups": 8, "dropout": 0.1},
        lambda d, b, n: {"hidden_states": image(d, b * FRAMES, n, WIDTH), "num_frames": FRAMES},
    ),
    "WanTransformer3DModel": DiffusersModel("video transformer", _WAN, transformed_video),
    "WanVACETransformer3DModel": DiffusersModel(
        "video transformer",
        _WAN | {"vace_layers": [0], "vace_in_channels": 4},
        lambda d, b, n: (
            transformed_video(d, b, n)
            | {"control_hidden_states": video(d, b, n), "control_hidden_states_scale": torch.ones(1)}
        ),
    ),
}
