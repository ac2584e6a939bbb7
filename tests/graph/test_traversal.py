"""Topological order, dead code, replacement and copies of nodes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxtrain.errors import GraphError
from onnxtrain.graph import traversal
from tests.graph.small import graph_of


def test_sort_puts_producers_first_and_keeps_a_valid_order():
    op, (x,) = graph_of(x=("b", 4))
    y = op.Tanh(op.Neg(x))
    op.graph.outputs.append(y)
    assert traversal.is_sorted(op.graph)
    nodes = list(op.graph)
    traversal.sort(op.graph)
    assert list(op.graph) == nodes

    first = nodes[0]
    op.graph.remove(first)
    op.graph.append(first)
    assert traversal.first_out_of_order(op.graph) == (nodes[1], first.outputs[0])
    traversal.sort(op.graph)
    assert list(op.graph) == nodes


def test_sort_refuses_a_cycle():
    op, (x,) = graph_of(x=(4,))
    a = op.Add(x, x)
    b = op.Neg(a)
    a.producer().replace_input_with(1, b)
    with pytest.raises(GraphError, match="cycle"):
        traversal.sort(op.graph)


def test_remove_unused_removes_chains_and_initializers_except_kept_nodes():
    op, (x,) = graph_of(x=(4,))
    used = op.Neg(x)
    op.graph.outputs.append(used)
    op.Tanh(op.Mul(x, op.scalar(2.0, like=x)))
    assert traversal.remove_unused(op.graph, lambda node: node.op_type == "Tanh") == 0
    assert traversal.remove_unused(op.graph, lambda node: False) == 2
    assert list(op.graph) == [used.producer()]
    assert not op.graph.initializers
    assert len(x.uses()) == 1


def test_replace_redirects_all_users_and_an_output_keeps_its_name():
    op, (x,) = graph_of(x=(4,))
    old, new = op.Tanh(x), op.Neg(x)
    user = op.Exp(old)
    op.graph.outputs.extend([old, user])
    old.name = "result"
    traversal.replace(op.graph, old, new)
    assert user.producer().inputs[0] is new
    assert op.graph.outputs[0] is new
    assert new.name == "result"
    assert not old.uses()


def test_replacing_an_output_by_an_input_adds_an_identity():
    op, (x,) = graph_of(x=(4,))
    old = op.Tanh(x)
    user = op.Exp(old)
    op.graph.outputs.extend([old, user])
    old.name = "result"
    traversal.replace(op.graph, old, x)
    assert user.producer().inputs[0] is x
    result = op.graph.outputs[0]
    assert (result.name, result.producer().op_type) == ("result", "Identity")
    assert x.name == "x"
    assert traversal.is_sorted(op.graph)


def test_a_copy_shares_no_node_or_value_and_keeps_metadata():
    op, (x,) = graph_of(x=("b", 4))
    with op.at({"module": "layer.0"}):
        y = op.Mul(op.Reshape(x, op.shape_of(x)), op.scalar(0.1, like=x))
    op.graph.outputs.append(y)
    copy, values = traversal.clone(op.graph)

    assert [n.op_type for n in copy] == [n.op_type for n in op.graph]
    assert not set(values) & set(values.values())
    assert all(v.graph is copy for v in values.values())
    assert copy.outputs[0] is values[y]
    assert values[y].producer().metadata_props == {"module": "layer.0"}
    scalar = y.producer().inputs[1]
    assert values[scalar].meta["scalar"] == 0.1
    # The builder's cache of size values refers to values of the original graph.
    assert "size_values" in op.graph.meta
    assert "size_values" not in copy.meta


def test_a_copy_makes_no_metadata_where_there_is_none(monkeypatch):
    """Reading `meta` makes three objects, for each value and node of a graph."""
    op, (x,) = graph_of(x=(4,))
    op.graph.outputs.append(op.Neg(op.Exp(x)))
    store = type(op.graph.meta)
    stores, make = [], store.__init__

    def counted(self, *data):
        stores.append(self)
        make(self, *data)

    monkeypatch.setattr(store, "__init__", counted)
    copy, _ = traversal.clone(op.graph)
    assert stores == [copy.meta]


def test_names_become_unique_and_inputs_and_outputs_keep_theirs():
    op, (x,) = graph_of(x=(4,))
    a, b = op.Neg(x), op.Tanh(x)
    a.name, b.name = "x", "y"
    c = op.Add(a, b)
    c.name = "y"
    a.producer().name = b.producer().name = "node"
    op.graph.outputs.append(c)
    traversal.name_uniquely(op.graph)
    assert (x.name, a.name, b.name, c.name) == ("x", "x_2", "y_2", "y")
    assert len({n.name for n in op.graph}) == 3


def _with_branch(op, x):
    """Return a node with a subgraph that captures `x`, and the subgraph's node."""
    inner = ir.node("Neg", [x])
    branch = ir.Graph([], inner.outputs, nodes=[inner], name="branch")
    node = ir.Node("", "If", [], [ir.AttrGraph("then_branch", branch)])
    op.graph.append(node)
    return node, inner


def test_values_that_a_subgraph_captures_count_as_read():
    op, (x,) = graph_of(x=(4,))
    y = op.Tanh(x)
    node, inner = _with_branch(op, y)
    assert list(traversal.reads(node)) == [y]
    assert traversal.users(y) == [inner]
    op.graph.outputs.append(node.outputs[0])
    assert traversal.remove_unused(op.graph, lambda n: False) == 0
    copy, values = traversal.clone(op.graph)
    assert list(traversal.reads(copy[1])) == [values[y]]


def test_a_copy_has_the_metadata_of_the_original_and_creates_none_there():
    op, (x,) = graph_of(x=(4,))
    marked, plain = op.Tanh(x), op.Neg(x)
    op.graph.outputs.extend([marked, plain])
    marked.metadata_props["kept"], marked.meta["sizes"], marked.doc_string = "yes", (2,), "doc"
    copy, values = traversal.clone(op.graph)
    copied = values[marked]
    assert (copied.metadata_props, copied.meta, copied.doc_string) == ({"kept": "yes"}, {"sizes": (2,)}, "doc")
    assert copied.metadata_props is not marked.metadata_props
    assert (copied.name, copied.type, copied.shape) == (marked.name, marked.type, marked.shape)
    assert list(copy.outputs) == [copied, values[plain]]
    assert plain._metadata_props is None
    assert values[plain]._metadata_props is None


def test_all_nodes_are_those_of_the_graph_and_its_subgraphs():
    op, (x,) = graph_of(x=(4,))
    op.Neg(x)
    inner = _with_branch(op, x)[1]
    op.Tanh(x)
    assert list(traversal.all_nodes(op.graph)) == list(op.graph.all_nodes())
    assert inner in list(traversal.all_nodes(op.graph))
