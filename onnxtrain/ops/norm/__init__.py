"""Normalizations: over the last axes (layer), over the batch (batch), over groups of channels (group), of weights."""
