"""Export one ONNX file with a model's outputs, its loss and the gradients of its parameters."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from onnxtrain import onnx_file
from onnxtrain.device.from_torch import capture_call, name_outputs
from onnxtrain.device.training_graph import Roles, gradient_model
from onnxtrain.graph.opset import convert_opset
from onnxtrain.graph.values import ONNX


def export_gradient_graph(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    example_input: torch.Tensor,
    example_labels: torch.Tensor,
    gradient_graph_path: str | os.PathLike[str],
    opset_version: int = 12,
) -> None:
    """Write a graph that any onnxruntime runs.

    Its inputs are `input`, `labels`, the model's parameters and buffers by name, and `random_seed` if the model samples
    random numbers. Its outputs are `loss`, `output`, `<p>_grad` for each parameter that requires a gradient, and
    `<b>.out` for each buffer that the model mutates. Dimensions are dynamic where forward allows it.

    Args:
        model: in training or eval mode, which is kept.
        loss_fn: (the model's output, labels) -> loss.
        example_input: the input of an example call.
        example_labels: its labels.
        gradient_graph_path: the file.
        opset_version: the minimum opset of ai.onnx. Gradients cannot be expressed in old opsets: the file's own may be
            newer.

    Raises:
        ORTModuleFallbackException: the model cannot be captured.
        ArtifactError: an op has no gradient, or cannot be expressed in standard ops.
        OptionError: the opset does not exist.
    """
    module = _WithLoss(model, loss_fn)
    module.train(model.training)
    captured = capture_call(module, (example_input, example_labels), {})
    updates = name_outputs(captured, ["loss", "output"])
    graph = captured.model.graph
    renamed: dict[str, str] = {}
    for value, source in zip(graph.inputs, captured.sources, strict=True):
        prefixed = source.name
        value.name = ("input", "labels")[source.index] if source.kind == "input" else prefixed.removeprefix("model.")
        if source.kind != "input":
            renamed[prefixed] = value.name
    values = {str(value.name): value for node in graph for value in node.outputs}
    for new_value in updates.values():
        values[new_value].name = new_value.removeprefix("model.")
        graph.outputs.append(values[new_value])
    parameters = dict(module.named_parameters())
    trainable = [new for old, new in renamed.items() if old in parameters and parameters[old].requires_grad]
    frozen = [new for old, new in renamed.items() if new not in trainable and old not in updates]
    roles = Roles(["input", "labels"], ["loss", "output"], trainable, frozen, [renamed[name] for name in updates])
    result, _ = gradient_model(captured.model, roles, portable=False)
    if opset_version > result.graph.opset_imports[ONNX]:
        for converted in (result.graph, *(function.graph for function in result.functions.values())):
            convert_opset(converted, opset_version)
    onnx_file.write_file_model(result, gradient_graph_path)


class _WithLoss(torch.nn.Module):
    """A model with its loss."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, data: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Any]:
        output = self.model(data)
        return self.loss_fn(output, labels), output
