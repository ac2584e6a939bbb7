"""ATen: a PyTorch operator without an ONNX form, as one node that PyTorch runs.

    ATen(tensors..., sizes?) -> results..., handles...        operator, overload_name, arguments (JSON)
    ATenGrad(handles..., cotangents...) -> gradients...

Its gradient is PyTorch's own. If capture could trace it (`node.meta["gradient"]`), it consists of ordinary nodes.
Otherwise the forward program records autograd's graph on detached inputs when it runs the node, and returns the
recorded outputs and inputs, too (the handles); ATenGrad differentiates through them. The handles are saved for backward
like any other tensor, so random operators need no replay.
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
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.interfaces.in_place import MAY_KEEP_INPUTS
from onnxtrain.ops.registry import define
from onnxtrain.torch_compat import dispatch, pytree
from onnxtrain.torch_compat.operators import OpOverload, name_and_overload, written_arguments

_NO_BODY = NoBody("an operator of PyTorch that has no ONNX form")


AutocastState: TypeAlias = frozenset[tuple[str, torch.dtype]]  # the devices for which it is on, with its type


class Text(str):
    """A string argument of a call; a plain `str` is a size expression."""

    __slots__ = ()


# (builder, node, whether each tensor argument needs a gradient, one cotangent or None per result) -> one gradient or
# None per tensor argument; or None if the gradient must be taken at run time.
AtenGradient = Callable[
    [Builder, ir.Node, Sequence[bool], Sequence[ir.Value | None]], "Sequence[ir.Value | None] | None"
]


# Replacements: of operators that require certain strides, because the graph's strides differ from PyTorch's; and of
# operators that only set the conjugate or negative bit of a tensor, which some other operators do not support.
_REPLACEMENTS = {
    "aten::_conj": torch.ops.aten.conj_physical.default,
    "aten::_neg_view": torch.ops.aten.neg.default,
    "aten::view": torch.ops.aten.reshape.default,
    "aten::_unsafe_view": torch.ops.aten.reshape.default,
}


# Operators that access memory by explicit strides.
_READS_STRIDES = frozenset({"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"})


def reads_strides(target: Any) -> bool:
    """Return whether an operator reads memory by strides that it is given."""
    return isinstance(target, OpOverload) and name_and_overload(target)[0] in _READS_STRIDES


def aten_node(
    op: Builder, target: Any, arguments: Sequence[Any], keywords: dict[str, Any], contiguous: Sequence[bool] = ()
) -> ir.Node:
    """Append an ATen node for a call of `target`. Its results are the tensors among the call's results: `op.out`.

    Args:
        op: the builder.
        target: the operator's overload.
        arguments: its positional arguments, tensors as values, sizes as ints or expressions.
        keywords: its keyword arguments.
        contiguous: for each tensor argument, whether it is contiguous in PyTorch. The operator may rely on it, while
            the graph chooses memory formats of its own.

    Raises:
        UnsupportedOperatorError: an argument cannot be stored in the graph, or the operator needs PyTorch's strides.
    """
    if not isinstance(target, OpOverload):
        raise UnsupportedOperatorError(
            f"{target} is not a PyTorch operator",
            expected="an OpOverload, such as torch.ops.aten.add.Tensor",
            got=type(target).__name__,
            todo="rewrite it with torch functions",
        )
    name, overload = name_and_overload(target)
    if reads_strides(target) and not (contiguous and contiguous[0]):
        raise UnsupportedOperatorError(
            f"{name} of a non-contiguous tensor: strides differ between PyTorch and the graph",
            expected="a contiguous tensor",
            todo="call .contiguous() first, or use view, expand, unfold or indexing instead",
        )
    if overload == "default":
        target = _REPLACEMENTS.get(name, target)
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
            "autocast": [f"{d} {ONNX_DTYPES[t].name}" for d, t in sorted(autocast_state())] or None
            if is_composite(target)
            else None,
        },
        types=op.out,
    )


def aten_sum(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Add two values of a type that ONNX cannot add: complex ones."""
    op.out = (type_of(a),)
    return aten_node(op, torch.ops.aten.add.Tensor, [a, b], {}).outputs[0]


def is_composite(target: OpOverload) -> bool:
    """Return whether an operator is composed of others: autocast may cast inside it."""
    return dispatch.has_kernel_for_key(target.name(), "CompositeImplicitAutograd")


