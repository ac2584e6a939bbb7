"""The log of onnxtrain: the logger `onnxtrain` and those below it.

| level | who logs | what |
|---|---|---|
| VERBOSE | every rank | everything: each stage with its time |
| DEVINFO | every rank | the initialisation stage by stage and pass by pass |
| INFO | rank 0 | each capture with its reason and time, each file that is written |
| WARNING (default), ERROR, FATAL | rank 0 | what a user should act on |

By default no handler is added and no level is set: those of the program decide, and where it has none, Python writes
warnings to the standard error stream. The option `log_level`, where it is another than the default, sets the logger's
level; as long as the program has set up no handlers (`logging.basicConfig`), messages then go to the standard error
stream. Nothing is redirected, so that a debugger in forward has its terminal.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import torch

from onnxtrain.options import LogLevel, Options

DEVINFO = 15  # between logging.DEBUG and logging.INFO
_SILENT = logging.CRITICAL + 1
_OF_LOGGING = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.DEVINFO: DEVINFO,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.CRITICAL,
}
_LOG = logging.getLogger("onnxtrain")


class _Console(logging.StreamHandler[TextIO]):
    """Writes to the standard error stream of the moment, as long as the program has no handlers of its own."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        ranks = f"[rank {rank()}] " if world_size() > 1 else ""
        level = "DEVINFO" if record.levelno == DEVINFO else record.levelname
        return f"{ranks}{level} {record.name}: {super().format(record)}"


_CONSOLE = _Console()


def set_up(options: Options) -> None:
    """Sets the log's level and handler; the default level leaves them as they are.

    Args:
        options: its `log_level` counts. The last ORTModule that is made with another than the default decides.
    """
    level = options.log_level
    is_default = level == Options().log_level
    if rank() and level >= LogLevel.INFO and not (is_default and _LOG.level):
        _LOG.setLevel(_SILENT)
    elif not is_default:
        _LOG.setLevel(_OF_LOGGING[level])
        _LOG.addHandler(_CONSOLE)  # once: a handler that is there is not added again


@contextmanager
def only_errors() -> Iterator[None]:
    """Keeps warnings out of the terminal, for commands that show on their own what they tell."""
    before = _LOG.level
    _LOG.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _LOG.setLevel(before)


def rank() -> int:
    """This process's rank among those that train together; 0 where it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return _number("RANK", 0)  # torchrun's: before the process group is made


def world_size() -> int:
    """The number of processes that train together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return _number("WORLD_SIZE", 1)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
