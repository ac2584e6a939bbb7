"""From a TorchScript graph to ONNX, as `torch.onnx.export(dynamo=False)` does it, without a module around it."""

from __future__ import annotations

import torch
from torch.onnx import OperatorExportTypes
from torch.onnx._internal.torchscript_exporter import utils
from torch.onnx._internal.torchscript_exporter._globals import GLOBALS

from onnxtrain.capture.export.patches import CAPTURE_LOCK
from onnxtrain.dropin.legacy import ONNX_OPSET_VERSION


def export_jit_graph_to_onnx_model_proto(graph: torch.Graph, operator_export_type: int) -> bytes:
    """The ONNX model of a TorchScript graph, at opset 17.

    Args:
        graph: its inputs and values have known types, as a traced graph's have. It stays as it is.
        operator_export_type: a member of `torch.onnx.OperatorExportTypes`, or its number.

    Returns:
        A serialized `onnx.ModelProto`.

    Raises:
        torch.onnx.OnnxExporterError: an operator has no ONNX form.
    """
    kind = OperatorExportTypes(int(operator_export_type))
    with CAPTURE_LOCK:  # the exporter's settings are the process's
        before = GLOBALS.export_onnx_opset_version, GLOBALS.operator_export_type, GLOBALS.onnx_shape_inference
        GLOBALS.export_onnx_opset_version = ONNX_OPSET_VERSION
        GLOBALS.operator_export_type, GLOBALS.onnx_shape_inference = kind, True
        try:
            own = graph.copy()
            torch._C._jit_pass_run_decompositions(own)  # type: ignore[attr-defined]  # the stub lacks it
            own = utils._optimize_graph(own, kind, params_dict={})
            data, *_ = own._export_onnx(
                {}, ONNX_OPSET_VERSION, {}, False, kind, False, False, {}, True, "", {}
            )  # fmt: skip
        finally:
            GLOBALS.export_onnx_opset_version, GLOBALS.operator_export_type, GLOBALS.onnx_shape_inference = before
    return bytes(data)
