"""ZeRO stage 3 under subscribers: refused, with the reason."""

from __future__ import annotations

import importlib.util
from typing import NoReturn

from onnxtrain.errors import OnnxTrainError


class ZeROStage3Error(OnnxTrainError, RuntimeError):
    """DeepSpeed's ZeRO stage 3 was asked for."""


def configure_ort_compatible_zero_stage3(
    debug: bool = False, stats_output_dir: str = "./", stats_overwrite: bool = False
) -> NoReturn:
    """Not possible.

    Raises:
        ZeROStage3Error: always; it is a RuntimeError.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ZeROStage3Error("DeepSpeed is not installed.", todo="pip install deepspeed")
    raise ZeROStage3Error("ZeRO stage 3 is not supported.", todo="use stage 1 or 2, which need no configuration here")


class ZeROOffloadSubscriber:
    """Not possible: see `configure_ort_compatible_zero_stage3`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        configure_ort_compatible_zero_stage3()
