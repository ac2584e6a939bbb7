"""What is known at other sizes of the same question: which candidates need not be tried at these.

Where one size is another, such as the number of rows, the ratio of two candidates' times changes little: of 650
candidates that were not the fastest, in 519 answers about the products of some models, this rule leaves out 509; in 9
of the answers also the fastest, which gained more than 3 % (1 and 2 threads of a virtual Xeon).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

from onnxtrain.execute.kernel_choice.times import Answer, Answers

_FARTHEST = 3.0  # doublings of that size
_STEADY = 1.05  # times, by which a ratio may change with each doubling
_NUMBER = re.compile(r"\d+")


def worse_nearby(question: str, sizes: str, candidates: Sequence[str], answers: Answers) -> set[str]:
    """Those of `candidates` that were slower than another of them at the nearest sizes that were measured.

    Args:
        question: an op, its attributes and element type.
        sizes: those of its inputs, as they stand behind it in the keys of `answers`.
        candidates: names.
        answers: what is known.
    """
    nearest, away = _nearest(question, sizes, answers)
    if nearest is None:
        return set()
    seconds = {name: s.seconds for name, s in nearest.samples.items() if name in candidates}
    limit = min(seconds.values(), default=math.inf) * _STEADY**away
    return {name for name, took in seconds.items() if took > limit}


def _nearest(question: str, sizes: str, answers: Answers) -> tuple[Answer | None, float]:
    """The clean answer at the nearest sizes, and how far away these are."""
    nearest, away = None, _FARTHEST
    for key, answer in tuple(answers.items()):  # another thread may add one meanwhile
        if answer.is_clean and key.startswith(f"{question} "):
            distance = _doublings(sizes, key[len(question) + 1 :])
            if distance <= away:
                nearest, away = answer, distance
    return nearest, away


def _doublings(one: str, other: str) -> float:
    """Between texts where one size is another, wherever it stands; else infinite."""
    (form, here), (its_form, there) = _parts(one), _parts(other)
    if form != its_form or 0 in here or 0 in there:
        return math.inf
    ratios = {a / b for a, b in zip(here, there, strict=True) if a != b}
    return abs(math.log2(ratios.pop())) if len(ratios) == 1 else math.inf


@functools.lru_cache(4096)
def _parts(text: str) -> tuple[str, tuple[int, ...]]:
    """What is left without the numbers, and the numbers."""
    return _NUMBER.sub("#", text), tuple(map(int, _NUMBER.findall(text)))
