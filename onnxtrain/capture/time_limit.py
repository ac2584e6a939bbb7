"""The limit of the option capture_seconds."""

from __future__ import annotations

from contextlib import AbstractContextManager

from onnxtrain.capture import source_location
from onnxtrain.errors import SlowCaptureError
from onnxtrain.options import Options
from onnxtrain.system.time_limit import time_limit


def limited_time(options: Options, name: str) -> AbstractContextManager[None]:
    """Limit the time of capturing and compiling the module `name` to the option capture_seconds.

    Raises:
        SlowCaptureError: it is exceeded; says what took the time.
    """

    def error(parts: str) -> SlowCaptureError:
        return SlowCaptureError(
            f"capturing and compiling {name} took too long",
            where=source_location.of_caller(),
            expected=f"at most {options.capture_seconds:g} s of processor time (the option capture_seconds)",
            got=parts,
            todo="the module runs in PyTorch; set capture_seconds higher, and please report it with the module",
        )

    return time_limit(options.capture_seconds, error)
