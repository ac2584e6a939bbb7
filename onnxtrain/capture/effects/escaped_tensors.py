"""Refuse a forward that stores a tensor outside the module: in a global list, in another object.

A graph would not store it on later steps, and a capture would store a fake tensor. The fake tensors that forward
creates are recorded by weak reference. One escaped if something other than the results and the tracer holds it when
forward returns, and still holds it when the export is over.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.immutable_collections import immutable_dict, immutable_list

from onnxtrain.capture import source_location
from onnxtrain.capture.python_functions.calls import FunctionCalls
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.patch_points import NEW_FAKE_TENSOR
from onnxtrain.torch_compat.pytree import tree_leaves
from onnxtrain.torch_compat.tensors import use_count


class FakesMade:
    """The fake tensors that forward creates, by weak references: they are freed as in eager."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[FakeTensor]] = []
        self._held: list[tuple[weakref.ref[FakeTensor], str | None]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record the fake tensors that this thread creates."""
        owner = threading.get_ident()

        def noting(original: Callable[..., FakeTensor]) -> Any:
            def make(cls: Any, *args: Any, **kwargs: Any) -> FakeTensor:
                tensor = original(cls, *args, **kwargs)
                if threading.get_ident() == owner:
                    self._made.append(weakref.ref(tensor))
                return tensor

            return staticmethod(make)

        with NEW_FAKE_TENSOR.wrapped(noting):
            yield

    def begin(self) -> None:
        """Start over: forward is about to run."""
        self._made.clear()

    def note(self, results: Sequence[Any]) -> None:
        """Record which tensors besides the results are held when forward has returned; autograd frees its own later."""
        self._held = [(weakref.ref(tensor), _line(tensor)) for tensor in self._left(results)]

    def check(self, module: torch.nn.Module) -> None:
        """Check, after the export, that no recorded tensor is still held, and remove one that is from its holders.

        Raises:
            CaptureError: forward stored a tensor outside the module.
        """
        if not any(ref() is not None for ref, _ in self._held):
            return
        gc.collect()  # graphs hold their nodes in cycles
        left = [(ref(), line) for ref, line in self._held]
        if all(tensor is None for tensor, _ in left):
            return
        with _frozen_objects_too():
            for tensor, line in left:
                holders = [] if tensor is None else _holders(tensor, frozenset({id(left)}))
                if tensor is None or not holders:
                    continue
                kind = type(holders[0]).__name__
                _take_away(tensor, frozenset({id(left), id(holders)}))
                raise CaptureError(
                    f"forward keeps a tensor after its call, in a {kind} outside the module, "
                    "which a graph would not do",
                    where=line or type(module).__name__,
                    got=f"shape {tuple(map(str, tensor.shape))}",
                    todo="the module runs in PyTorch; let forward return the tensor, and keep it there",
                )

    def _left(self, results: Sequence[Any]) -> list[FakeTensor]:
        """The recorded tensors that are alive and are neither results nor held by the capture."""
        mode = get_proxy_mode()
        assert mode is not None, "forward runs under the tracer"
        known = {id(leaf) for leaf in (*results, *FunctionCalls.watched())}
        for node in mode.tracer.graph.nodes:
            known.update(map(id, tree_leaves(node.meta.get("val"))))
            node.meta.pop("eager_input_vals", None)  # what a custom operator was called with, for Inductor
        alive = [tensor for ref in self._made if (tensor := ref()) is not None and id(tensor) not in known]
        tensor = None  # no name here holds the last one
        mine = next(_references(value) for value in [object()])
        return [tensor for tensor in alive if _references(tensor) - _is_in_autograd(tensor) > mine]


@contextmanager
def _frozen_objects_too() -> Iterator[None]:
    """Let gc.get_referrers see what the program froze (gc.freeze); all that is alive is frozen afterwards."""
    if not gc.get_freeze_count():
        yield
        return
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()


def _references(value: Any) -> int:
    return sys.getrefcount(value)


def _is_in_autograd(tensor: FakeTensor) -> bool:
    """Whether C++ holds a tensor: that counts as one reference."""
    return use_count(tensor) > 1


def _holders(value: Any, own: frozenset[int]) -> list[Any]:
    """The referrers of a value that the user may have stored it in.

    Skips the lists of this search, whose ids are `own`. A tuple counts if the user may have stored it in turn; the
    argument tuples of running calls do not. This function must not close over the value: the cell would be a referrer.
    """
    referrers = gc.get_referrers(value)
    own |= {id(referrers)}
    return [h for h in referrers if id(h) not in own and _may_be_the_users(h, own)]


def _may_be_the_users(holder: Any, own: frozenset[int]) -> bool:
    if isinstance(holder, (types.FrameType, immutable_list, immutable_dict)):
        return False
    if isinstance(holder, tuple):
        return bool(_holders(holder, own))
    return isinstance(holder, (list, dict, set, deque, types.CellType)) or hasattr(holder, "__dict__")


def _take_away(value: Any, own: frozenset[int]) -> None:
    """Remove a value from what the user stored it in. This function must not close over it either."""
    holders = _holders(value, own)
    for holder in holders:
        if isinstance(holder, tuple):
            _take_away(holder, own | {id(holders)})
        elif isinstance(holder, list):
            holder[:] = _others(holder, value)
        elif isinstance(holder, (set, deque)):
            holder.remove(value)
        elif isinstance(holder, types.CellType):
            del holder.cell_contents
        else:
            attributes = holder if isinstance(holder, dict) else vars(holder)
            kept = {id(item) for item in _others(attributes.values(), value)}
            for name in [name for name, item in attributes.items() if id(item) not in kept]:
                del attributes[name]


def _others(items: Iterable[Any], value: Any) -> list[Any]:
    return [item for item in items if item is not value]


def _line(tensor: FakeTensor) -> str | None:
    """The source location that created a tensor."""
    mode = get_proxy_mode()
    proxy = None if mode is None else get_proxy_slot(tensor, mode.tracer, None, lambda slot: slot.proxy)
    return None if proxy is None else source_location.of_trace(proxy.node.stack_trace)
