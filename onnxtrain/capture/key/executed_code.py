"""The Python code that ran in forward: its files, and what it found under global names.

A capture on disk is right as long as each of these files is the same, and each of the names stands for the same. The
files are compared as they are on disk; one that was changed after this process began may not be what runs here.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from onnxtrain.capture.key.fingerprint import Fingerprints, NotStorableError, digest, is_known_by_version

# Names with which code reads what no file and no global holds.
_FROM_OUTSIDE = frozenset({"environ", "getenv", "open", "argv", "stdin"})

Files = dict[str, str]
Globals = dict[str, dict[str, str]]


class Executed:
    """The code that ran while `noted()` was held, once each, with the globals that it saw.

    Attributes:
        is_whole: whether all was noted.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self._found: dict[int, tuple[CodeType, Mapping[str, Any]]] = {}
        self._generated: set[int] = set()
        self._outside: FrameType | None = None  # the frame in which `noted()` is held

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or id(code) in self._found or self._is_beside_forward(frame):
            return
        self._found[id(code)] = (code, frame.f_globals)
        caller = frame.f_back
        if code.co_name == "<module>" and caller is not None and is_known_by_version(caller.f_code.co_filename):
            self._generated.update(map(id, with_nested(code)))  # PyTorch runs a text that it made

    def _is_beside_forward(self, frame: FrameType) -> bool:
        """Whether code runs because forward imports a module or because Python collects garbage.

        What forward itself runs of an imported module is noted then. A callback of the collector runs in whichever
        frame allocates: hypothesis has one that counts time in a global, which no two runs have the same.
        """
        if is_known_by_version(frame.f_code.co_filename):
            return False  # it does not count anyhow
        calls = (callback if hasattr(callback, "__code__") else type(callback).__call__ for callback in gc.callbacks)
        callbacks = {getattr(call, "__code__", None) for call in calls}
        above: FrameType | None = frame
        while above is not None and above is not self._outside:
            if above.f_code in callbacks or above.f_code.co_filename == "<frozen importlib._bootstrap>":
                return True
            above = above.f_back
        return False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes what this thread runs. The place of a profiler that is at work is not taken: nothing is noted then."""
        self.is_whole = sys.getprofile() is None
        if self.is_whole:
            self._outside = sys._getframe(2)  # 1 is of contextlib
            sys.setprofile(self._note)
        try:
            yield
        finally:
            if self.is_whole:
                sys.setprofile(None)
                self._outside = None

    def files(self) -> Files:
        """The hash of each file whose code is not known by its version.

        Raises:
            NotStorableError: code is in no file, or in one that has been changed since this process began.
        """
        return {file: file_hash(file) for file in sorted({code.co_filename for code, _ in self._own()})}

    def names(self) -> dict[str, list[str]]:
        """By module, the global names that the code uses; `helpers.SCALE` is what it may find in another module.

        Raises:
            NotStorableError: the code may read what lies outside of the program.
        """
        found: dict[str, set[str]] = {}
        for code, scope in self._own():
            if not code.co_flags & CO_OPTIMIZED:
                continue  # the body of a class
            if outside := _FROM_OUTSIDE.intersection(code.co_names):
                raise NotStorableError(f"{code.co_qualname} reads {min(outside)}, which may be other in another run")
            module = str(scope.get("__name__"))
            if getattr(sys.modules.get(module), "__dict__", None) is not scope:
                raise NotStorableError(f"{code.co_qualname} is in no module that can be imported")
            names = found.setdefault(module, set())
            for name in code.co_names:
                if name in scope:
                    names.update(_paths(name, scope[name], code.co_names))
        return {module: sorted(names) for module, names in sorted(found.items())}

    def _own(self) -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
        if not self.is_whole:
            raise NotStorableError("a profiler runs, so that the code that a capture depends on is not known")
        for code, scope in self._found.values():
            if is_known_by_version(code.co_filename) or _is_generated(code, scope) or id(code) in self._generated:
                continue
            if code.co_filename.startswith("<"):
                raise NotStorableError(f"{code.co_qualname} is code in no file ({code.co_filename})")
            yield code, scope


def _is_generated(code: CodeType, scope: Mapping[str, Any]) -> bool:
    """Whether PyTorch, onnxtrain, a dataclass or a named tuple wrote this code: what it was made from counts."""
    if code.co_filename != "<string>":
        return code.co_filename.startswith(("<eval_with_key>", "<onnxtrain"))
    return code.co_qualname.startswith("__create_fn__") or str(scope.get("__name__")).startswith("namedtuple_")


def _paths(path: str, value: object, names: Collection[str], seen: frozenset[int] = frozenset()) -> Iterator[str]:
    """A name, and where it stands for a module those that code may go on with: `nn`, `nn.functional`, ...

    Modules that name each other (`torch.nn.torch`) are not gone into again: their paths would be without number.
    """
    yield path
    if isinstance(value, ModuleType) and id(value) not in seen:
        for name in names:
            if name in vars(value):
                yield from _paths(f"{path}.{name}", vars(value)[name], names, seen | {id(value)})


def with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_nested(constant)


def global_values(names: Mapping[str, list[str]], fingerprints: Callable[[], Fingerprints]) -> Globals:
    """What these names stand for now. `fingerprints` makes one for each name, so that none depends on another.

    Raises:
        NotStorableError: a module or a name is not there, or stands for what only this process has.
    """
    return {module: {name: _value(module, name, fingerprints) for name in wanted} for module, wanted in names.items()}


def _value(module: str, name: str, fingerprints: Callable[[], Fingerprints]) -> str:
    try:
        value: Any = vars(sys.modules[module])
        for part in name.split("."):
            value = (value if isinstance(value, dict) else vars(value))[part]
    except (KeyError, TypeError) as error:
        raise NotStorableError(f"{module} has no {name}") from error
    try:
        return digest(fingerprints().of(value))
    except NotStorableError as error:
        raise NotStorableError(f"the global {name} of {module}: {error}") from error


def file_hash(file: str) -> str:
    """The hash of a source file.

    Raises:
        NotStorableError: it cannot be read, or was changed since this process began.
    """
    try:
        path = Path(file)
        if path.stat().st_ctime >= _began():
            raise NotStorableError(f"{file} was changed after this process had begun")
        return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    except OSError as error:
        raise NotStorableError(f"the source {file} cannot be read") from error


_IMPORTED = time.time()


def _began() -> float:
    """When this process began, in seconds since the epoch; where the system does not tell, when this was imported."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, AttributeError, ValueError, IndexError):
        return _IMPORTED
