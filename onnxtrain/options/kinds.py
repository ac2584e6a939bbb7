"""Kinds of option values, and `Knob`, a row of the table of options."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntFlag
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Generic, TypeVar

from onnxtrain.errors import OptionError
from onnxtrain.log import warn_once
from onnxtrain.options.policies import FallbackPolicy, LogLevel, MemoryOptLevel, SkipCheck, SubgraphConfig

T = TypeVar("T")
Flag = TypeVar("Flag", bound=IntFlag)


@dataclass(frozen=True)
class Kind(Generic[T]):
    """The allowed values of an option, and how they are parsed and printed.

    Attributes:
        allowed: the allowed values, in words.
        read: parses a value of this kind or its text; raises ValueError for anything else.
        text: formats a value.
    """

    allowed: str
    read: Callable[[object], T]
    text: Callable[[T], str] = str


@dataclass(frozen=True)
class OldName:
    """A former environment variable of an option.

    Attributes:
        variable: its name.
        value: turns the variable's text into the option's; "" if the text sets nothing.
    """

    variable: str
    value: Callable[[str], str] = str

    def text(self) -> str:
        """Return the option's text by this variable; "" if it is not set."""
        return self.value(os.environ.get(self.variable, ""))

    @property
    def is_own(self) -> bool:
        """Whether it was a variable of onnxtrain, as opposed to ONNX Runtime Training, whose names are kept."""
        return self.variable.startswith("ONNXTRAIN_")


@dataclass(frozen=True)
class Knob:
    """One row of the table.

    Attributes:
        name: the field of `Options`, and the keyword argument of ORTModule.
        default: the default value.
        variable: its environment variable, or None.
        kind: the allowed values.
        meaning: the effect, as one sentence.
        old_names: former variables, which count if `variable` is not set.
    """

    name: str
    default: object
    variable: str | None
    kind: Kind[Any]
    meaning: str
    old_names: tuple[OldName, ...] = field(default=())

    def read(self, value: object, where: str) -> Any:
        """Parse a value. `where` names its source in the error for an invalid one."""
        return parse(self.name, self.kind, value, where)

    def from_environment(self) -> tuple[str, Any] | None:
        """Return the variable that is set and its value; None if none is set. An empty variable counts as not set."""
        names = [OldName(self.variable)] if self.variable else []
        for name in (*names, *self.old_names):
            if text := name.text():
                if name in self.old_names and name.is_own:
                    warn_once(f"The variable {name.variable} is a former name: set the option {self.name} instead.")
                return name.variable, self.read(text, f"the environment variable {name.variable}")
        return None


def parse(name: str, kind: Kind[T], value: object, where: str) -> T:
    """Parse the value of an option.

    Raises:
        OptionError: it is not of this kind; `where` names its source.
    """
    try:
        return kind.read(value)
    except ValueError as error:
        raise OptionError(
            f"The option {name!r} has an invalid value.", where, kind.allowed, repr(value), "Set an allowed value."
        ) from error


def _invalid(value: object) -> ValueError:
    return ValueError(f"invalid value: {value!r}")


def one_of(*texts: str) -> Kind[str]:
    """Accept one of these strings."""

    def read(value: object) -> str:
        if isinstance(value, str) and value in texts:
            return value
        raise _invalid(value)

    return Kind(" or ".join(map(repr, texts)), read)


def one_of_or(default: str, *others: str) -> Kind[str]:
    """Accept one of these strings; replace any other by the default, with a warning."""
    texts = (default, *others)

    def read(value: object) -> str:
        word = value.upper() if isinstance(value, str) else value
        if word in texts:
            return str(word)
        warn_once(f"Expected one of {', '.join(texts)}, got {value!r}; using {default}.")
        return default

    return Kind(" or ".join(map(repr, texts)) + "; any other value: the first, with a warning", read)


_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _translated(if_true: str, if_false: str) -> Callable[[str], str]:
    """Make a function that translates a boolean, and returns any other text unchanged."""

    def translate(text: str) -> str:
        word = text.strip().lower()
        return (if_true if _TRUTH[word] else if_false) if word in _TRUTH else text

    return translate


opposite = _translated("False", "True")
auto_or_never = _translated("auto", "never")
on_or_off = _translated("on", "off")
triton_folder = _translated("triton_debug", "")  # the folder of ONNX Runtime Training


def _read_bool(value: object) -> bool:
    word = str(value).strip().lower()
    if word not in _TRUTH:
        raise _invalid(value)
    return _TRUTH[word]


def _read_early_gradients(value: object) -> bool | str:
    text = str(value).strip().lower()
    return text if text in ("auto", "inputs") else _read_bool(value)


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise _invalid(value)
    return value


