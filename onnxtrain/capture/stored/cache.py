"""Load captures from disk, and store new ones there (the option `cache_dir`).

    call ─key─▶ files of the key ─conditions, guards─▶ capture

The key contains what is known before forward runs: versions, the environment, inputs, classes and parameters. A graph
also depends on what only shows while forward runs: the attributes that it reads, the source files of the code that
runs, and the global names that this code uses. The file stores them, and they are compared with the current ones. A
capture that depends on anything that cannot be compared between processes is not stored: a wrong graph would silently
compute wrong results.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onnxtrain.capture.capture import Captured
from onnxtrain.capture.key.executed_code import ExecutedCode, file_hash, global_values
from onnxtrain.capture.key.fingerprint import Fingerprints, NotStorableError, digest, versions
from onnxtrain.capture.key.key import environment, tensor_facts
from onnxtrain.capture.key.snapshot import Snapshot, submodules
from onnxtrain.capture.stored import entry
from onnxtrain.capture.stored.claim import claimed
from onnxtrain.capture.stored.folder import CaptureFolder
from onnxtrain.capture.structure import Constant, Node, Structure, Tree
from onnxtrain.capture.wrapper import ForwardCall
from onnxtrain.log import LOG, warn_once
from onnxtrain.options.kinds import COUNT, parse
from onnxtrain.system.machine import current_machine

_MIB = 2**20
_LIMIT_MB = "ONNXTRAIN_CACHE_LIMIT_MB"


def _limit_mb() -> int:
    return parse("cache limit", COUNT, os.environ.get(_LIMIT_MB) or 1024, f"the environment variable {_LIMIT_MB}")


class CaptureCache:
    """The captures of one module on disk.

    Args:
        folder: the folder of the files, which take at most ONNXTRAIN_CACHE_LIMIT_MB MiB together.
        module: the user's module.
    """

    def __init__(self, folder: Path, module: torch.nn.Module) -> None:
        self._folder = CaptureFolder(folder, _limit_mb() * _MIB)
        self._module = module
        self._logged: set[str] = set()

    def capture(
        self,
        capture: Callable[[ForwardCall], Captured],
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        run: ForwardCall | None = None,
        fixed_sizes: Collection[int] = (),
    ) -> Captured:
        """Return the capture for a call from disk, or capture it and store the capture.

        Args:
            capture: captures the module for this call, run by the given function. Its errors propagate.
            structure: how the call's tensors and constants make up its arguments.
            tensors: the call's tensors.
            run: runs the module in place of calling it.
            fixed_sizes: indices of the tensors whose sizes are static.
        """
        start = time.perf_counter()
        try:
            key = self._key(structure, tensors, run, fixed_sizes)
            stored = self._load(key, tensors)
        except NotStorableError as error:
            self._log_not_stored(error)
            return capture(run or self._module)
        if stored is None:
            with claimed(self._folder.lock_file(key)) as claim:
                stored = self._load(key, tensors) if claim.waited else None
                if stored is None:
                    captured = self._make(key, capture, run or self._module)
                    claim.is_stored = captured.stored_name != ""
                    return captured
        return replace(stored, took_ms=(time.perf_counter() - start) * 1e3)

    def _make(self, key: str, capture: Callable[[ForwardCall], Captured], run: ForwardCall) -> Captured:
        """Capture, and store the capture if it can be stored."""
        code = ExecutedCode()

        def run_recorded(*args: Any, **kwargs: Any) -> Any:
            with code.recording():
                return run(*args, **kwargs)

        captured = capture(run_recorded)
        try:
            return self._store(key, captured, code)
        except NotStorableError as error:
            self._log_not_stored(error)
            return captured

    def _log_not_stored(self, error: NotStorableError) -> None:
        if str(error) not in self._logged:
            self._logged.add(str(error))
            LOG.info("%s: the capture is not stored on disk: %s", type(self._module).__name__, error)

    # Loading

    def _load(self, key: str, tensors: Sequence[torch.Tensor]) -> Captured | None:
        for file, data in self._folder.read(key):
            try:
                stored = entry.Entry(data)
                reads = self._reads(stored.conditions)
                if not stored.guards(tensors) or not self._holds(stored.conditions, reads):
                    continue
                captured = stored.captured(reads, file.name)
            except NotStorableError:
                continue
            except Exception as error:  # noqa: BLE001  # a corrupt file may raise anything
                warn_once(f"the stored capture {file} is corrupt ({type(error).__name__}: {error}); capturing again")
                continue
            self._folder.mark_used(file)
            LOG.info("%s: loaded the capture from %s", type(self._module).__name__, file)
            return captured
        return None

    def _reads(self, conditions: entry.Conditions) -> frozenset[tuple[int, str]]:
        ids = {path: id(module) for path, module in submodules(self._module)}
        return frozenset((ids[path], name) for path, name in conditions.reads if path in ids)

    def _holds(self, conditions: entry.Conditions, reads: Collection[tuple[int, str]]) -> bool:
        """Return whether the module's attributes, the source files and the globals are as they were at the capture."""
        if self._state(conditions.names, reads) != conditions.state:
            return False
        if any(file_hash(file) != file_digest for file, file_digest in conditions.files.items()):
            return False
        names = {module: list(values) for module, values in conditions.values.items()}
        values = global_values(names, self._fingerprints)
        return all(values[module] == conditions.values[module] for module in names)

    # Storing

    def _store(self, key: str, captured: Captured, code: ExecutedCode) -> Captured:
        if captured.guards.elements:
            raise NotStorableError("forward branches on elements of its arguments")
        if captured.assigned.results or captured.assigned.tensors:
            raise NotStorableError("forward sets an attribute to a tensor")
        if captured.assumed:
            raise NotStorableError("forward branches on values, and the graph assumes the answer")
        paths = {id(module): path for path, module in submodules(self._module)}
        names = tuple(source.name for source in captured.sources if source.kind != "input")
        conditions = entry.Conditions(
            reads=tuple(sorted((paths[owner], name) for owner, name in captured.reads if owner in paths)),
            state=self._state(names, captured.reads),
            names=names,
            files=code.files(),
            values=global_values(code.names(), self._fingerprints),
        )
        outside = next((source.name for source in captured.sources if source.kind == "outside"), None)
        if outside is not None:
            raise NotStorableError(f"an input of the graph is the Tensor {outside}, which exists only in this process")
        file = self._folder.add(key, entry.to_bytes(captured, conditions))
        if file is None:
            return captured
        LOG.info("%s: stored the capture in %s", type(self._module).__name__, file)
        return replace(captured, stored_name=file.name)

    # Key and state

    def _fingerprints(self) -> Fingerprints:
        return Fingerprints({id(module): path for path, module in submodules(self._module)})

    def _state(self, names: Sequence[str], reads: Collection[tuple[int, str]]) -> str:
        """Return a digest of everything that forward can read from the module.

        Raises:
            NotStorableError: forward can read an object that exists only in this process.
        """
        fingerprints = self._fingerprints()
        facts = Snapshot(self._module, names, reads).facts
        return digest([(path, _fact_fingerprint(fingerprints, path, fact.key)) for path, fact in facts.items()])

    def _key(
        self,
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        run: ForwardCall | None,
        fixed_sizes: Collection[int],
    ) -> str:
        fingerprints = self._fingerprints()
        parts = [
            versions(),
            _devices(),
            fingerprints.fingerprint(environment()),
            fingerprints.fingerprint([tensor_facts(tensor) for tensor in tensors]),
            (_tree_fingerprint(fingerprints, structure.tree), structure.names, structure.shared),
            sorted(fixed_sizes),
            fingerprints.fingerprint(run),
            [_module_fingerprint(fingerprints, path, module) for path, module in submodules(self._module)],
        ]
        return digest(parts)


