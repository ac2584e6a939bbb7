"""Decide what backward recomputes, from all options about memory.

memory_budget_bytes                   the fastest choice that fits; per input sizes if the budget is in bytes
recompute other than cheap, none      the layers or subgraphs that it names, and the user's checkpoints
the user's checkpoints                their contents
recompute="cheap", the default        values that cost little more to recompute than to read from memory
sharded parameters                    always also those that were gathered
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
import torch

from onnxtrain.autodiff import Joint
from onnxtrain.capture.blocks.omitted_blocks import OmittedBlocks
from onnxtrain.graph import sizes
from onnxtrain.graph.alias import AliasSets
from onnxtrain.graph.values import TensorType, dtype_of
from onnxtrain.graph.verify import format_type
from onnxtrain.ops import definition_of
from onnxtrain.options import Options
from onnxtrain.plan.backward_stages import why_not_staged
from onnxtrain.plan.budget import bytes_allowed, choose_within_budget
from onnxtrain.plan.channels_last import ChannelsLast
from onnxtrain.plan.cut import cut
from onnxtrain.plan.default_recompute import choose_by_default
from onnxtrain.plan.gathered_parameters import gathered_again
from onnxtrain.plan.independent_results import wants_stages
from onnxtrain.plan.omitted_blocks import counts_with, described, with_omitted_blocks
from onnxtrain.plan.recompute import RecomputeChoice, apply_choice, choose_by_checkpoints
from onnxtrain.plan.recompute_subgraphs import choose_by_options
from onnxtrain.plan.storage import Storages, bind_symbols
from onnxtrain.report import SubgraphReport


@dataclass(frozen=True)
class MemoryPlan:
    """The values of a joint graph that backward recomputes.

    Attributes:
        joint: the graph that keeps everything.
        choose: makes the choice for the integers of the symbols.
        by_size: whether the choice depends on the sizes.
        subgraphs: those that the option recompute can name, if it names layers or subgraphs.
        symbol_values: the integers of the symbols in the first call.
        always_report: whether the report has a line even if nothing is recomputed.
        omitted: the blocks that the graph lacks.
    """

    joint: Joint
    choose: Callable[[Mapping[str, int]], RecomputeChoice]
    by_size: bool = False
    subgraphs: Sequence[SubgraphReport] = ()
    symbol_values: Mapping[str, int] = field(default_factory=dict)
    always_report: bool = False
    omitted: Sequence[OmittedBlocks] = ()

    def planned(self, choice: RecomputeChoice) -> tuple[Joint, Mapping[str, Sequence[str]]]:
        """Apply a choice to the joint graph, and insert the omitted blocks. To be called once, unless `by_size`.

        Returns:
            The joint graph, and the names of the copies of each value in blocks that were inserted.

        Raises:
            OmittedBlocksError: they cannot be inserted.
        """
        return with_omitted_blocks(
            apply_choice(self.joint.copy() if self.by_size else self.joint, choice), self.omitted
        )

    def sentences(self, choice: RecomputeChoice, copies: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the report's lines on a choice: the values that backward recomputes, with their shapes and bytes.

        Args:
            choice: the choice.
            copies: the copies of values in blocks that were inserted, by name.
        """
        choice = replace(choice, values=choice.values.union(*(copies.get(name, ()) for name in choice.values)))
        inserted = described(self.omitted)
        if not choice.values and not self.always_report:
            return inserted
        return [*inserted, str(choice), *(f"recompute: {row}" for row in self._rows(choice))]

    def _rows(self, choice: RecomputeChoice) -> Iterator[str]:
        """Return a row for each op and shape, the largest first. Views, which take no memory, are skipped."""
        nodes = list(self.joint.model.graph)
        sets = AliasSets(nodes, definition_of)
        counts: Counter[tuple[int, str]] = Counter()
        for node in nodes:
            for value in node.outputs:
                if value.name in choice.values and sets.root(value) is value:
                    counts[self._bytes_and_type(value, node.op_type)] += 1
        for (size, text), count in sorted(counts.items(), key=lambda item: -item[0][0] * item[1]):
            memory = f"{size:,} bytes" if size else "of an unknown size"
            yield f"{text}, {memory}" if count == 1 else f"{count} x {text}, {memory} each"

    def _bytes_and_type(self, value: ir.Value, op_type: str) -> tuple[int, str]:
        """Return a value's bytes in the first call, 0 if its shape depends on data, and its op and type in words."""
        shape = sizes.dims_of(value)
        is_static = [sizes.symbols(size) <= self.symbol_values.keys() for size in shape]
        shape = tuple(
            sizes.evaluate(size, self.symbol_values) if is_known else size
            for size, is_known in zip(shape, is_static, strict=True)
        )
        dtype = dtype_of(value)
        count = math.prod(size for size in shape if isinstance(size, int)) if all(is_static) else 0
        return math.ceil(count * dtype.itemsize), f"{op_type} {format_type(TensorType(dtype, shape))}"


def plan_memory(
    joint: Joint,
    mutated: Sequence[ir.Value],
    views: Sequence[str],
    inputs: Sequence[torch.Tensor],
    options: Options,
    device_type: str,
    layout: ChannelsLast | None,
    omitted: Sequence[OmittedBlocks] = (),
) -> MemoryPlan:
    """Plan the memory of a joint graph.

    Args:
        joint: after the passes.
        mutated: its inputs that forward mutates.
        views: see `output_views.input_views`.
        inputs: the tensors of the forward graph's inputs.
        options: see `onnxtrain.options`.
        device_type: "cpu" or "cuda".
        layout: see `channels_last`.
        omitted: the blocks that the graph lacks.

    Raises:
        MemoryBudgetError: from `choose`, if nothing fits.
    """

    def storages(symbol_values: Mapping[str, int]) -> Storages:
        return Storages(joint.model.graph, symbol_values, device_type, layout)

    gathered = gathered_again(joint)
    always = frozenset(str(value.name) for value in gathered)
    unread = (*mutated, *gathered)  # values that no other recomputed node reads
    if options.memory_budget_bytes is not None:
        allowed, parts = bytes_allowed(options.memory_budget_bytes, inputs), cut(joint)
        # Gradients are released early if the option says so or nothing else fits, and backward can run in stages.
        staged = wants_stages(options.early_gradients, joint, parts)
        early = False if why_not_staged(parts, views) else staged or None
        return MemoryPlan(
            joint,
            lambda symbol_values: choose_within_budget(parts, storages(symbol_values), allowed, unread, early, always),
            by_size=not isinstance(allowed, float),
            symbol_values=bind_symbols(joint.model.graph.inputs, inputs),
            always_report=True,
        )
    symbol_values = bind_symbols(joint.model.graph.inputs, inputs)
    choice, subgraphs = choose_by_checkpoints(joint, mutated), list[SubgraphReport]()
    checkpointed = choice.values
    if options.recompute != "none" and not checkpointed:
        choice = choose_by_default(cut(joint), symbol_values, unread, counts_with(omitted))
    if options.recompute not in ("cheap", "none"):
        by_default = choice.values
        choice, subgraphs = choose_by_options(
            cut(joint), storages(symbol_values), options, unread, checkpointed | always, by_default
        )
    choice = replace(choice, values=choice.values | always)
    return MemoryPlan(joint, lambda _: choice, subgraphs=subgraphs, symbol_values=symbol_values, omitted=omitted)
