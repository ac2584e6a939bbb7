"""Hide the parameters of repeated blocks from torch.export, which takes about a millisecond for each.

    h.0, h.1   seen by torch.export
    h.2 …      their tables of parameters are empty; `instantiate` adds the inputs of the graph

If forward reads a table after all, because the block is traced or because other code reads its parameters, its
parameters are revealed (`parameter_table`), and `instantiate` replaces the nodes that stand for them by the inputs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onnxtrain.capture.blocks.call_arguments import NotReusableError
from onnxtrain.capture.blocks.module_state import Block, structure_numbers
from onnxtrain.capture.blocks.parameter_table import ParameterTable
from onnxtrain.torch_compat.tensors import storage_id

MIN_BLOCKS = 3  # of a kind: two are traced


class HiddenParameters:
    """The parameters that an export does not see.

    Args:
        root: the module that is exported.

    Attributes:
        order: the names of all parameters of the root, as torch.export orders them.
        parameters: the hidden parameters, by name.
        revealed: the names of those that forward has read.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.order = [name for name, _ in root.named_parameters(remove_duplicate=False)]
        self.revealed: set[str] = set()
        self._tables = [
            (module, ParameterTable(path, module.__dict__["_parameters"], self.revealed))
            for path, module in _hideable_modules(root)
        ]
        self.parameters = {name: p for _, table in self._tables for name, p in table.parameters.items()}
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}

    @contextmanager
    def hiding(self) -> Iterator[None]:
        """Hide them from the export that runs inside this context."""
        self.revealed.clear()
        try:
            for module, table in self._tables:
                module.__dict__["_parameters"] = table
            yield
        finally:
            for module, table in self._tables:
                module.__dict__["_parameters"] = table.original

    @contextmanager
    def during_forward(self) -> Iterator[None]:
        """Reveal the parameters that are read inside this context; hide them again on exit."""
        self._set_read_by_forward(True)
        try:
            yield
        finally:
            self._set_read_by_forward(False)
            for _, table in self._tables:
                table.conceal()

    def _set_read_by_forward(self, is_read: bool) -> None:
        for _, table in self._tables:
            table.is_read_by_forward = is_read

    def name(self, tensor: torch.Tensor) -> str | None:
        """Return the name of a hidden parameter; None for any other tensor."""
        return self._names.get(id(tensor))

    def reveal(self, modules: Iterable[torch.nn.Module]) -> bool:
        """Reveal the parameters of these modules; return whether any were hidden."""
        tables = [module.__dict__["_parameters"] for module in modules]
        return sum(table.reveal() for table in tables if isinstance(table, ParameterTable)) > 0


def _hideable_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield modules of blocks that will probably be copied, with their paths, if their parameters are nowhere else."""
    paths: dict[int, list[str]] = defaultdict(list)
    for path, module in root.named_modules(remove_duplicate=False):
        paths[id(module)].append(path)
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    if len({tensor.device for _, tensor in tensors}) > 1:  # a result's device is compared with that of the parameters
        return
    uses = Counter(storage_id(tensor) for _, tensor in tensors if tensor.layout is torch.strided)

    def is_hideable(parameter: Any) -> bool:
        is_plain = type(parameter) is torch.nn.Parameter and parameter.layout is torch.strided
        return parameter is None or (is_plain and uses[storage_id(parameter)] == 1)

    for block in _later_blocks(root):
        for module in block.submodules.values():
            table = module.__dict__["_parameters"]
            has_parameters = type(table) is dict and any(p is not None for p in table.values())
            if has_parameters and len(paths[id(module)]) == 1 and all(map(is_hideable, table.values())):
                yield paths[id(module)][0], module


def _later_blocks(root: torch.nn.Module) -> Iterator[Block]:
    """Yield the blocks of each kind whose parameters have the same types, without the first two."""
    numbers = structure_numbers(root)
    count = Counter(numbers.values())
    blocks: dict[Hashable, list[Block]] = defaultdict(list)

    def visit(module: torch.nn.Module) -> None:
        for child in module.__dict__["_modules"].values():
            if child is None or isinstance(child, torch.jit.ScriptModule):
                continue
            number = numbers.get(id(child))
            if number is None or count[number] < MIN_BLOCKS:
                visit(child)
                continue
            block = Block(child)
            try:
                blocks[number, block.structure()].append(block)
            except NotReusableError:
                continue

    visit(root)
    for own in blocks.values():
        if len(own) >= MIN_BLOCKS:
            yield from own[2:]
