"""What PyTorch logs of code that it cannot trace: onnxtrain warns itself, and the user sees the error."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from torch.export import _trace

_LOG = logging.getLogger("onnxtrain")
_REPORTERS = (
    "torch._dynamo.convert_frame",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
)


@contextlib.contextmanager
def logged_as_info() -> Iterator[None]:
    """Passes PyTorch's reports on to the log of onnxtrain, at INFO."""

    def passed_on(record: logging.LogRecord) -> bool:
        _LOG.info("torch: %s", record.getMessage())
        return False

    reporters = [logging.getLogger(name) for name in _REPORTERS]
    for reporter in reporters:
        reporter.addFilter(passed_on)
    try:
        yield
    finally:
        for reporter in reporters:
            reporter.removeFilter(passed_on)


@contextlib.contextmanager
def printed_as_info() -> Iterator[None]:
    """Passes on too what torch.export prints to the error stream in this thread: the graph as far as it came.

    Under the capture lock.
    """
    own = threading.get_ident()

    def printed(*values: object, **options: Any) -> None:
        if threading.get_ident() == own:
            _LOG.info("torch: %s", " ".join(map(str, values)))
        else:
            print(*values, **options)  # noqa: T201  PyTorch prints

    vars(_trace)["print"] = printed
    try:
        yield
    finally:
        del vars(_trace)["print"]
