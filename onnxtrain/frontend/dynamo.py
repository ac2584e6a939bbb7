"""The backend of torch.compile: `torch.compile(model, backend="onnxtrain", options={"rng": "torch"})`.

    Python ─torch.compile─▶ graphs between graph breaks ─this backend─▶ each graph captured, differentiated, run

torch.compile splits a function into graphs at its graph breaks: prints, `.item()`, branches on values. The engine
treats each graph as a module: it captures it with dynamic dimensions and differentiates it itself, without AOTAutograd.
Equal graphs, such as those of a model's identical layers, share one engine.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onnxtrain.capture.export.dynamo_graph import dynamo_module
from onnxtrain.capture.export.torch_reports import logged_as_info
from onnxtrain.errors import OptionError
from onnxtrain.frontend.engine import Engine
from onnxtrain.frontend.entry_point import Call, EntryPoint
from onnxtrain.options import Options
from onnxtrain.options.without_effect import DORT_OPTIONS, warn_ineffective
from onnxtrain.report import CompileReport
from onnxtrain.stages import numbered
from onnxtrain.torch_compat.dynamo import NUMPY_SAMPLES, SUPPRESSED_ERRORS

# By graph and options. An engine lives as long as torch.compile keeps one of its graphs.
_ENGINES: weakref.WeakValueDictionary[Hashable, Engine] = weakref.WeakValueDictionary()


def backend(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Call:
    """Return a function that runs a graph of torch.compile. The graph is captured on its first call.

    Args:
        graph: the FX graph that torch.compile traced.
        example_inputs: unused; the inputs of the first call are the examples.
        options: any of `onnxtrain.Options`, by name. Options of PyTorch's former backend "onnxrt" raise a warning.
        mode: must be None; this backend has no modes.

    Raises:
        OptionError: an option is unknown or has an invalid value, or `mode` is set.
    """
    if mode is not None:
        todo = "pass options={...} instead"
        raise OptionError("The backend onnxtrain has no modes.", "torch.compile(mode=)", "no mode", repr(mode), todo)
    if options is not None and not isinstance(options, Mapping):
        raise OptionError("The options are not a dict.", "torch.compile(options=)", "a dict", type(options).__name__)
    settings = {}
    for name, value in (options or {}).items():
        if name in DORT_OPTIONS:
            warn_ineffective(f"The option {name}", DORT_OPTIONS[name], value)
        else:
            settings[name] = value
    return _callable_for(graph, Options.resolve(**settings))


def _callable_for(graph: torch.fx.GraphModule, options: Options, *, is_piece: bool = False) -> Call:
    module = dynamo_module(graph)
    key = (module.key(), options, is_piece)
    engine = _ENGINES.get(key)
    if engine is None:
        entry_point = EntryPoint(fixed_sizes=module.fixed_sizes, is_part=True, is_piece=is_piece)
        engine = _ENGINES[key] = Engine(module, _with_own_prefix(options), entry_point)
    inputs_from = module.inputs_from

    def run(*arguments: Any) -> Any:
        return engine(inputs_from(arguments), _NO_KEYWORDS)

    return run


_NO_KEYWORDS: Mapping[str, Any] = {}
_GRAPHS: Counter[Path] = Counter()  # the number of graphs saved under each path prefix


def _with_own_prefix(options: Options) -> Options:
    """Return the options with a path prefix for this graph alone, to not overwrite files of other graphs."""
    if options.save_graphs is None:
        return options
    prefix = options.save_graphs.absolute()
    _GRAPHS[prefix] += 1
    return replace(options, save_graphs=numbered(prefix, _GRAPHS[prefix]))


def reports() -> list[CompileReport]:
    """Return the report of the newest capture of each graph in use, oldest graph first."""
    return [engine.newest().report for engine in list(_ENGINES.values()) if engine.captures]


def captures() -> int:
    """Return the number of captures made for the graphs in use."""
    return sum(engine.captures for engine in list(_ENGINES.values()))


# For modules with graph breaks


def pieces(options: Options) -> Callable[[Call], Call]:
    """Return a function that compiles another: its graphs run in this backend, and Python runs between them."""

    def compile_pieces(function: Call) -> Call:
        compiled = torch.compile(function, backend=_backend_with(options))

        def run(*args: Any, **kwargs: Any) -> Any:
            # Code that torch.compile itself rejects runs in PyTorch, as the user of an ORTModule expects.
            with SUPPRESSED_ERRORS.get()(), NUMPY_SAMPLES.get()(), logged_as_info():
                return compiled(*args, **kwargs)

        return run

    return compile_pieces


@functools.lru_cache(maxsize=64)
def _backend_with(options: Options) -> Callable[..., Call]:
    """Return a backend with these options.

    Equal options give the same object: torch.compile recompiles for another one.
    """

    def onnxtrain(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Call:
        return _callable_for(graph, options, is_piece=True)

    return onnxtrain
