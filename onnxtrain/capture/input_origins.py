"""Find where the inputs of a graph come from: the call, or the module's parameters, buffers and other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind

from onnxtrain.capture.effects.outside_tensors import OutsideTensors
from onnxtrain.capture.refusals import refuse_outside_tensor
from onnxtrain.errors import CaptureError

PREFIX = "module."  # of names in an export, whose root holds the user's module


@dataclass(frozen=True)
class Source:
    """The origin of a graph input: "input" number `index`, or the "parameter", "buffer" or "attribute" `name`.

    A "part" is a tensor that a parameter holds: its `name` extends the parameter's. An "outside" tensor is in a
    container, in another object or among the globals: its `name` is the path of its `Reference`.
    """

    kind: str
    name: str = ""
    index: int = -1


@dataclass(frozen=True)
class InputOrigins:
    """The origins of an export's placeholders.

    Attributes:
        sources: for each placeholder; None for a lifted constant.
        lifted: the positions of the lifted constants among the placeholders, each with its tensor.
        call_inputs: the indices of the call's tensors, by the names of their placeholders.
    """

    sources: list[Source | None]
    lifted: list[tuple[int, torch.Tensor]]
    call_inputs: dict[str, int]


def input_origins(
    program: ExportedProgram,
    module: torch.nn.Module,
    call_tensors: int,
    parts: Mapping[str, str],
    outside: OutsideTensors,
) -> InputOrigins:
    """Find the origins of the placeholders.

    Args:
        program: the export.
        module: the user's module.
        call_tensors: the number of tensors in the call.
        parts: the names of tensors that parameters hold, by their names in the export.
        outside: the tensors that forward read from outside the module's parameters and buffers.
    """
    sources: list[Source | None] = []
    lifted: list[tuple[int, torch.Tensor]] = []
    call_inputs: dict[str, int] = {}
    kinds = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}
    for position, spec in enumerate(program.graph_signature.input_specs):
        target = str(spec.target or "")
        if target.removeprefix(PREFIX) in parts:
            sources.append(Source("part", parts[target.removeprefix(PREFIX)]))
        elif spec.kind in kinds:
            sources.append(Source(kinds[spec.kind], target.removeprefix(PREFIX)))
        elif spec.kind == InputKind.USER_INPUT:
            call_inputs[spec.arg.name] = len(call_inputs)
            sources.append(Source("input", index=len(call_inputs) - 1))
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            sources.append(_constant_source(module, target, program.constants[target], outside))
            if sources[-1] is None:
                lifted.append((position, program.constants[target]))
        else:
            raise CaptureError(
                "forward uses an object that a graph cannot represent",
                expected="parameters, buffers, arguments and tensor constants",
                got=f"{spec.arg} of kind {spec.kind.name}",
                todo="the module runs in PyTorch; compute with tensors instead",
            )
    if len(call_inputs) != call_tensors:
        raise CaptureError(
            "torch.export changed the number of input tensors",
            expected=f"{call_tensors}, as in the call",
            got=len(call_inputs),
            todo="the module runs in PyTorch; this is a bug of onnxtrain: please report it with the module",
        )
    return InputOrigins(sources, lifted, call_inputs)


def _constant_source(
    module: torch.nn.Module, target: str, tensor: torch.Tensor, outside: OutsideTensors
) -> Source | None:
    """Return the origin of a constant of the export; None if the graph has to embed it."""
    if _is_attribute(module, target) and not outside.is_constant(tensor):
        return Source("attribute", target.removeprefix(PREFIX))
    refuse_outside_tensor(tensor)
    name = outside.name(tensor)
    return Source("outside", name) if name else None


def _is_attribute(module: torch.nn.Module, target: str) -> bool:
    """Return whether a constant of the export is a tensor attribute of the user's module, not a literal in forward."""
    holder: Any = module
    for name in target.removeprefix(PREFIX).split("."):
        holder = getattr(holder, name, None)
    return target.startswith(PREFIX) and isinstance(holder, torch.Tensor)
