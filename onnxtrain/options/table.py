"""The table of options, one row each. The documentation is generated from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from onnxtrain.errors import OptionError
from onnxtrain.options import json_file, without_effect
from onnxtrain.options.former import FORMER, FormerOption, Values, warn_former
from onnxtrain.options.kinds import (
    BOOL,
    BUDGET,
    EARLY_GRADIENTS,
    FALLBACK_POLICY,
    LOG_LEVEL,
    NAMES,
    OPSET,
    PATH,
    PATH_PREFIX,
    RECOMPUTE,
    SECONDS,
    TUNING,
    Kind,
    Knob,
    OldName,
    auto_or_never,
    names_of,
    one_of,
    opposite,
    optional,
    parse,
)
from onnxtrain.options.policies import FallbackPolicy, LogLevel, SubgraphConfig

T = TypeVar("T")

JSON_VARIABLE = "ORTMODULE_JSON_CONFIG_PATH"

# Defaults that were replaced for the whole process, by the names of options.
_REPLACED_DEFAULTS: dict[str, Any] = {}


def replace_default(name: str, value: object) -> None:
    """Replace an option's default for the modules that are made from now on; code and environment override it.

    Raises:
        OptionError: an invalid value.
    """
    values: dict[str, Any] = {name: value}
    _REPLACED_DEFAULTS[name] = getattr(Options(**values), name)


# Variables of the whole process, as opposed to options of a module.
PROCESS_VARIABLES: Mapping[str, str] = {
    JSON_VARIABLE: "a JSON file of options",
    "ONNXTRAIN_CACHE_DIR": "the folder for compiled kernels and measurements; by default $XDG_CACHE_HOME/onnxtrain or "
    "~/.cache/onnxtrain, or a temporary folder if that is not writable",
    "ONNXTRAIN_CACHE_LIMIT_MB": "the maximum size of the captures in a cache_dir in MiB, by default 1024; the least "
    "recently used ones are removed",
    "ONNXTRAIN_WITHOUT_INTERNALS": "names of private parts of PyTorch not to use, separated by commas, or all",
}


def _knob(default: T, kind: Kind[T], meaning: str, variable: str | None = None, *old_names: OldName) -> T:
    metadata = {"kind": kind, "meaning": meaning, "variable": variable, "old_names": old_names}
    value: T = field(default=default, metadata=metadata)  # a Field, which @dataclass replaces with the default
    return value


_FALLBACK_BY_DEFAULT = (
    FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
    | FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    | FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
)


@dataclass(frozen=True)
class Options:
    """The options of a module. Values are validated, and strings are parsed into the field's type."""

    rng: str = _knob(
        "fast",
        one_of("fast", "torch"),
        "the random numbers of dropout and other random ops: 'fast': from a cheaper generator, with the same "
        "distribution; 'torch': exactly those of eager PyTorch",
        "ONNXTRAIN_RNG",
    )
    kernels: str = _knob(
        "native",
        one_of("pytorch", "native", "fused", "fused-all", "inductor"),
        "the kernels to use: 'pytorch': PyTorch's; 'native': also native kernels for attention, dropout, norms and "
        "others, compiled in the background (on a CPU with a C++ compiler); 'fused': also one kernel of PyTorch's "
        "Inductor for adjacent elementwise ops, norms, softmax and sums, if it is measured to be faster; 'fused-all': "
        "such kernels wherever ops can be fused; 'inductor': forward and backward each as one program of Inductor, if "
        "it is measured to be faster. On a GPU, 'fused' and 'fused-all' act as 'inductor'",
        "ONNXTRAIN_KERNELS",
    )
    process_wide: tuple[str, ...] = _knob(
        (),
        names_of("reuse_memory", "pause_collector"),
        "optimizations that affect the whole process: 'reuse_memory': reuse tensor memory across steps, by an "
        "allocator that wraps PyTorch's CPU allocator while such a module exists (needs a C++ compiler, and `kernels` "
        "other than 'pytorch'); 'pause_collector': pause Python's garbage collector while the module is captured and "
        "compiled",
    )
    cuda_graphs: bool = _knob(
        False,
        BOOL,
        "on a GPU, record forward and backward as CUDA graphs and replay them, for up to eight sets of input sizes. "
        "The number of tokens without padding is rounded up to limit the number of graphs. Programs with "
        "data-dependent shapes are not recorded",
        None,
        OldName("ONNXTRAIN_CUDA_GRAPHS"),
    )
    keep_outputs: tuple[str, ...] | None = _knob(
        None,
        optional(NAMES),
        "the outputs of the module to compute, such as 'loss'; None computes all. Using another output raises an error",
    )
    memory_budget_bytes: int | float | str | None = _knob(
        None,
        optional(BUDGET),
        "the memory for the activations of a step, without parameters, inputs and accumulated gradients. Backward "
        "recomputes values that do not fit; if that is not enough, gradients are accumulated and freed early. A number "
        "of bytes is valid for all input sizes; a fraction refers to the memory needed without a budget, at the sizes "
        "of the first call; 'auto' is 90 % of the memory that is free when the module is compiled",
        "ONNXTRAIN_MEMORY_BUDGET",
    )
    recompute: str | tuple[SubgraphConfig, ...] = _knob(
        "cheap",
        RECOMPUTE,
        "the activations that backward recomputes without a memory budget: 'cheap': those that cost little more than "
        "reading them from memory, such as an activation function of a kept tensor; 'none': none; 'layers': all that "
        "are internal to a layer; 'all': also all subgraphs outside the layers, even if a smaller tensor must be kept "
        "for that; or subgraphs as pattern:kind:count, which `onnxtrain memory MODEL` lists",
    )
    early_gradients: bool | str = _knob(
        "auto",
        EARLY_GRADIENTS,
        "whether to accumulate each layer's gradients into .grad and free them during backward instead of at its end. "
        "Hooks then fire layer by layer, as in eager. 'auto' does so if several processes train the model when it is "
        "compiled, to exchange gradients during backward. 'inputs' computes the gradients of the call's tensors "
        "before those of parameters, and separately, as zero-bubble pipelines do",
        "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT",
    )
    skip_padding: str = _knob(
        "auto",
        one_of("auto", "always", "never"),
        "whether to skip padding tokens whose results are proven to be unused. Outputs of the module are zero there. "
        "'auto' does so for batches of at least 512 tokens, of which at least 10 % are padding",
        None,
        OldName("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", auto_or_never),
        OldName("ONNXTRAIN_SKIP_PADDING"),
    )
    disabled_passes: tuple[str, ...] | None = _knob(
        None,
        optional(NAMES),
        "graph passes to skip, by their names in the report, to measure the effect of each",
        "ONNXTRAIN_DISABLED_PASSES",
    )
    statistics: tuple[str, ...] = _knob(
        (),
        names_of("input_density", "memory", "work"),
        "the statistics to collect: 'input_density': print in each step the fractions of tokens that are not padding, "
        "if padding can be skipped, and of tokens that have a label; 'memory': print the memory before and after "
        "forward and backward, in the first ten steps and in steps whose number is a power of two; 'work': add the "
        "floating-point operations and bytes of each graph to the report, as `onnxtrain explain` does",
    )
    save_graphs: Path | None = _knob(
        None,
        optional(PATH_PREFIX),
        "a path prefix under which to save the graphs of all stages as ONNX files, and each fused region with its "
        "compiled library: 'graphs/bert' gives graphs/bert_torch_exported_training.onnx and others",
        "ONNXTRAIN_SAVE_GRAPHS",
    )
    onnx_opset: int | None = _knob(
        None,
        optional(OPSET),
        "the opset of saved files, or the next one that can express the graph; None: the opset used internally",
        "ORTMODULE_ONNX_OPSET_VERSION",
    )
    log_level: LogLevel = _knob(
        LogLevel.WARNING, LOG_LEVEL, "the minimum level of logged messages", "ORTMODULE_LOG_LEVEL"
    )
    fallback_policy: FallbackPolicy = _knob(
        _FALLBACK_BY_DEFAULT,
        FALLBACK_POLICY,
        "the failures after which a module falls back to eager PyTorch",
        "ORTMODULE_FALLBACK_POLICY",
    )
    fallback_retry: bool = _knob(
        False, BOOL, "whether to try the graph again in each step after a fallback", "ORTMODULE_FALLBACK_RETRY"
    )
    capture_seconds: float | None = _knob(
        120.0,
        optional(SECONDS),
        "the processor time in seconds after which capturing and compiling a module is given up, and the module runs "
        "in eager PyTorch; the warning says what took the time. None: no limit",
    )
    pieces: bool = _knob(
        True,
        BOOL,
        "whether to split a forward that cannot be one graph (such as data-dependent control flow in Python) at graph "
        "breaks, with torch.compile's frontend, and run each piece as a graph; if off, the module runs in eager "
        "PyTorch",
        None,
        OldName("ONNXTRAIN_PIECES"),
    )
    custom_autograd: bool = _knob(
        True,
        BOOL,
        "whether to capture custom autograd functions, as PythonOp nodes; if off, modules that use them are not "
        "captured",
        "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD",
        OldName("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", opposite),
    )
    tuning: bool | int | str = _knob(
        True,
        TUNING,
        "how to choose the kernels of matmuls and convolutions on a CPU: true: time the candidates in the first steps "
        "and keep the fastest; false: use stored times and a cost model; a number: time the candidates of one matmul "
        "for at most that many milliseconds; 'exhaustive': as true, and set torch.backends.cudnn.benchmark for "
        "convolutions on a GPU",
    )
    cache_dir: Path | None = _knob(
        None,
        optional(PATH),
        "the folder to cache captures and measured kernel times in for later runs; None: captures are not cached, and "
        "kernel times are in the folder of ONNXTRAIN_CACHE_DIR",
        "ORTMODULE_CACHE_DIR",
    )

    def __post_init__(self) -> None:
        for knob in knobs():
            value = knob.read(getattr(self, knob.name), f"the argument {knob.name}=")
            object.__setattr__(self, knob.name, value)
        if self.memory_budget_bytes is not None and self.recompute not in ("cheap", "none"):
            raise OptionError(
                "Conflicting options choose what backward recomputes.",
                expected="either memory_budget_bytes or recompute",
                got=f"memory_budget_bytes={self.memory_budget_bytes} together with recompute={self.recompute!r}",
                todo="Remove one of them; memory_budget_bytes chooses by cost.",
            )

    @classmethod
    def resolve(cls, **code: Any) -> Options:
        """Resolve each option. Later sources override earlier ones: default, code, JSON file, environment.

        The variable ORTMODULE_JSON_CONFIG_PATH names the JSON file.

        Raises:
            OptionError: an unknown option, an invalid value, or an unreadable JSON file.
        """
        if unknown := sorted(code.keys() - {knob.name for knob in knobs()} - FORMER.keys()):
            names = ", ".join(knob.name for knob in knobs())
            raise OptionError("Unknown option.", "the arguments", names, ", ".join(unknown), "Correct the name.")
        for name in FORMER.keys() & code:
            warn_former(f"The option {name}", FORMER[name])
        settled = _Settled(Options(**_REPLACED_DEFAULTS))
        settled.set_all(code, "code", lambda name: f"the argument {name}=")
        settled.set_file_and_environment(None)
        return settled.options()

    def over_file(self, path: str | os.PathLike[str]) -> Options:
        """Return these options, overridden by a JSON file, and both by the environment."""
        settled = _Settled(self)
        settled.set_file_and_environment(path)
        return settled.options()


