"""Operators without a definition stay ATen nodes: exact, with PyTorch's own gradient, at all sizes on one capture."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "complex": lambda x: torch.view_as_real(torch.fft.fft(x) * torch.fft.fft(x).conj()),
    "svd": torch.linalg.svdvals,
    "solve": lambda x: torch.linalg.solve(x.t() @ x + torch.eye(6), x.t()),
    "several results": lambda x: torch.linalg.qr(x).R.abs(),
    "a string among the arguments": lambda x: nn.functional.pad(x[None], (1, 1), mode="circular"),
    "cdist": lambda x: torch.cdist(x, x.flip(0) + 1),
    "random": lambda x: x * torch.randn_like(x),
}


class Calls(nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.linear(x))


def aten_operators(module: ORTModule) -> list[str]:
    entries = module.__dict__["_engine"]._entries
    graph = next(iter(entries.values()))[0].compiled.captured.model.graph
    return [node.attributes["operator"].as_string() for node in graph if node.op_type == "ATen"]


@pytest.mark.parametrize("name", CALLS)
def test_equals_eager(name: str) -> None:
    eager = Calls(CALLS[name]).double()
    ours = ORTModule(copy.deepcopy(eager), rng="torch")
    for rows in (7, 9, 8):
        x = torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        results = []
        for module in (ours, eager):
            torch.manual_seed(rows)
            output = module(x)
            output.backward(torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1)))
            results.append((output.detach(), torch.get_rng_state()))
        torch.testing.assert_close(*(r[0] for r in results))
        assert torch.equal(*(r[1] for r in results))
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert aten_operators(ours), "nothing stayed an ATen node: the test shows nothing"
    assert ours.__dict__["_engine"].captures == 1


def test_recurrent_layers_and_embedding_bags() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(11, 6, mode="mean")
            self.lstm = nn.LSTM(6, 5, num_layers=2, dropout=0.3, batch_first=True)
            self.gru = nn.GRU(5, 4, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            first, _ = self.lstm(self.bag(ids.reshape(-1, 3)).view(ids.shape[0], -1, 6))
            second, last = self.gru(first)
            return second.sum() + last.square().sum()

    eager = Recurrent()
    ours = ORTModule(copy.deepcopy(eager), rng="torch")
    for rows in (4, 2):
        ids = torch.randint(11, (rows, 12), generator=torch.Generator().manual_seed(rows))
        for module in (ours, eager):
            torch.manual_seed(5)
            module(ids).backward()
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert aten_operators(ours)
