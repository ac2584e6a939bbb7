"""The shape functions of composite operators return the shapes that PyTorch computes by decomposing them."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from onnxtrain import ORTModule
from onnxtrain.capture.export import composite_shapes
from onnxtrain.capture.export.composite_shapes import shape_shortcuts
from onnxtrain.capture.export.patches import capturing
from onnxtrain.torch_compat.decompositions import composite_kernel
from tests.reference import assert_matches
from tests.thinned import covering, slow_but_every

Q, K = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 5, 6)
W, B = torch.randn(8, 6), torch.randn(8)


def attention(q: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
    k = torch.cat([q, q[:, :, :1]], 2)
    return F.scaled_dot_product_attention(q, k, k[..., :5], *rest, **kwargs)


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(2).expand(-1, -1, 4, -1)


# The call, its tensors (the first dimension of the first one is dynamic), and whether a shape function applies.
CALLS: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor], bool]] = {
    "attention": (attention, [Q], True),
    "attention with a mask": (lambda q, m: attention(q, m, 0.1), [Q, torch.ones(1, 1, 4, 5).bool()], True),
    "causal attention": (lambda q: attention(q, is_causal=True), [Q], True),
    "attention whose keys broadcast": (F.scaled_dot_product_attention, [Q, K[:1], K[:1]], False),
    "attention whose mask has the wrong type": (attention, [Q, torch.ones(4, 5).double()], False),
    "attention whose mask is too narrow": (attention, [Q, torch.ones(4, 4).bool()], False),
    "attention whose mask has more dimensions": (attention, [Q, torch.ones(1, 1, 1, 4, 5).bool()], False),
    "causal attention with a mask": (lambda q, m: attention(q, m, is_causal=True), [Q, torch.ones(4, 5).bool()], False),
    "attention of two types": (lambda q: F.scaled_dot_product_attention(q, q.double(), q.double()), [Q], False),
    "attention of other ranks": (
        lambda x: F.scaled_dot_product_attention(_expanded(x), x, x),
        [K[0, [0] * 5]],
        False,
    ),
    "attention whose query broadcasts to the keys": (
        lambda k, q: F.scaled_dot_product_attention(q, k, k.new_zeros(1, 3, 5, 6)),
        [K, Q[:1]],
        False,
    ),
    "attention whose query broadcasts to the values": (
        lambda v, q: F.scaled_dot_product_attention(q, v.new_zeros(1, 3, 5, 6), v),
        [K, Q[:1]],
        False,
    ),
    "attention whose keys are too narrow": (lambda q: F.scaled_dot_product_attention(q, q[..., :5], q), [Q], False),
    "attention with fewer values": (lambda q: F.scaled_dot_product_attention(q, q, q[..., :3, :]), [Q], False),
    "linear": (F.linear, [K, W, B], True),
    "linear with one output": (F.linear, [K, W[0]], False),
    "linear of two types": (F.linear, [K, W.double()], False),
    "linear whose bias has another type": (F.linear, [K, W, B.double()], False),
    "linear whose bias is too short": (F.linear, [K, W, B[:7]], False),
    "linear whose bias is a matrix": (F.linear, [K, W, B.expand(8, 8)], False),
    "linear without a bias": (F.linear, [Q, W], True),
    "linear of a matrix": (F.linear, [K[0, 0], W, B], False),
    "layer_norm": (lambda x, w: F.layer_norm(x, (6,), w), [Q, torch.ones(6)], True),
    "layer_norm over two dimensions": (lambda x: F.layer_norm(x, (4, 6)), [Q], True),
    "layer_norm over another size": (lambda x: F.layer_norm(x, (5,)), [Q], False),
    "layer_norm over more dimensions": (lambda x: F.layer_norm(x, (2, 2, 3, 4, 6)), [Q], False),
    "attention of two dimensions": (lambda q: F.scaled_dot_product_attention(q, q, q), [Q[0, 0]], False),
    "layer_norm with a weight of another size": (lambda x, w: F.layer_norm(x, (6,), w), [Q, torch.ones(5)], False),
    "layer_norm with a bias of another size": (lambda x, b: F.layer_norm(x, (6,), None, b), [Q, torch.ones(5)], False),
}


class RecordsGradients(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.grads: list[bool] = []

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        result = self.call(*tensors)
        self.__dict__["grads"].append((result.requires_grad, result.is_leaf))
        return result


def export(call: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> tuple[Any, Any]:
    module = RecordsGradients(call)
    grads = module.__dict__["grads"] = []
    shapes = (({0: Dim.AUTO}, *(None for _ in tensors[1:])),)
    program = torch.export.export(module, tuple(tensors), dynamic_shapes=shapes, strict=False)
    result = list(program.graph.nodes)[-1].args[0][0].meta["val"]
    return result, grads


def _record_shortcuts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that each result of a shape function is added to."""
    used: list[Any] = []
    original = composite_shapes._new_result

    def recording(*args: Any) -> torch.Tensor:
        used.append(args)
        return original(*args)

    monkeypatch.setattr(composite_shapes, "_new_result", recording)
    return used


