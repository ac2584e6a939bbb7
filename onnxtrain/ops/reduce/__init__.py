"""Sums, means, extremes, norms and variances over axes; cumulative sums and products.

The axes of ai.onnx reductions are an input. Captured reductions pass a constant that lists every reduced axis, so their
meaning does not depend on `noop_with_empty_axes`.
"""
