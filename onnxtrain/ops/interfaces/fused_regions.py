"""Which ops may be fused with their neighbours, for `plan/regions.py`."""

from __future__ import annotations

from onnxtrain.ops.interfaces import OpSet

# Ops whose kernel is loops over elements or rows: neither a library's kernel nor one that moves elements.
FUSIBLE = OpSet("fusion")
# Those of which kernels of regions with a neighbour were measured to be faster than their own.
GAINS_FROM_FUSION = OpSet("profitable fusion")
