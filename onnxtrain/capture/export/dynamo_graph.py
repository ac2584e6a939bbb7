"""Turn a graph that torch.compile traced into a module that can be captured.

    graph(s0, x[s0, 4], weight, n)  ──>  module(x, weight, empty[n + 2, 0])

torch.compile passes sizes to its graph as ints. The module reads a size from the tensor that has it, and takes any
other int as a dimension of an empty tensor: the capture then sees a symbol, and another value needs no new capture.

Two higher-order operators of torch.compile get their original meaning back: a checkpointed region runs inline, and a
custom `autograd.Function` becomes a PythonOp.
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
from onnxtrain.capture.export.checkpoint_regions import checkpoint_region
from onnxtrain.capture.export.patches import is_capturing
from onnxtrain.capture.structure import constant_key
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.modes import enter_autocast, exit_autocast
from onnxtrain.torch_compat.operators import HigherOrderOperator

_MIN_SYMBOLIC_SIZE = 2  # torch.export specializes on sizes 0 and 1


@dataclass(frozen=True)
class _Argument:
    """How to compute an argument of the graph from the module's inputs.

    Attributes:
        kind: "tensor"; "size", which is a dimension of a tensor; or "int", encoded in the size of an empty tensor.
        index: the index of the module's input.
        dim: the dimension of that input, for the kind "size".
    """

    kind: str
    index: int
    dim: int = 0


def dynamo_module(graph: GraphModule) -> DynamoGraph:
    """Wrap the graph in a module whose class is named after its source location: messages name a module by its class.

    Args:
        graph: as torch.compile passes it to a backend.
    """
    location = next(filter(None, map(source_location.of_node, graph.graph.nodes)), None)
    module_class = type(f"graph at {location}" if location else "graph", (DynamoGraph,), {})
    module: DynamoGraph = module_class(graph)
    return module


class DynamoGraph(torch.nn.Module):
    """A module that runs a graph of torch.compile on its tensors, and on its ints that are not sizes of a tensor.

    Args:
        graph: as torch.compile passes it to a backend.

    Attributes:
        graph: the same graph.
        fixed_sizes: indices of the inputs that are parameters and buffers, whose sizes do not change.
        inputs_from: selects the module's inputs from the graph's arguments.
    """

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph = graph
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._arguments, positions = _arguments(nodes)
        ints = {a.index for a in self._arguments if a.kind == "int"}
        self.inputs_from = _input_selector(positions, ints)
        self.fixed_sizes = frozenset(i for i, p in enumerate(positions) if _is_module_state(nodes[p]))
        self._functions = {application.forward: _function(application) for application in _applications(graph)}
        # The graph itself would run a checkpointed region again in backward, with other random numbers.
        self._in_torch = partial(_run, graph, self._functions) if _has_checkpoint(graph) else graph
        names = _input_names([nodes[p] for p in positions])
        self.forward = self._forward(inspect.Signature([inspect.Parameter(n, _POSITIONAL) for n in names]))

    def _forward(self, signature: inspect.Signature) -> Callable[..., Any]:
        def forward(*inputs: Any) -> Any:
            arguments = [_evaluate(argument, inputs) for argument in self._arguments]
            if not is_capturing():
                return self._in_torch(*arguments)
            with fx_traceback.preserve_node_meta():
                return _run(self.graph, self._functions, *arguments)

        forward.__signature__ = signature  # type: ignore[attr-defined]  # names the inputs of the ONNX graph
        return forward

    def key(self) -> Hashable:
        """Return a key that is equal for graphs that compute the same results from the same inputs."""
        return self.fixed_sizes, _structural_key(self.graph, self._arguments)


_Functions: TypeAlias = Mapping[GraphModule, Any]  # the class of each custom function, by its forward graph
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY


def _evaluate(argument: _Argument, inputs: Sequence[Any]) -> Any:
    value = inputs[argument.index]
    match argument.kind:
        case "size":
            return value.size(argument.dim)
        case "int":
            return value.size(0) - _MIN_SYMBOLIC_SIZE if isinstance(value, torch.Tensor) else value
    return value


def _input_selector(positions: Sequence[int], ints: set[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Make the function from the graph's arguments to the module's inputs. It runs on every step."""
    if not ints and positions and list(positions) == list(range(positions[-1] + 1)):
        count = len(positions)
        return lambda arguments: arguments if len(arguments) == count else arguments[:count]
    if not ints and len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda arguments: tuple(
        _as_tensor(arguments[p]) if i in ints else arguments[p] for i, p in enumerate(positions)
    )


