"""Checks of modules of one kind in a loop: they read what the statements of each module read."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.capture.key.key import ModuleState
from onnxtrain.capture.key.repeated_checks import with_loops
from onnxtrain.capture.key.snapshot import Snapshot


class Block(nn.Module):
    """Its attributes and parameters have the names that a generated check gives to constants and tensors."""

    t1 = 0.5

    def __init__(self, size: int) -> None:
        super().__init__()
        self.c1 = nn.Linear(size, size)
        self.c2 = nn.Linear(size, size)
        self.t2 = nn.Parameter(torch.ones(size))
        self.rate = 0.25
        self.name = "c3"


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def stack(depth: int) -> nn.Module:
    return nn.Sequential(*(Block(3) if i % 2 else Other() for i in range(depth)))


def state_of(module: nn.Module) -> ModuleState:
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    attributes = ("rate", "name", "t1", "training", "absent")
    reads = {(id(m), name) for m in module.modules() for name in attributes}
    return ModuleState(module, names, reads)


def lines_of(depth: int) -> int:
    module = stack(depth)
    snapshot = Snapshot(module, [name for name, _ in module.named_parameters()], None)
    return snapshot.source().count("\n")


def test_the_check_does_not_grow_with_the_number_of_blocks() -> None:
    depths = (10, 20, 40)
    assert len({lines_of(depth) for depth in depths}) == 1


def test_the_tensors_have_the_order_of_their_names() -> None:
    module = stack(8)
    tensors = state_of(module).check(module)
    assert [id(t) for t in tensors] == [id(p) for p in module.parameters()]


def _replace_parameter(block: Block) -> None:
    block.c1.weight = nn.Parameter(torch.zeros(3, 3))


def _replace_own_parameter(block: Block) -> None:
    block.t2 = nn.Parameter(torch.zeros(3), requires_grad=False)


def _replace_module(block: Block) -> None:
    block.c2 = nn.Linear(3, 3)


def _change_number(block: Block) -> None:
    block.rate = 0.75


def _change_text(block: Block) -> None:
    block.name = "c4"


def _shadow_class_attribute(block: Block) -> None:
    block.t1 = 0.5


def _add_hook(block: Block) -> None:
    block.c1.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("index", [1, 5, 9], ids=["first", "middle", "last"])
@pytest.mark.parametrize(
    "change",
    [_replace_own_parameter, _replace_module, _change_number, _change_text, _add_hook],
)
def test_a_change_of_any_block_is_found(change: Any, index: int) -> None:
    module = stack(10)
    state = state_of(module)
    assert isinstance(state.check(module), list)
    change(module[index])
    assert state.check(module) is None
    assert not state.matches(module)


@pytest.mark.parametrize("index", [1, 9])
def test_a_new_parameter_of_the_same_type_is_read(index: int) -> None:
    module = stack(10)
    state = state_of(module)
    assert isinstance(state.check(module), list)
    _replace_parameter(module[index])
    tensors = state.read(module)
    assert tensors is not None
    assert [id(t) for t in tensors] == [id(p) for p in module.parameters()]


def test_an_attribute_that_shadows_that_of_the_class_is_left_to_the_facts() -> None:
    module = stack(10)
    state = state_of(module)
    assert isinstance(state.check(module), list)
    _shadow_class_attribute(module[7])
    assert state.check(module) is False


def test_tied_blocks_are_compared_after_the_loops() -> None:
    module = stack(10)
    for index in (3, 5, 7):
        module[index].c1.weight = module[1].c1.weight
    state = state_of(module)
    assert isinstance(state.check(module), list)
    module[7].c1.weight = nn.Parameter(module[1].c1.weight.detach().clone())
    assert state.check(module) is None


def run(lines: Sequence[str], values: dict[str, Any]) -> Any:
    body = "\n".join(f"    {line}" for line in [*lines, "return [t0, t1, t2]"])
    scope = dict(values)
    exec(f"def check():\n{body}", scope)
    return scope["check"]()


def test_names_inside_literals_and_attributes_stay() -> None:
    holders = [SimpleNamespace(c1=i, t1={"c2": i, "it's c3": "t4"}) for i in range(3)]
    values: dict[str, Any] = {f"c{i}": holder for i, holder in enumerate(holders)}
    modules = [
        [f"d = c{i}.t1", f"if d['c2'] != c{i}.c1 or d[\"it's c3\"] != 't4': return None", f"t{i} = d['c2']"]
        for i in range(3)
    ]

    def bind(value: object) -> str:
        values["c3"] = value
        return "c3"

    lines = with_loops(modules, values, bind)
    assert sum(line.startswith("for ") for line in lines) == 1
    assert run(lines, values) == [0, 1, 2] == run([line for module in modules for line in module], values)
    holders[2].t1["it's c3"] = "t5"
    assert run(lines, values) is None
