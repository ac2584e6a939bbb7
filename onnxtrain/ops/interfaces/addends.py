"""Which ops can add another tensor in the same pass over memory, for `passes/fuse_sums.py`."""

from __future__ import annotations

from onnxtrain.ops.interfaces import OpInterface

# The optional input that has the type of the first output and is added to that output and no other.
OUTPUT_ADDENDS = OpInterface[str]("output addend", names=lambda name: (name,))
# The optional input that has the type of the first input and is added to it before anything else is computed.
INPUT_ADDENDS = OpInterface[str]("input addend", names=lambda name: (name,))
