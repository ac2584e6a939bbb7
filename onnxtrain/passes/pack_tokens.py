"""Lets tokens flow without padding: [tokens, ..] instead of [batch, steps, ..].

    before   attention(q[b, h, s, e], k, v, mask)  between ops that work on each token by itself
    after    VarlenAttention(q[t, h, e], k, v, cu) between the same ops on [1, t, ..]

Tokens come from an embedding of numbers [batch, steps] and are kept where somebody reads them: a loss with a label, a
product with a mask that is not 0, attention that a mask or its causal triangle shows them to. Nothing but attention
mixes tokens in between, so that is all that has to be shown; which number stands for padding does not matter.

    plan = plan_packing(graph, changes)       static: which nodes run packed, who reads what behind them; refusals
    plan.questions                            the values that show whether a batch is as assumed
    plan.apply(causal, fills)                 the graph takes `rows` and `cu` as further inputs, and maybe `cu_filled`

Who reads rows behind the packed nodes is a `Reader`: a slice of the sequence, rows that are picked, a product with a
mask that is 0 elsewhere, a choice. The rows that it reads are kept in each batch, and the columns that attention shows
to them; masks must hide just the tokens that are not (`execute.packing` asks). A batch where that is not so runs
unpacked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir

from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import TensorType, constant_of, dtype_of, is_float, rank_of, set_type
from onnxtrain.ops import builder, definition_of, view
from onnxtrain.ops.attention.dense import ATTENTION, ATTENTION_DROPOUT
from onnxtrain.ops.attention.flash import FLASH_ATTENTION
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.elementwise.arithmetic import MUL
from onnxtrain.ops.elementwise.selection import WHERE
from onnxtrain.ops.index.gather import EMBEDDING, GATHER
from onnxtrain.ops.index.subscript import INDEX
from onnxtrain.ops.index.tokens import FLATTEN_AND_UNPAD
from onnxtrain.ops.reshape.dims import expanded, inverse, squeezed, transposed, unsqueezed
from onnxtrain.ops.reshape.rows import counting, to_front
from onnxtrain.ops.reshape.shape import reshaped
from onnxtrain.ops.reshape.slicing import SLICE
from onnxtrain.ops.symbolic import held_sizes
from onnxtrain.passes.attention_masks import Mask, added_to_scores, is_made_of_data, mask_of
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before
from onnxtrain.passes.rowwise import Axes, NotRowwise, Rows
from onnxtrain.passes.selected_rows import Plan, Region, Walk, compute_selected
from onnxtrain.passes.skip_ignored_labels import TokenRows

_ATTENTIONS = (ATTENTION, ATTENTION_DROPOUT, FLASH_ATTENTION)
_OF_HEADS = (0, 2)  # batch and steps of q, k, v and y
_OF_TOKENS = (0, 1)  # batch and steps of most else


@dataclass(frozen=True)
class Reader:
    """What reads some rows of a packed value.

    Attributes:
        node, index: the node, and which of its inputs, of so many axes (`rank`).
        kind: "slice" of steps, "rows" picked by their numbers, "places" picked by numbers of sequences and of steps,
            or "mask": those where it is not 0, or is 0 if `negated`.
        values: the rows, the two numbers, or the mask.
        axes: where it has batch and steps.
        steps: start, end and step of a slice.
    """

    node: ir.Node
    index: int
    kind: Literal["slice", "rows", "places", "mask"]
    rank: int
    axes: Axes
    values: tuple[ir.Value, ...] = ()
    steps: tuple[int, ...] = ()
    negated: bool = False


@dataclass
class PackingPlan:
    """Which nodes run on packed tokens.

    Attributes:
        graph: the forward graph.
        batch, steps: the sizes of what is padded.
        region: the nodes that run packed, attention among them.
        attentions: those whose queries are packed.
        few_queries: attentions with few queries for each sequence.
        masks, readers: what must hold of a batch.
    """

    graph: ir.Graph
    batch: Size
    steps: Size
    region: Region
    attentions: list[ir.Node]
    few_queries: list[ir.Node]
    masks: list[Mask]
    readers: list[Reader]

    def questions(self) -> ir.Graph:
        """A graph that gives the values of all masks, then of the readers that have one."""
        masks = [m.value for m in self.masks if m.value is not None]
        return traversal.extract(self.graph, [*masks, *(value for r in self.readers for value in r.values)])

    def apply(self, causal: bool, fills: bool = False) -> None:
        """Packs: the graph gets the inputs `rows`, the numbers of the kept tokens, and `cu`, where sequences begin.

        Where `fills`, rows that nobody reads may follow, and the input `cu_filled` counts them to the last sequence.
        """
        op = builder(self.graph)
        selection = _with_inputs(self, fills)
        kept = {(r.node, r.index): (r.axes, type_of_input(r.node, r.index)) for r in self.readers}
        packed: dict[ir.Node, _Packed] = {
            node: _Packed(node, selection, self.steps, causal) for node in self.attentions
        }
        compute_selected(op, self.region, selection, packed)
        for node in self.few_queries:
            _attend_with_few(op, node, selection, self.region)
        dims = (self.batch, self.steps)
        for (node, index), (axes, wanted) in kept.items():
            value = node.inputs[index]
            assert value is not None
            if selection.count not in sizes.dims_of(value):
                continue  # its producer does not run packed
            with nodes_before(op, node):
                perm = to_front(rank_of(value), axes)
                rows = squeezed(op, transposed(op, value, perm), 0)
                whole = op.ms.PadAndUnflatten(rows, selection.rows, op.sizes(dims))
                whole = transposed(op, whole, inverse(perm))
                set_type(whole, wanted)
                node.replace_input_with(index, whole)
        traversal.sort(self.graph)


def type_of_input(node: ir.Node, index: int) -> TensorType:
    value = node.inputs[index]
    assert value is not None
    return TensorType(dtype_of(value), sizes.dims_of(value))


# What can be packed


def plan_packing(graph: ir.Graph, changes: Changes) -> PackingPlan | None:
    """Finds what can run on packed tokens; None where that is nothing. `graph` is not changed."""
    attentions = [node for node in graph if _hides_tokens(node)]
    embeddings = sorted(filter(_embeds_tokens, graph), key=lambda node: getattr(view(node), "padding_idx", -1) < 0)
    tokens = _tokens(graph, attentions, embeddings)
    if tokens is None:
        _refuse_draws(graph, changes)
        return None
    finder = _Finder(graph, *tokens, attentions)
    finder.walk()
    for at, reason in finder.ends.items():
        if any(is_float(dtype_of(v)) for v in at.outputs):
            changes.refuse(at, reason)
    region = finder.rows.region(graph)
    if not attentions and not _pays(region, embeddings):
        if not finder.ends:
            changes.refuse(embeddings[0], finder.why_read(embeddings[0].outputs[0]))
        _refuse_draws(graph, changes)
        return None
    if attentions and (finder.refused or not finder.packed):
        return None
    masks = list(dict.fromkeys(mask_of(node, node in finder.packed) for node in (*finder.packed, *finder.few)))
    changes.applied.append(
        f"{len(region.nodes)} nodes can run without padding, of them {len(finder.packed)} of attention"
    )
    inside = {v for node in region.nodes for v in node.outputs}
    readers = [r for r in finder.readers if r.node.inputs[r.index] in inside]
    return PackingPlan(graph, finder.batch, finder.steps, region, finder.packed, finder.few, masks, readers)


def _hides_tokens(node: ir.Node) -> bool:
    """Whether it is attention that need not read all tokens: a mask hides some, or those that come later."""
    n = view(node)
    return n.definition in _ATTENTIONS and (n.mask is not None or bool(getattr(n, "is_causal", 0)))


def _embeds_tokens(node: ir.Node) -> bool:
    """Whether it looks up a vector for each of the numbers [batch, steps]."""
    n = view(node)
    if n.definition not in (GATHER, EMBEDDING) or rank_of(n.rows) != 2 or not is_made_of_data(n.rows):
        return False
    of_rows = n.definition is EMBEDDING or n.axis == 0
    return of_rows and rank_of(node.outputs[0]) == 3 and is_float(dtype_of(node.outputs[0]))


def _tokens(graph: ir.Graph, attentions: Sequence[ir.Node], embeddings: Sequence[ir.Node]) -> tuple[Size, Size] | None:
    """(batch, steps) of what may be padded: the keys of the first attention, or what is looked up first.

    None where rows were picked already: one of each sequence, or as many as only the run can tell.
    """
    if attentions:
        batch, _, steps, _ = sizes.dims_of(view(attentions[0]).k)
    elif embeddings:
        batch, steps, _ = sizes.dims_of(embeddings[0].outputs[0])
        if 1 in (batch, steps):
            return None
    else:
        return None
    known = frozenset[str]().union(*(sizes.symbols(size) for v in graph.inputs for size in sizes.dims_of(v)))
    return (batch, steps) if sizes.symbols(batch) | sizes.symbols(steps) <= known else None


def _pays(region: Region, embeddings: Sequence[ir.Node]) -> bool:
    """Whether tokens are packed from where they are looked up, and multiplied with matrices on their way."""
    return region.has_products() and not set(region.nodes).isdisjoint(embeddings)


def _refuse_draws(graph: ir.Graph, changes: Changes) -> None:
    drawn = next((node for node in graph if node.metadata_props.get("draws") == "eager's"), None)
    if drawn is not None:
        changes.refuse(drawn, 'it draws the random numbers that eager PyTorch draws (rng="torch")')


@dataclass
class _Finder:
    """Walks from the last node to the first."""

    graph: ir.Graph
    batch: Size
    steps: Size
    attentions: list[ir.Node]
    rows: Walk = field(default_factory=lambda: Walk({}, set(), set()))
    packed: list[ir.Node] = field(default_factory=list)
    few: list[ir.Node] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    ends: dict[ir.Node, str] = field(default_factory=dict)
    refused: bool = False

    def walk(self) -> None:
        for node in reversed(self.graph):
            try:
                if node in self.attentions:
                    self._attention(node)
                    continue
                wanted = {v: self.rows.axes[v] for v in node.outputs if v in self.rows.axes}
                if wanted and definition_of(node) in _ATTENTIONS:
                    raise NotRowwise("it reads padding too: it has no mask, and is not causal")
                if wanted:
                    self.rows.visit(node, wanted)
            except NotRowwise as end:
                self.ends[node] = end.reason
                self.refused = self.refused or (node in self.attentions and self._is_of_these(node))
            if node not in self.rows.inside:
                self._reader(node)
        self.packed.reverse()

    def _attention(self, node: ir.Node) -> None:
        n = view(node)
        if not self._is_of_these(node):
            raise NotRowwise("its keys are other tokens than those of the first attention")
        table = added_to_scores(node).table
        if any(traversal.is_used(v) for v in node.outputs[1:]):
            raise NotRowwise("its probabilities are read")
        if definition_of(node) is ATTENTION_DROPOUT and node.metadata_props.get("draws") != "any":
            raise NotRowwise('its dropout draws the random numbers that eager PyTorch draws (rng="torch")')
        rows = sizes.dims_of(n.q)[2]
        y = node.outputs[0]
        if rows == self.steps and self.rows.axes.get(y) == _OF_HEADS:
            self.rows.check_read_by_rows(y)
            self._reads(node, (0, 1, 2))
            self.rows.inside.add(node)
            self.packed.append(node)
        elif rows == self.steps:
            raise NotRowwise(self.why_read(y))
        elif table is not None:
            raise NotRowwise(f"a bias {table.name} is added to the scores of other tokens than its keys")
        elif getattr(n, "is_causal", 0):
            raise NotRowwise("it is causal, and its queries are other tokens than its keys")
        else:
            self._reads(node, (1, 2))
            self.few.append(node)

    def _is_of_these(self, node: ir.Node) -> bool:
        """Whether the keys of an attention are the tokens that are packed."""
        shape = sizes.dims_of(view(node).k)
        return (shape[0], shape[2]) == (self.batch, self.steps)

    def why_read(self, value: ir.Value) -> str:
        """That padding is read, and who reads all rows behind a value, in words."""
        return f"padding is read too: {self._reader_of_all(value)}"

    def _reader_of_all(self, value: ir.Value) -> str:
        waiting, seen = [value], {value}
        stop = f"nothing reads {value.name}"
        while waiting:
            value = waiting.pop(0)
            if value.is_graph_output():
                return f"{value.name} is an output of the module: keep_outputs can name those that are read"
            for node, index in value.uses():
                if (node, index) in self.rows.uses:
                    continue
                stop = self.ends.get(node, stop)
                behind = [v for v in node.outputs if self._holds_tokens(v) and (v.uses() or v.is_graph_output())]
                if not behind:
                    return f"{node.op_type} {node.name!r} needs all rows of {value.name}"
                waiting += [v for v in behind if v not in seen]
                seen.update(behind)
        return stop

    def _holds_tokens(self, value: ir.Value) -> bool:
        shape = sizes.dims_of(value)
        return {self.batch, self.steps} <= set(shape) or sizes.multiply(self.batch, self.steps) in shape

    def _reads(self, node: ir.Node, indices: Collection[int]) -> None:
        for index in indices:
            value = node.inputs[index]
            assert value is not None
            if self.rows.axes.setdefault(value, _OF_HEADS) == _OF_HEADS:
                self.rows.uses.add((node, index))

    def _reader(self, node: ir.Node) -> None:
        """Notes a node that reads some rows of tokens."""
        reader = self._found(node)
        if reader is None:
            return
        value = node.inputs[reader.index]
        assert value is not None
        if self.rows.axes.setdefault(value, reader.axes) == reader.axes:
            self.rows.uses.add((node, reader.index))
            self.readers.append(reader)

    def _found(self, node: ir.Node) -> Reader | None:
        n = view(node)
        if n.definition in (SLICE, FLATTEN_AND_UNPAD, INDEX):
            axes = self._axes_of_tokens(n.x)
            return None if axes is None else _picked(n, axes)
        if n.definition is MUL:
            return self._masked(node, 0, node.inputs[1]) or self._masked(node, 1, node.inputs[0])
        if n.definition is WHERE:
            for index in (1, 2):
                if constant_of(node.inputs[3 - index]) is not None:
                    return self._masked(node, index, node.inputs[0], negated=index == 2)
        return None

    def _masked(self, node: ir.Node, index: int, mask: ir.Value | None, negated: bool = False) -> Reader | None:
        x = node.inputs[index]
        axes = self._axes_of_tokens(x)
        if mask is None or x is None or axes is None or sizes.dims_of(node.outputs[0]) != sizes.dims_of(x):
            return None
        if rank_of(mask) < 2 or not is_made_of_data(mask):
            return None
        return Reader(node, index, "mask", rank_of(x), axes, (mask,), negated=negated)

    def _axes_of_tokens(self, value: ir.Value | None) -> Axes | None:
        """Where a value has batch and steps; None where it holds no tokens."""
        if value is None or value.producer() is None or not is_float(dtype_of(value)):
            return None
        if rank_of(value) == 2 and is_made_of_data(value):
            return None  # of a number for each token only what a model computes: a mask is one too
        shape = sizes.dims_of(value)
        if shape[:2] == (self.batch, self.steps):
            return _OF_TOKENS
        if shape.count(self.batch) != 1 or shape.count(self.steps) != 1:
            return None
        return shape.index(self.batch), shape.index(self.steps)


def _picked(n: NodeView, axes: Axes) -> Reader | None:
    """What picks steps by a slice, or tokens by their numbers."""
    if n.definition is SLICE:
        return _slice(n, axes)
    values = (n.rows,) if n.definition is FLATTEN_AND_UNPAD else tuple(n.indices)
    if axes != _OF_TOKENS or (n.definition is INDEX and n.at != (0, 1)) or not all(map(is_made_of_data, values)):
        return None
    return Reader(n.node, 0, "rows" if n.definition is FLATTEN_AND_UNPAD else "places", rank_of(n.x), axes, values)


def _slice(n: NodeView, tokens: Axes) -> Reader | None:
    axes, steps = constant_of(n.axes), constant_of(n.steps) if n.steps is not None else None
    starts, ends = held_sizes(n.starts), held_sizes(n.ends)
    if axes is None or axes.tolist() != [tokens[1]] or starts is None or ends is None:
        return None
    if not isinstance(starts[0], int) or not isinstance(ends[0], int):
        return None
    by = 1 if steps is None else int(steps[0])
    return Reader(n.node, 0, "slice", rank_of(n.x), tokens, steps=(starts[0], ends[0], by))


# Packing


@dataclass
class _TokenRows(TokenRows):
    """The kept tokens, and where each sequence begins among them: of keys, and of queries with those that fill up."""

    cu: ir.Value
    cu_filled: ir.Value


def _with_inputs(plan: PackingPlan, fills: bool) -> _TokenRows:
    graph = plan.graph
    taken = {str(size) for v in graph.inputs for size in sizes.dims_of(v)} | {v.name for v in graph.inputs}
    names = ["tokens", "rows", "cu", *["cu_filled"] * fills]
    while taken & set(names):
        names = [f"{name}_" for name in names]
    rows, cu, *filled = (ir.Value(name=name) for name in names[1:])
    set_type(rows, TensorType(ir.DataType.INT64, (names[0],)))
    for value in (cu, *filled):
        set_type(value, TensorType(ir.DataType.INT64, (sizes.add(plan.batch, 1),)))
    graph.inputs.extend([rows, cu, *filled])
    return _TokenRows(rows, cu, *filled or [cu])


def _by_token(op: Builder, x: ir.Value) -> ir.Value:
    """x[1, h, t, e] as [t, h, e]."""
    return squeezed(op, transposed(op, x, [0, 2, 1, 3]), 0)


def _varlen(
    op: Builder,
    n: NodeView,
    operands: list[ir.Value],
    cu_q: ir.Value,
    cu_k: ir.Value,
    causal: bool,
    table: ir.Value | None = None,
) -> ir.Value:
    how = {"scale": n.scale, "is_causal": int(causal) or None}
    result: ir.Value
    if n.definition is not ATTENTION_DROPOUT:
        result = op.own.VarlenAttention(*operands, cu_q, cu_k, table, **how)[0]
        return result
    outputs = op.own.VarlenAttentionDropout(*operands, cu_q, cu_k, table, n.ratio, n.training_mode, **how)
    result = outputs[0]
    node = result.producer()
    assert node is not None
    node.metadata_props.update((key, n.node.metadata_props[key]) for key in ("rng", "draws"))
    return result


@dataclass
class _Packed:
    """Attention whose queries and keys are the kept tokens."""

    node: ir.Node
    selection: _TokenRows
    steps: Size
    causal: bool

    def plan(self, region: Region) -> Plan:
        needed: list[Rows | None] = [None] * len(self.node.inputs)
        needed[:3] = [Rows(_OF_HEADS)] * 3
        return needed, {self.node.outputs[0]: _OF_HEADS}

    def replace(self, op: Builder) -> Collection[ir.Value]:
        n, filled = view(self.node), self.selection.cu_filled
        # What comes last is seen by no earlier row of causal attention, which flash attention has for one `cu` only.
        keys = filled if self.causal else self.selection.cu
        with nodes_before(op, self.node):
            operands = [_by_token(op, x) for x in (n.q, n.k, n.v)]
            packed = _varlen(op, n, operands, filled, keys, self.causal, self._table(op, n))
            y = transposed(op, unsqueezed(op, packed, 0), [0, 2, 1, 3])
        traversal.replace(op.graph, self.node.outputs[0], y)
        op.graph.remove(self.node, safe=True)
        return (y,)

    def _table(self, op: Builder, n: NodeView) -> ir.Value | None:
        """The biases [heads, steps, steps] that are added to the scores of each sequence."""
        table = added_to_scores(self.node).table
        if table is None:
            return None
        extra = 3 - rank_of(table)
        table = squeezed(op, table, 0) if extra < 0 else unsqueezed(op, table, *range(extra))
        return expanded(op, table, (sizes.dims_of(table)[0], self.steps, self.steps))


def _attend_with_few(op: Builder, node: ir.Node, selection: _TokenRows, region: Region) -> None:
    """Attention of the same few queries of each sequence to its kept tokens."""
    n = view(node)
    batch, heads, few, width = sizes.dims_of(n.q)
    with nodes_before(op, node):
        keys = [x if sizes.dims_of(x)[0] == 1 and sizes.dims_of(x)[2] == selection.count else None for x in (n.k, n.v)]
        k, v = (
            _by_token(op, x if x is not None else selection.of(op, whole, _OF_HEADS))
            for x, whole in zip(keys, (n.k, n.v), strict=True)
        )
        queries = reshaped(op, transposed(op, n.q, [0, 2, 1, 3]), (sizes.multiply(batch, few), heads, width))
        cu_q = counting(op, sizes.add(batch, 1))
        if few != 1:
            cu_q = op.Mul(cu_q, op.size(few))
        packed = _varlen(op, n, [queries, k, v], cu_q, selection.cu, causal=False)
        shape: Sizes = (batch, few, heads, sizes.dims_of(packed)[2])
        y = transposed(op, reshaped(op, packed, shape), [0, 2, 1, 3])
    traversal.replace(op.graph, node.outputs[0], y)
    op.graph.remove(node, safe=True)
