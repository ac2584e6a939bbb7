"""Which line of the user's code something comes from: the innermost frame outside PyTorch and onnxtrain.

And tracebacks of the user's own errors, without the frames of onnxtrain.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

# With the separator at the end: torchvision, and a user's folder onnxtrain-experiments, begin with these names too.
PYTORCH = f"{Path(torch.__file__).parent}{os.sep}"
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_OWN = (PACKAGE, "<onnxtrain ")
_NOT_THE_USERS = (PYTORCH, *_OWN, "<")
_PYTHONS = ("<frozen ",)  # imports, and what runs scripts
_WRITTEN_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def is_user_file(filename: str) -> bool:
    """Whether a source file belongs to the user: not to PyTorch, to onnxtrain or to generated code."""
    return not filename.startswith(_NOT_THE_USERS)


def _show(filename: str, line: int | str, function: str) -> str:
    return f"{filename}:{line} in {function}"


def as_text(frame: FrameType | None) -> str | None:
    """The innermost user's line of a frame and its callers, as a traceback of one entry, which `in_text` reads."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'


def in_text(trace: str | None) -> str | None:
    """The line in a traceback that was written down as text."""
    frames = [f for f in _WRITTEN_FRAME.findall(trace or "") if is_user_file(f[0])]
    return _show(*frames[-1]) if frames else None


def in_code(code: CodeType, line: int) -> str:
    """A line of some code."""
    return _show(code.co_filename, line, code.co_name)


def in_error(error: BaseException) -> str | None:
    """The line that raised an error, or that its text names."""
    current: BaseException | None = error
    while current is not None:
        found = _in_traceback(current.__traceback__)
        if found:
            return found
        current = current.__cause__ or current.__context__
    return in_text(str(error))


def _in_traceback(trace: TracebackType | None) -> str | None:
    found = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_file(code.co_filename):
            found = _show(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found


def hide_own_frames(error: BaseException) -> bool:
    """Takes the frames of onnxtrain out of the traceback of an error that the user's code raised.

    What onnxtrain raised itself keeps them, and so does what PyTorch raised where onnxtrain called it.

    Returns:
        Whether the user's code raised it.
    """
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    raised_in = next((file for file in reversed(files) if not file.startswith((PYTORCH, *_PYTHONS))), "<")
    if isinstance(error, SyntaxError):  # the file that cannot be read has no frame
        raised_in = error.filename or "<"
    if not is_user_file(raised_in):
        return False
    kept: TracebackType | None = None
    for frame, file in zip(reversed(frames), reversed(files), strict=True):
        if not file.startswith((*_OWN, *_PYTHONS)):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = kept
    return True


def depth_of_caller() -> int:
    """How many frames above the one that asks the user's code begins: the `stacklevel` of a warning."""
    depth, frame = 1, sys._getframe(1)
    while not is_user_file(frame.f_code.co_filename) and frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def of_caller() -> str | None:
    """The user's line that is being run now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return _show(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None
