"""Under CUDA autocast each model of the zoo is one graph."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.gpu_without_one.fake_gpu import fake_mode, needs_cuda_build
from tests.gpu_without_one.launches import captured
from tests.zoo.entry import ZooModel
from tests.zoo.models import ZOO

pytestmark = [needs_cuda_build, pytest.mark.slow]

_CUDNN = ("lstm", "gru")  # while they are captured, PyTorch asks the driver whether cuDNN can run them


@pytest.mark.parametrize("entry", [m for m in ZOO if not m.falls_back and m.name not in _CUDNN], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_model_is_one_graph_under_autocast(entry: ZooModel, dtype: torch.dtype) -> None:
    def inputs() -> dict[str, Any]:
        call = entry.arguments(*entry.sizes[0])
        return inspect.signature(entry.make().forward).bind(*call.args, **call.kwargs).arguments

    assert captured(entry.build, inputs, fake_mode(), autocast=dtype, skip_padding="never").unit is not None
