"""What only scripts of ONNX Runtime Training ask for: constants, switches that others took over, legacy classes."""

from __future__ import annotations

import importlib.util
import os
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from onnxruntime.capi._pybind_state import set_seed as set_seed_of_onnxruntime
from rich.console import Console

from onnxtrain.errors import OptionError
from onnxtrain.frontend.ort_module import ORTModule
from onnxtrain.options import JSON_VARIABLE, Options
from onnxtrain.options.table import replace_default
from onnxtrain.options.without_effect import VARIABLES

# The opset of the predecessor's graphs; onnxtrain's own writes the one of the option onnx_opset.
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
ORTMODULE_TORCH_CPP_DIR = str(Path(__file__).parent / "training" / "ortmodule" / "torch_cpp_extensions")


class Settings(types.ModuleType):
    """A module whose settings take effect where they are assigned, for the ORTModules that are made from then on."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _DEFAULTS:
            replace_default(_DEFAULTS[name], value)
        elif name == "ORTMODULE_IS_DETERMINISTIC" and value != torch.are_deterministic_algorithms_enabled():
            warnings.warn(
                f"{self.__name__}.{name} = {value} has no effect: ORTModule follows PyTorch. Call "
                f"torch.use_deterministic_algorithms({value}).",
                UserWarning,
                stacklevel=2,
            )
        elif name in ("MINIMUM_RUNTIME_PYTORCH_VERSION_STR", "ORTMODULE_TORCH_CPP_DIR"):
            warnings.warn(f"{self.__name__}.{name} has no effect: it only informs", UserWarning, stacklevel=2)
        super().__setattr__(name, value)


def set_seed(seed: int) -> None:
    """Seed onnxruntime, and what ORTModule draws: that comes from PyTorch's generators."""
    set_seed_of_onnxruntime(seed)
    torch.manual_seed(seed)


class PropagateCastOpsStrategy(IntEnum):
    """How ORTModule moved casts. onnxtrain leaves them where autocast puts them."""

    NONE = 0
    INSERT_AND_REDUCE = 1
    FLOOD_FILL = 2


@dataclass
class TrainingParameters:
    """Settings of the trainer before ORTModule, which is gone: plain values that nothing reads."""

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


def is_ortmodule_available() -> bool:
    """Whether ORTModule can be used: always."""
    return True


def is_triton_enabled() -> bool:
    """Whether the installed torch has Triton."""
    return importlib.util.find_spec("triton") is not None


def is_torch_interop_default_on() -> bool:
    """Whether custom autograd functions are captured unless switched off: always."""
    return True


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """Switches custom autograd functions on or off for the ORTModules that this process makes from now on."""
    os.environ["ORTMODULE_ENABLE_CUSTOM_AUTOGRAD"] = str(int(to_enable))


def register_triton_kernel(fn: Callable[..., Any]) -> None:
    """Not possible: a graph's kernels have no names.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{fn.__name__} cannot be registered: onnxtrain calls no Triton kernels by name. Make it an operator with "
        "torch.library.triton_op, and call that in forward: a graph takes it as a node."
    )


def load_from_json(ortmodule: ORTModule, path: str | os.PathLike[str] | None = None) -> None:
    """Takes an ORTModule's options from a JSON file.

    Args:
        ortmodule: captured again on its next call.
        path: the file; the one that the variable ORTMODULE_JSON_CONFIG_PATH names wins.

    Raises:
        ValueError: there is no path.
        KeyError: the file has a key, or a name as value, that does not exist.
    """
    path = os.environ.get(JSON_VARIABLE) or path
    if not path:
        raise OptionError("There is no JSON file.", "load_from_json", todo=f"give a path, or set {JSON_VARIABLE}")
    ortmodule.load_options(path)


def say_that_nothing_is_built() -> None:
    """Tells whoever runs the build of the predecessor's extensions that there is nothing to build."""
    Console().print(VARIABLES["ORTMODULE_TORCH_CPP_DIR"].reason, markup=False)
