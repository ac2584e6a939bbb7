"""Group results whose gradients have no saved value in common: each group has its own backward, as in eager.

a, b = model(x); a.sum().backward(); b.sum().backward()     allowed where a and b share no node that keeps tensors
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff import Joint
from onnxtrain.graph.values import dtype_of, is_differentiable_type
from onnxtrain.ops import NOT_DIFFERENTIABLE, definition_of
from onnxtrain.plan.backward_stages import Groups, is_object
from onnxtrain.plan.cut import Cut
from onnxtrain.system import ranks


def independent_results(joint: Joint, full: Cut) -> tuple[Groups, Groups]:
    """Return the groups of results, and the inputs that each result's gradient reaches; empty if there is one group.

    A node belongs to the results whose cotangents it follows from. One that reads a kept tensor and follows from
    several joins their groups: its tensor is kept once. A sum of cotangents reads none.
    """
    if any(map(is_object, full.kept)):
        return (), ()
    follows = {c: frozenset({i}) for i, c in enumerate(joint.cotangents) if c is not None}
    groups = [{i} for i in sorted(frozenset().union(*follows.values()))]
    for node in full.backward.nodes:
        read = [value for value in node.inputs if value is not None]
        results = frozenset().union(*(follows.get(value, frozenset()) for value in read))
        if len(results) > 1 and any(_is_kept(value, follows, full) for value in read):
            joined = [group for group in groups if group & results]
            groups = [group for group in groups if not group & results] + [set().union(*joined)]
        follows.update(dict.fromkeys(node.outputs, results))
    if len(groups) < 2:
        return (), ()
    return tuple(sorted(tuple(sorted(group)) for group in groups)), tuple(tuple(sorted(r)) for r in _reached(joint))


def wants_stages(option: bool | str, joint: Joint, full: Cut) -> bool:
    """Return whether the option early_gradients asks for a backward in stages.

    'auto' asks for it if several processes train the model. It keeps independent backwards: stages have one backward.
    """
    if option == "auto":
        return ranks.world_size() > 1 and independent_results(joint, full) == ((), ())
    return option is True


def _reached(joint: Joint) -> list[frozenset[int]]:
    """Return, for each result, the inputs that its gradient reaches.

    Forward tells: the zeros that are the gradient of `round` follow from no cotangent.
    """
    graph = joint.model.graph
    reached = {v: frozenset({i}) for i, (v, g) in enumerate(zip(graph.inputs, joint.gradients, strict=False)) if g}
    for node in graph:
        definition = definition_of(node)
        if node not in joint.forward_nodes or definition.gradient is NOT_DIFFERENTIABLE:
            continue
        read = [v for i, v in enumerate(node.inputs) if v and definition.input_name(i) not in definition.nondiff_inputs]
        inputs = frozenset().union(*(reached.get(v, frozenset()) for v in read))
        outputs = [v for i, v in enumerate(node.outputs) if definition.output_name(i) not in definition.nondiff_outputs]
        reached.update((v, inputs) for v in outputs if inputs and is_differentiable_type(dtype_of(v)))
    return [reached.get(value, frozenset()) for value in graph.outputs[: joint.outputs]]


def _is_kept(value: ir.Value, follows: dict[ir.Value, frozenset[int]], full: Cut) -> bool:
    """Return whether a value is a tensor of forward's, or computed from such alone."""
    return not follows.get(value) and value.const_value is None and value not in full.backward.host
