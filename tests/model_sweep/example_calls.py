"""Arguments for a call of a transformers model, from the names that its forward takes."""

from __future__ import annotations

import inspect
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


class _Arguments:
    def __init__(self, model: Any, draw: Draw, batch: int, length: int, names: list[str]) -> None:
        self.model, self.config, self.draw = model, model.config, draw
        self.batch, self.length, self.names = batch, length, names
        self.main = model.main_input_name
        self.kind = type(model).__name__.partition("For")[2]
        self.image_tokens = self._count_image_tokens()
        self.length += self.image_tokens
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
        if self.kind in ("SequenceClassification", "QuestionAnswering") and isinstance(eos, int):
            ids[..., -1] = eos  # BART's heads read the last end of a sequence
        separator = getattr(self.config, "sep_token_id", None)
        if separator is not None:
            ids[..., 2:8:2] = separator  # Longformer's heads look for the end of the question: three of them
        if self.image_tokens:
            ids[..., : self.image_tokens] = self._image_token()
        return ids

    def _image_token(self) -> int | None:
        token: int | None = getattr(self.config, "image_token_id", None)
        return getattr(self.config, "image_token_index", None) if token is None else token

    def _count_image_tokens(self) -> int:
        """The features of an image, which replace as many tokens: the model says how many."""
        if self._image_token() is None or not {"input_ids", "pixel_values"} <= set(self.names):
            return 0
        if self.kind in _TEXT_CLASSIFICATIONS:
            return 0
        if "image_grid_thw" in self.names:
            merged = getattr(self._vision_config(), "spatial_merge_size", 1)
            return int((GRID // merged) ** 2)
        image_features = self._image_features()
        if image_features is None:
            return 0
        sizes = {} if self._image_sizes() is None else {"image_sizes": self._image_sizes()}
        with torch.no_grad(), torch.random.fork_rng():
            features = image_features(self._images(), **sizes)
        features = getattr(features, "pooler_output", features)
        parts = features if isinstance(features, (list, tuple)) else [features]
        return sum(part.numel() // part.shape[-1] for part in parts) // self.batch

    def _input_ids(self) -> torch.Tensor | None:
        return self._tokens() if self.main == "input_ids" or "pixel_values" in self.names else None

    def _attention_mask(self) -> torch.Tensor | None:
        if self.main == "input_features" and "Whisper" not in type(self.model).__name__:
            return torch.ones(self.batch, FRAMES, dtype=torch.long)
        if self.main != "input_ids":
            return None
        mask = self._mask()
        return mask[:, None].expand(self.shape).contiguous() if self.kind == "MultipleChoice" else mask

    def _mask(self) -> torch.Tensor:
        """Return ones for the images, then the ragged text."""
        text = ragged_mask(self.batch, self.length - self.image_tokens)
        return torch.cat([text.new_ones(self.batch, self.image_tokens), text], 1)

    def _decoder_input_ids(self) -> torch.Tensor | None:
        if not getattr(self.config, "is_encoder_decoder", False) or self._has_token_labels():
            return None
        return self.draw.ints(VOCABULARY - 12, self.batch, self.length, low=11)

    # Images and sound

    def _vision_config(self) -> Any:
        return getattr(self.config, "vision_config", None) or self.config

    def _pixel_values(self) -> torch.Tensor | None:
        if self._image_token() is not None and self.kind in _TEXT_CLASSIFICATIONS:
            return None
        return self._images()

    def _images(self) -> torch.Tensor:
        vision = self._vision_config()
        channels = int(getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3)
        if "image_grid_thw" in self.names:
            of_patch = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
            return self.draw.floats(self.batch * GRID**2, of_patch)
        size = getattr(vision, "image_size", IMAGE) or IMAGE
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        shape = (channels, int(height), int(width))
        if self.kind == "VideoClassification" and getattr(self.config, "num_frames", None):
            return self.draw.floats(self.batch, self.config.num_frames, *shape)
        if "pixel_attention_mask" in self.names and "spatial_shapes" not in self.names:
            return self.draw.floats(self.batch, 1, *shape)  # a sample has a list of images
        return self.draw.floats(self.batch, *shape)

    def _pixel_values_videos(self) -> torch.Tensor | None:
        if self.main != "pixel_values_videos":
            return None
        frames = getattr(self.config, "frames_per_clip", None) or self.config.num_frames
        return self.draw.floats(self.batch, frames, 3, IMAGE, IMAGE)

    def _image_features(self) -> Any:
        return getattr(self.model.base_model, "get_image_features", None)

    def _image_sizes(self) -> torch.Tensor | None:
        """The sizes of the images where the vision model needs them; Llava takes them for other vision models."""
        features = self._image_features()
        parameter = inspect.signature(features).parameters.get("image_sizes") if features is not None else None
        needed = parameter is not None and parameter.default is inspect.Parameter.empty
        return torch.full((self.batch, 2), IMAGE) if needed else None

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
        return self.draw.floats(self.batch, FRAMES, mels)

    def _past_values(self) -> torch.Tensor:
        return self.draw.floats(
            self.batch, int(self.config.context_length), int(getattr(self.config, "num_input_channels", 1))
        )

    # Labels

    def _has_token_labels(self) -> bool:
        return self.kind in ("CausalLM", "MaskedLM", "ConditionalGeneration", "TokenClassification") or (
            type(self.model).__name__.endswith(("LMHeadModel", "HeadModel"))
        )

    def _labels(self) -> torch.Tensor | None:
        if self.kind == "CTC":
            return self.draw.ints(VOCABULARY - 12, self.batch, 3, low=11)
        if self.kind == "TokenClassification":
            labels = self.draw.ints(_CLASSES, self.batch, self.length)
        elif self._has_token_labels():
            labels = self.draw.ints(VOCABULARY - 12, self.batch, self.length, low=11)
            labels[:, : self.image_tokens] = _IGNORED
        elif self.kind == "MultipleChoice":
            return self.draw.ints(CHOICES, self.batch)
        elif self.kind in _CLASSIFICATIONS:
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
