"""Build the two graphs of a model: the training graph with loss and gradients, and the evaluation graph.

forward and loss ─differentiate─▶ joint graph ─seeded dropout─▶ ─lower to stock onnxruntime─▶ ─accumulate─▶

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
from onnxtrain.device.seeded_dropout import replace_dropouts
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
from onnxtrain.ops import NOT_DIFFERENTIABLE, builder, definition_of, lookup, unknown_node
from onnxtrain.ops.bodies import close
from onnxtrain.options import Options
from onnxtrain.passes import JOINT, forward_passes, optimize

METADATA = "onnxtrain"
UPDATED = ".out"

# Stock onnxruntime would run a chunked loss by its body, which holds all scores; it has a kernel for LogSoftmax.
_FORWARD = forward_passes(Options(disabled_passes=("chunk_losses", "save_logits_for_backward")))


@dataclass(frozen=True)
class Roles:
    """The roles of a forward graph's inputs and outputs, by name.

    Attributes:
        inputs: fed by the user, inputs of the loss last.
        outputs: returned to the user, the loss first.
        forward_outputs: the model's own outputs, which an evaluation graph returns too.
        trainable, frozen: parameters.
        buffers: running statistics, whose new values are the outputs `<b>.out` of training graphs.
        input_gradients: inputs whose gradients are accumulated too.
    """

    inputs: Sequence[str]
    outputs: Sequence[str]
    trainable: Sequence[str]
    frozen: Sequence[str]
    buffers: Sequence[str]
    forward_outputs: Sequence[str] = field(default=())
    input_gradients: Sequence[str] = field(default=())

    @property
    def differentiated(self) -> Sequence[str]:
        """The inputs whose gradients are accumulated."""
        return [*self.trainable, *self.input_gradients]


def annotate(model: ir.Model, kind: str, **metadata: Any) -> None:
    """Store an artifact's metadata in the model, as JSON."""
    model.metadata_props[METADATA] = json.dumps({"version": 1, "kind": kind, **metadata})


def training_model(forward: ir.Model, roles: Roles, *, portable: bool) -> ir.Model:
    """Build the finished graph of a training step.

    Args:
        forward: not modified. Its outputs are `roles.outputs`, then `<b>.out` for each buffer.
        roles: of its inputs and outputs.
        portable: whether the graph is restricted to the portable profile.

    Raises:
        ArtifactError: an op between the loss and a parameter has no gradient or cannot be expressed in standard ops; or
            the loss does not depend on a parameter.
    """
    result, draws = gradient_model(forward, roles, portable=portable)
    updates = accumulate(result.graph, roles.differentiated, portable=portable)
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
    """Build the joint graph for stock onnxruntime; also return whether it has an input `random_seed`.

    Its outputs are `roles.outputs`, `<p>_grad` for each differentiated p, `<b>.out` for each buffer. `forward` is not
    modified.

    Raises:
        ArtifactError: as `training_model`.
    """
    model = traversal.with_graph(forward, traversal.clone(forward.graph)[0])
    optimize(model, _FORWARD)
    _refuse_opaque(model.graph, roles)
    gradients = _differentiated(model, roles)
    draws = replace_dropouts(gradients.graph)
    optimize(gradients, JOINT)
    _order_inputs(gradients.graph, roles, draws)
    verify(gradients, lookup)
    return for_stock(gradients, portable=portable), draws


def eval_model(forward: ir.Model, roles: Roles, *, portable: bool) -> ir.Model:
    """Build the evaluation graph. Its outputs are `roles.outputs`, then `roles.forward_outputs`.

    Raises:
        ArtifactError: an op cannot be expressed in standard ops.
    """
    model = traversal.with_graph(forward, traversal.clone(forward.graph)[0])
    optimize(model, _FORWARD)
    read = {v.name for v in model.graph.inputs if traversal.is_used(v) or v.name in roles.inputs}
    inputs = [v for v in model.graph.inputs if v.name in read]
    model.graph.inputs.clear()
    model.graph.inputs.extend(inputs)
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
    """Return the joint graph, with outputs `roles.outputs`, `<p>_grad` of each trainable p, and new buffer values."""
    graph = model.graph
    loss = graph.outputs[0]
    if not is_float(dtype_of(loss)):
        got = f"{loss.name}, {dtype_of(loss).name.lower()}"
        raise ArtifactError("The loss, which is the first output, must have a floating-point dtype.", got=got)
    names = [v.name for v in graph.outputs]
    is_loss = [index == 0 for index in range(len(names))]
    num_outputs = len(roles.outputs)
    try:
        joint = differentiate(model, [v.name in roles.differentiated for v in graph.inputs], is_loss)
    except OnnxTrainError as error:
        raise ArtifactError(error.problem, error.where, error.expected, error.got, error.todo) from error
    graph = joint.model.graph
    gradients = {str(v.name): g for v, g in zip(graph.inputs, joint.gradients, strict=False) if g is not None}
    lacking = [name for name in roles.differentiated if name not in gradients]
    if lacking:
        rounds = any(node.op_type == "QuantizeLinear" for node in graph)
        raise ArtifactError(
            f"The loss does not depend on {len(lacking)} of the trainable parameters.",
            got=", ".join(lacking[:10]),
            todo="the model is quantized: make it trainable by onnxtrain.artifacts.fake_quantize first"
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
        [*forward[:num_outputs], *(gradients[name] for name in roles.differentiated), *forward[num_outputs:]],
        [*names[:num_outputs], *(f"{name}{GRADIENT}" for name in roles.differentiated), *names[num_outputs:]],
    )
    traversal.name_uniquely(graph)
    return joint.model


def _refuse_opaque(graph: ir.Graph, roles: Roles) -> None:
    """Raise ArtifactError for unknown ops that a gradient must pass: it would be lost silently."""
    needed = _reaching(graph, graph.outputs[0])
    active = {v for v in graph.inputs if v.name in roles.differentiated}
    for node in graph:
        reads = [v for v in node.inputs if v in active]
        if not reads:
            continue
        opaque = (node.domain, node.op_type) == (OWN, unknown_node.NAME)
        floating = [v for v in node.outputs if is_differentiable_type(dtype_of(v))]
        if opaque and node in needed and floating:
            original = unknown_node.original(node)
            raise ArtifactError(
                f"onnxtrain has no gradient for {traversal.describe(original)}, "
                "which is between the loss and trainable parameters.",
                where=traversal.origin(node),
                got=f"it reads {', '.join(str(v.name) for v in reads)}",
                todo="train only parameters after it, express it by other ops, or define the op (see Adding an op)",
            )
        if definition_of(node).gradient is not NOT_DIFFERENTIABLE:
            active.update(floating)


def _reaching(graph: ir.Graph, value: ir.Value) -> set[ir.Node]:
    """Return the nodes that a value depends on."""
    needed, nodes = {value}, set()
    for node in reversed(graph):
        if any(v in needed for v in node.outputs):
            nodes.add(node)
            needed.update(traversal.reads(node))
    return nodes


def _order_inputs(graph: ir.Graph, roles: Roles, draws: bool) -> None:
    """Order inputs: user inputs, random_seed, trainable and frozen parameters, buffers."""
    input_of = {str(v.name): v for v in graph.inputs}
    seed = [name for name in input_of if draws and name == "random_seed"]
    order = [*roles.inputs, *seed, *roles.trainable, *roles.frozen, *roles.buffers]
    graph.inputs.clear()
    graph.inputs.extend(input_of[name] for name in order)
