"""From PyTorch's exported graph to ONNX: each ATen call becomes what its definition says.

The definitions hold the knowledge (`OpDef.from_torch`); this module walks the FX graph, carries names, types, module
paths and source lines over, and checks every output against the type that PyTorch gave it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import onnx_ir as ir
import torch
from torch.export.exported_program import ExportedProgram

from onnxtrain.capture import source_line
from onnxtrain.capture.convert.aten_gradient import TracedGradient
from onnxtrain.capture.convert.symbolic_sizes import fixed_number, number_from_sizes, size_of, tensor_type
from onnxtrain.capture.export.checkpoint_regions import REGION, region_of
from onnxtrain.capture.functionalize.autocast import refuse_hidden_casts
from onnxtrain.errors import GraphError, UnsupportedOperatorError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of, is_differentiable_type, rank_of, set_type, type_of
from onnxtrain.ops import FROM_TORCH, builder
from onnxtrain.ops.aten_node import Text, aten_call, aten_node
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.dtypes import ONNX_DTYPES
from onnxtrain.ops.python_function.node import TORCH_OP as PYTHON_OP
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.aten_operators import NATIVE_BATCH_NORM_FUNCTIONAL, NATIVE_BATCH_NORM_NO_TRAINING
from onnxtrain.torch_compat.decompositions import auto_functionalized
from onnxtrain.torch_compat.dispatch import is_any_autocast_enabled
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.tensors import is_contiguous_or_false

# Calls that only state what is already known of sizes and types: the guards hold them.
_STATEMENTS = re.compile(
    r"^aten\.(_assert_scalar|_assert_tensor_metadata|sym_constrain_range\w*)\.|^aten\.sym_(size|stride|numel)"
)

_LITERAL = 64  # elements of a tensor that a trace may hold as it is

# Norms that are given running statistics and leave them as they are.
_WITHOUT_UPDATES = (
    NATIVE_BATCH_NORM_FUNCTIONAL.default,
    NATIVE_BATCH_NORM_NO_TRAINING.default,
)

# `tensor.item()`, before and after functionalization.
_READS = ("aten.item.default", "aten._local_scalar_dense.default")


def is_convertible(program: ExportedProgram, *, with_casts: bool = False) -> bool:
    """Whether an export can be converted as it is, before functionalization (which takes as long as the export).

    It can where autocast is off or its casts are there (`with_casts`), and every call is defined and changes nothing.
    """
    if is_any_autocast_enabled() and not with_casts:
        return False
    return not any(
        node.op == "get_attr" or (node.op == "call_function" and not _is_plain_call(node))
        for node in program.graph.nodes
    )


def _is_plain_call(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "") in ("_operator", "operator", "math", "torch")
    return (
        not schema_of(target).is_mutable
        and not _may_update_buffers(node, target)
        and (str(target) in FROM_TORCH or bool(_STATEMENTS.match(str(target))) or str(target) in _READS)
    )


def _may_update_buffers(node: torch.fx.Node, target: OpOverload) -> bool:
    """Whether a call is given running statistics, which norms update without that their schemas say so."""
    if target in _WITHOUT_UPDATES:
        return False
    given = zip(schema_of(target).arguments, node.args, strict=False)
    return any(
        a.name.startswith("running_") and isinstance(value, torch.fx.Node)
        for a, value in [*given, *((a, node.kwargs.get(a.name)) for a in schema_of(target).arguments)]
    )


def is_grad_switch(node: torch.fx.Node) -> bool:
    """Whether a node is a region of `torch.no_grad()` or `torch.enable_grad()`."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"


class Converted:
    """The ONNX graph of an exported program.

    Attributes:
        model: inputs are the program's placeholders, outputs its outputs that are tensors.
        outputs: for each output of the program, its value, or a Python constant.
    """

    def __init__(self, model: ir.Model, outputs: list[Any]) -> None:
        self.model = model
        self.outputs = outputs


