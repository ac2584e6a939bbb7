"""Dropout in its forms, random tensors, and the random bits of `rng="fast"`."""
