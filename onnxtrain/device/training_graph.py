"""The two graphs of a model: one that gives loss and gradients, one that evaluates.

forward and loss ─differentiate─▶ joint graph ─draws from a seed─▶ ─form for stock onnxruntime─▶ ─accumulate─▶

training_model    (inputs, random_seed?, parameters, buffers, <p>_grad.accumulation.buffer, lazy_reset_grad)
-> (loss, outputs, <p>_grad.accumulation.out, <b>.out)
eval_model        (inputs, parameters, buffers) -> (loss, outputs, the model's own outputs)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff import differentiate
from onnxtrain.device.accumulation import GRADIENT, accumulate
from onnxtrain.device.in_place import verify_updates
from onnxtrain.device.seeded_dropout import draw_from_seed
from onnxtrain.device.stock import for_stock
from onnxtrain.errors import ArtifactError, OnnxTrainError
from onnxtrain.graph import traversal
from onnxtrain.graph.values import (
    OWN,
    dtype_of,
    is_differentiable_type,
    is_float,
    rank_of,
)
from onnxtrain.graph.verify import verify
from onnxtrain.ops import NOT_DIFFERENTIABLE, builder, definition_of, foreign, lookup
from onnxtrain.ops.bodies import close
from onnxtrain.options import Options
from onnxtrain.passes import JOINT, forward_passes, optimize
from onnxtrain.passes.save_logits_for_backward import save_logits_for_backward

METADATA = "onnxtrain"
UPDATED = ".out"

# Stock onnxruntime would run these losses by their bodies, which hold all scores; LogSoftmax has a kernel there.
_FORWARD = tuple(p for p in forward_passes(Options(chunked_loss=False)) if p is not save_logits_for_backward)


@dataclass(frozen=True)
class Roles:
    """What the inputs and outputs of a forward graph are, by name.

    Attributes:
        inputs: what the user feeds, loss inputs last.
        outputs: the loss first; what a call gives back.
        forward_outputs: the model's own outputs, which an evaluation graph gives too.
        trainable, frozen: parameters.
        buffers: running statistics. Training graphs give their new values as `<b>.out`.
    """

    inputs: Sequence[str]
    outputs: Sequence[str]
    trainable: Sequence[str]
    frozen: Sequence[str]
    buffers: Sequence[str]
    forward_outputs: Sequence[str] = field(default=())


def annotate(model: ir.Model, kind: str, **facts: Any) -> None:
    """Writes down what a graph is, as JSON in the model's metadata."""
    model.metadata_props[METADATA] = json.dumps({"version": 1, "kind": kind, **facts})


def training_model(forward: ir.Model, roles: Roles, *, portable: bool) -> ir.Model:
    """The graph of a training step, as it is written.

    Args:
        forward: outputs are `roles.outputs`, then `<b>.out` for each buffer. It stays as it is.
        roles: see there.
        portable: whether it is restricted to the portable profile.

    Raises:
        ArtifactError: an op on the way from the loss to a parameter has no gradient, or no form in standard ops; a
            parameter that the loss does not depend on.
    """
    result, draws = gradient_model(forward, roles, portable=portable)
    updates = accumulate(result.graph, roles.trainable, portable=portable)
    updates |= {f"{name}{UPDATED}": name for name in roles.buffers}
    annotate(
        result,
        "training",
        inputs=list(roles.inputs),
        outputs=list(roles.outputs),
        trainable=list(roles.trainable),
        frozen=list(roles.frozen),
        buffers=list(roles.buffers),
        updates=updates,
        draws=draws,
        portable=portable,
    )
    verify_updates(result, updates)
    return result


def gradient_model(forward: ir.Model, roles: Roles, *, portable: bool) -> tuple[ir.Model, bool]:
    """The joint graph for stock onnxruntime, and whether it draws random numbers, from an input `random_seed`.

    Its outputs are `roles.outputs`, `<p>_grad` for each trainable p, and `<b>.out` for each buffer. `forward` stays as
    it is.

    Raises:
        ArtifactError: as `training_model`.
    """
    model = traversal.with_graph(forward, traversal.clone(forward.graph)[0])
    optimize(model, _FORWARD)
    _refuse_opaque(model.graph, roles)
    gradients = _differentiated(model, roles)
    draws = draw_from_seed(gradients.graph)
    optimize(gradients, JOINT)
    _order_inputs(gradients.graph, roles, draws)
    verify(gradients, lookup)
    return for_stock(gradients, portable=portable), draws


