"""Blocks that a capture omits are inserted after planning: the programs and their results are those of all blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onnxtrain import ORTModule
from onnxtrain.frontend.engine import Engine
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.plan import memory_plan
from tests.capture.blocks.test_repeated_blocks import (
    WIDTH,
    Block,
    Checkpointed,
    GroupedQueries,
    Stack,
    bert,
    gpt2,
    llama,
    t5,
    tokens,
    trained,
    vectors,
)
from tests.thinned import slow_except

COUNT = 13


class Wide(Block):
    """Another kind than `Block`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Scaled(Stack):
    """Blocks that share a learned scale: its gradient is a sum over all blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.scale)
        return x


class ScaledBlock(Block):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class AllStates(Stack):
    """The result depends on the result of each block."""

    def run(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return torch.stack(states).mean(0)


class OneState(Stack):
    """The result depends on that of a block in the middle."""

    def run(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == COUNT // 2:
                middle = x
        return x + middle


class NoiseBetween(Stack):
    """A random number is sampled between the blocks."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + torch.rand(())
        return x


class Counting(Block):
    """A block with a buffer that forward changes."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x) + self.calls


def stack(*kinds: Callable[[int], nn.Module], count: int = COUNT) -> Stack:
    return Stack([kinds[number % len(kinds)](number) for number in range(count)])


def blocks(kind: Callable[[int], nn.Module] = Block) -> list[nn.Module]:
    return [kind(number) for number in range(COUNT)]


def tied() -> Stack:
    """A weight of the first block is also one of a block in the middle."""
    model = stack(Block)
    model.blocks[6].layers[0].weight = model.blocks[0].layers[0].weight
    return model


def frozen() -> Stack:
    model = stack(Block)
    for block in model.blocks[:-1]:
        block.requires_grad_(False)
    return model


def deep(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a maker of the model of `test_repeated_blocks` with more layers."""

    def model() -> nn.Module:
        config: Any = make().config
        for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
            if hasattr(config, name):
                setattr(config, name, COUNT)
        return type(make())(config)

    return model


# The maker of a module, and the number of blocks that its capture omits.
OMITTED: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "plain": (lambda: stack(Block), [7]),
    "sums that are recomputed": (lambda: stack(GroupedQueries), []),
    "checkpoints": (lambda: stack(Checkpointed), [7]),
    "two kinds that take turns": (lambda: stack(Block, Wide, count=26), [7]),
    "gradients of the last block only": (frozen, [6]),
    "the result of one in the middle": (lambda: OneState(blocks()), []),
    "the results of all": (lambda: AllStates(blocks()), []),
    "too few": (lambda: stack(Block, count=8), []),
    "random numbers between them": (lambda: NoiseBetween(blocks()), []),
    "buffers that change": (lambda: stack(Counting), []),
    "a weight of two blocks": (tied, []),
    "a parameter of all blocks": (lambda: Scaled(blocks(ScaledBlock)), []),
}
LANGUAGE_MODELS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "gpt2": (deep(gpt2), [7]),
    "llama": (deep(llama), [7]),
    "bert": (deep(bert), [7]),
    "t5": (deep(t5), []),
}


