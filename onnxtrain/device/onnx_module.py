"""An ONNX model as a module of PyTorch: parameters by their names, forward as PyTorch's operators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.device.from_onnx import convert, prepare, statistics
from onnxtrain.errors import ArtifactError
from onnxtrain.execute.program import Program
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.constructors import TORCH_DTYPES
from onnxtrain.ops.definition import Kernel
from onnxtrain.plan.cut import single_part


class OnnxModule(torch.nn.Module):
    """Runs an ONNX model with PyTorch's operators, differentiably.

    Initializers of a floating type are parameters, in the file's order and under its names with "_" for ".". The
    running statistics of BatchNormalization are buffers; they stay as they are. Of a quantized model, pairs of
    QuantizeLinear and DequantizeLinear are FakeQuant and integer weights are parameters in floating point, as
    `onnxtrain.artifacts.fake_quantize` makes them; scales are buffers.

    Args:
        model: the file's model, of any exporter.

    Attributes:
        inputs: the graph's inputs, typed, in the order of forward's arguments.
        outputs: the names of what forward gives, a tuple unless there is one.

    Raises:
        ArtifactError: an op, a type or a shape that a training graph cannot hold.
    """

    def __init__(self, model: ir.Model) -> None:
        super().__init__()
        model, scales = _with_gradients(model)
        model = prepare(model)
        held = model.graph.initializers
        buffers = {*statistics(model), *scales}
        trained = [
            n for n, v in held.items() if v.dtype is not None and v.dtype.is_floating_point() and n not in buffers
        ]
        self.outputs = [str(value.name) for value in model.graph.outputs]
        converted = convert(model, self.outputs, [*trained, *buffers], {}, training=False)
        self.inputs = [v for v in converted.graph.inputs if v.name not in held]
        names = []
        for name in (str(value.name) for value in converted.graph.inputs):
            if name in held:
                constant = held[name].const_value
                assert constant is not None  # an initializer has a value
                tensor = torch.from_numpy(constant.numpy().copy())
                names.append(name.replace(".", "_"))
                if name in buffers:
                    self.register_buffer(names[-1], tensor)
                else:
                    self.register_parameter(names[-1], torch.nn.Parameter(tensor))
        self._held = names
        self._program = Program(single_part(converted), str(converted.graph.name), torch.device("cpu"), _differentiable)

    @classmethod
    def load(cls, path: Path) -> OnnxModule:
        """The module of a file.

        Raises:
            ArtifactError: the file is missing or is no ONNX model, or see the class.
        """
        try:
            model = ir.load(path)
        except Exception as error:  # of onnx_ir, protobuf or the file system
            todo = "give the path of a file that onnx.load reads"
            raise ArtifactError("The model cannot be read.", str(path), got=error, todo=todo) from error
        return cls(model)

    def forward(self, *arguments: torch.Tensor) -> Any:
        """Takes the graph's inputs in order; gives its output, or a tuple of its outputs."""
        results, _ = self._program.run([*arguments, *(getattr(self, name) for name in self._held)], ())
        return results[0] if len(results) == 1 else results

    def example(self, rows: int, other: int) -> tuple[torch.Tensor, ...]:
        """Inputs of the graph's types: normal values, zeros for indices, ones for masks.

        Args:
            rows: the size of open dimensions that are the first of an input.
            other: the size of the others.
        """
        first = {d.value for value in self.inputs for d in list(value.shape or ())[:1] if not isinstance(d, int)}
        found = []
        for value in self.inputs:
            shape = [d if isinstance(d, int) else rows if d.value in first else other for d in value.shape or ()]
            dtype = TORCH_DTYPES[dtype_of(value)]
            if dtype.is_floating_point:
                found.append(torch.randn(shape, dtype=dtype))
            else:
                found.append(torch.full(shape, int("mask" in str(value.name)), dtype=dtype))
        return tuple(found)


def _differentiable(node: ir.Node, device: str) -> Kernel:
    """PyTorch's own kernel, which autograd knows, and which writes over no input that autograd keeps."""
    return replace(definition_of(node).candidates(node, device)[0], in_place=None)


def _with_gradients(model: ir.Model) -> tuple[ir.Model, frozenset[str]]:
    """The model with FakeQuant in place of pairs that round, and the names of its scales; any other as it is."""
    if not any(node.op_type == "DequantizeLinear" for node in model.graph.all_nodes()):
        return model, frozenset()
    from onnxtrain.device.qat import fake_quantize  # noqa: PLC0415  needs the extra `ort`

    found = fake_quantize(ir.to_proto(model))
    model = ir.from_proto(found.model)
    floating = {n for n, v in model.graph.initializers.items() if v.dtype is not None and v.dtype.is_floating_point()}
    return model, frozenset(floating - {*found.parameters, *found.scales})
