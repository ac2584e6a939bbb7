"""The last resort: a PyTorch operator that has no ONNX form stays one node, and runs as PyTorch runs it.

    ATen(tensors..., sizes?) -> results..., handles...        operator, overload_name, arguments (JSON)
    ATenGrad(handles..., cotangents...) -> gradients...

Its gradient is PyTorch's own: when the forward program runs the node it records autograd's graph on detached inputs,
and hands out the recorded outputs and inputs (the handles); ATenGrad differentiates through them. The handles are kept
for backward like any other tensor, and random operators need not be replayed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import KernelError, UnsupportedOperatorError
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import ATEN, TensorType, dtype_of, is_differentiable_type, type_of
from onnxtrain.ops.constructors import ONNX_DTYPES, TORCH_DTYPES, always
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    REQUIRED,
    Call,
    Effects,
    Gradient,
    Kernel,
    NoBody,
    NodeView,
    OpDef,
)
from onnxtrain.ops.registry import define

_NO_BODY = NoBody("PyTorch's own operator, which has no form in standard ops")


class Text(str):
    """A string among a call's arguments, told apart from a size expression."""

    __slots__ = ()


def aten_node(op: Builder, target: Any, arguments: Sequence[Any], keywords: dict[str, Any], example: Any) -> Any:
    """Appends an ATen node for a call of `target`. `example` is PyTorch's (fake) result: it gives the types.

    Raises:
        UnsupportedOperatorError: the call takes or returns something that cannot stand in the graph.
    """
    if not isinstance(target, torch._ops.OpOverload):
        raise UnsupportedOperatorError(
            f"{target} is not an operator of PyTorch", todo="rewrite it with torch functions"
        )
    packer = _Packer()
    spec = {"args": [packer.pack(a) for a in arguments], "kwargs": {k: packer.pack(v) for k, v in keywords.items()}}
    examples = list(example) if isinstance(example, (tuple, list)) else [example]
    if not all(isinstance(e, torch.Tensor) for e in examples):
        raise UnsupportedOperatorError(f"{target} returns something other than tensors", got=str(example))
    inputs = list(packer.tensors)
    if packer.sizes:
        inputs.append(op.sizes(packer.sizes))
    node = op.node(
        ATEN,
        "ATen",
        inputs,
        {
            "operator": target._schema.name,
            "overload_name": target._overloadname,
            "arguments": json.dumps(spec),
            "tensors": len(packer.tensors),
            "results": len(examples),
        },
        types=op.out,
    )
    return list(node.outputs) if isinstance(example, (tuple, list)) else node.outputs[0]


class _Packer:
    """Writes a call's arguments as JSON, tensors and sizes by their position among the node's inputs."""

    def __init__(self) -> None:
        self.tensors: list[ir.Value] = []
        self.sizes: list[Size] = []

    def pack(self, argument: Any) -> Any:
        match argument:
            case ir.Value():
                self.tensors.append(argument)
                return {"tensor": len(self.tensors) - 1}
            case Text():
                return {"text": str(argument)}
            case str():
                self.sizes.append(argument)
                return {"size": len(self.sizes) - 1}
            case None | bool() | int() | float():
                return argument
            case list() | tuple():
                return [self.pack(a) for a in argument]
            case torch.dtype():
                return {"dtype": ONNX_DTYPES[argument].name}
            case torch.memory_format() | torch.layout():
                return {"torch": str(argument).removeprefix("torch.")}
            case torch.device():
                return {"device": str(argument)}
        raise UnsupportedOperatorError(f"an argument of type {type(argument).__name__} in the graph", got=str(argument))


