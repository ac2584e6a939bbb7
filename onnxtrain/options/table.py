"""The table: one row an option. What a row says is all there is to say; the documentation is generated from it."""

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

# Variables that hold for the whole process, and are no option of a module.
PROCESS_VARIABLES: Mapping[str, str] = {
    JSON_VARIABLE: "a JSON file of options",
    "ONNXTRAIN_CACHE_DIR": "the folder for what is compiled and measured; else $XDG_CACHE_HOME/onnxtrain, or "
    "~/.cache/onnxtrain, or a temporary folder where these cannot be written",
}


def _knob(default: T, kind: Kind[T], meaning: str, variable: str | None = None, *old_names: OldName) -> T:
    metadata = {"kind": kind, "meaning": meaning, "variable": variable, "old_names": old_names}
    value: T = field(default=default, metadata=metadata)  # a Field, which @dataclass replaces by the default
    return value


_FALLBACK_BY_DEFAULT = (
    FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
    | FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    | FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
)


@dataclass(frozen=True)
class Options:
    """What a user can choose. Values are checked, and texts are turned into the field's own type."""

    rng: str = _knob(
        "fast",
        one_of("fast", "torch"),
        "'torch' draws exactly the random numbers that eager PyTorch draws; 'fast' draws cheaper ones",
        "ONNXTRAIN_RNG",
    )
    native: bool = _knob(
        True,
        BOOL,
        "on a CPU with a C++ compiler, attention, dropout, norms and others run kernels compiled while training "
        "goes on",
        "ONNXTRAIN_NATIVE",
    )
    reuse_memory: bool = _knob(
        False,
        BOOL,
        "on a CPU with a C++ compiler, a step's tensors lie in the memory of the step before: an allocator of "
        "onnxtrain stands in front of PyTorch's for the whole process as long as such a module lives. If `native` is "
        "off, so is this",
        "ONNXTRAIN_REUSE_MEMORY",
    )
    pause_collector: bool = _knob(
        False,
        BOOL,
        "Python's garbage collector is off, for the whole process, while the module is captured and compiled",
        "ONNXTRAIN_PAUSE_COLLECTOR",
    )
    regions: str = _knob(
        "off",
        one_of("auto", "on", "off"),
        "with a C++ compiler, and Triton on a GPU, neighbouring elementwise operators, norms, softmax and sums run as "
        "one kernel of PyTorch's Inductor, compiled while training goes on. 'auto': regions of kinds that were "
        "measured to gain, where they do on this machine too; 'on': all. If `native` is off, so are regions",
        "ONNXTRAIN_REGIONS",
        OldName("ORTMODULE_USE_TRITON", on_or_off),
    )
    regions_dump: Path | None = _knob(
        None,
        optional(PATH),
        "a folder to which each compiled region writes its graph and its library",
        "ONNXTRAIN_REGIONS_DUMP",
        OldName("ORTMODULE_TRITON_DEBUG", triton_folder),
    )
    cuda_graphs: bool = _knob(
        False,
        BOOL,
        "on a GPU, record forward and backward as CUDA graphs, one for each of up to eight sets of sizes, and replay "
        "them; the number of tokens without padding is rounded up for that. Programs whose sizes depend on data run as "
        "before",
        "ONNXTRAIN_CUDA_GRAPHS",
    )
    keep_outputs: tuple[str, ...] | None = _knob(
        None,
        optional(NAMES),
        "the outputs of the module that are read, such as 'loss'; what only others need is not computed, and using one "
        "of them raises; None keeps all",
    )
    memory_budget_bytes: int | float | str | None = _knob(
        None,
        optional(BUDGET),
        "what the activations of a step may take, beside parameters, inputs and accumulated gradients: backward "
        "computes again what does not fit, and hands gradients over early where that is not enough. Bytes hold at all "
        "sizes; a share is of what they would take, at the sizes of the first call; 'auto' is nine tenths of the "
        "memory that is free when the module is compiled",
        "ONNXTRAIN_MEMORY_BUDGET",
    )
    recompute_cheap: bool = _knob(
        True,
        BOOL,
        "without a budget, backward computes again what costs little more than to read it, such as an activation "
        "function of something that is kept",
        "ONNXTRAIN_RECOMPUTE_CHEAP",
    )
    compute_optimizer: bool = _knob(
        True,
        BOOL,
        "leave out work that nobody reads: rows are picked before they are computed, and what the next three options "
        "say; if off, those are off too",
        "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER",
    )
    label_sparsity: bool = _knob(
        True,
        BOOL,
        "tokens whose label is ignored go through no layer behind the last that mixes tokens",
        "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER",
        OldName("ORTMODULE_ENABLE_LABEL_SPARSITY_OPT"),
    )
    chunked_loss: bool = _knob(
        True,
        BOOL,
        "the scores of a vocabulary are computed for some rows at a time, with their loss, and never held whole",
        "ONNXTRAIN_CHUNKED_LOSS",
    )
    skip_padding: str = _knob(
        "auto",
        one_of("auto", "always", "never"),
        "leave the padding of token batches out of the computation, where it is proven that nobody reads it; 'auto': "
        "where a tenth or more of 512 or more tokens are padding",
        "ONNXTRAIN_SKIP_PADDING",
        OldName("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", auto_or_never),
    )
    disabled_passes: tuple[str, ...] | None = _knob(
        None,
        optional(NAMES),
        "passes over the graph that are not run, by their names in the report, to see what each of them does",
        "ONNXTRAIN_DISABLED_PASSES",
    )
    print_input_density: bool = _knob(
        False,
        BOOL,
        "print how many of the tokens of each step are real, where padding can be left out, and how many have a label",
        "ORTMODULE_PRINT_INPUT_DENSITY",
        OldName("ORTMODULE_ENABLE_INPUT_DENSITY_INSPECTOR"),
    )
    count_work: bool = _knob(
        False,
        BOOL,
        "count the floating-point operations and bytes of each graph for the report: `onnxtrain explain` sets it",
        "ONNXTRAIN_COUNT_WORK",
    )
    save_onnx: bool = _knob(False, BOOL, "write the graph of each stage as an ONNX file")
    onnx_prefix: str = _knob("", TEXT, "how the names of the files of save_onnx begin")
    save_path: Path = _knob(
        Path(), PATH, "the folder for the files of save_onnx; the current one by default", "ORTMODULE_SAVE_ONNX_PATH"
    )
    onnx_opset: int | None = _knob(
        None,
        optional(OPSET),
        "the opset of written files; None keeps the one used inside",
        "ORTMODULE_ONNX_OPSET_VERSION",
    )
    log_level: LogLevel = _knob(LogLevel.WARNING, LOG_LEVEL, "the lowest level that is logged", "ORTMODULE_LOG_LEVEL")
    fallback_policy: FallbackPolicy = _knob(
        _FALLBACK_BY_DEFAULT,
        FALLBACK_POLICY,
        "the failures after which a module runs in plain PyTorch",
        "ORTMODULE_FALLBACK_POLICY",
    )
    fallback_retry: bool = _knob(
        False, BOOL, "after a fallback, try the graph again at each step", "ORTMODULE_FALLBACK_RETRY"
    )
    pieces: bool = _knob(
        True,
        BOOL,
        "what no single graph can hold (Python that decides by elements) runs in pieces, found by torch.compile's "
        "frontend, each a graph; if off, it runs in plain PyTorch",
        "ONNXTRAIN_PIECES",
    )
    custom_autograd: bool = _knob(
        True,
        BOOL,
        "custom autograd functions become PythonOps; if off, a module that applies one is not captured",
        "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD",
        OldName("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", opposite),
    )
    conv_algo_search: str = _knob(
        "HEURISTIC",
        one_of_or("HEURISTIC", "EXHAUSTIVE"),
        "how cuDNN finds a convolution's algorithm; 'EXHAUSTIVE' sets torch.backends.cudnn.benchmark",
        "ORTMODULE_CONV_ALGO_SEARCH",
    )
    print_memory_stats: bool = _knob(
        False,
        BOOL,
        "print the memory before and after forward and backward, in the first ten steps and those of a power of two",
        "ORTMODULE_PRINT_MEMORY_STATS",
    )
    memory_opt_level: MemoryOptLevel = _knob(
        MemoryOptLevel.USER_SPECIFIED,
        MEMORY_OPT_LEVEL,
        "what backward computes again: 0: what memory_opt_config says; 1: all that a numbered layer makes for itself; "
        "2: and all subgraphs outside the layers, where something smaller may be kept in their place",
        "ORTMODULE_MEMORY_OPT_LEVEL",
    )
    memory_opt_config: tuple[SubgraphConfig, ...] = _knob(
        (),
        MEMORY_OPT_CONFIG,
        "the subgraphs that backward computes again, as pattern:kind:count; `onnxtrain memory MODEL` lists them",
        "ORTMODULE_MEMORY_OPT_CONFIG",
        OldName("ORTMODULE_ENABLE_MEMORY_ALLEVIATION"),
    )
    memory_opt_probe_recompute_level: str = _knob(
        "0",
        one_of("0", "1"),
        "the nodes of which subgraphs consist: '0': cheap ones; '1': matrix products too",
        "ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_LEVEL",
    )
    early_gradients: bool = _knob(
        False,
        BOOL,
        "add each layer's gradients to .grad, and free them, while backward goes on, not all at its end; hooks fire as "
        "layer by layer in eager",
        "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT",
    )
    tuning: bool = _knob(
        True,
        BOOL,
        "on a CPU, try kernels for matrix products and convolutions in the first steps and stay with the fastest; "
        "if off, what is known of this machine and a cost model choose",
        "ORTMODULE_ENABLE_TUNING",
    )
    max_tuning_duration_ms: int = _knob(
        0,
        COUNT,
        "how long the kernels of one product are tried before the choice is made; 0: until it is clear",
        "ORTMODULE_MAX_TUNING_DURATION_MS",
    )
    tuning_results_path: Path | None = _knob(
        None,
        optional(PATH),
        "the folder for measured times of kernels; None is `kernels` in the cache folder",
        "ORTMODULE_TUNING_RESULTS_PATH",
    )
    cache_dir: Path | None = _knob(
        None,
        optional(PATH),
        "the folder in which captures are kept, so that later runs begin without one; None: none are kept",
        "ORTMODULE_CACHE_DIR",
    )
    cache_limit_mb: int = _knob(
        1024,
        COUNT,
        "what the captures in cache_dir may take together, in MiB; the least recently used go",
        "ONNXTRAIN_CACHE_LIMIT_MB",
    )
    dump_dir: Path | None = _knob(
        None, optional(PATH), "a folder to which every stage writes its graph", "ONNXTRAIN_DUMP"
    )
    verify: bool = _knob(True, BOOL, "check the graph after every stage", "ONNXTRAIN_VERIFY")

    def __post_init__(self) -> None:
        for knob in knobs():
            value = knob.read(getattr(self, knob.name), f"the code's {knob.name}=")
            object.__setattr__(self, knob.name, value)
        if self.memory_budget_bytes is not None and (self.memory_opt_level or self.memory_opt_config):
            raise OptionError(
                "Two options say what backward computes again.",
                expected="memory_budget_bytes, or memory_opt_level and memory_opt_config",
                got=f"memory_budget_bytes={self.memory_budget_bytes} and one of the others",
                todo="Set one of them; memory_budget_bytes chooses by cost.",
            )

    @classmethod
    def resolve(cls, **code: Any) -> Options:
        """Applies the defaults, then what the code gives, then the JSON file of ORTMODULE_JSON_CONFIG_PATH, then the
        environment, which wins.

        Raises:
            OptionError: an unknown option, a value that is not allowed, or a JSON file that cannot be read.
        """  # noqa: D205  the order is one sentence
        if unknown := sorted(code.keys() - {knob.name for knob in knobs()}):
            names = ", ".join(knob.name for knob in knobs())
            raise OptionError("There is no such option.", "the code", names, ", ".join(unknown))
        options = cls(**code)  # the code's mistakes show even where something else wins
        return replace(options, **{row.knob.name: row.value for row in resolved(options)})

    def over_file(self, path: str | os.PathLike[str]) -> Options:
        """These options with those of a JSON file over them, and the environment over both."""
        return replace(self, **{row.knob.name: row.value for row in resolved(self, path)})


