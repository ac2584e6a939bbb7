"""Finds or makes the compiled unit for a call of a module, and runs it.

    call ─flatten─> tensors, structure ─key─> entries ─state and guards─> unit ─run─> results ─unflatten─> output

Shared by every entry point: `ORTModule`, `prepare` and the backend of torch.compile.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from onnxtrain.capture import source_line
from onnxtrain.capture.capture import Captured, Run, capture
from onnxtrain.capture.effects.side_effects import SideEffectError, SideEffects
from onnxtrain.capture.export.patches import CAPTURE_LOCK, capture_is_under_way
from onnxtrain.capture.guards.size_decisions import Example
from onnxtrain.capture.kept_outputs import keep_outputs
from onnxtrain.capture.key.fast_path import Missed, UsualCall, usual_call
from onnxtrain.capture.key.key import ModuleState, environment, tensor_facts
from onnxtrain.capture.key.recaptures import ChangingStateError, Recaptures
from onnxtrain.capture.refusals import refuse_call, refuse_functions, refuse_module, refuse_numbers
from onnxtrain.capture.stored.cache import CaptureCache
from onnxtrain.capture.structure import Structure, flatten_call, flatten_output
from onnxtrain.compile import compile_module
from onnxtrain.errors import ChangedArgumentError, ChangedParameterError, ORTModuleFallbackException
from onnxtrain.execute.compiled import Compiled
from onnxtrain.execute.unit_builder import Rerun
from onnxtrain.graph.values import ATEN
from onnxtrain.log import LOG
from onnxtrain.observe import logs
from onnxtrain.observe.density import DensityWatch, densities
from onnxtrain.observe.initialisation import log_initialisation
from onnxtrain.observe.memory import MemoryWatch
from onnxtrain.ops import Effects, definition_of
from onnxtrain.options import Options, warn_ineffective_variables
from onnxtrain.system.garbage_collector import collector_paused


class _Entry:
    """A compiled unit, or None where there is none, for one key and one state of the module."""

    __slots__ = ("_patience", "_seen", "compiled", "guards", "instead", "reads", "state", "usual")

    def __init__(self, state: ModuleState, compiled: Compiled | None, instead: Call | None = None) -> None:
        self.state = state
        self.instead = instead  # what runs the module in pieces
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
            self.state = ModuleState.take(module, self.state.names, self.reads, self.compiled.captured.constants)
            self.usual = None
        return True


@dataclass(frozen=True)
class _Instead:
    """What runs a call that cannot be a graph.

    Attributes:
        run: runs it in pieces or in PyTorch.
        warning: says so, and why.
        key: that of the call.
        entry: for later calls of its kind; None where they are to be tried again.
    """

    run: Call
    warning: str
    key: Any = None
    entry: _Entry | None = None


def _never(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> type[Missed]:
    """No call is usual."""
    return Missed


def _any_state(module: torch.nn.Module) -> list[torch.Tensor]:
    return []


def _no_guards(tensors: Sequence[torch.Tensor]) -> bool:
    return True


_MOST_PATIENCE = 256  # to recognise the usual call takes as long to learn as a hundred calls on the long way


Call: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class EntryPoint:
    """How an entry point wants the module run.

    Attributes:
        in_torch: runs the module in eager PyTorch; set if the module's own hooks run around the graph, else None.
        fixed_sizes: indices of the call's tensors whose sizes never change.
        pieces: turns a function into one that runs as graphs between graph breaks; None: no graph breaks.
        is_part: whether the module is only part of the user's model, so that its first graph is one of several.
        is_piece: whether the module is a piece between graph breaks: the user was warned, so failures are only logged.
        twins: units of other modules that can be reused if the graph is the same, by their other dependencies.
    """

    in_torch: Call | None = None
    fixed_sizes: frozenset[int] = frozenset()
    pieces: Callable[[Call], Call] | None = None
    is_part: bool = False
    is_piece: bool = False
    twins: dict[Any, list[Compiled]] = field(default_factory=dict)


class Engine:
    """Runs calls of one module."""

    def __init__(self, module: torch.nn.Module, options: Options, entry_point: EntryPoint | None = None) -> None:
        self._module = module
        self._options = options
        self._entry_point = entry_point or EntryPoint()
        self._in_torch = self._entry_point.in_torch or module
        self._entries: dict[Any, list[_Entry]] = {}
        self._recent: _Entry | None = None
        self._usual: UsualCall = _never
        self._newest: Compiled | None = None
        self._warned: set[str] = set()
        self._in_pieces: Call | None = None
        self._cache = (
            None
            if options.cache_dir is None or self._entry_point.is_piece
            else CaptureCache(options.cache_dir, options.cache_limit_mb, module)
        )
        self._recaptures = Recaptures(module)
        self._calls = 0
        self.captures = 0

    def newest(self) -> Compiled:
        """The newest compiled unit. Raises RuntimeError before the first one."""
        if self._newest is None:
            raise RuntimeError("nothing is compiled yet: call the module first")
        return self._newest

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._calls += 1
        output = self._usual(args, kwargs)
        return self._on_the_long_way(args, kwargs) if output is Missed else output

    def _on_the_long_way(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if capture_is_under_way():
            return self._in_torch(*args, **kwargs)
        # What runs instead runs outside of the handlers: an error of the user's module is then shown alone.
        instead: _Instead | None = None
        try:
            tensors, structure = flatten_call(args, kwargs)
            key = (structure, environment(), *map(tensor_facts, tensors))
        except ORTModuleFallbackException as error:
            instead = self._instead(error)
        if instead is not None:
            return self._run(instead, args, kwargs)
        entry, inputs = self._find(key, tensors)
        if entry is None:
            try:
                entry, inputs = self._find_or_compile(key, tensors, structure)
            except ORTModuleFallbackException as error:
                instead = self._fall_back(key, error, args, kwargs)
        if entry is None:
            assert instead is not None
            return self._run(instead, args, kwargs)
        if entry.compiled is None:
            return (entry.instead or self._in_torch)(*args, **kwargs)
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
        with CAPTURE_LOCK, collector_paused(self._options.pause_collector), logs.level_of(self._options):
            entry, inputs = self._find(key, tensors)  # another thread may have made it meanwhile
            if entry is None:
                return self._compile(key, tensors, structure)
            return entry, inputs

    # Compiling

    def _compile(
        self, key: Any, tensors: list[torch.Tensor], structure: Structure
    ) -> tuple[_Entry, list[torch.Tensor]]:
        self._announce(key, tensors)
        start, captures = time.perf_counter(), self.captures
        self._refuse(tensors)
        refuse_numbers(structure, tensors)
        entries = [entry for entry in self._entries.get(key, ()) if entry.compiled is not None]
        if entries:
            last = self._recent if self._recent in entries else entries[-1]
            self._recaptures.count(last.state, self._calls)
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
        if self.captures > captures:
            took, report = time.perf_counter() - start, self.newest().report
            first = not captures and not self._entry_point.is_part
            log_initialisation(type(self._module).__name__, took, report, first=first)
            if first and LOG.isEnabledFor(logging.INFO):
                for text in densities(self.newest().captured, tensors):
                    LOG.info("%s: %s", type(self._module).__name__, text)
            self._warn_of_strings(structure)
            self._warn_of_operators(self.newest().captured)
        return entry, [*self._read(entry.state), *tensors]

    def _refuse(self, tensors: Sequence[torch.Tensor]) -> None:
        refuse_module(self._module, hooks_run_outside=self._entry_point.in_torch is not None)
        refuse_call(tensors)

    def _read(self, state: ModuleState) -> list[torch.Tensor]:
        own = state.read(self._module)
        assert own is not None, "the module's state cannot change while the capture lock is held"
        return own

    def _capture(self, key: Any, tensors: list[torch.Tensor], structure: Structure, watch: SideEffects) -> _Entry:
        """Captures, and compiles unless the graph is one that is compiled already."""
        module = self._module
        same = [e for e in self._entries.get(key, ()) if e.compiled is not None and e.state.matches(module)]
        suggested = [s for e in same if (s := e.suggestion(tensors)) is not None]
        captured = self._captured(structure, tensors, watch, suggested)
        captured = keep_outputs(captured, self._options.keep_outputs)
        if not self._options.custom_autograd:
            refuse_functions(captured.model)
        for entry in same:
            if entry.adopts(captured, module):
                return entry
        names = [s.name for s in captured.sources if s.kind != "input"]
        state = ModuleState.take(module, names, captured.reads, captured.constants)
        inputs = [*self._read(state), *tensors]
        rerun = _rerun(module, self._entry_point.in_torch, structure, captured)
        twins = self._entry_point.twins.setdefault((environment(), *map(tensor_facts, inputs)), [])
        twin = next((twin for twin in twins if twin.is_twin(captured)), None)
        if twin is not None:
            compiled = twin.of(captured, rerun)
        else:
            compiled = compile_module(module, captured, inputs, self._options, rerun)
            if not self._options.cuda_graphs:  # a recording reads the tensors of one module
                twins.append(compiled)
        entry = _Entry(state, compiled)
        self._entries.setdefault(key, []).append(entry)
        self._newest = compiled
        self.captures += 1
        return entry

    def _captured(
        self, structure: Structure, tensors: list[torch.Tensor], watch: SideEffects, suggested: Sequence[Example]
    ) -> Captured:
        run, fixed = self._entry_point.in_torch, self._entry_point.fixed_sizes

        def make(run: Run | None) -> Captured:
            return capture(self._module, structure, tensors, watch, suggested, run, fixed, outside_is_input=True)

        return make(run) if self._cache is None else self._cache.capture(make, structure, tensors, run, fixed)

    def _announce(self, key: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Says once per new capture why the earlier ones do not serve."""
        name = type(self._module).__name__
        if not self._entries:
            LOG.info("%s: first capture", name)
            return
        reason = "the structure, types or environment of the call is new"
        for entry in self._entries.get(key, ()):
            changed = entry.state.difference(self._module)
            if changed:
                reason = changed
            elif entry.compiled is not None:
                reason = entry.compiled.captured.guards.explain(tensors)
        LOG.info("%s: captured again, because %s", name, reason)

    def _warn_of_strings(self, structure: Structure) -> None:
        """Warns, once per module, that another string makes another capture."""
        if any(isinstance(constant, str) for constant in structure.constants().values()):
            self._warn(
                f"Received input of type {str} which may be treated as a constant by ORT by default: each new string "
                "is a new capture. Please consider moving constant arguments to the model constructor."
            )

    def _warn_of_operators(self, captured: Captured) -> None:
        """Warns, once per module and set of operators, of those without an ONNX form."""
        names = {
            node.attributes.get_string("operator")
            for node in captured.model.graph
            if node.domain == ATEN and Effects.COLLECTIVE not in definition_of(node).effects
        }
        if names:
            self._warn(
                f"{type(self._module).__name__} calls operators without an ONNX form: {', '.join(sorted(names))}. They "
                "run in PyTorch, exactly as in eager; a file of the graph runs in onnxtrain only"
            )

    # Falling back

    def _fall_back(
        self, key: Any, error: ORTModuleFallbackException, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Instead:
        """What runs the module in pieces or in PyTorch; later calls of its kind take it too, unless to be tried again.

        Raises:
            ORTModuleFallbackException: the error, where the policy forbids that.
        """
        pieces = self._pieces(error, args, kwargs)
        instead = self._instead(error, pieces)
        if self._options.fallback_retry:
            return instead
        entry = _Entry(ModuleState.take(self._module), None, pieces)
        if isinstance(error, SideEffectError | ChangingStateError):
            entry.state.check = _any_state  # its state changes on every call
        return replace(instead, key=key, entry=entry)

    def _pieces(
        self, error: ORTModuleFallbackException, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Call | None:
        """What runs the module in pieces; None where that is not wanted, or none of its parts may be a graph."""
        if self._entry_point.pieces is None or not self._options.pieces:
            return None
        # generate() fills a cache: PyTorch is done before pieces are found. A parameter would be changed in each piece.
        if isinstance(error, ChangedArgumentError | ChangedParameterError):
            return None
        try:
            self._refuse(flatten_call(args, kwargs)[0])
        except ORTModuleFallbackException:
            return None
        if self._in_pieces is None:
            self._in_pieces = self._entry_point.pieces(self._in_torch)
        return self._in_pieces

    def _instead(self, error: ORTModuleFallbackException, pieces: Call | None = None) -> _Instead:
        """What runs the module in pieces or in PyTorch; raises the error where the policy forbids that."""
        if not self._options.fallback_policy.covers(error):
            raise error
        how = "as an ONNX graph" if pieces is None else "as one ONNX graph but in pieces that are graphs"
        warning = f"{type(self._module).__name__} runs in PyTorch, not {how}: {error}"
        return _Instead(pieces or self._in_torch, warning)

    def _run(self, instead: _Instead, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a call, and warns once per reason.

        What forward raises in PyTorch too is no reason: it is raised alone, and the next call is tried as a graph.
        """
        output = instead.run(*args, **kwargs)
        if instead.entry is not None:
            self._entries.setdefault(instead.key, []).append(instead.entry)
        self._warn(instead.warning)
        return output

    def _warn(self, text: str) -> None:
        """Warns, once per text."""
        if text in self._warned:
            return
        self._warned.add(text)
        if self._entry_point.is_piece:
            LOG.info(text)
        else:
            warnings.warn(text, UserWarning, stacklevel=source_line.depth_of_caller())


def set_up(engine: Engine, name: str, options: Options) -> Call:
    """Applies the options that are about the whole process.

    Returns:
        What runs calls, as (args, kwargs): the engine, watched where the options say so.
    """
    logs.set_up(options)
    warn_ineffective_variables()
    if options.conv_algo_search == "EXHAUSTIVE":
        torch.backends.cudnn.benchmark = True
    run: Call = engine
    if options.print_input_density:
        run = DensityWatch(run, engine.newest, name)
    return MemoryWatch(run, name) if options.print_memory_stats else run


class _RunBy(torch.nn.Module):
    """A module that `run` runs, and not its call."""

    def __init__(self, module: torch.nn.Module, run: Call) -> None:
        super().__init__()
        self.module = module
        self.forward = run


def _rerun(module: torch.nn.Module, in_torch: Call | None, structure: Structure, captured: Captured) -> Rerun:
    """A function that runs the module in PyTorch on tensors in the order of the capture's inputs."""
    inputs = sum(s.kind == "input" for s in captured.sources)
    own = [s for s in captured.sources if s.kind != "input"]
    subject, prefix = (module, "") if in_torch is None else (_RunBy(module, in_torch), "module.")

    def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        # Buffers were updated by the forward that is run again: their updates go to copies. What a parameter holds
        # comes with it, and what lies outside of the module forward finds itself.
        state = {
            prefix + s.name: t if s.kind == "parameter" else t.clone()
            for s, t in zip(own, tensors[: len(own)], strict=True)
            if s.kind not in ("part", "outside")
        }
        args, kwargs = structure.unflatten(tensors[len(tensors) - inputs :])
        leaves, _ = flatten_output(torch.func.functional_call(subject, state, args, kwargs))
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return found if captured.kept is None else [found[i] for i in captured.kept]

    return run
