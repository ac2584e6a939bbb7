"""A graph samples arrays by the user's Python in every step, as eager does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.zoo.checks import compare_named, compared
from tests.zoo.entry import Call, Draw, ZooModel, mean_square

WIDTH = 6


def spans(shape: tuple[int, int], share: float, lengths: torch.Tensor | None = None, least: int = 0) -> Any:
    """Sample as `_compute_mask_indices` of transformers does: as many numbers as the lengths of the rows say."""
    batch, length = shape
    rounding = np.random.rand(1).item()  # noqa: NPY002  # as in models
    rows = [length] * batch if lengths is None else lengths.detach().tolist()
    mask = np.zeros((batch, length), dtype=bool)
    for i, row in enumerate(rows):
        count = max(int(share * row + rounding), least)
        mask[i, np.random.choice(np.arange(row), count, replace=False)] = True  # noqa: NPY002
    return mask


def of_python(count: int) -> Any:
    return np.array([random.random() for _ in range(count)], dtype=np.float32)


class Masked(nn.Module):
    """Mask elements of the hidden states by samples."""

    def __init__(self, mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Parameter(torch.rand(WIDTH))
        self.mask = mask

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.training:
            mask = self.mask(x, lengths)
            x = torch.where(mask[..., None], self.embedding, x) if mask.dtype == torch.bool else x * mask
        return x


def arguments(draw: Draw, batch: int, length: int) -> Call:
    lengths = torch.arange(batch) % length + 1
    return Call((draw.floats(batch, length, WIDTH, grad=True), lengths))


MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "of sizes": lambda x, _: torch.tensor(spans((x.shape[0], x.shape[1]), 0.4), device=x.device, dtype=torch.bool),
    "of a tensor in the graph": lambda x, lengths: torch.tensor(spans(x.shape[:2], 0.4, lengths=lengths * 1)),
    "from_numpy": lambda x, _: torch.from_numpy(spans(x.shape[:2], 0.4)),
    "as_tensor": lambda x, _: torch.as_tensor(spans(x.shape[:2], 0.4)),
    "twice": lambda x, _: torch.tensor(spans(x.shape[:2], 0.4)) ^ torch.tensor(spans(x.shape[:2], 0.2)),
    "Python's": lambda x, _: torch.tensor(of_python(x.shape[-1])),
    "numpy's own": lambda x, _: torch.tensor(np.random.rand(*x.shape), dtype=x.dtype),  # noqa: NPY002
}


OFTEN = ("of a tensor in the graph", "from_numpy", "Python's")  # the others under --slow


def states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]  # noqa: NPY002


def outputs(side: Any, calls: int, sizes: tuple[int, int] = (3, 5)) -> list[Any]:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    return [*(side.call(*sizes)[1].detach().float() for _ in range(calls)), states()]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in MASKS])
def test_masks_are_eagers_in_each_step(name: str) -> None:
    entry = ZooModel(name, lambda: Masked(MASKS[name]), arguments, mean_square)
    with compared(entry) as compare:
        for sizes, calls in (((3, 5), 3), ((1, 2), 1), ((4, 7), 50)):
            got, eager, exact = (outputs(side, calls, sizes) for side in compare.sides())
            assert got[-1] == eager[-1], "the states of the generators"
            compare_named(name, *({str(i): t for i, t in enumerate(side[:-1])} for side in (got, eager, exact)))
            assert calls == 1 or not torch.equal(got[0], got[1])
        assert engine_of(compare.got.run).captures == 1


class Direct(nn.Module):
    """Compute with an array of samples in numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        noise = np.random.rand(WIDTH).astype(np.float32)  # noqa: NPY002
        return self.inner(x) * torch.from_numpy(noise / 2)


def test_numpys_samples_between_graph_breaks_are_eagers() -> None:
    """torch.compile would sample by PyTorch's generator in place of numpy's."""
    with compared(ZooModel("direct", Direct, arguments, mean_square, falls_back="array of samples")) as compare:
        got, eager = (outputs(side, 2) for side in (compare.got, compare.eager))
        assert got[-1] == eager[-1]
        assert all(map(torch.allclose, got[:-1], eager[:-1]))


def test_second_derivatives_use_the_samples_of_forward() -> None:
    """create_graph=True runs the module again in PyTorch."""
    second = []
    module = Masked(MASKS["of sizes"])
    for run in (ORTModule(module, rng="torch"), module):
        np.random.seed(3)  # noqa: NPY002
        x = torch.ones(3, 5, WIDTH, requires_grad=True)
        loss = run(x, torch.ones(3, dtype=torch.int64)).pow(3).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        second.append((*torch.autograd.grad(gradient.sum(), x), torch.from_numpy(np.random.rand(2))))  # noqa: NPY002
    assert torch.allclose(second[0][0], second[1][0])
    assert torch.equal(second[0][1], second[1][1])


def counted(count: int) -> Any:
    return np.random.rand(np.random.randint(1, 9) + count)  # noqa: NPY002


def plain(count: int) -> Any:
    return [random.random() for _ in range(count)]


def again_in_backward(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: t * torch.tensor(of_python(WIDTH), dtype=t.dtype), x, use_reentrant=False)  # type: ignore[no-any-return]


UNFIT: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], str]] = {
    "a shape of samples": (lambda x, _: x * 0 + torch.tensor(counted(3)).sum().float(), "random generator"),
    "a checkpoint": (again_in_backward, "random generator"),
    "a list": (lambda x, _: torch.tensor(plain(x.shape[-1])), "random generator"),
    "elements": (lambda x, _: torch.tensor(np.random.rand(6)[:1] * 2), "array of samples"),  # noqa: NPY002
    "a branch": (lambda x, _: x if torch.tensor(np.random.rand(6)).sum() < 3 else x * 2, "runs the user's Python"),  # noqa: NPY002
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "a branch")) for n in UNFIT])
def test_other_samples_run_in_pytorch(name: str) -> None:
    function, reason = UNFIT[name]
    with compared(ZooModel(name, lambda: Masked(function), arguments, mean_square, falls_back=reason)) as compare:
        got, eager = (outputs(side, 3) for side in (compare.got, compare.eager))
        assert got[-1] == eager[-1]
        assert all(map(torch.allclose, got[:-1], eager[:-1]))
