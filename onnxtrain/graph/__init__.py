"""The graph: ONNX values, nodes, sizes and views. Knows nothing of torch."""
