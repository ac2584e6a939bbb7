"""Tensors that forward leaves behind: in a global list, in an object that is no part of the module.

A graph would not put them there on later steps, and what a capture puts there is a fake tensor. So the fake tensors
that forward makes are noted; one that something holds when forward has returned, besides its results and the tracer,
and still holds when the export is over, was left behind.
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

from onnxtrain.capture import source_line
from onnxtrain.capture.python_functions.calls import FunctionCalls
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.patch_points import NEW_FAKE_TENSOR
from onnxtrain.torch_compat.pytree import tree_leaves
from onnxtrain.torch_compat.tensors import use_count


class FakesMade:
    """The fake tensors that forward makes, by weak references: they die as the tensors of a step do."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[FakeTensor]] = []
        self._held: list[tuple[weakref.ref[FakeTensor], str | None]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes them, those of this thread."""
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
        """Forward is about to run."""
        self._made.clear()

    def note(self, results: Sequence[Any]) -> None:
        """Forward has returned: notes what is held besides its results. Autograd's own holders go with the capture."""
        self._held = [(weakref.ref(tensor), _line(tensor)) for tensor in self._left(results)]

    def check(self, module: torch.nn.Module) -> None:
        """The export is over. Raises CaptureError where forward left a tensor behind, and takes it away from there."""
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
        """Those that are alive and are neither results nor the capture's own."""
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
    """Whether C++ holds a tensor, which counts as one reference. Where it cannot be asked, any holder is looked for."""
    return use_count(tensor) > 1


def _holders(value: Any, own: frozenset[int]) -> list[Any]:
    """What a user may have put a value into, of all that refers to it.

    The lists of this search, whose ids are `own`, do not count; a tuple does where a user may have put that somewhere:
    those of a running call's arguments do not. No closure over the value here: its cell would be found as well.
    """
    found = gc.get_referrers(value)
    own |= {id(found)}
    return [h for h in found if id(h) not in own and _may_be_the_users(h, own)]


def _may_be_the_users(holder: Any, own: frozenset[int]) -> bool:
    if isinstance(holder, (types.FrameType, immutable_list, immutable_dict)):
        return False
    if isinstance(holder, tuple):
        return bool(_holders(holder, own))
    return isinstance(holder, (list, dict, set, deque, types.CellType)) or hasattr(holder, "__dict__")


def _take_away(value: Any, own: frozenset[int]) -> None:
    """Takes a value out of what the user put it into. No closure over it here either."""
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
    """The user's line that made it."""
    mode = get_proxy_mode()
    proxy = None if mode is None else get_proxy_slot(tensor, mode.tracer, None, lambda slot: slot.proxy)
    return None if proxy is None else source_line.in_text(proxy.node.stack_trace)
