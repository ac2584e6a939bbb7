"""Refuse a forward that stores a tensor outside the module: in a global list, in another object.

A graph would not store it on later steps, and a capture would store a fake tensor. The fake tensors that forward
creates are recorded by weak reference. A tensor has escaped if an object other than the results and the tracer refers
to it when forward returns, and still does when the export is over.
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
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.immutable_collections import immutable_dict, immutable_list

from onnxtrain.capture import source_location
from onnxtrain.capture.python_functions.calls import FunctionCalls
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.autograd import keeps_checkpoint_inputs
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.patch_points import NEW_FAKE_TENSOR
from onnxtrain.torch_compat.pytree import tree_leaves
from onnxtrain.torch_compat.tensors import use_count
from onnxtrain.torch_compat.tracing import traced_node


class CreatedFakes:
    """The fake tensors that forward creates, by weak references: they are freed as in eager."""

    def __init__(self) -> None:
        self._created: list[weakref.ref[FakeTensor]] = []
        self._held: list[tuple[weakref.ref[FakeTensor], str | None]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the fake tensors that this thread creates."""
        owner = threading.get_ident()

        def recording(original: Callable[..., FakeTensor]) -> Any:
            def create(cls: Any, *args: Any, **kwargs: Any) -> FakeTensor:
                tensor = original(cls, *args, **kwargs)
                if threading.get_ident() == owner:
                    self._created.append(weakref.ref(tensor))
                return tensor

            return staticmethod(create)

        with NEW_FAKE_TENSOR.wrapped(recording):
            yield

    def begin(self) -> None:
        """Start over: forward is about to run."""
        self._created.clear()

    def count(self) -> int:
        """Return the number of tensors created so far."""
        return len(self._created)

    def holds(self, since: int, tensors: Sequence[torch.Tensor], nodes: Iterable[Node]) -> bool:
        """Return whether forward refers to a tensor after the first `since`, except these and values of nodes."""
        return bool(_held(self._created[since:], tensors, nodes))

    def record_held(self, results: Sequence[Any]) -> None:
        """Record the tensors, besides the results, that are alive when forward returns; autograd frees some later."""
        self._held = [(weakref.ref(tensor), _location(tensor)) for tensor in self._held_elsewhere(results)]

    def check(self, module: torch.nn.Module) -> None:
        """Check after the export that no held tensor is still referred to; if one is, remove it from its holders.

        Raises:
            CaptureError: forward stored a tensor outside the module.
        """
        if not any(ref() is not None for ref, _ in self._held):
            return
        gc.collect()  # graphs hold their nodes in cycles
        remaining = [(ref(), location) for ref, location in self._held]
        if all(tensor is None for tensor, _ in remaining):
            return
        with _frozen_objects_visible():
            if not _are_held([tensor for tensor, _ in remaining if tensor is not None], frozenset({id(remaining)})):
                return
            for tensor, location in remaining:
                holders = [] if tensor is None else _holders(tensor, frozenset({id(remaining)}))
                if tensor is None or not holders:
                    continue
                kind = type(holders[0]).__name__
                _remove_from_holders(tensor, frozenset({id(remaining), id(holders)}))
                raise CaptureError(
                    f"forward stores a tensor in a {kind} outside the module, which a graph would not repeat",
                    where=location or type(module).__name__,
                    got=f"shape {tuple(map(str, tensor.shape))}",
                    todo="the module runs in PyTorch; let forward return the tensor, and store it outside of forward",
                )

    def _held_elsewhere(self, results: Sequence[Any]) -> list[FakeTensor]:
        """Return the created tensors that are alive, no results and not held by the capture."""
        mode = get_proxy_mode()
        assert mode is not None, "forward runs under the tracer"
        for node in mode.tracer.graph.nodes:
            node.meta.pop("eager_input_vals", None)  # arguments of a custom operator, which only Inductor reads
        return _held(self._created, results, mode.tracer.graph.nodes)


