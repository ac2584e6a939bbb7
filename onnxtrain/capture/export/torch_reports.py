"""Redirect PyTorch's logs and warnings about code that it cannot trace: onnxtrain reports the error itself.

Only the capturing thread's messages are redirected. Log levels, handlers and warning filters do not change.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from onnxtrain.log import LOG
from onnxtrain.torch_compat.patch_points import EXPORT_PRINT
from onnxtrain.torch_compat.replacement import replaced

_FAKE_TENSORS = "torch._subclasses.fake_tensor"
_REPORTERS = (
    "torch._dynamo.convert_frame",
    "torch._dynamo.variables.tensor",  # a graph break at `tensor.item()`
    _FAKE_TENSORS,
    "torch.fx.experimental.symbolic_shapes",
)
_NEEDLESS_WARNINGS = (
    "`isinstance(treespec, LeafSpec)` is deprecated",  # PyTorch itself copies treespecs in this way
    "The tensor attribute",  # torch.export reports the weights that an LSTM reassigns as a side effect
)


@contextmanager
def logged_as_info() -> Iterator[None]:
    """Redirect PyTorch's log messages to the log of onnxtrain, at INFO."""
    with _filtered(_REPORTERS, lambda record: LOG.info("torch: %s", record.getMessage())):
        yield


@contextmanager
def reports_dropped() -> Iterator[None]:
    """Drop warnings and messages about operators that fail on fake tensors. The caller expects that some may fail."""
    with _filtered((_FAKE_TENSORS,), lambda record: None), _warnings_dropped(lambda text: True):
        yield


@contextmanager
def needless_warnings_dropped() -> Iterator[None]:
    """Drop warnings that torch.export raises about its own code."""
    with _warnings_dropped(lambda text: text.startswith(_NEEDLESS_WARNINGS)):
        yield


@contextmanager
def _filtered(loggers: tuple[str, ...], handle: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Call `handle` instead of the handlers for the records of this thread."""
    owner = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        if threading.get_ident() != owner:
            return True
        handle(record)
        return False

    with ExitStack() as stack:
        for reporter in map(logging.getLogger, loggers):
            reporter.addFilter(passes)
            stack.callback(reporter.removeFilter, passes)
        yield


@contextmanager
def _warnings_dropped(is_dropped: Callable[[str], bool]) -> Iterator[None]:
    """Drop these warnings of this thread.

    `warnings.catch_warnings` would also drop other threads' warnings, and discard the filters that they add meanwhile.
    """
    owner, original = threading.get_ident(), warnings.warn

    def warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != owner or not is_dropped(str(message)):
            original(message, category, stacklevel + 1, *args, **kwargs)  # this function adds a frame

    with replaced(warnings, "warn", warn):
        yield


@contextmanager
def printed_as_info() -> Iterator[None]:
    """Redirect the partial graph that torch.export prints to stderr when it fails.

    The caller must hold the capture lock.
    """

    def log(*values: object, **_: Any) -> None:
        LOG.info("torch: %s", " ".join(map(str, values)))

    with EXPORT_PRINT.replaced_in_thread(log):
        yield
