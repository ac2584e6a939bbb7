"""Let forward take the operators of eager PyTorch where it takes others in a model for another runtime.

The gated delta nets of transformers solve a triangular system by one operator. In an exported model they loop over the
64 rows of a chunk instead, because other runtimes lack the operator: 500 nodes a layer, in every step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType

from onnxtrain.capture import source_location
from onnxtrain.torch_compat.patch_points import IS_EXPORTING

_QUESTIONS_OF_COMPILATION = frozenset({"is_compiling", "is_dynamo_compiling", "is_torchdynamo_compiling", "is_tracing"})


def eager_operators() -> AbstractContextManager[None]:
    """Answer False to a function of the user's code that asks only whether the model is exported.

    A function that also asks whether it is compiled gets the true answer: transformers' Mamba would call the scan of
    torch.compile, and its masks would depend on the sizes. The caller must hold the capture lock.
    """
    return IS_EXPORTING.replaced_in_thread(partial(_is_exporting, IS_EXPORTING.original))


def _is_exporting(original: Callable[[], bool]) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _passes_on(frame):
        frame = frame.f_back
    if frame is None or not source_location.is_user_file(frame.f_code.co_filename):
        return original()
    return bool(_QUESTIONS_OF_COMPILATION.intersection(frame.f_code.co_names)) and original()


def _passes_on(frame: FrameType) -> bool:
    """Return whether a frame only passes the answer on, as transformers' `is_torchdynamo_exporting` does."""
    code = frame.f_code
    return code.co_filename.startswith(source_location.PACKAGE) or code.co_name.startswith("is_")