def _as_tensor(value: int) -> Any:
    """Encode an int as the size of an empty tensor; a negative int stays itself, a constant of the graph."""
    return torch.empty(value + _MIN_SYMBOLIC_SIZE, 0) if value >= 0 else value


# The graph's arguments


def _arguments(nodes: Sequence[Node]) -> tuple[list[_Argument], list[int]]:
    """Return the graph's arguments, and the positions among them of the module's inputs.

    Args:
        nodes: the graph's placeholders.
    """
    source_of: dict[Any, tuple[int, int]] = {}  # from a symbol to the position of a tensor and a dimension of it
    for position, node in enumerate(nodes):
        example = _example(node)
        if isinstance(example, torch.Tensor):
            for dim, size in enumerate(example.shape):
                if (symbol := _symbol(size)) is not None:
                    source_of.setdefault(symbol, (position, dim))
    symbolic = {p: e.node.expr for p, node in enumerate(nodes) if _is_symbolic(e := _example(node))}
    sizes = {p: source_of[expr] for p, expr in symbolic.items() if expr in source_of}
    positions = [p for p in range(len(nodes)) if p not in sizes]
    index_of = {p: i for i, p in enumerate(positions)}
    arguments: list[_Argument] = []
    for position in range(len(nodes)):
        if position in sizes:
            tensor, dim = sizes[position]
            arguments.append(_Argument("size", index_of[tensor], dim))
        else:
            arguments.append(_Argument("int" if position in symbolic else "tensor", index_of[position]))
    return arguments, positions


def _example(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _is_symbolic(example: Any) -> bool:
    return isinstance(example, torch.SymInt)


def _symbol(size: Any) -> Any:
    return size.node.expr if _is_symbolic(size) and size.node.expr.is_Symbol else None


def _is_module_state(node: Node) -> bool:
    """Return whether an argument is a parameter or buffer of the user's module."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


def _input_names(nodes: Sequence[Node]) -> list[str]:
    """Name inputs as in the user's code: `L['self']._modules['fc']._parameters['weight']` becomes fc_weight."""
    names: list[str] = []
    for node in nodes:
        name = re.sub(r"_{2,}", "_", re.sub(r"(^l_)|(modules_)|(parameters_)|(buffers_)", "", node.name)).strip("_")
        name = re.sub(r"^self_", "", name)
        name = name if name.isidentifier() and name not in names else node.name
        names.append(name)
    return names


# Running the graph


class _NodeByNode(Interpreter):
    """Run the graph node by node, so that the nodes traced from it keep the user's source locations."""

    def __init__(self, module: GraphModule, functions: _Functions) -> None:
        super().__init__(module)
        self._functions = functions

    def run_without_progress(self, *arguments: Any) -> Any:
        """Run the graph. `run` creates a hidden progress bar, whose lock starts a process on Python 3.14."""
        self.env, self.args_iter = {}, iter(self.graph.process_inputs(*arguments))
        for node in self.graph.nodes:
            self.env[node] = result = self.run_node(node)
            for unread in self.user_to_last_uses.get(node, ()):
                del self.env[unread]
        return self.graph.process_outputs(result)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a node; run a higher-order operator of torch.compile as the user's code that it stands for."""
        if _is_checkpoint(target):
            with checkpoint_region():
                return _run(args[0], self._functions, *args[1:])
        if _is_higher_order(target, "autograd_function_apply"):
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
                "torch.compile traced a custom autograd.Function with unsupported keyword arguments",
                expected=f"saved_for_backward_idx, optionally with others of {', '.join(sorted(_MARKS))}",
                got=", ".join(sorted(marks)),
                todo=f"this graph runs in PyTorch; report it with the version of PyTorch, {torch.__version__}",
            )
        return self._functions[forward].apply(*args)


# The keyword arguments of autograd_function_apply: they mark results and saved values by their indices.
_MARKS = frozenset({"non_differentiable_idx", "saved_for_backward_idx", "dirty_idx"})


