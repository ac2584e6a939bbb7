"""Alias sets: the values that may share memory."""

from __future__ import annotations

from onnxtrain.graph.alias import AliasSets
from onnxtrain.ops import definition_of
from onnxtrain.ops.reshape.join import split
from tests.graph.small import graph_of


def test_a_chain_of_views_is_one_set_rooted_at_its_first_value():
    op, (x, z) = graph_of(x=("b", 4), z=("b", 4))
    y = op.Transpose(x, perm=(1, 0))
    flat = op.Reshape(y, op.sizes([-1]))
    fresh = op.Tanh(flat)
    sets = AliasSets(op.graph, definition_of)
    assert sets.root(y) is sets.root(flat) is x
    assert sets.aliases_of(y) == (x, y, flat)
    assert sets.root(fresh) is fresh
    assert sets.aliases_of(z) == (z,)


def test_all_members_of_a_variadic_output_are_views():
    op, (x,) = graph_of(x=(4, 2))
    a, b = split(op, x, [1, 3], axis=0)
    sets = AliasSets(op.graph, definition_of)
    assert sets.root(a) is sets.root(b) is x
