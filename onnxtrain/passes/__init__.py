"""Graph to graph. FORWARD and JOINT are the only statement of which passes run and in what order.

A pass is a function (graph, changes) that edits the graph in place and says in `changes` what it did and refused. It
lives in a file of its own; `docs/adding-a-pass.md` walks through one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph import traversal
from onnxtrain.options import Options
from onnxtrain.passes.cancel_casts import cancel_casts
from onnxtrain.passes.cancel_transposes import cancel_transposes
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.chunk_losses import chunk_losses
from onnxtrain.passes.dedupe import dedupe
from onnxtrain.passes.drop_copies import drop_copies
from onnxtrain.passes.drop_identities import drop_identities
from onnxtrain.passes.drop_unused import drop_unused
from onnxtrain.passes.fold_constants import fold_constants
from onnxtrain.passes.fold_scales import fold_scales
from onnxtrain.passes.fuse_activations import fuse_activations
from onnxtrain.passes.fuse_attention import fuse_attention
from onnxtrain.passes.fuse_gates import fuse_gates
from onnxtrain.passes.fuse_patterns import fuse_patterns
from onnxtrain.passes.fuse_relu_dropout import fuse_relu_dropout
from onnxtrain.passes.fuse_sums import fuse_gradient_sums, fuse_sums
from onnxtrain.passes.gradients_with_loss import gradients_with_loss
from onnxtrain.passes.keep_scores import keep_scores
from onnxtrain.passes.key_dropout import key_dropout
from onnxtrain.passes.mask_pooled_gradients import mask_pooled_gradients
from onnxtrain.passes.move_gathers import move_gathers
from onnxtrain.passes.multiply_convolutions import multiply_convolutions
from onnxtrain.passes.pack_masks import pack_masks
from onnxtrain.passes.skip_ignored_labels import skip_ignored_labels
from onnxtrain.passes.split_slices import split_slices
from onnxtrain.passes.unmerge_axes import unmerge_axes
from onnxtrain.report import PassReport

Pass = Callable[[ir.Graph, Changes], None]

FORWARD: tuple[Pass, ...] = (
    fold_constants,  # first: later passes match constants
    dedupe,  # one value per expression, so that a match has one producer
    fuse_patterns,  # before differentiation, as the next: one gradient op instead of those of the parts
    fuse_gates,  # after patterns: they make activations of what is written out
    fuse_attention,  # reads q and k behind their rotary embedding
    unmerge_axes,  # after fusions, which know what is merged; before all that ask what becomes of an axis
    multiply_convolutions,  # before transposes cancel: it leaves some that do
    cancel_transposes,  # after fusions, which know the transposes of attention
    cancel_casts,  # after fusions, which know the casts of norms
    drop_copies,  # after fusions, which know copies behind rotary embeddings
    drop_identities,  # after fusions, which know them too; what they hide are neighbours
    drop_unused,  # what nobody reads any more must not hold up rows that move, or be counted as a reader
    fold_scales,  # after fusions, which know the numbers of attention and norms; after casts, which stand in between
    skip_ignored_labels,  # before gathers move: the last row of a shifted sequence has no label
    move_gathers,  # after fusions: what they match is not torn apart; before differentiation: backward follows
    split_slices,  # after gathers moved: what is picked far up is no slice of the same tensor any more
    chunk_losses,  # after the rows of a loss were picked: it joins what computes them
    key_dropout,  # after all that match Dropout or move rows through it
    fuse_sums,  # after keys took the place of masks: dropout by a key adds a residual
    fuse_activations,  # after sums: what is added comes before what is applied
    fuse_relu_dropout,  # after activations: a Relu that a norm applies costs nothing; after sums: none is added then
    pack_masks,  # after all that match Dropout, as keys: 32 elements share a word
    keep_scores,  # after all that match losses
    drop_unused,  # last: what the others left behind
)

JOINT: tuple[Pass, ...] = (
    fold_constants,  # gradient rules make constants too
    dedupe,  # several rules compute the same sizes and views
    fuse_gradient_sums,  # after equal nodes are one: who reads a result is known
    mask_pooled_gradients,  # before anything is planned: less is kept
    gradients_with_loss,  # which gradients are read is known now
    drop_unused,  # gradients that nobody asked for
)


def forward_passes(options: Options) -> tuple[Pass, ...]:
    """FORWARD without the passes that the options switch off.

    Raises:
        OptionError: `disabled_passes` names what is no pass.
    """
    return _enabled(FORWARD, options)


def joint_passes(options: Options) -> tuple[Pass, ...]:
    """JOINT without the passes that the options switch off. Raises what `forward_passes` does."""
    return _enabled(JOINT, options)


def _enabled(passes: tuple[Pass, ...], options: Options) -> tuple[Pass, ...]:
    known = {run.__name__ for run in (*FORWARD, *JOINT)}
    disabled = options.disabled_passes or ()
    unknown = [name for name in disabled if name not in known]
    if unknown:
        raise OptionError(
            "disabled_passes names what is no pass",
            where="the option disabled_passes, or the variable ONNXTRAIN_DISABLED_PASSES",
            expected=", ".join(sorted(known)),
            got=", ".join(unknown),
            todo="give names of passes, joined by commas",
        )
    wanted = {
        skip_ignored_labels: options.label_sparsity,
        move_gathers: True,
        chunk_losses: options.chunked_loss,
    }
    switched_off = {run for run, on in wanted.items() if not (options.compute_optimizer and on)}
    return tuple(run for run in passes if run not in switched_off and run.__name__ not in disabled)


def optimize_forward(
    model: ir.Model, options: Options, before_keys: Callable[[ir.Model], None] | None = None
) -> Changes:
    """Runs the forward passes over `model`, in place; returns what they did. Raises what `forward_passes` does.

    `before_keys` looks at the graph before those that make an element's place matter: what packs tokens begins there.
    """
    keys = FORWARD.index(key_dropout)
    changes = optimize(model, _enabled(FORWARD[:keys], options))
    if before_keys is not None:
        before_keys(model)
    changes.add(optimize(model, _enabled(FORWARD[keys:], options)))
    return changes


def optimize(model: ir.Model, passes: Sequence[Pass]) -> Changes:
    """Runs `passes` over `model` in order, in place; returns what they did."""
    total = Changes()
    for run in passes:
        changes = Changes(run.__name__)
        start = time.perf_counter()
        run(model.graph, changes)
        traversal.sort(model.graph)  # sizes that new nodes read may be computed further down
        took_ms = (time.perf_counter() - start) * 1e3
        total.passes.append(PassReport(run.__name__, took_ms, tuple(changes.applied), tuple(changes.refused)))
        total.applied += [f"{run.__name__}: {text}" for text in changes.applied]
        total.refused += changes.refused
    return total
