"""What a graph assumes that forward gets where it branches on a tensor's value, and the check of it in each call.

The tested tensor is a further result of the graph. A call with another answer runs in PyTorch, before the graph has
changed anything. Assumed are tests of finite values (`finite_checks`), and answers that depend on the module's
parameters or buffers (`element_decisions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AssumedAnswer:
    """What a graph assumes that forward gets where it branches on a tensor's value.

    Attributes:
        result: the index of the tested tensor among the graph's results.
        answer: its assumed truth value.
        where: the source location of the test.
        is_of_finite: whether it is a test of finite values. Any other has the answer of the captured call, and another
            answer is likely to last.
    """

    result: int
    answer: bool
    where: str
    is_of_finite: bool = True


class WrongAnswerError(Exception):
    """A call branches on a tensor's value, and the answer is not the one that its graph assumes."""

    def __init__(self, assumed: AssumedAnswer) -> None:
        why = "its values are not finite as before"
        if not assumed.is_of_finite:
            why = "the answer depends on the module's parameters or buffers, and has changed"
        super().__init__(f"forward branches otherwise at {assumed.where}: {why}")
        self.assumed = assumed


def check_answers(assumed: Sequence[AssumedAnswer], results: Sequence[Any]) -> None:
    """Raise WrongAnswerError unless the results of a call are as its graph assumes."""
    for each in assumed:
        if bool(results[each.result]) != each.answer:
            raise WrongAnswerError(each)
