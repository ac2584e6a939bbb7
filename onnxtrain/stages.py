"""The stages of a compilation: each graph is verified, timed, and written to disk where that is asked for.

    stages = Stages(options, "training", "Bert")
    model = stages.record("capture", capture(module))           graphs/bert_torch_exported_training.onnx
    model = stages.record("optimize", model, optimize(model))   graphs/bert_optimized_pre_grad_training.onnx
    stages.report()

A file is written when its stage is done, so that it is there when a later stage fails.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import onnx_ir as ir
from torch.utils.weak import WeakIdKeyDictionary

from onnxtrain import onnx_file
from onnxtrain.graph.verify import verify
from onnxtrain.log import LOG
from onnxtrain.ops.registry import lookup
from onnxtrain.options import Options
from onnxtrain.report import CompileReport, PassReport, Refusal, StageReport, SubgraphReport, Work

Mode = Literal["training", "inference"]

# The files of saved graphs, by the stage whose graph they hold, with ONNX Runtime Training's names. Without gradients
# the graph that is optimized before them is the optimized graph as well.
_FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "training": {
        "capture": ("torch_exported",),
        "optimize": ("optimized_pre_grad",),
        "optimize-joint": ("optimized",),
        "plan": ("execution_model",),
    },
    "inference": {
        "capture": ("torch_exported",),
        "optimize": ("optimized_pre_grad", "optimized"),
        "plan": ("execution_model",),
    },
}

# Of each owner, the compilations that saved graphs under a path prefix.
_compilations: MutableMapping[object, Counter[tuple[Path, Mode]]] = WeakIdKeyDictionary()


class Changes(Protocol):
    """What a stage says that it did to the graph."""

    @property
    def applied(self) -> Sequence[str]:
        """The changes, as sentences."""

    @property
    def refused(self) -> Sequence[Refusal]:
        """The changes that were not made, with reasons."""

    @property
    def passes(self) -> Sequence[PassReport]:
        """What each pass took."""


class HasModel(Protocol):
    """A stage's value that is more than a graph."""

    @property
    def model(self) -> ir.Model:
        """The graph of it."""


J = TypeVar("J", bound=HasModel)


class Stages:
    """Records the stages of one compilation, from the moment it is made.

    Args:
        options: whether to verify, and what to write where.
        mode: "training" where gradients are computed, else "inference".
        title: what is compiled, for messages.
        work: counts what a graph takes; None: it is not counted.
        owner: what is compiled. Its later compilations save graphs beside those of the first; another owner, such as
            the module of the next run in a notebook, overwrites them.
    """

    def __init__(
        self,
        options: Options,
        mode: Mode,
        title: str = "",
        work: Callable[[ir.Model], Work] | None = None,
        owner: object = None,
    ) -> None:
        self._options = options
        self._mode = mode
        self._title = title
        self._work = work
        self._before: Work | None = None
        self._stages: list[StageReport] = []
        self._path_prefix: Path | None = None
        self._owner = self if owner is None else owner
        self._right: set[Hashable] = set()  # the kinds of nodes that were verified
        self._clock = time.perf_counter()

    def record(
        self, name: str, model: ir.Model, changes: Changes | None = None, took_ms: float | None = None
    ) -> ir.Model:
        """Ends a stage that gives `model`: the time since the last one ended is its own, or `took_ms`. Returns `model`.

        Raises:
            GraphError: the graph is not well formed, or cannot be written as a valid file.
            OptionError: there is no opset of the number that written files are to have.
        """
        if took_ms is None:
            took_ms = (time.perf_counter() - self._clock) * 1e3
        nodes = sum(1 for _ in model.graph.all_nodes())
        done = StageReport(name, took_ms, nodes, work=self._work(model) if self._work else None)
        if changes is not None:
            done = replace(
                done, applied=tuple(changes.applied), refused=tuple(changes.refused), passes=tuple(changes.passes)
            )
        self._stages.append(done)
        LOG.debug("%s: %s took %.1f ms and gave %d nodes", self._title, name, took_ms, nodes)
        verify(model, lookup, self._right)
        self._write(name, model)
        self._clock = time.perf_counter()  # what verifying and writing took is no stage's time
        return model

    def record_joint(self, name: str, joint: J, changes: Changes | None = None) -> J:
        """The same for a value that holds its graph as `model`."""
        self.record(name, joint.model, changes)
        return joint

    def done(
        self,
        name: str,
        model: ir.Model,
        applied: Sequence[str] = (),
        subgraphs: Sequence[SubgraphReport] = (),
        refused: Sequence[Refusal] = (),
    ) -> None:
        """Ends a stage, with what it did, that is the last: `model` is verified again where it did something.

        Raises:
            GraphError: see `record`.
        """
        took_ms = (time.perf_counter() - self._clock) * 1e3
        if applied:
            verify(model, lookup, self._right)
        done = StageReport(name, took_ms, len(model.graph), tuple(applied), tuple(refused), subgraphs=tuple(subgraphs))
        self._stages.append(done)
        self._write(name, model)
        self._clock = time.perf_counter()

    def count_unoptimized(self, make: Callable[[], ir.Model]) -> None:
        """Counts what a step would take that no pass has seen, where work is counted; `make` gives its graph."""
        if self._work is not None:
            self._before = self._work(make())
            self._clock = time.perf_counter()

    def report(self) -> CompileReport:
        """All stages so far."""
        return CompileReport(tuple(self._stages), self._before)

    def _write(self, name: str, model: ir.Model) -> None:
        names = _FILES[self._mode].get(name)
        if self._options.save_graphs is None or names is None:
            return
        prefix = self._prefix(self._options.save_graphs)
        paths = [prefix.with_name(f"{prefix.name}_{each}_{self._mode}.onnx") for each in names]
        onnx_file.write(model, paths, self._options.onnx_opset)
        for path in paths:
            LOG.info("%s: wrote %s", self._title, path)

    def _prefix(self, given: Path) -> Path:
        """The path prefix for this compilation: `given` for the first of its owner, `given_2` for the second, ..."""
        if self._path_prefix is None:
            saved = (given.absolute(), self._mode)
            compilations = _compilations.setdefault(self._owner, Counter())
            compilations[saved] += 1
            self._path_prefix = numbered(given, compilations[saved])
        return self._path_prefix


def numbered(prefix: Path, number: int) -> Path:
    """The path prefix of the first, second, ... that saves graphs under `prefix`."""
    return prefix if number == 1 else prefix.with_name(f"{prefix.name}_{number}")
