"""Resampling of images: on a regular grid (Resize, Interpolate) or at given coordinates (GridSample)."""
