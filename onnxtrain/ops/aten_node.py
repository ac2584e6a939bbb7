"""A PyTorch operator that has no ONNX form stays one node, and runs as PyTorch runs it.

    ATen(tensors..., sizes?) -> results..., handles...        operator, overload_name, arguments (JSON)
    ATenGrad(handles..., cotangents...) -> gradients...

Its gradient is PyTorch's own. Where capture could trace it (`node.meta["gradient"]`), it is nodes like any others.
Elsewhere the forward program records autograd's graph on detached inputs when it runs the node, and hands out the
recorded outputs and inputs (the handles); ATenGrad differentiates through them. The handles are kept for backward like
any other tensor, and random operators need not be replayed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import onnx_ir as ir
import torch

from onnxtrain.errors import KernelError, UnsupportedOperatorError
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import ATEN, TensorType, dtype_of, is_differentiable_type, type_of
from onnxtrain.ops.constructors import always
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
from onnxtrain.ops.dtypes import ONNX_DTYPES, TORCH_DTYPES
from onnxtrain.ops.registry import define
from onnxtrain.torch_compat import dispatch, pytree
from onnxtrain.torch_compat.operators import OpOverload, name_and_overload, written_arguments

_NO_BODY = NoBody("PyTorch's own operator, which has no form in standard ops")


AutocastState: TypeAlias = frozenset[tuple[str, torch.dtype]]  # the devices on which it is on, and to which type


class Text(str):
    """A string among a call's arguments, told apart from a size expression."""

    __slots__ = ()


# (builder, node, for each tensor that the operator takes whether its gradient is asked for, one cotangent or None per
# result) -> one gradient or None per tensor; or None where the gradient has to be taken at run time.
AtenGradient = Callable[
    [Builder, ir.Node, Sequence[bool], Sequence[ir.Value | None]], "Sequence[ir.Value | None] | None"
]


# Operators that take only some strides, and those that take all: between PyTorch and the graph strides differ. And
# operators that only mark a tensor as conjugate or negative, which some others do not take.
_PLAIN = {
    "aten::_conj": torch.ops.aten.conj_physical.default,
    "aten::_neg_view": torch.ops.aten.neg.default,
    "aten::view": torch.ops.aten.reshape.default,
    "aten::_unsafe_view": torch.ops.aten.reshape.default,
}


# Operators that read memory by strides that they are given.
_READS_STRIDES = frozenset({"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"})


def reads_strides(target: Any) -> bool:
    """Whether an operator reads memory by strides that it is given."""
    return isinstance(target, OpOverload) and name_and_overload(target)[0] in _READS_STRIDES


def aten_node(
    op: Builder, target: Any, arguments: Sequence[Any], keywords: dict[str, Any], contiguous: Sequence[bool] = ()
) -> ir.Node:
    """Appends an ATen node for a call of `target`. Its results are the tensors among those of the call: `op.out`.

    Args:
        op: the builder.
        target: the operator's overload.
        arguments: its positional arguments, tensors as values, sizes as ints or expressions.
        keywords: its keyword arguments.
        contiguous: for each tensor among the arguments, whether it is contiguous in PyTorch. An operator may count on
            it, and the graph lays tensors out in its own way.

    Raises:
        UnsupportedOperatorError: the call takes something that cannot stand in the graph.
    """
    if not isinstance(target, OpOverload):
        raise UnsupportedOperatorError(
            f"{target} is not an operator of PyTorch", todo="rewrite it with torch functions"
        )
    name, overload = name_and_overload(target)
    if reads_strides(target) and not (contiguous and contiguous[0]):
        raise UnsupportedOperatorError(
            "as_strided reads memory by strides, which differ between PyTorch and the graph",
            todo="take as_strided of a contiguous tensor, or write it with view, expand, unfold or indexing",
        )
    if overload == "default":
        target = _PLAIN.get(name, target)
        name, overload = name_and_overload(target)
    packer = _Packer()
    spec = {"args": [packer.pack(a) for a in arguments], "kwargs": {k: packer.pack(v) for k, v in keywords.items()}}
    inputs = list(packer.tensors)
    if packer.sizes:
        inputs.append(op.sizes(packer.sizes))
    return op.node(
        ATEN,
        "ATen",
        inputs,
        {
            "operator": name,
            "overload_name": overload,
            "arguments": json.dumps(spec),
            "tensors": len(packer.tensors),
            "results": len(op.out),
            "contiguous": [i for i, flag in enumerate(contiguous) if flag] or None,
            "autocast": [f"{d} {ONNX_DTYPES[t].name}" for d, t in sorted(ambient())] or None
            if is_composite(target)
            else None,
        },
        types=op.out,
    )


