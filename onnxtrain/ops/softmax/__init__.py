"""Softmax and LogSoftmax, with the bias and dropout that ONNX Runtime Training fuses into them."""