@pytest.mark.parametrize(("name", "requires_grad"), covering(slow_but_every(3, CALLS), [False, True]))
def test_shapes_match_pytorch(name: str, requires_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, is_shortcut = CALLS[name]
    tensors = [t.clone().requires_grad_(requires_grad and t.is_floating_point()) for t in tensors]
    used = _record_shortcuts(monkeypatch)
    try:
        expected, grads = export(call, tensors)
    except (RuntimeError, torch._dynamo.exc.UserError):
        with (
            pytest.raises((RuntimeError, torch._dynamo.exc.UserError)),
            capturing(),
            shape_shortcuts(),
        ):
            export(call, tensors)
        return
    with capturing(), shape_shortcuts():
        actual, actual_grads = export(call, tensors)
    assert [str(s) for s in actual.shape] == [str(s) for s in expected.shape]
    assert (actual.dtype, actual.device, actual.is_contiguous()) == (expected.dtype, expected.device, True)
    assert actual_grads == grads
    assert bool(used) == is_shortcut


def test_shapes_that_do_not_match_raise() -> None:
    with capturing(), shape_shortcuts(), pytest.raises((RuntimeError, ValueError)):
        export(F.linear, [K, torch.randn(8, 5)])


def test_kernels_are_restored_and_those_of_other_libraries_kept() -> None:
    linear = torch.ops.aten.linear.default
    ran: list[Any] = []

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            ran.append(args)
            return original(*args)

        return kernel

    def kernels() -> dict[Any, Any]:
        return {op: dict(op.py_kernels) for op in composite_shapes._SHORTCUTS}

    before = kernels()
    assert torch._C.DispatchKey.CompositeImplicitAutograd not in before[linear]  # earlier captures have left none
    with composite_kernel(linear, recording):  # as another library may register one
        with_other_kernel = kernels()
        with capturing(), shape_shortcuts():
            assert kernels() != with_other_kernel
            export(F.linear, [K, W])
        assert kernels() == with_other_kernel
        assert not ran
        export(F.linear, [K, W])
        assert ran
    assert kernels() == before
    ran.clear()
    export(F.linear, [K, W])
    assert not ran


def test_another_thread_takes_no_shortcut(monkeypatch: pytest.MonkeyPatch) -> None:
    used = _record_shortcuts(monkeypatch)
    with shape_shortcuts():
        thread = threading.Thread(target=export, args=(F.linear, [K, W]))
        thread.start()
        thread.join()
        assert not used
        export(F.linear, [K, W])
        assert used


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        keys = self.linear(context)[:, None]
        return F.scaled_dot_product_attention(x[:, None], keys, keys)


def test_comparisons_in_a_shape_function_add_no_guard() -> None:
    """Guards would need another capture for each pattern of equal lengths."""
    model = CrossAttention()
    wrapped = ORTModule(model)
    for batch, queries, keys in ((3, 4, 5), (2, 6, 6), (1, 1, 3), (2, 1, 1)):
        x, context = torch.randn(batch, queries, 6), torch.randn(batch, keys, 6)
        assert_matches(wrapped(x, context), model, x, context)
    assert wrapped.__dict__["_engine"].captures == 1
