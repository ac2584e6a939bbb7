"""Ops that rearrange, join and cut tensors without computing on their elements."""