def _run(graph: GraphModule, functions: _Functions, *arguments: Any) -> Any:
    return _NodeByNode(graph, functions).run_without_progress(*arguments)


def _is_higher_order(target: Any, *names: str) -> bool:
    return isinstance(target, HigherOrderOperator) and target.name() in names


def _is_checkpoint(target: Any) -> bool:
    return _is_higher_order(target, "tag_activation_checkpoint", "wrap_activation_checkpoint")


def _has_checkpoint(graph: GraphModule) -> bool:
    parts = [part for part in graph.modules() if isinstance(part, GraphModule)]
    return any(_is_checkpoint(node.target) for part in parts for node in part.graph.nodes)


@dataclass(frozen=True)
class _Application:
    """A custom `autograd.Function` that a graph applies, and whose forward and backward torch.compile traced.

    Attributes:
        forward: from the arguments to (results, values that backward reads).
        backward: from the results' gradients and those values to the arguments' gradients.
        marks: indices of the results that are not differentiable or mutated in place, and of the values that
            autograd checks for mutation, by the names of `_MARKS`.
    """

    forward: GraphModule
    backward: GraphModule
    marks: Mapping[str, Any]


def _applications(graph: GraphModule) -> Iterator[_Application]:
    for part in (part for part in graph.modules() if isinstance(part, GraphModule)):
        for node in part.graph.nodes:
            if node.op == "call_function" and _is_higher_order(node.target, "autograd_function_apply"):
                forward, backward = (getattr(part, n.target) for n in node.args[:2])
                yield _Application(forward, backward, node.kwargs)


def _function(application: _Application) -> Any:
    """Build a custom function from the graphs that torch.compile traced of it."""
    marks = application.marks
    checked = set(marks.get("saved_for_backward_idx", ()))

    class TracedFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results, values = application.forward(*args)
            tensors = results if isinstance(results, (tuple, list)) else [results]
            ctx.mark_dirty(*(tensors[i] for i in marks.get("dirty_idx", ())))
            ctx.mark_non_differentiable(*(tensors[i] for i in marks.get("non_differentiable_idx", ())))
            ctx.save_for_backward(*(v for i, v in enumerate(values) if i in checked))
            ctx.values = [None if i in checked else v for i, v in enumerate(values)]
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            saved = iter(ctx.saved_tensors)
            values = [next(saved) if i in checked else v for i, v in enumerate(ctx.values)]
            return application.backward(*gradients, *values)

    return TracedFunction


# Comparing graphs


def _structural_key(graph: GraphModule, arguments: Sequence[_Argument] = ()) -> Hashable:
    """Return the nodes without their names, tensors and functions by identity, and without unused sizes.

    Args:
        graph: the graph.
        arguments: how its arguments are computed; () for a graph nested in another, whose caller passes them.
    """
    ids: dict[Node, Hashable] = {}
    remaining = iter(arguments)

    def value_key(value: Any) -> Hashable:
        if isinstance(value, Node):
            return "node", ids[value]
        if isinstance(value, (list, tuple)):
            return type(value), *map(value_key, value)
        if isinstance(value, dict):
            return dict, *((key, value_key(part)) for key, part in value.items())
        if isinstance(value, slice):
            return slice, *map(value_key, (value.start, value.stop, value.step))
        return constant_key(value)

    def target_key(node: Node) -> Hashable:
        if node.op != "get_attr":
            return "" if node.op in ("placeholder", "output") else constant_key(node.target)
        attribute = operator.attrgetter(str(node.target))(graph)
        return _structural_key(attribute) if isinstance(attribute, GraphModule) else constant_key(attribute)

    rows: list[Hashable] = []
    for node in graph.graph.nodes:
        argument = next(remaining, None) if node.op == "placeholder" else None
        if argument is not None and argument.kind == "size":
            ids[node] = (argument.index, argument.dim)
            continue
        ids[node] = len(rows)
        example = _example(node) if node.op == "placeholder" else None
        kind = (example.dtype, example.ndim) if isinstance(example, torch.Tensor) else type(example)
        rows.append((node.op, kind, target_key(node), value_key(node.args), value_key(node.kwargs)))
    return tuple(rows)
