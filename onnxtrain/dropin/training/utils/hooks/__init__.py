"""`onnxruntime.training.utils.hooks`."""

from onnxtrain.observe.hooks import (
    GlobalSubscriberManager,
    RuntimeStates,
    StatisticsSubscriber,
    SubscriberBase,
    SubscriberManager,
    ZeROOffloadSubscriber,
    configure_ort_compatible_zero_stage3,
    inspect_activation,
)

__all__ = [
    "GlobalSubscriberManager",
    "RuntimeStates",
    "StatisticsSubscriber",
    "SubscriberBase",
    "SubscriberManager",
    "ZeROOffloadSubscriber",
    "configure_ort_compatible_zero_stage3",
    "inspect_activation",
]