@pytest.fixture
def all_captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which no blocks are omitted."""
    return lambda: monkeypatch.setattr("onnxtrain.frontend.engine.may_omit_blocks", lambda *_: False)


def run(make: Callable[[], nn.Module], calls: list[dict[str, Tensor]]) -> tuple[Engine, list[Any]]:
    """Return the engine of a model, and the bytes of each training step and of a call without gradients."""
    ours, observed = trained(make, calls)
    with torch.no_grad():
        output = ours(**calls[0])
    observed.append((output.loss if hasattr(output, "loss") else output).float().numpy().tobytes())
    return engine_of(ours), observed


def program(engine: Engine) -> str:
    """Return the source of the program without gradients, without names: inserted values have other ones."""
    source = engine.newest().unit.forward.source
    return re.sub(r"[A-Za-z_]\w*", "x", re.sub(r" *#.*", "", source))


def compare(
    make: Callable[[], nn.Module], calls: list[dict[str, Tensor]], count: list[int], all_captured: Callable[[], None]
) -> None:
    engine, observed = run(make, calls)
    captured = engine.newest().captured
    assert [len(omitted.omitted) for omitted in captured.omitted] == count
    if not count:
        return  # the second run would be the same as the first
    all_captured()
    whole, expected = run(make, calls)
    assert whole.newest().captured.omitted == ()
    assert observed == expected
    assert program(engine) == program(whole)


@pytest.mark.parametrize("name", OMITTED)
def test_results_are_those_of_all_blocks(name: str, all_captured: Callable[[], None]) -> None:
    make, count = OMITTED[name]
    compare(make, vectors(3, 4), count, all_captured)


@pytest.mark.slow  # copies under autocast: tests/capture/blocks/test_repeated_blocks.py
def test_under_autocast(all_captured: Callable[[], None]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        compare(lambda: stack(Block), vectors(3, 4), [7], all_captured)


@pytest.mark.parametrize("name", slow_except(LANGUAGE_MODELS, "gpt2"))
def test_language_models(name: str, all_captured: Callable[[], None]) -> None:
    make, count = LANGUAGE_MODELS[name]
    compare(make, tokens(3, 4), count, all_captured)


def test_steps_run_the_programs_of_all_blocks(all_captured: Callable[[], None]) -> None:
    """Forward and backward are the same nodes in the same order."""
    nodes: list[list[list[tuple[str, str | None]]]] = []
    for _ in range(2):
        torch.manual_seed(0)
        ours = ORTModule(stack(Block))
        ours(torch.randn(3, 5, WIDTH)).sum().backward()
        parts = engine_of(ours).newest().parts
        assert parts is not None
        both = (parts.forward, parts.backward)
        nodes.append([[(node.op_type, node.metadata_props.get("module")) for node in part.nodes] for part in both])
        all_captured()
    assert nodes[0] == nodes[1]


def test_another_plan_of_a_block_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that treats two of the compared blocks differently is not continued."""
    choose = memory_plan.choose_by_default

    def one_more(parts: Any, *arguments: Any) -> Any:
        choice = choose(parts, *arguments)
        second = [n for n in parts.forward.nodes if n.metadata_props.get("module", "").startswith("blocks.2.")]
        gelu = next(n for n in second if "Gelu" in n.op_type)
        return type(choice)(choice.values ^ {str(gelu.outputs[0].name)})

    monkeypatch.setattr(memory_plan, "choose_by_default", one_more)
    torch.manual_seed(0)
    model = stack(Block)
    x = torch.randn(3, 5, WIDTH)
    model.eval()(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    ours = ORTModule(model, fallback_policy="FALLBACK_DISABLE")
    ours(x).sum().backward()
    assert engine_of(ours).newest().captured.omitted == ()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize(
    "options", [{"statistics": ("work",)}, {"memory_budget_bytes": 0.9}, {"recompute": "layers"}], ids=str
)
def test_nothing_is_omitted_where_whole_graphs_are_read(options: dict[str, Any]) -> None:
    ours = ORTModule(stack(Block), **options)
    ours(torch.randn(3, 5, WIDTH)).sum().backward()
    assert engine_of(ours).newest().captured.omitted == ()


def test_saved_graphs_have_all_blocks(tmp_path: Path) -> None:
    ours = ORTModule(stack(Block), save_graphs=tmp_path / "stack")
    ours(torch.randn(3, 5, WIDTH)).sum().backward()
    assert engine_of(ours).newest().captured.omitted == ()


def test_the_report_counts_all_blocks() -> None:
    ours = ORTModule(deep(gpt2)())
    (call,) = tokens(3)
    ours(**call).loss.backward()
    captured, report = engine_of(ours).newest().captured, engine_of(ours).newest().report
    assert captured.omitted
    lines = [line for stage in report.stages if stage.name == "plan" for line in stage.applied]
    assert lines[:2] == ["transformer.h.3 … transformer.h.9 are copies of transformer.h.2", "recompute: 26 values"]
    assert lines[2].startswith(f"recompute: {COUNT} x FastGelu")
