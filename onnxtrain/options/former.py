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


def _former(
    name: str,
    kind: Kind[Any],
    advice: str,
    apply: Callable[[Values, Mapping[str, Any]], None],
    *variables: str | OldName,
) -> FormerOption:
    return FormerOption(
        name, kind, advice, apply, tuple(v if isinstance(v, OldName) else OldName(v) for v in variables)
    )


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


def _enable(values: Values, is_enabled: bool, *passes: str) -> None:
    others = [name for name in values["disabled_passes"] or () if name not in passes]
    values["disabled_passes"] = tuple(others if is_enabled else (*others, *passes)) or None


def _enabling(name: str, disabled_pass: str, *variables: str) -> FormerOption:
    """Describe a former option that enabled a pass."""

    def apply(values: Values, former: Mapping[str, Any]) -> None:
        _enable(values, former[name], disabled_pass)

    return _former(name, BOOL, f"use disabled_passes={disabled_pass!r}", apply, *variables)


def _compute_optimizer(values: Values, former: Mapping[str, Any]) -> None:
    _enable(values, former["compute_optimizer"], "skip_ignored_labels", "hoist_gathers", "chunk_losses")
    if not former["compute_optimizer"]:
        values["skip_padding"] = "never"


def _member(name: str, option: str, member: str, *variables: str) -> FormerOption:
    """Describe a former option that became a name in the value of another."""

    def apply(values: Values, former: Mapping[str, Any]) -> None:
        others = tuple(other for other in values[option] if other != member)
        values[option] = (*others, member) if former[name] else others

    return _former(name, BOOL, f"use {option}={member!r}", apply, *variables)


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
    """Ignore a former option, which has no effect."""


_SEARCH = one_of_or("HEURISTIC", "EXHAUSTIVE")
_FOLDER = "use save_graphs='FOLDER/PREFIX'"
_PASSES = "use disabled_passes='skip_ignored_labels,hoist_gathers,chunk_losses' and skip_padding='never'"
_SPARSITY = ("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER", "ORTMODULE_ENABLE_LABEL_SPARSITY_OPT")
_DENSITY = ("ORTMODULE_PRINT_INPUT_DENSITY", "ORTMODULE_ENABLE_INPUT_DENSITY_INSPECTOR")
_SUBGRAPHS = ("ORTMODULE_MEMORY_OPT_CONFIG", "ORTMODULE_ENABLE_MEMORY_ALLEVIATION")
_USE_TRITON = OldName("ORTMODULE_USE_TRITON", on_or_off)
_DEBUG_TRITON = OldName("ORTMODULE_TRITON_DEBUG", triton_folder)
_LEVELS = "use recompute='layers' for 1, recompute='all' for 2"
_FUSED = "use kernels='fused' or kernels='fused-all'"
_PROBE = "it has no effect: subgraphs with matmuls are always found"
_CACHE_LIMIT = "it has no effect: set the environment variable ONNXTRAIN_CACHE_LIMIT_MB"
_ROWS = (
    _former("native", BOOL, "use kernels='pytorch'", _kernels, "ONNXTRAIN_NATIVE"),
    _former("regions", one_of("auto", "on", "off"), _FUSED, _kernels, _USE_TRITON, "ONNXTRAIN_REGIONS"),
    _member("reuse_memory", "process_wide", "reuse_memory", "ONNXTRAIN_REUSE_MEMORY"),
    _member("pause_collector", "process_wide", "pause_collector", "ONNXTRAIN_PAUSE_COLLECTOR"),
    _former("recompute_cheap", BOOL, "use recompute='none'", _recompute, "ONNXTRAIN_RECOMPUTE_CHEAP"),
    _former("memory_opt_level", MEMORY_OPT_LEVEL, _LEVELS, _recompute, "ORTMODULE_MEMORY_OPT_LEVEL"),
    _former("memory_opt_config", MEMORY_OPT_CONFIG, "use recompute= with the same entries", _recompute, *_SUBGRAPHS),
    _former(
        "memory_opt_probe_recompute_level",
        one_of("0", "1"),
        _PROBE,
        _ignored,
        "ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_LEVEL",
    ),
    _former("compute_optimizer", BOOL, _PASSES, _compute_optimizer, "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER"),
    _enabling("label_sparsity", "skip_ignored_labels", *_SPARSITY),
    _enabling("chunked_loss", "chunk_losses", "ONNXTRAIN_CHUNKED_LOSS"),
    _member("print_input_density", "statistics", "input_density", *_DENSITY),
    _member("print_memory_stats", "statistics", "memory", "ORTMODULE_PRINT_MEMORY_STATS"),
    _member("count_work", "statistics", "work", "ONNXTRAIN_COUNT_WORK"),
    _former("save_onnx", BOOL, _FOLDER, _save_graphs),
    _former("onnx_prefix", TEXT, _FOLDER, _save_graphs),
    _former("save_path", PATH, _FOLDER, _save_graphs, "ORTMODULE_SAVE_ONNX_PATH"),
    _former("dump_dir", optional(PATH), _FOLDER, _save_graphs, "ONNXTRAIN_DUMP"),
    _former("regions_dump", optional(PATH), _FOLDER, _save_graphs, _DEBUG_TRITON, "ONNXTRAIN_REGIONS_DUMP"),
    _former("enable_tuning", BOOL, "use tuning=", _tuning, "ORTMODULE_ENABLE_TUNING"),
    _former(
        "max_tuning_duration_ms",
        COUNT,
        "use tuning= with the number of milliseconds",
        _tuning,
        "ORTMODULE_MAX_TUNING_DURATION_MS",
    ),
    _former("conv_algo_search", _SEARCH, "use tuning='exhaustive'", _tuning, "ORTMODULE_CONV_ALGO_SEARCH"),
    _former(
        "tuning_results_path",
        optional(PATH),
        "use cache_dir=, which also caches captures",
        _tuning_results,
        "ORTMODULE_TUNING_RESULTS_PATH",
    ),
    _former("cache_limit_mb", COUNT, _CACHE_LIMIT, _ignored),
    _former("verify", BOOL, "it has no effect: the graph is checked after every stage", _ignored, "ONNXTRAIN_VERIFY"),
)

FORMER: Mapping[str, FormerOption] = {option.name: option for option in _ROWS}


def warn_former(subject: str, option: FormerOption) -> None:
    """Log once what replaced the former option that `subject` sets."""
    warn_once(f"{subject} is a former name: {option.advice}.")
