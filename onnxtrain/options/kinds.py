"""Sets of allowed values, and a row of the table of options."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntFlag
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Generic, TypeVar

from onnxtrain.errors import OptionError
from onnxtrain.options.notices import warn_once
from onnxtrain.options.policies import FallbackPolicy, LogLevel, MemoryOptLevel, SkipCheck, SubgraphConfig

T = TypeVar("T")
Flag = TypeVar("Flag", bound=IntFlag)


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A set of allowed values.

    Attributes:
        allowed: the set, in words.
        read: takes a value of the kind, or its text, and raises ValueError for all else.
        text: the value as one would write it.
    """

    allowed: str
    read: Callable[[object], T]
    text: Callable[[T], str] = str


@dataclass(frozen=True)
class OldName:
    """A further variable for an option.

    Attributes:
        variable: its name.
        value: the option's value for the variable's text; empty where it says nothing.
    """

    variable: str
    value: Callable[[str], str] = str


@dataclass(frozen=True)
class Knob:
    """One row of the table.

    Attributes:
        name: the field of `Options`, and the keyword of ORTModule.
        default: its value where nobody says anything.
        variable: the environment variable that decides it; None where there is none.
        kind: the allowed values.
        meaning: what it does, as one sentence.
        old_names: further variables, which count where `variable` is not set.
    """

    name: str
    default: object
    variable: str | None
    kind: Kind[Any]
    meaning: str
    old_names: tuple[OldName, ...] = field(default=())

    def read(self, value: object, where: str) -> Any:
        """Returns the value in its own type, or raises an error that names the place it came from."""
        try:
            return self.kind.read(value)
        except ValueError as error:
            what = f"The option {self.name!r} has a value that is not allowed."
            raise OptionError(what, where, self.kind.allowed, repr(value), "Give an allowed value.") from error

    def from_environment(self) -> tuple[str, Any] | None:
        """The variable that decides and the value it gives; None where none is set. Empty counts as not set."""
        names = [OldName(self.variable)] if self.variable else []
        for name in (*names, *self.old_names):
            if text := name.value(os.environ.get(name.variable, "")):
                return name.variable, self.read(text, f"the environment variable {name.variable}")
        return None


def _refuse(value: object) -> ValueError:
    return ValueError(f"not allowed: {value!r}")


def one_of(*texts: str) -> Kind[str]:
    """One of these texts."""

    def read(value: object) -> str:
        if isinstance(value, str) and value in texts:
            return value
        raise _refuse(value)

    return Kind(" or ".join(map(repr, texts)), read)


def one_of_or(default: str, *others: str) -> Kind[str]:
    """One of these texts; for any other, the default is taken with a warning."""
    texts = (default, *others)

    def read(value: object) -> str:
        word = value.upper() if isinstance(value, str) else value
        if word in texts:
            return str(word)
        warn_once(f"{value!r} is none of {', '.join(texts)}: {default} is taken.")
        return default

    return Kind(" or ".join(map(repr, texts)) + "; else the first, with a warning", read)


_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def opposite(text: str) -> str:
    """The text for the opposite of a yes or no; other texts stay as they are."""
    word = text.strip().lower()
    return str(not _TRUTH[word]) if word in _TRUTH else text


def auto_or_never(text: str) -> str:
    """'auto' for yes, 'never' for no; other texts stay as they are."""
    word = text.strip().lower()
    return ("never", "auto")[_TRUTH[word]] if word in _TRUTH else text


def on_or_off(text: str) -> str:
    """'on' for yes, 'off' for no; other texts stay as they are."""
    word = text.strip().lower()
    return ("off", "on")[_TRUTH[word]] if word in _TRUTH else text


def triton_folder(text: str) -> str:
    """The folder that ONNX Runtime Training wrote to for yes, none for no; other texts stay as they are."""
    word = text.strip().lower()
    return ("", "triton_debug")[_TRUTH[word]] if word in _TRUTH else text


