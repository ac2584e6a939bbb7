"""What backward recomputes, as all options that are about memory decide it together.

memory_budget_bytes                   the choice that fits in the least time; by sizes, where it is given in bytes
memory_opt_level, memory_opt_config   the subgraphs that they name, and the user's checkpoints
the user's checkpoints                what they hold
none of these                         what costs little more to recompute than to read from memory
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch

from onnxtrain.autodiff import Joint
from onnxtrain.options import Options
from onnxtrain.plan.backward_stages import why_not_staged
from onnxtrain.plan.budget import bytes_allowed, choose_within_budget
from onnxtrain.plan.channels_last import ChannelsLast
from onnxtrain.plan.cut import cut
from onnxtrain.plan.default_recompute import choose_by_default
from onnxtrain.plan.recompute import RecomputeChoice, apply_choice, choose_by_checkpoints
from onnxtrain.plan.recompute_subgraphs import choose_by_options
from onnxtrain.plan.storage import Storages, bind_symbols
from onnxtrain.report import SubgraphReport


@dataclass(frozen=True)
class MemoryPlan:
    """What backward recomputes of a joint graph.

    Attributes:
        joint: the graph, in which everything is kept.
        choose: the choice for a call's sizes.
        by_size: whether other sizes may have another choice.
        subgraphs: what memory_opt_config could name, where one of its options is set.
        always_report: whether a choice to recompute nothing is worth a line in the report.
    """

    joint: Joint
    choose: Callable[[Mapping[str, int]], RecomputeChoice]
    by_size: bool = False
    subgraphs: Sequence[SubgraphReport] = ()
    always_report: bool = False

    def planned(self, choice: RecomputeChoice) -> Joint:
        """The joint graph with that choice; to be called once, unless `by_size`."""
        return apply_choice(self.joint.copy() if self.by_size else self.joint, choice)

    def sentences(self, choice: RecomputeChoice) -> list[str]:
        """The choice, for the report."""
        return [str(choice)] if choice.values or self.always_report else []


def plan_memory(
    joint: Joint,
    mutated: Sequence[ir.Value],
    views: Sequence[str],
    inputs: Sequence[torch.Tensor],
    options: Options,
    device_type: str,
    layout: ChannelsLast | None,
) -> MemoryPlan:
    """Plans a joint graph.

    Args:
        joint: optimized.
        mutated: its inputs whose contents are others when backward runs.
        views: see `output_views.input_views`.
        inputs: the tensors of the forward graph's inputs.
        options: see `onnxtrain.options`.
        device_type: of the device that it runs on.
        layout: see `channels_last`.

    Raises:
        MemoryBudgetError: by `choose`, where nothing fits.
    """

    def storages(known: Mapping[str, int]) -> Storages:
        return Storages(joint.model.graph, known, device_type, layout)

    if options.memory_budget_bytes is not None:
        allowed, parts = bytes_allowed(options.memory_budget_bytes, inputs), cut(joint)
        # Gradients leave early where the option says so, or where nothing else fits; not where backward is one piece.
        early = False if why_not_staged(parts, views) else options.early_gradients or None
        return MemoryPlan(
            joint,
            lambda known: choose_within_budget(parts, storages(known), allowed, mutated, early),
            by_size=not isinstance(allowed, float),
            always_report=True,
        )
    known = bind_symbols(joint.model.graph.inputs, inputs)
    asked, subgraphs = choose_by_checkpoints(joint, mutated), list[SubgraphReport]()
    if options.memory_opt_level or options.memory_opt_config:
        choice, subgraphs = choose_by_options(cut(joint), storages(known), options, mutated)
        choice = replace(choice, values=choice.values | asked.values)
    elif options.recompute_cheap and not asked.values:
        choice = choose_by_default(cut(joint), known, mutated)
    else:
        choice = asked
    return MemoryPlan(joint, lambda known: choice, subgraphs=subgraphs)
