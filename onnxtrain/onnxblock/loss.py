"""Losses. Each adds a graph input for its targets unless one of that name exists."""

from onnxtrain.device.losses import BCEWithLogitsLoss, CrossEntropyLoss, L1Loss, MSELoss

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]
