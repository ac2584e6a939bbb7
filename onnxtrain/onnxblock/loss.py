"""Losses: each adds the input for its targets where the graph has none of that name."""

from onnxtrain.device.losses import BCEWithLogitsLoss, CrossEntropyLoss, L1Loss, MSELoss

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]
