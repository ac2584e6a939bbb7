"""Losses: cross entropy with class indices or probabilities, pointwise losses, and decomposed losses."""