def eval_model(forward: ir.Model, roles: Roles, *, portable: bool) -> ir.Model:
    """The graph of an evaluation. Its outputs are `roles.outputs`, then `roles.forward_outputs`.

    Raises:
        ArtifactError: an op has no form in standard ops.
    """
    model = traversal.with_graph(forward, traversal.clone(forward.graph)[0])
    optimize(model, _FORWARD)
    read = {v.name for v in model.graph.inputs if traversal.is_used(v) or v.name in roles.inputs}
    kept = [v for v in model.graph.inputs if v.name in read]
    model.graph.inputs.clear()
    model.graph.inputs.extend(kept)
    verify(model, lookup)
    result = for_stock(model, portable=portable)
    annotate(
        result,
        "eval",
        inputs=list(roles.inputs),
        outputs=list(roles.outputs),
        forward_outputs=list(roles.forward_outputs),
        trainable=[name for name in roles.trainable if name in read],
        frozen=[name for name in roles.frozen if name in read],
        buffers=[name for name in roles.buffers if name in read],
        updates={},
        portable=portable,
    )
    return result


# Differentiation


def _differentiated(model: ir.Model, roles: Roles) -> ir.Model:
    """The joint graph. Its outputs: `roles.outputs`, `<p>_grad` for each trainable p, the buffers' new values."""
    graph = model.graph
    loss = graph.outputs[0]
    if not is_float(dtype_of(loss)):
        got = f"{loss.name}, {dtype_of(loss).name.lower()}"
        raise ArtifactError("The first output is taken for the loss, which is a floating number.", got=got)
    names = [v.name for v in graph.outputs]
    of = [index == 0 for index in range(len(names))]
    own = len(roles.outputs)
    try:
        joint = differentiate(model, [v.name in roles.trainable for v in graph.inputs], of)
    except OnnxTrainError as error:
        raise ArtifactError(error.problem, error.where, error.expected, error.got, error.todo) from error
    graph = joint.model.graph
    gradients = {str(v.name): g for v, g in zip(graph.inputs, joint.gradients, strict=False) if g is not None}
    lacking = [name for name in roles.trainable if name not in gradients]
    if lacking:
        rounds = any(node.op_type == "QuantizeLinear" for node in graph)
        raise ArtifactError(
            f"The loss does not depend on {len(lacking)} of the parameters that shall be trained.",
            got=", ".join(lacking[:10]),
            todo="the model is quantized: give it to onnxtrain.artifacts.fake_quantize first, which makes it trainable"
            if rounds
            else "freeze them, or check which output the loss is computed from",
        )
    cotangent = joint.cotangents[0]
    assert cotangent is not None
    op = builder(graph)
    one = op.scalar(1.0, like=cotangent)
    ones = one if rank_of(cotangent) == 0 else op.Expand(one, op.shape_of(graph.outputs[0]))
    cotangent.replace_all_uses_with(ones, replace_graph_outputs=True)
    graph.inputs.remove(cotangent)
    forward = graph.outputs[: len(names)]
    graph.outputs.clear()
    traversal.sort(graph)
    close(
        graph,
        [*forward[:own], *(gradients[name] for name in roles.trainable), *forward[own:]],
        [*names[:own], *(f"{name}{GRADIENT}" for name in roles.trainable), *names[own:]],
    )
    traversal.name_uniquely(graph)
    return joint.model


def _refuse_opaque(graph: ir.Graph, roles: Roles) -> None:
    """Refuses ops that nothing is known of where a gradient would have to pass: it would be lost without a word."""
    needed = _reaching(graph, graph.outputs[0])
    active = {v for v in graph.inputs if v.name in roles.trainable}
    for node in graph:
        reads = [v for v in node.inputs if v in active]
        if not reads:
            continue
        opaque = (node.domain, node.op_type) == (OWN, foreign.NAME)
        floating = [v for v in node.outputs if is_differentiable_type(dtype_of(v))]
        if opaque and node in needed and floating:
            kept = foreign.original(node)
            raise ArtifactError(
                f"onnxtrain knows no gradient of {traversal.describe(kept)}, "
                "which stands between the loss and parameters that shall be trained.",
                where=traversal.origin(node),
                got=f"it reads {', '.join(str(v.name) for v in reads)}",
                todo="train only parameters behind it, write it in other ops, or define the op (see Adding an op)",
            )
        if definition_of(node).gradient is not NOT_DIFFERENTIABLE:
            active.update(floating)


def _reaching(graph: ir.Graph, value: ir.Value) -> set[ir.Node]:
    """The nodes that a value depends on."""
    wanted, found = {value}, set()
    for node in reversed(graph):
        if any(v in wanted for v in node.outputs):
            found.add(node)
            wanted.update(traversal.reads(node))
    return found


def _order_inputs(graph: ir.Graph, roles: Roles, draws: bool) -> None:
    """User inputs, random_seed, trainable and frozen parameters, buffers."""
    known = {str(v.name): v for v in graph.inputs}
    seed = [name for name in known if draws and name == "random_seed"]
    order = [*roles.inputs, *seed, *roles.trainable, *roles.frozen, *roles.buffers]
    graph.inputs.clear()
    graph.inputs.extend(known[name] for name in order)
