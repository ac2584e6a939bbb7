"""Every knob of onnxtrain in one table: its default, environment variable, allowed values and meaning.

The fields of `Options` are the table. `Options.resolve` starts from the defaults, puts what the code says over them,
and what the environment says over that. A variable that is set but empty counts as not set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, IntFlag
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Generic, TypeVar

from onnxtrain.errors import (
    OptionError,
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)

T = TypeVar("T")


class LogLevel(IntEnum):
    """How much is logged: everything from this level up."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


class FallbackPolicy(IntFlag):
    """Which failures make a module run in plain PyTorch, with a warning, instead of raising."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128

    def covers(self, error: BaseException) -> bool:
        """Whether the module runs in PyTorch after this error. FALLBACK_DISABLE wins over all other members."""
        if FallbackPolicy.FALLBACK_DISABLE in self:
            return False
        return any(isinstance(error, _FALLS_BACK_AFTER[policy]) for policy in self)


_FALLS_BACK_AFTER: dict[FallbackPolicy, tuple[type[ORTModuleFallbackException], ...]] = {
    FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD: (ORTModuleFallbackException,),
    FallbackPolicy.FALLBACK_FORCE_TORCH_BACKWARD: (ORTModuleFallbackException,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE: (ORTModuleDeviceException,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_DATA: (ORTModuleIOError,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL: (ORTModuleTorchModelException,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL: (ORTModuleONNXModelException,),
    FallbackPolicy.FALLBACK_BAD_INITIALIZATION: (ORTModuleInitException, ORTModuleTorchModelException),
}


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A set of allowed values. `read` takes a value of the kind, or its text, and raises ValueError for all else."""

    allowed: str
    read: Callable[[object], T]


@dataclass(frozen=True)
class Knob:
    """One row of the table."""

    name: str
    default: object
    variable: str | None
    kind: Kind[Any]
    meaning: str

    def read(self, value: object, where: str) -> Any:
        """Returns the value in its own type, or raises an error that names the place it came from."""
        try:
            return self.kind.read(value)
        except ValueError as error:
            what = f"The option {self.name!r} has a value that is not allowed."
            raise OptionError(what, where, self.kind.allowed, repr(value), "Give an allowed value.") from error


def _refuse(value: object) -> ValueError:
    return ValueError(f"not allowed: {value!r}")


def _one_of(*texts: str) -> Kind[str]:
    def read(value: object) -> str:
        if isinstance(value, str) and value in texts:
            return value
        raise _refuse(value)

    return Kind(" or ".join(map(repr, texts)), read)


_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _read_bool(value: object) -> bool:
    word = str(value).strip().lower()
    if word not in _TRUTH:
        raise _refuse(value)
    return _TRUTH[word]


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(value)
    return value


def _read_path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise _refuse(value)
    return Path(value)


def _read_opset(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or int(value) < 1:
        raise _refuse(value)
    return int(value)


def _read_log_level(value: object) -> LogLevel:
    if isinstance(value, LogLevel):
        return value
    if isinstance(value, str) and value.upper() in LogLevel.__members__:
        return LogLevel[value.upper()]
    raise _refuse(value)


def _read_policy(value: object) -> FallbackPolicy:
    if isinstance(value, FallbackPolicy):
        return value
    names = [name.strip().upper() for name in value.split("|")] if isinstance(value, str) else [""]
    if not set(names) <= set(FallbackPolicy.__members__):
        raise _refuse(value)
    return reduce(or_, (FallbackPolicy[name] for name in names))


def _optional(kind: Kind[T]) -> Kind[T | None]:
    return Kind(f"{kind.allowed}, or None", lambda value: None if value is None else kind.read(value))


_BOOL = Kind("true, 1, yes, on, false, 0, no or off", _read_bool)
_TEXT = Kind("text", _read_text)
_PATH = Kind("a path", _read_path)
_OPSET = Kind("a whole number from 1 up", _read_opset)
_LOG_LEVEL = Kind(", ".join(LogLevel.__members__), _read_log_level)
_POLICY = Kind("names joined by |: " + ", ".join(FallbackPolicy.__members__), _read_policy)


def _knob(default: T, kind: Kind[T], meaning: str, variable: str | None = None) -> T:
    metadata = {"kind": kind, "meaning": meaning, "variable": variable}
    value: T = field(default=default, metadata=metadata)  # a Field, which @dataclass replaces by the default
    return value


_FALLBACK_BY_DEFAULT = (
    FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
    | FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    | FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
)


@dataclass(frozen=True)
class Options:
    """What a user can choose. Values are checked, and texts are turned into the field's own type."""

    rng: str = _knob(
        "fast",
        _one_of("fast", "torch"),
        "'torch' draws exactly the random numbers that eager PyTorch draws; 'fast' draws cheaper ones",
        "ONNXTRAIN_RNG",
    )
    save_onnx: bool = _knob(False, _BOOL, "write the graph of each stage as an ONNX file")
    onnx_prefix: str = _knob("", _TEXT, "how the names of the files of save_onnx begin")
    save_path: Path = _knob(
        Path(), _PATH, "the folder for the files of save_onnx; the current one by default", "ORTMODULE_SAVE_ONNX_PATH"
    )
    onnx_opset: int | None = _knob(
        None,
        _optional(_OPSET),
        "the opset of written files; None keeps the one used inside",
        "ORTMODULE_ONNX_OPSET_VERSION",
    )
    log_level: LogLevel = _knob(LogLevel.WARNING, _LOG_LEVEL, "the lowest level that is logged", "ORTMODULE_LOG_LEVEL")
    fallback_policy: FallbackPolicy = _knob(
        _FALLBACK_BY_DEFAULT,
        _POLICY,
        "the failures after which a module runs in plain PyTorch",
        "ORTMODULE_FALLBACK_POLICY",
    )
    fallback_retry: bool = _knob(
        False, _BOOL, "after a fallback, try the graph again at each step", "ORTMODULE_FALLBACK_RETRY"
    )
    dump_dir: Path | None = _knob(
        None, _optional(_PATH), "a folder to which every stage writes its graph", "ONNXTRAIN_DUMP"
    )
    verify: bool = _knob(True, _BOOL, "check the graph after every stage", "ONNXTRAIN_VERIFY")

    def __post_init__(self) -> None:
        for knob in knobs():
            value = knob.read(getattr(self, knob.name), f"the code's {knob.name}=")
            object.__setattr__(self, knob.name, value)

    @classmethod
    def resolve(cls, **code: Any) -> Options:
        """Applies the defaults, then what the code gives, then the environment, which wins."""
        table = {knob.name: knob for knob in knobs()}
        if unknown := sorted(code.keys() - table.keys()):
            raise OptionError("There is no such option.", "the code", ", ".join(table), ", ".join(unknown))
        given = cls(**code)
        environment = {
            knob.name: knob.read(text, f"the environment variable {knob.variable}")
            for knob in table.values()
            if knob.variable and (text := os.environ.get(knob.variable))
        }
        return replace(given, **environment)


def knobs() -> tuple[Knob, ...]:
    """The table of all options, in order."""
    return tuple(Knob(name=row.name, default=row.default, **row.metadata) for row in fields(Options))
