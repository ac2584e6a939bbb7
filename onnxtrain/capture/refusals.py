"""What is known beforehand not to be a graph, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onnxtrain.capture.snapshot import PLAIN_TENSORS
from onnxtrain.errors import CaptureError, ORTModuleIOError

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def refuse_call(tensors: Sequence[torch.Tensor]) -> None:
    """Raises where a graph cannot hold the call's tensors, or something else is to see each operator of the module.

    Raises:
        CaptureError: a transform, forward-mode differentiation or a mode is under way.
        ORTModuleIOError: a tensor of another layout, or of a class of its own.
    """
    if torch._C._are_functorch_transforms_active():
        raise CaptureError(
            "the module is called inside a torch.func transform",
            todo="the module runs in PyTorch; call it outside of vmap, grad, jvp and their like",
        )
    if forward_ad._current_level >= 0:
        raise CaptureError(
            "the module is called under forward-mode differentiation, which a graph does not carry",
            todo="the module runs in PyTorch; call it outside of torch.autograd.forward_ad.dual_level()",
        )
    modes = [type(mode).__qualname__ for mode in (*_function_modes(), *_get_current_dispatch_mode_stack())]
    if modes:
        raise CaptureError(
            "a mode is on that is to see each of the module's operators: a graph has others",
            got=_some(modes),
            todo="the module runs in PyTorch; leave the mode to have it captured",
        )
    for number, tensor in enumerate(tensors):
        if type(tensor) not in PLAIN_TENSORS or tensor.layout != torch.strided or tensor.is_nested:
            raise ORTModuleIOError(
                f"input tensor {number} is of a kind that a graph cannot hold",
                expected="a torch.Tensor of strided layout, not nested",
                got=f"{type(tensor).__qualname__} of {tensor.layout}",
                todo="the module runs in PyTorch; convert the input",
            )


def _function_modes() -> list[TorchFunctionMode]:
    """The modes that are on, but for the default device, which a capture takes as it is."""
    return [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]


def refuse_module(module: torch.nn.Module) -> None:
    """Raises where the module has something that a graph would not run, or would run otherwise than eager does.

    Raises:
        CaptureError: names the submodules.
    """
    named = list(module.named_modules())
    hooks = [
        f"{name or 'the module itself'} ({kind})"
        for name, submodule in named
        for attribute, kind in _HOOKS.items()
        if not all(map(_is_harmless, getattr(submodule, attribute).values()))
    ]
    if hooks:
        raise CaptureError(
            "submodules have hooks, which a graph would not run",
            where=_some(hooks),
            todo="remove the hooks, or put them on the ORTModule itself",
        )
    special = [f"{n}: {type(p).__qualname__}" for n, p in module.named_parameters() if type(p) not in PLAIN_TENSORS]
    if special:
        raise CaptureError(
            "parameters are of a kind that a graph cannot hold",
            where=_some(special),
            todo="the module runs in PyTorch; wrap the module before its parameters are converted",
        )
    packing = [name for name, submodule in named if _packs_padding(submodule)]
    if packing:
        raise CaptureError(
            "without gradients and in eval mode nn.TransformerEncoder leaves out padding, by nested tensors",
            where=_some(packing),
            todo="the module runs in PyTorch; enable_nested_tensor=False lets it be captured",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _is_harmless(hook: Callable[..., Any]) -> bool:
    """Whether a hook only marks an output as needing a gradient, which a capture can run on fake tensors.

    transformers leaves this one on the embeddings when gradient checkpointing is switched on.
    """
    return hook.__module__ == "transformers.modeling_utils" and hook.__name__ == "make_inputs_require_grads"


def _packs_padding(module: torch.nn.Module) -> bool:
    return (
        isinstance(module, torch.nn.TransformerEncoder)
        and module.enable_nested_tensor
        and not module.training
        and not torch.is_grad_enabled()
        and torch.backends.mha.get_fastpath_enabled()
    )
