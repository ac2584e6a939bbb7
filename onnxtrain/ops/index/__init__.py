"""Ops that make tensors from numbers, and that read and write elements at places that other tensors name."""
