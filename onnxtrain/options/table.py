"""The table of options, one row each. The documentation is generated from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from onnxtrain.errors import OptionError
from onnxtrain.options import json_file, without_effect
from onnxtrain.options.kinds import (
    BOOL,
    BUDGET,
    COUNT,
    FALLBACK_POLICY,
    LOG_LEVEL,
    MEMORY_OPT_CONFIG,
    MEMORY_OPT_LEVEL,
    NAMES,
    OPSET,
    PATH,
    TEXT,
    Kind,
    Knob,
    OldName,
    auto_or_never,
    on_or_off,
    one_of,
    one_of_or,
    opposite,
    optional,
    triton_folder,
)
from onnxtrain.options.policies import FallbackPolicy, LogLevel, MemoryOptLevel, SubgraphConfig

T = TypeVar("T")

JSON_VARIABLE = "ORTMODULE_JSON_CONFIG_PATH"

# Defaults that were replaced for the whole process, by the names of options.
_REPLACED_DEFAULTS: dict[str, Any] = {}


def replace_default(name: str, value: object) -> None:
    """Replace an option's default for the modules that are made from now on; code and environment override it.

    Raises:
        OptionError: an invalid value.
    """
    given: dict[str, Any] = {name: value}
    _REPLACED_DEFAULTS[name] = getattr(Options(**given), name)


# Variables of the whole process, as opposed to options of a module.
PROCESS_VARIABLES: Mapping[str, str] = {
    JSON_VARIABLE: "a JSON file of options",
    "ONNXTRAIN_CACHE_DIR": "the folder for compiled kernels and measurements; by default $XDG_CACHE_HOME/onnxtrain or "
    "~/.cache/onnxtrain, or a temporary folder if that is not writable",
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
        "random number generator of dropout and random ops: 'torch' samples exactly what eager PyTorch samples, 'fast' "
        "uses a cheaper generator",
        "ONNXTRAIN_RNG",
    )
    native: bool = _knob(
        True,
        BOOL,
        "on a CPU with a C++ compiler, use native kernels for attention, dropout, norms and others, which are compiled "
        "in the background",
        "ONNXTRAIN_NATIVE",
    )
    reuse_memory: bool = _knob(
        False,
        BOOL,
        "on a CPU with a C++ compiler, reuse tensor memory across steps: while such a module exists, an allocator of "
        "onnxtrain wraps PyTorch's CPU allocator for the whole process. Off if `native` is off",
        "ONNXTRAIN_REUSE_MEMORY",
    )
    pause_collector: bool = _knob(
        False,
        BOOL,
        "pause Python's garbage collector, for the whole process, while the module is captured and compiled",
        "ONNXTRAIN_PAUSE_COLLECTOR",
    )
    regions: str = _knob(
        "off",
        one_of("auto", "on", "off"),
        "fuse adjacent elementwise ops, norms, softmax and sums into kernels of PyTorch's Inductor, compiled in the "
        "background; needs a C++ compiler, on a GPU also Triton. 'auto': only the kinds of regions that were measured "
        "to be faster, if they are on this machine too; 'on': all. Off if `native` is off",
        "ONNXTRAIN_REGIONS",
        OldName("ORTMODULE_USE_TRITON", on_or_off),
    )
    regions_dump: Path | None = _knob(
        None,
        optional(PATH),
        "a folder for the graph and the compiled library of each fused region",
        "ONNXTRAIN_REGIONS_DUMP",
        OldName("ORTMODULE_TRITON_DEBUG", triton_folder),
    )
    cuda_graphs: bool = _knob(
        False,
        BOOL,
        "on a GPU, record forward and backward as CUDA graphs, for up to eight sets of input sizes, and replay them; "
        "the number of tokens without padding is rounded up to limit the number of graphs. Programs with "
        "data-dependent shapes are not recorded",
        "ONNXTRAIN_CUDA_GRAPHS",
    )
    keep_outputs: tuple[str, ...] | None = _knob(
        None,
        optional(NAMES),
        "the outputs of the module to compute, such as 'loss'; using another output raises an error; None computes all",
    )
    memory_budget_bytes: int | float | str | None = _knob(
        None,
        optional(BUDGET),
        "memory for the activations of a step, not counting parameters, inputs and accumulated gradients: backward "
        "recomputes what does not fit, and if that is not enough, gradients are accumulated and freed early. A number "
        "of bytes holds at all input sizes; a fraction is of the memory needed without a budget at the sizes of the "
        "first call; 'auto' is 90 % of the memory that is free when the module is compiled",
        "ONNXTRAIN_MEMORY_BUDGET",
    )
    recompute_cheap: bool = _knob(
        True,
        BOOL,
        "without a budget, recompute in backward what costs little more than reading it from memory, such as an "
        "activation function of a kept tensor",
        "ONNXTRAIN_RECOMPUTE_CHEAP",
    )
    compute_optimizer: bool = _knob(
        True,
        BOOL,
        "skip the computation of dead rows: gathers move up the graph; also enables label_sparsity, chunked_loss and "
        "skip_padding, which are off if this is off",
        "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER",
    )
    label_sparsity: bool = _knob(
        True,
        BOOL,
        "skip tokens with an ignored label after the last attention layer",
        "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER",
        OldName("ORTMODULE_ENABLE_LABEL_SPARSITY_OPT"),
    )
    chunked_loss: bool = _knob(
        True,
        BOOL,
        "compute the logits of a large vocabulary and their loss in chunks of rows, never all at once",
        "ONNXTRAIN_CHUNKED_LOSS",
    )
    skip_padding: str = _knob(
        "auto",
        one_of("auto", "always", "never"),
        "skip padding tokens if their results are proven to be unused; 'auto': for batches of at least 512 tokens of "
        "which at least 10 % are padding",
        "ONNXTRAIN_SKIP_PADDING",
        OldName("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", auto_or_never),
    )
    disabled_passes: tuple[str, ...] | None = _knob(
        None,
        optional(NAMES),
        "graph passes to skip, by their names in the report, to measure the effect of each",
        "ONNXTRAIN_DISABLED_PASSES",
    )
    print_input_density: bool = _knob(
        False,
        BOOL,
        "print for each step the fraction of tokens that are not padding, if padding can be skipped, and of those that "
        "have a label",
        "ORTMODULE_PRINT_INPUT_DENSITY",
        OldName("ORTMODULE_ENABLE_INPUT_DENSITY_INSPECTOR"),
    )
    count_work: bool = _knob(
        False,
        BOOL,
        "count the floating-point operations and bytes of each graph for the report; set by `onnxtrain explain`",
        "ONNXTRAIN_COUNT_WORK",
    )
    save_onnx: bool = _knob(False, BOOL, "write the graph of each stage as an ONNX file")
    onnx_prefix: str = _knob("", TEXT, "prefix of the names of the files of save_onnx")
    save_path: Path = _knob(
        Path(), PATH, "the folder for the files of save_onnx; the current one by default", "ORTMODULE_SAVE_ONNX_PATH"
    )
    onnx_opset: int | None = _knob(
        None,
        optional(OPSET),
        "the opset of written files, or the next one that has a form of the graph; None: the one used internally",
        "ORTMODULE_ONNX_OPSET_VERSION",
    )
    log_level: LogLevel = _knob(LogLevel.WARNING, LOG_LEVEL, "the lowest level that is logged", "ORTMODULE_LOG_LEVEL")
    fallback_policy: FallbackPolicy = _knob(
        _FALLBACK_BY_DEFAULT,
        FALLBACK_POLICY,
        "the failures after which a module falls back to eager PyTorch",
        "ORTMODULE_FALLBACK_POLICY",
    )
    fallback_retry: bool = _knob(
        False, BOOL, "after a fallback, try the graph again at each step", "ORTMODULE_FALLBACK_RETRY"
    )
    pieces: bool = _knob(
        True,
        BOOL,
        "if forward cannot be one graph (such as data-dependent control flow in Python), split it at graph breaks with "
        "torch.compile's frontend and run each piece as a graph; if off, the module runs in eager PyTorch",
        "ONNXTRAIN_PIECES",
    )
    custom_autograd: bool = _knob(
        True,
        BOOL,
        "capture custom autograd functions as PythonOp nodes; if off, a module that uses one is not captured",
        "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD",
        OldName("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", opposite),
    )
    conv_algo_search: str = _knob(
        "HEURISTIC",
        one_of_or("HEURISTIC", "EXHAUSTIVE"),
        "how cuDNN selects convolution algorithms; 'EXHAUSTIVE' sets torch.backends.cudnn.benchmark",
        "ORTMODULE_CONV_ALGO_SEARCH",
    )
    print_memory_stats: bool = _knob(
        False,
        BOOL,
        "print the memory before and after forward and backward in the first ten steps and each step whose number is a "
        "power of two",
        "ORTMODULE_PRINT_MEMORY_STATS",
    )
    memory_opt_level: MemoryOptLevel = _knob(
        MemoryOptLevel.USER_SPECIFIED,
        MEMORY_OPT_LEVEL,
        "what backward recomputes: 0: the subgraphs of memory_opt_config; 1: all activations internal to a layer; 2: "
        "also all subgraphs outside the layers, even if a smaller tensor must be kept for that",
        "ORTMODULE_MEMORY_OPT_LEVEL",
    )
    memory_opt_config: tuple[SubgraphConfig, ...] = _knob(
        (),
        MEMORY_OPT_CONFIG,
        "the subgraphs that backward recomputes, as pattern:kind:count; `onnxtrain memory MODEL` lists them",
        "ORTMODULE_MEMORY_OPT_CONFIG",
        OldName("ORTMODULE_ENABLE_MEMORY_ALLEVIATION"),
    )
    memory_opt_probe_recompute_level: str = _knob(
        "0",
        one_of("0", "1"),
        "which nodes subgraphs may contain: '0': cheap ones; '1': also matmuls",
        "ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_LEVEL",
    )
    early_gradients: bool = _knob(
        False,
        BOOL,
        "accumulate each layer's gradients into .grad and free them during backward, not at its end; hooks then fire "
        "layer by layer, as in eager",
        "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT",
    )
    tuning: bool = _knob(
        True,
        BOOL,
        "on a CPU, time the candidate kernels of matmuls and convolutions in the first steps and keep the fastest; if "
        "off, choose by stored measurements and a cost model",
        "ORTMODULE_ENABLE_TUNING",
    )
    max_tuning_duration_ms: int = _knob(
        0,
        COUNT,
        "the time limit for timing the kernels of one matmul; 0: until the fastest is clear",
        "ORTMODULE_MAX_TUNING_DURATION_MS",
    )
    tuning_results_path: Path | None = _knob(
        None,
        optional(PATH),
        "the folder for measured kernel times; None: `kernels` in the cache folder",
        "ORTMODULE_TUNING_RESULTS_PATH",
    )
    cache_dir: Path | None = _knob(
        None,
        optional(PATH),
        "the folder in which captures are cached for later runs; None: no cache",
        "ORTMODULE_CACHE_DIR",
    )
    cache_limit_mb: int = _knob(
        1024,
        COUNT,
        "the maximum size of cache_dir in MiB; the least recently used captures are removed",
        "ONNXTRAIN_CACHE_LIMIT_MB",
    )
    dump_dir: Path | None = _knob(
        None, optional(PATH), "a folder to write the graph of every stage to", "ONNXTRAIN_DUMP"
    )
    verify: bool = _knob(True, BOOL, "check the graph after every stage", "ONNXTRAIN_VERIFY")

    def __post_init__(self) -> None:
        for knob in knobs():
            value = knob.read(getattr(self, knob.name), f"the argument {knob.name}=")
            object.__setattr__(self, knob.name, value)
        if self.memory_budget_bytes is not None and (self.memory_opt_level or self.memory_opt_config):
            raise OptionError(
                "Conflicting options choose what backward recomputes.",
                expected="either memory_budget_bytes, or memory_opt_level and memory_opt_config",
                got=f"memory_budget_bytes={self.memory_budget_bytes} together with a memory_opt option",
                todo="Remove one of them; memory_budget_bytes chooses by cost.",
            )

    @classmethod
    def resolve(cls, **code: Any) -> Options:
        """Resolve each option. Later sources override earlier ones: default, code, JSON file, environment.

        The variable ORTMODULE_JSON_CONFIG_PATH names the JSON file.

        Raises:
            OptionError: an unknown option, an invalid value, or an unreadable JSON file.
        """
        if unknown := sorted(code.keys() - {knob.name for knob in knobs()}):
            names = ", ".join(knob.name for knob in knobs())
            raise OptionError("Unknown option.", "the arguments", names, ", ".join(unknown), "Correct the name.")
        options = cls(**{**_REPLACED_DEFAULTS, **code})  # invalid arguments raise even if another source overrides them
        return replace(options, **{row.knob.name: row.value for row in resolved(options)})

    def over_file(self, path: str | os.PathLike[str]) -> Options:
        """These options, overridden by a JSON file, and both by the environment."""
        return replace(self, **{row.knob.name: row.value for row in resolved(self, path)})


def knobs() -> tuple[Knob, ...]:
    """All rows of the table, in order."""
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
    given = code or Options()
    path = os.environ.get(JSON_VARIABLE) or path
    file: Mapping[str, object] = json_file.read(path, [knob.name for knob in knobs()]) if path else {}
    return tuple(_resolved(knob, getattr(given, knob.name), file, str(path)) for knob in knobs())


def _resolved(knob: Knob, value: Any, file: Mapping[str, object], path: str) -> Resolved:
    if knob.name in file:
        from_file = knob.read(file[knob.name], f"the file {path}")
        value, source = from_file, path
    else:
        source = "default" if value == knob.default else "code"
    environment = knob.from_environment()
    return Resolved(knob, value, source) if environment is None else Resolved(knob, environment[1], environment[0])


def warn_ineffective_variables() -> None:
    """Log, once per process, the variables that are set without effect, and why.

    Raises:
        OptionError: one of them has an invalid value.
    """
    of_options = [n for knob in knobs() for n in (knob.variable, *(old.variable for old in knob.old_names)) if n]
    without_effect.warn_ineffective_variables([*of_options, *PROCESS_VARIABLES])