def _read_names(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        raise _invalid(value)
    return tuple(name.strip() for name in names)


def _read_path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise _invalid(value)
    return Path(value)


def _read_path_prefix(value: object) -> Path:
    """Parse a path prefix of files; in a folder, which ends with a separator, their names begin with "model"."""
    path = _read_path(value)
    return path / "model" if str(value).endswith(os.sep) else path


def _read_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or int(value) < 0:
        raise _invalid(value)
    return int(value)


def _read_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _invalid(value)
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise _invalid(value)
    return seconds


def _read_budget(value: object) -> int | float | str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _invalid(value)
    if isinstance(value, int) or (isinstance(value, str) and value.strip().isdigit()):
        count = int(value)
        if count < 1:
            raise _invalid(value)
        return count
    fraction = float(value)
    if not 0 < fraction <= 1:
        raise _invalid(value)
    return fraction


def _read_opset(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or int(value) < 1:
        raise _invalid(value)
    return int(value)


def _read_memory_level(value: object) -> MemoryOptLevel:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _invalid(value)
    return MemoryOptLevel(int(value))


def _read_subgraphs(value: object) -> tuple[SubgraphConfig, ...]:
    """Parse comma-separated patterns, a list of patterns, or the path of a JSON file with such a list."""
    if isinstance(value, str | os.PathLike) and str(value).endswith(".json"):
        try:
            value = json.loads(Path(value).read_text(encoding="utf-8"))
        except OSError as error:
            raise _invalid(value) from error
        if not isinstance(value, list):
            raise _invalid(value)
    entries = value.split(",") if isinstance(value, str) and value else value or ()
    if not isinstance(entries, list | tuple):
        raise _invalid(value)
    return tuple(e if isinstance(e, SubgraphConfig) else SubgraphConfig.read(str(e)) for e in entries)


RECOMPUTE_WORDS = ("cheap", "none", "layers", "all")


def _read_recompute(value: object) -> str | tuple[SubgraphConfig, ...]:
    if isinstance(value, str) and value in RECOMPUTE_WORDS:
        return value
    entries = _read_subgraphs(value)
    if not entries:
        raise _invalid(value)
    return entries


def _recompute_text(value: str | tuple[SubgraphConfig, ...]) -> str:
    return value if isinstance(value, str) else ",".join(map(str, value))


def _read_tuning(value: object) -> bool | int | str:
    word = str(value).strip().lower()
    if word == "exhaustive":
        return word
    if word in _TRUTH:
        return _TRUTH[word]
    return _read_count(value)


def _read_log_level(value: object) -> LogLevel:
    if isinstance(value, LogLevel):
        return value
    if isinstance(value, str) and value.upper() in LogLevel.__members__:
        return LogLevel[value.upper()]
    raise _invalid(value)


def _flags(enum: type[Flag]) -> Kind[Flag]:
    def read(value: object) -> Flag:
        if isinstance(value, enum):
            return value
        texts = value.split("|") if isinstance(value, str) else value if isinstance(value, list | tuple) else [""]
        names = [str(text).strip().upper() for text in texts]
        if not names or not set(names) <= set(enum.__members__):
            raise _invalid(value)
        return reduce(or_, (enum[name] for name in names))

    def text(value: Flag) -> str:
        return "|".join(str(member.name) for member in value)

    return Kind("names joined by |: " + ", ".join(enum.__members__), read, text)


def names_of(*allowed: str) -> Kind[tuple[str, ...]]:
    """Accept some of these names."""

    def read(value: object) -> tuple[str, ...]:
        names = _read_names(value) if value else ()
        if not set(names) <= set(allowed):
            raise _invalid(value)
        return names

    return Kind(f"names among {', '.join(allowed)}, as a list or comma-separated; or none", read, ",".join)


def optional(kind: Kind[T]) -> Kind[T | None]:
    """Accept a value of `kind`, or None."""
    return Kind(f"{kind.allowed}, or None", lambda value: None if value is None else kind.read(value))


BOOL = Kind("true, 1, yes, on, false, 0, no or off", _read_bool)
EARLY_GRADIENTS: Kind[bool | str] = Kind(f"{BOOL.allowed}; or auto, or inputs", _read_early_gradients)
TEXT = Kind("text", _read_text)
NAMES: Kind[tuple[str, ...]] = Kind("names, as a list or comma-separated", _read_names, ",".join)
PATH = Kind("a path", _read_path)
PATH_PREFIX = Kind("a path prefix such as graphs/bert, or a folder such as graphs/", _read_path_prefix)
SECONDS: Kind[float] = Kind("a number > 0", _read_seconds)
COUNT = Kind("an integer >= 0", _read_count)
BUDGET: Kind[int | float | str] = Kind("an integer number of bytes, a fraction such as 0.5, or 'auto'", _read_budget)
OPSET = Kind("an integer >= 1", _read_opset)
LOG_LEVEL: Kind[LogLevel] = Kind(", ".join(LogLevel.__members__), _read_log_level, lambda level: level.name)
MEMORY_OPT_LEVEL: Kind[MemoryOptLevel] = Kind("0, 1 or 2", _read_memory_level, lambda level: str(int(level)))
MEMORY_OPT_CONFIG: Kind[tuple[SubgraphConfig, ...]] = Kind(
    "entries such as BiasGelu+:1:-1, comma-separated or as a list; or the path of a JSON file (.json) with such a list",
    _read_subgraphs,
    lambda entries: ",".join(map(str, entries)),
)
RECOMPUTE: Kind[str | tuple[SubgraphConfig, ...]] = Kind(
    f"{', '.join(RECOMPUTE_WORDS)}; or {MEMORY_OPT_CONFIG.allowed}", _read_recompute, _recompute_text
)
TUNING: Kind[bool | int | str] = Kind("true, false, a number of milliseconds above 1, or exhaustive", _read_tuning)
FALLBACK_POLICY = _flags(FallbackPolicy)
SKIP_CHECK = _flags(SkipCheck)
