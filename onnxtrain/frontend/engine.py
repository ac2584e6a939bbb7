"""Find or compile the unit for a call of a module, and run it.

    call ─flatten─> tensors, structure ─key─> entries ─state and guards─> unit ─run─> results ─unflatten─> output

Shared by every entry point: `ORTModule`, `prepare` and the backend of torch.compile.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from onnxtrain.capture import source_location
from onnxtrain.capture.capture import Captured, capture
from onnxtrain.capture.effects.assigned_attributes import results_of
from onnxtrain.capture.effects.side_effects import AssignmentError, FirstCallError, SideEffectError, SideEffects
from onnxtrain.capture.export.patches import CAPTURE_LOCK, is_capturing
from onnxtrain.capture.guards.assumed_answers import WrongAnswerError
from onnxtrain.capture.guards.size_decisions import Example
from onnxtrain.capture.kept_outputs import keep_outputs
from onnxtrain.capture.key.fast_path import FastPath, Missed, compile_fast_path
from onnxtrain.capture.key.key import ModuleState, call_difference, environment, tensor_facts
from onnxtrain.capture.key.recaptures import ChangingNumberError, ChangingStateError, Recaptures
from onnxtrain.capture.refusals import refuse_call, refuse_functions, refuse_module, refuse_tensorless_call
from onnxtrain.capture.sharded.layout import gathering_of
from onnxtrain.capture.sharded.parameters import local_tensors, taking_local_tensors
from onnxtrain.capture.stored.cache import CaptureCache
from onnxtrain.capture.structure import Structure, flatten_call, flatten_output
from onnxtrain.capture.time_limit import limited_time
from onnxtrain.capture.wrapper import ForwardCall
from onnxtrain.compile import compile_module
from onnxtrain.errors import (
    ChangedArgumentError,
    ChangedParameterError,
    KernelError,
    OmittedBlocksError,
    ORTModuleFallbackException,
    SlowCaptureError,
)
from onnxtrain.execute.compiled import Compiled, assigning, undoing_samples
from onnxtrain.execute.unit_builder import Rerun
from onnxtrain.frontend.eager_operators import with_eager_operators
from onnxtrain.frontend.entry_point import Call, EntryPoint
from onnxtrain.graph.values import ATEN
from onnxtrain.log import LOG
from onnxtrain.observe import logs
from onnxtrain.observe.density import DensityWatch, densities
from onnxtrain.observe.initialisation import log_initialisation
from onnxtrain.observe.memory import MemoryWatch
from onnxtrain.options import Options, warn_ineffective_variables
from onnxtrain.plan.omitted_blocks import may_omit_blocks
from onnxtrain.system import ranks
from onnxtrain.system.garbage_collector import collector_paused
from onnxtrain.torch_compat.internal import refuse_if_lacking


class _Entry:
    """The compiled unit for one key and one state of the module, or None if such calls fall back."""

    __slots__ = ("_misses", "_patience", "compiled", "fallback", "fast_path", "guards", "reads", "state")

    def __init__(self, state: ModuleState, compiled: Compiled | None, fallback: Call | None = None) -> None:
        self.state = state
        self.fallback = fallback  # runs the module as graphs between graph breaks
        self.fast_path: FastPath | None = None
        self._misses = 0  # calls that missed the fast path since `fast_path` was made
        self._patience = 1
        self.compiled = compiled
        self.reads = compiled.captured.reads if compiled is not None else frozenset()
        self.guards = compiled.captured.guards if compiled is not None else _no_guards

    def learn(self, module: torch.nn.Module, structure: Structure, tensors: list[torch.Tensor]) -> None:
        """Make the fast path for such calls; make it again, after ever more calls, if the module has changed."""
        self._misses += 1
        if self.compiled is None or self._misses < self._patience:
            return
        snapshot = self.state.current_snapshot(module)
        self.fast_path = None
        if snapshot is not None:
            compiled = self.compiled
            self.fast_path = compile_fast_path(snapshot, compiled.captured.guards, structure, tensors, compiled.run)
        self._misses, self._patience = 0, min(2 * self._patience, _MAX_PATIENCE)

    def suggestion(self, tensors: list[torch.Tensor]) -> Example | None:
        """Return example sizes with which a new capture may turn out to be the same graph as this one."""
        return self.compiled.captured.guards.suggestion(tensors) if self.compiled is not None else None

    def adopts(self, captured: Captured, module: torch.nn.Module) -> bool:
        """Return whether `captured`, of `module` in its present state, is the same graph.

        If so, extend the guards to it.
        """
        if self.compiled is None:
            return False
        existing = self.compiled.captured
        if (existing.output, existing.assigned) != (captured.output, captured.assigned):
            return False
        if not existing.guards.adopt(captured.guards):
            return False
        if not captured.reads <= self.reads:  # forward read more at these sizes: it becomes part of the state, too
            self.reads |= captured.reads
            self.state = ModuleState(module, self.state.names, self.reads, existing.constants)
            self.fast_path = None
        return True


@dataclass(frozen=True)
class _Fallback:
    """How to run a call that cannot be captured.

    Attributes:
        run: runs it as graphs between graph breaks, or in PyTorch.
        warning: says so to the user, with values of this call.
        reason: the problem and where it is, for which there is one warning.
        key: of the call.
        entry: for later calls with this key; None if they are to be captured again.
    """

    run: Call
    warning: str
    reason: str
    key: Any = None
    entry: _Entry | None = None


def _always_missed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> type[Missed]:
    """Return a fast path that takes no call."""
    return Missed


def _any_state(module: torch.nn.Module) -> list[torch.Tensor]:
    return []


def _no_guards(tensors: Sequence[torch.Tensor]) -> bool:
    return True


_MAX_FIRST_CALLS = 4  # with one key, in which forward changes the module so that the next call is another graph
_NOTABLE_S = 5.0  # ranks may differ by the time of a step
_MAX_PATIENCE = 256  # making a fast path takes as long as a hundred calls without it


class Engine:
    """Run calls of one module."""

    def __init__(self, module: torch.nn.Module, options: Options, entry_point: EntryPoint | None = None) -> None:
        self._module = module
        self._options = options
        self._entry_point = entry_point or EntryPoint()
        self._in_torch = self._entry_point.in_torch or module
        self._entries: dict[Any, list[_Entry]] = {}
        self._recent: _Entry | None = None
        self._fast_path: FastPath = _always_missed
        self._newest: Compiled | None = None
        self._first_calls: Counter[Any] = Counter()  # by key: in which forward changed the module
        self._warned: set[str] = set()
        self._in_pieces: Call | None = None
        self._cache = (
            None if options.cache_dir is None or self._entry_point.is_piece else CaptureCache(options.cache_dir, module)
        )
        self._recaptures = Recaptures(module)
        self._may_omit = self._entry_point.omits_blocks
        self._may_assume_values = True
        self._calls = 0
        self.captures = 0

    def newest(self) -> Compiled:
        """Return the newest compiled unit. Raises RuntimeError before the first one."""
        if self._newest is None:
            raise RuntimeError("the module is not compiled yet: call it once first")
        return self._newest

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._calls += 1
        try:
            output = self._fast_path(args, kwargs)
            return self._run_slow_path(args, kwargs) if output is Missed else output
        except WrongAnswerError as error:
            wrong = error
        if not wrong.assumed.is_of_finite:
            self._capture_again(wrong)
        self._warn(f"{self._name()} runs this call in PyTorch, not as an ONNX graph: {wrong}", wrong.assumed.where)
        return self._in_torch(*args, **kwargs)

    def _capture_again(self, wrong: WrongAnswerError) -> None:
        """Let the next call that needs the graph whose assumption has become wrong be captured again."""
        self._may_assume_values &= self._recaptures.may_assume_again(wrong.assumed.where, self._calls)
        self._entries = {key: [e for e in entries if e is not self._recent] for key, entries in self._entries.items()}
        self._recent, self._fast_path = None, _always_missed

    def _run_slow_path(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if is_capturing():
            return self._in_torch(*args, **kwargs)
        # The fallback runs outside of the exception handlers, so that an error of the user's module is shown alone.
        fallback: _Fallback | None = None
        try:
            tensors, structure = flatten_call(args, kwargs)
            key = (structure, environment(), *map(tensor_facts, tensors))
        except ORTModuleFallbackException as error:
            fallback = self._fallback(error)
        if fallback is not None:
            return self._run(fallback, args, kwargs)
        entry, inputs = self._find(key, tensors)
        if entry is None:
            if (other := self._entry_point.instead_of_capture()) is not None:
                return other(*args, **kwargs)
            try:
                entry, inputs = self._find_or_compile(key, tensors, structure)
            except ORTModuleFallbackException as error:
                fallback = self._fall_back(key, error, args, kwargs)
        if entry is None:
            assert fallback is not None
            return self._run(fallback, args, kwargs)
        if entry.compiled is None:
            return (entry.fallback or self._in_torch)(*args, **kwargs)
        if entry is self._recent:
            entry.learn(self._module, structure, tensors)
        self._recent = entry
        self._fast_path = entry.fast_path or _always_missed
        return entry.compiled.run(*inputs)

    def _find(self, key: Any, tensors: list[torch.Tensor]) -> tuple[_Entry | None, list[torch.Tensor]]:
        """Return the entry for a call, and its unit's inputs: the module's tensors and the call's."""
        entries = self._entries.get(key, [])
        for position, entry in enumerate(entries):
            inputs = entry.state.read(self._module)
            if inputs is not None and entry.guards(tensors):
                if position:  # to the front: checking an entry whose state has changed may take milliseconds
                    self._entries[key] = [entry, *(e for e in entries if e is not entry)]
                inputs += tensors
                return entry, inputs
        return None, tensors

    def _find_or_compile(
        self, key: Any, tensors: list[torch.Tensor], structure: Structure
    ) -> tuple[_Entry, list[torch.Tensor]]:
        options = self._options
        with CAPTURE_LOCK, collector_paused("pause_collector" in options.process_wide), logs.level_of(options):
            entry, inputs = self._find(key, tensors)  # another thread may have compiled it meanwhile
            if entry is None:
                with limited_time(options, type(self._module).__name__):
                    return self._compile(key, tensors, structure)
            return entry, inputs

    # Compiling

    def _compile(
        self, key: Any, tensors: list[torch.Tensor], structure: Structure
    ) -> tuple[_Entry, list[torch.Tensor]]:
        self._recaptures.count_numbers(structure.constants(), self._calls)
        reason = self._announce(key, tensors)
        start, captures = time.perf_counter(), self.captures
        self._refuse(tensors)
        refuse_tensorless_call(structure, tensors)
        entries = [entry for entry in self._entries.get(key, ()) if entry.compiled is not None]
        if entries:
            last = self._recent if self._recent in entries else entries[-1]
            self._recaptures.count(last.state, self._calls)
        watch = SideEffects(self._module)
        is_valid = True
        try:
            try:
                entry = self._capture(key, tensors, structure, watch)
            except AssignmentError as error:
                watch.settle()
                entry = self._capture_later_call(key, tensors, structure, error.outcome)
                is_valid = self._is_same_graph(entry, error.outcome)
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
            if captures:
                self._warn_of_waiting_ranks(took, reason)
            self._warn_of_strings(structure)
            self._warn_of_operators(self.newest().captured)
        if not is_valid:
            watch.undo()
            raise watch.first_call_error()
        return entry, [*self._read(entry.state), *tensors]

    def _capture_later_call(
        self, key: Any, tensors: list[torch.Tensor], structure: Structure, first: Captured | ORTModuleFallbackException
    ) -> _Entry:
        """Capture the module after the assignments of a first call, which was captured or failed as in `first`.

        Raises:
            SideEffectError: forward assigns again.
        """
        try:
            return self._capture(key, tensors, structure, SideEffects(self._module))
        except SideEffectError:
            raise
        except ORTModuleFallbackException as error:
            raise (first if isinstance(first, ORTModuleFallbackException) else error) from None

    def _is_same_graph(self, entry: _Entry, first: Captured | ORTModuleFallbackException) -> bool:
        """Return whether the first call is the same graph, at all sizes, as the later calls, which run by `entry`."""
        if isinstance(first, ORTModuleFallbackException):
            return False
        assert entry.compiled is not None
        return entry.compiled.captured.has_same_graph(keep_outputs(first, self._options.keep_outputs))

    def _refuse(self, tensors: Sequence[torch.Tensor]) -> None:
        refuse_module(self._module, hooks_run_outside=self._entry_point.in_torch is not None)
        refuse_call(tensors)

    def _read(self, state: ModuleState) -> list[torch.Tensor]:
        own = state.read(self._module)
        assert own is not None, "the module's state cannot change while the capture lock is held"
        return own

    def _capture(self, key: Any, tensors: list[torch.Tensor], structure: Structure, watch: SideEffects) -> _Entry:
        """Capture, and compile unless the same graph is compiled already."""
        try:
            return self._capture_once(key, tensors, structure, watch)
        except OmittedBlocksError as error:
            LOG.info("%s: %s", type(self._module).__name__, error)
            self._may_omit = False
            return self._capture_once(key, tensors, structure, watch)

    def _capture_once(self, key: Any, tensors: list[torch.Tensor], structure: Structure, watch: SideEffects) -> _Entry:
        module = self._module
        matching = [e for e in self._entries.get(key, ()) if e.compiled is not None and e.state.matches(module)]
        suggested = [s for e in matching if (s := e.suggestion(tensors)) is not None]
        captured = self._captured(structure, tensors, watch, suggested)
        self._recaptures.count_items(captured.guards.items, self._calls)
        captured = keep_outputs(captured, self._options.keep_outputs)
        mode = module.training if self._options.save_graphs is not None else None  # it is in the names of the files
        if mode is not None:
            captured = replace(captured, reads=captured.reads | {(id(module), "training")})
        if not self._options.custom_autograd:
            refuse_functions(captured.model)
        for entry in matching:
            if entry.adopts(captured, module):
                return entry
        names = [s.name for s in captured.sources if s.kind != "input"]
        state = ModuleState(module, names, captured.reads, captured.constants)
        given = [*self._read(state), *tensors]
        inputs = local_tensors(given)
        rerun = _rerun(module, self._entry_point.in_torch, structure, captured)
        if gathering_of(module) is not None:
            rerun = _refuse_rerun
        twins = self._entry_point.twins.setdefault((environment(), mode, *map(tensor_facts, inputs)), [])
        twin = next((twin for twin in twins if twin.has_same_graph(captured)), None)
        if twin is not None:
            compiled = twin.for_module(captured, rerun)
        else:
            compiled = compile_module(module, captured, inputs, self._options, rerun, self._entry_point.recorders)
            if not self._options.cuda_graphs:  # a recording reads the tensors of one module
                twins.append(compiled)
        run = undoing_samples(taking_local_tensors(assigning(compiled.run, captured, module), given), captured)
        entry = _Entry(state, replace(compiled, run=run))
        self._entries.setdefault(key, []).append(entry)
        self._newest = compiled
        self.captures += 1
        return entry

    def _captured(
        self, structure: Structure, tensors: list[torch.Tensor], watch: SideEffects, suggested: Sequence[Example]
    ) -> Captured:
        run, fixed = self._entry_point.in_torch, self._entry_point.fixed_sizes

        def make(run: ForwardCall | None) -> Captured:
            arguments = self._module, structure, tensors, watch, suggested, run, fixed
            may_omit = self._may_omit and may_omit_blocks(self._options, type(self._module).__name__)
            return with_eager_operators(
                lambda: capture(
                    *arguments,
                    outside_is_input=True,
                    may_assume=True,
                    may_assume_values=self._may_assume_values,
                    may_omit=may_omit,
                )
            )

        return make(run) if self._cache is None else self._cache.capture(make, structure, tensors, run, fixed)

    def _announce(self, key: Any, tensors: Sequence[torch.Tensor]) -> str:
        """Log and return why the earlier captures do not match the call."""
        name = type(self._module).__name__
        if not self._entries:
            LOG.info("%s: first capture", name)
            return ""
        reason = "its inputs have other sizes or values"
        if key not in self._entries:
            closest = max(reversed(self._entries), key=lambda old: (old[0] == key[0], old[1] == key[1]))
            reason = call_difference(closest, key) or reason
        for entry in self._entries.get(key, ()):
            changed = entry.state.difference(self._module)
            if changed:
                reason = changed
            elif entry.compiled is not None:
                reason = entry.compiled.captured.guards.explain(tensors)
        LOG.info("%s: captured again: %s", name, reason)
        return reason

    def _warn_of_waiting_ranks(self, took: float, reason: str) -> None:
        """Say which rank makes the others wait, and why."""
        if took > _NOTABLE_S and ranks.world_size() > 1:
            self._warn(
                f"{self._name()} was captured again, which took {took:.0f} s: {reason}. Ranks that have this graph "
                "already wait at their next collective",
                reason,
            )

    def _name(self) -> str:
        """Return the module's class; with the rank if there are several, because it may be the only one concerned."""
        name = type(self._module).__name__
        return name if ranks.world_size() == 1 else f"{name} (rank {ranks.rank()} of {ranks.world_size()})"

    def _warn_of_strings(self, structure: Structure) -> None:
        """Warn once per module that each new string needs a new capture."""
        if any(isinstance(constant, str) for constant in structure.constants().values()):
            self._warn(
                f"Received input of type {str} which may be treated as a constant by ORT by default. Please consider "
                "moving constant arguments to the model constructor: each new string is a new capture."
            )

    def _warn_of_operators(self, captured: Captured) -> None:
        """Warn, once per set of them, of the operators without an ONNX form."""
        names = {
            node.attributes.get_string("operator")
            for node in captured.model.graph
            if node.domain == ATEN and any(v.uses() or v.is_graph_output() for v in node.outputs)  # not only a guard's
        }
        if names:
            self._warn(
                f"{type(self._module).__name__} calls operators without an ONNX form: {', '.join(sorted(names))}. They "
                "run in PyTorch, exactly as in eager; a file of the graph runs in onnxtrain only"
            )

    # Falling back

    def _fall_back(
        self, key: Any, error: ORTModuleFallbackException, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Fallback:
        """Return the fallback of a call; later calls with this key take it too, unless `fallback_retry` is set.

        Raises:
            ORTModuleFallbackException: the error, if the policy forbids a fallback.
        """
        is_once = isinstance(error, FirstCallError) and self._first_calls[key] < _MAX_FIRST_CALLS
        self._first_calls[key] += isinstance(error, FirstCallError)
        pieces = self._pieces(error, args, kwargs)
        fallback = self._fallback(error, pieces)
        if self._options.fallback_retry or isinstance(error, ChangingNumberError):  # each number has a key of its own
            return fallback
        entry = _Entry(ModuleState(self._module), None, pieces)
        if isinstance(error, SideEffectError | ChangingStateError) and not is_once:
            entry.state.check = _any_state  # its state changes on every call
        return replace(fallback, key=key, entry=entry)

    def _pieces(
        self, error: ORTModuleFallbackException, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Call | None:
        """Return a function that runs the module as graphs between graph breaks.

        None if that is switched off, or no part of it can be captured.
        """
        if self._entry_point.pieces is None or not self._options.pieces or gathering_of(self._module):
            return None
        # generate() fills a cache: PyTorch is faster than finding graph breaks. Each graph would change a parameter
        # again. A module that changes would have to be traced again. What took too long would do so again.
        if isinstance(error, ChangedArgumentError | ChangedParameterError | FirstCallError | SlowCaptureError):
            return None
        try:
            refuse_if_lacking()
            self._refuse(flatten_call(args, kwargs)[0])
        except ORTModuleFallbackException:
            return None
        if self._in_pieces is None:
            self._in_pieces = self._entry_point.pieces(self._in_torch)
        return self._in_pieces

    def _fallback(self, error: ORTModuleFallbackException, pieces: Call | None = None) -> _Fallback:
        """Run the module as graphs between graph breaks, or in PyTorch. Raises the error if the policy forbids that."""
        if gathering_of(self._module) is not None:
            error.add_note("The module cannot run in PyTorch instead, because shard_parameters has sharded it.")
            raise error
        if not self._options.fallback_policy.covers(error):
            raise error
        graph = "as an ONNX graph" if pieces is None else "as one ONNX graph but in pieces between graph breaks"
        warning = f"{self._name()} runs in PyTorch, not {graph}: {error}"
        return _Fallback(pieces or self._in_torch, warning, reason=f"{error.problem} {error.where}")

    def _run(self, fallback: _Fallback, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call, and warn once per reason.

        An error that forward raises in PyTorch too is not a reason to fall back: it is raised alone, and the next call
        is captured again.
        """
        output = fallback.run(*args, **kwargs)
        if fallback.entry is not None:
            self._entries.setdefault(fallback.key, []).append(fallback.entry)
        self._warn(fallback.warning, fallback.reason)
        return output

    def _warn(self, text: str, reason: str = "") -> None:
        """Warn once per reason, which is the text if none is given."""
        if (reason or text) in self._warned:
            return
        self._warned.add(reason or text)
        if self._entry_point.is_piece:
            LOG.info(text)
        else:
            warnings.warn(text, UserWarning, stacklevel=source_location.depth_of_caller())


def set_up(engine: Engine, name: str, options: Options) -> Call:
    """Apply the options that concern the whole process.

    Returns:
        A function of (args, kwargs): the engine, inside the watches that the options ask for.
    """
    logs.set_up(options)
    warn_ineffective_variables()
    if options.tuning == "exhaustive":
        torch.backends.cudnn.benchmark = True
    run: Call = engine
    if "input_density" in options.statistics:
        run = DensityWatch(run, engine.newest, name)
    return MemoryWatch(run, name) if "memory" in options.statistics else run


class _CalledBy(torch.nn.Module):
    """A module whose forward is `run` instead of the inner module's call."""

    def __init__(self, module: torch.nn.Module, run: Call) -> None:
        super().__init__()
        self.module = module
        self.forward = run


def _refuse_rerun(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    raise KernelError(
        "create_graph=True runs the module again in PyTorch, which cannot compute with the shards of shard_parameters",
        todo="call backward() or torch.autograd.grad() without create_graph",
    )


def _rerun(module: torch.nn.Module, in_torch: Call | None, structure: Structure, captured: Captured) -> Rerun:
    """Return a function that runs the module in PyTorch on tensors in the order of the capture's inputs."""
    inputs = sum(s.kind == "input" for s in captured.sources)
    own = [s for s in captured.sources if s.kind != "input"]
    subject, prefix = (module, "") if in_torch is None else (_CalledBy(module, in_torch), "module.")

    def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        # The first forward has updated the buffers: this one updates copies. Inner tensors of a tensor subclass come
        # with their parameter, and forward finds tensors outside of the module itself.
        state = {
            prefix + s.name: t if s.kind == "parameter" else t.clone()
            for s, t in zip(own, tensors[: len(own)], strict=True)
            if s.kind not in ("part", "outside")
        }
        args, kwargs = structure.unflatten(tensors[len(tensors) - inputs :])
        with captured.assigned.kept(module) as assigned_tensors:
            leaves, _ = flatten_output(torch.func.functional_call(subject, state, args, kwargs))
            tensor_leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            results_of(assigned_tensors(), tensor_leaves)
        tensor_leaves += [torch.tensor(each.answer) for each in captured.assumed]
        return tensor_leaves if captured.kept_results is None else [tensor_leaves[i] for i in captured.kept_results]

    return run
