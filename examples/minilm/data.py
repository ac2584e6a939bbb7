"""Python's own reference text as a classification task: which topic does a paragraph come from?

    pydoc_data.topics ─split─▶ paragraphs ─label─▶ corpus(train, held out) ─tokenise, pad─▶ batches

The text comes with every Python, so nothing is downloaded. All choices are fixed by the seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics as reference_text
from typing import Protocol

import torch

Batch = dict[str, torch.Tensor]

_BLANK_LINE = re.compile(r"\n\s*\n")
_MIN_WORDS = 8  # shorter ones are headings, grammar rules and single lines of code


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    def __call__(
        self, text: list[str], *, truncation: bool, max_length: int, padding: bool, return_tensors: str
    ) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Paragraph:
    """A text and the number of its topic."""

    text: str
    label: int


@dataclass(frozen=True)
class Corpus:
    """Paragraphs to train on and paragraphs held out, both with every topic in the same proportion."""

    topics: tuple[str, ...]
    train: tuple[Paragraph, ...]
    held_out: tuple[Paragraph, ...]


def split_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of `text` that have enough words to tell a topic, each on one line."""
    lines = (" ".join(part.split()) for part in _BLANK_LINE.split(text))
    return [line for line in lines if len(line.split()) >= _MIN_WORDS]


def load_corpus(
    *,
    seed: int,
    texts: Mapping[str, str] = reference_text,
    min_paragraphs: int = 20,
    max_topics: int | None = None,
    held_out_share: float = 0.2,
) -> Corpus:
    """Labels paragraphs with their topic, keeps the topics that have enough of them, and splits each topic.

    Some topics contain others whole ('compound' holds 'try' and 'with'). A paragraph that stands in several belongs
    to the shortest, which is the most specific; so no paragraph has two labels or stands on both sides of the split.
    20 paragraphs a topic leave 16 to learn from and 4 to be judged by: 19 topics of Python 3.11 have that many.
    """
    owner: dict[str, str] = {}
    for topic in sorted(texts, key=lambda name: (len(texts[name]), name)):
        for paragraph in split_paragraphs(texts[topic]):
            owner.setdefault(paragraph, topic)
    of_topic: dict[str, list[str]] = {}
    for paragraph, topic in owner.items():
        of_topic.setdefault(topic, []).append(paragraph)
    large = [topic for topic, paragraphs in of_topic.items() if len(paragraphs) >= min_paragraphs]
    large.sort(key=lambda topic: (-len(of_topic[topic]), topic))
    names = tuple(sorted(large[:max_topics]))

    shuffle = random.Random(seed).shuffle
    train: list[Paragraph] = []
    held_out: list[Paragraph] = []
    for label, topic in enumerate(names):
        paragraphs = [Paragraph(text, label) for text in sorted(of_topic[topic])]
        shuffle(paragraphs)
        held = max(1, round(len(paragraphs) * held_out_share))
        held_out += paragraphs[:held]
        train += paragraphs[held:]
    shuffle(train)
    shuffle(held_out)
    return Corpus(names, tuple(train), tuple(held_out))


def make_batch(paragraphs: Sequence[Paragraph], tokenizer: Tokenizer, max_length: int) -> Batch:
    """Tokenize paragraphs and pad them to the longest one."""
    tokens = tokenizer(
        [paragraph.text for paragraph in paragraphs],
        truncation=True,
        max_length=max_length,
        padding=True,
        return_tensors="pt",
    )
    return {
        "input_ids": tokens["input_ids"],
        "attention_mask": tokens["attention_mask"],
        "labels": torch.tensor([paragraph.label for paragraph in paragraphs]),
    }


def training_batches(
    corpus: Corpus, tokenizer: Tokenizer, *, steps: int, batch_size: int, max_length: int, seed: int
) -> list[Batch]:
    """Return a full batch for each step, each epoch in a different order; created before any step is timed."""
    if not 1 <= batch_size <= len(corpus.train):
        raise ValueError(f"expected a batch size from 1 to {len(corpus.train)} paragraphs, got {batch_size}")
    rng = random.Random(seed)
    batches: list[Batch] = []
    while len(batches) < steps:
        order = list(corpus.train)
        rng.shuffle(order)
        starts = range(0, len(order) - batch_size + 1, batch_size)
        batches += [make_batch(order[start : start + batch_size], tokenizer, max_length) for start in starts]
    return batches[:steps]


def held_out_batches(corpus: Corpus, tokenizer: Tokenizer, *, batch_size: int, max_length: int) -> list[Batch]:
    """Return all held-out paragraphs, the shortest first, so that little is padded; the last batch may be smaller."""
    paragraphs = sorted(corpus.held_out, key=lambda paragraph: (len(paragraph.text), paragraph.text))
    starts = range(0, len(paragraphs), batch_size)
    return [make_batch(paragraphs[start : start + batch_size], tokenizer, max_length) for start in starts]


def count_tokens(batch: Batch) -> int:
    """Return the tokens of a batch that are not padding."""
    return int(batch["attention_mask"].sum())