def _held(
    created: Iterable[weakref.ref[FakeTensor]], results: Iterable[Any], nodes: Iterable[Node]
) -> list[FakeTensor]:
    """Return those of the created tensors to which something else refers than autograd, and the values of nodes."""
    expected = {id(leaf) for leaf in (*results, *FunctionCalls.watched())}
    for node in nodes:
        expected.update(map(id, tree_leaves(node.meta.get("val"))))
    alive = [tensor for ref in created if (tensor := ref()) is not None and id(tensor) not in expected]
    tensor = None  # this name would hold the last one
    own_references = next(_references(value) for value in [object()])
    held = [tensor for tensor in alive if _references(tensor) - _is_in_autograd(tensor) > own_references]
    return [tensor for tensor in held if not keeps_checkpoint_inputs(tensor)]


@contextmanager
def _frozen_objects_visible() -> Iterator[None]:
    """Let gc.get_referrers see objects that the program froze by gc.freeze; afterwards all live objects are frozen."""
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
    """Return whether C++ refers to a tensor, which counts as one reference."""
    return use_count(tensor) > 1


def _holders(value: Any, own: frozenset[int]) -> list[Any]:
    """Return the referrers of a value that the user's code may have stored it in.

    A tuple counts only if it has such a referrer itself, unlike the argument tuples of running calls. This function
    must not close over the value: the closure's cell would be a referrer.

    Args:
        value: the value.
        own: ids of the lists of this search, which are skipped.
    """
    referrers = gc.get_referrers(value)
    own |= {id(referrers)}
    return [h for h in referrers if id(h) not in own and _may_belong_to_user(h, own)]


def _are_held(values: list[Any], own: frozenset[int]) -> bool:
    """Return whether `_holders` would find a referrer of one of these values.

    This searches for all at once: each call of get_referrers visits every object of the process.
    """
    referrers = gc.get_referrers(*values)
    own |= {id(values), id(referrers)}
    own_references = next(_references(value) for value in [object()])
    # Nothing else refers to the tuple of arguments of the call above, which Python 3.13 counts as a referrer.
    tuples = [h for h in referrers if isinstance(h, tuple) and id(h) not in own and _references(h) > own_references]
    others = [h for h in referrers if not isinstance(h, tuple) and id(h) not in own]
    own |= {id(others), id(tuples), *map(id, tuples)}
    if any(_may_belong_to_user(h, own) for h in others):
        return True
    return bool(tuples) and _are_held(tuples, own)


def _may_belong_to_user(holder: Any, own: frozenset[int]) -> bool:
    if isinstance(holder, (types.FrameType, immutable_list, immutable_dict)):
        return False
    if isinstance(holder, tuple):
        return bool(_holders(holder, own))
    return isinstance(holder, (list, dict, set, deque, types.CellType)) or hasattr(holder, "__dict__")


def _remove_from_holders(value: Any, own: frozenset[int]) -> None:
    """Remove a value from the objects that the user stored it in. This function must not close over it either."""
    holders = _holders(value, own)
    for holder in holders:
        if isinstance(holder, tuple):
            _remove_from_holders(holder, own | {id(holders)})
        elif isinstance(holder, list):
            holder[:] = _without(holder, value)
        elif isinstance(holder, (set, deque)):
            holder.remove(value)
        elif isinstance(holder, types.CellType):
            del holder.cell_contents
        else:
            attributes = holder if isinstance(holder, dict) else vars(holder)
            kept = {id(item) for item in _without(attributes.values(), value)}
            for name in [name for name, item in attributes.items() if id(item) not in kept]:
                del attributes[name]


def _without(items: Iterable[Any], value: Any) -> list[Any]:
    return [item for item in items if item is not value]


def _location(tensor: FakeTensor) -> str | None:
    """Return the source location that created a tensor."""
    node = traced_node(tensor)
    return None if node is None else source_location.of_trace(node.stack_trace)