def aten_sum(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sum of two values of one type that ONNX cannot add: complex ones."""
    op.out = (type_of(a),)
    return aten_node(op, torch.ops.aten.add.Tensor, [a, b], {}).outputs[0]


def is_composite(target: OpOverload) -> bool:
    """Whether an operator is a composition of others: autocast may cast inside it."""
    return dispatch.has_kernel_for_key(target.name(), "CompositeImplicitAutograd")


def ambient() -> AutocastState:
    """Autocast as it is now."""
    return frozenset((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


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
            case complex():
                return {"complex": [argument.real, argument.imag]}
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
        case {"complex": [real, imaginary]}:
            return complex(real, imaginary)
        case {"dtype": str(name)}:
            return TORCH_DTYPES[ir.DataType[name]]
        case {"torch": str(name)}:
            return getattr(torch, name)
        case {"device": str(name)}:
            return torch.device(name)
    return spec


class AtenCall:
    """The operator of an ATen node with its fixed arguments.

    Attributes:
        function: the operator.
        autocast: the devices and types for which autocast is on while it runs.
    """

    def __init__(self, node: ir.Node) -> None:
        view = NodeView(node, ATEN_OP)
        namespace, name = view.operator.split("::")
        packet = getattr(getattr(torch.ops, namespace), name)
        self.function = getattr(packet, view.overload_name or "default")
        self._writes = written_arguments(self.function)
        self._spec = json.loads(view.arguments)
        self._contiguous = frozenset(view.contiguous)
        self.autocast = [(d, TORCH_DTYPES[ir.DataType[t]]) for d, t in (s.split() for s in view.autocast)]
        self.__name__ = f"aten_{name.strip('_')}"  # in generated source, where `slice` is Python's own

    def arguments(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The call's arguments, with these tensors and sizes in their places."""
        keywords = {k: _unpack(v, tensors, sizes) for k, v in self._spec["kwargs"].items()}
        return _unpack(self._spec["args"], tensors, sizes), keywords

    def results(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The tensors among the operator's results."""
        arguments, keywords = self.arguments(tensors, sizes)
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            if self._writes:
                result = self._on_copies(keywords)
            else:
                result = self.function(*arguments, **keywords)
        if isinstance(result, torch.Tensor):
            return (result,)
        return tuple(r for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor))

    def _on_copies(self, keywords: dict[str, Any]) -> Any:
        """The results of an operator that writes to its arguments, and the written copies of those."""
        copies = {name: pytree.tree_map_only(torch.Tensor, torch.clone, keywords[name]) for name in self._writes}
        return self.function(**{**keywords, **copies}), *copies.values()

    def __call__(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """The result, or a tuple of several."""
        results = self.results(self._laid_out(tensors), sizes)
        return results[0] if len(results) == 1 else results

    def recorded(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int], active: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """The results, then the handles: the floating results and the active tensors on autograd's tape."""
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() if a else t for t, a in zip(tensors, active, strict=True)]
            results = self.results(self._laid_out(leaves), sizes)
        recorded = [r for r in results if _can_have_gradient(r)]
        return (*(r.detach() for r in results), *recorded, *(x for x, a in zip(leaves, active, strict=True) if a))

    def _laid_out(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [t.contiguous() if i in self._contiguous else t for i, t in enumerate(tensors)]


def _can_have_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def aten_call(node: ir.Node) -> AtenCall:
    """The call that an ATen node stands for."""
    known: AtenCall | None = node.meta.get("call")
    if known is None:
        known = node.meta["call"] = AtenCall(node)
    return known


def _lower(n: NodeView, tensors: tuple[Any, ...]) -> Call:
    call = aten_call(n.node)
    count = n.tensors
    sizes = tensors[count] if len(tensors) > count else ()
    if n.handles:
        return Call(call.recorded, tensors[:count], sizes, n.active)
    return Call(call, tensors[:count], sizes)


def _floating(values: Sequence[ir.Value | None]) -> list[ir.Value]:
    return [v for v in values if v is not None and is_differentiable_type(dtype_of(v))]


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    """The traced gradient; where there is none, through handles that the node then gives."""
    node: ir.Node = n.node
    tensors = [v for v in list(node.inputs)[: n.tensors] if v is not None]  # all of them: none is optional
    active = [n.wants(f"inputs[{i}]") for i in range(n.tensors)]
    trace: AtenGradient | None = node.meta.get("gradient")
    found = trace(op, node, active, cotangents[: n.results]) if trace is not None else None
    if found is None:
        found = _gradient_at_run_time(op, n, tensors, active, cotangents)
    return [*found, *([None] * (len(node.inputs) - len(found)))]


def _gradient_at_run_time(
    op: Builder, n: NodeView, tensors: Sequence[ir.Value], active: Sequence[bool], cotangents: Sequence[ir.Value | None]
) -> list[ir.Value | None]:
    node: ir.Node = n.node
    results = list(node.outputs)[: n.results]
    wanted = [t for t, a in zip(tensors, active, strict=True) if a]
    if not n.handles:
        sources = [*_floating(results), *wanted]
        node.resize_outputs(n.results + len(sources))
        node.attributes["handles"] = ir.AttrInt64("handles", len(sources))
        node.attributes["active"] = ir.AttrInt64s("active", [int(a) for a in active])
        for index, (handle, source) in enumerate(zip(list(node.outputs)[n.results :], sources, strict=True)):
            handle.name = f"{node.name}_handle_{index}"
            handle.type, handle.shape = source.type, source.shape
    handles = list(node.outputs)[n.results :]
    given = [c for r, c in zip(results, cotangents, strict=False) if is_differentiable_type(dtype_of(r))]
    gradients = iter(
        op.node(
            ATEN,
            "ATenGrad",
            [*handles, *(c for c in given if c is not None)],
            {"results": len(given), "given": [int(c is not None) for c in given], "inputs": len(wanted)},
            types=[type_of(v) for v in wanted],
        ).outputs
    )
    return [next(gradients) if a else None for a in active]


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
            "active": (),
            "contiguous": (),
            "autocast": (),
        },
        since_version=1,
        from_torch={},
        shapes=_known_types,
        body=_NO_BODY,
        ort_compatible=lambda n: False,
        gradient=(Gradient(_gradient, reads=("inputs", "outputs")),),
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=_lower, host_inputs_if_known=lambda n: {n.tensors}),),
        axes=lambda n: "",
        effects=Effects.RANDOM,  # which operators draw is not told by all their schemas: none is merged or dropped
        aliases={0: 0},  # where PyTorch's operator gives a view, it is one of its first tensor
        flops=lambda n: 0,
        host_eval=None,
        count_outputs=lambda inputs, attributes: attributes["results"] + attributes.get("handles", 0),
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
    found: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if pairs:
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
        since_version=1,
        from_torch={},
        shapes=_known_types,
        body=_NO_BODY,
        ort_compatible=always,
        gradient=NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=lambda n, t: Call(_differentiate, n.results, n.given, t)),),
        axes=lambda n: "",
        effects=Effects.NONE,
        aliases={},
        flops=lambda n: 0,
        host_eval=None,
        count_outputs=lambda inputs, attributes: int(attributes["inputs"]),
    )
)
