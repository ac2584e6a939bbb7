"""A class of diffusers to sweep, and the configs and arguments that several of them share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.zoo.entry import Call, Draw, ragged_mask

WIDTH = 32
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
DIT = HEADS | {"num_layers": 2}
FLUX = DIT | {"num_single_layers": 2, "in_channels": 4, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 4, 8)}
SD3 = DIT | {
    "sample_size": 24,
    "in_channels": 4,
    "out_channels": 4,
    "joint_attention_dim": WIDTH,
    "caption_projection_dim": WIDTH,
    "pooled_projection_dim": WIDTH,
    "pos_embed_max_size": 12,
}
STEPS = 1000
FRAMES = 2


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


def side(length: int) -> int:
    """The height of an image: 16 with the shorter text of the sweep, 24 with the longer one."""
    return 8 * (length // 4)


def image(draw: Draw, batch: int, length: int, channels: int = 4) -> torch.Tensor:
    return draw.floats(batch, channels, side(length), 16)


def square(draw: Draw, batch: int, channels: int = 4) -> torch.Tensor:
    return draw.floats(batch, channels, 16, 16)


def video(draw: Draw, batch: int, length: int, channels: int = 4, frames: int = FRAMES) -> torch.Tensor:
    return draw.floats(batch, channels, frames, side(length), 16)


def steps(draw: Draw, batch: int) -> torch.Tensor:
    return draw.ints(STEPS, batch)


def text(draw: Draw, batch: int, length: int) -> torch.Tensor:
    return draw.floats(batch, length, WIDTH)


def times(draw: Draw, batch: int) -> torch.Tensor:
    """Times in (0, 1) as flow matching samples them."""
    return draw.floats(batch).sigmoid()


def positions(count: int, width: int = 3) -> torch.Tensor:
    """Positions of tokens in one row of an image."""
    positions = torch.zeros(count, width)
    positions[:, -1] = torch.arange(count)
    return positions


def rotary(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of `count` positions, for 8 elements."""
    angles = torch.outer(torch.arange(count), 10000 ** -(torch.arange(4) / 4)).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotary_of_axes(*sizes: int) -> tuple[Any, Any]:
    """Rotary embeddings of each axis, and the positions of all tokens on each."""
    positions = torch.cartesian_prod(*map(torch.arange, sizes)).T.reshape(len(sizes), 1, -1).contiguous()
    return tuple(map(rotary, sizes)), tuple(positions)


def blocks(down: str, up: str, count: int = 2) -> dict[str, Any]:
    return {
        "down_block_types": (down,) * count,
        "up_block_types": (up,) * count,
        "block_out_channels": (WIDTH, 2 * WIDTH)[:count],
    }


def autoencoder(down: str, up: str, **config: Any) -> dict[str, Any]:
    return blocks(down, up) | {"norm_num_groups": 8, "latent_channels": 4} | config


def of_sample(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return {"sample": image(draw, batch, length, 3)}


def of_clip(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    """A video of 5 frames, of which autoencoders make one and one for each further four."""
    return {"sample": video(draw, batch, length, 3, 5)}


def denoised(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return {
        "sample": image(draw, batch, length),
        "timestep": steps(draw, batch),
        "encoder_hidden_states": text(draw, batch, length),
    }


def denoised_video(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return denoised(draw, batch, length) | {"sample": video(draw, batch, length)}


def denoised_frames(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    """With a text for each frame."""
    return denoised_video(draw, batch, length) | {"encoder_hidden_states": text(draw, batch * FRAMES, length)}


def controlled(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    """With an image that is 8 times as large as the latent one."""
    condition = draw.floats(batch, 3, 8 * side(length), 8 * 16)
    return denoised(draw, batch, length) | {"controlnet_cond": condition}


def transformed(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": image(draw, batch, length),
        "timestep": steps(draw, batch),
        "encoder_hidden_states": text(draw, batch, length),
    }


def transformed_video(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return transformed(draw, batch, length) | {"hidden_states": video(draw, batch, length)}


def masked(name: str, values: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    return values | {name: ragged_mask(batch, length)}


def flux(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    tokens = side(length)
    return {
        "hidden_states": draw.floats(batch, tokens, 4),
        "encoder_hidden_states": text(draw, batch, length),
        "pooled_projections": draw.floats(batch, WIDTH),
        "timestep": times(draw, batch),
        "img_ids": positions(tokens),
        "txt_ids": torch.zeros(length, 3),
    }


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def sd3(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return transformed(draw, batch, length) | {"pooled_projections": draw.floats(batch, WIDTH)}


def cogview(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    size = torch.tensor([[128, 128]]).repeat(batch, 1)
    return transformed(draw, batch, length) | {
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros_like(size),
    }


def hunyuan_dit(draw: Draw, batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": square(draw, batch),
        "timestep": steps(draw, batch).float(),
        "encoder_hidden_states": text(draw, batch, 6),
        "text_embedding_mask": ragged_mask(batch, 6),
        "encoder_hidden_states_t5": text(draw, batch, 8),
        "text_embedding_mask_t5": ragged_mask(batch, 8),
        "image_meta_size": draw.floats(batch, 6),
        "style": torch.zeros(batch, dtype=torch.long),
        "image_rotary_emb": (draw.floats(64, 16).cos(), draw.floats(64, 16).sin()),
    }
