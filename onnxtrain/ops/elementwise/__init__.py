"""Elementwise arithmetic, functions, comparisons, logic, selection and copies.

The operands of a node have the same element type: capture turns PyTorch's type promotion into explicit Casts. Gradient
rules return gradients of the output's shape; the differentiator sums them to the operands' shapes.
"""
