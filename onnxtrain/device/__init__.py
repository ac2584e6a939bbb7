"""Training on a stock onnxruntime: the artifacts, their checkpoint, and the API that runs them.

What runs on the device (the training API and its checkpoint) needs onnxruntime and numpy, and never imports torch.
"""
