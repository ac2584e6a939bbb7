"""Redirect PyTorch's logs and warnings about code that it cannot trace: onnxtrain reports the error itself.

Only those of the capturing thread are redirected. Levels, handlers and warning filters stay as they are.
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
    "`isinstance(treespec, LeafSpec)` is deprecated",  # by PyTorch, which copies its own treespecs so
    "The tensor attribute",  # that an export takes for a side effect: the weights that an LSTM exchanges itself
)


@contextmanager
def logged_as_info() -> Iterator[None]:
    """Redirect PyTorch's log messages to the log of onnxtrain, at INFO."""
    with _filtered(_REPORTERS, lambda record: LOG.info("torch: %s", record.getMessage())):
        yield


@contextmanager
def reports_dropped() -> Iterator[None]:
    """Drop warnings and messages about operators that fail on fake tensors: callers try such operators on purpose."""
    with _filtered((_FAKE_TENSORS,), lambda record: None), _warnings_dropped(lambda text: True):
        yield


@contextmanager
def needless_warnings_dropped() -> Iterator[None]:
    """Drop warnings that torch.export raises about its own code."""
    with _warnings_dropped(lambda text: text.startswith(_NEEDLESS_WARNINGS)):
        yield


@contextmanager
def _filtered(loggers: tuple[str, ...], take: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    owner = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        if threading.get_ident() != owner:
            return True
        take(record)
        return False

    with ExitStack() as stack:
        for reporter in map(logging.getLogger, loggers):
            reporter.addFilter(passes)
            stack.callback(reporter.removeFilter, passes)
        yield


@contextmanager
def _warnings_dropped(is_dropped: Callable[[str], bool]) -> Iterator[None]:
    """`warnings.catch_warnings` would drop other threads' warnings, too, and forget the filters that they add."""
    owner, original = threading.get_ident(), warnings.warn

    def warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != owner or not is_dropped(str(message)):
            original(message, category, stacklevel + 1, *args, **kwargs)  # this function adds a frame

    with replaced(warnings, "warn", warn):
        yield


@contextmanager
def printed_as_info() -> Iterator[None]:
    """Redirect what torch.export prints to stderr in this thread: the graph as far as it was traced.

    Under the capture lock.
    """

    def printed(*values: object, **_: Any) -> None:
        LOG.info("torch: %s", " ".join(map(str, values)))

    with EXPORT_PRINT.replaced_in_thread(printed):
        yield
