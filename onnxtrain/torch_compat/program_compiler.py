"""Trace a program on fake tensors with symbolic sizes, compile the trace with Inductor, and load the result.

mode, symbols = symbolic_sizes({"b": 8})        the sizes that differ between calls
traced = trace(mode, run, [*symbols.values(), *tensors])
compiled = compile_trace(mode, traced, symbols, configs, path)
call = load(path)                               in another process; empties the list of arguments that it is given
call([*sizes, *tensors, *traced.constants])
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor, symbolic_shapes

from onnxtrain.torch_compat.decompositions import enable_python_dispatcher
from onnxtrain.torch_compat.fake_tensors import FakeTensorMode
from onnxtrain.torch_compat.internal import Internal
from onnxtrain.torch_compat.symbols import is_data_dependent

_LACKS = "programs are not compiled by Inductor"


class Inductor(NamedTuple):
    """Parts of PyTorch that compile a trace.

    Attributes:
        compile: makes an artifact of a graph.
        load: reads an artifact from a file.
        tracing, context: a context manager that takes a context, and a context, made of a fake mode.
        lowering: a class whose attribute `save_output_code` is called with the generated source.
        config: Inductor's settings.
        source_of_size: makes the origin of a symbolic size.
        patterns: a module whose function `lazy_init` registers patterns of attention and others to replace.
    """

    compile: Callable[..., Any]
    load: Callable[..., Any]
    tracing: Callable[..., Any]
    context: Callable[..., Any]
    lowering: Any
    config: Any
    source_of_size: Callable[[str], Any]
    patterns: Any


def _find_inductor() -> Inductor:
    inductor, guards = (importlib.import_module(f"torch.{name}") for name in ("_inductor", "_guards"))
    return Inductor(
        inductor.standalone_compile,
        inductor.CompiledArtifact.load,
        guards.tracing,
        guards.TracingContext,
        importlib.import_module("torch._inductor.graph").GraphLowering,
        importlib.import_module("torch._inductor.config"),
        importlib.import_module("torch._dynamo.source").ConstantSource,
        importlib.import_module("torch._inductor.fx_passes.joint_graph"),
    )


def _refuse(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("this PyTorch lacks torch._inductor.standalone_compile")


INDUCTOR = Internal[Inductor](
    "standalone_compile",
    _find_inductor,
    why="documented, but in a private module; the generated source is read to check the order of random operators",
    fallback=Inductor(_refuse, _refuse, _refuse, _refuse, None, None, _refuse, None),
    cost=_LACKS,
    check=lambda part: (
        hasattr(part.lowering, "save_output_code")
        and hasattr(part.config, "fallback_random")
        and hasattr(part.patterns, "lazy_init")
    ),
)


def _takes_list(artifact: Any) -> Callable[[list[Any]], Any]:
    function = artifact._compiled_fn
    if function.__code__.co_freevars != ("compiled_fn",):
        raise AttributeError("the artifact calls no function named compiled_fn")
    return function.__closure__[0].cell_contents


_TAKES_LIST = Internal[Callable[[Any], Callable[[list[Any]], Any]]](
    "artifact_takes_list",
    lambda: _takes_list,
    why="the public call holds all arguments until it ends; the function below frees each after its last use",
    fallback=lambda artifact: lambda arguments: artifact(*arguments),
    cost="backward of a compiled program holds the activations until it ends",
    check=callable,
)


class Trace(NamedTuple):
    """The operators that a function calls.

    Attributes:
        graph: its inputs are the arguments of the function, then the constants.
        arguments: of the graph: symbolic sizes and fake tensors.
        constants: real tensors that the function reads besides its arguments.
    """

    graph: GraphModule
    arguments: list[Any]
    constants: list[torch.Tensor]


# The memory plan has ordered the operators already; results have the strides of PyTorch's; operators sample what
# PyTorch's sample; the kernels chosen for one number of rows run for others.
_EXACT = {
    "fallback_random": True,
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "shape_padding": False,
    "comprehensive_padding": False,
    "triton.mix_order_reduction_non_strict_mode": True,
}


class CompiledTrace(NamedTuple):
    """A compiled trace.

    Attributes:
        artifact: what `load` loads.
        guards: a condition on the symbolic sizes, for `hold`; None if there is none.
    """

    artifact: bytes
    guards: str | None


class TraceError(Exception):
    """A trace that is not compiled; the message says why."""


def symbolic_sizes(hints: Mapping[str, int]) -> tuple[FakeTensorMode, dict[str, Any]]:
    """Return a mode for fake tensors, and a symbolic size of at least 2 for each name, with a typical value."""
    env = symbolic_shapes.ShapeEnv()
    symbols = {}
    for name, hint in hints.items():
        source = INDUCTOR.get().source_of_size(name)
        expression = env.create_symbol(hint, source, dynamic_dim=symbolic_shapes.DimDynamic.DYNAMIC)
        symbols[name] = env.create_symintnode(expression, hint=hint, source=source)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True), symbols


def trace(mode: FakeTensorMode, function: Callable[..., Any], arguments: Sequence[Any]) -> Trace:
    """Record the ATen operators that a function calls.

    Raises:
        TraceError: a result depends on the elements of a tensor in a way that no graph expresses.
    """
    make = proxy_tensor.make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    with torch.no_grad(), enable_python_dispatcher(), mode:
        graph: GraphModule = make(*arguments)
    for node in graph.graph.nodes:
        if any(is_data_dependent(symbol) for value in _leaves(node.meta.get("val")) for symbol in _symbols(value)):
            raise TraceError(f"the result of {node.target} depends on elements of a tensor: {node.stack_trace or node}")
    constants = _constants_as_inputs(graph)
    return Trace(graph, [*arguments, *map(mode.from_tensor, constants)], constants)


def _constants_as_inputs(graph: GraphModule) -> list[torch.Tensor]:
    """Turn the constants of a graph into inputs: a stored artifact would lack them."""
    nodes = list(graph.graph.nodes)
    last = [node for node in nodes if node.op == "placeholder"][-1:]
    constants: dict[str, torch.Tensor] = {}
    inputs: dict[str, Any] = {}
    for node in (node for node in nodes if node.op == "get_attr"):
        if node.target not in inputs:
            constants[node.target] = getattr(graph, node.target)
            with graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before(nodes[0]):
                last = [graph.graph.placeholder(f"constant_{len(inputs)}")]
            last[0].meta.update(node.meta)
            inputs[node.target] = last[0]
        node.replace_all_uses_with(inputs[node.target])
        graph.graph.erase_node(node)
    for name in constants:
        delattr(graph, name)  # PyTorch passes all tensors that a module holds
    graph.recompile()
    return list(constants.values())


def _leaves(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _symbols(value: Any) -> set[Any]:
    numbers = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    symbolic = (n for n in numbers if isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool))
    return {symbol for n in symbolic for symbol in n.node.expr.free_symbols}


def compile_trace(
    mode: FakeTensorMode,
    traced: Trace,
    symbols: Sequence[Any],
    configs: Mapping[str, Any],
    path: Path,
) -> CompiledTrace:
    """Compile a trace, whose random operators keep their order and sample from PyTorch's generators.

    Args:
        mode: of the fake tensors.
        traced: the trace.
        symbols: the symbolic sizes.
        configs: settings of Inductor.
        path: a file to write.

    Raises:
        TraceError: Inductor would reorder random operators, or cannot store its program.
    """
    inductor = INDUCTOR.get()
    sources: list[str] = []
    random_count = sum(map(_is_random, (node.target for node in traced.graph.graph.nodes)))
    with (
        torch.no_grad(),
        inductor.tracing(inductor.context(mode)),
        inductor.config.patch({**configs, **_EXACT}),
        patch.object(inductor.lowering, "save_output_code", sources.append),
        patch.object(inductor.patterns, "lazy_init", lambda device: None),  # attention is recognized already
    ):
        artifact = inductor.compile(traced.graph, traced.arguments, dynamic_shapes="from_tracing_context", options={})
    if not samples_in_order("\n".join(sources), random_count):
        raise TraceError("Inductor would run random operators in another order")
    try:
        artifact.save(path=str(path), format="binary")
    except RuntimeError as error:
        raise TraceError(f"Inductor cannot store its program: {error}") from error
    env = mode.shape_env
    assert env is not None, "the mode has symbolic sizes"
    return CompiledTrace(path.read_bytes(), env.produce_guards_expression(list(symbols)))


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


_CALL = re.compile(r"\bbuf(\d+) = torch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def samples_in_order(source: str, random_count: int) -> bool:
    """Return whether a generated program runs its random operators in the order of the graph.

    Inductor numbers buffers in that order.
    """
    buffers = [int(n) for n, *names in _CALL.findall(source) if _is_random(_operator(*names))]
    return len(buffers) == random_count and buffers == sorted(buffers)


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)


def load(path: Path) -> Callable[[list[Any]], Any]:
    """Load an artifact: a function of a list of sizes and tensors, which it empties."""
    return _TAKES_LIST.get()(INDUCTOR.get().load(path=str(path), format="binary"))


def hold(guards: str, sizes: Sequence[int]) -> bool:
    """Return whether the condition of a `CompiledTrace` holds for the values of its symbolic sizes.

    A condition that this PyTorch cannot evaluate does not hold.
    """
    try:
        return bool(symbolic_shapes.ShapeEnv().evaluate_guards_expression(guards, sizes))
    except Exception:  # noqa: BLE001
        return False
