"""Which ops restrict writing in place, for `plan/in_place.py`."""

from __future__ import annotations

from onnxtrain.ops.interfaces import OpSet

# Ops that run code which onnxtrain does not know: it may save an input for its own backward, or return it as an output.
MAY_KEEP_INPUTS = OpSet("kept inputs")
