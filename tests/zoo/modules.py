"""Models of plain PyTorch, each for one thing that capture or differentiation must get right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.zoo.entry import BATCHES, SEQUENCES, Call, Draw, ZooModel, mean_square, ragged_mask, wide

WORDS = 30
CLASSES = 4
WIDTH = 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(),
            nn.Dropout(0.2), nn.Linear(32, CLASSES),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, narrow: int, broad: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(narrow, broad, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(broad)
        self.conv2 = nn.Conv2d(broad, broad, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(broad)
        self.shortcut = nn.Sequential()
        if stride != 1 or narrow != broad:
            self.shortcut = nn.Sequential(nn.Conv2d(narrow, broad, 1, stride, bias=False), nn.BatchNorm2d(broad))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.Sequential(_Block(8, 8, 1), _Block(8, 16, 2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.blocks(self.pool(self.stem(x))))
        return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embed(words), src_key_padding_mask=mask == 0)
        weights = mask.to(hidden.dtype)[..., None]
        return self.head((hidden * weights).sum(1) / weights.sum(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rnn = kind(WIDTH, 12, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states, _ = self.rnn(self.embed(words))
        logits = self.head(states.mean(1))
        return F.cross_entropy(logits, labels), logits


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
        self.total = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        bags = torch.cat([self.mean(words, offsets), self.total(words, offsets, per_sample_weights=weights)], -1)
        return self.head(F.dropout(bags, 0.1, self.training))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One matrix embeds the words and scores them; one norm is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.again = self.norm
        self.score = nn.Linear(WIDTH, WORDS)
        self.score.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(words))
        hidden = self.again(hidden + torch.tanh(self.inner(hidden)))
        return self.score(hidden)  # type: ignore[no-any-return]


class PartlyFrozen(nn.Module):
    """A teacher under no_grad beside a student that shares a layer with it, and a detached scale."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, 24)
        self.teacher = nn.Linear(24, CLASSES)
        self.student = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.shared(x))
        with torch.no_grad():
            target = F.softmax(self.teacher(hidden) * 2, -1)
            scale = hidden.abs().mean(-1, keepdim=True)
        scores = self.student(F.dropout(hidden, 0.1, self.training)) / scale
        return scores - target * hidden.norm(dim=-1, keepdim=True).detach()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(24)) for _ in range(2)
        )
        self.last = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.last(hidden)  # type: ignore[no-any-return]


@dataclass
class Scores:
    """Hugging Face's models return such classes; this one knows nothing of them."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None
    attention: torch.Tensor | None = None
    size: int = 0
    note: str = ""


class WithDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 24)
        self.last = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, keep: bool = False) -> Scores:
        hidden = F.dropout(F.silu(self.first(x)), 0.1, self.training)
        logits = self.last(hidden)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Scores(loss, logits, (x, hidden) if keep else None, size=x.shape[0], note="scores")


class Hooked(nn.Module):
    """A submodule whose backward hook halves what flows through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 24)
        self.last = nn.Linear(24, CLASSES)
        self.first.register_full_backward_hook(_halve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def _halve(module: nn.Module, to_inputs: Any, to_outputs: Any) -> Any:
    return tuple(None if g is None else 0.5 * g for g in to_inputs)


class Normed(nn.Module):
    """weight_norm, as a parametrization or in its older form, a hook before forward."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first = norm(nn.Linear(WIDTH, 24))
        self.conv = norm(nn.Conv1d(1, 3, 3, padding=1))
        self.last = nn.Linear(72, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.first(x))
        return self.last(self.conv(hidden[:, None]).flatten(1))  # type: ignore[no-any-return]


def _old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, that this form is old
        return torch.nn.utils.weight_norm(module)  # type: ignore[no-any-return]  # its decorator has no types


def _features(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH, grad=True),))


def _labeled(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH, grad=True), draw.ints(CLASSES, batch)), {"keep": True})


def _images(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, 3, length, length + 1), draw.ints(CLASSES, batch)))


def _words(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.ints(WORDS, batch, length),))


def _masked(draw: Draw, batch: int, length: int) -> Call:
    mask = ragged_mask(batch, length)
    return Call((draw.ints(WORDS, batch, length, low=1) * mask, mask))


def _sentences(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.ints(WORDS, batch, length), draw.ints(CLASSES, batch)))


def _bags(draw: Draw, batch: int, length: int) -> Call:
    """`batch` bags of 0 to 4 words; the second is empty."""
    counts = draw.ints(4, batch, low=1)
    counts[1:2] = 0
    ends = counts.cumsum(0)
    count = int(ends[-1])
    return Call((draw.ints(WORDS, count), ends - counts, draw.floats(count, grad=True)))


def _with_output(output: Any) -> torch.Tensor:
    """A loss in which all the outputs have a gradient."""
    return output.loss + 0.1 * wide(output.logits).square().mean() + 0.1 * wide(output.hidden[1]).square().mean()  # type: ignore[no-any-return]


def _first(output: Any) -> torch.Tensor:
    return output[0]  # type: ignore[no-any-return]


def _by_key(output: Any) -> torch.Tensor:
    return output["loss"]  # type: ignore[no-any-return]


MODELS = (
    ZooModel("mlp", Mlp, _features, mean_square, BATCHES),
    ZooModel("resnet", ResNet, _images, _by_key, ((3, 16), (1, 9), (2, 12))),
    ZooModel("transformer-encoder", Encoder, _masked, mean_square),
    ZooModel("lstm", lambda: Recurrent(nn.LSTM), _sentences, _first, SEQUENCES),
    ZooModel("gru", lambda: Recurrent(nn.GRU), _sentences, _first, SEQUENCES),
    ZooModel("embedding-bag", Bags, _bags, mean_square, BATCHES),
    ZooModel("tied-weights", Tied, _words, mean_square, SEQUENCES),
    ZooModel("no-grad-region", PartlyFrozen, _features, mean_square, BATCHES),
    ZooModel("checkpoint-reentrant", lambda: Checkpointed(True), _features, mean_square, BATCHES),
    ZooModel("checkpoint-non-reentrant", lambda: Checkpointed(False), _features, mean_square, BATCHES),
    ZooModel("dataclass", WithDataclass, _labeled, _with_output, BATCHES),
    ZooModel("backward-hook", Hooked, _features, mean_square, BATCHES, falls_back="hook"),
    ZooModel("weight-norm", lambda: Normed(weight_norm), _features, mean_square, BATCHES),
    ZooModel("weight-norm-hook", lambda: Normed(_old_weight_norm), _features, mean_square, BATCHES, falls_back="hook"),
)
