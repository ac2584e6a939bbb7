"""From an ONNX model of any exporter and opset to a graph of ours, ready to be differentiated.

prepare     functions inlined, types inferred, ai.onnx at the opset that is used inside
convert     node by node, each typed by its op's definition
"""

from onnxtrain.device.from_onnx.convert import convert
from onnxtrain.device.from_onnx.prepare import prepare, statistics

__all__ = ["convert", "prepare", "statistics"]
