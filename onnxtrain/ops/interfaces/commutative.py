"""Which ops may have their two inputs swapped, for `passes/patterns.py`."""

from __future__ import annotations

from onnxtrain.ops.interfaces import OpSet

COMMUTATIVE = OpSet("commutativity")
