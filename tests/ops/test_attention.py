"""What scaled_dot_product_attention becomes, and that its kernels are those of eager PyTorch."""

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnxtrain import ORTModule
from onnxtrain.errors import GraphError
from onnxtrain.ops import builder
from onnxtrain.ops.attention.flash import _runs_flash, attention, attention_backward
from onnxtrain.testing import Spec, assert_no_worse_than_eager
from tests.ops.captures import OfTensors, check_capture

HEADS, WIDTH = 3, 8
SIZES = ({"b": 2, "l": 4, "s": 5}, {"b": 3, "l": 6, "s": 7}, {"b": 1, "l": 4, "s": 2})
TOKENS = (Spec("b l 24"), Spec("b s 24"), Spec("b s 24"))
sdpa = F.scaled_dot_product_attention


def heads(x: torch.Tensor, count: int = HEADS) -> torch.Tensor:
    """[b, s, h * e] as [b, h, s, e]: how models cut their projections, a view that is not contiguous."""
    return x.view(x.shape[0], -1, count, WIDTH).transpose(1, 2)


def attend(q, k, v, mask=None, **options):
    """Attention over tokens, as models write it."""
    y = sdpa(heads(q), heads(k), heads(v), mask, **options)
    return y.transpose(1, 2).flatten(2)


def _several(q, k, v):
    return (
        attend(q, k, v),
        attend(q, k, v, scale=WIDTH**-0.5),
        attend(q, k, v, scale=0.25),
        attend(q, k, v, scale=0.3),
        attend(q, k, v, is_causal=True),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_captured(dtype):
    check_capture(_several, *TOKENS, dtype=dtype, sizes=SIZES)


def test_gradients_of_repeated_heads_in_half_type_are_summed_in_float():
    """As with enable_gqa: transformers writes the one or the other, depending on whether it is traced."""

    def repeat(x):
        x = heads(x, 2)[:, :, None]
        return x.expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, -1, WIDTH)

    def repeated(q, k, v):
        return sdpa(heads(q, 4), repeat(k), repeat(v), dropout_p=0.5)

    def shared(q, k, v):
        return sdpa(heads(q, 4), heads(k, 2), heads(v, 2), dropout_p=0.5, enable_gqa=True)

    ours = ORTModule(OfTensors(repeated), rng="torch")
    for batch, length in ((2, 5), (1, 1), (3, 4)):
        tensors = [torch.randn(batch, length, WIDTH * n).bfloat16() for n in (4, 2, 2)]
        found = []
        for run in (ours, shared):
            torch.manual_seed(0)
            leaves = [t.clone().requires_grad_() for t in tensors]
            y = run(*leaves)
            found.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(mine, theirs)


def test_captured_with_masks():
    def masked(q, k, v, seen, bias):
        return (
            attend(q, k, v, seen[:, None, None, :]),
            attend(q, k, v, bias),
            attend(q, k, v, bias[0, 0]),
            attend(q, k, v, torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None, None, :].to(q.dtype)),
        )

    seen = Spec("b s", make=lambda sizes, dtype, g: torch.rand(sizes, generator=g) < 0.7)
    check_capture(masked, *TOKENS, seen, Spec("b 3 l s"), sizes=SIZES)


def test_captured_with_other_shapes():
    def shaped(q, k, v):
        grouped = sdpa(heads(q), heads(k)[:, :1], heads(v)[:, :1], enable_gqa=True)
        wide = sdpa(heads(q), heads(k), heads(v)[..., :5])
        shared = sdpa(heads(q), heads(k)[:1], heads(v)[:1])
        return grouped, wide, shared, sdpa(q, k, v), sdpa(q[0], k[0], v[0]), sdpa(q, k, v, is_causal=True)

    check_capture(shaped, *TOKENS, sizes=SIZES)


def _types(ours: ORTModule) -> list[str]:
    return [node.op_type for node in ours.__dict__["_engine"].newest().captured.model.graph]


def _step(module, tensors):
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    torch.manual_seed(5)
    y = module(*leaves)
    state = torch.get_rng_state()
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None), state]


def _check_step(ours, module, tensors):
    """Compares output, gradients and the random state."""
    results = (_step(ours, tensors), _step(module, tensors), _step(module, [t.double() for t in tensors]))
    for number, (mine, theirs, right) in enumerate(zip(*results, strict=True)):
        assert_no_worse_than_eager(f"result {number}", mine, theirs, right)


