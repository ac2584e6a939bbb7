"""From a PyTorch module to a graph, and what decides whether a capture may be used again."""
