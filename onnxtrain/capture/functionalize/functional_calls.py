"""Decide whether an exported graph is functional already, and can be converted as it is."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram

from onnxtrain.ops import FROM_TORCH
from onnxtrain.torch_compat.aten_operators import NATIVE_BATCH_NORM_FUNCTIONAL, NATIVE_BATCH_NORM_NO_TRAINING
from onnxtrain.torch_compat.dispatch import is_any_autocast_enabled
from onnxtrain.torch_compat.operators import OpOverload, schema_of

# Calls that only assert facts about sizes and types, which the guards check, or read a size.
ASSERTIONS_AND_SIZES = re.compile(
    r"^aten\.(_assert_scalar|_assert_tensor_metadata|sym_constrain_range\w*)\.|^aten\.sym_(size|stride|numel)"
)

# Norms that take running statistics and do not update them.
_WITHOUT_UPDATES = (
    NATIVE_BATCH_NORM_FUNCTIONAL.default,
    NATIVE_BATCH_NORM_NO_TRAINING.default,
)

# `tensor.item()`, before and after functionalization.
ITEM = ("aten.item.default", "aten._local_scalar_dense.default")


def is_convertible(program: ExportedProgram, *, with_casts: bool = False) -> bool:
    """Return whether an export can be converted without functionalization (which takes as long as the export).

    That requires that autocast is off or its casts are explicit (`with_casts`), and that every call has a definition
    and mutates nothing.
    """
    if is_any_autocast_enabled() and not with_casts:
        return False
    return not any(
        node.op == "get_attr" or (node.op == "call_function" and not _is_functional_call(node))
        for node in program.graph.nodes
    )


def _is_functional_call(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "") in ("_operator", "operator", "math", "torch")
    return (
        not schema_of(target).is_mutable
        and not _may_update_buffers(node, target)
        and (str(target) in FROM_TORCH or bool(ASSERTIONS_AND_SIZES.match(str(target))) or str(target) in ITEM)
    )


def _may_update_buffers(node: torch.fx.Node, target: OpOverload) -> bool:
    """Return whether a call takes running statistics, which norms update although their schemas do not say so."""
    if target in _WITHOUT_UPDATES:
        return False
    positional = zip(schema_of(target).arguments, node.args, strict=False)
    return any(
        a.name.startswith("running_") and isinstance(value, torch.fx.Node)
        for a, value in [*positional, *((a, node.kwargs.get(a.name)) for a in schema_of(target).arguments)]
    )
