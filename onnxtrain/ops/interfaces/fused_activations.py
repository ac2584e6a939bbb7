"""Which ops can apply an activation to their result, for `passes/fuse_activations.py`."""

from __future__ import annotations

from onnxtrain.ops.definition import OpDef
from onnxtrain.ops.interfaces import OpInterface

# The activations that an op may apply to its first output, after its output addend: its attribute `activation` has the
# name of one of them, or is "".
FUSED_ACTIVATIONS = OpInterface[tuple[OpDef, ...]]("fused activations")