def _tokens(dtype=torch.float32, masked=False):
    shapes = [(2, 4, 24), (2, 5, 24), (2, 5, 24), *([(2, 1, 4, 5)] if masked else [])]
    return [torch.randn(shape).to(dtype) for shape in shapes]


EXACT = {
    "flash": ("FlashAttention", {}),
    "flash-causal": ("FlashAttention", {"is_causal": True}),
    "dropout": ("BitmaskDropout", {"dropout_p": 0.3}),
    "dropout-causal": ("BitmaskDropout", {"dropout_p": 0.3, "is_causal": True}),
    "dropout-scale": ("BitmaskDropout", {"dropout_p": 0.3, "scale": -0.3}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_equals_eager_bit_for_bit(case, dtype):
    """The kernels are eager's: the same numbers, and the same random ones."""
    kind, options = case
    module = OfTensors(lambda q, k, v: attend(q, k, v, **options))
    ours = ORTModule(module, rng="torch")
    tensors = _tokens(dtype)
    for mine, theirs in zip(_step(ours, tensors), _step(module, tensors), strict=True):
        assert torch.equal(mine, theirs)
    assert kind in _types(ours)


def test_dropout_with_a_mask_equals_eager():
    def masked(q, k, v, bias):
        return attend(q, k, v, bias, dropout_p=0.2) + attend(q, k, v, bias > 0, dropout_p=0.2)

    _check_step(ORTModule(OfTensors(masked), rng="torch"), OfTensors(masked), _tokens(masked=True))


def test_where_the_flash_kernel_is_switched_off_it_is_not_captured():
    module = OfTensors(attend)
    with sdpa_kernel(SDPBackend.MATH):
        ours = ORTModule(module, rng="torch")
        _check_step(ours, module, _tokens())
    assert "FlashAttention" not in _types(ours)


def test_a_mask_of_bools_is_refused():
    """Captures turn them into what is added: to add True as 1 would be a wrong number."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="bools")
    op = builder(graph)
    q, mask = op.constant(torch.randn(1, 2, 3, 4), ir.DataType.FLOAT), op.constant([[True] * 3] * 3, ir.DataType.BOOL)
    with pytest.raises(GraphError, match="supports only additive masks"):
        op.own.FlashAttention(q, q, q, mask)


def _attended(shape=(2, 3, 4, 8), keys=5, groups=1, dtype=torch.float64):
    b, h, _, e = shape
    q = torch.randn(shape, dtype=dtype)
    return q, torch.randn(b, h // groups, keys, e, dtype=dtype), torch.randn(b, h // groups, keys, e, dtype=dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_both_kernels_agree(causal, groups):
    """The one that PyTorch takes, and the formula: forward of one and backward of the other may meet."""
    q, k, v = _attended(groups=groups)
    mask = None if causal else torch.randn(4, 5, dtype=q.dtype).masked_fill(torch.eye(4, 5) > 0, float("-inf"))
    if mask is not None:
        mask[2] = float("-inf")
    dy = torch.randn_like(q)
    assert _runs_flash(q, k, v, mask, causal, None)
    flash = attention(q, k, v, mask, causal, None)
    flash_gradients = attention_backward(dy, q, k, v, mask, *flash, causal, None)
    with sdpa_kernel(SDPBackend.MATH):
        assert not _runs_flash(q, k, v, mask, causal, None)
        formula = attention(q, k, v, mask, causal, None)
        gradients = attention_backward(dy, q, k, v, mask, *formula, causal, None)
    for mine, theirs in zip((*formula, *gradients), (*flash, *flash_gradients), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("keys", [0, 1, 5])
def test_queries_whose_rows_are_not_dense_take_the_formula(keys):
    q, k, v = _attended(keys=keys)
    q = q.mT.contiguous().mT
    assert not _runs_flash(q, k, v, None, False, None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    expected = sdpa(*leaves)
    dy = torch.randn_like(expected)
    y, logsumexp = attention(q, k, v, None, False, None)
    gradients = attention_backward(dy, q, k, v, None, y, logsumexp, False, None)
    torch.testing.assert_close(y, expected)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, leaves, dy), strict=True):
        torch.testing.assert_close(mine, theirs)
