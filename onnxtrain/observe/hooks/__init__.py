"""Observe the activations and gradients of a model while it trains, in PyTorch or as an ONNX graph.

    manager = SubscriberManager()
    manager.subscribe(model, [StatisticsSubscriber("statistics")])

Run once in PyTorch and once with ORTModule, then compare the two folders (`merge_activation_summary`).
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
