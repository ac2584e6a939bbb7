"""Names that only scripts of ONNX Runtime Training use: constants, replaced switches, legacy classes."""

from __future__ import annotations

import importlib.util
import os
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import onnx
import torch
from onnxruntime.capi._pybind_state import set_seed as set_seed_of_onnxruntime
from rich.console import Console

from onnxtrain.errors import OptionError
from onnxtrain.frontend.ort_module import ORTModule
from onnxtrain.log import LOG, warn_once
from onnxtrain.options import JSON_VARIABLE, Options
from onnxtrain.options.table import replace_default
from onnxtrain.options.without_effect import VARIABLES
from onnxtrain.passes.user_graph_optimizers import GraphFunction, functions_for, register_graph_optimizer

_Index = TypeVar("_Index")

# The opset of ONNX Runtime Training's graphs. onnxtrain writes files in the opset of the option onnx_opset.
ONNX_OPSET_VERSION = 17
MINIMUM_RUNTIME_PYTORCH_VERSION_STR = "1.8.1"
ORTMODULE_FALLBACK_POLICY = Options().fallback_policy
ORTMODULE_FALLBACK_RETRY = Options().fallback_retry
ORTMODULE_IS_DETERMINISTIC = torch.are_deterministic_algorithms_enabled()
_DEFAULTS = {
    "ORTMODULE_FALLBACK_POLICY": "fallback_policy",
    "ORTMODULE_FALLBACK_RETRY": "fallback_retry",
    "ONNX_OPSET_VERSION": "onnx_opset",
    "ORTMODULE_ONNX_OPSET_VERSION": "onnx_opset",
}
ORTMODULE_TORCH_CPP_DIR = str(Path(__file__).parent)


class Settings(types.ModuleType):
    """A module whose settings, when assigned, apply to all ORTModules created afterwards."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _DEFAULTS:
            replace_default(_DEFAULTS[name], value)
        elif name == "ORTMODULE_IS_DETERMINISTIC":
            _set_deterministic(f"{self.__name__}.{name}", bool(value))
        elif name in ("MINIMUM_RUNTIME_PYTORCH_VERSION_STR", "ORTMODULE_TORCH_CPP_DIR"):
            warnings.warn(f"{self.__name__}.{name} has no effect: nothing reads it.", UserWarning, stacklevel=2)
        super().__setattr__(name, value)


def _set_deterministic(name: str, value: bool) -> None:
    """Turn on PyTorch's deterministic algorithms; as in ONNX Runtime Training, an op that has none warns.

    The setting is never turned off: code outside ORTModule may rely on it.
    """
    if value and not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)
        LOG.info("%s = True turned on torch.use_deterministic_algorithms(True, warn_only=True)", name)
    elif not value and torch.are_deterministic_algorithms_enabled():
        warnings.warn(
            f"{name} = False has no effect: ORTModule uses PyTorch's setting. Call "
            "torch.use_deterministic_algorithms(False).",
            UserWarning,
            stacklevel=3,
        )


def set_seed(seed: int) -> None:
    """Seed onnxruntime, and PyTorch's generators, which ORTModule samples from."""
    set_seed_of_onnxruntime(seed)
    torch.manual_seed(seed)


class PropagateCastOpsStrategy(IntEnum):
    """How ORTModule moved casts. In onnxtrain they stay where autocast inserts them."""

    NONE = 0
    INSERT_AND_REDUCE = 1
    FLOOD_FILL = 2


@dataclass
class TrainingParameters:
    """Settings of the trainer that preceded ORTModule and no longer exists. Nothing reads them: a warning says so."""

    loss_output_name: str = ""
    mixed_precision_type: str = "fp32"
    gradient_accumulation_steps: int = 1
    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    deepspeed_zero_stage: int = 0
    enable_grad_norm_clip: bool = True
    set_gradients_as_graph_outputs: bool = False
    use_memory_efficient_gradient: bool = False

    def __post_init__(self) -> None:
        warn_once(
            "TrainingParameters has no effect: ORTModule takes DebugOptions and the options of `onnxtrain options`."
        )


def is_ortmodule_available() -> bool:
    """Return whether ORTModule can be used. Always True."""
    return True


def is_triton_enabled() -> bool:
    """Return whether the installed torch has Triton."""
    return importlib.util.find_spec("triton") is not None


def is_torch_interop_default_on() -> bool:
    """Return whether custom autograd functions are captured by default. Always True."""
    return True


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """Enable or disable custom autograd functions for the ORTModules that this process creates from now on."""
    os.environ["ORTMODULE_ENABLE_CUSTOM_AUTOGRAD"] = str(int(to_enable))


def register_triton_kernel(fn: Callable[..., Any]) -> None:
    """Refuse to register a Triton kernel: onnxtrain does not call kernels by name.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{fn.__name__} cannot be registered: onnxtrain does not call Triton kernels by name. Make it an operator with "
        "torch.library.triton_op and call the operator in forward: it becomes a node of the graph."
    )


def load_from_json(ortmodule: ORTModule, path: str | os.PathLike[str] | None = None) -> None:
    """Read an ORTModule's options from a JSON file.

    Args:
        ortmodule: captured again on its next call.
        path: the file; the variable ORTMODULE_JSON_CONFIG_PATH overrides it.

    Raises:
        ValueError: no path is given.
        KeyError: the file has an unknown key, or an unknown name as a value.
    """
    path = os.environ.get(JSON_VARIABLE) or path
    if not path:
        raise OptionError(
            "No JSON file is given.", "load_from_json", "a path", path, f"pass a path, or set {JSON_VARIABLE}"
        )
    ortmodule.load_options(path)


def print_nothing_to_build() -> None:
    """Print that onnxtrain has no extensions to build."""
    Console().print(VARIABLES["ORTMODULE_TORCH_CPP_DIR"].reason, markup=False)


def is_installed(torch_cpp_extension_path: str) -> bool:
    """Return whether ORTModule's extensions need no build. Always True: there are none, in any folder."""
    return True


class GraphOptimizerRegistry:
    """Users' graph optimizers, by class of the wrapped module and device."""

    @classmethod
    def register(cls, target_modules: str, devices: str, priority: int, fn: GraphFunction) -> None:
        """Register `fn`, as `register_graph_optimizer` does."""
        register_graph_optimizer(target_modules, devices, priority)(fn)

    @classmethod
    def optimize_all(cls, module_name: str, device: str, graph: onnx.GraphProto) -> None:
        """Run the functions for a class and a device on `graph`, those of higher priority first."""
        for function in functions_for(module_name, device):
            function(graph)


def shard_wrapped_indices_for_worker(
    dataset_index_list: Sequence[_Index], shard_id: int, num_shards: int
) -> list[_Index]:
    """Return every `num_shards`-th index from `shard_id` on. The first indices repeat, to make shards of equal size."""
    count = len(dataset_index_list)
    rounds = -(-count // num_shards)
    return [dataset_index_list[(turn * num_shards + shard_id) % count] for turn in range(rounds)]
