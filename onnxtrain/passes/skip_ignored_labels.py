"""Computes scores for those tokens only whose label counts.

    before   loss = CrossEntropy(Linear(Gelu(x[b*s, h])), labels)
    after    rows = NonZero(labels != ignore_index);  loss = CrossEntropy(Linear(Gelu(x[rows])), labels[rows])

A masked language model is asked for 15 % of its tokens. What stands between the last op that mixes tokens and the loss
runs on their rows: the scores of the vocabulary above all. Sum and mean, class weights and label smoothing are the same
over these rows: an ignored one adds 0 to the loss and to what the mean divides by. With no label at all the mean is NaN
as before.

Scores that are shifted by hand, `scores[:, :-1]`, stay whole, and what was cut off gets a label that is ignored: so
their rows are those of the tokens before them.

Refuses where scores or log probabilities are read by others (an output of the module is), and where nothing is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, constant_of, dtype_of, rank_of, set_type
from onnxtrain.ops import builder, view
from onnxtrain.ops.constructors import cast
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.index.subscript import true_places
from onnxtrain.ops.loss.cross_entropy import CROSS_ENTROPY, NEGATIVE_LOG_LIKELIHOOD
from onnxtrain.ops.reshape.dims import expanded
from onnxtrain.ops.reshape.join import concatenated
from onnxtrain.ops.reshape.shape import reshaped
from onnxtrain.ops.reshape.slicing import SLICE
from onnxtrain.ops.symbolic import held_sizes
from onnxtrain.passes.changes import Changes, stopped
from onnxtrain.passes.rewriting import nodes_before, only_user
from onnxtrain.passes.rowwise import Axes
from onnxtrain.passes.selected_rows import Selection, Use, compute_selected, region_before


def skip_ignored_labels(graph: ir.Graph, changes: Changes) -> None:
    """Lets the ops before each loss of `graph` skip the tokens that it ignores."""
    op = builder(graph)
    for node in list(graph):
        n = view(node)
        if n.definition not in (CROSS_ENTROPY, NEGATIVE_LOG_LIKELIHOOD):
            continue
        reason = _why_not(n)
        if reason:
            changes.refuse(node, reason)
            continue
        cut = _cut_steps(n)
        if cut is not None and region_before(graph, {cut.x: (0, 1)}, [(cut.node, 0)], (n.labels,)).has_products():
            _ignore_instead(op, n, cut)
            changes.applied.append(f"{node.name} ignores the steps that {cut.node.name} cuts off")
        _skip(op, n, changes)


def _why_not(n: NodeView) -> str:
    if n.reduction == "none":
        return "its loss is not reduced: there is one for each token, also for those that are ignored"
    if n.ignore_index is None or n.ignore_index.const_value is None:
        return "it ignores no label that is known before the graph runs"
    if n.definition is CROSS_ENTROPY and traversal.is_used(n.log_prob):
        return f"its log probabilities {n.log_prob.name} are read"
    return ""


def _cut_steps(n: NodeView) -> NodeView | None:
    """The slice of steps that gives the scores, which nobody else reads and which are rows of tokens then."""
    scores = value = n.node.inputs[0]
    reader = n.node
    assert scores is not None
    if rank_of(scores) != 2 or rank_of(n.labels) != 1:
        return None
    while value is not None and only_user(value) is reader:
        producer = value.producer()
        if producer is None:
            return None
        at = view(producer)
        if at.definition is SLICE:
            return at if _is_of_steps(at, scores) else None
        source = producer.inputs[0]
        widens = source is not None and dtype_of(source).itemsize <= dtype_of(value).itemsize
        if not at.definition.same_elements or not widens:
            return None
        value, reader = source, producer
    return None


def _is_of_steps(cut: NodeView, scores: ir.Value) -> bool:
    """Whether the scores are the rows of a slice of neighbouring steps of [batch, steps, classes]."""
    axes, by = constant_of(cut.axes), None if cut.steps is None else constant_of(cut.steps)
    starts = held_sizes(cut.starts)
    if rank_of(cut.x) != 3 or axes is None or axes.tolist() != [1] or starts is None:
        return False
    batch, kept, classes = sizes.dims_of(cut.node.outputs[0])
    in_order = cut.steps is None or (by is not None and by.tolist() == [1])
    if not in_order or sizes.dims_of(scores) != (sizes.multiply(batch, kept), classes):
        return False
    start = starts[0]
    if start == 0:
        return True
    after = sizes.subtract(sizes.dims_of(cut.x)[1], sizes.add(start, kept))
    # Else a start behind the last step could leave less than nothing.
    return isinstance(start, int) and start > 0 and isinstance(after, int) and after >= 0


def _ignore_instead(op: Builder, n: NodeView, cut: NodeView) -> None:
    """Gives the loss the scores before the cut, and ignored labels for what was cut off."""
    scores, labels, x = n.node.inputs[0], n.labels, cut.x
    assert scores is not None
    batch, steps, classes = sizes.dims_of(x)
    kept = sizes.dims_of(cut.node.outputs[0])[1]
    (start,) = held_sizes(cut.starts) or ()
    after = sizes.subtract(steps, sizes.add(start, kept))
    with nodes_before(op, n.node):
        whole = reshaped(op, cast(op, x, dtype_of(scores)), (sizes.multiply(batch, steps), classes))
        ignored = reshaped(op, cast(op, n.ignore_index, dtype_of(labels)), (1, 1))
        as_scores = TensorType(dtype_of(labels), sizes.dims_of(scores)[:1])
        given = op.node("", "Identity", (labels,), {}, types=[as_scores]).outputs[0]
        before, behind = (expanded(op, ignored, (batch, size)) for size in (start, after))
        joined = concatenated(op, [before, reshaped(op, given, (batch, kept)), behind], 1)
        joined = reshaped(op, joined, (sizes.multiply(batch, steps),))
    n.node.replace_input_with(0, whole)
    n.node.replace_input_with(1, joined)
    unread = scores.producer()
    while unread is not None and unread.outputs[0] is not x:  # who reads no more must not be counted
        read = unread.inputs[0]
        op.graph.remove(unread, safe=True)
        unread = None if read is None else read.producer()
    for output, type_ in zip(n.node.outputs, n.definition.output_types(n.node), strict=True):
        set_type(output, type_)


@dataclass
class TokenRows(Selection):
    """Rows of tokens, by their numbers in [0, batch * steps)."""

    rows: ir.Value

    def __post_init__(self) -> None:
        self.reads = (self.rows,)
        self.count = sizes.dims_of(self.rows)[0]

    def along(self, op: Builder, value: ir.Value, axis: int) -> ir.Value:
        result: ir.Value = op.ms.ShrunkenGather(value, self.rows, axis=axis)
        return result

    def over(self, op: Builder, value: ir.Value) -> ir.Value:
        result: ir.Value = op.ms.FlattenAndUnpad(value, self.rows)[0]
        return result


def _skip(op: Builder, n: NodeView, changes: Changes) -> None:
    loss, labels = n.node, n.labels
    scores = n.node.inputs[0]
    assert scores is not None
    if rank_of(labels) > 2:
        changes.refuse(loss, "its labels have more than two axes")
        return
    of_labels: Axes = tuple(range(rank_of(labels)))
    sums = _other_sums(n)
    labels = _sized_as_scores(op, n, scores, sums)
    seeds = {scores: (0,) if len(of_labels) == 1 else (0, 2), labels: of_labels}
    seeds.update({value: of_labels for _, value in sums})
    uses: list[Use] = [(loss, 0), (loss, 1), *((node, 0) for node, _ in sums)]
    region = region_before(op.graph, seeds, uses, (labels,))
    for at, reason in region.ends.items():
        if at is not labels.producer():
            changes.refuse(loss, stopped(at, reason))
    if not region.has_products():
        return
    if not any(len(axes) == 2 for axes in region.axes.values()):
        changes.refuse(loss, "its rows are not the tokens of sequences: few of them can be expected to be ignored")
        return
    with nodes_before(op, loss):
        kept = op.Not(op.Equal(labels, n.ignore_index))
        (rows,) = true_places(op, reshaped(op, kept, (sizes.multiply(*sizes.dims_of(labels)),)), None)
    selection = TokenRows(rows)
    compute_selected(op, region, selection)
    for node, index in uses:
        value = node.inputs[index]
        if value is not None and value.producer() not in region.nodes:
            with nodes_before(op, node):
                node.replace_input_with(index, selection.of(op, value, seeds[value]))
    for output, type_ in zip(loss.outputs, n.definition.output_types(loss), strict=True):
        set_type(output, type_)
    changes.applied.append(f"{len(region.nodes)} nodes before {loss.name} skip tokens whose label is ignored")


def _sized_as_scores(op: Builder, n: NodeView, scores: ir.Value, sums: Sequence[tuple[ir.Node, ir.Value]]) -> ir.Value:
    """The labels, and what else is read with them, under the sizes of the scores: the loss takes as many of both."""
    labels: ir.Value = n.labels
    rows = sizes.dims_of(scores)
    shape = (rows[0], *rows[2:])
    if sizes.dims_of(labels) == shape:
        return labels
    readers = traversal.users(labels)
    with nodes_before(op, next(node for node in op.graph if node in readers)):
        same = op.node("", "Identity", (labels,), {}, types=[TensorType(dtype_of(labels), shape)]).outputs[0]
    n.node.replace_input_with(1, same)
    for _, zeroed in sums:
        where = zeroed.producer()
        assert where is not None
        equal = where.inputs[0]
        assert equal is not None
        for user in traversal.users(labels):
            if user is equal.producer():
                user.replace_input_with(0, same)
        for value in (equal, zeroed):
            set_type(value, TensorType(dtype_of(value), shape))
    return same


def _other_sums(n: NodeView) -> list[tuple[ir.Node, ir.Value]]:
    """Sums over all tokens of what is 0 where the label is ignored, and what they sum: label smoothing has one."""
    ignored = constant_of(n.ignore_index)
    found: list[tuple[ir.Node, ir.Value]] = []
    for equal in traversal.users(n.labels):
        other = constant_of(equal.inputs[1]) if equal.op_type == "Equal" else None
        if other is None or other.size != 1 or ignored is None or other.item() != ignored.item():
            continue
        for where in traversal.users(equal.outputs[0]):
            zero = constant_of(where.inputs[1]) if where.op_type == "Where" else None
            if where.inputs[0] is equal.outputs[0] and zero is not None and not zero.any():
                found += [(node, where.outputs[0]) for node in traversal.users(where.outputs[0]) if _sums_all(node)]
    return found


def _sums_all(node: ir.Node) -> bool:
    return node.op_type == "ReduceSum" and not sizes.dims_of(node.outputs[0])
