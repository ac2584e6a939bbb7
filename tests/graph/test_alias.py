"""Alias sets: what may lie in one memory."""

from __future__ import annotations

from onnxtrain.graph.alias import AliasSets
from onnxtrain.ops import definition_of
from onnxtrain.ops.reshape.join import split
from tests.graph.small import graph_of


def test_views_of_views_are_one_set_with_the_first_as_root():
    op, (x, z) = graph_of(x=("b", 4), z=("b", 4))
    y = op.Transpose(x, perm=(1, 0))
    flat = op.Reshape(y, op.sizes([-1]))
    fresh = op.Tanh(flat)
    sets = AliasSets(op.graph, definition_of)
    assert sets.root(flat) is x
    assert sets.may_alias(y, flat)
    assert sets.aliases_of(y) == (x, y, flat)
    assert not sets.may_alias(fresh, x)
    assert sets.root(fresh) is fresh
    assert sets.aliases_of(z) == (z,)


def test_all_members_of_a_variadic_output_are_views():
    op, (x,) = graph_of(x=(4, 2))
    a, b = split(op, x, [1, 3], axis=0)
    sets = AliasSets(op.graph, definition_of)
    assert sets.may_alias(a, b)
    assert sets.root(b) is x


def test_inputs_in_one_memory_join_their_views():
    op, (x, z) = graph_of(x=("b", 4), z=("b", 4))
    y = op.Transpose(z, perm=(1, 0))
    sets = AliasSets(op.graph, definition_of, together=[(x, z)])
    assert sets.may_alias(x, y)
    assert not AliasSets(op.graph, definition_of).may_alias(x, y)
