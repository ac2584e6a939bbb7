"""Let forward use the operators of eager PyTorch where it would use others for another runtime.

The gated delta nets of transformers solve a triangular system by one operator. In an exported model they loop over the
64 rows of a chunk instead, because other runtimes lack the operator: 500 nodes a layer, in every step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from onnxtrain.capture import source_location
from onnxtrain.capture.effects.side_effects import SideEffectError
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.patch_points import IS_EXPORTING

_T = TypeVar("_T")
_QUESTIONS_OF_COMPILATION = frozenset({"is_compiling", "is_dynamo_compiling", "is_torchdynamo_compiling", "is_tracing"})


def with_eager_operators(capture: Callable[[], _T]) -> _T:
    """Capture, and answer False to a function of the user's code that asks only whether the model is exported.

    A function that also asks whether it is compiled gets the true answer: transformers' Mamba would call the scan of
    torch.compile, and its masks would depend on the sizes. If what eager PyTorch runs cannot be captured, as a branch
    on elements that a model leaves out of an export, what the model has for other runtimes is captured. The caller must
    hold the capture lock.
    """
    answers = _Answers()
    try:
        with IS_EXPORTING.replaced_in_thread(answers.is_exporting):
            return capture()
    except SideEffectError:
        raise
    except CaptureError:
        if not answers.is_other:
            raise
    return capture()


class _Answers:
    """Answers whether the model is exported.

    Attributes:
        is_other: whether an answer was not the true one.
    """

    def __init__(self) -> None:
        self.is_other = False
        self._original = IS_EXPORTING.original

    def is_exporting(self) -> bool:
        answer = self._original()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _passes_on(frame):
            frame = frame.f_back
        if frame is None or not source_location.is_user_file(frame.f_code.co_filename):
            return bool(answer)
        if _QUESTIONS_OF_COMPILATION.intersection(frame.f_code.co_names):
            return bool(answer)
        self.is_other = self.is_other or answer
        return False


def _passes_on(frame: FrameType) -> bool:
    """Return whether a frame only passes the answer on, as transformers' `is_torchdynamo_exporting` does."""
    code = frame.f_code
    return code.co_filename.startswith(source_location.PACKAGE) or code.co_name.startswith("is_")
