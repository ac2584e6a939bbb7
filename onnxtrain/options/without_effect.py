"""Variables and JSON keys of ONNX Runtime Training that switch nothing in onnxtrain: each is answered, none ignored.

A row moves to the table of options when there is something to switch.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from onnxtrain.errors import OptionError
from onnxtrain.options.kinds import SKIP_CHECK, Kind
from onnxtrain.options.notices import warn_once


@dataclass(frozen=True)
class WithoutEffect:
    """Why something has no effect, as one sentence that also says what to do, and the values that it must have."""

    why: str
    kind: Kind[Any] | None = None


_ALWAYS_CHECKED = WithoutEffect(
    "every call is checked, in microseconds: a graph that does not fit the call would give wrong numbers.", SKIP_CHECK
)
_NO_BUILD = WithoutEffect("onnxtrain has no extensions to build: torch's own kernels run, on the GPU as well.")
_FUSED_ATTENTION = WithoutEffect(
    "attention runs PyTorch's fused kernels where they apply; torch.nn.attention.sdpa_kernel chooses among them."
)

VARIABLES: Mapping[str, WithoutEffect] = {
    "ORTMODULE_SKIPCHECK_POLICY": _ALWAYS_CHECKED,
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": WithoutEffect("checkpointed regions are captured without being allowed to."),
    "ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS": WithoutEffect(
        "autograd functions are told apart by module and full name, so that none need be skipped."
    ),
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": WithoutEffect(
        "a capture leaves the module as it was, and copies nothing to do so."
    ),
    "ORTMODULE_ENABLE_ZERO_STAGE3": WithoutEffect("DeepSpeed's ZeRO stage 3 is not supported: use stage 1 or 2."),
    "ORTMODULE_TRITON_CONFIG_FILE": WithoutEffect(
        "which operators join a fused region stands in their definitions; the option regions says whether."
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
    "PropagateCastOps": WithoutEffect("casts stand where autocast puts them in eager: choose them by torch.autocast."),
    "UseExternalGPUAllocator": WithoutEffect("all memory comes from torch's allocator."),
    "EnableGradAccOptimization": WithoutEffect("gradients are accumulated by autograd, as in eager."),
    "UseStaticShape": WithoutEffect("sizes stay open, and a batch of other sizes runs on the same graph."),
    "RunSymbolicShapeInference": WithoutEffect("shapes are always inferred."),
    "UseMemoryEfficientGradient": WithoutEffect(
        "a gradient reads what costs least to keep; the option early_gradients hands gradients over early."
    ),
    "SkipCheck": _ALWAYS_CHECKED,
}


def answer(subject: str, row: WithoutEffect, value: object) -> None:
    """Says once in the log that `subject` has no effect, and why.

    Raises:
        OptionError: the value is not allowed.
    """
    if row.kind is not None:
        try:
            row.kind.read(value)
        except ValueError as error:
            raise OptionError("The value is not allowed.", subject, row.kind.allowed, repr(value)) from error
    warn_once(f"{subject} has no effect: {row.why}")


def warn_ineffective_variables(known: Iterable[str]) -> None:
    """Answers the variables that are set and have no effect, and those of our prefixes that nobody knows.

    Args:
        known: the variables that do have an effect.

    Raises:
        OptionError: one has a value that is not allowed.
    """
    names = {*known, *VARIABLES}
    for name, value in os.environ.items():
        if not value or name in known:
            continue
        if name in VARIABLES:
            answer(f"The variable {name}", VARIABLES[name], value)
        elif name.startswith(("ORTMODULE_", "ONNXTRAIN_")):
            near = difflib.get_close_matches(name, names, 1)
            warn_once(f"The variable {name} is unknown" + (f": is {near[0]} meant?" if near else "."))
