"""Autoencoders of diffusers."""

from __future__ import annotations

from tests.model_sweep.diffusers_base import (
    FRAMES,
    WIDTH,
    DiffusersModel,
    autoencoder,
    image,
    of_clip,
    of_sample,
    side,
    video,
)

AUTOENCODERS = {
    "AsymmetricAutoencoderKL": DiffusersModel(
        "autoencoder",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "down_block_out_channels": (WIDTH, 2 * WIDTH),
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "up_block_out_channels": (WIDTH, 2 * WIDTH),
            "norm_num_groups": 8,
        },
        lambda d, b, n: of_sample(d, b, n) | {"mask": d.ints(2, b, 1, side(n), 16).float()},
    ),
    "AutoencoderDC": DiffusersModel(
        "autoencoder",
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (16, WIDTH),
            "decoder_block_out_channels": (16, WIDTH),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        of_sample,
    ),
    "AutoencoderKL": DiffusersModel("autoencoder", autoencoder("DownEncoderBlock2D", "UpDecoderBlock2D"), of_sample),
    "AutoencoderKLCogVideoX": DiffusersModel(
        "autoencoder",
        autoencoder("CogVideoXDownBlock3D", "CogVideoXUpBlock3D", layers_per_block=1, temporal_compression_ratio=2),
        of_clip,
    ),
    "AutoencoderKLFlux2": DiffusersModel(
        "autoencoder", autoencoder("DownEncoderBlock2D", "UpDecoderBlock2D", layers_per_block=1), of_sample
    ),
    "AutoencoderKLHunyuanVideo": DiffusersModel(
        "autoencoder",
        autoencoder(
            "HunyuanVideoDownBlock3D",
            "HunyuanVideoUpBlock3D",
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        ),
        of_clip,
    ),
    "AutoencoderKLLTXVideo": DiffusersModel(
        "autoencoder",
        {
            "latent_channels": 8,
            "block_out_channels": (WIDTH, WIDTH),
            "decoder_block_out_channels": (WIDTH, WIDTH),
            "down_block_types": ("LTXVideoDownBlock3D",) * 2,
            "layers_per_block": (1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1),
            "spatio_temporal_scaling": (True, False),
            "decoder_spatio_temporal_scaling": (True, False),
            "decoder_inject_noise": (False, False, False),
            "downsample_type": ("conv", "conv"),
            "upsample_residual": (False, False),
            "upsample_factor": (1, 1),
        },
        of_clip,
    ),
    "AutoencoderKLMagvit": DiffusersModel(
        "autoencoder",
        autoencoder("SpatialDownBlock3D", "SpatialUpBlock3D", layers_per_block=1)
        | {
            "down_block_types": ["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"],
            "up_block_types": ["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"],
            "block_out_channels": [WIDTH, 2 * WIDTH],
        },
        of_clip,
    ),
    "AutoencoderKLMochi": DiffusersModel(
        "autoencoder",
        {
            "in_channels": 15,
            "encoder_block_out_channels": (WIDTH, WIDTH),
            "decoder_block_out_channels": (WIDTH, WIDTH),
            "latent_channels": 4,
            "layers_per_block": (1, 1, 1),
            "temporal_expansions": (2,),
            "spatial_expansions": (2,),
            "add_attention_block": (False, True, True),
            "latents_mean": None,
            "latents_std": None,
        },
        lambda d, b, n: {"sample": video(d, b, n, 3, 5)},
    ),
    "AutoencoderKLQwenImage": DiffusersModel(
        "autoencoder",
        {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]},
        of_clip,
    ),
    "AutoencoderKLTemporalDecoder": DiffusersModel(
        "autoencoder",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "block_out_channels": (WIDTH, 2 * WIDTH),
            "layers_per_block": 1,
        },
        lambda d, b, n: {"sample": image(d, b * FRAMES, n, 3), "num_frames": FRAMES},
    ),
    "AutoencoderKLWan": DiffusersModel(
        "autoencoder",
        {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]},
        of_clip,
    ),
    "AutoencoderOobleck": DiffusersModel(
        "autoencoder",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
        },
        lambda d, b, n: {"sample": d.floats(b, 2, 8 * side(n))},
    ),
    "AutoencoderTiny": DiffusersModel(
        "autoencoder",
        {
            "encoder_block_out_channels": (WIDTH, WIDTH),
            "decoder_block_out_channels": (WIDTH, WIDTH),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        of_sample,
    ),
    "ConsistencyDecoderVAE": DiffusersModel(
        "autoencoder",
        {
            "encoder_block_out_channels": (WIDTH, WIDTH),
            "encoder_down_block_types": ("DownEncoderBlock2D",) * 2,
            "encoder_layers_per_block": 1,
            "encoder_norm_num_groups": 8,
            "decoder_block_out_channels": (WIDTH, WIDTH),
            "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2,
            "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2,
            "decoder_layers_per_block": 1,
            "decoder_norm_num_groups": 8,
        },
        of_sample,
    ),
    "VQModel": DiffusersModel(
        "autoencoder", autoencoder("DownEncoderBlock2D", "UpDecoderBlock2D", num_vq_embeddings=16), of_sample
    ),
}
