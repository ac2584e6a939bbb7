"""Captures that are kept on disk (the option `cache_dir`).

    call ─key─▶ files of the key ─conditions, guards─▶ capture

The key holds what is known before forward runs: versions, the environment, inputs, classes and parameters. What else
decides shows while forward runs: the attributes that it reads, the files of the code that runs, the global names that
this code uses. They stand in the file and are compared with the present ones. Whatever cannot be compared between
processes keeps a capture from the disk: a wrong graph would give wrong numbers without a word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onnxtrain.capture.capture import Captured, ForwardCall
from onnxtrain.capture.key.executed_code import ExecutedCode, file_hash, global_values
from onnxtrain.capture.key.fingerprint import Fingerprints, NotStorableError, digest, versions
from onnxtrain.capture.key.key import environment, tensor_facts
from onnxtrain.capture.key.snapshot import Snapshot, submodules
from onnxtrain.capture.stored import entry
from onnxtrain.capture.stored.folder import CaptureFolder
from onnxtrain.capture.structure import Constant, Node, Structure, Tree
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
        folder: where they are kept. All files together take at most ONNXTRAIN_CACHE_LIMIT_MB.
        module: the user's module.
    """

    def __init__(self, folder: Path, module: torch.nn.Module) -> None:
        self._folder = CaptureFolder(folder, _limit_mb() * _MIB)
        self._module = module
        self._refused: set[str] = set()

    def capture(
        self,
        make: Callable[[ForwardCall], Captured],
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        run: ForwardCall | None = None,
        fixed_sizes: Collection[int] = (),
    ) -> Captured:
        """The capture from disk, or what `make` gives, which is then kept.

        Args:
            make: captures the module for this call, as this function runs it; raises what it raises.
            structure: how the call's tensors and constants make up its arguments.
            tensors: the call's tensors.
            run: runs the module, where its call is to be left out.
            fixed_sizes: the numbers of the tensors whose sizes are not open.
        """
        start = time.perf_counter()
        try:
            key = self._key(structure, tensors, run, fixed_sizes)
            found = self._find(key, tensors)
        except NotStorableError as error:
            self._refuse(error)
            return make(run or self._module)
        if found is not None:
            return replace(found, took_ms=(time.perf_counter() - start) * 1e3)
        code = ExecutedCode()

        def noted(*args: Any, **kwargs: Any) -> Any:
            with code.recording():
                return (run or self._module)(*args, **kwargs)

        captured = make(noted)
        try:
            return self._add(key, captured, code)
        except NotStorableError as error:
            self._refuse(error)
            return captured

    def _refuse(self, error: NotStorableError) -> None:
        if str(error) not in self._refused:
            self._refused.add(str(error))
            LOG.info("%s: the capture is not kept on disk: %s", type(self._module).__name__, error)

    # Reading

    def _find(self, key: str, tensors: Sequence[torch.Tensor]) -> Captured | None:
        for file, data in self._folder.read(key):
            try:
                found = entry.Entry(data)
                reads = self._reads(found.conditions)
                if not found.guards(tensors) or self._change(found.conditions, reads):
                    continue
                captured = found.captured(reads, file.name)
            except NotStorableError:
                continue
            except Exception as error:  # noqa: BLE001  # what is damaged may raise anything
                warn_once(f"the capture {file} is damaged, and is made anew ({type(error).__name__}: {error})")
                continue
            self._folder.used(file)
            LOG.info("%s: the capture is read from %s", type(self._module).__name__, file)
            return captured
        return None

    def _reads(self, conditions: entry.Conditions) -> frozenset[tuple[int, str]]:
        ids = {path: id(module) for path, module in submodules(self._module)}
        return frozenset((ids[path], name) for path, name in conditions.reads if path in ids)

    def _change(self, conditions: entry.Conditions, reads: Collection[tuple[int, str]]) -> str:
        """The first thing that is not as it was; "" where all is."""
        if self._state(conditions.names, reads) != conditions.state:
            return "the module's attributes"
        for file, known in conditions.files.items():
            if file_hash(file) != known:
                return file
        names = {module: list(values) for module, values in conditions.values.items()}
        values = global_values(names, self._fingerprints)
        return next((module for module in names if values[module] != conditions.values[module]), "")

    # Writing

    def _add(self, key: str, captured: Captured, code: ExecutedCode) -> Captured:
        if captured.guards.elements:
            raise NotStorableError("forward decides by elements of its arguments")
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
            raise NotStorableError(f"the graph takes the Tensor {outside}, which only this process has")
        file = self._folder.add(key, entry.to_bytes(captured, conditions))
        if file is None:
            return captured
        LOG.info("%s: the capture is kept in %s", type(self._module).__name__, file)
        return replace(captured, stored_name=file.name)

    # What a capture depends on

    def _fingerprints(self) -> Fingerprints:
        return Fingerprints({id(module): path for path, module in submodules(self._module)})

    def _state(self, names: Sequence[str], reads: Collection[tuple[int, str]]) -> str:
        """A digest of what forward can read from the module.

        Raises:
            NotStorableError: it can read what only this process has.
        """
        found = self._fingerprints()
        facts = Snapshot(self._module, names, reads).facts
        return digest([(place, _of_fact(found, place, fact.key)) for place, fact in facts.items()])

    def _key(
        self,
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        run: ForwardCall | None,
        fixed_sizes: Collection[int],
    ) -> str:
        found = self._fingerprints()
        parts = [
            versions(),
            _devices(),
            found.of(environment()),
            found.of([tensor_facts(tensor) for tensor in tensors]),
            (_of_tree(found, structure.tree), structure.names, structure.shared),
            sorted(fixed_sizes),
            found.of(run),
            [self._of_module(found, path, module) for path, module in submodules(self._module)],
        ]
        return digest(parts)

    @staticmethod
    def _of_module(found: Fingerprints, path: str, module: torch.nn.Module) -> Any:
        if isinstance(module, torch.fx.GraphModule):
            raise NotStorableError("its forward is a graph that was made in this process")
        own = (*module._parameters.items(), *module._buffers.items())
        tensors = [
            (name, None if t is None else tensor_facts(t), None if t is None else tuple(t.shape)) for name, t in own
        ]
        return path, found.of_class(type(module)), found.of(tensors), module.training


def _of_fact(found: Fingerprints, place: tuple[str, str], key: Any) -> Any:
    if place[0].endswith("hooks"):
        raise NotStorableError(f"{place[1]} has hooks")
    return found.of(key)


def _of_tree(found: Fingerprints, tree: Tree) -> Any:
    if isinstance(tree, Node):
        return found.of_class(tree.type), found.of(tree.key), [_of_tree(found, child) for child in tree.children]
    if isinstance(tree, Constant):
        return found.of(tree.key)
    return tree.kind, tree.index


def _devices() -> list[str]:
    """The devices by which forward may decide."""
    found = [current_machine().vectors]
    if torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())
        found += [f"{torch.cuda.get_device_name(i)} {torch.cuda.get_device_capability(i)}" for i in gpus]
    return found