def _unpack(spec: Any, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
    match spec:
        case list():
            return [_unpack(s, tensors, sizes) for s in spec]
        case {"tensor": int(index)}:
            return tensors[index]
        case {"size": int(index)}:
            return sizes[index]
        case {"text": str(text)}:
            return text
        case {"dtype": str(name)}:
            return TORCH_DTYPES[ir.DataType[name]]
        case {"torch": str(name)}:
            return getattr(torch, name)
        case {"device": str(name)}:
            return torch.device(name)
    return spec


class _Operator:
    """A PyTorch operator with its fixed arguments."""

    def __init__(self, node: NodeView) -> None:
        namespace, name = node.operator.split("::")
        packet = getattr(getattr(torch.ops, namespace), name)
        self._function = getattr(packet, node.overload_name or "default")
        self._spec = json.loads(node.arguments)
        self.__name__ = name

    def __call__(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """The result, or a tuple of several."""
        results = self._results(tensors, sizes)
        return results[0] if len(results) == 1 else results

    def _results(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        keywords = {k: _unpack(v, tensors, sizes) for k, v in self._spec["kwargs"].items()}
        result = self._function(*_unpack(self._spec["args"], tensors, sizes), **keywords)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def recorded(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The results, then the handles: the results and the floating inputs on autograd's tape."""
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() if _can_have_gradient(t) else t for t in tensors]
            results = self._results(leaves, sizes)
        handles = [*(r for r in results if _can_have_gradient(r)), *(x for x in leaves if x.requires_grad)]
        return (*(r.detach() for r in results), *handles)


def _can_have_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _lower(n: NodeView, tensors: tuple[Any, ...]) -> Call:
    operator = _operator(n.node)
    count = n.tensors
    sizes = tensors[count] if len(tensors) > count else ()
    recorded = len(n.node.outputs) > n.results
    return Call(operator.recorded if recorded else operator, tensors[:count], sizes)


def _operator(node: ir.Node) -> _Operator:
    known: _Operator | None = node.meta.get("operator")
    if known is None:
        known = node.meta["operator"] = _Operator(NodeView(node, ATEN_OP))
    return known


def _floating(values: Sequence[ir.Value | None]) -> list[ir.Value]:
    return [v for v in values if v is not None and is_differentiable_type(dtype_of(v))]


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    """Gives the forward node its handles, and differentiates through them."""
    node: ir.Node = n.node
    results = list(node.outputs)[: n.results]
    tensors = list(node.inputs)[: n.tensors]
    sources = [*_floating(results), *_floating(tensors)]
    if len(node.outputs) == n.results:
        node.resize_outputs(n.results + len(sources))
        node.attributes["handles"] = ir.AttrInt64("handles", len(sources))
        for index, (handle, source) in enumerate(zip(list(node.outputs)[n.results :], sources, strict=True)):
            handle.name = f"{node.name}_handle_{index}"
            handle.type, handle.shape = source.type, source.shape
    handles = list(node.outputs)[n.results :]
    count = len(_floating(results))
    given = [c for r, c in zip(results, cotangents, strict=False) if is_differentiable_type(dtype_of(r))]
    gradients = op.node(
        ATEN,
        "ATenGrad",
        [*handles, *(c for c in given if c is not None)],
        {"results": count, "given": [int(c is not None) for c in given], "inputs": len(_floating(tensors))},
        types=[type_of(v) for v in _floating(tensors)],
    ).outputs
    rest = iter(gradients)
    found: list[ir.Value | None] = [
        next(rest) if v is not None and is_differentiable_type(dtype_of(v)) else None for v in tensors
    ]
    return found + [None] * (len(node.inputs) - len(found))


def _known_types(n: NodeView) -> list[TensorType]:
    return [type_of(v) for v in n.node.outputs]


ATEN_OP = define(
    OpDef(
        domain=ATEN,
        name="ATen",
        inputs=("inputs...",),
        outputs=("outputs...",),
        attributes={
            "operator": REQUIRED,
            "overload_name": "",
            "arguments": REQUIRED,
            "tensors": REQUIRED,
            "results": REQUIRED,
            "handles": 0,
        },
        since=1,
        from_torch={},
        shapes=_known_types,
        body=_NO_BODY,
        native_ok=lambda n: False,
        gradient=(Gradient(_gradient, reads=("outputs",)),),
        stops=frozenset(),
        kernels=(Kernel(lower=_lower, host_if_known=True),),
        axes=lambda n: "",
        effects=Effects.RANDOM,  # which operators draw is not told by all their schemas: none is merged or dropped
        aliases={},
        flops=lambda n: 0,
        host=None,
        outputs_of=lambda inputs, attributes: attributes["results"] + attributes.get("handles", 0),
    )
)


def _differentiate(
    results: int, given: Sequence[int], tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    count = len(tensors) - sum(given)
    outputs, leaves, cotangents = tensors[:results], tensors[results:count], iter(tensors[count:])
    pairs = [(o, next(cotangents)) for o, g in zip(outputs, given, strict=True) if g]
    pairs = [(o, c) for o, c in pairs if o.requires_grad]
    if any(not leaf.requires_grad for leaf in leaves):
        raise KernelError("an input kept for an ATen node's gradient lost its place on autograd's tape")
    with torch.enable_grad():
        found = torch.autograd.grad(
            [o for o, _ in pairs], leaves, [c for _, c in pairs], retain_graph=True, allow_unused=True
        )
    gradients = tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))
    return gradients[0] if len(gradients) == 1 else gradients


define(
    OpDef(
        domain=ATEN,
        name="ATenGrad",
        inputs=("handles...",),
        outputs=("gradients...",),
        attributes={"results": REQUIRED, "given": REQUIRED, "inputs": REQUIRED},
        since=1,
        from_torch={},
        shapes=_known_types,
        body=_NO_BODY,
        native_ok=always,
        gradient=NOT_DIFFERENTIABLE,
        stops=frozenset(),
        kernels=(Kernel(lower=lambda n, t: Call(_differentiate, n.results, n.given, t)),),
        axes=lambda n: "",
        effects=Effects.NONE,
        aliases={},
        flops=lambda n: 0,
        host=None,
        outputs_of=lambda inputs, attributes: int(attributes["inputs"]),
    )
)
