"""The inputs whose static sizes a model-local function depends on, for `ops/local_functions.py`."""

from __future__ import annotations

from onnxtrain.ops.interfaces import OpInterface

# The inputs whose sizes decide how the body is written: a function of the op is valid for these sizes alone.
STATIC_SHAPE_INPUTS = OpInterface[frozenset[str]]("static shapes", names=lambda inputs: inputs)
