"""Capture a torch module, as ORTModule does, in training and eval mode, for blocks to extend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.capture import Captured, capture
from onnxtrain.capture.effects.side_effects import AssignmentError, SideEffects
from onnxtrain.capture.export.patches import CAPTURE_LOCK
from onnxtrain.capture.refusals import refuse_call, refuse_module
from onnxtrain.capture.structure import flatten_call
from onnxtrain.device.block import Base
from onnxtrain.device.light_model import hold_out
from onnxtrain.device.training_graph import UPDATED
from onnxtrain.errors import ArtifactError, OnnxTrainError
from onnxtrain.graph import traversal
from onnxtrain.ops import NoBody, definition_of
from onnxtrain.ops.bodies import close
from onnxtrain.ops.dtypes import ONNX_DTYPES


@dataclass(frozen=True)
class FromTorch:
    """A captured module.

    Attributes:
        training, evaluation: the forward graphs in both modes; parameters and buffers are initializers.
        trainable, frozen: its parameters, by requires_grad.
    """

    training: Base
    evaluation: Base
    trainable: Sequence[str]
    frozen: Sequence[str]


def from_torch(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output_names: Sequence[str] | None
) -> FromTorch:
    """Capture a module, which is not modified.

    Args:
        module: in training mode, its submodules' training flags apply to the training graph; in eval mode, all are set.
        args: the positional arguments of an example call. Dimensions are dynamic where forward allows it.
        kwargs: its keyword arguments.
        output_names: the names of the tensors that forward returns, in order.

    Raises:
        ArtifactError: forward cannot be captured, or the number of returned tensors is not that of the names.
    """
    try:
        with _mode(module, training=True):
            training = _base(module, args, kwargs, output_names)
        with _mode(module, training=False):
            evaluation = _base(module, args, kwargs, output_names)
        _share_buffers(training, evaluation)
    except ArtifactError:
        raise
    except OnnxTrainError as error:
        raise ArtifactError(error.problem, error.where, error.expected, error.got, error.todo) from error
    parameters = dict(module.named_parameters())
    initializers = {t.name for t in training.model.graph.initializer}
    named = [(name, p) for name, p in parameters.items() if name in initializers]
    return FromTorch(
        training,
        evaluation,
        [name for name, p in named if p.requires_grad],
        [name for name, p in named if not p.requires_grad],
    )


@contextlib.contextmanager
def _mode(module: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Set a module's mode in the body. If it has that mode, the flags of its submodules are kept."""
    flags = [(part, part.training) for part in module.modules()]
    if module.training != training:
        module.train(training)
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag


def _base(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output_names: Sequence[str] | None
) -> Base:
    captured = capture_call(module, args, kwargs)
    updates = name_outputs(captured, output_names)
    _hold_parameters(module, captured)
    light, tensors = hold_out(captured.model)
    return Base(light, tensors, list(updates), updates)


def capture_call(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Capture a module in its present mode, with gradients.

    Raises:
        ORTModuleFallbackException: forward cannot be captured.
        ArtifactError: an operator runs in PyTorch only.
    """
    tensors, structure = flatten_call(tuple(args), dict(kwargs))
    refuse_module(module)
    refuse_call(tensors)
    with CAPTURE_LOCK, torch.enable_grad():
        watch = SideEffects(module)
        try:
            captured = capture(module, structure, tensors, watch)
        except AssignmentError:
            watch.settle()  # artifacts are the graph of the later calls
            captured = capture(module, structure, tensors, SideEffects(module))
    _refuse_torch_only(captured)
    return captured


def _refuse_torch_only(captured: Captured) -> None:
    """Raise ArtifactError for operators that only PyTorch can run."""
    for node in captured.model.graph:
        body = definition_of(node).body
        if isinstance(body, NoBody):
            operator = node.attributes.get_string("operator", node.op_type)
            raise ArtifactError(
                f"{operator} cannot be expressed in standard ONNX ops: {body.reason}.",
                where=traversal.origin(node),
                todo="replace it by other operators in forward",
            )


def _share_buffers(training: Base, evaluation: Base) -> None:
    """Make evaluation read the buffers that training updates."""
    initializers = {tensor.name for tensor in evaluation.model.graph.initializer}
    evaluation.buffers = [name for name in training.buffers if name in initializers]


def name_outputs(captured: Captured, output_names: Sequence[str] | None) -> dict[str, str]:
    """Name the outputs; return, for each buffer that forward mutates, the name of its new value."""
    graph, results = captured.model.graph, captured.result_count
    names = list(output_names or (["output"] if results == 1 else [f"output_{i}" for i in range(results)]))
    if len(names) != results:
        raise ArtifactError(
            "The number of output names differs from the number of tensors that forward returns.",
            expected=len(names),
            got=results,
        )
    updates: dict[str, str] = {}
    new_values: list[ir.Value] = []
    for mutation in captured.mutations:
        source = captured.sources[mutation.target]
        if source.kind != "buffer":
            raise ArtifactError(
                "forward mutates an input in place, and training graphs do not return mutated inputs.",
                where=source.name or f"input {source.index}",
                todo="mutate a copy in forward",
            )
        if not _affects_only_itself(graph, graph.inputs[mutation.target], graph.outputs[mutation.output]):
            updates[source.name] = f"{source.name}{UPDATED}"
            new_values.append(graph.outputs[mutation.output])
    values = [*graph.outputs[:results], *new_values]
    graph.outputs.clear()
    close(graph, values, [*names, *updates.values()])
    del graph.outputs[results:]  # new values of buffers are looked up by name
    return updates


def _affects_only_itself(graph: ir.Graph, buffer: ir.Value, updated: ir.Value) -> bool:
    """Return whether an integer buffer affects only itself, as num_batches_tracked does.

    Exporters drop such buffers.
    """
    reached = {buffer}
    for node in graph:
        if any(value in reached for value in node.inputs):
            reached.update(node.outputs)
    integer = buffer.dtype is not None and not buffer.dtype.is_floating_point()
    return integer and all(value is updated for value in graph.outputs if value in reached)


def _hold_parameters(module: torch.nn.Module, captured: Captured) -> None:
    """Make parameters and buffers initializers of the captured graph. Memory is shared with the module."""
    graph = captured.model.graph
    for value, source in list(zip(graph.inputs, captured.sources, strict=True)):
        if source.kind == "input":
            continue
        tensor = _tensor(module, source.name).detach().cpu().contiguous()
        value.name = source.name
        value.const_value = ir.tensor(tensor, dtype=ONNX_DTYPES[tensor.dtype], name=source.name)
        graph.inputs.remove(value)
        graph.register_initializer(value)


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    attribute: Any = module
    for part in name.split("."):
        attribute = getattr(attribute, part)
    assert isinstance(attribute, torch.Tensor)
    return attribute