def knobs() -> tuple[Knob, ...]:
    """Return all rows of the table, in order."""
    return tuple(Knob(name=row.name, default=row.default, **row.metadata) for row in fields(Options))


@dataclass(frozen=True)
class Resolved:
    """An option's value and its source.

    Attributes:
        knob: its row in the table.
        value: its current value.
        source: "default", "code", the path of the JSON file, or the name of the variable.
    """

    knob: Knob
    value: Any
    source: str


def resolved(code: Options | None = None, path: str | os.PathLike[str] | None = None) -> tuple[Resolved, ...]:
    """Return every option with its value and source.

    Args:
        code: the options set in code; None: the defaults.
        path: a JSON file; the one named by ORTMODULE_JSON_CONFIG_PATH overrides it.

    Raises:
        OptionError: a variable or the JSON file has an unknown name or an invalid value.
    """
    settled = _Settled(code or Options())
    settled.set_file_and_environment(path)
    return tuple(Resolved(knob, settled.values[knob.name], settled.sources[knob.name]) for knob in knobs())


class _Settled:
    """Option values and their sources, overridden by one source after the other."""

    def __init__(self, options: Options) -> None:
        self.values: Values = {knob.name: getattr(options, knob.name) for knob in knobs()}
        self.sources = {k.name: "default" if self.values[k.name] == k.default else "code" for k in knobs()}
        self._former: Values = {}

    def options(self) -> Options:
        return Options(**self.values)

    def set_file_and_environment(self, path: str | os.PathLike[str] | None) -> None:
        """Set what a JSON file sets, then what the environment sets. For `path` see `resolved`."""
        if path := os.environ.get(JSON_VARIABLE) or path:
            file = json_file.read(path, [knob.name for knob in knobs()])
            self.set_all(file, str(path), lambda name: f"the file {path}")
        for former in FORMER.values():
            self._set_former_by_environment(former)
        for knob in knobs():
            if (setting := knob.from_environment()) is not None:
                self.sources[knob.name], self.values[knob.name] = setting

    def set_all(self, values: Mapping[str, object], source: str, where: Callable[[str], str]) -> None:
        """Set options by name; where a former one and its replacement are both given, the replacement counts."""
        former = {name: parse(name, FORMER[name].kind, values[name], where(name)) for name in FORMER if name in values}
        for name, value in former.items():
            self._set_former(FORMER[name], value, source)
        for knob in knobs():
            if knob.name in values:
                self.values[knob.name] = knob.read(values[knob.name], where(knob.name))
                self.sources[knob.name] = source

    def _set_former_by_environment(self, former: FormerOption) -> None:
        for variable in former.variables:
            if text := variable.text():
                if variable.is_own:
                    warn_former(f"The variable {variable.variable}", former)
                value = parse(former.name, former.kind, text, f"the environment variable {variable.variable}")
                self._set_former(former, value, variable.variable)
                return

    def _set_former(self, former: FormerOption, value: object, source: str) -> None:
        self._former[former.name] = value
        before = dict(self.values)
        former.apply(self.values, self._former)
        self.sources |= {name: source for name, new in self.values.items() if new != before[name]}


def warn_ineffective_variables() -> None:
    """Log, once per process, the variables that are set without effect, and why.

    Raises:
        OptionError: one of them has an invalid value.
    """
    of_options = [n for knob in knobs() for n in (knob.variable, *(old.variable for old in knob.old_names)) if n]
    of_options += [old.variable for former in FORMER.values() for old in former.variables]
    without_effect.warn_ineffective_variables([*of_options, *PROCESS_VARIABLES])
