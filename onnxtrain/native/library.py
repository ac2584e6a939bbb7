"""Functions of a source text, there as soon as the text is compiled."""

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

# The step that asks for a kernel is a first step, which people wait for: a compiler beside it cost a Llama-like model's
# 0.2 of 1.7 s.
_AFTER_S = 1.0
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double, "o": ctypes.py_object}


def text(*names: str) -> str:
    """The files of this folder with these names, one after the other."""
    return "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names)


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """Where their elements lie; None is a null pointer. The caller holds the tensors while the pointers are used."""
    return [None if x is None else x.data_ptr() for x in tensors]


class Library:
    """One source text and its functions.

    Attributes:
        name, source, signatures: what it was made from.
        functions: the compiled functions by name; None as long as they are not there.
        why_not: after a failed build, the reason.
    """

    def __init__(
        self,
        name: str,
        source: str,
        signatures: Mapping[str, str],
        *,
        short: bool = False,
        torch_headers: bool = False,
    ) -> None:
        """Notes what is to be compiled.

        Args:
            name: for the file in the cache.
            source: C++ that defines `extern "C"` functions; `parallel.h` comes before it.
            signatures: for each function its name and a letter per argument: p, i, f, d or o; ">o" at the end where it
                returns a Python object (a new reference, or null with an exception set).
            short: calls take microseconds and keep Python's lock, which costs less than to give it away. What takes or
                returns Python objects is short.
            torch_headers: the source includes PyTorch's headers and Python's: it takes 10 s to compile.
        """
        self.functions: Any = None
        self.why_not: str | None = None
        self.name, self.source, self.signatures = name, source, dict(signatures)
        self._short, self._torch_headers = short, torch_headers
        self._lock = threading.Lock()
        self._work: threading.Thread | None = None

    def request(self) -> None:
        """Starts the build, the first time: behind those that were requested before. Returns at once."""
        if self._work is not None:
            return
        with self._lock:
            if self._work is None:
                name, turn = f"onnxtrain builds {self.name}", background.turn(_AFTER_S)
                self._work = threading.Thread(target=self._build, args=(turn,), name=name, daemon=True)
                self._work.start()

    def is_there(self) -> bool | None:
        """Whether the functions are there; None where they never will be."""
        return None if self.why_not is not None else self.functions is not None

    def wait(self, seconds: float | None = None) -> bool:
        """Requests the functions and waits for them; whether they are there."""
        self.request()
        assert self._work is not None
        self._work.join(seconds)
        return self.functions is not None

    def _build(self, turn: background.Turn) -> None:
        try:
            source = text("parallel.h") + self.source
            self.functions = self._load(build(self.name, source, turn, torch_headers=self._torch_headers))
        except BuildError as error:
            self.why_not = str(error)
            said = f"the compiled kernel {self.name} cannot be built, and PyTorch's kernels run instead: {error}"
            if " ended with " in self.why_not:  # the compiler, with an error; a machine without one is said once
                warn(said)
            else:
                LOG.info("%s", said)
        finally:
            turn.leave()

    def _load(self, path: Path) -> SimpleNamespace:
        try:
            library = (ctypes.PyDLL if self._short else ctypes.CDLL)(str(path))
            found = {name: getattr(library, name) for name in self.signatures}
        except (OSError, AttributeError) as error:
            raise BuildError(f"the library ended with an error when it was loaded: {error}") from error
        for name, signature in self.signatures.items():
            letters, _, result = signature.partition(">")
            found[name].argtypes = [_TYPES[letter] for letter in letters]
            found[name].restype = _TYPES[result] if result else None
        return SimpleNamespace(**found)
