"""Configure torch.export's tracing, and replace work in it whose results are not used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from onnxtrain.torch_compat.internal import Internal, can_be_entered, required

# Configuration


def _uncached() -> AbstractContextManager[Any]:
    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)


fake_tensor_cache_disabled = Internal[Callable[[], AbstractContextManager[Any]]](
    "fake_tensor_cache",
    lambda: _uncached,
    why="with symbolic sizes, finding and copying a cached result takes longer than computing it",
    fallback=nullcontext,
    cost="a capture takes longer",
    check=can_be_entered,
).get()


def _find_fallback_random() -> Callable[[], AbstractContextManager[Any]]:
    config = importlib.import_module("torch._inductor.config")
    assert hasattr(config, "fallback_random")
    return lambda: config.patch("fallback_random", True)


keep_unread_samples = Internal[Callable[[], AbstractContextManager[Any]]](
    "keep_unread_samples",
    _find_fallback_random,
    why="functionalization removes random operators whose results are not read; eager runs them, and they advance the "
    "generator",
    fallback=nullcontext,
    cost='with rng="torch", a module that does not read some of its samples gets different samples from eager',
    check=can_be_entered,
).get()


@contextmanager
def _without_bases() -> Iterator[None]:
    with ExitStack() as stack:
        for module, name in (
            ("torch._export.config", "enable_auto_functionalized_v2_for_export"),
            ("torch._inductor.config", "enable_auto_functionalized_v2"),
        ):
            config = importlib.import_module(module)
            if hasattr(config, name):
                stack.enter_context(config.patch(name, False))
        yield


copies_without_bases = Internal[Callable[[], AbstractContextManager[Any]]](
    "copies_without_bases",
    lambda: _without_bases,
    why="a custom operator that mutates its arguments becomes a call that copies them, without views of bases",
    fallback=nullcontext,
    cost="modules that call such operators run in PyTorch",
    check=callable,
).get()


# State that a trace leaves behind


def _keep_all() -> None:
    """Leave what PyTorch keeps of the last export."""


release_exported_nodes: Callable[[], None] = Internal[Callable[[], None]](
    "release_exported_nodes",
    lambda: importlib.import_module("torch.fx.experimental.proxy_tensor")._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT.clear,
    why="PyTorch keeps the nodes of the last export, and with them its graph and fake tensors, until the next export",
    fallback=_keep_all,
    cost="the graph of the last export takes memory until the next one, also after its module is deleted",
    check=callable,
).get()


# Tensors in a trace


def node_in(tracer: Any, tensor: torch.Tensor) -> Node | None:
    """Return the node that computes a tensor in the trace of `tracer`; None if another trace does, or none."""
    node: Node | None = get_proxy_slot(tensor, tracer, None, lambda slot: slot.proxy.node)
    return node


def traced_node(tensor: torch.Tensor) -> Node | None:
    """Return the node that computes a tensor in the running trace of this thread; None if it does not trace it."""
    mode = get_proxy_mode()
    return None if mode is None else node_in(mode.tracer, tensor)


# Modules in a trace


_ModuleUnderName: type = required(
    "module_under_name",
    lambda: importlib.import_module("torch.fx.experimental.proxy_tensor")._AttrProxy,
    "if a submodule has several names, forward gets another object for each module; a capture depends on the module",
    check=lambda part: isinstance(part, type),
)


def module_of_user(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module that an object in a trace stands for, which is most often the module itself.

    It reads no attribute of the object, because the recording of attribute reads calls it.
    """
    kind: Any = type(module)
    if not issubclass(kind, _ModuleUnderName):
        return module
    try:
        return kind.get_base(module)
    except KeyError:  # PyTorch is still making the object
        return module


# Work whose results are not used


def _find_lazy_modules() -> tuple[Callable[[], Any], Callable[..., Any]]:
    module = importlib.import_module("torch.fx._lazy_graph_module")
    return lambda: module._LazyGraphModule, module._make_graph_module


_LAZY_MODULES = Internal[Any](
    "lazy_graph_modules",
    _find_lazy_modules,
    why="PyTorch generates and compiles the source of a graph module at every change, and it never runs",
    fallback=(None, None),
    cost="a capture takes longer",
    check=lambda part: issubclass(part[0](), GraphModule) and callable(part[1]),
)
lazy_module_class, make_lazy_module = _LAZY_MODULES.get()

metadata_without_contiguity: Callable[..., Any] | None = Internal[Any](
    "metadata_without_contiguity",
    lambda: partial(
        importlib.import_module("torch.fx.passes.shape_prop")._extract_tensor_metadata, include_contiguity=False
    ),
    why="PyTorch computes whether each result is contiguous in three memory formats, which is never read",
    fallback=None,
    cost="a capture takes longer",
    check=lambda part: part(torch.empty(2)).memory_format is None,
).get()
