"""Images resampled: at regular positions (Resize, Interpolate) or at the positions of a grid (GridSample)."""
