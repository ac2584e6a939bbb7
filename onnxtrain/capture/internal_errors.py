"""Convert bugs of onnxtrain into errors after which the module falls back to eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onnxtrain.capture import source_location
from onnxtrain.errors import GraphError, KernelError, OnnxTrainError, ORTModuleFallbackException, PythonOpError


@contextmanager
def internal_errors_as(error_type: type[ORTModuleFallbackException], problem: str) -> Iterator[None]:
    """Raise `error_type` instead of any error that only a bug of onnxtrain explains: a bug must not end a training.

    Errors of onnxtrain that are not bugs (an unsupported module, a wrong option, a memory budget), errors of files, and
    running out of memory pass unchanged.

    Args:
        error_type: the error of the stage that runs inside.
        problem: what failed, for the message.
    """
    try:
        yield
    except Exception as error:
        if not _is_bug(error):
            raise
        raise error_type(
            f"{problem}: {summary(error)}",
            where=_source_location(error),
            expected=getattr(error, "expected", None),
            got=getattr(error, "got", None),
            todo="the module runs in PyTorch; this is a bug of onnxtrain: please report it with the module",
        ) from error


def summary(error: BaseException) -> str:
    """Return the class of an error and the first non-empty line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _is_bug(error: Exception) -> bool:
    if isinstance(error, OnnxTrainError):
        return isinstance(error, GraphError | KernelError) and not isinstance(error, PythonOpError)
    return not isinstance(error, OSError | MemoryError) and type(error).__name__ != "OutOfMemoryError"


def _source_location(error: Exception) -> str | None:
    return error.where if isinstance(error, OnnxTrainError) else source_location.of_error(error)
