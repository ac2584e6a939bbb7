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
_IGNORED = -100
_CLASSES = 2  # the default of num_labels
_CLASSIFICATIONS = (
    "SequenceClassification",
    "ImageClassification",
    "VideoClassification",
    "NextSentencePrediction",
)


def example_call(model: torch.nn.Module, draw: Draw, batch: int, length: int) -> Call:
    """The arguments of a training call: inputs, a ragged mask where it is taken, and labels where the task has them.

    Raises:
        LookupError: forward needs an argument of which nothing is known here.
    """
    names = list(inspect.signature(model.forward).parameters)
    made = _Arguments(model, draw, batch, length, names)
    return Call(kwargs={name: value for name in names if (value := made.of(name)) is not None})


class _Arguments:
    def __init__(self, model: Any, draw: Draw, batch: int, length: int, names: list[str]) -> None:
        self.model, self.config, self.draw = model, model.config, draw
        self.batch, self.length, self.names = batch, length, names
        self.main = model.main_input_name
        self.kind = type(model).__name__.partition("For")[2]
        self.shape = (batch, CHOICES, length) if self.kind == "MultipleChoice" else (batch, length)

    def of(self, name: str) -> Any:
        """The value of an argument; None leaves it out."""
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
        return ids

    def _input_ids(self) -> torch.Tensor | None:
        return self._tokens() if self.main == "input_ids" or "pixel_values" in self.names else None

    def _attention_mask(self) -> torch.Tensor | None:
        if self.main != "input_ids":
            return None
        mask = ragged_mask(self.batch, self.length)
        return mask[:, None].expand(self.shape).contiguous() if self.kind == "MultipleChoice" else mask

    def _decoder_input_ids(self) -> torch.Tensor | None:
        if not getattr(self.config, "is_encoder_decoder", False) or self._has_token_labels():
            return None
        return self.draw.ints(VOCABULARY - 12, self.batch, self.length, low=11)

    # Images and sound

    def _channels(self) -> int:
        vision = getattr(self.config, "vision_config", None) or self.config
        return int(getattr(vision, "num_channels", 3) or 3)

    def _pixel_values(self) -> torch.Tensor | None:
        vision = getattr(self.config, "vision_config", None) or self.config
        size = getattr(vision, "image_size", IMAGE) or IMAGE
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        frames = getattr(self.config, "num_frames", None) if self.kind == "VideoClassification" else None
        shape = (self._channels(), int(height), int(width))
        return self.draw.floats(self.batch, *((frames,) if frames else ()), *shape)

    def _input_values(self) -> torch.Tensor:
        if "AST" in type(self.model).__name__:
            return self.draw.floats(self.batch, self.config.max_length, self.config.num_mel_bins)
        return self.draw.floats(self.batch, SAMPLES + 40 * self.length)

    def _input_features(self) -> torch.Tensor | None:
        mels = int(getattr(self.config, "num_mel_bins", None) or getattr(self.config, "input_feat_per_channel", 16))
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
        elif self.kind == "MultipleChoice":
            return self.draw.ints(CHOICES, self.batch)
        elif self.kind in (
            "SequenceClassification",
            "ImageClassification",
            "VideoClassification",
            "NextSentencePrediction",
        ):
            return self.draw.ints(_CLASSES, self.batch)
        else:
            return None
        if self.main == "input_ids":
            labels[ragged_mask(self.batch, self.length) == 0] = _IGNORED
        return labels

    def _start_positions(self) -> torch.Tensor | None:
        return self.draw.ints(self.length, self.batch) if self.kind == "QuestionAnswering" else None

    _end_positions = _start_positions

    def _bbox(self) -> torch.Tensor:
        corners = self.draw.ints(50, self.batch, self.length, 4)
        corners[..., 2:] += corners[..., :2]
        return corners
