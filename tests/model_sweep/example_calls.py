"""Arguments for a call of a transformers model, from the names that its forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from tests.model_sweep.small_configs import IMAGE, VOCABULARY
from tests.zoo.entry import Call, Draw, ragged_mask

CHOICES = 2
SAMPLES = 1600  # of a waveform: a tenth of a second
FRAMES = 64  # of a spectrogram
GRID = 4  # patches along each side of an image that comes as patches
_IGNORED = -100
_CLASSES = 2  # the default of num_labels
_CLASSIFICATIONS = (
    "SequenceClassification",
    "ImageClassification",
    "VideoClassification",
    "NextSentencePrediction",
)

_TEXT_CLASSIFICATIONS = ("SequenceClassification", "TokenClassification")


def example_call(model: torch.nn.Module, draw: Draw, batch: int, length: int) -> Call:
    """The arguments of a training call: inputs, a ragged mask where it is taken, and labels where the task has them.

    Raises:
        LookupError: forward needs an argument of which nothing is known here.
    """
    names = list(inspect.signature(model.forward).parameters)
    arguments = _Arguments(model, draw, batch, length, names)
    return Call(kwargs={name: value for name in names if (value := arguments.value_of(name)) is not None})


def _with_nested(config: Any) -> Iterator[Any]:
    """Yield a config and those nested in it, the outer ones first."""
    configs = [config]
    while configs:
        config = configs.pop(0)
        yield config
        configs += [nested for name in config.sub_configs if (nested := getattr(config, name, None)) is not None]


def _kind(name: str) -> str:
    """What the class is for: "MultipleChoice" of RoFormerForMultipleChoice."""
    return name.rpartition("For")[2] if "For" in name else ""


class _Arguments:
    def __init__(self, model: Any, draw: Draw, batch: int, length: int, names: list[str]) -> None:
        self.model, self.config, self.draw = model, model.config, draw
        self.batch, self.length, self.names = batch, length, names
        self.main = model.main_input_name
        self.kind = _kind(type(model).__name__)
        self.image_tokens = self._count_image_tokens()
        self.audio_tokens = self._count_audio_tokens()
        self.media_tokens = self.image_tokens + self.audio_tokens
        self.length += self.media_tokens
        if self.main == "inputs" and self.kind == "MaskedLM":
            self.length = self.config.max_position_embeddings  # Perceiver has a result for each
        self.shape = (batch, CHOICES, length) if self.kind == "MultipleChoice" else (batch, self.length)

    def value_of(self, name: str) -> Any:
        """Return the value of an argument; None if the call skips it."""
        make = getattr(self, f"_{name}", None)
        if make is not None:
            return make()
        if name == self.main:
            raise LookupError(f"no example of {name}")
        return None

    # Text

    def _tokens(self) -> torch.Tensor:
        ids = self.draw.ints(VOCABULARY - 12, *self.shape, low=11)  # beyond the special tokens
        eos = getattr(self.config, "eos_token_id", None)
        separator = getattr(self.config, "sep_token_id", None)
        if self.kind in ("SequenceClassification", "QuestionAnswering") and isinstance(eos, int) and eos != separator:
            ids[..., -1] = eos  # BART's heads read the last end of a sequence
        question = getattr(self.config, "question_token_id", None)
        if question is not None:
            ids[..., 1] = question  # Splinter's head answers it
        if separator is not None:
            ids[..., 2:8:2] = separator  # Longformer's heads look for the end of the question: three of them
        if self.image_tokens:
            ids[..., : self.image_tokens] = self._media_token("image")
        if self.audio_tokens:
            ids[..., self.image_tokens : self.media_tokens] = self._media_token("audio")
        return ids

    def _media_token(self, kind: str) -> int | None:
        """The token that stands for a feature of an image or of audio, of the config or of one nested in it."""
        for config in _with_nested(self.config):
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                token = getattr(config, name, None)
                if isinstance(token, int):
                    return token
        return None

    def _count_image_tokens(self) -> int:
        """The features of an image, which replace as many tokens: the model says how many."""
        if self._media_token("image") is None or not {"input_ids", "pixel_values"} <= set(self.names):
            return 0
        if self.kind in _TEXT_CLASSIFICATIONS:
            return 0
        if "image_grid_thw" in self.names:
            merged = getattr(self._vision_config(), "spatial_merge_size", 1)
            return int((GRID // merged) ** 2)
        image_features = self._image_features()
        if image_features is None:
            return 0
        names = set(inspect.signature(image_features).parameters) - {"pixel_values"}
        return self._count_features(image_features, self._images(), names & set(self.names))

    def _count_audio_tokens(self) -> int:
        """The features of audio; see `_count_image_tokens`. Qwen2Audio inserts them in the place of one token."""
        if self._media_token("audio") is None or "input_features" not in self.names:
            return 0
        audio_features = self._features("get_audio_features")
        if audio_features is None:
            return 1
        names = set(inspect.signature(audio_features).parameters) & {"input_features_mask"}
        return self._count_features(audio_features, self._input_features(), names)

    def _count_features(self, features_of: Any, values: Any, names: set[str]) -> int:
        others = {name: value for name in sorted(names) if (value := self.value_of(name)) is not None}
        with torch.no_grad(), torch.random.fork_rng():
            features = features_of(values, **others)
        features = getattr(features, "pooler_output", features)
        parts = features if isinstance(features, (list, tuple)) else [features]
        return int(sum(part.numel() // part.shape[-1] for part in parts) // self.batch)

    def _input_ids(self) -> torch.Tensor | None:
        if self._has_codebooks():
            return self._tokens().repeat_interleave(self.config.num_codebooks, 0)
        return self._tokens() if self.main == "input_ids" or self.media_tokens or "pixel_values" in self.names else None

    def _attention_mask(self) -> torch.Tensor | None:
        if self.main == "input_features" and "Whisper" not in type(self.model).__name__:
            if "input_ids" not in self.names:
                return torch.ones(self.batch, FRAMES, dtype=torch.long)
            return self._mask()
        if self.main != "input_ids" and not {"input_ids", "input_features"} <= set(self.names):
            return None
        mask = self._mask()
        return mask[:, None].expand(self.shape).contiguous() if self.kind == "MultipleChoice" else mask

    def _mask(self) -> torch.Tensor:
        """Return ones for images and audio, then the ragged text."""
        text = ragged_mask(self.batch, self.length - self.media_tokens)
        return torch.cat([text.new_ones(self.batch, self.media_tokens), text], 1)

    def _decoder_input_ids(self) -> torch.Tensor | None:
        if not getattr(self.config, "is_encoder_decoder", False) or self._has_token_labels():
            return None
        return self.draw.ints(VOCABULARY - 12, self.batch, self.length, low=11)

    # Images and sound

    def _vision_config(self) -> Any:
        names = ("vision_config", "image_config")
        found = (getattr(config, name, None) for config in _with_nested(self.config) for name in names)
        return next((config for config in found if config is not None), self.config)

    def _takes_patches(self, of_patch: int) -> bool:
        """Whether images come as patches, which a linear layer embeds."""
        return any(
            isinstance(module, torch.nn.Linear)
            and module.in_features == of_patch
            and any(part in name for part in ("patch", "vision_embed_tokens", "input_proj"))
            for name, module in self.model.named_modules()
        )

    def _pixel_values(self) -> torch.Tensor | None:
        if self._media_token("image") is not None and self.kind in _TEXT_CLASSIFICATIONS:
            return None
        return self._images()

    def _images(self) -> torch.Tensor:
        vision = self._vision_config()
        channels = int(getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3)
        if "image_grid_thw" in self.names:
            of_patch = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
            images = (self.batch, GRID**2) if self.kind == "Retrieval" else (self.batch * GRID**2,)
            return self.draw.floats(*images, of_patch)
        size = getattr(vision, "image_size", IMAGE) or IMAGE
        if self.kind.endswith(("Fourier", "ConvProcessing")):
            size = 224  # of Perceiver's positions
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        shape = (channels, int(height), int(width))
        if "aspect_ratio_ids" in self.names or getattr(self.config, "image_grid_pinpoints", None):
            tiles = (1, vision.max_num_tiles) if "aspect_ratio_ids" in self.names else (2,)  # the image, and one tile
            return self.draw.floats(self.batch, *tiles, *shape)
        patch = getattr(vision, "patch_size", None)
        if isinstance(patch, int) and self._takes_patches(channels * patch**2):
            return self.draw.floats(self.batch, GRID**2, channels * patch**2)
        is_video = self.kind == "VideoClassification" or hasattr(self.config, "tubelet_size")
        if is_video and getattr(self.config, "num_frames", None):
            return self.draw.floats(self.batch, self.config.num_frames, *shape)
        if self._takes_lists_of_images():
            return self.draw.floats(self.batch, 1, *shape)  # a sample has a list of images
        return self.draw.floats(self.batch, *shape)

    def _takes_lists_of_images(self) -> bool:
        if "spatial_shapes" in self.names:
            return False
        names = set(self.names)
        if (features := self._image_features()) is not None:
            names |= set(inspect.signature(features).parameters)
        return "pixel_attention_mask" in names or self.kind == "VisionText2Text"

    def _codebook_pixel_values(self) -> torch.Tensor:
        """Images whose codes have as many places as there are patches."""
        return self.draw.floats(self.batch, 3, IMAGE, IMAGE)

    def _pixel_values_videos(self) -> torch.Tensor | None:
        if self.main != "pixel_values_videos":
            return None
        frames = getattr(self.config, "frames_per_clip", None) or self.config.num_frames
        return self.draw.floats(self.batch, frames, 3, IMAGE, IMAGE)

    def _image_features(self) -> Any:
        return self._features("get_image_features")

    def _features(self, name: str) -> Any:
        """The method of the model, or of the first submodule that has it."""
        modules = (self.model.base_model, *self.model.modules())
        return next((method for module in modules if (method := getattr(module, name, None)) is not None), None)

    def _image_sizes(self) -> torch.Tensor | None:
        """The sizes of the images where the vision model needs them; Llava takes them for other vision models."""
        features = self._image_features()
        parameter = inspect.signature(features).parameters.get("image_sizes") if features is not None else None
        needed = parameter is not None and parameter.default is inspect.Parameter.empty
        return torch.full((self.batch, 2), IMAGE) if needed else None

    def _aspect_ratio_ids(self) -> torch.Tensor:
        return torch.ones(self.batch, 1, dtype=torch.long)

    def _aspect_ratio_mask(self) -> torch.Tensor:
        mask = torch.zeros(self.batch, 1, self._vision_config().max_num_tiles, dtype=torch.long)
        mask[..., 0] = 1
        return mask

    def _cross_attention_mask(self) -> torch.Tensor | None:
        if "aspect_ratio_ids" not in self.names:
            return None
        return self._aspect_ratio_mask()[:, None].repeat(1, self.length, 1, 1)

    def _image_attention_mask(self) -> torch.Tensor | None:
        if self.kind != "VisionText2Text":
            return None
        return torch.ones(self.batch, self.length, 1, dtype=torch.long)

    def _spatial_shapes(self) -> torch.Tensor:
        return torch.full((self.batch, 2), GRID)

    def _pixel_attention_mask(self) -> torch.Tensor | None:
        return torch.ones(self.batch, GRID**2, dtype=torch.long) if "spatial_shapes" in self.names else None

    def _image_position_ids(self) -> torch.Tensor:
        steps = torch.arange(GRID)
        return torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1).reshape(1, -1, 2).repeat(self.batch, 1, 1)

    def _bool_masked_pos(self) -> torch.Tensor | None:
        """Every other patch, where a model requires it."""
        parameter = inspect.signature(self.model.forward).parameters["bool_masked_pos"]
        is_required = parameter.default is inspect.Parameter.empty
        if not is_required and self.kind != "PreTraining":
            return None
        frames = getattr(self.config, "num_frames", 1) // getattr(self.config, "tubelet_size", 1)
        vision = self._vision_config()
        patches = (vision.image_size // vision.patch_size) ** 2 * frames
        return (torch.arange(patches) % 2 == 0).repeat(self.batch, 1)

    def _visual_feats(self) -> torch.Tensor:
        return self.draw.floats(self.batch, 3, self.config.visual_feat_dim)

    def _visual_pos(self) -> torch.Tensor:
        return self.draw.floats(self.batch, 3, self.config.visual_pos_dim)

    def _inputs(self) -> torch.Tensor | None:
        """What Perceiver reads, where that has no other name."""
        return None if "pixel_values" in self.names else self._tokens()

    def _image_grid_thw(self) -> torch.Tensor | None:
        return torch.tensor([[1, GRID, GRID]]).repeat(self.batch, 1) if self.image_tokens else None

    def _mm_token_type_ids(self) -> torch.Tensor | None:
        if not self.image_tokens:
            return None
        types = torch.zeros(self.shape, dtype=torch.long)
        types[:, : self.image_tokens] = 1
        return types

    def _input_values(self) -> torch.Tensor:
        if "AST" in type(self.model).__name__:
            return self.draw.floats(self.batch, self.config.max_length, self.config.num_mel_bins)
        samples = 5 * SAMPLES if self.kind == "XVector" else SAMPLES  # its convolutions span 15 frames
        return self.draw.floats(self.batch, samples + 40 * self.length)

    def _input_features(self) -> torch.Tensor | None:
        config = getattr(self.config, "audio_config", None) or self.config
        mels = int(getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 16))
        if "Whisper" in type(self.model).__name__:
            return self.draw.floats(self.batch, mels, 2 * self.config.max_source_positions)
        frames = self._frames()
        takes_mels_first = any(
            (isinstance(module, torch.nn.Conv1d) and module.in_channels == mels and "conv1" in name)
            or (isinstance(module, torch.nn.Conv2d) and "conv2d1" in name)
            for name, module in self.model.named_modules()
        )
        return self.draw.floats(self.batch, *((mels, frames) if takes_mels_first else (frames, mels)))

    def _frames(self) -> int:
        """The frames of a spectrogram: as many as an encoder has positions for, where it takes no others."""
        config = getattr(self.config, "audio_config", None)
        positions = getattr(config, "max_source_positions", None)
        window = getattr(config, "n_window", None)
        return 2 * positions if positions else 2 * window if window else FRAMES

    def _input_features_mask(self) -> torch.Tensor | None:
        features = self._features("get_audio_features")
        if features is None or "input_features_mask" not in inspect.signature(features).parameters:
            return None  # GraniteSpeech's selects among the features instead
        return torch.ones(self.batch, self._frames(), dtype=torch.long)

    def _feature_attention_mask(self) -> torch.Tensor:
        return torch.ones(self.batch, self._frames(), dtype=torch.long)

    def _past_values(self) -> torch.Tensor:
        return self.draw.floats(
            self.batch, int(self.config.context_length), int(getattr(self.config, "num_input_channels", 1))
        )

    # Labels

    def _has_token_labels(self) -> bool:
        return self.kind in ("CausalLM", "MaskedLM", "ConditionalGeneration", "TokenClassification") or (
            type(self.model).__name__.endswith(("LMHeadModel", "HeadModel"))
        )

    def _has_codebooks(self) -> bool:
        """Whether a step is a token of each codebook."""
        return type(self.config).__name__ in ("MusicgenDecoderConfig", "MusicgenMelodyDecoderConfig")

    def _labels(self) -> torch.Tensor | None:
        if self.kind == "CTC":
            return self.draw.ints(VOCABULARY - 12, self.batch, 3, low=11)
        if self.kind == "TokenClassification":
            labels = self.draw.ints(_CLASSES, self.batch, self.length)
        elif self._has_token_labels():
            codebooks = (self.config.num_codebooks,) if self._has_codebooks() else ()
            labels = self.draw.ints(VOCABULARY - 12, self.batch, self.length, *codebooks, low=11)
            labels[:, : self.media_tokens] = _IGNORED
        elif self.kind == "MultipleChoice":
            return self.draw.ints(CHOICES, self.batch)
        elif self.kind in _CLASSIFICATIONS and not self.media_tokens:
            return self.draw.ints(_CLASSES, self.batch)
        else:
            return None
        if self.main == "input_ids":
            labels[self._mask() == 0] = _IGNORED
        return labels

    def _start_positions(self) -> torch.Tensor | None:
        return self.draw.ints(self.length, self.batch) if self.kind == "QuestionAnswering" else None

    _end_positions = _start_positions

    def _bbox(self) -> torch.Tensor:
        corners = self.draw.ints(50, self.batch, self.length, 4)
        corners[..., 2:] += corners[..., :2]
        return corners
