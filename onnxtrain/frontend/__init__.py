"""The entry points ORTModule, prepare, verify and the torch.compile backend, and the engine that they share."""

from onnxtrain.torch_compat import import_order as import_order  # before the imports of this package's modules
