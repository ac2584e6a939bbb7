"""The entry points ORTModule, prepare, verify and the torch.compile backend, and the engine that they share."""
