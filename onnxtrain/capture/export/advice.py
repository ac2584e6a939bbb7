"""Say how the user can make a forward capturable that torch.export could not."""

from __future__ import annotations

import re

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onnxtrain.torch_compat.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

_DATA_DEPENDENT_ERRORS = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


def advice(error: BaseException) -> str:
    """Say how the user can make forward capturable."""
    text = str(error)
    if isinstance(error, _DATA_DEPENDENT_ERRORS):
        return "avoid Python control flow that depends on tensor values, for example with torch.where"
    if isinstance(error, UnsupportedOperatorException) or "no fake impl registered" in text:
        match = re.search(r"\w+(::|\.)\w+", str(getattr(error, "func", None) or text))
        name = match[0].replace(".", "::") if match else "namespace::operator"
        return f'register a meta function for the operator: torch.library.register_fake("{name}")'
    return "a capture supports PyTorch's operators, and Python code that reads no tensor values"