def autocast_state() -> AutocastState:
    """Return the current state of autocast."""
    return frozenset((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


class _Packer:
    """Serialize a call's arguments to JSON; tensors and sizes become indices of the node's inputs."""

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
        raise UnsupportedOperatorError(
            f"an argument of type {type(argument).__name__} cannot be stored in the graph",
            expected="tensors, numbers, strings, dtypes, layouts, memory formats or devices",
            got=str(argument),
        )


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
    """The operator of an ATen node with its constant arguments.

    Attributes:
        function: the operator.
        autocast: the devices and types to enable autocast for while it runs.
    """

    def __init__(self, node: ir.Node) -> None:
        view = NodeView(node, ATEN_OP)
        namespace, name = view.operator.split("::")
        packet = getattr(getattr(torch.ops, namespace), name)
        self.function = getattr(packet, view.overload_name or "default")
        self._written_arguments = written_arguments(self.function)
        self._spec = json.loads(view.arguments)
        self._contiguous = frozenset(view.contiguous)
        self.autocast = [(d, TORCH_DTYPES[ir.DataType[t]]) for d, t in (s.split() for s in view.autocast)]
        self.__name__ = f"aten_{name.strip('_')}"  # in generated source, `slice` would shadow Python's

    def arguments(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the call's positional and keyword arguments with these tensors and sizes."""
        keywords = {k: _unpack(v, tensors, sizes) for k, v in self._spec["kwargs"].items()}
        return _unpack(self._spec["args"], tensors, sizes), keywords

    def results(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Run the operator and return the tensors among its results."""
        arguments, keywords = self.arguments(tensors, sizes)
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            if self._written_arguments:
                result = self._call_on_copies(keywords)
            else:
                result = self.function(*arguments, **keywords)
        if isinstance(result, torch.Tensor):
            return (result,)
        return tuple(r for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor))

    def _call_on_copies(self, keywords: dict[str, Any]) -> Any:
        """Call an operator on copies of the arguments that it writes; return its results and these copies."""
        copies = {
            name: pytree.tree_map_only(torch.Tensor, torch.clone, keywords[name]) for name in self._written_arguments
        }
        return self.function(**{**keywords, **copies}), *copies.values()

    def __call__(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Return the result, or a tuple of several."""
        results = self.results(self._contiguous_where_needed(tensors), sizes)
        return results[0] if len(results) == 1 else results

    def recorded(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int], active: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """Return the results, then the handles: differentiable results and active tensors on autograd's tape."""
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() if a else t for t, a in zip(tensors, active, strict=True)]
            results = self.results(self._contiguous_where_needed(leaves), sizes)
        differentiable = [r for r in results if can_have_gradient(r)]
        active_leaves = [x for x, a in zip(leaves, active, strict=True) if a]
        return (*(r.detach() for r in results), *differentiable, *active_leaves)

    def _contiguous_where_needed(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [t.contiguous() if i in self._contiguous else t for i, t in enumerate(tensors)]


def can_have_gradient(tensor: torch.Tensor) -> bool:
    """Return whether autograd differentiates tensors of this dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def aten_call(node: ir.Node) -> AtenCall:
    """Return the call that an ATen node represents; it is parsed once per node."""
    call: AtenCall | None = node.meta.get("call")
    if call is None:
        call = node.meta["call"] = AtenCall(node)
    return call


def _lower(n: NodeView, tensors: tuple[Any, ...]) -> Call:
    call = aten_call(n.node)
    count = n.tensors
    sizes = tensors[count] if len(tensors) > count else ()
    if n.handles:
        return Call(call.recorded, tensors[:count], sizes, n.active)
    return Call(call, tensors[:count], sizes)


def _differentiable(values: Sequence[ir.Value | None]) -> list[ir.Value]:
    return [v for v in values if v is not None and is_differentiable_type(dtype_of(v))]


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    """Build the traced gradient; if there is none, differentiate at run time through handles."""
    node: ir.Node = n.node
    tensors = [v for v in list(node.inputs)[: n.tensors] if v is not None]  # no tensor is None: none is optional
    active = [n.wants(f"inputs[{i}]") for i in range(n.tensors)]
    trace: AtenGradient | None = node.meta.get("gradient")
    gradients = trace(op, node, active, cotangents[: n.results]) if trace is not None else None
    if gradients is None:
        gradients = _gradient_at_run_time(op, n, tensors, active, cotangents)
    return [*gradients, *([None] * (len(node.inputs) - len(gradients)))]


def _gradient_at_run_time(
    op: Builder, n: NodeView, tensors: Sequence[ir.Value], active: Sequence[bool], cotangents: Sequence[ir.Value | None]
) -> list[ir.Value | None]:
    """Add the handles to the node's outputs and build an ATenGrad that reads them."""
    node: ir.Node = n.node
    results = list(node.outputs)[: n.results]
    active_tensors = [t for t, a in zip(tensors, active, strict=True) if a]
    if not n.handles:
        sources = [*_differentiable(results), *active_tensors]
        node.resize_outputs(n.results + len(sources))
        node.attributes["handles"] = ir.AttrInt64("handles", len(sources))
        node.attributes["active"] = ir.AttrInt64s("active", [int(a) for a in active])
        for index, (handle, source) in enumerate(zip(list(node.outputs)[n.results :], sources, strict=True)):
            handle.name = f"{node.name}_handle_{index}"
            handle.type, handle.shape = source.type, source.shape
    handles = list(node.outputs)[n.results :]
    result_cotangents = [c for r, c in zip(results, cotangents, strict=False) if is_differentiable_type(dtype_of(r))]
    attributes = {
        "results": len(result_cotangents),
        "has_cotangent": [int(c is not None) for c in result_cotangents],
        "inputs": len(active_tensors),
    }
    inputs = [*handles, *(c for c in result_cotangents if c is not None)]
    types = [type_of(v) for v in active_tensors]
    gradients = iter(op.node(ATEN, "ATenGrad", inputs, attributes, types=types).outputs)
    return [next(gradients) if a else None for a in active]


def _declared_types(n: NodeView) -> list[TensorType]:
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
        from_torch={},
        shapes=_declared_types,
        body=_NO_BODY,
        gradient=(Gradient(_gradient, reads=("inputs", "outputs")),),
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=_lower, host_inputs_if_known=lambda n: {n.tensors}),),
        axes=lambda n: "",
        effects=Effects.RANDOM,  # not every schema says whether its operator is random: none is merged or dropped
        aliases={0: 0},  # if PyTorch's operator returns a view, it is one of the first tensor
        count_outputs=lambda inputs, attributes: attributes["results"] + attributes.get("handles", 0),
    )
)
FLOPS.register(ATEN_OP, lambda n: 0)


