"""The graph: ONNX values, nodes, symbolic dimensions and views. Independent of torch."""
