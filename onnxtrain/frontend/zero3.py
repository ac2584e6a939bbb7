"""DeepSpeed's ZeRO stage 3: gather the parameters of a region all at once, so that it runs as a graph.

Stage 3 splits each parameter between the processes. Hooks of the submodule that owns it gather it before each use, and
a graph does not run the hooks of submodules. DeepSpeed has leaf modules for such cases: one gathers and releases the
parameters of all its submodules in its own hooks, which run around the graph.

If a leaf is set before `deepspeed.initialize`, one backward hook reduces all its gradients, which fires too early if no
input of the leaf requires a gradient. A leaf set here is set after that, and keeps the hook of each parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxtrain.capture.refusals import uncapturable_hooks
from onnxtrain.log import LOG

_HOOKS_OF_ZERO = "deepspeed.runtime.zero.parameter_offload"  # the module that defines them
_PROFILING = "deepspeed.utils.nvtx"  # wraps some of them in a function without their name
_TABLES = ("_forward_pre_hooks", "_forward_hooks")


def gathers_by_submodule(module: torch.nn.Module) -> bool:
    """Return whether all hooks of the submodules that a graph would not run are those of stage 3."""
    hooks = [hook for submodule in _below(module) for _, hook in uncapturable_hooks(submodule)]
    return bool(hooks) and all(map(_is_of_zero, hooks))


def make_leaf(module: torch.nn.Module) -> Callable[[], None]:
    """Let DeepSpeed gather the parameters of a module and its submodules at once.

    Returns:
        A function that undoes it.
    """
    removed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for submodule in _below(module):
        for name in _TABLES:
            table: dict[int, Any] = getattr(submodule, name)
            hooks = {key: hook for key, hook in table.items() if _is_of_zero(hook)}
            removed.append((table, hooks))
            for hook in hooks.values():
                _forget_order(hook)
            for key in hooks:
                del table[key]
    LOG.info("%s: ZeRO stage 3 gathers its parameters all at once, around its graph", type(module).__name__)
    module._z3_leaf = True  # type: ignore[assignment]  # as deepspeed.utils.set_z3_leaf_module does

    def undo() -> None:
        del module._z3_leaf
        for table, hooks in removed:
            later = dict(table)
            table.clear()
            table.update({**hooks, **later})

    return undo


def gathered(module: torch.nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a call while all parameters of the module and its submodules are gathered.

    It is for the call in which the module becomes a leaf, because its hooks have run before that.

    Args:
        module: the leaf.
        run: takes args and kwargs.
    """
    import deepspeed  # noqa: PLC0415  # optional

    def run_gathered(*args: Any, **kwargs: Any) -> Any:
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return run(args, kwargs)

    return run_gathered


def _below(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (submodule for submodule in module.modules() if submodule is not module)


def _is_of_zero(hook: Callable[..., Any]) -> bool:
    return getattr(_function(hook), "__module__", None) == _HOOKS_OF_ZERO


def _forget_order(hook: Callable[..., Any]) -> None:
    """Let DeepSpeed record the order of modules anew, and finish the gathers that it has begun by the old order."""
    offload = inspect.getclosurevars(_function(hook)).nonlocals.get("self")
    if offload is not None and not (coordinator := offload.get_param_coordinator()).is_invalid_trace():
        coordinator._invalidate_trace()


def _function(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that DeepSpeed defines, without wrappers."""
    if getattr(hook, "__module__", None) == _PROFILING:
        hook = inspect.getclosurevars(hook).nonlocals.get("func", hook)
    function: Callable[..., Any] = inspect.unwrap(hook)
    return function
