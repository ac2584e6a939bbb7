"""Import an ONNX model of any exporter and opset as a graph that can be differentiated.

prepare     inline functions, infer types, convert ai.onnx to the internal opset
convert     convert node by node, each typed by its op's definition
"""

from onnxtrain.device.from_onnx.convert import convert
from onnxtrain.device.from_onnx.prepare import prepare, statistics

__all__ = ["convert", "prepare", "statistics"]
