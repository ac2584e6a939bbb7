"""Definitions of all ops. Each module is a family of ops, and importing it registers their definitions."""

from __future__ import annotations

import importlib
import pkgutil

from onnxtrain.ops.definition import BY_BODY, NOT_DIFFERENTIABLE, STANDARD, Effects, NoBody, NodeView, OpDef
from onnxtrain.ops.registry import FROM_TORCH, OPS, builder, definition_of, lookup, view

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = [
    "BY_BODY",
    "FROM_TORCH",
    "NOT_DIFFERENTIABLE",
    "OPS",
    "STANDARD",
    "Effects",
    "NoBody",
    "NodeView",
    "OpDef",
    "builder",
    "definition_of",
    "lookup",
    "view",
]