def _differentiate(
    results: int, has_cotangent: Sequence[int], tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    """Differentiate through the handles. `tensors` are handles of `results` results and of inputs, then cotangents."""
    handle_count = len(tensors) - sum(has_cotangent)
    outputs, leaves, cotangents = tensors[:results], tensors[results:handle_count], iter(tensors[handle_count:])
    pairs = [(output, next(cotangents)) for output, has in zip(outputs, has_cotangent, strict=True) if has]
    pairs = [(output, cotangent) for output, cotangent in pairs if output.requires_grad]
    if any(not leaf.requires_grad for leaf in leaves):
        raise KernelError(
            "an input saved for the gradient of an ATen node is no longer on autograd's tape",
            expected="handles with requires_grad=True",
            got=f"requires_grad={[leaf.requires_grad for leaf in leaves]}",
        )
    gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if pairs:
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                [output for output, _ in pairs], leaves, [c for _, c in pairs], retain_graph=True, allow_unused=True
            )
    dense = tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))
    return dense[0] if len(dense) == 1 else dense


ATEN_GRAD = define(
    OpDef(
        domain=ATEN,
        name="ATenGrad",
        inputs=("handles...",),
        outputs=("gradients...",),
        attributes={"results": REQUIRED, "has_cotangent": REQUIRED, "inputs": REQUIRED},
        from_torch={},
        shapes=_declared_types,
        body=_NO_BODY,
        gradient=NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=lambda n, t: Call(_differentiate, n.results, n.has_cotangent, t)),),
        axes=lambda n: "",
        effects=Effects.NONE,
        aliases={},
        count_outputs=lambda inputs, attributes: int(attributes["inputs"]),
    )
)
FLOPS.register(ATEN_GRAD, lambda n: 0)
MAY_KEEP_INPUTS.add(ATEN_OP, ATEN_GRAD)
