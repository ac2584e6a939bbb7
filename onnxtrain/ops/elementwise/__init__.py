"""Elementwise arithmetic, functions, comparisons, logic, selection and copies.

Both operands of a node have one element type: PyTorch's promotion becomes explicit Casts when a model is captured.
A gradient has the shape of the output; the differentiator sums it to the operand's shape.
"""
