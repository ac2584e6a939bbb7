"""An ONNX model as a PyTorch module: parameters by name, forward in PyTorch's operators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.device.from_onnx import convert, prepare, statistics
from onnxtrain.errors import ArtifactError
from onnxtrain.execute.program import Program
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import Kernel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.plan.cut import single_part


class OnnxModule(torch.nn.Module):
    """Run an ONNX model with PyTorch's operators, differentiably.

    Floating-point initializers are parameters, in the file's order and with its names ("_" for "."). The running
    statistics of BatchNormalization are buffers and are not updated. In a quantized model, pairs of QuantizeLinear and
    DequantizeLinear become FakeQuant and integer weights floating-point parameters, as by
    `onnxtrain.artifacts.fake_quantize`; scales are buffers.

    Args:
        model: of any exporter.

    Attributes:
        inputs: the graph's inputs, typed, in the order of forward's arguments.
        outputs: the names of forward's outputs; a single output is not in a tuple.

    Raises:
        ArtifactError: an op, a dtype or a shape is not supported in training graphs.
    """

    def __init__(self, model: ir.Model) -> None:
        super().__init__()
        model, scales = _with_gradients(model)
        model = prepare(model)
        initializers = model.graph.initializers
        buffers = {*statistics(model), *scales}
        trained = [
            n
            for n, v in initializers.items()
            if v.dtype is not None and v.dtype.is_floating_point() and n not in buffers
        ]
        self.outputs = [str(value.name) for value in model.graph.outputs]
        converted = convert(model, self.outputs, [*trained, *buffers], {}, training=False)
        self.inputs = [v for v in converted.graph.inputs if v.name not in initializers]
        names = []
        for name in (str(value.name) for value in converted.graph.inputs):
            if name in initializers:
                constant = initializers[name].const_value
                assert constant is not None  # an initializer has a value
                tensor = _tensor(constant)
                names.append(name.replace(".", "_"))
                if name in buffers:
                    self.register_buffer(names[-1], tensor)
                else:
                    self.register_parameter(names[-1], torch.nn.Parameter(tensor))
        self._names = names
        self._program = Program(single_part(converted), str(converted.graph.name), torch.device("cpu"), _differentiable)

    @classmethod
    def load(cls, path: Path) -> OnnxModule:
        """Load the module from a file.

        Raises:
            ArtifactError: the file does not exist or is not an ONNX model; or as the constructor.
        """
        try:
            model = ir.load(path)
        except Exception as error:  # of onnx_ir, protobuf or the file system
            todo = "pass the path of a file that onnx.load reads"
            raise ArtifactError("The model cannot be read.", str(path), got=error, todo=todo) from error
        return cls(model)

    def forward(self, *arguments: torch.Tensor) -> Any:
        """Take the graph's inputs in order; return its output, or a tuple of its outputs."""
        results, _ = self._program.run([*arguments, *(getattr(self, name) for name in self._names)], ())
        return results[0] if len(results) == 1 else results

    def example(self, rows: int, other: int) -> tuple[torch.Tensor, ...]:
        """Make inputs of the graph's types: normal samples, zeros for indices, ones for masks.

        Args:
            rows: the size of dynamic dimensions that are the first of an input.
            other: the size of other dynamic dimensions.
        """
        first = {d.value for value in self.inputs for d in list(value.shape or ())[:1] if not isinstance(d, int)}
        tensors = []
        for value in self.inputs:
            shape = [d if isinstance(d, int) else rows if d.value in first else other for d in value.shape or ()]
            dtype = TORCH_DTYPES[dtype_of(value)]
            if dtype.is_floating_point:
                tensors.append(torch.randn(shape, dtype=dtype))
            else:
                tensors.append(torch.full(shape, int("mask" in str(value.name)), dtype=dtype))
        return tuple(tensors)


def _differentiable(node: ir.Node, device: str) -> Kernel:
    """PyTorch's own kernel, which autograd supports, without overwriting inputs that autograd saves."""
    return replace(definition_of(node).candidates(node, device)[0], in_place_input=None)


def _with_gradients(model: ir.Model) -> tuple[ir.Model, frozenset[str]]:
    """Replace Q/DQ pairs of a quantized model by FakeQuant; also return the names of its scales."""
    if not any(node.op_type == "DequantizeLinear" for node in model.graph.all_nodes()):
        return model, frozenset()
    from onnxtrain.device.qat import fake_quantize  # noqa: PLC0415  needs the extra `ort`

    quantized = fake_quantize(ir.to_proto(model))
    model = ir.from_proto(quantized.model)
    floating = {n for n, v in model.graph.initializers.items() if v.dtype is not None and v.dtype.is_floating_point()}
    return model, frozenset(floating - {*quantized.parameters, *quantized.scales})


def _tensor(constant: ir.TensorProtocol) -> torch.Tensor:
    if constant.dtype == ir.DataType.BFLOAT16:  # NumPy has it as an extension, which PyTorch does not read
        return torch.from_numpy(constant.numpy().view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(constant.numpy().copy())
