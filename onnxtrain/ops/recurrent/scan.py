"""ONNX's Scan: a loop over the first axis, with which the bodies of recurrent layers run their steps.

    Scan(states..., sequences..., body) -> last states..., stacked outputs...

The body is a graph (states, a slice of each sequence) -> (states, outputs), which may read values of the outer graph.
Graphs for stock onnxruntime contain it. A Scan of an imported ONNX model has no gradient: see `device/from_onnx`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, normalize_axis, rank_of, set_type, type_of
from onnxtrain.ops.constructors import no_axes
from onnxtrain.ops.definition import REQUIRED, STANDARD, Call, Effects, Gradient, Kernel, NodeView, OpDef, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.registry import builder, define, definition_of

# (builder of the body, states, slices) -> (states, outputs)
Step = Callable[[Builder, Sequence[ir.Value], Sequence[ir.Value]], "tuple[Sequence[ir.Value], Sequence[ir.Value]]"]


def scan(
    op: Builder, states: Sequence[ir.Value], sequences: Sequence[ir.Value], step: Step, *, reverse: bool
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Build a Scan over axis 0 of all sequences and outputs, from the last slice to the first if `reverse`.

    Returns:
        The last states, and the outputs of all steps.
    """
    prefix = f"scan_{len(op.graph)}"
    inputs = []
    for index, (value, scanned_axes) in enumerate([*((v, 0) for v in states), *((v, 1) for v in sequences)]):
        body_input = ir.Value(name=f"{prefix}_{index}")
        set_type(body_input, TensorType(dtype_of(value), sizes.dims_of(value)[scanned_axes:]))
        inputs.append(body_input)
    body = ir.Graph(inputs, [], nodes=[], opset_imports=dict(op.graph.opset_imports), name=prefix)
    new_states, outputs = step(builder(body), inputs[: len(states)], inputs[len(states) :])
    body.outputs.extend([*new_states, *outputs])
    attributes: dict[str, Any] = {"body": body, "num_scan_inputs": len(sequences)}
    if reverse:
        attributes["scan_input_directions"] = [1] * len(sequences)
        attributes["scan_output_directions"] = [1] * len(outputs) or None
    results = op.node(ONNX, "Scan", [*states, *sequences], attributes).outputs
    return list(results[: len(states)]), list(results[len(states) :])


def _state_count(n: NodeView) -> int:
    return len(n.node.inputs) - int(n.num_scan_inputs)


def _axes(n: NodeView, name: str, values: Sequence[ir.Value]) -> list[int]:
    """Return the scanned axis of each input or output.

    An output has one axis more than its slices, which are `values`.
    """
    axes = getattr(n, name) or [0] * len(values)
    added = name == "scan_output_axes"
    return [normalize_axis(int(axis), rank_of(v) + added) for axis, v in zip(axes, values, strict=True)]


def _steps(n: NodeView) -> Size:
    sequences = n.values[_state_count(n) :]
    return sizes.dims_of(sequences[0])[_axes(n, "scan_input_axes", sequences)[0]]


def _types(n: NodeView) -> Sequence[TensorType]:
    count, length = _state_count(n), _steps(n)
    types = list(map(type_of, n.body.outputs))
    axes = _axes(n, "scan_output_axes", n.body.outputs[count:])
    return [
        *types[:count],
        *(TensorType(t.dtype, (*t.shape[:a], length, *t.shape[a:])) for t, a in zip(types[count:], axes, strict=True)),
    ]


def _output_count(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> int:
    return len(attributes["body"].outputs)


def _no_gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> Sequence[ir.Value | None]:
    raise GraphError(
        f"{traversal.describe(n.node)} has no gradient",
        where=traversal.origin(n.node),
        todo="express the loop as a recurrent layer, or unroll it",
    )


class Loop:
    """A Scan run in torch: each node of its body by its own kernel."""

    def __init__(self, n: NodeView) -> None:
        count = _state_count(n)
        sequences = n.values[count:]
        self._body: ir.Graph = n.body
        self._count = count
        self._axes = _axes(n, "scan_input_axes", sequences)
        self._reverse = [bool(d) for d in n.scan_input_directions or [0] * len(sequences)]
        outputs = n.body.outputs[count:]
        self._output_axes = _axes(n, "scan_output_axes", outputs)
        self._outputs_reverse = [bool(d) for d in n.scan_output_directions or [0] * len(outputs)]

    def __call__(self, *values: torch.Tensor) -> Any:
        states, sequences = list(values[: self._count]), values[self._count :]
        slices = [s.unbind(a) for s, a in zip(sequences, self._axes, strict=True)]
        steps = [tuple(reversed(s)) if reverse else s for s, reverse in zip(slices, self._reverse, strict=True)]
        outputs: list[list[torch.Tensor]] = []
        for step_slices in zip(*steps, strict=True):
            results = self._step([*states, *step_slices])
            states = results[: self._count]
            outputs.append(results[self._count :])
        if not outputs:
            stacked = [
                self._empty(v, a) for v, a in zip(self._body.outputs[self._count :], self._output_axes, strict=True)
            ]
        else:
            stacked = [
                torch.stack(list(reversed(slices_of_output) if reverse else slices_of_output), axis)
                for slices_of_output, axis, reverse in zip(
                    zip(*outputs, strict=True), self._output_axes, self._outputs_reverse, strict=True
                )
            ]
        results = [*states, *stacked]
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def _empty(value: ir.Value, axis: int) -> torch.Tensor:
        shape = [size if isinstance(size, int) else 0 for size in sizes.dims_of(value)]
        return torch.empty([*shape[:axis], 0, *shape[axis:]], dtype=TORCH_DTYPES[dtype_of(value)])

    def _step(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        tensors = dict(zip(self._body.inputs, inputs, strict=True))
        for node in self._body:
            definition = definition_of(node)
            arguments = [None if v is None else self._value(v, tensors) for v in node.inputs]
            arguments += [None] * (len(definition.inputs) - len(arguments))
            if definition.inputs[-1].endswith("..."):
                fixed = len(definition.inputs) - 1
                arguments = [*arguments[:fixed], tuple(arguments[fixed:])]  # type: ignore[list-item]
            result = definition.kernel(node, "cpu").lower(definition.view(node), *arguments).evaluate()
            tensors.update(zip(node.outputs, result if isinstance(result, tuple) else (result,), strict=True))
        return [self._value(v, tensors) for v in self._body.outputs]

    @staticmethod
    def _value(value: ir.Value, tensors: Mapping[ir.Value, torch.Tensor]) -> torch.Tensor:
        if value in tensors:
            return tensors[value]
        if value.const_value is None:
            raise GraphError(
                "the body of a Scan that runs in torch reads a value of the outer graph",
                expected="only its inputs and constants",
                got=value.name,
            )
        return torch.from_numpy(value.const_value.numpy().copy())


SCAN = define(
    OpDef(
        domain=ONNX,
        name="Scan",
        inputs=("values...",),
        outputs=("results...",),
        attributes={
            "body": REQUIRED,
            "num_scan_inputs": REQUIRED,
            "scan_input_axes": None,
            "scan_input_directions": None,
            "scan_output_axes": None,
            "scan_output_directions": None,
        },
        from_torch={},
        shapes=_types,
        body=STANDARD,
        gradient=(Gradient(_no_gradient, reads=()),),
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=lambda n, values: Call(Loop(n), *values)),),
        axes=no_axes,
        effects=Effects.NONE,
        aliases={},
        count_outputs=_output_count,
    )
)
FLOPS.register(SCAN, lambda n: sizes.multiply(_steps(n), *(numel(v) for v in n.body.outputs)))
