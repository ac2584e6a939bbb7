"""A graph that torch.compile traced, as a module that a capture takes.

    graph(s0, x[s0, 4], weight, n)  ──>  module(x, weight, empty[n + 2, 0])

PyTorch gives such a graph sizes as ints. Here a size is read from the tensor that has it, and any other int goes in as
the size of an empty tensor: so it is a symbol to the capture, and the next size needs no other one.

torch.compile has regions of its own for what a capture knows otherwise: a checkpointed region is run in place, a
custom `autograd.Function` becomes a PythonOp again.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx import traceback as fx_traceback

from onnxtrain.capture import source_location
from onnxtrain.capture.export.checkpoint_regions import region
from onnxtrain.capture.export.patches import capture_is_under_way
from onnxtrain.capture.structure import constant_key
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.modes import enter_autocast, exit_autocast
from onnxtrain.torch_compat.operators import HigherOrderOperator

_SMALLEST = 2  # a size of 0 or 1 would be no symbol to PyTorch's export


@dataclass(frozen=True)
class _Argument:
    """Where an argument of the graph comes from.

    Attributes:
        kind: "tensor", "size" (dimension `dim` of a tensor) or "int" (in the size of an empty tensor).
        index: the number of the module's input.
        dim: which of its dimensions.
    """

    kind: str
    index: int
    dim: int = 0


def named_graph(graph: GraphModule) -> DynamoGraph:
    """The graph as a module, of a class named after the user's line: messages name a module by its class."""
    line = next(filter(None, map(source_location.of_node, graph.graph.nodes)), None)
    kind = type(f"graph at {line}" if line else "graph", (DynamoGraph,), {})
    made: DynamoGraph = kind(graph)
    return made


class DynamoGraph(torch.nn.Module):
    """A graph of torch.compile as a module on tensors, and on ints that are not the size of one.

    Args:
        graph: as a backend gets it.

    Attributes:
        graph: the same, for plain PyTorch.
        fixed_sizes: the numbers of the inputs that are parameters and buffers: their sizes do not change.
        inputs: picks the module's inputs out of the graph's arguments.
    """

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph = graph
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._arguments, positions = _arguments(nodes)
        ints = {a.index for a in self._arguments if a.kind == "int"}
        self.inputs = _pick(positions, ints)
        self.fixed_sizes = frozenset(i for i, p in enumerate(positions) if _is_of_module(nodes[p]))
        self._functions = {part: _function(*found) for part, found in _applied(graph)}
        # PyTorch would run a checkpointed region again in backward, and draw other random numbers there.
        self._in_torch = partial(_run, graph, self._functions) if _has_checkpoint(graph) else graph
        names = _names([nodes[p] for p in positions])
        self.forward = self._forward(inspect.Signature([inspect.Parameter(n, _POSITIONAL) for n in names]))

    def _forward(self, signature: inspect.Signature) -> Callable[..., Any]:
        def forward(*inputs: Any) -> Any:
            arguments = [_read(argument, inputs) for argument in self._arguments]
            if not capture_is_under_way():
                return self._in_torch(*arguments)
            with fx_traceback.preserve_node_meta():
                return _run(self.graph, self._functions, *arguments)

        forward.__signature__ = signature  # type: ignore[attr-defined]  # names the inputs of the ONNX graph
        return forward

    def key(self) -> Hashable:
        """Equal for graphs that compute the same from the same inputs."""
        return self.fixed_sizes, _text(self.graph, self._arguments)


Functions: TypeAlias = Mapping[GraphModule, Any]  # the class of each custom function, by its forward
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY


def _read(argument: _Argument, inputs: Sequence[Any]) -> Any:
    value = inputs[argument.index]
    match argument.kind:
        case "size":
            return value.size(argument.dim)
        case "int":
            return value.size(0) - _SMALLEST if isinstance(value, torch.Tensor) else value
    return value


