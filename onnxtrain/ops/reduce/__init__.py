"""Sums, means, extremes, norms and variances over axes; cumulative sums.

The axes of ai.onnx reductions are an input; here it is always a constant that names every axis that is reduced, so that
the meaning does not hang on `noop_with_empty_axes`.
"""
