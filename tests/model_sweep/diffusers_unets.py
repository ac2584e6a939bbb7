"""UNets of diffusers, the models that control them, and models of audio."""

from __future__ import annotations

import torch

from tests.model_sweep.diffusers_base import (
    FLUX,
    FRAMES,
    SD3,
    WIDTH,
    DiffusersModel,
    blocks,
    controlled,
    denoised,
    denoised_frames,
    denoised_video,
    flux,
    image,
    masked,
    sd3,
    side,
    steps,
    text,
    times,
    video,
    without,
)
from tests.zoo.entry import ragged_mask

CROSS_UNET = {
    **blocks("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 2,
}
SPATIAL = {"norm_num_groups": 8, "layers_per_block": 1, "cross_attention_dim": WIDTH}
UNETS = {
    "UNet1DModel": DiffusersModel(
        "unet",
        {
            "sample_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "time_embedding_dim": 16,
            "extra_in_channels": 16,
            "block_out_channels": (WIDTH, WIDTH, 2 * WIDTH),
        },
        lambda d, b, n: {"sample": d.floats(b, 4, 4 * side(n)), "timestep": steps(d, b)},
    ),
    "UNet2DModel": DiffusersModel(
        "unet",
        blocks("DownBlock2D", "UpBlock2D")
        | {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "dropout": 0.1,
        },
        lambda d, b, n: {"sample": image(d, b, n, 3), "timestep": steps(d, b)},
    ),
    "UNet2DConditionModel": DiffusersModel("unet", CROSS_UNET, denoised),
    "UNet3DConditionModel": DiffusersModel(
        "unet",
        blocks("CrossAttnDownBlock3D", "CrossAttnUpBlock3D") | SPATIAL | {"attention_head_dim": 8},
        denoised_video,
    ),
    "UNetMotionModel": DiffusersModel(
        "unet",
        blocks("CrossAttnDownBlockMotion", "CrossAttnUpBlockMotion")
        | SPATIAL
        | {"num_attention_heads": 2, "motion_num_attention_heads": 2},
        denoised_frames,
    ),
    "UNetSpatioTemporalConditionModel": DiffusersModel(
        "unet",
        {
            **blocks("CrossAttnDownBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "in_channels": 4,
            "layers_per_block": 1,
            "cross_attention_dim": WIDTH,
            "num_attention_heads": (2, 4),
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
            "num_frames": FRAMES,
        },
        lambda d, b, n: (
            denoised(d, b, n)
            | {
                "sample": video(d, b, n).transpose(1, 2).contiguous(),
                "encoder_hidden_states": text(d, b, 1),
                "added_time_ids": d.floats(b, 3),
            }
        ),
    ),
    "I2VGenXLUNet": DiffusersModel(
        "unet",
        blocks("CrossAttnDownBlock3D", "CrossAttnUpBlock3D") | SPATIAL | {"attention_head_dim": 8},
        lambda d, b, n: (
            denoised_video(d, b, n)
            | {"fps": d.ints(30, b, low=1), "image_latents": video(d, b, n), "image_embeddings": d.floats(b, WIDTH)}
        ),
    ),
    "Kandinsky3UNet": DiffusersModel(
        "unet",
        {
            "time_embedding_dim": WIDTH,
            "groups": 8,
            "attention_head_dim": 8,
            "layers_per_block": 2,
            "block_out_channels": (WIDTH, 2 * WIDTH),
            "cross_attention_dim": WIDTH,
            "encoder_hid_dim": WIDTH,
        },
        lambda d, b, n: masked("encoder_attention_mask", denoised(d, b, n), b, n),
    ),
    "StableCascadeUNet": DiffusersModel(
        "unet",
        {
            "in_channels": 4,
            "out_channels": 4,
            "timestep_ratio_embedding_dim": 16,
            "conditioning_dim": WIDTH,
            "block_out_channels": (WIDTH, WIDTH),
            "num_attention_heads": (2, 2),
            "down_num_layers_per_block": (1, 1),
            "up_num_layers_per_block": (1, 1),
            "clip_text_pooled_in_channels": WIDTH,
            "clip_text_in_channels": WIDTH,
            "clip_image_in_channels": WIDTH,
        },
        lambda d, b, n: {
            "sample": image(d, b, n),
            "timestep_ratio": times(d, b),
            "clip_text_pooled": d.floats(b, 1, WIDTH),
            "clip_text": text(d, b, n),
            "clip_img": d.floats(b, 1, WIDTH),
        },
    ),
    "UVit2DModel": DiffusersModel(
        "unet",
        {
            "hidden_size": WIDTH,
            "cond_embed_dim": WIDTH,
            "micro_cond_encode_dim": 4,
            "micro_cond_embed_dim": 20,
            "encoder_hidden_size": WIDTH,
            "vocab_size": 40,
            "codebook_size": WIDTH,
            "in_channels": WIDTH,
            "block_out_channels": WIDTH,
            "num_res_blocks": 1,
            "block_num_heads": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "sample_size": 16,
        },
        lambda d, b, n: {
            "input_ids": d.ints(WIDTH, b, side(n), 16),
            "encoder_hidden_states": text(d, b, n),
            "pooled_text_emb": d.floats(b, WIDTH),
            "micro_conds": d.floats(b, 5),
        },
    ),
}
CONTROLS = {
    "ControlNetModel": DiffusersModel(
        "control",
        without(CROSS_UNET, "up_block_types") | {"conditioning_embedding_out_channels": (8, 8, 16, 16)},
        controlled,
    ),
    "FluxControlNetModel": DiffusersModel(
        "control",
        FLUX | {"pooled_projection_dim": WIDTH},
        lambda d, b, n: flux(d, b, n) | {"controlnet_cond": d.floats(b, side(n), 4)},
    ),
    "SD3ControlNetModel": DiffusersModel(
        "control", SD3, lambda d, b, n: sd3(d, b, n) | {"controlnet_cond": image(d, b, n)}
    ),
    "SparseControlNetModel": DiffusersModel(
        "control",
        {
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "block_out_channels": (WIDTH, 2 * WIDTH),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "cross_attention_dim": WIDTH,
            "attention_head_dim": 2,
            "conditioning_channels": 3,
            "motion_num_attention_heads": 2,
        },
        lambda d, b, n: (
            denoised_frames(d, b, n)
            | {"controlnet_cond": video(d, b, n, 3), "conditioning_mask": torch.ones(b, 1, FRAMES, side(n), 16)}
        ),
    ),
    "T2IAdapter": DiffusersModel(
        "control",
        {"channels": [WIDTH, WIDTH], "num_res_blocks": 1, "downscale_factor": 4},
        lambda d, b, n: {"x": image(d, b, n, 3)},
    ),
    "UNetControlNetXSModel": DiffusersModel(
        "control",
        {
            **blocks("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"),
            "norm_num_groups": 8,
            "cross_attention_dim": WIDTH,
            "num_attention_heads": 2,
            "ctrl_conditioning_embedding_out_channels": (8, 8, 16, 16),
            "ctrl_block_out_channels": (8, 16),
            "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 4,
        },
        controlled,
    ),
}
AUDIO = {
    "StableAudioDiTModel": DiffusersModel(
        "audio",
        {
            "sample_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "num_key_value_attention_heads": 1,
            "cross_attention_dim": 16,
            "time_proj_dim": 8,
            "global_states_input_dim": WIDTH,
            "cross_attention_input_dim": WIDTH,
        },
        lambda d, b, n: {
            "hidden_states": d.floats(b, 4, side(n)),
            "timestep": times(d, b),
            "encoder_hidden_states": text(d, b, n),
            "global_hidden_states": d.floats(b, 1, WIDTH),
        },
    ),
    "T5FilmDecoder": DiffusersModel(
        "audio",
        {
            "input_dims": 8,
            "targets_length": 16,
            "d_model": WIDTH,
            "num_layers": 2,
            "num_heads": 2,
            "d_kv": 16,
            "d_ff": 48,
        },
        lambda d, b, n: {
            "encodings_and_masks": [(text(d, b, n), ragged_mask(b, n))],
            "decoder_input_tokens": d.floats(b, 16, 8),
            "decoder_noise_time": times(d, b),
        },
    ),
}
