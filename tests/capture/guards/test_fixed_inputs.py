"""Inputs whose elements forward reads as Python numbers: each call computes what eager does, by a graph for them."""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import FallbackPolicy, ORTModule
from onnxtrain.capture import capture
from tests.reference import assert_matches
from tests.zoo.checks import count_captures

WIDTH = 8


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


class Groups(Base):
    """Positions by groups of equal types, as Qwen2-VL computes them."""

    def forward(self, x: torch.Tensor, types: torch.Tensor, mask: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        positions = torch.zeros(types.shape, dtype=torch.int64)
        sizes = {1: iter(grid)}
        last = []
        for row, own_types in enumerate(types):
            kept = mask[row].bool()
            parts, position = [], 0
            for kind, group in itertools.groupby(own_types[kept].tolist()):
                length = len(list(group))
                if kind == 0:
                    parts.append(torch.arange(length) + position)
                    position += length
                else:
                    height, width = next(sizes[kind])
                    parts.append(torch.arange(height * width) // width + position)
                    position += max(height, width)
            joined = torch.cat(parts)
            positions[row, kept] = joined
            last.append(joined.max() + 1 - len(x[row][kept]))
        offsets = torch.tensor(last)[:, None]
        y: torch.Tensor = self.inner(x)
        return y * positions[..., None] + offsets[..., None]


class Windows(Base):
    """An index of windows, padded and selected by a mask, as Qwen2.5-VL computes it."""

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        order, ends, start = [], [0], 0
        for height, width in grid.tolist():
            index = torch.arange(height * width).reshape(height, width)
            padded = nn.functional.pad(index, (0, -width % 2, 0, -height % 2), value=-1)
            padded = padded.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).transpose(1, 2).flatten(2)
            lengths = (padded >= 0).sum(2).flatten()
            order.append(padded.flatten()[padded.flatten() >= 0] + start)
            ends += (lengths.cumsum(0) + ends[-1]).tolist()
            start += height * width
        ends_of_windows = torch.unique_consecutive(torch.tensor(ends))
        windows = x[torch.cat(order)].split((ends_of_windows[1:] - ends_of_windows[:-1]).tolist())
        return torch.cat([self.inner(window.softmax(0)) for window in windows])


class Images(Base):
    """Sizes of images in elements, which split their features, as Mistral 3 does."""

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        grids = [(size[0] // 2, size[1] // 2) for size in sizes]
        parts = x.split([height * width for height, width in grids])
        images = [part.view(height, width, -1) for part, (height, width) in zip(parts, grids, strict=True)]
        return self.inner(torch.cat([image.cumsum(0).flatten(0, 1) for image in images]))  # type: ignore[no-any-return]


class Repeats(Base):
    """A graph of fixed counts has as many rows as they say; changes in place are part of what is known."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(len(counts), dtype=torch.int64)
        for row, count in enumerate(counts.tolist()):
            scale[row] *= count + 1
        scale[0] += 3
        rows = x.repeat_interleave(counts, 0).view(sum(counts.tolist()) // 2, 2, -1)
        return self.inner(rows) * scale.tolist()[0]  # type: ignore[no-any-return]


class Keeps(Base):
    """An attribute that is None before the first call, and keeps a known tensor afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.offsets is None or len(counts) > 0:
            ends = [sum(counts.tolist()[: i + 1]) for i in range(len(counts))]
            self.offsets = torch.tensor(ends) * 2
        parts = [self.inner(part) * (i + 1) for i, part in enumerate(x.split(counts.tolist())) if len(part) % 2]
        return torch.cat(parts)


class Sets(Base):
    """Attributes that forward sets before it reads them: to known tensors, a list of them, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: Any = None
        self.kept: Any = None
        self.state: Any = None

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = [sum(counts.tolist()[: i + 1]) for i in range(len(counts))]
        self.offsets = torch.tensor(ends) * 2
        self.kept = [counts.clone(), self.offsets.cumsum(0), x.size(0)]
        parts = [self.inner(part) * (i + 1) for i, part in enumerate(x.split(counts.tolist())) if len(part) % 2]
        y = torch.cat(parts)
        self.state = y.tanh()
        return y


def _calls(kind: type[nn.Module]) -> list[tuple[torch.Tensor, ...]]:
    """Return the arguments of calls; the last is as the first, with other floats."""
    torch.manual_seed(0)
    if kind is Groups:
        types = [[[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]], [[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]]]
        masks = [[[1] * 6, [1] * 5 + [0]], [[1] * 6, [1] * 4 + [0] * 2]]
        grids = [[[2, 2], [1, 2]], [[4, 1], [2, 1]]]
        given = [tuple(map(torch.tensor, each)) for each in zip(types, masks, grids, strict=True)]
        return [(torch.randn(2, 6, WIDTH), *given[i]) for i in (0, 1, 0)]
    if kind is Windows or kind is Images:
        scale = 1 if kind is Windows else 2
        grids = [[[3, 4], [2, 5]], [[4, 3], [5, 2]]]
        return [(torch.randn(22, WIDTH), torch.tensor(grids[i]) * scale) for i in (0, 1, 0)]
    if kind is Repeats:
        return [(torch.randn(3, WIDTH), torch.tensor(counts)) for counts in ([1, 2, 3], [3, 2, 1], [1, 2, 3])]
    return [(torch.randn(6, WIDTH), torch.tensor(counts)) for counts in ([1, 2, 3], [3, 1, 2], [1, 2, 3])]


def _compare(run: ORTModule, reference: nn.Module, arguments: Sequence[torch.Tensor]) -> None:
    """Compare the output and all gradients of a call with eager and float64."""
    cotangents = torch.Generator().manual_seed(2)

    def step(module: nn.Module, *arguments: torch.Tensor) -> list[torch.Tensor]:
        output = module(*arguments)
        cotangent = torch.randn(output.shape, generator=cotangents.manual_seed(2), dtype=torch.float64)
        parameters = [p for p in module.parameters() if p.requires_grad]
        return [output, *torch.autograd.grad(output, parameters, cotangent.to(output.dtype))]

    assert_matches(step(run, *arguments), step, reference, *arguments)


SLOW_WINDOWS = pytest.param(Windows, marks=pytest.mark.slow)  # PyTorch compares windows of unknown sizes first


@pytest.mark.parametrize("kind", [Groups, SLOW_WINDOWS, Images, Repeats])
def test_each_call_runs_a_graph_of_the_elements_that_forward_reads(kind: type[nn.Module]) -> None:
    reference = kind()
    run = ORTModule(copy.deepcopy(reference), pieces=False, fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    for arguments in _calls(kind):
        _compare(run, reference, arguments)
    assert count_captures(run) == 2


def test_an_attribute_keeps_the_known_tensor_of_each_call() -> None:
    reference = Keeps()
    module = copy.deepcopy(reference)
    run = ORTModule(module, pieces=False, fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    calls = _calls(Keeps)
    for model in (module, reference):
        model(*calls[0])  # the attribute is None only once
    for arguments in calls:
        _compare(run, reference, arguments)
        reference(*arguments)
        assert module.offsets is not None
        assert reference.offsets is not None
        assert torch.equal(module.offsets, reference.offsets)
        assert type(module.offsets) is torch.Tensor
    assert count_captures(run) == 2
    module.offsets.zero_()
    run(*calls[0])
    assert module.offsets.tolist() == [2, 6, 12], "each call assigns a tensor of its own"


def test_attributes_that_are_set_first_get_the_tensors_of_each_call() -> None:
    reference = Sets()
    module = copy.deepcopy(reference)
    run = ORTModule(module, pieces=False, fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    for x, counts in _calls(Sets):
        gradients = []
        for call, inner in ((run, module), (reference, reference)):
            loss = call(x, counts).sum() + inner.state.square().sum()
            gradients.append(torch.autograd.grad(loss, list(inner.parameters())))
        torch.testing.assert_close(*gradients)
        torch.testing.assert_close([module.offsets, *module.kept], [reference.offsets, *reference.kept])
        module.offsets.zero_()  # each call assigns tensors of its own
        module.kept[0].zero_()
    assert count_captures(run) == 2


def test_an_input_that_changes_in_each_call_is_not_captured_each_time() -> None:
    reference = Repeats()
    run = ORTModule(copy.deepcopy(reference))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for last in range(1, 10):
            x = torch.randn(3, WIDTH)
            _compare(run, reference, (x, torch.tensor([2, 2, 2 * last])))
    assert count_captures(run) <= 5


def test_pytorchs_reports_of_a_proof_are_logs_of_onnxtrain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A proof of the graph runs it on other sizes, for which operators may fail: PyTorch reports that as an error."""
    compile_guards = capture.compile_guards

    def reporting(*arguments: Any) -> Any:
        logging.getLogger("torch._subclasses.fake_tensor").error("failed on fake tensors")
        return compile_guards(*arguments)

    monkeypatch.setattr(capture, "compile_guards", reporting)
    with caplog.at_level(logging.INFO):
        ORTModule(nn.Linear(4, 2))(torch.randn(3, 4))
    reports = [record.name for record in caplog.records if "failed on fake tensors" in record.message]
    assert reports == ["onnxtrain"]
