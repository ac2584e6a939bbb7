"""Convert an exported FX graph of ATen calls to an ONNX graph.

The definitions of the ops say how to convert each call (`OpDef.from_torch`). This module walks the FX graph, copies
names, types, module paths and source locations, and checks every output against the type that PyTorch gave it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import onnx_ir as ir
import torch
from torch.export.exported_program import ExportedProgram

from onnxtrain.capture import source_location
from onnxtrain.capture.convert.aten_gradient import TracedGradient
from onnxtrain.capture.convert.copied_calls import CopiedCalls
from onnxtrain.capture.convert.symbolic_sizes import fixed_number, number_from_sizes, size_of, tensor_type
from onnxtrain.capture.export.checkpoint_regions import REGION, checkpoint_region_of
from onnxtrain.capture.functionalize.autocast import refuse_hidden_casts
from onnxtrain.capture.functionalize.composite_operators import record_size_guards
from onnxtrain.capture.functionalize.functional_calls import ASSERTIONS_AND_SIZES, ITEM
from onnxtrain.capture.functionalize.memory_order import memory_order
from onnxtrain.capture.node_storage import COPY_OF, storages_of
from onnxtrain.errors import GraphError, UnsupportedOperatorError
from onnxtrain.graph import sizes
from onnxtrain.graph.alias import view_source
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of, is_differentiable_type, rank_of, set_type, type_of
from onnxtrain.ops import FROM_TORCH, builder, definition_of
from onnxtrain.ops.aten_node import Text, aten_call, aten_node, reads_strides
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.dtypes import ONNX_DTYPES
from onnxtrain.ops.interfaces.memory_format import EAGERS_FORMAT
from onnxtrain.ops.python_function.node import TORCH_OP as PYTHON_OP
from onnxtrain.system.time_limit import check_time
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.decompositions import auto_functionalized
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.tensors import is_contiguous_or_false

_CHANNELS_LAST = [0, 2, 3, 1]  # the axes in their order in memory
_MAX_LITERAL_SIZE = 64  # elements of a tensor constant that a traced gradient may contain


class Converted:
    """The ONNX graph of an exported program.

    Attributes:
        model: the graph; its inputs are the program's placeholders, its outputs the program's tensor outputs.
        outputs: for each output of the program, its value in the graph, or a Python constant.
    """

    def __init__(self, model: ir.Model, outputs: list[Any]) -> None:
        self.model = model
        self.outputs = outputs


def convert(program: ExportedProgram, name: str) -> Converted:
    """Convert `program`, whose graph must be functional ATen.

    Raises:
        UnsupportedOperatorError: a call has no ONNX or ATen node; names its source location.
    """
    refuse_hidden_casts(program, FROM_TORCH)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
    walk = _Walk(builder(graph), graph)
    for node in program.graph.nodes:
        walk.visit(node)
    graph.outputs.extend(v for v in walk.outputs if isinstance(v, ir.Value))
    _name_values(graph)
    graph.opset_imports.update({node.domain: 1 for node in graph if node.domain})
    return Converted(ir.Model(graph, ir_version=10, producer_name="onnxtrain"), walk.outputs)


class _Walk:
    """Converts the nodes of an FX graph in order. With `converted`, it adds them to an existing graph: see `inline`."""

    def __init__(self, op: Builder, graph: ir.Graph, converted: Mapping[torch.fx.Node, Any] | None = None) -> None:
        self.op = op
        self.outputs: list[Any] = []
        self._graph = graph
        self._origin = dict(op.origin) if converted is not None else None
        self._values: dict[torch.fx.Node, Any] = dict(converted or {})
        self._copied_calls = CopiedCalls(graph, self._values) if converted is None else None
        self._items: dict[str, torch.fx.Node] = {}  # the calls of `tensor.item()`, by the symbol of the result

    def visit(self, node: torch.fx.Node) -> None:
        if node in self._values:
            return
        check_time()
        match node.op:
            case "placeholder":
                self._placeholder(node)
            case "call_function":
                self._call(node)
            case "output":
                self.outputs = [self._converted_output(a) for a in node.args[0]]  # type: ignore[union-attr]
            case "get_attr":
                self._constant(node)
            case _:
                raise UnsupportedOperatorError(
                    "the exported graph contains a node of an unsupported kind",
                    where=source_location.of_node(node),
                    expected="placeholder, call_function, get_attr or output",
                    got=node.op,
                    todo="the module runs in PyTorch; please report it with the module",
                )

    def _converted_output(self, argument: Any) -> Any:
        value = self._argument(argument)
        if value is None and isinstance(argument, torch.fx.Node) and isinstance(_value(argument), torch.Tensor):
            raise UnsupportedOperatorError(
                f"the graph does not compute the result {argument.name}, which forward returns",
                where=source_location.of_node(argument),
                got=str(argument.target),
                todo="the module runs in PyTorch; do not return this result of the operator",
            )
        return value

    def _placeholder(self, node: torch.fx.Node) -> None:
        example = node.meta.get("val")
        if not isinstance(example, torch.Tensor):
            self._values[node] = example
            return
        value = ir.Value(name=node.name)
        set_type(value, tensor_type(example))
        self._graph.inputs.append(value)
        self._values[node] = value

    def _constant(self, node: torch.fx.Node) -> None:
        if node.op == "get_attr" and self._origin is not None:
            tensor = getattr(node.graph.owning_module, str(node.target))
            if type(tensor) is torch.Tensor and tensor.numel() <= _MAX_LITERAL_SIZE:
                self._values[node] = self.op.constant(tensor.cpu().numpy(), ONNX_DTYPES[tensor.dtype])
                return
        raise UnsupportedOperatorError(
            f"the graph contains the attribute {node.target}, which a graph cannot represent",
            where=source_location.of_node(node),
            expected=f"a tensor of at most {_MAX_LITERAL_SIZE} elements in a traced gradient",
            todo="the module runs in PyTorch; please report it with the module",
        )

    def _call(self, node: torch.fx.Node) -> None:
        target: Any = node.target
        name = str(target)
        example = node.meta.get("val")
        if target is operator.getitem:
            source, index = node.args
            self._values[node] = self._values[source][index]  # type: ignore[index]
            return
        if isinstance(example, (torch.SymInt, int)) and not isinstance(example, bool):
            self._values[node] = size_of(example)
            if name in ITEM:
                self._add_size_from_item(node)
            return
        if name in ITEM and isinstance(example, torch.SymFloat):
            self._items[str(example.node.expr)] = node
        if ASSERTIONS_AND_SIZES.match(name) or (example is None and not node.users and not node.is_impure()):
            return
        if isinstance(example, (torch.SymFloat, torch.SymBool, float, bool)):
            with self.op.at(self._origin_of(node)):
                self._values[node] = self._converted_number(example, node)
            return
        before = len(self._graph)
        copied = self._copied_calls.copy(node, origin_of) if self._copied_calls is not None else None
        if copied is not None:
            self._values[node] = copied
        else:
            with self.op.at(self._origin_of(node)):
                self._values[node] = self._convert_call(node, target, name, example)
        self._name_nodes(node, before)

    def _converted_number(self, example: Any, node: torch.fx.Node) -> Any:
        """Return the number, a double value that computes it, or the error to raise if an operator takes it.

        An assertion about sizes ignores its argument, so that the error is not raised for it.
        """
        if isinstance(example, (bool, float)):
            return example
        is_float = isinstance(example, torch.SymFloat)
        static = example.node.maybe_as_float() if is_float else example.node.maybe_as_bool()
        if static is not None:
            return static
        expr = example.node.expr
        item = next((call for s in expr.free_symbols if (call := self._items.get(str(s))) is not None), None)
        if is_float and node.users:
            value = number_from_sizes(self.op, expr, self._item_as_double)
            if value is not None:
                return value
        origin = "reads a tensor value as a Python number" if item else "computes a Python number from sizes"
        return UnsupportedOperatorError(
            f"forward {origin}, and passes it to an operator",
            where=source_location.of_node(item or node),
            got=str(example),
            todo="the module runs in PyTorch; compute the number with tensor operations, or pass it in as a tensor",
        )

    def _item_as_double(self, symbol: str) -> ir.Value | None:
        """Return the result of `tensor.item()` as a double, which has no gradient; None for any other symbol."""
        call = self._items.get(symbol)
        if call is None:
            return None
        source = self._argument(call.args[0])
        scalar = self.op.Reshape(source, self.op.constant([], ir.DataType.INT64)) if rank_of(source) else source
        return _detached(self.op, self.op.Cast(scalar, to=ir.DataType.DOUBLE))

    def _add_size_from_item(self, node: torch.fx.Node) -> None:
        """Register the result of `tensor.item()` as the value of its size symbol."""
        source, size = self._argument(node.args[0]), self._values[node]
        if isinstance(size, str):
            with self.op.at(self._origin_of(node)):
                integer = source if source.dtype == ir.DataType.INT64 else self.op.Cast(source, to=ir.DataType.INT64)
                vector = self.op.Reshape(integer, self.op.constant([1], ir.DataType.INT64))
            vector.meta["sizes"] = (size,)  # by which a builder of backward finds it
            self._graph.meta.setdefault("size_values", {})[size] = vector

    def _convert_call(self, node: torch.fx.Node, target: Any, name: str, example: Any) -> Any:
        examples = pytree.tree_leaves(example)
        results = [e for e in examples if isinstance(e, torch.Tensor)]
        self.op.out = tuple(map(tensor_type, results))
        self.op.device = results[0].device.type if results else "cpu"
        self.op.is_contiguous = lambda: all(map(is_contiguous_or_false, results))
        arguments = [self._argument(a) for a in node.args]
        keywords = {k: self._argument(v) for k, v in node.kwargs.items()}
        if target is auto_functionalized:  # a custom operator that writes to its arguments
            target, *arguments = arguments
        convert_call = FROM_TORCH.get(name)
        try:
            result: Any = NotImplemented
            if convert_call and (target is PYTHON_OP or not any(e.is_complex() for e in _tensors(node, examples))):
                try:
                    result = convert_call(self.op, *arguments, **keywords)
                except (AttributeError, GraphError, TypeError, ValueError):  # an attribute cannot be symbolic
                    fixed, fixed_keywords = _with_fixed_sizes(node, arguments, keywords)
                    if (fixed, fixed_keywords) == (arguments, keywords):
                        raise
                    result = convert_call(self.op, *fixed, **fixed_keywords)
            if result is not NotImplemented:
                result = self._in_new_memory(node, result, [arguments, keywords])
            else:
                fixed, fixed_keywords = _with_fixed_sizes(node, arguments, keywords, scalars_only=True)
                result = self._aten(node, target, fixed, fixed_keywords, example)
        except (GraphError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UnsupportedOperatorError(
                f"the operator {name} could not be converted: {error}",
                where=source_location.of_node(node),
                todo="the module runs in PyTorch; please report this operator and its arguments",
            ) from error
        self._check_types(node, name, result, examples)
        return result

    def _in_new_memory(self, node: torch.fx.Node, result: Any, operands: Any) -> Any:
        """Copy what is an operand, or a view of one, where the operator copies: a later write must not change both."""
        if not _is_copy(node):
            return result
        leaves = pytree.tree_leaves(operands)
        return pytree.tree_map_only(ir.Value, lambda v: self.op.own.Clone(v) if _is_view(v, leaves) else v, result)

    def _aten(self, node: torch.fx.Node, target: Any, arguments: Any, keywords: Any, example: Any) -> Any:
        """Convert a call without a definition to an ATen node, with the gradient of PyTorch's autograd."""
        values = [_value(a) for a in pytree.tree_leaves((node.args, node.kwargs))]
        fakes = [v for v in values if isinstance(v, torch.Tensor)]
        aten = aten_node(self.op, target, arguments, keywords, _contiguous(target, fakes))
        self.op.graph.opset_imports.setdefault(aten.domain, 1)
        symbolic = [v for v in values if isinstance(v, torch.SymInt) and isinstance(size_of(v), str)]
        gradient = _traced_gradient(aten, fakes, symbolic)
        flags: Sequence[bool] | None = None
        if gradient is not None:
            aten.meta["gradient"] = gradient
            flags = gradient.differentiable(aten_call(aten))
        outputs = [
            v if flags is None or flags[i] or not is_differentiable_type(dtype_of(v)) else _detached(self.op, v)
            for i, v in enumerate(aten.outputs)
        ]
        tensors = iter(outputs)
        return pytree.tree_map(
            lambda e: next(tensors) if isinstance(e, torch.Tensor) else _non_tensor_result(e, node), example
        )

    def _check_types(self, node: torch.fx.Node, name: str, result: Any, examples: Any) -> None:
        results = pytree.tree_leaves(result)
        for index, example in enumerate(examples):
            if not isinstance(example, torch.Tensor) or index >= len(results) or results[index] is None:
                continue
            value, expected = results[index], tensor_type(example)
            if value.dtype is None or value.shape is None:
                set_type(value, expected)
            got = type_of(value)
            if got.dtype != expected.dtype or not _same_sizes(got, expected):
                raise UnsupportedOperatorError(
                    f"the operator {name} was converted to a value whose type differs from PyTorch's",
                    where=source_location.of_node(node),
                    expected=_spell(expected),
                    got=_spell(got),
                    todo="the module runs in PyTorch; this is a bug of the op's from_torch or shape function: please "
                    "report it with the module",
                )
            if value.producer() is not None and memory_order(example) == _CHANNELS_LAST:
                value.metadata_props[EAGERS_FORMAT] = "channels_last"
            if value.const_value is None and got.shape != expected.shape and value.producer() is not None:
                set_type(value, expected)  # equal under the guards; use PyTorch's expression from here on

    def _origin_of(self, node: torch.fx.Node) -> dict[str, str]:
        return origin_of(node) if self._origin is None else {**self._origin, "aten": str(node.target)}

    def _name_nodes(self, node: torch.fx.Node, before: int) -> None:
        if self._origin is not None:
            return
        added = [*islice(reversed(self._graph), len(self._graph) - before)][::-1]
        for index, inner in enumerate(added):
            inner.name = node.name if inner is added[-1] else f"{node.name}.{index}"
        if self._copied_calls is not None and COPY_OF not in node.meta:
            self._copied_calls.record(node, added, origin_of(node))

    def _argument(self, argument: Any) -> Any:
        match argument:
            case torch.fx.Node():
                value = self._values.get(argument)
                if isinstance(value, UnsupportedOperatorError):
                    raise value
                return value
            case list() | tuple():
                return [self._argument(a) for a in argument]
            case Mapping():
                return {k: self._argument(v) for k, v in argument.items()}
            case str():
                return Text(argument)
            case slice():
                return slice(*(self._argument(a) for a in (argument.start, argument.stop, argument.step)))
            case torch.SymInt():
                return size_of(argument)
        return argument


