"""Graph optimization passes. FORWARD and JOINT alone define which passes run and in what order.

A pass is a function (graph, changes) that edits the graph in place and records in `changes` what it changed and what it
refused to change. Each has a file of its own; `docs/development/adding-a-pass.md` walks through one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph import traversal
from onnxtrain.log import warn_once
from onnxtrain.options import Options
from onnxtrain.passes.cancel_axis_merges import cancel_axis_merges
from onnxtrain.passes.cancel_casts import cancel_casts
from onnxtrain.passes.cancel_transposes import cancel_transposes
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.chunk_losses import chunk_losses
from onnxtrain.passes.compute_loss_gradients_in_forward import compute_loss_gradients_in_forward
from onnxtrain.passes.convert_pointwise_convolutions import convert_pointwise_convolutions
from onnxtrain.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from onnxtrain.passes.eliminate_dead_code import eliminate_dead_code
from onnxtrain.passes.fold_constants import fold_constants
from onnxtrain.passes.fold_scalar_factors import fold_scalar_factors
from onnxtrain.passes.fuse_activations import fuse_activations
from onnxtrain.passes.fuse_attention import fuse_attention
from onnxtrain.passes.fuse_gated_activations import fuse_gated_activations
from onnxtrain.passes.fuse_patterns import fuse_patterns
from onnxtrain.passes.fuse_relu_dropout import fuse_relu_dropout
from onnxtrain.passes.fuse_sums import fuse_gradient_sums, fuse_sums
from onnxtrain.passes.hoist_gathers import hoist_gathers
from onnxtrain.passes.pack_dropout_masks import pack_dropout_masks
from onnxtrain.passes.recompute_attention_probabilities import recompute_attention_probabilities
from onnxtrain.passes.regenerate_dropout_masks import regenerate_dropout_masks
from onnxtrain.passes.remove_identities import remove_identities
from onnxtrain.passes.remove_reshape_copies import remove_reshape_copies
from onnxtrain.passes.reorder_relu_pool_gradients import reorder_relu_pool_gradients
from onnxtrain.passes.replace_slices_with_split import replace_slices_with_split
from onnxtrain.passes.save_logits_for_backward import save_logits_for_backward
from onnxtrain.passes.simplify_attention_masks import simplify_attention_masks
from onnxtrain.passes.skip_ignored_labels import skip_ignored_labels
from onnxtrain.report import PassReport
from onnxtrain.system.time_limit import check_time, part

Pass = Callable[[ir.Graph, Changes], None]

FORWARD: tuple[Pass, ...] = (
    fold_constants,  # first: later passes match constants
    eliminate_common_subexpressions,  # one value per expression, so that a match has one producer
    fuse_patterns,  # before differentiation, as the next two: one gradient op instead of one per part
    fuse_gated_activations,  # after patterns: they make the activations from written-out ones
    fuse_attention,  # matches q and k after their rotary embedding
    simplify_attention_masks,  # after fuse_attention: it reads the mask of the fused op
    cancel_axis_merges,  # after fusions, which match merged axes; before all passes that ask for axis maps
    convert_pointwise_convolutions,  # before cancel_transposes: it leaves transposes that cancel
    cancel_transposes,  # after fusions, which match the transposes of attention
    cancel_casts,  # after fusions, which match the casts of norms
    remove_reshape_copies,  # after fusions, which match the copies after rotary embeddings
    remove_identities,  # after fusions, which match them too; makes producers and users adjacent
    eliminate_dead_code,  # dead nodes must not count as users in the passes that move rows
    fold_scalar_factors,  # after fusions, which match the scales of attention and norms; after the casts in between
    skip_ignored_labels,  # before hoist_gathers: the last row of a shifted sequence has no label
    hoist_gathers,  # after fusions, whose matches it would split; before differentiation: backward follows
    replace_slices_with_split,  # after hoist_gathers: a slice that was hoisted no longer shares a tensor with others
    chunk_losses,  # after the rows of a loss were selected: it joins the ops that compute them
    regenerate_dropout_masks,  # after all passes that match Dropout or move rows through it
    recompute_attention_probabilities,  # after all passes that match attention or move rows through it
    fuse_sums,  # after regenerate_dropout_masks: KeyedDropout can add a residual
    fuse_activations,  # after fuse_sums: the sum comes before the activation
    fuse_relu_dropout,  # after fuse_activations: a Relu that a norm applies is free; after fuse_sums: no residual left
    pack_dropout_masks,  # after all passes that match Dropout, as regenerate_dropout_masks
    save_logits_for_backward,  # after all passes that match losses
    eliminate_dead_code,  # last: removes what the others left
)

JOINT: tuple[Pass, ...] = (
    fold_constants,  # gradient rules make constants too
    eliminate_common_subexpressions,  # several rules compute the same shapes and views
    fuse_gradient_sums,  # after equal nodes are merged: the users of a result are final
    reorder_relu_pool_gradients,  # before planning: fewer values are saved
    compute_loss_gradients_in_forward,  # it is known now which gradients are used
    eliminate_dead_code,  # gradients that no output depends on
)

# Names that passes had in earlier versions; `disabled_passes` accepts them with a notice.
FORMER_NAMES: Mapping[str, str] = {
    "dedupe": "eliminate_common_subexpressions",
    "drop_copies": "remove_reshape_copies",
    "drop_identities": "remove_identities",
    "drop_unused": "eliminate_dead_code",
    "fold_scales": "fold_scalar_factors",
    "fuse_gates": "fuse_gated_activations",
    "gradients_with_loss": "compute_loss_gradients_in_forward",
    "keep_scores": "save_logits_for_backward",
    "key_dropout": "regenerate_dropout_masks",
    "mask_pooled_gradients": "reorder_relu_pool_gradients",
    "move_gathers": "hoist_gathers",
    "multiply_convolutions": "convert_pointwise_convolutions",
    "pack_masks": "pack_dropout_masks",
    "split_slices": "replace_slices_with_split",
    "unmerge_axes": "cancel_axis_merges",
}


def forward_passes(options: Options) -> tuple[Pass, ...]:
    """Return FORWARD without the passes that the options disable.

    Raises:
        OptionError: `disabled_passes` has an unknown name.
    """
    return _enabled(FORWARD, options)


def forward_passes_around_packing(options: Options) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """Return the forward passes up to `regenerate_dropout_masks`, and from it on.

    From there on an element's position determines its dropout mask: token packing starts from the graph in between.
    Raises as `forward_passes` does.
    """
    index = FORWARD.index(regenerate_dropout_masks)
    return _enabled(FORWARD[:index], options), _enabled(FORWARD[index:], options)


def joint_passes(options: Options) -> tuple[Pass, ...]:
    """Return JOINT without the passes that the options disable. Raises as `forward_passes` does."""
    return _enabled(JOINT, options)


def _enabled(passes: tuple[Pass, ...], options: Options) -> tuple[Pass, ...]:
    disabled = _disabled_names(options)
    return tuple(run for run in passes if run.__name__ not in disabled)


def _disabled_names(options: Options) -> set[str]:
    """Return the current names of the passes in `disabled_passes`; raise OptionError for an unknown one."""
    pass_names = {run.__name__ for run in (*FORWARD, *JOINT)}
    disabled: set[str] = set()
    for name in options.disabled_passes or ():
        if name in FORMER_NAMES:
            warn_once(f"disabled_passes: the pass {name!r} is now named {FORMER_NAMES[name]!r}")
        disabled.add(FORMER_NAMES.get(name, name))
    if unknown := sorted(disabled - pass_names):
        raise OptionError(
            "disabled_passes has unknown pass names",
            where="the option disabled_passes, or the variable ONNXTRAIN_DISABLED_PASSES",
            expected=", ".join(sorted(pass_names)),
            got=", ".join(unknown),
            todo="give the names of passes, separated by commas",
        )
    return disabled


def optimize(model: ir.Model, passes: Sequence[Pass]) -> Changes:
    """Run `passes` over `model` in order and in place, and return what they did."""
    total = Changes()
    traversal.sort(model.graph)
    for run in passes:
        changes = Changes(run.__name__)
        start = time.perf_counter()
        check_time()
        with part(f"the pass {run.__name__}"):
            run(model.graph, changes)
        if changes.applied:
            traversal.sort(model.graph)  # new nodes may read shape values that are computed later
        took_ms = (time.perf_counter() - start) * 1e3
        total.passes.append(PassReport(run.__name__, took_ms, tuple(changes.applied), tuple(changes.refused)))
        total.applied += [f"{run.__name__}: {text}" for text in changes.applied]
        total.refused += changes.refused
    return total
