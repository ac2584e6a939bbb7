"""Finds or makes the compiled unit for a call of a module, and runs it.

    call ─flatten─> tensors, structure ─key─> entries ─state and guards─> unit ─run─> results ─unflatten─> output

Shared by every entry point that wraps a whole module.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onnxtrain.capture import source_line
from onnxtrain.capture.decisions import Example
from onnxtrain.capture.export import Captured, capture
from onnxtrain.capture.key import ModuleState, environment, tensor_facts
from onnxtrain.capture.patches import CAPTURE_LOCK, capture_is_under_way
from onnxtrain.capture.refusals import refuse_call, refuse_module
from onnxtrain.capture.side_effects import SideEffectError, SideEffects
from onnxtrain.capture.structure import Structure, flatten_call, flatten_output
from onnxtrain.capture.usual_call import Missed, UsualCall, usual_call
from onnxtrain.compile import Compiled, Rerun, compile_module
from onnxtrain.errors import ORTModuleFallbackException
from onnxtrain.options import Options

_LOG = logging.getLogger("onnxtrain")


class _Entry:
    """A compiled unit, or None where there is none, for one key and one state of the module."""

    __slots__ = ("_patience", "_seen", "compiled", "guards", "reads", "state", "usual")

    def __init__(self, state: ModuleState, compiled: Compiled | None) -> None:
        self.state = state
        self.usual: UsualCall | None = None
        self._seen = 0  # calls on the long way since `usual` was made
        self._patience = 1
        self.compiled = compiled
        self.reads = compiled.captured.reads if compiled is not None else frozenset()
        self.guards = compiled.captured.guards if compiled is not None else _no_guards

    def learn(self, module: torch.nn.Module, structure: Structure, tensors: list[torch.Tensor]) -> None:
        """Makes the function that recognises such calls; again, after ever more calls, where the module has changed."""
        self._seen += 1
        if self.compiled is None or self._seen < self._patience:
            return
        snapshot = self.state.now(module)
        self.usual = None
        if snapshot is not None:
            compiled = self.compiled
            self.usual = usual_call(snapshot, compiled.captured.guards, structure, tensors, compiled.run)
        self._seen, self._patience = 0, min(2 * self._patience, _MOST_PATIENCE)

    def suggestion(self, tensors: list[torch.Tensor]) -> Example | None:
        """Example sizes with which another capture may turn out to be this one."""
        return self.compiled.captured.guards.suggestion(tensors) if self.compiled is not None else None

    def adopts(self, captured: Captured, module: torch.nn.Module) -> bool:
        """Whether `captured`, of `module` as it is now, is this graph, which then serves its sizes too."""
        if self.compiled is None or self.compiled.captured.output != captured.output:
            return False
        if not self.compiled.captured.guards.adopt(captured.guards):
            return False
        if not captured.reads <= self.reads:  # forward read more at these sizes: that must stay as it is, too
            self.reads |= captured.reads
            self.state = ModuleState.take(module, self.state.names, self.reads)
            self.usual = None
        return True


def _never(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> type[Missed]:
    """No call is usual."""
    return Missed


def _any_state(module: torch.nn.Module) -> list[torch.Tensor]:
    return []


def _no_guards(tensors: Sequence[torch.Tensor]) -> bool:
    return True


_MOST_PATIENCE = 256  # to recognise the usual call takes as long to learn as a hundred calls on the long way


class Engine:
    """Runs calls of one module."""

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        self._module = module
        self._options = options
        self._entries: dict[Any, list[_Entry]] = {}
        self._recent: _Entry | None = None
        self._usual: UsualCall = _never
        self._newest: Compiled | None = None
        self._warned: set[str] = set()
        self.captures = 0

    def newest(self) -> Compiled:
        """The newest compiled unit. Raises RuntimeError before the first one."""
        if self._newest is None:
            raise RuntimeError("nothing is compiled yet: call the module first")
        return self._newest

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        output = self._usual(args, kwargs)
        return self._on_the_long_way(args, kwargs) if output is Missed else output

    def _on_the_long_way(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if capture_is_under_way():
            return self._module(*args, **kwargs)
        try:
            tensors, structure = flatten_call(args, kwargs)
            key = (structure, environment(), *map(tensor_facts, tensors))
        except ORTModuleFallbackException as error:
            return self._in_torch(error, args, kwargs)
        entry, inputs = self._find(key, tensors)
        if entry is None:
            try:
                entry, inputs = self._find_or_compile(key, tensors, structure)
            except ORTModuleFallbackException as error:
                self._remember_failure(key, error)
                return self._in_torch(error, args, kwargs)
        if entry.compiled is None:
            return self._module(*args, **kwargs)
        if entry is self._recent:
            entry.learn(self._module, structure, tensors)
        self._recent = entry
        self._usual = entry.usual or _never
        return entry.compiled.run(*inputs)

    def _find(self, key: Any, tensors: list[torch.Tensor]) -> tuple[_Entry | None, list[torch.Tensor]]:
        """The entry that serves a call, and what it takes."""
        entries = self._entries.get(key, [])
        for place, entry in enumerate(entries):
            inputs = entry.state.read(self._module)
            if inputs is not None and entry.guards(tensors):
                if place:  # to the front: to look at an entry whose state has changed may take milliseconds
                    self._entries[key] = [entry, *(e for e in entries if e is not entry)]
                inputs += tensors
                return entry, inputs
        return None, tensors

    def _find_or_compile(
        self, key: Any, tensors: list[torch.Tensor], structure: Structure
    ) -> tuple[_Entry, list[torch.Tensor]]:
        with CAPTURE_LOCK:
            entry, inputs = self._find(key, tensors)  # another thread may have made it meanwhile
            if entry is None:
                return self._compile(key, tensors, structure)
            return entry, inputs

    # Compiling

    def _compile(
        self, key: Any, tensors: list[torch.Tensor], structure: Structure
    ) -> tuple[_Entry, list[torch.Tensor]]:
        self._announce(key, tensors)
        refuse_module(self._module)
        refuse_call(tensors)
        watch = SideEffects(self._module)
        try:
            try:
                entry = self._capture(key, tensors, structure, watch)
            except SideEffectError:
                # A change that forward makes once is made now; one that it makes again is found by the second capture.
                watch.settle()
                entry = self._capture(key, tensors, structure, SideEffects(self._module))
        except BaseException:
            watch.undo()
            raise
        return entry, [*self._read(entry.state), *tensors]

    def _read(self, state: ModuleState) -> list[torch.Tensor]:
        own = state.read(self._module)
        assert own is not None, "the module's state cannot change while the capture lock is held"
        return own

    def _capture(self, key: Any, tensors: list[torch.Tensor], structure: Structure, watch: SideEffects) -> _Entry:
        """Captures, and compiles unless the graph is one that is compiled already."""
        module = self._module
        same = [e for e in self._entries.get(key, ()) if e.compiled is not None and e.state.matches(module)]
        suggested = [s for e in same if (s := e.suggestion(tensors)) is not None]
        captured = capture(module, structure, tensors, watch, suggested)
        for entry in same:
            if entry.adopts(captured, module):
                return entry
        state = ModuleState.take(module, [s.name for s in captured.sources if s.kind != "input"], captured.reads)
        inputs = [*self._read(state), *tensors]
        compiled = compile_module(module, captured, inputs, self._options, _rerun(module, structure, captured))
        entry = _Entry(state, compiled)
        self._entries.setdefault(key, []).append(entry)
        self._newest = compiled
        self.captures += 1
        return entry

    def _announce(self, key: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Says once per new capture why the earlier ones do not serve."""
        name = type(self._module).__name__
        if not self._entries:
            _LOG.info("%s: first capture", name)
            return
        reason = "the structure, types or environment of the call is new"
        for entry in self._entries.get(key, ()):
            changed = entry.state.difference(self._module)
            if changed:
                reason = changed
            elif entry.compiled is not None:
                reason = entry.compiled.captured.guards.explain(tensors)
        _LOG.info("%s: captured again, because %s", name, reason)

    # Falling back

    def _remember_failure(self, key: Any, error: ORTModuleFallbackException) -> None:
        """Lets later calls of this kind run in PyTorch at once, unless they are to be tried again."""
        if self._options.fallback_policy.covers(error) and not self._options.fallback_retry:
            entry = _Entry(ModuleState.take(self._module), None)
            if isinstance(error, SideEffectError):
                entry.state.check = _any_state  # its state changes on every call
            self._entries.setdefault(key, []).append(entry)

    def _in_torch(self, error: ORTModuleFallbackException, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module in PyTorch, with one warning per reason; raises where the policy forbids it."""
        if not self._options.fallback_policy.covers(error):
            raise error
        name = type(self._module).__name__
        text = f"{name} runs in PyTorch, not as an ONNX graph: {error}"
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=source_line.depth_of_caller())
        return self._module(*args, **kwargs)


def _rerun(module: torch.nn.Module, structure: Structure, captured: Captured) -> Rerun:
    """A function that runs the module in PyTorch on tensors in the order of the capture's inputs."""
    inputs = sum(s.kind == "input" for s in captured.sources)
    names = [s.name for s in captured.sources if s.kind != "input"]

    def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        own = tensors[: len(names)]
        # Buffers were updated by the forward that is run again: their updates go to copies.
        state = {n: t if t.requires_grad else t.clone() for n, t in zip(names, own, strict=True)}
        args, kwargs = structure.unflatten(tensors[len(tensors) - inputs :])
        leaves, _ = flatten_output(torch.func.functional_call(module, state, args, kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    return run
