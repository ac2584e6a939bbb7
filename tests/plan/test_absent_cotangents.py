"""A backward without the cotangents of some results: they are removed from the joint graph, as if never added."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import replace

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule
from onnxtrain.autodiff import Joint
from onnxtrain.execute.unit_builder import BackwardPrograms
from onnxtrain.plan.differentiation import Differentiation, Flags
from onnxtrain.plan.recompute import apply_choice
from onnxtrain.testing import assert_no_worse_than_eager
from tests.plan import measured
from tests.thinned import slow_except


class Loss(nn.Module):
    """Returns its loss, its logits and the hidden state, which several nodes read."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.hidden, self.norm, self.classes = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.is_checkpointed = is_checkpointed

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.hidden(x))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h = checkpoint(self._features, x, use_reentrant=False) if self.is_checkpointed else self._features(x)
        assert h is not None
        logits = self.classes(self.norm(h) + h)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits, "hidden": h}


class Parts(nn.Module):
    """The cotangent of the second result goes through a gradient rule: no addition alone reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"loss": nn.functional.cross_entropy(y, labels), "exp": y.exp()}


def classes(seed: int = 0) -> measured.Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (7,), generator=generator)
    return {"x": torch.randn(7, 6, generator=generator), "labels": labels}


MODELS: dict[str, tuple[Callable[[], nn.Module], measured.Batch]] = {
    "loss": (Loss, classes()),
    "checkpoint": (lambda: Loss(is_checkpointed=True), classes()),
    "gpt2": (measured.gpt2, measured.words(2, 9)),
    "t5": (measured.t5, measured.words(2, 9)),
    "minilm": (measured.minilm, measured.sentences(2, 9)),
}


def shape_of(joint: Joint) -> Hashable:
    """Return everything of a joint graph but its names."""
    graph = joint.model.graph
    values: list[ir.Value | None] = [
        *graph.inputs,
        *graph.initializers.values(),
        *(v for n in graph for v in n.outputs),
    ]
    number = {value: index for index, value in enumerate(values)} | {None: -1}
    nodes = [
        (
            *node.op_identifier(),
            tuple(sorted((name, repr(attribute.value)) for name, attribute in node.attributes.items())),
            tuple(number[value] for value in node.inputs),
            tuple((value.dtype, str(value.shape)) for value in node.outputs),
            node in joint.forward_nodes,
            node.metadata_props.get("gradient_of", ""),
        )
        for node in graph
    ]
    roles = (*graph.outputs, *joint.cotangents, *joint.gradients)
    return tuple(nodes), tuple(number[value] for value in roles), joint.active


@pytest.mark.parametrize("name", slow_except(MODELS, "loss", "checkpoint", "gpt2"))
def test_the_graph_is_the_one_that_is_differentiated_without_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    compared: list[bool] = []
    backward = BackwardPrograms.__call__

    def compare(self: BackwardPrograms, has_cotangent: Flags, needs_grad: Flags) -> object:
        again = apply_choice(self._builder.differentiation.optimized(has_cotangent), self._choice)
        rewritten = replace(self._joint, is_rewritten=True)  # by the user: differentiation would not make it again
        assert self._builder.differentiation.without_cotangents(rewritten, has_cotangent) is None
        with monkeypatch.context() as inside:
            inside.setattr(Differentiation, "optimized", None)  # not needed
            result = backward(self, has_cotangent, needs_grad)
        assert shape_of(self._joint) == shape_of(again)
        compared.append(sum(has_cotangent) == 1 < len(has_cotangent))
        return result

    monkeypatch.setattr(BackwardPrograms, "__call__", compare)
    ORTModule(make().train())(**batch)["loss"].backward()
    assert compared == [True]


@pytest.mark.parametrize("make", [Loss, Parts])
def test_gradients_of_any_results_in_any_order(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net = make()
    ours = ORTModule(copy.deepcopy(net))
    batch = classes()

    def gradients(module: nn.Module, dtype: torch.dtype, names: list[str]) -> list[torch.Tensor]:
        module.zero_grad()
        results = module(batch["x"].to(dtype), batch["labels"])
        sum(results[name].sum() for name in names).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]

    second = "logits" if make is Loss else "exp"
    for names in (["loss"], [second], ["loss", second], ["loss"]):
        exact = gradients(copy.deepcopy(net).double(), torch.float64, names)
        eager = gradients(net, torch.float32, names)
        for i, got in enumerate(gradients(ours, torch.float32, names)):
            assert_no_worse_than_eager(f"gradient {i} of {names}", got, eager[i], exact[i])
