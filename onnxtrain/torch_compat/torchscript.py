"""Export TorchScript graphs to ONNX; `torch.onnx.export(dynamo=False)` exports only modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch.onnx import OperatorExportTypes

from onnxtrain.torch_compat.internal import Internal, missing


def _find_exporter() -> Callable[[torch.Graph, OperatorExportTypes, int], bytes]:
    exporter = importlib.import_module("torch.onnx._internal.torchscript_exporter")
    utils = importlib.import_module(f"{exporter.__name__}.utils")
    settings = importlib.import_module(f"{exporter.__name__}._globals").GLOBALS
    decompose = torch._C._jit_pass_run_decompositions  # type: ignore[attr-defined]  # the stub lacks it

    def export(graph: torch.Graph, kind: OperatorExportTypes, opset: int) -> bytes:
        before = settings.export_onnx_opset_version, settings.operator_export_type, settings.onnx_shape_inference
        settings.export_onnx_opset_version = opset
        settings.operator_export_type, settings.onnx_shape_inference = kind, True
        try:
            copy = graph.copy()
            decompose(copy)
            copy = utils._optimize_graph(copy, kind, params_dict={})
            data, *_ = copy._export_onnx({}, opset, {}, False, kind, False, False, {}, True, "", {})
        finally:
            settings.export_onnx_opset_version, settings.operator_export_type, settings.onnx_shape_inference = before
        return bytes(data)

    return export


EXPORT_GRAPH = Internal[Callable[[torch.Graph, OperatorExportTypes, int], bytes]](
    "export_torchscript_graph",
    _find_exporter,
    why="onnxruntime.training exported graphs without a module; torch.onnx.export takes only modules",
    fallback=missing("export_torchscript_graph"),
    cost="export_jit_graph_to_onnx_model_proto raises an error",
    check=callable,
)