def _with_fixed_sizes(
    node: torch.fx.Node, arguments: list[Any], keywords: dict[str, Any], *, scalars_only: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """Replace a call's symbolic sizes by their numbers in this capture; with `scalars_only`, those passed as scalars.

    That makes these dimensions static: the guards check them, and other sizes lead to another capture. An ATen node
    must not keep a symbol as a scalar, because its traced gradient would contain the number of PyTorch's example.
    """
    target: Any = node.target
    schema = schema_of(target).arguments if isinstance(target, OpOverload) else ()
    type_of_argument = {argument.name: argument.type for argument in schema}

    def fix(name: str, argument: Any, converted: Any) -> Any:
        value = _value(argument)
        if isinstance(argument, (list, tuple)) and not scalars_only:
            return [fix(name, a, c) for a, c in zip(argument, converted, strict=True)]
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return converted
        is_scalar = isinstance(type_of_argument[name], torch.NumberType) if scalars_only else True
        return fixed_number(value) if is_scalar else converted

    positional = zip((argument.name for argument in schema), node.args, arguments, strict=False)
    return (
        [fix(*argument) for argument in positional] or arguments,
        {name: fix(name, node.kwargs[name], value) for name, value in keywords.items()} if schema else keywords,
    )


def _is_copy(node: torch.fx.Node) -> bool:
    """Return whether an operator gives new memory also where it changes no element, as `x.repeat(1)` does."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    if any(not storages_of(node).isdisjoint(storages_of(argument)) for argument in node.all_input_nodes):
        return False  # as a dropout in eval mode
    schema = schema_of(node.target)
    # Functionalization makes `detach_copy` of `detach`: no user sees its memory.
    return not schema.name.endswith("_copy") and not any(result.alias_info for result in schema.returns)


def _is_view(value: ir.Value | None, operands: Sequence[Any]) -> bool:
    """Return whether a value is one of the operands, or may be a view of one."""
    while value is not None and value not in operands:
        node = value.producer()
        value = None if node is None else view_source(node, value.index() or 0, definition_of(node))
    return value is not None


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument


def _contiguous(target: Any, fakes: Sequence[torch.Tensor]) -> list[bool]:
    """Return which tensors are contiguous; only operators that read memory by strides get a guard on sizes for it."""
    mode = next((t.fake_mode for t in fakes if isinstance(t, FakeTensor)), None)
    if mode is None or reads_strides(target):
        return list(map(is_contiguous_or_false, fakes))
    with record_size_guards(mode.shape_env):
        return list(map(is_contiguous_or_false, fakes))


def _traced_gradient(aten: ir.Node, fakes: list[torch.Tensor], sizes: list[Any]) -> TracedGradient | None:
    """Return the gradient of an ATen node; None if it has none, or there are no fake tensors to trace it with."""
    modes = [t.fake_mode for t in fakes if isinstance(t, FakeTensor)]
    if not modes or len(modes) != aten.attributes["tensors"].as_int():
        return None
    if not any(is_differentiable_type(dtype_of(v)) for v in aten.outputs):
        return None
    return TracedGradient(fakes, sizes, modes[0], inline)


def inline(op: Builder, module: torch.fx.GraphModule, converted: Mapping[torch.fx.Node, Any]) -> list[Any]:
    """Append the nodes of a traced graph of functional ATen to `op.graph`; return its outputs.

    Args:
        op: the builder.
        module: the traced graph.
        converted: the values of its placeholders, and of other nodes that are converted already.

    Raises:
        UnsupportedOperatorError: a call has no ONNX or ATen node.
    """
    walk = _Walk(op, op.graph, converted)
    out, origin = op.out, dict(op.origin)
    try:
        for node in module.graph.nodes:
            walk.visit(node)
    finally:
        op.out, op.origin = out, origin
    return walk.outputs


def _detached(op: Builder, value: ir.Value) -> ir.Value:
    detached: ir.Value = FROM_TORCH["aten.detach.default"](op, value)
    return detached


def _non_tensor_result(example: Any, node: torch.fx.Node) -> Any:
    """Return a result that is not a tensor: None, or an expression of the inputs' sizes."""
    if example is None:
        return None
    size = size_of(example) if isinstance(example, (int, torch.SymInt)) else None
    if size is None or any(name.startswith("u") for name in sizes.symbols(size)):
        raise UnsupportedOperatorError(
            f"the operator {node.target} has a result that a graph cannot represent",
            where=source_location.of_node(node),
            expected="tensors, None, and sizes that follow from the inputs' sizes",
            got=str(example),
            todo="the module runs in PyTorch; let the operator return a tensor",
        )
    return size


def _tensors(node: torch.fx.Node, results: Any) -> list[torch.Tensor]:
    """Return the fake tensors that a call takes and returns; complex ones exist only between ATen nodes."""
    arguments = [producer.meta.get("val") for producer in node.all_input_nodes]
    return [t for t in (*arguments, *results) if isinstance(t, torch.Tensor)]


def _same_sizes(got: TensorType, expected: TensorType) -> bool:
    """Return whether the sizes agree.

    Different expressions may be equal under the guards, different numbers are not.
    """
    if len(got.shape) != len(expected.shape):
        return False
    return all(
        g == e or isinstance(g, str) or isinstance(e, str) for g, e in zip(got.shape, expected.shape, strict=True)
    )


def _spell(tensor_type_: TensorType) -> str:
    return f"{tensor_type_.dtype.name}[{', '.join(map(str, tensor_type_.shape))}]"


def _name_values(graph: ir.Graph) -> None:
    """Give every value a unique name, that of its node."""
    used_names = {v.name for v in (*graph.inputs, *graph.initializers.values())}
    for position, node in enumerate(graph):
        node.name = node.name or f"{node.op_type}_{position}"
        for index, value in enumerate(node.outputs):
            base = node.name if index == 0 else f"{node.name}.{index}"
            name, suffix = base, 1
            while name in used_names:
                suffix += 1
                name = f"{base}__{suffix}"
            used_names.add(name)
            value.name = name


def origin_of(node: torch.fx.Node) -> dict[str, str]:
    """Return the metadata of the nodes made from an FX node: module, source location, ATen op, checkpoint region."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    origin = {
        "module": source_location.module_path(str(stack[-1][0])) if stack else "",
        "line": source_location.of_node(node) or "",
        "aten": str(node.target),
        REGION: checkpoint_region_of(node),
    }
    return {k: v for k, v in origin.items() if v}
