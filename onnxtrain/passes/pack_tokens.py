"""Run token-wise ops without padding: on [tokens, ..] instead of [batch, steps, ..].

    before   attention(q[b, h, s, e], k, v, mask)  between token-wise ops
    after    VarlenAttention(q[t, h, e], k, v, cu) between the same ops on [1, t, ..]

Tokens come from an embedding of ids [batch, steps]. Those are kept that are used: by a loss with a label, by a product
with a nonzero mask value, or by attention if the mask (or causality) shows them to a kept token. Only attention mixes
tokens in between, which is all that must be proven; the id of the padding token does not matter.

    plan = plan_packing(graph, changes)       static: which nodes run packed, who reads their results; refusals
    plan.questions()                          a graph of the values that decide whether a batch can be packed
    plan.apply(causal, fills, device)         adds the graph inputs `rows` and `cu`, and `cu_filled` if needed

A `Reader` uses some rows of the packed nodes' results: a slice of the sequence, selected rows, a product with a mask, a
Where, a loss that ignores labels. In each batch the rows that it reads are kept, with the columns that attention shows
to them; masks must hide exactly the other tokens, which `execute.packing` checks. A batch for which that fails runs
unpacked.

A result of the module that holds tokens has zeros in padding. All tokens that a mask shows to any other are kept then.
Whether the user reads the padding of a result is not known here: `execute.padding_reads` finds out.
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
from onnxtrain.ops.attention.varlen_flash import flash_runs
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.elementwise.arithmetic import MUL
from onnxtrain.ops.elementwise.copies import IDENTITY
from onnxtrain.ops.elementwise.selection import WHERE
from onnxtrain.ops.index.advanced_indexing import INDEX
from onnxtrain.ops.index.gather import EMBEDDING, GATHER
from onnxtrain.ops.index.unpadding import FLATTEN_AND_UNPAD
from onnxtrain.ops.loss.cross_entropy import CROSS_ENTROPY, NEGATIVE_LOG_LIKELIHOOD
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS
from onnxtrain.ops.random.keyed_dropout import drop_count
from onnxtrain.ops.reshape.dims import expanded, inverse, squeezed, transposed, unsqueezed
from onnxtrain.ops.reshape.rows import arange, permutation_to_front
from onnxtrain.ops.reshape.slicing import SLICE
from onnxtrain.ops.symbolic_ints import known_ints
from onnxtrain.passes.attention_masks import Mask, depends_on_data_only, mask_of, split_mask
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before
from onnxtrain.passes.rowwise import Axes, NotRowwise, Rows
from onnxtrain.passes.selected_rows import Plan, Region, Walk, compute_selected
from onnxtrain.passes.skip_ignored_labels import TokenRows, loss_obstacle

_ATTENTIONS = (ATTENTION, ATTENTION_DROPOUT, FLASH_ATTENTION)
_HEAD_AXES = (0, 2)  # batch and steps of q, k, v and y
_TOKEN_AXES = (0, 1)  # batch and steps of most other values


@dataclass(frozen=True)
class Reader:
    """A user of some rows of a packed value.

    Attributes:
        node: the node.
        index: the index of its input.
        kind: how the rows are selected: "slice" of steps, "rows" by index, "positions" by sequence and step indices,
            "mask": where a mask is nonzero (zero if `negated`), "loss": where a label is not `ignore_index`, or
            "result": by the user of the module.
        rank: the rank of the input.
        values: the row indices, the sequence and step indices, the mask, or the labels.
        axes: the axes of the input along which tokens are numbered.
        steps: start, end and step of a slice.
    """

    node: ir.Node
    index: int
    kind: Literal["slice", "rows", "positions", "mask", "loss", "result"]
    rank: int
    axes: Axes
    values: tuple[ir.Value, ...] = ()
    steps: tuple[int, ...] = ()
    negated: bool = False
    ignore_index: int = 0


@dataclass
class PackingPlan:
    """The nodes that run on packed tokens.

    Attributes:
        graph: the forward graph.
        batch: the batch dimension of the padded values.
        steps: their step dimension.
        region: the nodes that run packed, including attention.
        attentions: the attention nodes whose queries are packed.
        few_queries: attention nodes with other queries, a few per sequence.
        masks: the masks of these attention nodes.
        readers: the users of the packed values.
    """

    graph: ir.Graph
    batch: Size
    steps: Size
    region: Region
    attentions: list[ir.Node]
    few_queries: list[ir.Node]
    masks: list[Mask]
    readers: list[Reader]

    def results(self) -> dict[int, Axes]:
        """Return the outputs of the graph that have zeros in padding, with their batch and step axes."""
        axes = {reader.node.outputs[0]: reader.axes for reader in self.readers if reader.kind == "result"}
        return {index: axes[value] for index, value in enumerate(self.graph.outputs) if value in axes}

    def questions(self) -> ir.Graph:
        """Return a graph that computes the values of all masks, then the values of the readers."""
        masks = [m.value for m in self.masks if m.value is not None]
        return traversal.extract(self.graph, [*masks, *(value for r in self.readers for value in r.values)])

    def apply(self, causal: bool, fills: bool, device: str) -> None:
        """Pack the graph, which gets the inputs `rows`, the indices of the kept tokens, and `cu`, the sequence offsets.

        With `fills`, unused rows may follow the tokens, and the input `cu_filled` counts them to the last sequence.
        `device` is the type of the device that the graph runs on.
        """
        op = builder(self.graph)
        selection = _add_inputs(self, fills)
        read = {(r.node, r.index): (r.axes, type_of_input(r.node, r.index)) for r in self.readers}
        packed: dict[ir.Node, _PackedAttention] = {
            node: _PackedAttention(node, selection, self.steps, causal, device) for node in self.attentions
        }
        compute_selected(op, self.region, selection, packed)
        for node in self.few_queries:
            _attend_with_few_queries(op, node, selection, device)
        dims = (self.batch, self.steps)
        losses = {reader.node for reader in self.readers if reader.kind == "loss"}
        for (node, index), (axes, padded_type) in read.items():
            value = node.inputs[index]
            assert value is not None
            if selection.count not in sizes.dims_of(value):
                continue  # its producer does not run packed
            if node in losses:
                _select_labels(op, node, selection)
                continue
            with nodes_before(op, node):
                perm = permutation_to_front(rank_of(value), axes)
                rows = squeezed(op, transposed(op, value, perm), 0)
                padded = op.ms.PadAndUnflatten(rows, selection.rows, op.sizes(dims))
                padded = transposed(op, padded, inverse(perm))
                set_type(padded, padded_type)
                node.replace_input_with(index, padded)
        traversal.sort(self.graph)


def type_of_input(node: ir.Node, index: int) -> TensorType:
    value = node.inputs[index]
    assert value is not None
    return TensorType(dtype_of(value), sizes.dims_of(value))


# Finding what can be packed


def plan_packing(graph: ir.Graph, changes: Changes, results: int = 0) -> PackingPlan | None:
    """Find the nodes that can run on packed tokens.

    Args:
        graph: the forward graph. Each of its outputs that may have zeros in padding gets a node of its own.
        changes: the changes that the pass made and refused.
        results: how many of the graph's outputs may have zeros in padding, from the first on.

    Returns:
        None if there are no such nodes.
    """
    attentions = [node for node in graph if _hides_tokens(node)]
    embeddings = sorted(filter(_embeds_tokens, graph), key=lambda node: getattr(view(node), "padding_idx", -1) < 0)
    tokens = _padded_dims(graph, attentions, embeddings)
    if tokens is None:
        _refuse_eager_randomness(graph, changes)
        return None
    # Causality alone hides no token from all others: only a mask says which are padding.
    masked = any(view(node).mask is not None for node in attentions)
    finder = _Finder(graph, *tokens, attentions, num_results=results if masked else 0)
    finder.walk()
    for at, reason in finder.ends.items():
        if any(is_float(dtype_of(v)) for v in at.outputs):
            changes.refuse(at, reason)
    region = finder.rows.region(graph)
    if not attentions and not _is_worthwhile(region, embeddings):
        if not finder.ends:
            changes.refuse(embeddings[0], finder.why_embedding_is_padded(embeddings[0].outputs[0]))
        _refuse_eager_randomness(graph, changes)
        return None
    if attentions and (finder.refused or not finder.packed):
        return None
    masks = list(dict.fromkeys(mask_of(node, node in finder.packed) for node in (*finder.packed, *finder.few_queries)))
    changes.applied.append(
        f"{len(region.nodes)} nodes can run without padding, including {len(finder.packed)} of attention"
    )
    inside = {v for node in region.nodes for v in node.outputs}
    readers = [r for r in finder.readers if r.node.inputs[r.index] in inside]
    return PackingPlan(graph, finder.batch, finder.steps, region, finder.packed, finder.few_queries, masks, readers)


def _hides_tokens(node: ir.Node) -> bool:
    """Return whether the node is attention that hides tokens from some rows, by a mask or by causality."""
    n = view(node)
    return n.definition in _ATTENTIONS and (n.mask is not None or bool(getattr(n, "is_causal", 0)))


def _embeds_tokens(node: ir.Node) -> bool:
    """Return whether the node looks up a vector for each id of [batch, steps]."""
    n = view(node)
    if n.definition not in (GATHER, EMBEDDING) or rank_of(n.rows) != 2 or not depends_on_data_only(n.rows):
        return False
    gathers_rows = n.definition is EMBEDDING or n.axis == 0
    return gathers_rows and rank_of(node.outputs[0]) == 3 and is_float(dtype_of(node.outputs[0]))


def _padded_dims(
    graph: ir.Graph, attentions: Sequence[ir.Node], embeddings: Sequence[ir.Node]
) -> tuple[Size, Size] | None:
    """Return (batch, steps) of the values that may be padded: keys of the first attention, or the first embedding.

    None if rows were selected before: one of each sequence, or a data-dependent number.
    """
    if attentions:
        batch, _, steps, _ = sizes.dims_of(view(attentions[0]).k)
    elif embeddings:
        batch, steps, _ = sizes.dims_of(embeddings[0].outputs[0])
        if 1 in (batch, steps):
            return None
    else:
        return None
    input_symbols = frozenset[str]().union(*(sizes.symbols(size) for v in graph.inputs for size in sizes.dims_of(v)))
    return (batch, steps) if sizes.symbols(batch) | sizes.symbols(steps) <= input_symbols else None


def _is_worthwhile(region: Region, embeddings: Sequence[ir.Node]) -> bool:
    """Return whether tokens are packed from their embedding on and pass through a matmul."""
    return region.has_matmuls() and not set(region.nodes).isdisjoint(embeddings)


def _refuse_eager_randomness(graph: ir.Graph, changes: Changes) -> None:
    random = next((node for node in graph if node.metadata_props.get("samples") == "eager's"), None)
    if random is not None:
        changes.refuse(random, 'it reproduces eager\'s random numbers (rng="torch")')


@dataclass
class _Finder:
    """Collects the nodes that can run packed, from the last node to the first."""

    graph: ir.Graph
    batch: Size
    steps: Size
    attentions: list[ir.Node]
    rows: Walk = field(default_factory=lambda: Walk({}, set(), set()))
    packed: list[ir.Node] = field(default_factory=list)
    few_queries: list[ir.Node] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    ends: dict[ir.Node, str] = field(default_factory=dict)
    refused: bool = False
    num_results: int = 0
    results: dict[ir.Node, Axes] = field(default_factory=dict)
    full_users: dict[ir.Value, str] = field(default_factory=dict)  # what `_user_of_all_rows` returned

    def walk(self) -> None:
        self._separate_results()
        for node in reversed(self.graph):
            try:
                if node in self.attentions:
                    self._visit_attention(node)
                    continue
                row_axes = {v: self.rows.axes[v] for v in node.outputs if v in self.rows.axes}
                if row_axes and definition_of(node) in _ATTENTIONS:
                    raise NotRowwise("it uses padding: it has no mask and is not causal")
                if row_axes:
                    self.rows.visit(node, row_axes)
            except NotRowwise as end:
                self.ends[node] = end.reason
                self.refused = self.refused or (node in self.attentions and self._attends_to_tokens(node))
            if node not in self.rows.inside:
                self._visit_reader(node)
        self.packed.reverse()

    def _separate_results(self) -> None:
        """Give each result that holds tokens a node of its own, which reads them from its producer."""
        op = builder(self.graph)
        for index, value in enumerate(self.graph.outputs[: self.num_results]):
            axes, node = self._token_axes(value), value.producer()
            if axes is None or node is None:
                continue
            if definition_of(node) is not IDENTITY or value.uses():
                value = self.graph.outputs[index] = op.Identity(value)
                node = value.producer()
                assert node is not None
            self.results[node] = axes

    def _visit_attention(self, node: ir.Node) -> None:
        n = view(node)
        if not self._attends_to_tokens(node):
            raise NotRowwise("its keys differ in batch or step dimensions from those of the first attention")
        table = split_mask(node).table
        if any(traversal.is_used(v) for v in node.outputs[1:]):
            raise NotRowwise("its probabilities have users")
        if definition_of(node) is ATTENTION_DROPOUT and node.metadata_props.get("samples") != "any":
            raise NotRowwise('its dropout reproduces eager\'s random numbers (rng="torch")')
        if definition_of(node) is ATTENTION_DROPOUT and not 0 < drop_count(n) < DROP_LEVELS:
            raise NotRowwise("its dropout ratio is 0 or 1 in 16 bits")
        rows = sizes.dims_of(n.q)[2]
        y = node.outputs[0]
        if rows == self.steps and self.rows.axes.get(y) == _HEAD_AXES:
            self.rows.check_selected_only(y)
            self._add_uses(node, (0, 1, 2))
            self.rows.inside.add(node)
            self.packed.append(node)
        elif rows == self.steps:
            raise NotRowwise(self.why_padding_is_used(y))
        elif table is not None:
            raise NotRowwise(f"its queries are not the tokens of its keys, and it adds the bias table {table.name}")
        elif getattr(n, "is_causal", 0):
            raise NotRowwise("its queries are not the tokens of its keys, and it is causal")
        else:
            self._add_uses(node, (1, 2))
            self.few_queries.append(node)

    def _attends_to_tokens(self, node: ir.Node) -> bool:
        """Return whether the keys of an attention are the tokens to pack."""
        shape = sizes.dims_of(view(node).k)
        return (shape[0], shape[2]) == (self.batch, self.steps)

    def why_embedding_is_padded(self, value: ir.Value) -> str:
        """Return why an embedding without attention is not packed: padding is used, or packing would gain nothing."""
        if value in self.rows.axes and all(use in self.rows.uses for use in value.uses()):
            return "no matmul runs on its tokens one by one, so skipping padding would save nothing"
        return self.why_padding_is_used(value)

    def why_padding_is_used(self, value: ir.Value) -> str:
        """Return a sentence that names the user of all rows of a value, directly or through other nodes."""
        if value not in self.full_users:
            self.full_users[value] = self._user_of_all_rows(value)
        return f"padding is used: {self.full_users[value]}"

    def _user_of_all_rows(self, value: ir.Value) -> str:
        worklist, visited = [value], {value}
        reason = f"all rows of {value.name} are used"
        while worklist:
            value = worklist.pop(0)
            if value in self.full_users:  # of a later node: each layer is searched once
                return self.full_users[value]
            if value.is_graph_output():
                return f"{value.name} is an output of the module: keep_outputs can name those that are used"
            for node, index in value.uses():
                if (node, index) in self.rows.uses:
                    continue
                reason = self.ends.get(node, reason)
                results = [v for v in node.outputs if self._holds_tokens(v) and (v.uses() or v.is_graph_output())]
                if not results:
                    return f"{node.op_type} {node.name!r} needs all rows of {value.name}"
                worklist += [v for v in results if v not in visited]
                visited.update(results)
        return reason

    def _holds_tokens(self, value: ir.Value) -> bool:
        shape = sizes.dims_of(value)
        return {self.batch, self.steps} <= set(shape) or sizes.multiply(self.batch, self.steps) in shape

    def _add_uses(self, node: ir.Node, indices: Collection[int]) -> None:
        for index in indices:
            value = node.inputs[index]
            assert value is not None
            if self.rows.axes.setdefault(value, _HEAD_AXES) == _HEAD_AXES:
                self.rows.uses.add((node, index))

    def _visit_reader(self, node: ir.Node) -> None:
        """Record a node that uses some rows of tokens."""
        reader = self._reader(node)
        if reader is None:
            return
        value = node.inputs[reader.index]
        assert value is not None
        if self.rows.axes.setdefault(value, reader.axes) == reader.axes:
            self.rows.uses.add((node, reader.index))
            self.readers.append(reader)

    def _reader(self, node: ir.Node) -> Reader | None:
        n = view(node)
        if node in self.results:
            return Reader(node, 0, "result", rank_of(n.x), self.results[node])
        if n.definition in (CROSS_ENTROPY, NEGATIVE_LOG_LIKELIHOOD):
            return self._loss_reader(n)
        if n.definition in (SLICE, FLATTEN_AND_UNPAD, INDEX):
            axes = self._token_axes(n.x)
            return None if axes is None else _selecting_reader(n, axes)
        if n.definition is MUL:
            return self._masking_reader(node, 0, node.inputs[1]) or self._masking_reader(node, 1, node.inputs[0])
        if n.definition is WHERE:
            for index in (1, 2):
                if constant_of(node.inputs[3 - index]) is not None:
                    return self._masking_reader(node, index, node.inputs[0], negated=index == 2)
        return None

    def _masking_reader(self, node: ir.Node, index: int, mask: ir.Value | None, negated: bool = False) -> Reader | None:
        x = node.inputs[index]
        axes = self._token_axes(x)
        if mask is None or x is None or axes is None or sizes.dims_of(node.outputs[0]) != sizes.dims_of(x):
            return None
        if rank_of(mask) < 2 or not depends_on_data_only(mask):
            return None
        return Reader(node, index, "mask", rank_of(x), axes, (mask,), negated=negated)

    def _loss_reader(self, n: NodeView) -> Reader | None:
        """Return the reader of a loss of each token that ignores some labels."""
        logits, labels, ignore_index = n.node.inputs[0], n.labels, constant_of(n.ignore_index)
        if logits is None or loss_obstacle(n) or ignore_index is None or not depends_on_data_only(labels):
            return None
        shape = sizes.dims_of(logits)
        if rank_of(labels) == 1 and shape[0] == sizes.multiply(self.batch, self.steps):
            axes: Axes = (0,)
        elif rank_of(labels) == 2 and (shape[0], shape[2]) == (self.batch, self.steps):
            axes = (0, 2)
        else:
            return None
        return Reader(n.node, 0, "loss", rank_of(logits), axes, (labels,), ignore_index=int(ignore_index.item()))

    def _token_axes(self, value: ir.Value | None) -> Axes | None:
        """Return the batch and step axes of a value; None if it holds no tokens."""
        if value is None or value.producer() is None or not is_float(dtype_of(value)):
            return None
        if rank_of(value) == 2 and depends_on_data_only(value):
            return None  # one number per token, but a mask rather than a result of the model
        shape = sizes.dims_of(value)
        if shape[:2] == (self.batch, self.steps):
            return _TOKEN_AXES
        if shape.count(self.batch) != 1 or shape.count(self.steps) != 1:
            return None
        return shape.index(self.batch), shape.index(self.steps)


def _selecting_reader(n: NodeView, axes: Axes) -> Reader | None:
    """Return the reader of a node that selects steps by a slice, or tokens by index."""
    if n.definition is SLICE:
        return _slicing_reader(n, axes)
    values = (n.rows,) if n.definition is FLATTEN_AND_UNPAD else tuple(n.indices)
    if (
        axes != _TOKEN_AXES
        or (n.definition is INDEX and n.axes != (0, 1))
        or not all(map(depends_on_data_only, values))
    ):
        return None
    return Reader(n.node, 0, "rows" if n.definition is FLATTEN_AND_UNPAD else "positions", rank_of(n.x), axes, values)


def _slicing_reader(n: NodeView, tokens: Axes) -> Reader | None:
    axes, steps = constant_of(n.axes), constant_of(n.steps) if n.steps is not None else None
    starts, ends = known_ints(n.starts), known_ints(n.ends)
    if axes is None or axes.tolist() != [tokens[1]] or starts is None or ends is None:
        return None
    if not isinstance(starts[0], int) or not isinstance(ends[0], int):
        return None
    by = 1 if steps is None else int(steps[0])
    return Reader(n.node, 0, "slice", rank_of(n.x), tokens, steps=(starts[0], ends[0], by))


# Packing


def _select_labels(op: Builder, loss: ir.Node, selection: TokenRows) -> None:
    """Give a loss of packed logits the labels of their tokens."""
    n = view(loss)
    with nodes_before(op, loss):
        loss.replace_input_with(1, selection.select(op, n.labels, tuple(range(rank_of(n.labels)))))
    for output, type_ in zip(loss.outputs, n.definition.output_types(loss), strict=True):
        set_type(output, type_)


@dataclass
class _TokenRows(TokenRows):
    """The kept tokens with their sequence offsets: of keys, and of queries including filled rows."""

    cu: ir.Value
    cu_filled: ir.Value


def _add_inputs(plan: PackingPlan, fills: bool) -> _TokenRows:
    graph = plan.graph
    used_names = {str(size) for v in graph.inputs for size in sizes.dims_of(v)} | {v.name for v in graph.inputs}
    names = ["tokens", "rows", "cu", *["cu_filled"] * fills]
    while used_names & set(names):
        names = [f"{name}_" for name in names]
    rows, cu, *filled = (ir.Value(name=name) for name in names[1:])
    set_type(rows, TensorType(ir.DataType.INT64, (names[0],)))
    for value in (cu, *filled):
        set_type(value, TensorType(ir.DataType.INT64, (sizes.add(plan.batch, 1),)))
    graph.inputs.extend([rows, cu, *filled])
    return _TokenRows(rows, cu, *filled or [cu])


def _by_token(op: Builder, x: ir.Value) -> ir.Value:
    """Return x[1, h, t, e] as [t, h, e]."""
    return squeezed(op, transposed(op, x, [0, 2, 1, 3]), 0)


def _varlen(
    op: Builder,
    n: NodeView,
    operands: list[ir.Value],
    cu_q: ir.Value,
    cu_k: ir.Value,
    causal: bool,
    device: str,
    table: ir.Value | None = None,
) -> ir.Value:
    """Return attention of packed sequences, with the dropout of n.

    The dropout mask comes from a key; flash attention, which saves its logsumexp, samples its own.
    """
    attributes = {"scale": n.scale, "is_causal": int(causal) or None}
    operands, drops = [*operands, cu_q, cu_k], n.definition is ATTENTION_DROPOUT
    result: ir.Value
    if table is None and flash_runs(device, *operands[:3]):
        if not drops:
            result = op.own.VarlenFlashAttention(*operands, **attributes)[0]
            return result
        outputs = op.own.VarlenFlashAttentionDropout(*operands, n.ratio, n.training_mode, **attributes)
        outputs[0].producer().metadata_props.update((key, n.node.metadata_props[key]) for key in ("rng", "samples"))
        result = outputs[0]
        return result
    key, dropped = (op.own.DropoutKey(), drop_count(n)) if drops else (None, None)
    result = op.own.VarlenAttention(*operands, table, key, dropped=dropped, **attributes)
    return result


@dataclass
class _PackedAttention:
    """Attention whose queries and keys are the kept tokens."""

    node: ir.Node
    selection: _TokenRows
    steps: Size
    causal: bool
    device: str

    def plan(self, region: Region) -> Plan:
        needed: list[Rows | None] = [None] * len(self.node.inputs)
        needed[:3] = [Rows(_HEAD_AXES)] * 3
        return needed, {self.node.outputs[0]: _HEAD_AXES}

    def replace(self, op: Builder) -> Collection[ir.Value]:
        n, filled = view(self.node), self.selection.cu_filled
        # Causal flash attention takes a single `cu`; filled rows come last, so that no token sees them.
        keys = filled if self.causal else self.selection.cu
        with nodes_before(op, self.node):
            operands = [_by_token(op, x) for x in (n.q, n.k, n.v)]
            packed = _varlen(op, n, operands, filled, keys, self.causal, self.device, self._table(op, n))
            y = transposed(op, unsqueezed(op, packed, 0), [0, 2, 1, 3])
        traversal.replace(op.graph, self.node.outputs[0], y)
        op.graph.remove(self.node, safe=True)
        return (y,)

    def _table(self, op: Builder, n: NodeView) -> ir.Value | None:
        """Return the bias table as [heads, steps, steps], or None."""
        table = split_mask(self.node).table
        if table is None:
            return None
        extra = 3 - rank_of(table)
        table = squeezed(op, table, 0) if extra < 0 else unsqueezed(op, table, *range(extra))
        return expanded(op, table, (sizes.dims_of(table)[0], self.steps, self.steps))


def _attend_with_few_queries(op: Builder, node: ir.Node, selection: _TokenRows, device: str) -> None:
    """Replace attention of a few queries per sequence by attention to its kept tokens."""
    n = view(node)
    batch, heads, count, width = sizes.dims_of(n.q)
    with nodes_before(op, node):
        k, v = (_by_token(op, _packed_operand(op, x, selection)) for x in (n.k, n.v))
        queries = reshaped(op, transposed(op, n.q, [0, 2, 1, 3]), (sizes.multiply(batch, count), heads, width))
        cu_q = arange(op, sizes.add(batch, 1))
        if count != 1:
            cu_q = op.Mul(cu_q, op.size(count))
        packed = _varlen(op, n, [queries, k, v], cu_q, selection.cu, False, device)
        shape: Sizes = (batch, count, heads, sizes.dims_of(packed)[2])
        y = transposed(op, reshaped(op, packed, shape), [0, 2, 1, 3])
    traversal.replace(op.graph, node.outputs[0], y)
    op.graph.remove(node, safe=True)


def _packed_operand(op: Builder, x: ir.Value, selection: _TokenRows) -> ir.Value:
    """Return keys or values of the kept tokens: x itself if its producer runs packed."""
    is_packed = sizes.dims_of(x)[0] == 1 and sizes.dims_of(x)[2] == selection.count
    return x if is_packed else selection.select(op, x, _HEAD_AXES)
