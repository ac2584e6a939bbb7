"""Functionalize an exported program by PyTorch's decompositions, which trace it once more."""

from __future__ import annotations

import torch
from torch.export.exported_program import ExportedProgram

from onnxtrain.capture import source_location
from onnxtrain.capture.export.composite_shapes import shape_shortcuts
from onnxtrain.capture.export.tracing_shortcuts import tracing_shortcuts
from onnxtrain.capture.functionalize.composite_operators import (
    composite_decompositions,
    keep_buffer_copies,
    nested_cast_decompositions,
)
from onnxtrain.capture.internal_errors import summary
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.decompositions import without_effect_tokens, without_reference_functions
from onnxtrain.torch_compat.modes import autocast_disabled
from onnxtrain.torch_compat.tracing import copies_without_bases, keep_unread_samples

# The arguments of PyTorch's reference functions for these losses differ from the operators', but tracing would call
# them: cross_entropy with reduction="none" would get the shape ().
_MISMATCHED_REFERENCES = (
    torch.ops.aten.nll_loss.default,
    torch.ops.aten.hinge_embedding_loss.default,
    torch.ops.aten.margin_ranking_loss.default,
)


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Functionalize an export; keep composite operators that have a definition as single nodes.

    Raises:
        CaptureError: PyTorch cannot.
    """
    try:
        with (
            without_reference_functions(_MISMATCHED_REFERENCES),
            copies_without_bases(),
            keep_buffer_copies(),
            keep_unread_samples(),
            tracing_shortcuts(),
            shape_shortcuts(),
        ):
            functional: ExportedProgram = program.run_decompositions(composite_decompositions(program))
            nested = nested_cast_decompositions(functional)
            if nested:
                with autocast_disabled():  # all other casts are in the graph
                    functional = functional.run_decompositions(nested)
        return without_effect_tokens(functional)
    except Exception as error:  # PyTorch's tracing raises anything
        raise CaptureError(
            f"PyTorch failed to functionalize the exported graph: {summary(error)}",
            where=source_location.of_error(error),
            todo="the module runs in PyTorch",
        ) from error
