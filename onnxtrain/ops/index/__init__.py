"""Ops that create tensors, and ops that gather and scatter elements by index tensors."""