def _pick(positions: Sequence[int], ints: set[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function from the graph's arguments to the module's inputs. It runs on every step."""
    if not ints and positions and list(positions) == list(range(positions[-1] + 1)):
        count = len(positions)
        return lambda arguments: arguments if len(arguments) == count else arguments[:count]
    if not ints and len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda arguments: tuple(
        _wrapped(arguments[p]) if i in ints else arguments[p] for i, p in enumerate(positions)
    )


def _wrapped(number: int) -> Any:
    """An int as the size of an empty tensor; a negative one stays as it is, a constant of the graph."""
    return torch.empty(number + _SMALLEST, 0) if number >= 0 else number


# What the graph's arguments are


def _arguments(nodes: Sequence[Node]) -> tuple[list[_Argument], list[int]]:
    """The arguments, and the positions of those among them that are inputs of the module."""
    sizes: dict[Any, tuple[int, int]] = {}  # symbol to position of a tensor and dimension
    for position, node in enumerate(nodes):
        example = _example(node)
        if isinstance(example, torch.Tensor):
            for dim, size in enumerate(example.shape):
                if (expr := _symbol(size)) is not None:
                    sizes.setdefault(expr, (position, dim))
    places = {p: sizes[e.node.expr] for p, n in enumerate(nodes) if _is_size(e := _example(n)) and e.node.expr in sizes}
    positions = [p for p in range(len(nodes)) if p not in places]
    numbers = {p: i for i, p in enumerate(positions)}
    found: list[_Argument] = []
    for position, node in enumerate(nodes):
        if position in places:
            tensor, dim = places[position]
            found.append(_Argument("size", numbers[tensor], dim))
        else:
            kind = "int" if _is_size(_example(node)) else "tensor"
            found.append(_Argument(kind, numbers[position]))
    return found, positions


def _example(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _is_size(example: Any) -> bool:
    return isinstance(example, torch.SymInt)


def _symbol(size: Any) -> Any:
    return size.node.expr if _is_size(size) and size.node.expr.is_Symbol else None


def _is_of_module(node: Node) -> bool:
    """Whether an argument is a parameter or buffer of the user's module."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


def _names(nodes: Sequence[Node]) -> list[str]:
    """`L['self']._modules['fc']._parameters['weight']` is fc_weight; arguments have the names that the user gave."""
    found: list[str] = []
    for node in nodes:
        name = re.sub(r"_{2,}", "_", re.sub(r"(^l_)|(modules_)|(parameters_)|(buffers_)", "", node.name)).strip("_")
        name = re.sub(r"^self_", "", name)
        name = name if name.isidentifier() and name not in found else node.name
        found.append(name)
    return found


# Running it in a capture


class _Run(Interpreter):
    """Runs the graph node by node: what it calls carries the user's lines."""

    def __init__(self, module: GraphModule, functions: Functions) -> None:
        super().__init__(module)
        self._functions = functions

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a node; a region of torch.compile's own as what it stands for."""
        if _is_checkpoint(target):
            with region():
                return _run(args[0], self._functions, *args[1:])
        if _named(target, "autograd_function_apply"):
            return self._apply(*args, **kwargs)
        if target is enter_autocast:
            autocast = torch.autocast(*args)
            autocast.__enter__()
            return autocast
        if target is exit_autocast:
            return args[0].__exit__(None, None, None)
        return super().call_function(target, args, kwargs)

    def _apply(self, forward: GraphModule, backward: GraphModule, *args: Any, **marks: Any) -> Any:
        unknown = marks.keys() - _MARKS
        if unknown or "saved_for_backward_idx" not in marks:
            raise CaptureError(
                "torch.compile has traced a custom autograd.Function in a way that is not known here",
                expected=", ".join(sorted(_MARKS)),
                got=", ".join(sorted(marks)),
                todo="this graph runs in PyTorch; report the version of PyTorch",
            )
        return self._functions[forward].apply(*args)


# What the results and kept values of a function are marked as.
_MARKS = frozenset({"non_differentiable_idx", "saved_for_backward_idx", "dirty_idx"})


def _run(graph: GraphModule, functions: Functions, *arguments: Any) -> Any:
    return _Run(graph, functions).run(*arguments)


def _named(target: Any, *names: str) -> bool:
    return isinstance(target, HigherOrderOperator) and target.name() in names


def _is_checkpoint(target: Any) -> bool:
    return _named(target, "tag_activation_checkpoint", "wrap_activation_checkpoint")


def _has_checkpoint(graph: GraphModule) -> bool:
    parts = [part for part in graph.modules() if isinstance(part, GraphModule)]
    return any(_is_checkpoint(node.target) for part in parts for node in part.graph.nodes)


def _applied(graph: GraphModule) -> Iterator[tuple[GraphModule, tuple[GraphModule, GraphModule, Mapping[str, Any]]]]:
    """The custom functions that the graph applies: forward, and (forward, backward, marks)."""
    for part in (part for part in graph.modules() if isinstance(part, GraphModule)):
        for node in part.graph.nodes:
            if node.op == "call_function" and _named(node.target, "autograd_function_apply"):
                forward, backward = (getattr(part, n.target) for n in node.args[:2])
                yield forward, (forward, backward, node.kwargs)


def _function(forward: GraphModule, backward: GraphModule, marks: Mapping[str, Any]) -> Any:
    """A custom function again: torch.compile has traced its forward and backward.

    Args:
        forward: from the arguments to (results, values that backward reads).
        backward: from the results' gradients and those values to the arguments' gradients.
        marks: the numbers of the results that are not differentiable or changed in place, and of the values that
            autograd checks for changes.
    """
    checked = set(marks.get("saved_for_backward_idx", ()))

    class TracedFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results, values = forward(*args)
            found = results if isinstance(results, (tuple, list)) else [results]
            ctx.mark_dirty(*(found[i] for i in marks.get("dirty_idx", ())))
            ctx.mark_non_differentiable(*(found[i] for i in marks.get("non_differentiable_idx", ())))
            ctx.save_for_backward(*(v for i, v in enumerate(values) if i in checked))
            ctx.values = [None if i in checked else v for i, v in enumerate(values)]
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            saved = iter(ctx.saved_tensors)
            values = [next(saved) if i in checked else v for i, v in enumerate(ctx.values)]
            return backward(*gradients, *values)

    return TracedFunction


# The same graph


def _text(graph: GraphModule, arguments: Sequence[_Argument] = ()) -> Hashable:
    """The nodes without their names. Tensors and functions stand for themselves; a size that nobody reads, for nothing.

    Args:
        graph: the graph.
        arguments: where its arguments come from; those of a graph inside another come from its caller.
    """
    numbers: dict[Node, Hashable] = {}
    given = iter(arguments)

    def written(value: Any) -> Hashable:
        if isinstance(value, Node):
            return "node", numbers[value]
        if isinstance(value, (list, tuple)):
            return type(value), *map(written, value)
        if isinstance(value, dict):
            return dict, *((key, written(part)) for key, part in value.items())
        if isinstance(value, slice):
            return slice, *map(written, (value.start, value.stop, value.step))
        return constant_key(value)

    def target(node: Node) -> Hashable:
        if node.op != "get_attr":
            return "" if node.op in ("placeholder", "output") else constant_key(node.target)
        found = operator.attrgetter(str(node.target))(graph)
        return _text(found) if isinstance(found, GraphModule) else constant_key(found)

    rows: list[Hashable] = []
    for node in graph.graph.nodes:
        argument = next(given, None) if node.op == "placeholder" else None
        if argument is not None and argument.kind == "size":
            numbers[node] = (argument.index, argument.dim)
            continue
        numbers[node] = len(rows)
        example = _example(node) if node.op == "placeholder" else None
        kind = (example.dtype, example.ndim) if isinstance(example, torch.Tensor) else type(example)
        rows.append((node.op, kind, target(node), written(node.args), written(node.kwargs)))
    return tuple(rows)
