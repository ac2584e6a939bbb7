"""The backend of torch.compile: `torch.compile(model, backend="onnxtrain", options={"rng": "torch"})`.

    Python ─torch.compile─▶ graphs, with Python in between ─this backend─▶ each graph captured, differentiated, run

torch.compile finds the parts of a function that are graphs, whatever Python stands between them: prints, `.item()`,
branches on elements. Each part is then a module like any other to the engine: it is captured with open sizes, and
differentiated here, not by PyTorch. Graphs that are the same, as those of a model's equal layers, share one engine.
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

from onnxtrain.capture.export.dynamo_graph import named_graph
from onnxtrain.capture.export.torch_reports import logged_as_info
from onnxtrain.errors import OptionError
from onnxtrain.frontend.engine import Call, Engine, EntryPoint
from onnxtrain.options import Options
from onnxtrain.options.without_effect import DORT_OPTIONS, warn_ineffective
from onnxtrain.report import CompileReport
from onnxtrain.stages import numbered
from onnxtrain.torch_compat.dynamo import SUPPRESSED_ERRORS

# By the graph and the options; as long as torch.compile keeps one of the graphs.
_ENGINES: weakref.WeakValueDictionary[Hashable, Engine] = weakref.WeakValueDictionary()


def backend(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Call:
    """Takes a graph from torch.compile. It is captured when it is first called.

    Args:
        graph: calls of PyTorch's functions, as torch.compile traced them.
        example_inputs: not used: the first call's inputs are the example.
        options: any of `onnxtrain.Options`, by name. A warning answers those of PyTorch's former backend "onnxrt".
        mode: of other backends; this one has none.

    Raises:
        OptionError: an option is unknown or has a value that is not allowed, or a mode is given.
    """
    if mode is not None:
        raise OptionError("This backend has no modes.", "torch.compile(mode=)", "options={...}", mode)
    if options is not None and not isinstance(options, Mapping):
        raise OptionError("The options are no dict.", "torch.compile(options=)", "a dict", type(options).__name__)
    given = {}
    for name, value in (options or {}).items():
        if name in DORT_OPTIONS:
            warn_ineffective(f"The option {name}", DORT_OPTIONS[name], value)
        else:
            given[name] = value
    return _compiled(graph, Options.resolve(**given))


def _compiled(graph: torch.fx.GraphModule, options: Options, *, is_piece: bool = False) -> Call:
    module = named_graph(graph)
    key = (module.key(), options, is_piece)
    engine = _ENGINES.get(key)
    if engine is None:
        entry_point = EntryPoint(fixed_sizes=module.fixed_sizes, is_part=True, is_piece=is_piece)
        engine = _ENGINES[key] = Engine(module, _saving_apart(options), entry_point)
    inputs = module.inputs

    def run(*arguments: Any) -> Any:
        return engine(inputs(arguments), _NO_KEYWORDS)

    return run


_NO_KEYWORDS: Mapping[str, Any] = {}
_GRAPHS: Counter[Path] = Counter()  # that are saved under a path prefix


def _saving_apart(options: Options) -> Options:
    """The options for one of the graphs of torch.compile, whose files must not overwrite those of the others."""
    if options.save_graphs is None:
        return options
    prefix = options.save_graphs.absolute()
    _GRAPHS[prefix] += 1
    return replace(options, save_graphs=numbered(prefix, _GRAPHS[prefix]))


def reports() -> list[CompileReport]:
    """What the stages did for the newest form of each graph that is in use, oldest graph first."""
    return [engine.newest().report for engine in list(_ENGINES.values()) if engine.captures]


def captures() -> int:
    """How many captures were made for the graphs that are in use."""
    return sum(engine.captures for engine in list(_ENGINES.values()))


# For modules that no single graph can hold


def pieces(options: Options) -> Callable[[Call], Call]:
    """From a function to one that runs its graphs by this backend, and Python in between."""

    def compiled(function: Call) -> Call:
        found = torch.compile(function, backend=_backend_with(options))

        def run(*args: Any, **kwargs: Any) -> Any:
            # What torch.compile itself cannot take runs in PyTorch, as the user of an ORTModule expects.
            with SUPPRESSED_ERRORS.get()(), logged_as_info():
                return found(*args, **kwargs)

        return run

    return compiled


@functools.lru_cache(maxsize=64)
def _backend_with(options: Options) -> Callable[..., Call]:
    """One object for equal options: torch.compile compiles again for another backend."""

    def onnxtrain(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Call:
        return _compiled(graph, options, is_piece=True)

    return onnxtrain
