"""Compiles a captured module twice where that pays: as it is, and for tokens without padding.

    batch ─masks, labels─▶ Question ─▶ few tokens are read:  packed unit (inputs, rows, cu)
                                       most are, or not sure: the unit as it is

The packed unit is compiled when the first such batch comes. Which one runs never changes a result beyond rounding and
the choice of dropout masks. Where programs are recorded (`cuda_graphs`), the number of tokens is rounded up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.export import Captured, Source
from onnxtrain.compile import Compiled, Rerun, compile_module, may_record, one_device
from onnxtrain.execute.packing import Kept, Question
from onnxtrain.execute.program import Program
from onnxtrain.execute.recorded import why_never
from onnxtrain.graph import sizes
from onnxtrain.graph.traversal import clone, with_graph
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import view
from onnxtrain.ops.attention.varlen_flash import flash_runs
from onnxtrain.ops.constructors import TORCH_DTYPES
from onnxtrain.options import Options
from onnxtrain.passes.attention_masks import added_to_scores
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.pack_tokens import PackingPlan, plan_packing
from onnxtrain.plan.cut import single_part
from onnxtrain.report import CompileReport, PassReport, StageReport

_LOG = logging.getLogger(__name__)

_OF_TOKENS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)


def compile_for_batches(
    module: torch.nn.Module, captured: Captured, inputs: Sequence[torch.Tensor], options: Options, rerun: Rerun
) -> Compiled:
    """Compiles a captured module, with a unit that leaves padding out where `options.skip_padding` lets it.

    Takes and raises what `compile_module` does.
    """
    if not _may_pay(captured, options):
        return compile_module(module, captured, inputs, options, rerun)
    packing = _Packing(module, captured, options, rerun)
    device = one_device(inputs)
    compiled = compile_module(module, captured, inputs, options, rerun, lambda model: packing.look_at(model, device))
    stages = (*compiled.report.stages, packing.stage())
    report = replace(compiled.report, stages=stages, variants=packing.reports)
    if packing.plan is None:
        return replace(compiled, report=report)
    return replace(compiled, report=report, run=packing.runner(compiled.run))


def _may_pay(captured: Captured, options: Options) -> bool:
    """Whether there may be padding: tokens and masks are integers or booleans."""
    wanted = options.compute_optimizer and options.skip_padding != "never"
    return wanted and any(v.dtype in _OF_TOKENS for v in captured.model.graph.inputs)


class _Packing:
    """The way without padding of one captured module."""

    plan: PackingPlan | None = None

    def __init__(self, module: torch.nn.Module, captured: Captured, options: Options, rerun: Rerun) -> None:
        self._module, self._captured, self._options, self._rerun = module, captured, options, rerun
        self._changes = Changes("pack_tokens")
        self._took_ms = 0.0
        self._units: dict[bool, Compiled] = {}
        self.reports: dict[str, CompileReport] = {}

    def look_at(self, model: ir.Model, device: torch.device) -> None:
        """Plans how the captured graph, with the passes before keys, would run without padding."""
        start = time.perf_counter()
        self._model = with_graph(model, clone(model.graph)[0])
        self.plan = self._where_it_pays(plan_packing(self._model.graph, self._changes), device)
        if self.plan is not None:
            asked = with_graph(self._model, self.plan.questions())
            program = Program(single_part(asked), f"{asked.graph.name} padding", torch.device("cpu"))
            reads = [index for index, value in enumerate(asked.graph.inputs) if value.uses()]
            always = self._options.skip_padding == "always"
            self._fills = self._may_fill(self.plan, device)
            self._question = Question(program, reads, self.plan.masks, self.plan.readers, always, self._fills)
            self._sources = _sources_of((self.plan.batch, self.plan.steps), self._captured)
        self._took_ms = (time.perf_counter() - start) * 1e3

    def _where_it_pays(self, plan: PackingPlan | None, device: torch.device) -> PackingPlan | None:
        """The plan; None where packed attention waits for a GPU at each layer."""
        if plan is None or device.type == "cpu" or self._options.skip_padding == "always":
            return plan
        waiting = waits_for_lengths(plan, device)
        if waiting is None:
            return plan
        self._changes.applied.clear()
        reason = "without padding it would wait for the GPU: flash attention is for float16 and bfloat16 without a bias"
        self._changes.refuse(waiting, reason)
        return None

    def _may_fill(self, plan: PackingPlan, device: torch.device) -> bool:
        """Whether the number of tokens is rounded up, so that few recordings serve all batches."""
        if not may_record(self._options, device):
            return False
        waiting = waits_for_lengths(plan, device)
        refused = [(waiting, "attention reads on the host how long sequences are")] if waiting is not None else []
        refused += [(node, why) for node in self._model.graph if (why := why_never(node))]
        if refused:
            node, why = refused[0]
            self._changes.refuse(
                node, f"cuda_graphs: the number of tokens is not rounded up, for nothing is recorded: {why}"
            )
        return not refused

    def stage(self) -> StageReport:
        """What was found, for the report."""
        done = PassReport("pack_tokens", self._took_ms, tuple(self._changes.applied), tuple(self._changes.refused))
        applied = tuple(f"{done.name}: {text}" for text in done.applied)
        return StageReport("pack", self._took_ms, len(self._model.graph), applied, done.refused, (done,))

    def runner(self, dense: Any) -> Any:
        """Runs each batch packed or as `dense` does."""
        plan, ask, units, places = self.plan, self._question.ask, self._units, self._sources
        assert plan is not None

        def run(*tensors: torch.Tensor) -> Any:
            known = {name: tensors[index].size(axis) for name, index, axis in places}
            batch, steps = (sizes.evaluate(size, known) for size in (plan.batch, plan.steps))
            kept = ask(tensors, batch, steps)
            if kept is None:
                return dense(*tensors)
            unit = units.get(kept.causal) or self._compile(tensors, kept)
            return unit.run(*tensors, *kept.tensors())

        return run

    def _compile(self, tensors: Sequence[torch.Tensor], kept: Kept) -> Compiled:
        graph = clone(self._model.graph)[0]
        plan = plan_packing(graph, Changes())
        assert plan is not None, "the same graph gives the same plan"
        plan.apply(kept.causal, self._fills)
        inputs = (*tensors, *kept.tensors())
        sources = (*self._captured.sources, *(Source("input", index=i) for i in range(len(tensors), len(inputs))))
        captured = replace(self._captured, model=with_graph(self._captured.model, graph), sources=sources)
        options = replace(self._options, onnx_prefix=f"{self._options.onnx_prefix}_packed", skip_padding="never")

        def rerun(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return self._rerun(given[: len(self._captured.sources)])

        unit = compile_module(self._module, captured, inputs, options, rerun)
        self._units[kept.causal] = unit
        self.reports["without padding, causal" if kept.causal else "without padding"] = unit.report
        _LOG.info("%s: batches with padding run without it from now on", type(self._module).__name__)
        return unit


def waits_for_lengths(plan: PackingPlan, device: torch.device) -> ir.Node | None:
    """The first attention of a plan that, packed, reads on the host of a GPU how long sequences are."""
    for node in (*plan.attentions, *plan.few_queries):
        n = view(node)
        width = sizes.dims_of(n.q)[3]
        flash = sizes.dims_of(n.v)[3] == width and flash_runs(device.type, TORCH_DTYPES[dtype_of(n.q)], width)
        if not flash or added_to_scores(node).table is not None:
            return node
    return None


def _sources_of(wanted: Sequence[sizes.Size], captured: Captured) -> list[tuple[str, int, int]]:
    """(name, input, axis) of each symbol in these sizes."""
    names = frozenset[str]().union(*map(sizes.symbols, wanted))
    found: dict[str, tuple[str, int, int]] = {}
    for index, value in enumerate(captured.model.graph.inputs):
        for axis, size in enumerate(sizes.dims_of(value)):
            if size in names:
                found.setdefault(str(size), (str(size), index, axis))
    return list(found.values())
