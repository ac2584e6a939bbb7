"""Watches the activations and gradients of a model while it trains, in PyTorch and as an ONNX graph alike.

    manager = SubscriberManager()
    manager.subscribe(model, [StatisticsSubscriber("statistics")])

Run once in PyTorch and once with ORTModule, then compare the folders (`merge_activation_summary`).
"""

from onnxtrain.observe.hooks.manager import GlobalSubscriberManager, SubscriberManager
from onnxtrain.observe.hooks.statistics import StatisticsSubscriber, inspect_activation
from onnxtrain.observe.hooks.subscriber import RuntimeStates, SubscriberBase
from onnxtrain.observe.hooks.zero_offload import ZeROOffloadSubscriber, configure_ort_compatible_zero_stage3

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
