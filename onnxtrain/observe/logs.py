"""The log of onnxtrain: the logger `onnxtrain` and those below it.

| level | ranks | content |
|---|---|---|
| VERBOSE | every rank | everything, with the time of each stage |
| DEVINFO | every rank | initialization by stage and pass |
| INFO | rank 0 | each capture with its reason and time, each file written |
| WARNING (default), ERROR, FATAL | rank 0 | problems that a user should act on |

By default no handler is added and no level is set: the program's handlers and levels apply; without any, Python writes
warnings to stderr. A `log_level` other than the default sets the logger's level. Messages then go to stderr while
the program has no handlers (`logging.basicConfig`). Modules with different levels are each captured and compiled at
their own. Streams are never redirected: a debugger works in forward.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from onnxtrain.log import LOG, PREFIX
from onnxtrain.options import LogLevel, Options
from onnxtrain.system.ranks import rank, world_size

DEVINFO = 15  # between logging.DEBUG and logging.INFO
_SILENT = logging.CRITICAL + 1
_LOGGING_LEVEL = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.DEVINFO: DEVINFO,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.CRITICAL,
}


class _Console(logging.StreamHandler[TextIO]):
    """Write to the current sys.stderr, as long as the program has no handlers of its own."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        ranks = f"[rank {rank()}] " if world_size() > 1 else ""
        level = "DEVINFO" if record.levelno == DEVINFO else record.levelname
        return f"{ranks}{level} {record.name}: {super().format(record).removeprefix(PREFIX)}"


_CONSOLE = _Console()


class _OwnLevel(int):
    """A level that was set here, as opposed to by the program.

    Attributes:
        programs: the program's own level before.
    """

    programs = logging.NOTSET


def set_up(options: Options) -> None:
    """Set the logger's level and handler; the default level changes neither.

    Args:
        options: provides `log_level`. Between captures, that of the last ORTModule with another than the default.
    """
    level = options.log_level
    is_default = level == Options().log_level
    if rank() and level >= LogLevel.INFO and not (is_default and LOG.level):
        LOG.setLevel(_SILENT)
    elif not is_default:
        own = _OwnLevel(_LOGGING_LEVEL[level])
        own.programs = LOG.level.programs if isinstance(LOG.level, _OwnLevel) else LOG.level
        LOG.setLevel(own)
        LOG.addHandler(_CONSOLE)  # adding it again has no effect


@contextmanager
def level_of(options: Options) -> Iterator[None]:
    """Log at a module's own level while it is captured and compiled; the capture lock is held."""
    before = LOG.level
    level = before
    if isinstance(before, _OwnLevel):
        is_default = options.log_level == Options().log_level
        level = before.programs if is_default else _LOGGING_LEVEL[options.log_level]
    LOG.setLevel(level)
    try:
        yield
    finally:
        LOG.setLevel(before)


@contextmanager
def only_errors() -> Iterator[None]:
    """Suppress warnings in the body, for commands that print this information themselves."""
    before = LOG.level
    LOG.setLevel(logging.ERROR)
    try:
        yield
    finally:
        LOG.setLevel(before)
