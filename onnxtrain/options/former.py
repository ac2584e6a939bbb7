"""Former options: each is read as before, and translated to the options that replaced it.

regions="auto"  ▶  kernels="fused"            label_sparsity=False  ▶  disabled_passes="skip_ignored_labels"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxtrain.log import warn_once
from onnxtrain.options.kinds import (
    BOOL,
    COUNT,
    MEMORY_OPT_CONFIG,
    MEMORY_OPT_LEVEL,
    PATH,
    TEXT,
    Kind,
    OldName,
    on_or_off,
    one_of,
    one_of_or,
    optional,
    triton_folder,
)
from onnxtrain.options.policies import MemoryOptLevel

Values = dict[str, Any]  # of options, by name


@dataclass(frozen=True)
class FormerOption:
    """An option that others replaced.

    Attributes:
        name: its former name.
        kind: the values that it allowed.
        advice: what to do instead.
        apply: sets its replacements in the first argument, given the values of all former options that are set.
        variables: its environment variables, the current one of ONNX Runtime Training first.
    """

    name: str
    kind: Kind[Any]
    advice: str
    apply: Callable[[Values, Mapping[str, Any]], None]
    variables: tuple[OldName, ...] = ()


def _kernels(values: Values, former: Mapping[str, Any]) -> None:
    if not former.get("native", values["kernels"] != "pytorch"):
        values["kernels"] = "pytorch"
    elif "regions" in former:
        values["kernels"] = {"off": "native", "auto": "fused", "on": "fused-all"}[former["regions"]]
    elif values["kernels"] == "pytorch":
        values["kernels"] = "native"


def _recompute(values: Values, former: Mapping[str, Any]) -> None:
    level = former.get("memory_opt_level", MemoryOptLevel.USER_SPECIFIED)
    if level is not MemoryOptLevel.USER_SPECIFIED:
        values["recompute"] = "layers" if level is MemoryOptLevel.TRANSFORMER_LAYERWISE_RECOMPUTE else "all"
    elif "memory_opt_config" in former:
        values["recompute"] = former["memory_opt_config"] or "cheap"
    elif "recompute_cheap" in former:
        values["recompute"] = "cheap" if former["recompute_cheap"] else "none"
    elif values["recompute"] in ("layers", "all"):
        values["recompute"] = "cheap"


def _switch(former_name: str, *passes: str) -> Callable[[Values, Mapping[str, Any]], None]:
    """An option that enables passes: False disables them."""

    def apply(values: Values, former: Mapping[str, Any]) -> None:
        disabled = dict.fromkeys(values["disabled_passes"] or ())
        for name in passes:
            disabled.pop(name, None)
        if not former[former_name]:
            disabled.update(dict.fromkeys(passes))
        values["disabled_passes"] = tuple(disabled) or None

    return apply


def _compute_optimizer(values: Values, former: Mapping[str, Any]) -> None:
    _switch("compute_optimizer", "skip_ignored_labels", "hoist_gathers", "chunk_losses")(values, former)
    if not former["compute_optimizer"]:
        values["skip_padding"] = "never"


def _member(former_name: str, option: str, member: str) -> Callable[[Values, Mapping[str, Any]], None]:
    """An option that became a name in the value of another."""

    def apply(values: Values, former: Mapping[str, Any]) -> None:
        others = tuple(name for name in values[option] if name != member)
        values[option] = (*others, member) if former[former_name] else others

    return apply


def _save_graphs(values: Values, former: Mapping[str, Any]) -> None:
    folder = former.get("save_path")
    if former.get("save_onnx"):
        values["save_graphs"] = (folder or Path()) / (former.get("onnx_prefix") or "model")
    elif "save_onnx" in former:
        values["save_graphs"] = None
    elif values["save_graphs"] is not None and folder is not None:
        values["save_graphs"] = folder / values["save_graphs"].name
    folder = former.get("dump_dir") or former.get("regions_dump")
    if values["save_graphs"] is None and folder is not None:
        values["save_graphs"] = folder / "model"


def _tuning(values: Values, former: Mapping[str, Any]) -> None:
    tuning: bool | int | str = former.get("enable_tuning", True) and (values["tuning"] or "enable_tuning" in former)
    if tuning is True and former.get("max_tuning_duration_ms", 0) > 1:
        tuning = former["max_tuning_duration_ms"]
    values["tuning"] = "exhaustive" if former.get("conv_algo_search") == "EXHAUSTIVE" else tuning


def _tuning_results(values: Values, former: Mapping[str, Any]) -> None:
    if values["cache_dir"] is None:
        values["cache_dir"] = former["tuning_results_path"]


def _ignored(values: Values, former: Mapping[str, Any]) -> None:
    """A former option without effect."""


_SEARCH = one_of_or("HEURISTIC", "EXHAUSTIVE")

FORMER: Mapping[str, FormerOption] = {
    option.name: option
    for option in (
        FormerOption("native", BOOL, "use kernels='pytorch'", _kernels, (OldName("ONNXTRAIN_NATIVE"),)),
        FormerOption(
            "regions",
            one_of("auto", "on", "off"),
            "use kernels='fused' or kernels='fused-all'",
            _kernels,
            (OldName("ORTMODULE_USE_TRITON", on_or_off), OldName("ONNXTRAIN_REGIONS")),
        ),
        FormerOption(
            "reuse_memory",
            BOOL,
            "use process_wide='reuse_memory'",
            _member("reuse_memory", "process_wide", "reuse_memory"),
            (OldName("ONNXTRAIN_REUSE_MEMORY"),),
        ),
        FormerOption(
            "pause_collector",
            BOOL,
            "use process_wide='pause_collector'",
            _member("pause_collector", "process_wide", "pause_collector"),
            (OldName("ONNXTRAIN_PAUSE_COLLECTOR"),),
        ),
        FormerOption(
            "recompute_cheap", BOOL, "use recompute='none'", _recompute, (OldName("ONNXTRAIN_RECOMPUTE_CHEAP"),)
        ),
        FormerOption(
            "memory_opt_level",
            MEMORY_OPT_LEVEL,
            "use recompute='layers' for 1, recompute='all' for 2",
            _recompute,
            (OldName("ORTMODULE_MEMORY_OPT_LEVEL"),),
        ),
        FormerOption(
            "memory_opt_config",
            MEMORY_OPT_CONFIG,
            "use recompute= with the same entries",
            _recompute,
            (OldName("ORTMODULE_MEMORY_OPT_CONFIG"), OldName("ORTMODULE_ENABLE_MEMORY_ALLEVIATION")),
        ),
        FormerOption(
            "memory_opt_probe_recompute_level",
            one_of("0", "1"),
            "it has no effect: subgraphs with matmuls are always found",
            _ignored,
            (OldName("ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_LEVEL"),),
        ),
        FormerOption(
            "compute_optimizer",
            BOOL,
            "use disabled_passes='skip_ignored_labels,hoist_gathers,chunk_losses' and skip_padding='never'",
            _compute_optimizer,
            (OldName("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER"),),
        ),
        FormerOption(
            "label_sparsity",
            BOOL,
            "use disabled_passes='skip_ignored_labels'",
            _switch("label_sparsity", "skip_ignored_labels"),
            (OldName("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER"), OldName("ORTMODULE_ENABLE_LABEL_SPARSITY_OPT")),
        ),
        FormerOption(
            "chunked_loss",
            BOOL,
            "use disabled_passes='chunk_losses'",
            _switch("chunked_loss", "chunk_losses"),
            (OldName("ONNXTRAIN_CHUNKED_LOSS"),),
        ),
        FormerOption(
            "print_input_density",
            BOOL,
            "use statistics='input_density'",
            _member("print_input_density", "statistics", "input_density"),
            (OldName("ORTMODULE_PRINT_INPUT_DENSITY"), OldName("ORTMODULE_ENABLE_INPUT_DENSITY_INSPECTOR")),
        ),
        FormerOption(
            "print_memory_stats",
            BOOL,
            "use statistics='memory'",
            _member("print_memory_stats", "statistics", "memory"),
            (OldName("ORTMODULE_PRINT_MEMORY_STATS"),),
        ),
        FormerOption(
            "count_work",
            BOOL,
            "use statistics='work'",
            _member("count_work", "statistics", "work"),
            (OldName("ONNXTRAIN_COUNT_WORK"),),
        ),
        FormerOption("save_onnx", BOOL, "use save_graphs='FOLDER/PREFIX'", _save_graphs),
        FormerOption("onnx_prefix", TEXT, "use save_graphs='FOLDER/PREFIX'", _save_graphs),
        FormerOption(
            "save_path",
            PATH,
            "use save_graphs='FOLDER/PREFIX'",
            _save_graphs,
            (OldName("ORTMODULE_SAVE_ONNX_PATH"),),
        ),
        FormerOption(
            "dump_dir",
            optional(PATH),
            "use save_graphs='FOLDER/PREFIX'",
            _save_graphs,
            (OldName("ONNXTRAIN_DUMP"),),
        ),
        FormerOption(
            "regions_dump",
            optional(PATH),
            "use save_graphs='FOLDER/PREFIX'",
            _save_graphs,
            (OldName("ORTMODULE_TRITON_DEBUG", triton_folder), OldName("ONNXTRAIN_REGIONS_DUMP")),
        ),
        FormerOption("enable_tuning", BOOL, "use tuning=", _tuning, (OldName("ORTMODULE_ENABLE_TUNING"),)),
        FormerOption(
            "max_tuning_duration_ms",
            COUNT,
            "use tuning= with the number of milliseconds",
            _tuning,
            (OldName("ORTMODULE_MAX_TUNING_DURATION_MS"),),
        ),
        FormerOption(
            "conv_algo_search", _SEARCH, "use tuning='exhaustive'", _tuning, (OldName("ORTMODULE_CONV_ALGO_SEARCH"),)
        ),
        FormerOption(
            "tuning_results_path",
            optional(PATH),
            "use cache_dir=, the folder of captures too",
            _tuning_results,
            (OldName("ORTMODULE_TUNING_RESULTS_PATH"),),
        ),
        FormerOption(
            "cache_limit_mb",
            COUNT,
            "it has no effect: set the environment variable ONNXTRAIN_CACHE_LIMIT_MB",
            _ignored,
        ),
        FormerOption(
            "verify",
            BOOL,
            "it has no effect: the graph is checked after every stage",
            _ignored,
            (OldName("ONNXTRAIN_VERIFY"),),
        ),
    )
}


def warn_former(subject: str, option: FormerOption) -> None:
    """Log once what replaced the former option that `subject` sets."""
    warn_once(f"{subject} is a former name: {option.advice}.")
