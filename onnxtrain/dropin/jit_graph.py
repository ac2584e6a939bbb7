"""Export a TorchScript graph to ONNX as `torch.onnx.export(dynamo=False)` does, without a module around it."""

from __future__ import annotations

import torch
from torch.onnx import OperatorExportTypes

from onnxtrain.capture.export.patches import CAPTURE_LOCK
from onnxtrain.dropin.legacy import ONNX_OPSET_VERSION
from onnxtrain.torch_compat.torchscript import EXPORT_GRAPH


def export_jit_graph_to_onnx_model_proto(graph: torch.Graph, operator_export_type: int) -> bytes:
    """Export a TorchScript graph as an ONNX model at opset 17.

    Args:
        graph: with typed inputs and values, such as a traced graph. Not modified.
        operator_export_type: a member of `torch.onnx.OperatorExportTypes`, or its integer value.

    Returns:
        A serialized `onnx.ModelProto`.

    Raises:
        torch.onnx.OnnxExporterError: an operator has no ONNX form.
        CaptureError: this version of PyTorch has no exporter of TorchScript graphs.
    """
    with CAPTURE_LOCK:  # the exporter's settings are global
        return EXPORT_GRAPH.get()(graph, OperatorExportTypes(int(operator_export_type)), ONNX_OPSET_VERSION)
