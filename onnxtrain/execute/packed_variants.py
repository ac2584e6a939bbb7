"""The pipeline's stage that leaves padding out: batches with enough of it run on packed tokens.

    batch ─masks, labels─▶ Question ─▶ few tokens are read:  packed unit (inputs, rows, cu)
                                       most are, or not sure: the unit as it is

The packed unit is compiled when the first such batch comes. Which one runs never changes a result beyond rounding and
the choice of dropout masks; only results that hold tokens have zeros in padding, where `padding_reads` allows it.
Where programs are recorded (`cuda_graphs`), the number of tokens is rounded up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.capture import Captured, Source
from onnxtrain.execute.compiled import Compiled
from onnxtrain.execute.cuda_recorder import may_record
from onnxtrain.execute.packing import Kept, Question
from onnxtrain.execute.padding_reads import PaddingReads
from onnxtrain.execute.program import Program
from onnxtrain.execute.recorded_program import why_never
from onnxtrain.execute.unit_builder import Rerun
from onnxtrain.graph import sizes
from onnxtrain.graph.traversal import clone, with_graph
from onnxtrain.log import LOG
from onnxtrain.ops import view
from onnxtrain.ops.attention.varlen_flash import flash_runs
from onnxtrain.options import Options
from onnxtrain.passes.attention_masks import split_mask
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.pack_tokens import PackingPlan, plan_packing
from onnxtrain.plan.cut import single_part
from onnxtrain.report import CompileReport, PassReport, StageReport
from onnxtrain.torch_compat.modes import has_saved_tensors_hooks

_OF_TOKENS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)

# compile_module without its first argument, the module
Compile = Callable[[Captured, Sequence[torch.Tensor], Options, Rerun], Compiled]


def plan_packed_variants(
    model: ir.Model, captured: Captured, options: Options, device: torch.device, differentiable: bool
) -> PackedVariants | None:
    """Plans how a captured graph would run without padding.

    Args:
        model: the graph, after the passes that come before those for which an element's position matters. It stays as
            it is.
        captured: what it was captured from.
        options: see `onnxtrain.options`.
        device: that all tensors are on.
        differentiable: whether gradients may come for results. They tell whether the padding of results is read.

    Returns:
        None where there can be no padding (tokens and masks are integers or booleans), or the options keep it.
    """
    if options.skip_padding == "never" or not any(v.dtype in _OF_TOKENS for v in captured.model.graph.inputs):
        return None
    return PackedVariants(model, captured, options, device, captured.result_count if differentiable else 0)


class PackedVariants:
    """The units of one captured module that run without padding.

    Attributes:
        plan: None where no batch can.
        reports: of the units that are compiled already.
    """

    def __init__(
        self, model: ir.Model, captured: Captured, options: Options, device: torch.device, results: int
    ) -> None:
        """Takes what `plan_packed_variants` does, and how many results may have zeros in padding."""
        start = time.perf_counter()
        self._captured, self._options, self._results = captured, options, results
        self._changes = Changes("pack_tokens")
        self._units: dict[bool, Compiled] = {}
        self.reports: dict[str, CompileReport] = {}
        self._model = with_graph(model, clone(model.graph)[0])
        self.plan = self._where_it_pays(plan_packing(self._model.graph, self._changes, results), device)
        if self.plan is not None:
            asked = with_graph(self._model, self.plan.questions())
            program = Program(single_part(asked), f"{asked.graph.name} padding", torch.device("cpu"))
            reads = [index for index, value in enumerate(asked.graph.inputs) if value.uses()]
            always = self._options.skip_padding == "always"
            self._fills = self._may_fill(self.plan, device)
            self._question = Question(program, reads, self.plan.masks, self.plan.readers, always, self._fills)
            self._sources = _sources_of((self.plan.batch, self.plan.steps), self._captured)
        self._took_ms = (time.perf_counter() - start) * 1e3

    def attach(self, compiled: Compiled, module_name: str, rerun: Rerun, compile_packed: Compile) -> Compiled:
        """A compiled module that runs each batch packed or as it is, with what was planned in its report.

        Args:
            compiled: the module with padding.
            module_name: for the log.
            rerun: see `UnitBuilder`.
            compile_packed: compiles a capture of packed tokens.
        """
        stages = (*compiled.report.stages, self._stage())
        report = replace(compiled.report, stages=stages, variants=self.reports)
        if self.plan is None:
            return replace(compiled, report=report)
        run = self._runner(self.plan, compiled, module_name, rerun, compile_packed)
        return replace(compiled, report=report, run=run)

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

    def _stage(self) -> StageReport:
        """What was planned, for the report."""
        done = PassReport("pack_tokens", self._took_ms, tuple(self._changes.applied), tuple(self._changes.refused))
        applied = tuple(f"{done.name}: {text}" for text in done.applied)
        return StageReport("pack", self._took_ms, len(self._model.graph), applied, done.refused, (done,))

    def _runner(
        self, plan: PackingPlan, dense: Compiled, module_name: str, rerun: Rerun, compile_packed: Compile
    ) -> Callable[..., Any]:
        """Runs each batch packed or as `dense` does."""
        ask, units, places = self._question.ask, self._units, self._sources
        results = plan.results()
        reads = PaddingReads(results, self._captured.output.names, module_name)

        def run(*tensors: torch.Tensor) -> Any:
            reads.update()
            # A checkpoint around the module runs it again in backward, and by then `reads` may allow more.
            if reads.refuted or (results and has_saved_tensors_hooks()):
                return dense.run(*tensors)
            known = {name: tensors[index].size(axis) for name, index, axis in places}
            batch, steps = (sizes.evaluate(size, known) for size in (plan.batch, plan.steps))
            kept = ask(tensors, batch, steps)
            if kept is None:
                return dense.run(*tensors)
            if not reads.may_pack:
                return watched(dense, tensors, kept, packed=False)
            unit = units.get(kept.causal)
            if unit is None:
                unit = self._compile(tensors, kept, rerun, compile_packed)
                LOG.info("%s: batches with padding run without it from now on%s", module_name, self._told(results))
            given = (*tensors, *kept.tensors())
            return watched(unit, given, kept, packed=True) if results else unit.run(*given)

        def watched(unit: Compiled, tensors: Sequence[torch.Tensor], kept: Kept, packed: bool) -> Any:
            found = unit.results(tensors)
            reads.watch(found, kept.rows, packed)
            return unit.output(found, tensors)

        return run

    def _told(self, results: Collection[int]) -> str:
        """What INFO says of the results that have zeros in padding."""
        names = ", ".join(self._captured.output.names[index] for index in results)
        return f"; the loss does not read the padding of {names}, which is zeros then" if names else ""

    def _compile(self, tensors: Sequence[torch.Tensor], kept: Kept, rerun: Rerun, compile_packed: Compile) -> Compiled:
        graph = clone(self._model.graph)[0]
        plan = plan_packing(graph, Changes(), self._results)
        assert plan is not None, "the same graph gives the same plan"
        plan.apply(kept.causal, self._fills, tensors[0].device.type)
        inputs = (*tensors, *kept.tensors())
        sources = (*self._captured.sources, *(Source("input", index=i) for i in range(len(tensors), len(inputs))))
        captured = replace(self._captured, model=with_graph(self._captured.model, graph), sources=sources)
        saved = self._options.save_graphs
        options = replace(
            self._options,
            save_graphs=saved and saved.with_name(f"{saved.name}_packed"),
            skip_padding="never",
        )

        def rerun_padded(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return rerun(given[: len(self._captured.sources)])

        unit = compile_packed(captured, inputs, options, rerun_padded)
        self._units[kept.causal] = unit
        self.reports["without padding, causal" if kept.causal else "without padding"] = unit.report
        return unit


def waits_for_lengths(plan: PackingPlan, device: torch.device) -> ir.Node | None:
    """The first attention of a plan that, packed, reads on the host of a GPU how long sequences are."""
    for node in (*plan.attentions, *plan.few_queries):
        n = view(node)
        if not flash_runs(device.type, n.q, n.k, n.v) or split_mask(node).table is not None:
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
