"""The Python code that ran in forward: its files, and the values of the globals that it used.

A stored capture is valid as long as each of these files and values is the same. Files are compared as they are on disk;
one that changed after the process started may not be what runs in it, so that such a capture is not stored.
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

# Names by which code reads data that is in no source file and no global.
_EXTERNAL_DATA = frozenset({"environ", "getenv", "open", "argv", "stdin"})

Files = dict[str, str]
Globals = dict[str, dict[str, str]]


class ExecutedCode:
    """The code that ran while `recording()` was held, once each, with its globals.

    Attributes:
        is_complete: whether all code was recorded.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._recorded: dict[int, tuple[CodeType, Mapping[str, Any]]] = {}
        self._generated: set[int] = set()
        self._outer_frame: FrameType | None = None  # the frame in which `recording()` is held

    def _record(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or id(code) in self._recorded or self._is_beside_forward(frame):
            return
        self._recorded[id(code)] = (code, frame.f_globals)
        caller = frame.f_back
        if code.co_name == "<module>" and caller is not None and is_known_by_version(caller.f_code.co_filename):
            self._generated.update(map(id, with_nested(code)))  # PyTorch runs generated code

    def _is_beside_forward(self, frame: FrameType) -> bool:
        """Return whether code runs only because forward imports a module or because Python collects garbage.

        Functions of an imported module are recorded when forward calls them. A callback of the garbage collector runs
        in whichever frame allocates: hypothesis has one that counts time in a global, which differs in every run.
        """
        if is_known_by_version(frame.f_code.co_filename):
            return False  # `_user_code` skips it anyway
        calls = (callback if hasattr(callback, "__code__") else type(callback).__call__ for callback in gc.callbacks)
        callbacks = {getattr(call, "__code__", None) for call in calls}
        caller: FrameType | None = frame
        while caller is not None and caller is not self._outer_frame:
            if caller.f_code in callbacks or caller.f_code.co_filename == "<frozen importlib._bootstrap>":
                return True
            caller = caller.f_back
        return False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the code that this thread runs, by Python's profiling hook; nothing if a profiler uses that hook."""
        self.is_complete = sys.getprofile() is None
        if self.is_complete:
            self._outer_frame = sys._getframe(2)  # 1 is of contextlib
            sys.setprofile(self._record)
        try:
            yield
        finally:
            if self.is_complete:
                sys.setprofile(None)
                self._outer_frame = None

    def files(self) -> Files:
        """Return the hash of each file whose code is not identified by a version.

        Raises:
            NotStorableError: code is in no file, or in one that changed after this process started.
        """
        return {file: file_hash(file) for file in sorted({code.co_filename for code, _ in self._user_code()})}

    def names(self) -> dict[str, list[str]]:
        """Return the global names that the code uses, by module; `helpers.SCALE` is one in another module.

        Raises:
            NotStorableError: the code may read data from outside the program.
        """
        names_of: dict[str, set[str]] = {}
        for code, scope in self._user_code():
            if not code.co_flags & CO_OPTIMIZED:
                continue  # the body of a class
            if external := _EXTERNAL_DATA.intersection(code.co_names):
                raise NotStorableError(f"{code.co_qualname} reads {min(external)}, which may differ in another run")
            module = str(scope.get("__name__"))
            if getattr(sys.modules.get(module), "__dict__", None) is not scope:
                raise NotStorableError(f"{code.co_qualname} is not in a module that can be imported")
            names = names_of.setdefault(module, set())
            for name in code.co_names:
                if name in scope:
                    names.update(_paths(name, scope[name], code.co_names))
        return {module: sorted(names) for module, names in sorted(names_of.items())}

    def _user_code(self) -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
        if not self.is_complete:
            raise NotStorableError("a profiler is active, so onnxtrain cannot record the code that forward runs")
        for code, scope in self._recorded.values():
            if is_known_by_version(code.co_filename) or _is_generated(code, scope) or id(code) in self._generated:
                continue
            if code.co_filename.startswith("<"):
                raise NotStorableError(f"the code of {code.co_qualname} is not in a file ({code.co_filename})")
            yield code, scope


def _is_generated(code: CodeType, scope: Mapping[str, Any]) -> bool:
    """Return whether code was generated by PyTorch, onnxtrain, a dataclass or a named tuple.

    Its inputs are compared.
    """
    if code.co_filename != "<string>":
        return code.co_filename.startswith(("<eval_with_key>", "<onnxtrain"))
    return code.co_qualname.startswith("__create_fn__") or str(scope.get("__name__")).startswith("namedtuple_")


def _paths(path: str, value: object, names: Collection[str], visited: frozenset[int] = frozenset()) -> Iterator[str]:
    """Yield a name and, if it is that of a module, the paths from it that code may use.

    For example `nn`, `nn.functional`. A module is not entered twice (`torch.nn.torch`), because the number of paths
    would be infinite.
    """
    yield path
    if isinstance(value, ModuleType) and id(value) not in visited:
        for name in names:
            if name in vars(value):
                yield from _paths(f"{path}.{name}", vars(value)[name], names, visited | {id(value)})


def with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_nested(constant)


def global_values(names: Mapping[str, list[str]], fingerprints: Callable[[], Fingerprints]) -> Globals:
    """Return a digest of the value of each of these names, by module.

    Args:
        names: the names, by module.
        fingerprints: makes a new object for each name, so that no digest depends on another.

    Raises:
        NotStorableError: a module or a name is missing, or its value exists in this process only.
    """
    return {
        module: {name: _global_value(module, name, fingerprints) for name in used} for module, used in names.items()
    }


def _global_value(module: str, name: str, fingerprints: Callable[[], Fingerprints]) -> str:
    try:
        value: Any = vars(sys.modules[module])
        for part in name.split("."):
            value = (value if isinstance(value, dict) else vars(value))[part]
    except (KeyError, TypeError) as error:
        raise NotStorableError(f"{module} has no {name}") from error
    try:
        return digest(fingerprints().fingerprint(value))
    except NotStorableError as error:
        raise NotStorableError(f"the global {name} of {module}: {error}") from error


def file_hash(file: str) -> str:
    """Return the hash of a source file.

    Raises:
        NotStorableError: the file cannot be read, or changed after this process started.
    """
    try:
        path = Path(file)
        if path.stat().st_ctime >= _process_start():
            raise NotStorableError(f"{file} changed after this process started")
        return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    except OSError as error:
        raise NotStorableError(f"the source file {file} cannot be read") from error


_IMPORT_TIME = time.time()


def _process_start() -> float:
    """Return the start of this process in seconds since the epoch; without /proc, the import of this module."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, AttributeError, ValueError, IndexError):
        return _IMPORT_TIME
