"""Run the parts of a plan: as generated Python on torch, or on a stock onnxruntime."""
