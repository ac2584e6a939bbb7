"""Models of diffusers at a size that trains in milliseconds: mostly width 32, two layers, images of 16 to 24 pixels.

diffusers declares neither tasks nor inputs of its classes, so each has its config and its call here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from tests.zoo.entry import Call, Draw, ragged_mask

WIDTH = 32
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_DIT = _HEADS | {"num_layers": 2}
_FLUX = _DIT | {"num_single_layers": 2, "in_channels": 4, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 4, 8)}
_SD3 = _DIT | {
    "sample_size": 24,
    "in_channels": 4,
    "out_channels": 4,
    "joint_attention_dim": WIDTH,
    "caption_projection_dim": WIDTH,
    "pooled_projection_dim": WIDTH,
    "pos_embed_max_size": 12,
}
_STEPS = 1000
_FRAMES = 2


@dataclass(frozen=True)
class DiffusersModel:
    """A class of diffusers.

    Attributes:
        task: the kind of model.
        config: the arguments of its constructor.
        inputs: (draw, batch, length) -> the arguments of forward, by name.
    """

    task: str
    config: dict[str, Any]
    inputs: Callable[[Draw, int, int], dict[str, Any]]

    def make(self, name: str) -> torch.nn.Module:
        """The model of this class."""
        module: torch.nn.Module = getattr(importlib.import_module("diffusers"), name)(**self.config)
        return module

    def call(self, draw: Draw, batch: int, length: int) -> Call:
        """The arguments of a call; `length` is that of texts, and larger images come with longer texts."""
        return Call(kwargs=self.inputs(draw, batch, length))


def installed() -> bool:
    """Whether diffusers can be imported."""
    return find_spec("diffusers") is not None


def _side(length: int) -> int:
    """The height of an image: 16 with the shorter text of the sweep, 24 with the longer one."""
    return 8 * (length // 4)


def _image(draw: Draw, batch: int, length: int, channels: int = 4) -> torch.Tensor:
    return draw.floats(batch, channels, _side(length), 16)


def _square(draw: Draw, batch: int, channels: int = 4) -> torch.Tensor:
    return draw.floats(batch, channels, 16, 16)


def _video(draw: Draw, batch: int, length: int, channels: int = 4, frames: int = _FRAMES) -> torch.Tensor:
    return draw.floats(batch, channels, frames, _side(length), 16)


def _steps(draw: Draw, batch: int) -> torch.Tensor:
    return draw.ints(_STEPS, batch)


def _text(draw: Draw, batch: int, length: int) -> torch.Tensor:
    return draw.floats(batch, length, WIDTH)


def _times(draw: Draw, batch: int) -> torch.Tensor:
    """Times in (0, 1) as flow matching samples them."""
    return draw.floats(batch).sigmoid()


def _positions(count: int, width: int = 3) -> torch.Tensor:
    """Positions of tokens in one row of an image."""
    positions = torch.zeros(count, width)
    positions[:, -1] = torch.arange(count)
    return positions


def _blocks(down: str, up: str, count: int = 2) -> dict[str, Any]:
    return {
        "down_block_types": (down,) * count,
        "up_block_types": (up,) * count,
        "block_out_channels": (WIDTH, 2 * WIDTH)[:count],
    }


def _autoencoder(down: str, up: str, **config: Any) -> dict[str, Any]:
    return _blocks(down, up) | {"norm_num_groups": 8, "latent_channels": 4} | config


def _of_sample(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return {"sample": _image(draw, batch, length, 3)}


def _of_clip(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    """A video of 5 frames, of which autoencoders make one and one for each further four."""
    return {"sample": _video(draw, batch, length, 3, 5)}


def _denoised(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return {
        "sample": _image(draw, batch, length),
        "timestep": _steps(draw, batch),
        "encoder_hidden_states": _text(draw, batch, length),
    }


def _denoised_video(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return _denoised(draw, batch, length) | {"sample": _video(draw, batch, length)}


def _denoised_frames(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    """With a text for each frame."""
    return _denoised_video(draw, batch, length) | {"encoder_hidden_states": _text(draw, batch * _FRAMES, length)}


def _controlled(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    """With an image that is 8 times as large as the latent one."""
    condition = draw.floats(batch, 3, 8 * _side(length), 8 * 16)
    return _denoised(draw, batch, length) | {"controlnet_cond": condition}


def _transformed(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": _image(draw, batch, length),
        "timestep": _steps(draw, batch),
        "encoder_hidden_states": _text(draw, batch, length),
    }


def _transformed_video(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return _transformed(draw, batch, length) | {"hidden_states": _video(draw, batch, length)}


def _masked(name: str, values: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    return values | {name: ragged_mask(batch, length)}


def _flux(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    tokens = _side(length)
    return {
        "hidden_states": draw.floats(batch, tokens, 4),
        "encoder_hidden_states": _text(draw, batch, length),
        "pooled_projections": draw.floats(batch, WIDTH),
        "timestep": _times(draw, batch),
        "img_ids": _positions(tokens),
        "txt_ids": torch.zeros(length, 3),
    }


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _sd3(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return _transformed(draw, batch, length) | {"pooled_projections": draw.floats(batch, WIDTH)}


def _cogview(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    size = torch.tensor([[128, 128]]).repeat(batch, 1)
    return _transformed(draw, batch, length) | {
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros_like(size),
    }


def _hunyuan_dit(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": _square(draw, batch),
        "timestep": _steps(draw, batch).float(),
        "encoder_hidden_states": _text(draw, batch, 6),
        "text_embedding_mask": ragged_mask(batch, 6),
        "encoder_hidden_states_t5": _text(draw, batch, 8),
        "text_embedding_mask_t5": ragged_mask(batch, 8),
        "image_meta_size": draw.floats(batch, 6),
        "style": torch.zeros(batch, dtype=torch.long),
        "image_rotary_emb": (draw.floats(64, 16).cos(), draw.floats(64, 16).sin()),
    }


_CROSS_UNET = {
    **_blocks("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 2,
}
_SPATIAL = {"norm_num_groups": 8, "layers_per_block": 1, "cross_attention_dim": WIDTH}
_WAN = _DIT | {"in_channels": 4, "out_channels": 4, "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 48}

_UNETS = {
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
        lambda d, b, n: {"sample": d.floats(b, 4, 4 * _side(n)), "timestep": _steps(d, b)},
    ),
    "UNet2DModel": DiffusersModel(
        "unet",
        _blocks("DownBlock2D", "UpBlock2D")
        | {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "dropout": 0.1,
        },
        lambda d, b, n: {"sample": _image(d, b, n, 3), "timestep": _steps(d, b)},
    ),
    "UNet2DConditionModel": DiffusersModel("unet", _CROSS_UNET, _denoised),
    "UNet3DConditionModel": DiffusersModel(
        "unet",
        _blocks("CrossAttnDownBlock3D", "CrossAttnUpBlock3D") | _SPATIAL | {"attention_head_dim": 8},
        _denoised_video,
    ),
    "UNetMotionModel": DiffusersModel(
        "unet",
        _blocks("CrossAttnDownBlockMotion", "CrossAttnUpBlockMotion")
        | _SPATIAL
        | {"num_attention_heads": 2, "motion_num_attention_heads": 2},
        _denoised_frames,
    ),
    "UNetSpatioTemporalConditionModel": DiffusersModel(
        "unet",
        {
            **_blocks("CrossAttnDownBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "in_channels": 4,
            "layers_per_block": 1,
            "cross_attention_dim": WIDTH,
            "num_attention_heads": (2, 4),
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
            "num_frames": _FRAMES,
        },
        lambda d, b, n: (
            _denoised(d, b, n)
            | {
                "sample": _video(d, b, n).transpose(1, 2).contiguous(),
                "encoder_hidden_states": _text(d, b, 1),
                "added_time_ids": d.floats(b, 3),
            }
        ),
    ),
    "I2VGenXLUNet": DiffusersModel(
        "unet",
        _blocks("CrossAttnDownBlock3D", "CrossAttnUpBlock3D") | _SPATIAL | {"attention_head_dim": 8},
        lambda d, b, n: (
            _denoised_video(d, b, n)
            | {
                "fps": d.ints(30, b, low=1),
                "image_latents": _video(d, b, n),
                "image_embeddings": d.floats(b, WIDTH),
            }
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
        lambda d, b, n: _masked("encoder_attention_mask", _denoised(d, b, n), b, n),
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
            "sample": _image(d, b, n),
            "timestep_ratio": _times(d, b),
            "clip_text_pooled": d.floats(b, 1, WIDTH),
            "clip_text": _text(d, b, n),
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
            "input_ids": d.ints(WIDTH, b, _side(n), 16),
            "encoder_hidden_states": _text(d, b, n),
            "pooled_text_emb": d.floats(b, WIDTH),
            "micro_conds": d.floats(b, 5),
        },
    ),
}
_IMAGE_TRANSFORMERS = {
    "AuraFlowTransformer2DModel": DiffusersModel(
        "image transformer",
        {
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            **_HEADS,
            "sample_size": 24,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": WIDTH,
            "pos_embed_max_size": 144,
        },
        lambda d, b, n: _transformed(d, b, n) | {"hidden_states": _square(d, b), "timestep": _times(d, b)},
    ),
    "BriaTransformer2DModel": DiffusersModel(
        "image transformer", _FLUX, lambda d, b, n: _without(_flux(d, b, n), "pooled_projections")
    ),
    "ChromaTransformer2DModel": DiffusersModel(
        "image transformer",
        _FLUX | {"approximator_num_channels": 8, "approximator_hidden_dim": WIDTH, "approximator_layers": 1},
        lambda d, b, n: _without(_flux(d, b, n), "pooled_projections"),
    ),
    "CogView3PlusTransformer2DModel": DiffusersModel(
        "image transformer",
        _DIT
        | {
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "pos_embed_max_size": 12,
            "sample_size": 24,
        },
        _cogview,
    ),
    "CogView4Transformer2DModel": DiffusersModel(
        "image transformer",
        _DIT
        | {
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "pos_embed_max_size": 12,
            "sample_size": 24,
            "rope_axes_dim": (12, 12),
        },
        _cogview,
    ),
    "DiTTransformer2DModel": DiffusersModel(
        "image transformer",
        _DIT | {"norm_num_groups": 8, "sample_size": 16, "num_embeds_ada_norm": _STEPS, "dropout": 0.1},
        lambda d, b, n: {
            "hidden_states": _square(d, b),
            "timestep": _steps(d, b),
            "class_labels": d.ints(_STEPS, b),
        },
    ),
    "Flux2Transformer2DModel": DiffusersModel(
        "image transformer",
        _FLUX | {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16, "guidance_embeds": False},
        lambda d, b, n: (
            _without(_flux(d, b, n), "pooled_projections")
            | {"img_ids": _positions(_side(n), 4), "txt_ids": _positions(n, 4)}
        ),
    ),
    "FluxTransformer2DModel": DiffusersModel("image transformer", _FLUX | {"pooled_projection_dim": WIDTH}, _flux),
    "HunyuanDiT2DModel": DiffusersModel(
        "image transformer",
        _DIT
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
        _hunyuan_dit,
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
        lambda d, b, n: _masked("encoder_attention_mask", _transformed(d, b, n) | {"timestep": _times(d, b)}, b, n),
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
            _masked("encoder_mask", _transformed(d, b, n), b, n)
            | {
                "timestep": _times(d, b),
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
            "hidden_states": _image(d, b, n),
            "timestep": _times(d, b),
            "input_ids": d.ints(40, b, n),
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": torch.ones(b, n + 1 + 4 * _side(n), n + 1 + 4 * _side(n), dtype=torch.long).tril(),
            "position_ids": torch.arange(n + 1 + 4 * _side(n)).repeat(b, 1),
        },
    ),
    "PixArtTransformer2DModel": DiffusersModel(
        "image transformer",
        _DIT | {"cross_attention_dim": WIDTH, "sample_size": 16, "caption_channels": WIDTH, "norm_num_groups": 8},
        lambda d, b, n: (
            _masked("encoder_attention_mask", _transformed(d, b, n), b, n)
            | {"hidden_states": _square(d, b), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
        ),
    ),
    "PriorTransformer": DiffusersModel(
        "image transformer",
        _DIT | {"embedding_dim": WIDTH, "num_embeddings": 9, "additional_embeddings": 4},
        lambda d, b, n: {
            "hidden_states": d.floats(b, WIDTH),
            "timestep": _steps(d, b),
            "proj_embedding": d.floats(b, WIDTH),
            "encoder_hidden_states": _text(d, b, 9),
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
        lambda d, b, n: _masked("attention_mask", _transformed(d, b, n) | {"timestep": _times(d, b)}, b, n),
    ),
    "QwenImageTransformer2DModel": DiffusersModel(
        "image transformer",
        _DIT | {"in_channels": 16, "out_channels": 4, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 4, 8)},
        lambda d, b, n: {
            "hidden_states": d.floats(b, 4 * _side(n), 16),
            "encoder_hidden_states": _text(d, b, n),
            "encoder_hidden_states_mask": ragged_mask(b, n),
            "timestep": _times(d, b),
            "img_shapes": [[(1, _side(n) // 2, 8)]] * b,
        },
    ),
    "SD3Transformer2DModel": DiffusersModel(
        "image transformer", _SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}, _sd3
    ),
    "SanaTransformer2DModel": DiffusersModel(
        "image transformer",
        _DIT
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": WIDTH,
            "caption_channels": WIDTH,
            "sample_size": 16,
        },
        lambda d, b, n: (
            _masked("encoder_attention_mask", _transformed(d, b, n), b, n) | {"hidden_states": _square(d, b)}
        ),
    ),
    "Transformer2DModel": DiffusersModel(
        "image transformer",
        _DIT | {"in_channels": WIDTH, "norm_num_groups": 8, "cross_attention_dim": WIDTH, "dropout": 0.1},
        lambda d, b, n: _without(_transformed(d, b, n), "timestep") | {"hidden_states": _image(d, b, n, WIDTH)},
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
            "x": [d.floats(4, 1, _side(n), 16) for _ in range(b)],
            "t": _times(d, b),
            "cap_feats": [d.floats(n, WIDTH) for _ in range(b)],
        },
    ),
}
_VIDEO_TRANSFORMERS = {
    "AllegroTransformer3DModel": DiffusersModel(
        "video transformer",
        _DIT
        | {
            "attention_head_dim": 24,  # rotary embeddings of three axes, an even part of it each
            "cross_attention_dim": 48,
            "sample_height": 16,
            "sample_width": 16,
            "sample_frames": _FRAMES,
            "caption_channels": WIDTH,
        },
        lambda d, b, n: (
            _masked("encoder_attention_mask", _transformed_video(d, b, n), b, n)
            | {
                "hidden_states": d.floats(b, 4, _FRAMES, 16, 16),
                "attention_mask": torch.ones(b, _FRAMES, 16, 16, dtype=torch.long),
                "image_rotary_emb": _rotary_in_three(_FRAMES, 8, 8),
            }
        ),
    ),
    "CogVideoXTransformer3DModel": DiffusersModel(
        "video transformer",
        _DIT
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
            _transformed(d, b, n)
            | {"hidden_states": d.floats(b, 2, 4, 16, 16), "encoder_hidden_states": _text(d, b, 12)}
        ),
    ),
    "CosmosTransformer3DModel": DiffusersModel(
        "video transformer",
        _DIT
        | {
            "in_channels": 4,
            "out_channels": 4,
            "mlp_ratio": 2.0,
            "text_embed_dim": WIDTH,
            "adaln_lora_dim": 8,
            "max_size": (4, 32, 32),
            "concat_padding_mask": False,  # it is resized by torchvision
        },
        lambda d, b, n: _transformed_video(d, b, n) | {"fps": 30},
    ),
    "HunyuanVideoTransformer3DModel": DiffusersModel(
        "video transformer",
        _DIT
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
            _masked("encoder_attention_mask", _transformed_video(d, b, n), b, n)
            | {"pooled_projections": d.floats(b, WIDTH)}
        ),
    ),
    "LTXVideoTransformer3DModel": DiffusersModel(
        "video transformer",
        _DIT | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": WIDTH, "caption_channels": WIDTH},
        lambda d, b, n: (
            _masked("encoder_attention_mask", _transformed(d, b, n), b, n)
            | {
                "hidden_states": d.floats(b, 8 * _side(n), 4),
                "num_frames": _FRAMES,
                "height": _side(n) // 2,
                "width": 8,
            }
        ),
    ),
    "LatteTransformer3DModel": DiffusersModel(
        "video transformer",
        _DIT
        | {
            "in_channels": 4,
            "out_channels": 8,
            "cross_attention_dim": WIDTH,
            "attention_bias": True,
            "sample_size": 16,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": _STEPS,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "caption_channels": WIDTH,
            "video_length": _FRAMES,
        },
        lambda d, b, n: _transformed(d, b, n) | {"hidden_states": d.floats(b, 4, _FRAMES, 16, 16)},
    ),
    "MochiTransformer3DModel": DiffusersModel(
        "video transformer",
        _DIT
        | {
            "pooled_projection_dim": WIDTH,
            "in_channels": 4,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 16,
            "max_sequence_length": 16,
        },
        lambda d, b, n: _masked("encoder_attention_mask", _transformed_video(d, b, n), b, n),
    ),
    "SkyReelsV2Transformer3DModel": DiffusersModel("video transformer", _WAN, _transformed_video),
    "TransformerTemporalModel": DiffusersModel(
        "video transformer",
        _DIT | {"in_channels": WIDTH, "norm_num_groups": 8, "dropout": 0.1},
        lambda d, b, n: {"hidden_states": _image(d, b * _FRAMES, n, WIDTH), "num_frames": _FRAMES},
    ),
    "WanTransformer3DModel": DiffusersModel("video transformer", _WAN, _transformed_video),
    "WanVACETransformer3DModel": DiffusersModel(
        "video transformer",
        _WAN | {"vace_layers": [0], "vace_in_channels": 4},
        lambda d, b, n: (
            _transformed_video(d, b, n)
            | {"control_hidden_states": _video(d, b, n), "control_hidden_states_scale": torch.ones(1)}
        ),
    ),
}


def _rotary_in_three(frames: int, height: int, width: int) -> tuple[Any, Any]:
    """Allegro's rotary embeddings: cosines and sines of each axis, and the positions on each."""
    from diffusers.pipelines.allegro.pipeline_allegro import get_3d_rotary_pos_embed_allegro

    t, h, w, *grids = get_3d_rotary_pos_embed_allegro(
        embed_dim=24, crops_coords=((0, 0), (height, width)), grid_size=(height, width), temporal_size=frames,
        interpolation_scale=(2.2, 2.0, 2.0), device=torch.device("cpu"),
    )  # fmt: skip
    positions = torch.cartesian_prod(*(grid.long() for grid in grids)).T.reshape(3, 1, -1).contiguous()
    return (t, h, w), tuple(positions)