def knobs() -> tuple[Knob, ...]:
    """The table of all options, in order."""
    return tuple(Knob(name=row.name, default=row.default, **row.metadata) for row in fields(Options))


@dataclass(frozen=True)
class Resolved:
    """An option's value and what decided it.

    Attributes:
        knob: its row in the table.
        value: what it is now.
        source: "default", "code", the path of the JSON file, or the name of the variable.
    """

    knob: Knob
    value: Any
    source: str


def resolved(code: Options | None = None, path: str | os.PathLike[str] | None = None) -> tuple[Resolved, ...]:
    """Every option with its value and source.

    Args:
        code: what the code gave; the defaults where None.
        path: a JSON file. The one that ORTMODULE_JSON_CONFIG_PATH names wins over it.

    Raises:
        OptionError: a variable or the JSON file has a name or value that is not allowed.
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
    found = knob.from_environment()
    return Resolved(knob, value, source) if found is None else Resolved(knob, found[1], found[0])


def warn_ineffective_variables() -> None:
    """Says in the log, once in a process, which of the variables that are set have no effect, and why.

    Raises:
        OptionError: one of them has a value that is not allowed.
    """
    named = [name for knob in knobs() for name in (knob.variable, *(old.variable for old in knob.old_names)) if name]
    without_effect.warn_ineffective_variables([*named, *PROCESS_VARIABLES])
