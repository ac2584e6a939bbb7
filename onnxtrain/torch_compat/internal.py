"""Define the entries of this package, each of which wraps one private part of PyTorch.

    softmax_grad = Internal("softmax_grad", lambda: torch._softmax_backward_data, why=..., fallback=..., cost=...).get()

ONNXTRAIN_WITHOUT_INTERNALS="softmax_grad,cpu_flash" uses the fallbacks of these entries, as on a PyTorch that lacks
them; "all" uses those of every entry that is not required. Tests run with it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from onnxtrain.errors import CaptureError
from onnxtrain.log import LOG

T = TypeVar("T")

VARIABLE = "ONNXTRAIN_WITHOUT_INTERNALS"
ENTRIES: dict[str, Internal[Any]] = {}  # the entries of all imported modules, by name


class Absent:
    """The fallback for a class that this PyTorch lacks. It has no instances."""


class AbsentError(Exception):
    """The fallback for an exception that this PyTorch lacks. It is never raised."""


class Internal(Generic[T]):
    """One private part of PyTorch.

    Args:
        name: the name of the entry.
        find: gets the part from PyTorch; raises ImportError or AttributeError if it does not exist.
        why: what the part is used for, and why no public one serves the purpose.
        fallback: a slower implementation with the same results, or `missing(name)`.
        cost: what users notice if the fallback is used.
        versions: the versions of PyTorch that have the part under this name.
        required: whether no module can be captured without it; all then run in PyTorch (`refuse_if_lacking`).
        check: raises or returns False if the part does not behave as expected. Runs at first use, in microseconds.
        agrees: compares the part with the fallback on an example; run by the tests, on each version of PyTorch.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], T],
        *,
        why: str,
        fallback: T,
        cost: str,
        versions: str = "2.11 to 2.13",
        required: bool = False,
        check: Callable[[T], bool],
        agrees: Callable[[T], bool] | None = None,
    ) -> None:
        assert name not in ENTRIES, f"the entry {name} is defined twice"
        self.name, self.why, self.fallback, self.cost, self.versions = name, why, fallback, cost, versions
        self._find, self._check, self.agrees, self.required = find, check, agrees, required
        self._resolved: tuple[T] | None = None
        self.fault = ""
        ENTRIES[name] = self

    def get(self) -> T:
        """Return the private part, or the fallback. Resolved once: bind the result if it is called often."""
        if self._resolved is None:
            self._resolved = (self._resolve(),)
        return self._resolved[0]

    @property
    def module(self) -> str:
        """The name of the module that defines the entry."""
        return self._find.__module__

    @property
    def is_available(self) -> bool:
        """Whether `get` returns PyTorch's own part, not the fallback."""
        self.get()
        return not self.fault

    def _resolve(self) -> T:
        if _is_switched_off(self):
            self.fault = f"switched off by {VARIABLE}"
            return self.fallback
        try:
            part = self._find()
            if self._check(part):
                return part
            self.fault = "it does not behave as expected"
        except Exception as error:  # noqa: BLE001  a private part may fail in any way
            self.fault = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        LOG.info("PyTorch's %s is not used (%s): %s", self.name, self.fault, self.cost)
        return self.fallback


def missing(name: str) -> Callable[..., Any]:
    """Make the fallback of a part that a capture needs: calling it makes the module run in PyTorch."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise CaptureError(
            f"this PyTorch lacks a private part that onnxtrain needs: {name}",
            expected="a version of PyTorch that onnxtrain is tested with (see README)",
            todo="install one of these versions, or run the module in PyTorch",
        )

    return refuse


def required(name: str, find: Callable[[], T], why: str, check: Callable[[T], bool], fallback: Any = Absent) -> T:
    """Return a private part without which no module can be captured."""
    cost = "every module runs in PyTorch"
    return Internal[T](name, find, why=why, fallback=fallback, cost=cost, required=True, check=check).get()


def can_be_entered(make: Callable[[], AbstractContextManager[Any]]) -> bool:
    """Return whether a function makes a context manager that can be entered and left."""
    with make():
        return True


def refuse_if_lacking() -> None:
    """Check that this PyTorch has every private part that each capture needs.

    Raises:
        CaptureError: PyTorch lacks some; the error names them.
    """
    lacking = sorted(entry.name for entry in ENTRIES.values() if entry.required and not entry.is_available)
    if lacking:
        missing(", ".join(lacking))()


def _is_switched_off(entry: Internal[Any]) -> bool:
    names = os.environ.get(VARIABLE, "").split(",")
    return entry.name in names or ("all" in names and not entry.required)


def accepts(function: Any, *parameters: str) -> bool:
    """Return whether the first parameters of an unwrapped Python function have these names, or it takes any."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = function.__code__
    takes_any = bool(code.co_flags & inspect.CO_VARARGS) and not code.co_argcount
    return takes_any or code.co_varnames[: len(parameters)] == parameters
