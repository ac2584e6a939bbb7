"""`onnxruntime.training.experimental.exporter`."""

from onnxtrain.dropin.jit_graph import export_jit_graph_to_onnx_model_proto as _export_jit_graph_to_onnx_model_proto

__all__ = ["_export_jit_graph_to_onnx_model_proto"]
