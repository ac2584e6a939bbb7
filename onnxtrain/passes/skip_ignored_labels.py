"""Skip tokens with ignored labels after the last op that mixes tokens.

    before   loss = CrossEntropy(Linear(Gelu(x[b*s, h])), labels)
    after    rows = LabelledRows(labels != ignore_index);  loss = CrossEntropy(Linear(Gelu(x[rows])), labels[rows])

Only 15 % of the tokens of a masked language model have labels. The ops between the last that mixes tokens and the loss,
above all the vocabulary projection, run on their rows only. Sum and mean, class weights and label smoothing give the
same results: an ignored row adds 0 to the loss and to the mean's denominator. Without any label the mean is NaN as
before.

Logits that the model shifts, `logits[:, :-1]`, are not sliced; the tokens that the slice removed get an ignored
label instead. The logits then have a row for each token.

Refused if logits or log-probabilities have other users (a module output), and if no matmul would be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, constant_of, dtype_of, rank_of, set_type
from onnxtrain.ops import builder, definition_of, view
from onnxtrain.ops.body_parts import cast, reshaped
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.elementwise.comparison import EQUAL
from onnxtrain.ops.elementwise.selection import WHERE
from onnxtrain.ops.loss.cross_entropy import CROSS_ENTROPY, NEGATIVE_LOG_LIKELIHOOD
from onnxtrain.ops.reduce.sums import REDUCE_SUM
from onnxtrain.ops.reshape.dims import expanded
from onnxtrain.ops.reshape.join import concatenated
from onnxtrain.ops.reshape.slicing import SLICE
from onnxtrain.ops.symbolic_ints import known_ints
from onnxtrain.passes.changes import Changes, stopped
from onnxtrain.passes.rewriting import nodes_before, only_user
from onnxtrain.passes.rowwise import Axes
from onnxtrain.passes.selected_rows import Selection, Use, compute_selected, region_before


def skip_ignored_labels(graph: ir.Graph, changes: Changes) -> None:
    """Make the ops before each loss of `graph` skip the tokens that it ignores."""
    op = builder(graph)
    for node in list(graph):
        n = view(node)
        if n.definition not in (CROSS_ENTROPY, NEGATIVE_LOG_LIKELIHOOD):
            continue
        reason = loss_obstacle(n)
        if reason:
            changes.refuse(node, reason)
            continue
        shift = _find_shift(n)
        if shift is not None and region_before(graph, {shift.x: (0, 1)}, [(shift.node, 0)], (n.labels,)).has_matmuls():
            _replace_shift(op, n, shift)
            changes.applied.append(f"{node.name} ignores the tokens that {shift.node.name} cut off")
        _skip(op, n, changes)


def loss_obstacle(n: NodeView) -> str:
    """Return why ignored tokens add something to a loss other than 0; "" if they do not."""
    if n.reduction == "none":
        return 'its loss is not reduced (reduction="none"): ignored tokens have one too'
    if n.ignore_index is None or n.ignore_index.const_value is None:
        return "it has no constant ignore_index"
    if n.definition is CROSS_ENTROPY and traversal.is_used(n.log_prob):
        return f"its log-probabilities {n.log_prob.name} have users"
    return ""


def _find_shift(n: NodeView) -> NodeView | None:
    """Return the Slice of time steps from which the logits [tokens, classes] come, if they have no other users."""
    logits = value = n.node.inputs[0]
    user = n.node
    assert logits is not None
    if rank_of(logits) != 2 or rank_of(n.labels) != 1:
        return None
    while value is not None and only_user(value) is user:
        producer = value.producer()
        if producer is None:
            return None
        at = view(producer)
        if at.definition is SLICE:
            return at if _is_slice_of_steps(at, logits) else None
        source = producer.inputs[0]
        widens = source is not None and dtype_of(source).itemsize <= dtype_of(value).itemsize
        if not at.definition.is_transparent or not widens:
            return None
        value, user = source, producer
    return None


def _is_slice_of_steps(shift: NodeView, logits: ir.Value) -> bool:
    """Return whether the logits are the flattened rows of a slice of consecutive steps of [batch, steps, classes]."""
    axes, by = constant_of(shift.axes), None if shift.steps is None else constant_of(shift.steps)
    starts = known_ints(shift.starts)
    if rank_of(shift.x) != 3 or axes is None or axes.tolist() != [1] or starts is None:
        return False
    batch, kept, classes = sizes.dims_of(shift.node.outputs[0])
    consecutive = shift.steps is None or (by is not None and by.tolist() == [1])
    if not consecutive or sizes.dims_of(logits) != (sizes.multiply(batch, kept), classes):
        return False
    start = starts[0]
    if start == 0:
        return True
    after = sizes.subtract(sizes.dims_of(shift.x)[1], sizes.add(start, kept))
    # A start after the last step could make `after` negative.
    return isinstance(start, int) and start > 0 and isinstance(after, int) and after >= 0


def _replace_shift(op: Builder, n: NodeView, shift: NodeView) -> None:
    """Give the loss the logits before the slice, and ignored labels for the tokens that were cut off."""
    logits, labels, x = n.node.inputs[0], n.labels, shift.x
    assert logits is not None
    batch, steps, classes = sizes.dims_of(x)
    kept = sizes.dims_of(shift.node.outputs[0])[1]
    (start,) = known_ints(shift.starts) or ()
    after = sizes.subtract(steps, sizes.add(start, kept))
    with nodes_before(op, n.node):
        unshifted = reshaped(op, cast(op, x, dtype_of(logits)), (sizes.multiply(batch, steps), classes))
        ignored = reshaped(op, cast(op, n.ignore_index, dtype_of(labels)), (1, 1))
        labels_type = TensorType(dtype_of(labels), sizes.dims_of(logits)[:1])
        labels = op.node("", "Identity", (labels,), {}, types=[labels_type]).outputs[0]
        leading, trailing = (expanded(op, ignored, (batch, size)) for size in (start, after))
        padded = concatenated(op, [leading, reshaped(op, labels, (batch, kept)), trailing], 1)
        padded = reshaped(op, padded, (sizes.multiply(batch, steps),))
    n.node.replace_input_with(0, unshifted)
    n.node.replace_input_with(1, padded)
    dead = logits.producer()
    while dead is not None and dead.outputs[0] is not x:  # dead nodes must not count as users
        read = dead.inputs[0]
        op.graph.remove(dead, safe=True)
        dead = None if read is None else read.producer()
    for output, type_ in zip(n.node.outputs, n.definition.output_types(n.node), strict=True):
        set_type(output, type_)


@dataclass
class TokenRows(Selection):
    """Rows of tokens, by their indices in [0, batch * steps)."""

    rows: ir.Value

    def __post_init__(self) -> None:
        self.reads = (self.rows,)
        self.count = sizes.dims_of(self.rows)[0]

    def along(self, op: Builder, value: ir.Value, axis: int) -> ir.Value:
        return op.ms.ShrunkenGather(value, self.rows, axis=axis)

    def over(self, op: Builder, value: ir.Value) -> ir.Value:
        return op.ms.FlattenAndUnpad(value, self.rows)[0]


def _skip(op: Builder, n: NodeView, changes: Changes) -> None:
    loss, labels = n.node, n.labels
    logits = n.node.inputs[0]
    assert logits is not None
    if rank_of(labels) > 2:
        changes.refuse(loss, "its labels have more than two dimensions")
        return
    label_axes: Axes = tuple(range(rank_of(labels)))
    sums = _masked_sums(n)
    labels = _with_dims_of_logits(op, n, logits, sums)
    seeds = {logits: (0,) if len(label_axes) == 1 else (0, 2), labels: label_axes}
    seeds.update({value: label_axes for _, value in sums})
    uses: list[Use] = [(loss, 0), (loss, 1), *((node, 0) for node, _ in sums)]
    region = region_before(op.graph, seeds, uses, (labels,))
    for at, reason in region.ends.items():
        if at is not labels.producer():
            changes.refuse(loss, stopped(at, reason))
    if not region.has_matmuls():
        return
    if not any(len(axes) == 2 for axes in region.axes.values()):
        changes.refuse(loss, "its rows are not the tokens of sequences: few are expected to be ignored")
        return
    with nodes_before(op, loss):
        kept = op.Not(op.Equal(labels, n.ignore_index))
        rows = op.own.LabelledRows(reshaped(op, kept, (sizes.multiply(*sizes.dims_of(labels)),)))
    selection = TokenRows(rows)
    compute_selected(op, region, selection)
    for node, index in uses:
        value = node.inputs[index]
        if value is not None and value.producer() not in region.nodes:
            with nodes_before(op, node):
                node.replace_input_with(index, selection.select(op, value, seeds[value]))
    for output, type_ in zip(loss.outputs, n.definition.output_types(loss), strict=True):
        set_type(output, type_)
    changes.applied.append(f"{len(region.nodes)} nodes before {loss.name} skip tokens with ignored labels")


def _with_dims_of_logits(
    op: Builder, n: NodeView, logits: ir.Value, sums: Sequence[tuple[ir.Node, ir.Value]]
) -> ir.Value:
    """Return the labels with the symbolic dimensions of the logits, which equal theirs; retype the masked sums too."""
    labels: ir.Value = n.labels
    rows = sizes.dims_of(logits)
    shape = (rows[0], *rows[2:])
    if sizes.dims_of(labels) == shape:
        return labels
    users = traversal.users(labels)
    with nodes_before(op, next(node for node in op.graph if node in users)):
        retyped = op.node("", "Identity", (labels,), {}, types=[TensorType(dtype_of(labels), shape)]).outputs[0]
    n.node.replace_input_with(1, retyped)
    for _, masked in sums:
        where = masked.producer()
        assert where is not None
        equal = where.inputs[0]
        assert equal is not None
        for user in traversal.users(labels):
            if user is equal.producer():
                user.replace_input_with(0, retyped)
        for value in (equal, masked):
            set_type(value, TensorType(dtype_of(value), shape))
    return retyped


def _masked_sums(n: NodeView) -> list[tuple[ir.Node, ir.Value]]:
    """Return sums over all tokens of values masked by ignored labels, with these values: label smoothing has one."""
    ignore_index = constant_of(n.ignore_index)
    sums: list[tuple[ir.Node, ir.Value]] = []
    for equal in traversal.users(n.labels):
        other = constant_of(equal.inputs[1]) if definition_of(equal) is EQUAL else None
        if other is None or other.size != 1 or ignore_index is None or other.item() != ignore_index.item():
            continue
        for where in traversal.users(equal.outputs[0]):
            zero = constant_of(where.inputs[1]) if definition_of(where) is WHERE else None
            if where.inputs[0] is equal.outputs[0] and zero is not None and not zero.any():
                sums += [(node, where.outputs[0]) for node in traversal.users(where.outputs[0]) if _is_full_sum(node)]
    return sums


def _is_full_sum(node: ir.Node) -> bool:
    return definition_of(node) is REDUCE_SUM and not sizes.dims_of(node.outputs[0])
