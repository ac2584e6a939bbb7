"""The functions of a C++ source, available once it is compiled."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from onnxtrain.log import LOG, warn
from onnxtrain.native import background
from onnxtrain.native.build import BuildError, build

# A kernel is requested in a first step, for which people wait: a compiler beside it took 0.2 of 1.7 s with a Llama-like
# model.
_DELAY_S = 1.0
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double, "o": ctypes.py_object}


def read_sources(*names: str) -> str:
    """Return the concatenation of the named files of this folder."""
    return "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names)


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """Return the addresses of the tensors' data; None is a null pointer.

    The caller keeps the tensors alive meanwhile.
    """
    return [None if x is None else x.data_ptr() for x in tensors]


class Library:
    """One C++ source and its functions.

    Attributes:
        name, source, signatures: the arguments of the constructor.
        functions: the compiled functions by name; None until they are loaded.
        failure: after a failed build, the reason.
    """

    def __init__(
        self,
        name: str,
        source: str,
        signatures: Mapping[str, str],
        *,
        keeps_gil: bool = False,
        torch_headers: bool = False,
    ) -> None:
        """Describe a library; nothing is compiled yet.

        Args:
            name: for the file in the cache.
            source: C++ that defines `extern "C"` functions; `parallel.h` is prepended.
            signatures: for each function its name and one letter per argument: p, i, f, d or o; ">o" at the end if it
                returns a Python object (a new reference, or null with an exception set).
            keeps_gil: calls do not release the GIL, which is faster if they take microseconds. Required if functions
                take or return Python objects.
            torch_headers: the source includes the headers of PyTorch and Python; it takes 10 s to compile.
        """
        self.functions: Any = None
        self.failure: str | None = None
        self.name, self.source, self.signatures = name, source, dict(signatures)
        self._keeps_gil, self._torch_headers = keeps_gil, torch_headers
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Start the build, if not done yet, after those requested earlier. Returns immediately."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                name, ticket = f"onnxtrain builds {self.name}", background.take_ticket(_DELAY_S)
                self._thread = threading.Thread(target=self._build, args=(ticket,), name=name, daemon=True)
                self._thread.start()

    def is_ready(self) -> bool | None:
        """Return whether the functions are loaded; None if they never will be."""
        return None if self.failure is not None else self.functions is not None

    def wait(self, seconds: float | None = None) -> bool:
        """Request the functions and wait for them; return whether they are loaded."""
        self.request()
        assert self._thread is not None
        self._thread.join(seconds)
        return self.functions is not None

    def _build(self, ticket: background.Ticket) -> None:
        try:
            source = read_sources("parallel.h") + self.source
            self.functions = self._load(build(self.name, source, ticket, torch_headers=self._torch_headers))
        except BuildError as error:
            self.failure = str(error)
            message = f"the compiled kernel {self.name} failed to build; using PyTorch's: {error}"
            if " ended with " in self.failure:  # a compiler error; a missing compiler has its own single warning
                warn(message)
            else:
                LOG.info("%s", message)
        finally:
            ticket.leave()

    def _load(self, path: Path) -> SimpleNamespace:
        try:
            library = (ctypes.PyDLL if self._keeps_gil else ctypes.CDLL)(str(path))
            functions = {name: getattr(library, name) for name in self.signatures}
        except (OSError, AttributeError) as error:
            raise BuildError(f"loading the library ended with an error: {error}") from error
        for name, signature in self.signatures.items():
            letters, _, result = signature.partition(">")
            functions[name].argtypes = [_TYPES[letter] for letter in letters]
            functions[name].restype = _TYPES[result] if result else None
        return SimpleNamespace(**functions)