def _module_fingerprint(fingerprints: Fingerprints, path: str, module: torch.nn.Module) -> Any:
    if isinstance(module, torch.fx.GraphModule):
        raise NotStorableError("its forward is a graph that was created in this process")
    named = (*module._parameters.items(), *module._buffers.items())
    tensors = [
        (name, None if t is None else tensor_facts(t), None if t is None else tuple(t.shape)) for name, t in named
    ]
    return path, fingerprints.fingerprint_class(type(module)), fingerprints.fingerprint(tensors), module.training


def _fact_fingerprint(fingerprints: Fingerprints, path: tuple[str, str], key: Any) -> Any:
    if path[0].endswith("hooks"):
        raise NotStorableError(f"{path[1]} has hooks")
    return fingerprints.fingerprint(key)


def _tree_fingerprint(fingerprints: Fingerprints, tree: Tree) -> Any:
    if isinstance(tree, Node):
        children = [_tree_fingerprint(fingerprints, child) for child in tree.children]
        return fingerprints.fingerprint_class(tree.type), fingerprints.fingerprint(tree.key), children
    if isinstance(tree, Constant):
        return fingerprints.fingerprint(tree.key)
    return tree.kind, tree.index


def _devices() -> list[str]:
    """Return the devices that forward may branch on."""
    devices = [current_machine().vectors]
    if torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())
        devices += [f"{torch.cuda.get_device_name(i)} {torch.cuda.get_device_capability(i)}" for i in gpus]
    return devices
