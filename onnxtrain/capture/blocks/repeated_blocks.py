"""Decide which calls of blocks are traced, and put one call node into the trace for each of the others.

The first two calls of a kind of block are traced. If their traces are equal, each further call whose block is in the
same state, with the same types of arguments, gets a call node: `instantiate` replaces it by a copy of the second trace.
Only the outermost block is copied. If its calls are never the same, the blocks in it are tried.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

from onnxtrain.capture.blocks.call_arguments import NotReusableError, flatten, rebuild, tensors_in
from onnxtrain.capture.blocks.hidden_parameters import MIN_BLOCKS, HiddenParameters
from onnxtrain.capture.blocks.module_state import Block, Read, sharing, structure_numbers, tensor_key
from onnxtrain.capture.blocks.outside import Outside
from onnxtrain.capture.blocks.traced_call import Slots, TracedCall, traced_call
from onnxtrain.capture.export.checkpoint_regions import current_annotations, current_region
from onnxtrain.capture.export.fake_tensors import Fakes
from onnxtrain.capture.key.attribute_accesses import AttributeAccesses
from onnxtrain.capture.key.key import environment
from onnxtrain.capture.key.snapshot import submodules
from onnxtrain.capture.node_storage import StoragesOfCopy
from onnxtrain.capture.structure import SameObjects
from onnxtrain.torch_compat.dispatch import function_modes_disabled
from onnxtrain.torch_compat.fake_tensors import inside_kernel
from onnxtrain.torch_compat.operators import HigherOrderOperator
from onnxtrain.torch_compat.patch_points import CALL_MODULE
from onnxtrain.torch_compat.replacement import in_thread
from onnxtrain.torch_compat.tensors import storage_id
from onnxtrain.torch_compat.tracing import module_of_user, node_in

TEMPLATE = "template"  # the key in a node's metadata
_MAX_ATTEMPTS = 3  # calls of a kind that are traced in vain, before the blocks inside are tried


class BlockCall(HigherOrderOperator):
    """The operator of the call node of a `Copy`."""

    def __init__(self) -> None:
        super().__init__("onnxtrain_block_call")  # type: ignore[no-untyped-call]  # torch's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a call of a block is replaced by its nodes before anything runs")


BLOCK_CALL = BlockCall()


@dataclass(frozen=True)
class Template:
    """A traced call that others repeat.

    Attributes:
        call: the trace.
        reads: the attributes that its forward read.
        attributes: their keys.
        state: the structure of the block, the state of PyTorch and of the surroundings.
        depth: the number of modules that were running, with the block itself.
    """

    call: TracedCall
    reads: Sequence[Read]
    attributes: Mapping[Read, Hashable]
    state: Hashable
    depth: int


@dataclass(frozen=True)
class Copy:
    """One copy of a template.

    Its call node takes the number of the copy; of the slots that the template uses, the template's nodes and those of
    the copy, or the names of hidden parameters; and the nodes of the template's results, which would be removed if
    nothing read them.

    Attributes:
        template: the template.
        depth: see `Template`.
        region: the checkpoint region around the copy.
        storages: the storages of the copy's slots and results, by those of the template.
    """

    template: Template
    depth: int
    region: str
    storages: StoragesOfCopy


class RepeatedBlocks:
    """The blocks of one trace.

    Args:
        module: the user's module.
        accesses: the attributes that forward has read and set so far.
        outside: watches what is outside of the blocks.
        hidden: the parameters that torch.export does not see.

    Attributes:
        copies: the copies, by the number that their call nodes take.
    """

    def __init__(
        self, module: torch.nn.Module, accesses: AttributeAccesses, outside: Outside, hidden: HiddenParameters
    ) -> None:
        self.copies: list[Copy] = []
        self._hidden = hidden
        self._accesses = accesses
        self._outside = outside
        self._modules = [submodule for _, submodule in submodules(module)]
        self._kinds = structure_numbers(module)
        self._count = Counter(self._kinds.values())
        self._called: set[int] = set()
        self._templates: dict[Hashable, list[Template]] = defaultdict(list)
        self._candidates: dict[Hashable, Template] = {}
        self._attempts: Counter[int] = Counter()
        self._is_tracing_block = False
        self._environment: Hashable = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Copy blocks in the trace that this thread makes."""
        original = CALL_MODULE.original

        def call_module(tracer: Any, module: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            if self._environment is None:
                self._environment = environment()
            own = module_of_user(module)
            kind = self._kind(own)
            if kind is not None:
                forward = partial(self._call, tracer, own, kind, forward)
            return original(tracer, module, forward, args, kwargs)

        with CALL_MODULE.wrapped(partial(in_thread, call_module)):
            yield

    def _kind(self, module: torch.nn.Module) -> int | None:
        """Return the kind of a module whose call may be copied or become a template; None for any other."""
        kind = self._kinds.get(id(module))
        if kind is None or self._is_tracing_block or self._attempts[kind] >= _MAX_ATTEMPTS:
            return None
        is_repeated = self._count[kind] >= MIN_BLOCKS or id(module) in self._called
        self._called.add(id(module))
        return kind if is_repeated and environment() == self._environment else None

    def _call(self, tracer: Any, module: torch.nn.Module, kind: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with function_modes_disabled():
            block = Block(module)
            try:
                tensors, slots, state = self._state(block, tracer, args, kwargs)
            except NotReusableError:
                state = None
            for template in self._templates.get(state, ()):
                if block.attributes(template.reads) == template.attributes:
                    return self._copy(tracer, template, block, slots, tensors)
            if self._hidden.reveal(block.submodules.values()):
                block = Block(module)
                try:
                    tensors, slots, state = self._state(block, tracer, args, kwargs)
                except NotReusableError:
                    state = None
        if state is None:
            self._attempts[kind] += 1
            return forward(*args, **kwargs)
        with self._tracing_block():
            return self._trace(tracer, block, kind, slots, state, forward, args, kwargs)

    def _state(self, block: Block, tracer: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], Slots, Hashable]:
        """Return the tensors that a call takes, and a key of everything else that it may depend on but attributes.

        Raises:
            NotReusableError: the block has hooks, or takes an argument that is not supported.
        """
        tensors: list[torch.Tensor] = []
        arguments, structure = flatten((args, kwargs), tensors), block.structure()
        tensors += block.tensors.values()
        slots = _slots(block, tensors, partial(self._node_or_name, tracer))
        return tensors, slots, (structure, arguments, slots.keys, current_annotations(), self._outside.state())

    def _node_or_name(self, tracer: Any, tensor: torch.Tensor) -> Node | str | None:
        return node_in(tracer, tensor) or self._hidden.name(tensor)

    @contextmanager
    def _tracing_block(self) -> Iterator[None]:
        self._is_tracing_block = True
        try:
            yield
        finally:
            self._is_tracing_block = False

    # Tracing

    def _trace(
        self, tracer: Any, block: Block, kind: int, slots: Slots, state: Hashable, forward: Any, args: Any, kwargs: Any
    ) -> Any:
        """Trace a call, and make it a template if the previous call of its kind had the same trace."""
        with function_modes_disabled():
            before = block.all_attributes(), self._values_outside(block)
        created, region = self._outside.count_tensors(), current_region()
        last = next(iter(reversed(tracer.graph.nodes)), None)  # not an iterator before PyTorch 2.13
        with self._accesses.of_block() as read_or_set:
            result = forward(*args, **kwargs)
        self._attempts[kind] += 1
        reads, is_same_environment = block.reads_in(read_or_set), environment() == self._environment
        if reads is None or not is_same_environment:
            return result
        traced = [*itertools.takewhile(lambda node: node is not last, reversed(tracer.graph.nodes))][::-1]
        block = Block(block.module)
        with function_modes_disabled():
            try:
                call = traced_call(traced, slots, result, partial(node_in, tracer), region)
                *_, state_after = self._state(block, tracer, args, kwargs)
            except NotReusableError:
                return result
            is_unchanged = (state, before) == (state_after, (block.all_attributes(), self._values_outside(block)))
            if is_unchanged and not self._outside.holds_tensors(created, tensors_in(result), call.nodes):
                template = Template(call, reads, block.attributes(reads), state, len(tracer.module_stack))
                self._add_template(template, kind)
        return result

    def _add_template(self, template: Template, kind: int) -> None:
        """Use a template if the last one of its kind is the same."""
        previous = self._candidates.get((kind, template.state))
        self._candidates[kind, template.state] = template
        if (
            previous is not None
            and previous.attributes == template.attributes
            and previous.call.key == template.call.key
        ):
            self._templates[template.state].append(template)
            self._attempts[kind] = 0

    def _values_outside(self, block: Block) -> SameObjects:
        """Return the attributes and buffers of the modules around a block."""
        others = (m.__dict__ for m in self._modules if id(m) not in block.paths)
        return SameObjects(value for d in others for value in (*d.values(), *d["_buffers"].values()))

    # Copying

    def _copy(
        self, tracer: Any, template: Template, block: Block, slots: Slots, tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Add the call node of a copy to the trace; return results for it. `tensors` are those of the slots."""
        self._accesses.reads.update(block.ids_of(template.reads))
        call = template.call
        for node in call.nodes:
            node.meta[TEMPLATE] = id(template)  # torch.export may replace a node by another with the same metadata
        created = [r for r in call.returned if isinstance(r, Node)]
        with disable_proxy_modes_tracing():
            new = [_new_like(node.meta["val"], grad) for node, grad in zip(created, call.requires_grad, strict=True)]
        storages = StoragesOfCopy()
        for number in call.used_slots:
            own = slots.storages[number]
            if slots.writable[number]:
                storages[own] = own  # functionalization gives copied nodes the value of the buffer that they write
            storages[call.slots.storages[number]] = own
        storages.update((storage_id(node.meta["val"]), storage_id(t)) for node, t in zip(created, new, strict=True))
        self.copies.append(Copy(template, len(tracer.module_stack), current_region(), storages))
        nodes = [[_proxy(s.nodes[n], tracer) for n in call.used_slots] for s in (call.slots, slots)]
        originals = [_proxy(node, tracer) for node in created]
        proxy = tracer.create_proxy("call_function", BLOCK_CALL, (len(self.copies) - 1, *nodes, originals), {})
        track_tensor_tree(new, proxy, constant=None, tracer=tracer)
        results = iter(new)
        returned = (next(results) if isinstance(r, Node) else tensors[r] for r in call.returned)
        return rebuild(call.result, returned)


def _slots(
    block: Block, tensors: Sequence[torch.Tensor], node_of: Callable[[torch.Tensor], Node | str | None]
) -> Slots:
    """Describe the tensors that a block takes: those of the call, then its own."""
    own = [name in block.submodules[path].__dict__["_buffers"] for path, name in block.tensors]
    writable = [False] * (len(tensors) - len(own)) + own
    nodes = [*map(node_of, tensors)]
    storages = [*map(storage_id, tensors)]
    keys = tuple(map(tensor_key, tensors[: -len(own) or None])), sharing(tensors, storages)
    return Slots(nodes, storages, writable, (*keys, tuple(node is None for node in nodes)))


def _proxy(node: Node | str | None, tracer: Any) -> torch.fx.Proxy | str:
    assert node is not None, "every slot that a trace uses has a node"
    return node if isinstance(node, str) else torch.fx.Proxy(node, tracer)


def _new_like(example: Any, requires_grad: bool) -> torch.Tensor:
    """Make a fake tensor with the layout of another one; if it requires a gradient, it is not a leaf."""
    mode = example.fake_mode
    new = Fakes(mode).new(example.shape, example.dtype, example.device, example.stride())
    if requires_grad:
        with inside_kernel(mode):
            new.add_(torch.empty((), dtype=example.dtype, device="meta", requires_grad=True))
    return new
