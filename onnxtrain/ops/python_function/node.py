"""A user's `torch.autograd.Function` as a node, with its own forward and backward.

    PythonOp(tensors..., sizes?) -> context, outputs...          func_name, input_convention, ...
    PythonOpGrad(context, cotangents...) -> gradients...

The attributes are those of ONNX Runtime Training and describe the call; the node runs its `PythonCall`
(`node.meta["call"]`; copies of a node share it and the `MissingGradients` of its backward). The context is a Python
object while a program runs. In PyTorch's graph, during capture, the call is the operator `onnxtrain::python_op`, which
finds the PythonCall by its key.

Differences from ONNX Runtime Training: sizes may be arguments (convention "s"); the arguments in containers with
tensors or sizes count separately; addresses of Python objects are not written (`input_pointer_scalar_positions` has
their positions); bookkeeping is always on (`safe_run_mode`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import onnx_ir as ir
import torch
from torch.fx.node import has_side_effect

from onnxtrain.errors import GraphError
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, TensorType, type_of
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
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.interfaces.in_place import MAY_KEEP_INPUTS
from onnxtrain.ops.interfaces.recompute import OBJECT_OUTPUTS, REPEATABLE
from onnxtrain.ops.python_function.call import MissingGradients, PythonCall
from onnxtrain.ops.python_function.template import Slot, parts, slots
from onnxtrain.ops.registry import define
from onnxtrain.torch_compat import dispatch

_NO_BODY = NoBody("it runs the user's Python")

# The operator that represents a call while PyTorch captures

_CALLS: WeakValueDictionary[str, PythonCall] = WeakValueDictionary()
_SERIAL = itertools.count()

_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")
_LIBRARY.define("python_op(Tensor[] tensors, SymInt[] sizes, str key) -> Tensor[]")
TORCH_OP = torch.ops.onnxtrain.python_op.default
has_side_effect(TORCH_OP)  # the user's Python may do anything: the export drops no call


def register(call: PythonCall) -> str:
    """Return the key by which the operator finds `call` as long as the call is referenced."""
    key = f"{call.name}#{next(_SERIAL)}"
    _CALLS[key] = call
    return key


def _on_fakes(tensors: list[torch.Tensor], sizes: list[Any], key: str) -> list[torch.Tensor]:
    return _CALLS[key].on_fakes(tensors, sizes)


dispatch.register_fake(_LIBRARY, "onnxtrain::python_op", _on_fakes)


# PythonOp


def _from_torch(op: Builder, tensors: Sequence[ir.Value], sizes: Sequence[Size], key: str) -> list[ir.Value]:
    call = _CALLS[str(key)]
    size_inputs = list(sizes)
    if call.rule is not None:  # then forward's outputs are checked against these sizes
        size_inputs += [size for output in op.out[: len(call.outputs)] for size in output.shape]
    inputs = [*tensors, op.sizes(size_inputs)] if size_inputs else list(tensors)
    attributes = {**describe(call), **_types("input_tensor", [type_of(v) for v in tensors])}
    node = op.node(
        MICROSOFT,
        "PythonOp",
        inputs,
        {**attributes, **_types("output_tensor", op.out)},
        types=[TensorType(ir.DataType.INT64, ()), *op.out],
    )
    node.meta["call"], node.meta["missing_gradients"] = call, MissingGradients()
    return list(node.outputs)[1:]


def describe(call: PythonCall) -> dict[str, Any]:
    """Return the attributes that describe a call; None for an absent one."""
    leaves = [leaf for argument in (call.arguments, call.keywords) for leaf in _leaves(argument)]
    flags = [int(captured.requires_grad) for captured in call.inputs]
    reuse = [captured.alias for captured in call.outputs]
    return {
        "func_name": call.name,
        "input_convention": "".join(map(_convention, leaves)),
        "input_requires_grads": flags or None,
        "tensor_reuse_map": reuse or None,
        "training_mode": int(call.recorded),
        "comment": _comment(leaves),
        **_constants(leaves),
    }


def _leaves(argument: Any) -> list[Any]:
    """Return the arguments separately; a container without tensors and sizes is one argument."""
    if isinstance(argument, Slot) or (next(slots(argument), None) is None and not isinstance(argument, Mapping)):
        return [argument]
    return [leaf for part in parts(argument) for leaf in _leaves(part)]


def _convention(leaf: Any) -> str:
    return {"tensor": "d", "size": "s", "number": "s"}[leaf.kind] if isinstance(leaf, Slot) else "c"


_SCALARS = {bool: "bool", int: "int", float: "float"}  # bool before int: True is an int


def _constants(leaves: Sequence[Any]) -> dict[str, Any]:
    """Return attributes with the numbers and tuples of numbers of one type, and the positions of all other objects."""
    constants: dict[str, list[Any]] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Slot):
            continue
        kind = _SCALARS.get(type(leaf))
        kinds = {_SCALARS.get(type(part)) for part in leaf} if isinstance(leaf, tuple) else set()
        if kind:
            constants.setdefault(f"input_{kind}_scalars", []).append(_attribute_scalar(leaf))
            constants.setdefault(f"input_{kind}_scalar_positions", []).append(position)
        elif len(kinds) == 1 and None not in kinds:
            name = f"input_{kinds.pop()}_tuple"
            constants.setdefault(f"{name}_begins", []).append(len(constants.get(f"{name}s", ())))
            constants.setdefault(f"{name}s", []).extend(map(_attribute_scalar, leaf))
            constants.setdefault(f"{name}_positions", []).append(position)
        else:
            constants.setdefault("input_pointer_scalar_positions", []).append(position)
    return constants


def _comment(leaves: Sequence[Any]) -> str | None:
    """Describe the arguments that no attribute can hold."""
    descriptions = [
        f"{position}: {leaf!r}" if isinstance(leaf, (str, type(None))) else f"{position}: a {type(leaf).__qualname__}"
        for position, leaf in enumerate(leaves)
        if not isinstance(leaf, (Slot, *_SCALARS))
    ]
    return "; ".join(descriptions) or None


def _attribute_scalar(scalar: Any) -> Any:
    """Return a Python number as an attribute: an int is clamped to 64 bits."""
    return scalar if isinstance(scalar, float) else max(-(2**63), min(int(scalar), 2**63 - 1))


def _types(prefix: str, types: Sequence[TensorType]) -> dict[str, Any]:
    return {
        f"{prefix}_types": [int(t.dtype) for t in types] or None,
        f"{prefix}_ranks": [len(t.shape) for t in types] or None,
    }


def call_of(node: ir.Node) -> PythonCall:
    """Return the call that a PythonOp or PythonOpGrad node runs.

    Raises:
        GraphError: the node was read from a file, which holds no Python.
    """
    call: PythonCall | None = node.meta.get("call")
    if call is None:
        raise GraphError(
            f"{node.op_type} {node.name} has no Python function: it was read from a file", todo="capture the module"
        )
    return call


def _lower(n: NodeView, tensors: tuple[Any, ...]) -> Call:
    call = call_of(n.node)
    count = len(call.inputs)
    return Call(call.forward, tensors[:count], tensors[count] if len(tensors) > count else ())


def _gradient(op: Builder, n: NodeView, _context: None, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    call = call_of(n.node)
    gradients: list[ir.Value | None] = [None] * len(n.node.inputs)
    lacking = n.node.meta["missing_gradients"].lacking
    tracked = [i for i, captured in enumerate(call.inputs) if captured.requires_grad and captured.argument >= 0]
    differentiated = [i for i in tracked if i not in lacking and n.wants(f"inputs[{i}]")]
    sources = [n.inputs[i] for i in differentiated]
    node = op.node(
        MICROSOFT,
        "PythonOpGrad",
        [n.context, *cotangents[: len(call.outputs)]],
        {
            "func_name": call.name,
            "output_convention": "".join("d" if k.argument >= 0 else "c" for k in call.inputs),
            "output_tensor_requires_grads": [int(i in differentiated) for i in range(len(call.inputs))],
            "tensor_reuse_map": list(call.backward_reuse) or None,
            **_types("output_tensor", [type_of(v) for v in sources]),
        },
        types=[type_of(v) for v in sources],
    )
    node.meta["call"], node.meta["missing_gradients"] = call, n.node.meta["missing_gradients"]
    for index, gradient in zip(differentiated, node.outputs, strict=True):
        gradients[index] = gradient
    return gradients


def _declared_types(n: NodeView) -> list[TensorType]:
    return [type_of(v) for v in n.node.outputs]


_OPTIONAL = (
    "input_requires_grads", "input_tensor_types", "input_tensor_ranks", "output_tensor_types", "output_tensor_ranks",
    *(f"input_{type_name}_{suffix}" for type_name in ("bool", "int", "float") for suffix in (
        "scalars", "scalar_positions", "tuples", "tuple_positions", "tuple_begins",
    )),
    "input_pointer_scalar_positions", "tensor_reuse_map", "comment",
)  # fmt: skip

PYTHON_OP = define(
    OpDef(
        domain=MICROSOFT,
        name="PythonOp",
        inputs=("inputs...",),
        outputs=("context", "outputs..."),
        attributes={
            "func_name": REQUIRED,
            "input_convention": REQUIRED,
            "training_mode": 0,
            **dict.fromkeys(_OPTIONAL),
        },
        from_torch={"onnxtrain.python_op.default": _from_torch},
        shapes=_declared_types,
        body=_NO_BODY,
        gradient=(Gradient(_gradient, reads=("context",)),),
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=_lower, host_inputs_if_known=lambda n: {len(call_of(n.node).inputs)}),),
        axes=lambda n: "",
        effects=Effects.PYTHON | Effects.RANDOM,
        aliases={},  # an output may share an input's memory, but is not a view of it for autograd
        count_outputs=lambda inputs, attributes: 1 + len(attributes.get("output_tensor_types") or ()),
    )
)
FLOPS.register(PYTHON_OP, lambda n: 0)
OBJECT_OUTPUTS.register(PYTHON_OP, frozenset({"context"}))
REPEATABLE.register(PYTHON_OP, lambda node: call_of(node).is_recomputable)


# PythonOpGrad


def _lower_gradient(n: NodeView, context: Any, cotangents: tuple[Any, ...]) -> Call:
    # A gradient that no node reads is a result of the program: it may be None, as in eager.
    free = tuple(not gradient.uses() for gradient in n.node.outputs)
    wanted_indices = tuple(i for i, flag in enumerate(n.output_tensor_requires_grads) if flag)
    return Call(call_of(n.node).backward, n.node.meta["missing_gradients"], wanted_indices, free, context, cotangents)


PYTHON_OP_GRAD = define(
    OpDef(
        domain=MICROSOFT,
        name="PythonOpGrad",
        inputs=("context", "cotangents..."),
        outputs=("gradients...",),
        attributes={
            "func_name": REQUIRED,
            "output_convention": REQUIRED,
            "output_tensor_requires_grads": REQUIRED,
            **dict.fromkeys(("output_tensor_types", "output_tensor_ranks", "tensor_reuse_map", "comment")),
        },
        from_torch={},
        shapes=_declared_types,
        body=_NO_BODY,
        gradient=NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=_lower_gradient),),
        axes=lambda n: "",
        effects=Effects.PYTHON | Effects.RANDOM,
        aliases={},
        count_outputs=lambda inputs, attributes: sum(attributes["output_tensor_requires_grads"]),
    )
)
FLOPS.register(PYTHON_OP_GRAD, lambda n: 0)
MAY_KEEP_INPUTS.add(PYTHON_OP, PYTHON_OP_GRAD)
