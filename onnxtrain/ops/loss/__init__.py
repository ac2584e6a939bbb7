"""Losses: with class indices or probabilities (cross entropy), element by element, and those composed of others."""
