"""Features that PyTorch or onnxruntime lack on some processors. Tests ask, and skip with a reason."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper


def skip_without_narrow_lstms() -> None:
    """Under autocast oneDNN computes eager's LSTMs, which needs AVX-512."""
    if not _has_narrow_lstms():
        pytest.skip("PyTorch has no LSTM in bfloat16 on this processor")


@functools.cache
def _has_narrow_lstms() -> bool:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(4, 4)(torch.randn(2, 2, 4))
    except RuntimeError:
        return False
    return True


def has_narrow_convolutions() -> bool:
    """Whether oneDNN computes those in bfloat16; elsewhere PyTorch does, by other kernels."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def integer_products_saturate() -> bool:
    """Whether onnxruntime adds pairs of uint8 times int8 in 16 bits, as it does without VNNI instructions.

    255 · 127 twice are 64770, and 32767 is what remains.
    """
    weights = numpy_helper.from_array(np.full((2, 16), 127, np.int8), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [1, 16])],
        [weights],
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.full((1, 2), 255, np.uint8)})
    return bool((y != 2 * 255 * 127).any())
