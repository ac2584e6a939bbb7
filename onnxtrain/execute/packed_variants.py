"""The pipeline's stage that skips padding: batches with enough padding run on packed tokens.

    batch ─masks, labels─▶ PackingCheck ─▶ few tokens are read:      packed unit (inputs, rows, cu)
                                           most are, or not certain: dense unit (inputs)

The packed unit is compiled for the first such batch. Results of the two units differ by rounding and by their dropout
masks only; results that hold tokens also have zeros in padding, if `padding_reads` allows it. If programs are recorded
(`cuda_graphs`), the number of tokens is rounded up. Other ranks may have batches for the other unit: both communicate
in the same way, or only the dense one runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.capture import Captured
from onnxtrain.capture.input_origins import Source
from onnxtrain.capture.time_limit import limited_time
from onnxtrain.errors import CommunicationError, OmittedBlocksError, SlowCaptureError
from onnxtrain.execute.compiled import Compiled
from onnxtrain.execute.cuda_recorder import may_record
from onnxtrain.execute.packing import KeptTokens, PackingCheck
from onnxtrain.execute.padding_reads import PaddingReads
from onnxtrain.execute.program import Program
from onnxtrain.execute.recorded_program import why_never
from onnxtrain.execute.unit_builder import Rerun
from onnxtrain.graph import sizes
from onnxtrain.graph.traversal import clone, with_graph
from onnxtrain.log import LOG
from onnxtrain.ops import view
from onnxtrain.ops.attention.varlen_flash import flash_runs
from onnxtrain.ops.bodies import inline_bodies
from onnxtrain.ops.interfaces.host_reads import HOST_READS
from onnxtrain.options import Options
from onnxtrain.passes.attention_masks import split_mask
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.pack_tokens import PackingPlan, plan_packing
from onnxtrain.plan.cut import single_part
from onnxtrain.report import CompileReport, PassReport, StageReport
from onnxtrain.torch_compat.modes import has_saved_tensors_hooks

_TOKEN_DTYPES = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)  # of tokens and masks

# compile_module without its first argument, the module
Compile = Callable[[Captured, Sequence[torch.Tensor], Options, Rerun], Compiled]


def plan_packed_variants(
    model: ir.Model, captured: Captured, options: Options, device: torch.device, differentiable: bool
) -> PackedVariants | None:
    """Plan how a captured graph would run without padding.

    Args:
        model: the graph, before the passes that depend on an element's position. It is not changed.
        captured: its capture.
        options: see `onnxtrain.options`.
        device: the device of all tensors.
        differentiable: whether results may have gradients: they show whether the padding of results is read.

    Returns:
        None if no input can be tokens or a mask, or the option skip_padding is "never".
    """
    if options.skip_padding == "never" or not any(v.dtype in _TOKEN_DTYPES for v in captured.model.graph.inputs):
        return None
    return PackedVariants(model, captured, options, device, captured.result_count if differentiable else 0)


class PackedVariants:
    """The units of one captured module that run without padding.

    Attributes:
        plan: how the graph is packed; None if it cannot be.
        reports: those of the units compiled so far.
    """

    def __init__(
        self, model: ir.Model, captured: Captured, options: Options, device: torch.device, num_results: int
    ) -> None:
        """Plan variants, as `plan_packed_variants` says; the first `num_results` results may have zeros in padding."""
        start = time.perf_counter()
        self._captured, self._options, self._num_results = captured, options, num_results
        self._changes = Changes("pack_tokens")
        self._units: dict[bool, Compiled | None] = {}  # None: such batches run by the dense unit
        self.reports: dict[str, CompileReport] = {}
        # A packed graph has zeros for the tokens that are not kept, which must not fill what readers ignore.
        self._model = inline_bodies(model, keep=lambda node: (read := HOST_READS.entry(node)) is None or not read.fill)
        self.plan = self._if_profitable(plan_packing(self._model.graph, self._changes, num_results), device)
        if self.plan is not None:
            questions = with_graph(self._model, self.plan.questions())
            program = Program(single_part(questions), f"{questions.graph.name} padding", torch.device("cpu"))
            reads = [index for index, value in enumerate(questions.graph.inputs) if value.uses()]
            always = self._options.skip_padding == "always"
            self._fills = self._may_fill(self.plan, device)
            self._check = PackingCheck(program, reads, self.plan.masks, self.plan.readers, always, self._fills)
            self._sources = _sources_of((self.plan.batch, self.plan.steps), self._captured)
        self._took_ms = (time.perf_counter() - start) * 1e3

    def attach(self, compiled: Compiled, module_name: str, rerun: Rerun, compile_packed: Compile) -> Compiled:
        """Return a compiled module that runs each batch packed or dense; its report contains the plan.

        Args:
            compiled: the dense module.
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

    def _if_profitable(self, plan: PackingPlan | None, device: torch.device) -> PackingPlan | None:
        """Return the plan; None if packed attention would wait for the GPU in each layer."""
        if plan is None or device.type == "cpu" or self._options.skip_padding == "always":
            return plan
        waiting = waits_for_lengths(plan, device)
        if waiting is None:
            return plan
        self._changes.applied.clear()
        reason = "packed, it would wait for the GPU: flash attention takes only float16 and bfloat16, without a bias"
        self._changes.refuse(waiting, reason)
        return None

    def _may_fill(self, plan: PackingPlan, device: torch.device) -> bool:
        """Return whether the number of tokens is rounded up, to need few recordings."""
        if not may_record(self._options, device):
            return False
        waiting = waits_for_lengths(plan, device)
        refused = [(waiting, "attention reads the sequence lengths on the host")] if waiting is not None else []
        refused += [(node, reason) for node in self._model.graph if (reason := why_never(node))]
        if refused:
            node, reason = refused[0]
            self._changes.refuse(
                node, f"cuda_graphs: nothing is recorded, so the number of tokens is not rounded up: {reason}"
            )
        return not refused

    def _stage(self) -> StageReport:
        """Return the plan, for the report."""
        report = PassReport("pack_tokens", self._took_ms, tuple(self._changes.applied), tuple(self._changes.refused))
        applied = tuple(f"{report.name}: {text}" for text in report.applied)
        return StageReport("pack", self._took_ms, len(self._model.graph), applied, report.refused, (report,))

    def _runner(
        self, plan: PackingPlan, dense: Compiled, module_name: str, rerun: Rerun, compile_packed: Compile
    ) -> Callable[..., Any]:
        """Return a function that runs each batch packed, or by `dense`."""
        kept_tokens, units, sources = self._check.kept_tokens, self._units, self._sources
        results = plan.results()
        reads = PaddingReads(results, self._captured.output.names, module_name)

        def run(*tensors: torch.Tensor) -> Any:
            reads.update()
            # A checkpoint around the module runs it again in backward, when `reads` may allow more.
            if reads.refuted or (results and has_saved_tensors_hooks()):
                return dense.run(*tensors)
            symbol_values = {name: tensors[index].size(axis) for name, index, axis in sources}
            batch, steps = (sizes.evaluate(size, symbol_values) for size in (plan.batch, plan.steps))
            kept = kept_tokens(tensors, batch, steps)
            if kept is None:
                return dense.run(*tensors)
            if not reads.may_pack:
                return watched(dense, tensors, kept, packed=False)
            if kept.causal not in units:
                self._compile(tensors, kept, module_name, rerun, compile_packed)
            unit = units[kept.causal]
            if unit is None:
                return dense.run(*tensors)
            inputs = (*tensors, *kept.tensors())
            return watched(unit, inputs, kept, packed=True) if results else unit.run(*inputs)

        def watched(unit: Compiled, tensors: Sequence[torch.Tensor], kept: KeptTokens, packed: bool) -> Any:
            values = unit.results(tensors)
            reads.watch(values, kept.rows, packed)
            return unit.output(values, tensors)

        return run

    def _zeros_note(self, results: Collection[int]) -> str:
        """Return the part of the log message about results that have zeros in padding."""
        names = ", ".join(self._captured.output.names[index] for index in results)
        return f"; the loss does not read the padding of {names}, which is zeros then" if names else ""

    def _compile(
        self, tensors: Sequence[torch.Tensor], kept: KeptTokens, module_name: str, rerun: Rerun, compile_packed: Compile
    ) -> None:
        graph = clone(self._model.graph)[0]
        plan = plan_packing(graph, Changes(), self._num_results)
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

        def rerun_padded(packed_inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return rerun(packed_inputs[: len(self._captured.sources)])

        try:
            with limited_time(options, module_name):  # it is a later step than the first
                unit = compile_packed(captured, inputs, options, rerun_padded)
        except (CommunicationError, OmittedBlocksError, SlowCaptureError) as error:
            self._units[kept.causal] = None
            LOG.warning("%s runs with padding: %s", module_name, error)
            return
        self._units[kept.causal] = unit
        self.reports["without padding, causal" if kept.causal else "without padding"] = unit.report
        note = self._zeros_note(plan.results())
        LOG.info("%s: padded batches run on packed tokens from now on%s", module_name, note)


def waits_for_lengths(plan: PackingPlan, device: torch.device) -> ir.Node | None:
    """Return the first attention of a plan that, once packed, reads the sequence lengths on the host."""
    for node in (*plan.attentions, *plan.few_queries):
        n = view(node)
        if not flash_runs(device.type, n.q, n.k, n.v) or split_mask(node).table is not None:
            return node
    return None


def _sources_of(plan_sizes: Sequence[sizes.Size], captured: Captured) -> list[tuple[str, int, int]]:
    """Return (name, input, axis) of each symbol in these sizes."""
    names = frozenset[str]().union(*map(sizes.symbols, plan_sizes))
    sources: dict[str, tuple[str, int, int]] = {}
    for index, value in enumerate(captured.model.graph.inputs):
        for axis, size in enumerate(sizes.dims_of(value)):
            if size in names:
                sources.setdefault(str(size), (str(size), index, axis))
    return list(sources.values())