def _read_bool(value: object) -> bool:
    word = str(value).strip().lower()
    if word not in _TRUTH:
        raise _refuse(value)
    return _TRUTH[word]


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(value)
    return value


def _read_names(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        raise _refuse(value)
    return tuple(name.strip() for name in names)


def _read_path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise _refuse(value)
    return Path(value)


def _read_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or int(value) < 0:
        raise _refuse(value)
    return int(value)


def _read_budget(value: object) -> int | float | str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refuse(value)
    if isinstance(value, int) or (isinstance(value, str) and value.strip().isdigit()):
        count = int(value)
        if count < 1:
            raise _refuse(value)
        return count
    share = float(value)
    if not 0 < share <= 1:
        raise _refuse(value)
    return share


def _read_opset(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or int(value) < 1:
        raise _refuse(value)
    return int(value)


def _read_memory_level(value: object) -> MemoryOptLevel:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _refuse(value)
    return MemoryOptLevel(int(value))


def _read_subgraphs(value: object) -> tuple[SubgraphConfig, ...]:
    """Patterns joined by commas, a list of them, or the path of a JSON file with such a list."""
    if isinstance(value, str | os.PathLike) and str(value).endswith(".json"):
        try:
            value = json.loads(Path(value).read_text(encoding="utf-8"))
        except OSError as error:
            raise _refuse(value) from error
        if not isinstance(value, list):
            raise _refuse(value)
    entries = value.split(",") if isinstance(value, str) and value else value or ()
    if not isinstance(entries, list | tuple):
        raise _refuse(value)
    return tuple(e if isinstance(e, SubgraphConfig) else SubgraphConfig.read(str(e)) for e in entries)


def _read_log_level(value: object) -> LogLevel:
    if isinstance(value, LogLevel):
        return value
    if isinstance(value, str) and value.upper() in LogLevel.__members__:
        return LogLevel[value.upper()]
    raise _refuse(value)


def _flags(enum: type[Flag]) -> Kind[Flag]:
    def read(value: object) -> Flag:
        if isinstance(value, enum):
            return value
        texts = value.split("|") if isinstance(value, str) else value if isinstance(value, list | tuple) else [""]
        names = [str(text).strip().upper() for text in texts]
        if not names or not set(names) <= set(enum.__members__):
            raise _refuse(value)
        return reduce(or_, (enum[name] for name in names))

    def text(value: Flag) -> str:
        return "|".join(str(member.name) for member in value)

    return Kind("names joined by |: " + ", ".join(enum.__members__), read, text)


def optional(kind: Kind[T]) -> Kind[T | None]:
    """A value of the kind, or None."""
    return Kind(f"{kind.allowed}, or None", lambda value: None if value is None else kind.read(value))


BOOL = Kind("true, 1, yes, on, false, 0, no or off", _read_bool)
TEXT = Kind("text", _read_text)
NAMES: Kind[tuple[str, ...]] = Kind("names, as a list or joined by commas", _read_names, ",".join)
PATH = Kind("a path", _read_path)
COUNT = Kind("a whole number from 0 up", _read_count)
BUDGET: Kind[int | float | str] = Kind("bytes as a whole number, a share such as 0.5, or 'auto'", _read_budget)
OPSET = Kind("a whole number from 1 up", _read_opset)
LOG_LEVEL: Kind[LogLevel] = Kind(", ".join(LogLevel.__members__), _read_log_level, lambda level: level.name)
MEMORY_OPT_LEVEL: Kind[MemoryOptLevel] = Kind("0, 1 or 2", _read_memory_level, lambda level: str(int(level)))
MEMORY_OPT_CONFIG: Kind[tuple[SubgraphConfig, ...]] = Kind(
    "such as BiasGelu+:1:-1, joined by commas or as a list; or the path of a JSON file (.json) with such a list",
    _read_subgraphs,
    lambda entries: ",".join(map(str, entries)),
)
FALLBACK_POLICY = _flags(FallbackPolicy)
SKIP_CHECK = _flags(SkipCheck)
