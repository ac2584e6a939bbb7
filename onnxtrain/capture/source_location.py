"""Locations in the user's source code: the innermost frame outside PyTorch and onnxtrain.

Also removes the frames of onnxtrain from tracebacks of errors that the user's code raised.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

# With a separator at the end, because torchvision and a user's folder onnxtrain-experiments start with the same names.
PYTORCH = f"{Path(torch.__file__).parent}{os.sep}"
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_ONNXTRAIN_CODE = (PACKAGE, "<onnxtrain ")
_NOT_USER_CODE = (PYTORCH, *_ONNXTRAIN_CODE, "<")
_PYTHON_CODE = ("<frozen ",)  # importlib and runpy
_FRAME_TEXT = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def is_user_file(filename: str) -> bool:
    """Return whether a source file is the user's, and not PyTorch's, onnxtrain's or generated."""
    return not filename.startswith(_NOT_USER_CODE)


def _spell(filename: str, line: int | str, function: str) -> str:
    return f"{filename}:{line} in {function}"


def stack_trace(frame: FrameType | None) -> str | None:
    """Format the innermost frame of the user's code among a frame and its callers as a traceback of one entry."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'


def of_trace(trace: str | None) -> str | None:
    """Return the location in a traceback in text form, such as `file.py:12 in forward`."""
    frames = [f for f in _FRAME_TEXT.findall(trace or "") if is_user_file(f[0])]
    return _spell(*frames[-1]) if frames else None


def of_node(node: torch.fx.Node) -> str | None:
    """Return the location of the user's code that a node of a trace comes from."""
    return of_trace(node.stack_trace)


def module_path(path: str) -> str:
    """Return a module's path in the user's module, from that in the export, whose root holds the user's module."""
    return re.sub(r"^(L\['\w+'\]\.?|module\.?)", "", path).removeprefix("module.").removeprefix(".")


def of_code(code: CodeType, line: int) -> str:
    """Return the location of a line in a code object."""
    return _spell(code.co_filename, line, code.co_name)


def of_error(error: BaseException) -> str | None:
    """Return the location that raised an error or one of its causes, or that its text contains."""
    current: BaseException | None = error
    while current is not None:
        location = _of_traceback(current.__traceback__)
        if location:
            return location
        current = current.__cause__ or current.__context__
    return of_trace(str(error))


def _of_traceback(trace: TracebackType | None) -> str | None:
    location = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_file(code.co_filename):
            location = _spell(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return location


def hide_own_frames(error: BaseException) -> bool:
    """Remove the frames of onnxtrain from the traceback of an error that the user's code raised.

    An error that onnxtrain raised, or PyTorch when onnxtrain called it, keeps them.

    Returns:
        Whether the user's code raised the error.
    """
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    raised_in = next((file for file in reversed(files) if not file.startswith((PYTORCH, *_PYTHON_CODE))), "<")
    if isinstance(error, SyntaxError):  # the file with the error has no frame
        raised_in = error.filename or "<"
    if not is_user_file(raised_in):
        return False
    kept: TracebackType | None = None
    for frame, file in zip(reversed(frames), reversed(files), strict=True):
        if not file.startswith((*_ONNXTRAIN_CODE, *_PYTHON_CODE)):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = kept
    return True


def depth_of_caller() -> int:
    """Return the `stacklevel` at which a warning of the calling function points to the user's code."""
    depth, frame = 1, sys._getframe(1)
    while not is_user_file(frame.f_code.co_filename) and frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def of_caller() -> str | None:
    """Return the location of the user's code that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return _spell(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None
