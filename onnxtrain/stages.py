"""Record the stages of a compilation: verify and time each graph, and write it to disk if the options ask for it.

    stages = Stages(options, "training", "Bert")
    model = stages.record("capture", capture(module))           graphs/bert_torch_exported_training.onnx
    model = stages.record("optimize", model, optimize(model))   graphs/bert_optimized_pre_grad_training.onnx
    stages.report()

A file is written when its stage ends, so that it exists if a later stage fails.
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
from onnxtrain.graph import traversal
from onnxtrain.graph.verify import verify
from onnxtrain.log import LOG
from onnxtrain.ops.registry import lookup
from onnxtrain.options import Options
from onnxtrain.report import CompileReport, PassReport, Refusal, StageReport, SubgraphReport, Work
from onnxtrain.system.time_limit import part

Mode = Literal["training", "inference"]

# The file names of saved graphs by stage; they are those of ONNX Runtime Training. In inference mode, the graph before
# differentiation is also the optimized graph.
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

# For each owner, the number of compilations that saved graphs under a path prefix.
_compilations: MutableMapping[object, Counter[tuple[Path, Mode]]] = WeakIdKeyDictionary()


class Changes(Protocol):
    """The changes that a stage made to the graph."""

    @property
    def applied(self) -> Sequence[str]:
        """The changes, as sentences."""

    @property
    def refused(self) -> Sequence[Refusal]:
        """The changes that it refused, with reasons."""

    @property
    def passes(self) -> Sequence[PassReport]:
        """The report of each pass."""


class HasModel(Protocol):
    """A stage's result that holds a graph."""

    @property
    def model(self) -> ir.Model:
        """The graph."""


J = TypeVar("J", bound=HasModel)


class Stages:
    """Record the stages of one compilation. The clock starts when the object is created.

    Args:
        options: give the files to write and their opset.
        mode: "training" if gradients are computed, else "inference".
        title: the name of the compiled module, for messages.
        work: counts the FLOPs and bytes of a graph; None: they are not counted.
        owner: the compiled module. Its later compilations save graphs next to those of the first; another owner, such
            as the module of the next run in a notebook, overwrites them.
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
        self._verified: set[Hashable] = set()  # the kinds of nodes that were verified
        self._clock = time.perf_counter()

    def record(
        self, name: str, model: ir.Model, changes: Changes | None = None, took_ms: float | None = None
    ) -> ir.Model:
        """End a stage with the graph `model`; return it. Its time is `took_ms`, or the time since the previous stage.

        Raises:
            GraphError: the graph is malformed, or cannot be written as a valid file.
            OptionError: the opset of written files does not exist.
        """
        if took_ms is None:
            took_ms = (time.perf_counter() - self._clock) * 1e3
        nodes = traversal.count_nodes(model.graph)
        stage = StageReport(name, took_ms, nodes, work=self._work(model) if self._work else None)
        if changes is not None:
            stage = replace(
                stage, applied=tuple(changes.applied), refused=tuple(changes.refused), passes=tuple(changes.passes)
            )
        self._stages.append(stage)
        LOG.debug("%s: %s took %.1f ms, %d nodes", self._title, name, took_ms, nodes)
        with part("verification"):
            verify(model, lookup, self._verified)
        self._write(name, model)
        self._clock = time.perf_counter()  # the time to verify and write belongs to no stage
        return model

    def record_joint(self, name: str, joint: J, changes: Changes | None = None) -> J:
        """Do the same for a result that holds its graph as `model`."""
        self.record(name, joint.model, changes)
        return joint

    def end(
        self,
        name: str,
        model: ir.Model,
        applied: Sequence[str] = (),
        subgraphs: Sequence[SubgraphReport] = (),
        refused: Sequence[Refusal] = (),
    ) -> None:
        """End the last stage. `model` is verified again if the stage applied changes.

        Raises:
            GraphError: see `record`.
        """
        took_ms = (time.perf_counter() - self._clock) * 1e3
        if applied:
            verify(model, lookup, self._verified)
        stage = StageReport(name, took_ms, len(model.graph), tuple(applied), tuple(refused), subgraphs=tuple(subgraphs))
        self._stages.append(stage)
        self._write(name, model)
        self._clock = time.perf_counter()

    def count_unoptimized(self, make: Callable[[], ir.Model]) -> None:
        """Count the work of a step before any pass, if work is counted; `make` builds its graph."""
        if self._work is not None:
            self._before = self._work(make())
            self._clock = time.perf_counter()

    def report(self) -> CompileReport:
        """Return the report of all stages so far."""
        return CompileReport(tuple(self._stages), self._before)

    def _write(self, name: str, model: ir.Model) -> None:
        names = _FILES[self._mode].get(name)
        if self._options.save_graphs is None or names is None:
            return
        prefix = self._prefix(self._options.save_graphs)
        paths = [prefix.with_name(f"{prefix.name}_{file}_{self._mode}.onnx") for file in names]
        onnx_file.write(model, paths, self._options.onnx_opset)
        for path in paths:
            LOG.info("%s: wrote %s", self._title, path)

    def _prefix(self, base: Path) -> Path:
        """Return the path prefix of this compilation: `base` for its owner's first, `base_2` for the second, ..."""
        if self._path_prefix is None:
            key = (base.absolute(), self._mode)
            compilations = _compilations.setdefault(self._owner, Counter())
            compilations[key] += 1
            self._path_prefix = numbered(base, compilations[key])
        return self._path_prefix


def numbered(prefix: Path, number: int) -> Path:
    """Return the path prefix of the first, second, ... user of `prefix`."""
    return prefix if number == 1 else prefix.with_name(f"{prefix.name}_{number}")
