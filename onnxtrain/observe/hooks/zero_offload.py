"""ONNX Runtime Training's switches for DeepSpeed's ZeRO stage 3, which onnxtrain does not need."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from onnxtrain.errors import OnnxTrainError
from onnxtrain.log import warn_once
from onnxtrain.observe.hooks.manager import SubscriberManager
from onnxtrain.observe.hooks.statistics import StatisticsSubscriber
from onnxtrain.observe.hooks.subscriber import SubscriberBase

_AS_THEY_ARE = "modules run as graphs under DeepSpeed's ZeRO stage 3 as they are."
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"


class ZeROStage3Error(OnnxTrainError, RuntimeError):
    """ZeRO stage 3 was configured, and DeepSpeed is not installed."""


def configure_ort_compatible_zero_stage3(
    debug: bool = False, stats_output_dir: str | os.PathLike[str] = "./", stats_overwrite: bool = False
) -> None:
    """Write statistics of the models that DeepSpeed trains with ZeRO stage 3 from now on, if `debug` is set.

    There is nothing else to configure: DeepSpeed's own hooks gather the parameters of a block, around its graph.
    Without `debug`, a warning says so. Run once in PyTorch and once with onnxtrain to compare the two
    (`merge_activation_summary`).

    Args:
        debug: whether to subscribe a `StatisticsSubscriber` to each such model; it cannot be unset.
        stats_output_dir: the folder of the statistics.
        stats_overwrite: whether to empty an existing folder.

    Raises:
        ZeROStage3Error: DeepSpeed is not installed; it is a RuntimeError.
        FileExistsError: the folder exists, `debug` is set and `stats_overwrite` is not.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ZeROStage3Error("DeepSpeed is not installed.", todo="pip install deepspeed")
    if not debug:
        warn_once(f"configure_ort_compatible_zero_stage3() has no effect without debug=True: {_AS_THEY_ARE}")
        return
    offload = importlib.import_module(_OFFLOAD).DeepSpeedZeRoOffload
    set_up = offload.setup_zero_stage3_hooks
    statistics = StatisticsSubscriber(stats_output_dir, override_output_dir=stats_overwrite)

    def set_up_with_statistics(self: Any) -> None:
        set_up(self)
        SubscriberManager().subscribe(self.module, [statistics])

    offload.setup_zero_stage3_hooks = set_up_with_statistics


class ZeROOffloadSubscriber(SubscriberBase):
    """A subscriber that changes nothing, and warns so: DeepSpeed's hooks gather and release the parameters.

    Args:
        offloader: DeepSpeed's `DeepSpeedZeRoOffload`.
        one_time_init, enable_debug_info: as in ONNX Runtime Training; nothing reads them.
    """

    def __init__(self, offloader: Any, one_time_init: Any = None, enable_debug_info: bool = False) -> None:
        super().__init__()
        warn_once(f"ZeROOffloadSubscriber has no effect: {_AS_THEY_ARE}")
        self.offloader = offloader
