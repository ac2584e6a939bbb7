"""Shapes that are not computed on fake tensors are those that PyTorch would compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from onnxtrain.capture import shape_shortcuts as shortcuts
from onnxtrain.capture.patches import capturing

Q, K = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 5, 6)
W, B = torch.randn(8, 6), torch.randn(8)


def attention(q: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
    k = torch.cat([q, q[:, :, :1]], 2)
    return F.scaled_dot_product_attention(q, k, k[..., :5], *rest, **kwargs)


# The call, its tensors (the first dimension of the first one is dynamic), and whether the shortcut is taken.
CALLS: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor], bool]] = {
    "attention": (attention, [Q], True),
    "attention with a mask": (lambda q, m: attention(q, m, 0.1), [Q, torch.ones(1, 1, 4, 5).bool()], True),
    "causal attention": (lambda q: attention(q, is_causal=True), [Q], True),
    "attention whose keys broadcast": (F.scaled_dot_product_attention, [Q, K[:1], K[:1]], False),
    "attention whose mask has the wrong type": (attention, [Q, torch.ones(4, 5).double()], False),
    "linear": (F.linear, [K, W, B], True),
    "linear without a bias": (F.linear, [Q, W], True),
    "linear of a matrix": (F.linear, [K[0, 0], W, B], False),
    "layer_norm": (lambda x, w: F.layer_norm(x, (6,), w), [Q, torch.ones(6)], True),
    "layer_norm over two dimensions": (lambda x: F.layer_norm(x, (4, 6)), [Q], True),
}


class Calls(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.grads: list[bool] = []

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        result = self.call(*tensors)
        self.__dict__["grads"].append((result.requires_grad, result.is_leaf))
        return result


def export(call: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> tuple[Any, Any]:
    module = Calls(call)
    grads = module.__dict__["grads"] = []
    shapes = (({0: Dim.AUTO}, *(None for _ in tensors[1:])),)
    program = torch.export.export(module, tuple(tensors), dynamic_shapes=shapes, strict=False)
    result = list(program.graph.nodes)[-1].args[0][0].meta["val"]
    return result, grads


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_shapes_are_pytorchs(name: str, requires_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, shortcut = CALLS[name]
    tensors = [t.clone().requires_grad_(requires_grad and t.is_floating_point()) for t in tensors]
    used: list[Any] = []
    original = shortcuts._like
    monkeypatch.setattr(shortcuts, "_like", lambda *args: used.append(args) or original(*args))  # type: ignore[func-returns-value]
    try:
        expected, grads = export(call, tensors)
    except (RuntimeError, torch._dynamo.exc.UserError):
        with pytest.raises((RuntimeError, torch._dynamo.exc.UserError)), capturing(), shortcuts.shape_shortcuts():
            export(call, tensors)
        return
    with capturing(), shortcuts.shape_shortcuts():
        found, own_grads = export(call, tensors)
    assert [str(s) for s in found.shape] == [str(s) for s in expected.shape]
    assert (found.dtype, found.device, found.is_contiguous()) == (expected.dtype, expected.device, True)
    assert own_grads == grads
    assert bool(used) == shortcut


def test_shapes_that_do_not_fit_are_the_users_error() -> None:
    with capturing(), shortcuts.shape_shortcuts(), pytest.raises((RuntimeError, ValueError)):
        export(F.linear, [K, torch.randn(8, 5)])


def test_nothing_is_left_behind() -> None:
    before = {op: dict(op.py_kernels) for op in shortcuts._SHAPES}
    with capturing(), shortcuts.shape_shortcuts():
        assert {op: dict(op.py_kernels) for op in shortcuts._SHAPES} != before
    assert {op: dict(op.py_kernels) for op in shortcuts._SHAPES} == before