_AUTOENCODERS = {
    "AsymmetricAutoencoderKL": DiffusersModel(
        "autoencoder",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "down_block_out_channels": (WIDTH, 2 * WIDTH),
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "up_block_out_channels": (WIDTH, 2 * WIDTH),
            "norm_num_groups": 8,
        },
        lambda d, b, n: _of_sample(d, b, n) | {"mask": d.ints(2, b, 1, _side(n), 16).float()},
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
        _of_sample,
    ),
    "AutoencoderKL": DiffusersModel("autoencoder", _autoencoder("DownEncoderBlock2D", "UpDecoderBlock2D"), _of_sample),
    "AutoencoderKLCogVideoX": DiffusersModel(
        "autoencoder",
        _autoencoder("CogVideoXDownBlock3D", "CogVideoXUpBlock3D", layers_per_block=1, temporal_compression_ratio=2),
        _of_clip,
    ),
    "AutoencoderKLFlux2": DiffusersModel(
        "autoencoder",
        _autoencoder("DownEncoderBlock2D", "UpDecoderBlock2D", layers_per_block=1),
        _of_sample,
    ),
    "AutoencoderKLHunyuanVideo": DiffusersModel(
        "autoencoder",
        _autoencoder(
            "HunyuanVideoDownBlock3D",
            "HunyuanVideoUpBlock3D",
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        ),
        _of_clip,
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
        _of_clip,
    ),
    "AutoencoderKLMagvit": DiffusersModel(
        "autoencoder",
        _autoencoder("SpatialDownBlock3D", "SpatialUpBlock3D", layers_per_block=1)
        | {
            "down_block_types": ["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"],
            "up_block_types": ["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"],
            "block_out_channels": [WIDTH, 2 * WIDTH],
        },
        _of_clip,
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
        lambda d, b, n: {"sample": _video(d, b, n, 3, 5)},
    ),
    "AutoencoderKLQwenImage": DiffusersModel(
        "autoencoder",
        {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]},
        _of_clip,
    ),
    "AutoencoderKLTemporalDecoder": DiffusersModel(
        "autoencoder",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "block_out_channels": (WIDTH, 2 * WIDTH),
        },
        lambda d, b, n: {"sample": _image(d, b * _FRAMES, n, 3), "num_frames": _FRAMES},
    ),
    "AutoencoderKLWan": DiffusersModel(
        "autoencoder",
        {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]},
        _of_clip,
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
        lambda d, b, n: {"sample": d.floats(b, 2, 8 * _side(n))},
    ),
    "AutoencoderTiny": DiffusersModel(
        "autoencoder",
        {
            "encoder_block_out_channels": (WIDTH, WIDTH),
            "decoder_block_out_channels": (WIDTH, WIDTH),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        _of_sample,
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
        _of_sample,
    ),
    "VQModel": DiffusersModel(
        "autoencoder",
        _autoencoder("DownEncoderBlock2D", "UpDecoderBlock2D", num_vq_embeddings=16),
        _of_sample,
    ),
}
_ADAPTERS = {
    "ControlNetModel": DiffusersModel(
        "control",
        _without(_CROSS_UNET, "up_block_types") | {"conditioning_embedding_out_channels": (8, 8, 16, 16)},
        _controlled,
    ),
    "FluxControlNetModel": DiffusersModel(
        "control",
        _FLUX | {"pooled_projection_dim": WIDTH},
        lambda d, b, n: _flux(d, b, n) | {"controlnet_cond": d.floats(b, _side(n), 4)},
    ),
    "SD3ControlNetModel": DiffusersModel(
        "control", _SD3, lambda d, b, n: _sd3(d, b, n) | {"controlnet_cond": _image(d, b, n)}
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
            _denoised_frames(d, b, n)
            | {
                "controlnet_cond": _video(d, b, n, 3),
                "conditioning_mask": torch.ones(b, 1, _FRAMES, _side(n), 16),
            }
        ),
    ),
    "T2IAdapter": DiffusersModel(
        "control",
        {"channels": [WIDTH, WIDTH], "num_res_blocks": 1, "downscale_factor": 4},
        lambda d, b, n: {"x": _image(d, b, n, 3)},
    ),
    "UNetControlNetXSModel": DiffusersModel(
        "control",
        {
            **_blocks("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"),
            "norm_num_groups": 8,
            "cross_attention_dim": WIDTH,
            "num_attention_heads": 2,
            "ctrl_conditioning_embedding_out_channels": (8, 8, 16, 16),
            "ctrl_block_out_channels": (8, 16),
            "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 4,
        },
        _controlled,
    ),
}
_AUDIO = {
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
            "hidden_states": d.floats(b, 4, _side(n)),
            "timestep": _times(d, b),
            "encoder_hidden_states": _text(d, b, n),
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
            "encodings_and_masks": [(_text(d, b, n), ragged_mask(b, n))],
            "decoder_input_tokens": d.floats(b, 16, 8),
            "decoder_noise_time": _times(d, b),
        },
    ),
}
MODELS: dict[str, DiffusersModel] = {
    **_UNETS,
    **_IMAGE_TRANSFORMERS,
    **_VIDEO_TRANSFORMERS,
    **_AUTOENCODERS,
    **_ADAPTERS,
    **_AUDIO,
}