def convert(program: ExportedProgram, name: str) -> Converted:
    """Converts `program` (functional ATen, after `run_decompositions({})`).

    Raises:
        UnsupportedOperatorError: a call that has no form in the graph, with the user's line.
    """
    refuse_hidden_casts(program, FROM_TORCH)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
    walk = _Walk(builder(graph), graph)
    for node in program.graph.nodes:
        walk.visit(node)
    graph.outputs.extend(_as_outputs(walk.op, walk.outputs))
    _name_values(graph)
    graph.opset_imports.update({node.domain: 1 for node in graph if node.domain})
    return Converted(ir.Model(graph, ir_version=10, producer_name="onnxtrain"), walk.outputs)


def _as_outputs(op: Builder, outputs: list[Any]) -> list[ir.Value]:
    """The tensors among the outputs; sizes that are returned become tensors' business of the caller."""
    return [v for v in outputs if isinstance(v, ir.Value)]


class _Walk:
    """Visits the nodes of an FX graph in order. With `known`, it is a graph inside another: see `inline`."""

    def __init__(self, op: Builder, graph: ir.Graph, known: Mapping[torch.fx.Node, Any] | None = None) -> None:
        self.op = op
        self.outputs: list[Any] = []
        self._graph = graph
        self._origin = dict(op.origin) if known is not None else None
        self._values: dict[torch.fx.Node, Any] = dict(known or {})
        self._elements: dict[str, torch.fx.Node] = {}  # numbers that `tensor.item()` gave, by symbol

    def visit(self, node: torch.fx.Node) -> None:
        if node in self._values:
            return
        match node.op:
            case "placeholder":
                self._placeholder(node)
            case "call_function":
                self._call(node)
            case "output":
                self.outputs = [self._output(a) for a in node.args[0]]  # type: ignore[union-attr]
            case "get_attr":
                self._constant(node)
            case _:
                raise UnsupportedOperatorError(
                    f"an FX node of kind {node.op} in the exported graph", where=line_of(node)
                )

    def _output(self, argument: Any) -> Any:
        value = self._argument(argument)
        if value is None and isinstance(argument, torch.fx.Node) and isinstance(_value(argument), torch.Tensor):
            raise UnsupportedOperatorError(
                f"{argument.name}: a result that the operator's definition does not give", where=line_of(argument)
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
            if type(tensor) is torch.Tensor and tensor.numel() <= _LITERAL:
                self._values[node] = self.op.constant(tensor.cpu().numpy(), ONNX_DTYPES[tensor.dtype])
                return
        raise UnsupportedOperatorError(f"the constant {node.target} inside the exported graph", where=line_of(node))

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
            if name in _READS:
                self._size_from_element(node)
            return
        if name in _READS and isinstance(example, torch.SymFloat):
            self._elements[str(example.node.expr)] = node
        if _STATEMENTS.match(name) or (example is None and not node.users and not node.is_impure()):
            return
        if isinstance(example, (torch.SymFloat, torch.SymBool, float, bool)):
            with self.op.at(self._origin_of(node)):
                self._values[node] = self._plain_number(example, node)
            return
        with self.op.at(self._origin_of(node)):
            self._values[node] = self._convert_call(node, target, name, example)

    def _plain_number(self, example: Any, node: torch.fx.Node) -> Any:
        """The number, a double that computes it, or the error to raise where an operator takes it.

        A statement about sizes may well ignore it.
        """
        if isinstance(example, (bool, float)):
            return example
        known = example.node.maybe_as_float() if isinstance(example, torch.SymFloat) else example.node.maybe_as_bool()
        if known is not None:
            return known
        expr = example.node.expr
        read = next((found for s in expr.free_symbols if (found := self._elements.get(str(s))) is not None), None)
        if isinstance(example, torch.SymFloat) and node.users:
            value = number_from_sizes(self.op, expr, self._element)
            if value is not None:
                return value
        what = "forward reads an element of a tensor as a number" if read else "forward uses a number made from sizes"
        return UnsupportedOperatorError(
            f"{what}, and computes with it",
            where=line_of(read or node),
            got=str(example),
            todo="compute it with tensor operations, or pass it in as a tensor",
        )

    def _element(self, symbol: str) -> ir.Value | None:
        """The double that `tensor.item()` gave, which has no gradient; None for any other symbol."""
        read = self._elements.get(symbol)
        if read is None:
            return None
        source = self._argument(read.args[0])
        scalar = self.op.Reshape(source, self.op.constant([], ir.DataType.INT64)) if rank_of(source) else source
        return _detached(self.op, self.op.Cast(scalar, to=ir.DataType.DOUBLE))

    def _size_from_element(self, node: torch.fx.Node) -> None:
        """Lets the size that `tensor.item()` gives be found where sizes are looked for."""
        source, size = self._argument(node.args[0]), self._values[node]
        if isinstance(size, str):
            with self.op.at(self._origin_of(node)):
                whole = source if source.dtype == ir.DataType.INT64 else self.op.Cast(source, to=ir.DataType.INT64)
                vector = self.op.Reshape(whole, self.op.constant([1], ir.DataType.INT64))
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
        before = len(self._graph)
        try:
            result = NotImplemented
            if convert_call and (target is PYTHON_OP or not any(e.is_complex() for e in _tensors(node, examples))):
                try:
                    result = convert_call(self.op, *arguments, **keywords)
                except (AttributeError, GraphError, TypeError, ValueError):  # an attribute holds no symbol
                    known, names = _with_numbers(node, arguments, keywords)
                    if (known, names) == (arguments, keywords):
                        raise
                    result = convert_call(self.op, *known, **names)
            if result is NotImplemented:
                known, names = _with_numbers(node, arguments, keywords, scalars=True)
                result = self._aten(node, target, known, names, example)
        except (GraphError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UnsupportedOperatorError(
                f"{name} could not be converted: {error}",
                where=line_of(node),
                todo="report this operator and its arguments",
            ) from error
        self._check(node, name, result, examples)
        self._name_nodes(node, before)
        return result

    def _aten(self, node: torch.fx.Node, target: Any, arguments: Any, keywords: Any, example: Any) -> Any:
        """A call without a definition, as an ATen node, with the gradient that PyTorch's autograd has for it."""
        values = [_value(a) for a in pytree.tree_leaves((node.args, node.kwargs))]
        fakes = [v for v in values if isinstance(v, torch.Tensor)]
        made = aten_node(self.op, target, arguments, keywords, [is_contiguous_or_false(t) for t in fakes])
        self.op.graph.opset_imports.setdefault(made.domain, 1)
        symbolic = [v for v in values if isinstance(v, torch.SymInt) and isinstance(size_of(v), str)]
        gradient = _gradient_of_call(made, fakes, symbolic)
        flags: Sequence[bool] | None = None
        if gradient is not None:
            made.meta["gradient"] = gradient
            flags = gradient.differentiable(aten_call(made))
        outputs = [
            v if flags is None or flags[i] or not is_differentiable_type(dtype_of(v)) else _detached(self.op, v)
            for i, v in enumerate(made.outputs)
        ]
        rest = iter(outputs)
        return pytree.tree_map(lambda e: next(rest) if isinstance(e, torch.Tensor) else _plain_result(e, node), example)

    def _check(self, node: torch.fx.Node, name: str, result: Any, examples: Any) -> None:
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
                    f"{name} was converted to a value of another type",
                    where=line_of(node),
                    expected=_show(expected),
                    got=_show(got),
                    todo="this is a bug of onnxtrain: the op's from_torch or shape rule is wrong",
                )
            if value.const_value is None and got.shape != expected.shape and value.producer() is not None:
                set_type(value, expected)  # equal under the guards; PyTorch's spelling is the one used from here on

    def _origin_of(self, node: torch.fx.Node) -> dict[str, str]:
        return origin_of(node) if self._origin is None else {**self._origin, "aten": str(node.target)}

    def _name_nodes(self, node: torch.fx.Node, before: int) -> None:
        if self._origin is not None:
            return
        added = len(self._graph) - before
        for back, inner in enumerate(islice(reversed(self._graph), added)):
            inner.name = f"{node.name}.{added - 1 - back}" if back else node.name

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


def _with_numbers(
    node: torch.fx.Node, arguments: list[Any], keywords: dict[str, Any], *, scalars: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments with plain numbers in the place of those that follow from sizes, or of scalars only.

    Those sizes are fixed by that: the guards hold them, and other sizes make another capture. With a symbol for a
    scalar, the traced gradient of an ATen node would be that of PyTorch's example.
    """
    target: Any = node.target
    schema = schema_of(target).arguments if isinstance(target, OpOverload) else ()
    of_type = {argument.name: argument.type for argument in schema}

    def number(name: str, given: Any, converted: Any) -> Any:
        value = _value(given)
        if isinstance(given, (list, tuple)) and not scalars:
            return [number(name, g, c) for g, c in zip(given, converted, strict=True)]
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return converted
        return converted if scalars and not isinstance(of_type[name], torch.NumberType) else fixed_number(value)

    named = zip((argument.name for argument in schema), node.args, arguments, strict=False)
    return (
        [number(*given) for given in named] or arguments,
        {name: number(name, node.kwargs[name], value) for name, value in keywords.items()} if schema else keywords,
    )


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument


def _gradient_of_call(made: ir.Node, fakes: list[torch.Tensor], sizes: list[Any]) -> TracedGradient | None:
    """The gradient to trace for an ATen node; None where there is none, or no fake tensors to trace it with."""
    modes = [t.fake_mode for t in fakes if isinstance(t, FakeTensor)]
    if not modes or len(modes) != made.attributes["tensors"].as_int():
        return None
    if not any(is_differentiable_type(dtype_of(v)) for v in made.outputs):
        return None
    return TracedGradient(fakes, sizes, modes[0], inline)


def inline(op: Builder, module: torch.fx.GraphModule, known: Mapping[torch.fx.Node, Any]) -> list[Any]:
    """Converts a traced graph of functional ATen into nodes at the end of `op.graph`; gives its outputs.

    Args:
        op: the builder.
        module: the traced graph.
        known: what its placeholders are, and any other nodes that are not to be converted.

    Raises:
        UnsupportedOperatorError: a call that has no form in the graph.
    """
    walk = _Walk(op, op.graph, known)
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


def _plain_result(example: Any, node: torch.fx.Node) -> Any:
    """What stands for a result that is no tensor: nothing, or a size that follows from the inputs' sizes."""
    if example is None:
        return None
    size = size_of(example) if isinstance(example, (int, torch.SymInt)) else None
    if size is None or any(name.startswith("u") for name in sizes.symbols(size)):
        raise UnsupportedOperatorError(
            f"{node.target} returns something other than tensors", where=line_of(node), got=str(example)
        )
    return size


def _tensors(node: torch.fx.Node, results: Any) -> list[torch.Tensor]:
    """The (fake) tensors that a call takes and gives: complex ones live between ATen nodes."""
    given = [inner.meta.get("val") for inner in node.all_input_nodes]
    return [t for t in (*given, *results) if isinstance(t, torch.Tensor)]


def _same_sizes(got: TensorType, expected: TensorType) -> bool:
    """Whether the sizes agree. Two different expressions may be equal under the guards; two numbers may not."""
    if len(got.shape) != len(expected.shape):
        return False
    return all(
        g == e or isinstance(g, str) or isinstance(e, str) for g, e in zip(got.shape, expected.shape, strict=True)
    )


def _show(tensor_type_: TensorType) -> str:
    return f"{tensor_type_.dtype.name}[{', '.join(map(str, tensor_type_.shape))}]"


def _name_values(graph: ir.Graph) -> None:
    """Names every value after its node, uniquely."""
    taken = {v.name for v in (*graph.inputs, *graph.initializers.values())}
    for position, node in enumerate(graph):
        node.name = node.name or f"{node.op_type}_{position}"
        for index, value in enumerate(node.outputs):
            wish = node.name if index == 0 else f"{node.name}.{index}"
            name, suffix = wish, 1
            while name in taken:
                suffix += 1
                name = f"{wish}__{suffix}"
            taken.add(name)
            value.name = name


def line_of(node: torch.fx.Node) -> str | None:
    """The innermost line of user code that led to a node: `file.py:12 in forward`."""
    return source_line.in_text(node.stack_trace)


def origin_of(node: torch.fx.Node) -> dict[str, str]:
    """The metadata that nodes made for an FX node carry: module path, user's line, ATen op, checkpointed region."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    path = re.sub(r"^(L\['\w+'\]\.?|module\.?)", "", path)
    found = {
        "module": path.removeprefix("module.").removeprefix("."),
        "line": line_of(node) or "",
        "aten": str(node.target),
        REGION: region_of(node),
    }
    return {k: v for k, v in found.items() if v}
