"""Variables and JSON keys of ONNX Runtime Training that have no effect in onnxtrain: each one set is logged.

A row moves to the table of options when it gains an effect.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from onnxtrain.errors import OptionError
from onnxtrain.log import warn_once
from onnxtrain.options.kinds import SKIP_CHECK, Kind


@dataclass(frozen=True)
class WithoutEffect:
    """Why a setting has no effect and what to do instead, as one sentence, and its allowed values."""

    reason: str
    kind: Kind[Any] | None = None


_ALWAYS_CHECKED = WithoutEffect(
    "every call is checked, which takes microseconds: a graph that does not match the call would give wrong results.",
    SKIP_CHECK,
)
_NO_BUILD = WithoutEffect("onnxtrain has no extensions to build: it runs PyTorch's kernels, also on the GPU.")
_FUSED_ATTENTION = WithoutEffect(
    "attention uses PyTorch's fused kernels wherever they apply; choose one with torch.nn.attention.sdpa_kernel."
)

VARIABLES: Mapping[str, WithoutEffect] = {
    "ORTMODULE_SKIPCHECK_POLICY": _ALWAYS_CHECKED,
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": WithoutEffect("checkpointed regions are always captured."),
    "ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS": WithoutEffect(
        "autograd functions are identified by module and qualified name, so none has to be skipped."
    ),
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": WithoutEffect("a capture does not modify the module, so needs no copy."),
    "ORTMODULE_ENABLE_ZERO_STAGE3": WithoutEffect("modules run as graphs under DeepSpeed's ZeRO stage 3 without it."),
    "ORTMODULE_TRITON_CONFIG_FILE": WithoutEffect(
        "operator definitions say what a fused region may contain; turn fusion on and off with the option kernels."
    ),
    "ORTMODULE_USE_EFFICIENT_ATTENTION": _FUSED_ATTENTION,
    "ORTMODULE_USE_FLASH_ATTENTION": _FUSED_ATTENTION,
    "ORTMODULE_ATEN_SDPA_FALLBACK": _FUSED_ATTENTION,
    "ORTMODULE_TORCH_CPP_DIR": _NO_BUILD,
    "ONNXRUNTIME_CUDA_VERSION": _NO_BUILD,
    "ONNXRUNTIME_ROCM_VERSION": _NO_BUILD,
    "ONNXRUNTIME_FORCE_CUDA": _NO_BUILD,
    "ONNXRUNTIME_CUDA_NVCC_EXTRA_ARGS": _NO_BUILD,
}

JSON_KEYS: Mapping[str, WithoutEffect] = {
    "PropagateCastOps": WithoutEffect("casts are where autocast puts them in eager; control them with torch.autocast."),
    "UseExternalGPUAllocator": WithoutEffect("all memory comes from PyTorch's allocator."),
    "EnableGradAccOptimization": WithoutEffect("autograd accumulates gradients, as in eager."),
    "UseStaticShape": WithoutEffect("dimensions are dynamic, and batches of other sizes reuse the same graph."),
    "RunSymbolicShapeInference": WithoutEffect("shapes are always inferred."),
    "UseMemoryEfficientGradient": WithoutEffect(
        "gradients always read the tensors that are cheapest to keep; see also the option early_gradients."
    ),
    "SkipCheck": _ALWAYS_CHECKED,
}


_ON_DEVICE_OF_TENSORS = WithoutEffect("a graph runs on the device of its tensors.")

# Options of PyTorch's former torch.compile backend "onnxrt".
DORT_OPTIONS: Mapping[str, WithoutEffect] = {
    "preferred_execution_providers": _ON_DEVICE_OF_TENSORS,
    "infer_execution_providers": _ON_DEVICE_OF_TENSORS,
    "default_execution_providers": _ON_DEVICE_OF_TENSORS,
    "preallocate_output": WithoutEffect("all memory comes from PyTorch's allocator."),
    "use_aot_autograd": WithoutEffect("onnxtrain differentiates graphs itself, for training and inference alike."),
    "export_options": WithoutEffect("PyTorch's ONNX exporter does not run, and dimensions are dynamic."),
    "ort_session_options": WithoutEffect("graphs run on PyTorch's kernels, not in a session of onnxruntime."),
    "pre_ort_model_transforms": WithoutEffect(
        "register a function that rewrites graphs with onnxtrain.passes.user_graph_optimizers instead."
    ),
}


def warn_ineffective(subject: str, row: WithoutEffect, value: object) -> None:
    """Log once that `subject` has no effect, and why.

    Raises:
        OptionError: the value is invalid.
    """
    if row.kind is not None:
        try:
            row.kind.read(value)
        except ValueError as error:
            raise OptionError(
                f"{subject} has an invalid value.", None, row.kind.allowed, repr(value), "Correct or remove it."
            ) from error
    warn_once(f"{subject} has no effect: {row.reason}")


def warn_ineffective_variables(effective: Iterable[str]) -> None:
    """Log the variables that are set without effect, and the unknown ones with a prefix of onnxtrain or ORTModule.

    Args:
        effective: the variables that do have an effect.

    Raises:
        OptionError: a variable has an invalid value.
    """
    names = {*effective, *VARIABLES}
    for name, value in os.environ.items():
        if not value or name in effective:
            continue
        if name in VARIABLES:
            warn_ineffective(f"The variable {name}", VARIABLES[name], value)
        elif name.startswith(("ORTMODULE_", "ONNXTRAIN_")):
            similar = difflib.get_close_matches(name, names, 1)
            warn_once(f"The variable {name} is unknown" + (f": did you mean {similar[0]}?" if similar else "."))
