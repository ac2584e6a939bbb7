"""Skip candidates that were slower at nearby sizes of the same question.

If one size changes, such as the number of rows, the ratio of two candidates' times changes little. Of 650 candidates
that were not the fastest, in 519 answers about the matmuls of some models, this rule skips 509; in 9 of the answers it
also skips the fastest, where that gained more than 3 % (1 and 2 threads of a virtual Xeon).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

from onnxtrain.execute.kernel_choice.times import Answer, Answers

_FARTHEST = 3.0  # doublings of that size
_RATIO_DRIFT = 1.05  # the factor by which a ratio may change with each doubling
_NUMBER = re.compile(r"\d+")


def worse_nearby(question: str, sizes: str, candidates: Sequence[str], answers: Answers) -> set[str]:
    """Return the candidates that were slower than another one at the nearest measured sizes.

    Args:
        question: an op, its attributes and element type.
        sizes: the sizes of its inputs, as they follow the question in the keys of `answers`.
        candidates: the names of kernels.
        answers: all answers so far, by question and sizes.
    """
    nearest, distance = _nearest(question, sizes, answers)
    if nearest is None:
        return set()
    seconds = {name: s.seconds for name, s in nearest.samples.items() if name in candidates}
    limit = min(seconds.values(), default=math.inf) * _RATIO_DRIFT**distance
    return {name for name, measured in seconds.items() if measured > limit}


def _nearest(question: str, sizes: str, answers: Answers) -> tuple[Answer | None, float]:
    """Return the clean answer at the nearest sizes, and their distance in doublings."""
    nearest, least = None, _FARTHEST
    for key, answer in tuple(answers.items()):  # another thread may add one meanwhile
        if answer.is_clean and key.startswith(f"{question} "):
            distance = _doublings(sizes, key[len(question) + 1 :])
            if distance <= least:
                nearest, least = answer, distance
    return nearest, least


def _doublings(a: str, b: str) -> float:
    """Return the doublings between two texts of sizes that differ in one size, wherever it occurs; else infinite."""
    (a_template, a_sizes), (b_template, b_sizes) = _split_sizes(a), _split_sizes(b)
    if a_template != b_template or 0 in a_sizes or 0 in b_sizes:
        return math.inf
    ratios = {x / y for x, y in zip(a_sizes, b_sizes, strict=True) if x != y}
    return abs(math.log2(ratios.pop())) if len(ratios) == 1 else math.inf


@functools.lru_cache(4096)
def _split_sizes(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the text with each integer replaced by "#", and the integers."""
    return _NUMBER.sub("#", text), tuple(map(int, _NUMBER.findall(text)))
