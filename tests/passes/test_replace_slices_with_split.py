"""Slices that cover an axis become one Split, whose gradient is one Concat."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain.onnx_file import without_case_suffix
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.replace_slices_with_split import replace_slices_with_split
from tests.passes.less_work import WIDTH, applied_by, check_equals_eager, refusals, wrap
from tests.passes.test_rewrites import closed, graph_of, kinds, rows
from tests.zoo.entry import Draw

SIZES = ((3, 9), (1, 6), (2, 1))


class Cut(nn.Module):
    """Queries, keys and values are parts of one projection."""

    def __init__(self, cut: Any) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.cut = cut

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.cut(self.project(x))
        return torch.tanh(q * k) * v


def by_slices(y: torch.Tensor) -> Any:
    return y[..., :WIDTH], y[..., WIDTH : 2 * WIDTH], y[..., -WIDTH:]


def by_index(y: torch.Tensor) -> Any:
    """As BLOOM and timm's vision transformers write it."""
    y = y.unflatten(-1, (-1, 3, 2))
    return tuple(y[..., i, :].flatten(-2) for i in range(3))


def by_index_first(y: torch.Tensor) -> Any:
    y = y.unflatten(-1, (3, -1)).permute(2, 0, 1, 3)
    return y[0], y[1], y[-1]


def by_gather(y: torch.Tensor) -> Any:
    index = torch.arange(3 * WIDTH).chunk(3)
    return tuple(y.index_select(-1, i) for i in index)


@pytest.mark.parametrize("cut", [by_slices, by_index, by_index_first, by_gather])
def test_slices_that_cover_an_axis_become_one_split(cut: Any, tmp_path: Path) -> None:
    for sizes in (SIZES, ((0, 5), (0, 2))):
        check_equals_eager(lambda: Cut(cut), rows, sizes)
    model = wrap(Cut(cut), tmp_path)
    model(*rows(Draw(0), 3, 9).args).sum().backward()
    op_counts = kinds(tmp_path)
    assert len(applied_by(model, "replace_slices_with_split")) == 1
    assert op_counts["Split"] == 1
    assert not op_counts["Slice"] + op_counts["Gather"]


def test_the_gradient_is_one_concat(tmp_path: Path) -> None:
    for disabled in (None, "replace_slices_with_split"):
        model = wrap(Cut(by_slices), tmp_path, disabled_passes=disabled)
        model(*rows(Draw(0), 3, 9).args).sum().backward()
        op_counts = Counter(
            without_case_suffix(node.op_type) for node in ir.load(tmp_path / "m_optimized_training.onnx").graph
        )
        assert op_counts["SliceGrad"] == (3 if disabled else 0)


def overlapping(y: torch.Tensor) -> Any:
    return y[..., :WIDTH], y[..., WIDTH - 1 : 2 * WIDTH - 1], y[..., 2 * WIDTH :]


def by_steps(y: torch.Tensor) -> Any:
    return y[..., ::3], y[..., 1::3], y[..., 2::3]


def uneven(y: torch.Tensor) -> Any:
    """The first token and the others: of no others there is no proof."""
    return y[:, :1, :WIDTH], y[:, 1:, :WIDTH], y[:, 1:, WIDTH : 2 * WIDTH]


@pytest.mark.parametrize(("cut", "refused"), [(overlapping, True), (by_steps, False), (uneven, True)])
def test_other_slices_stay(cut: Any, refused: bool, tmp_path: Path) -> None:
    check_equals_eager(lambda: Cut(cut), rows, ((3, 9), (2, 4)))
    model = wrap(Cut(cut), tmp_path)
    model(*rows(Draw(0), 3, 9).args).sum().backward()
    assert not kinds(tmp_path)["Split"]
    assert any("do not cover its axis" in text for text in refusals(model, "replace_slices_with_split")) == refused


def test_slices_that_the_module_gives_out_stay(tmp_path: Path) -> None:
    class Views(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y[..., :2], y[..., 2:].unsqueeze(0)

    model = wrap(Views(WIDTH, 4), tmp_path)
    first, second = model(*rows(Draw(0), 3, 9).args)
    (first.sum() + second.sum()).backward()
    assert not applied_by(model, "replace_slices_with_split")


def test_a_slice_of_a_split_tensor_stays_beside_the_split() -> None:
    op, x = graph_of(("b", 4))
    parts = [op.Slice(x, *(op.sizes([n]) for n in bounds), op.sizes([1])) for bounds in ((0, 2), (2, 4), (1, 3))]
    graph = closed(op, op.Add(op.Add(parts[0], parts[1]), parts[2]))
    changes = Changes("replace_slices_with_split")
    replace_slices_with_split(graph, changes)
    assert [node.op_type for node in graph if node.op_type in ("Split", "Slice")] == ["Split", "Slice"]
    assert len(changes.applied) == 1
