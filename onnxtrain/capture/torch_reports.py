"""What PyTorch logs of code that it cannot trace: onnxtrain warns itself, and the user sees the error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_LOG = logging.getLogger("onnxtrain")
_REPORTERS = ("torch._dynamo.convert_frame", "torch._subclasses.fake_tensor")


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
