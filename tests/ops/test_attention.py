"""Captures of scaled_dot_product_attention, which run the kernels of eager PyTorch."""

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnxtrain import ORTModule
from onnxtrain.errors import GraphError
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops import builder
from onnxtrain.ops.attention.dense_aten import attend_backward
from onnxtrain.ops.attention.flash import _runs_flash, attention, attention_backward
from onnxtrain.ops.attention.kernel_arguments import ScoreOptions
from onnxtrain.testing import assert_no_worse_than_eager
from tests.op_case import Spec
from tests.ops.captures import FunctionModule, check_capture
from tests.reference import assert_each_no_worse
from tests.thinned import covering, slow_except

HEADS, WIDTH = 3, 8
SIZES = ({"b": 2, "l": 4, "s": 5}, {"b": 3, "l": 6, "s": 7}, {"b": 1, "l": 4, "s": 2})
TOKENS = (Spec("b l 24"), Spec("b s 24"), Spec("b s 24"))
sdpa = F.scaled_dot_product_attention


def heads(x: torch.Tensor, count: int = HEADS) -> torch.Tensor:
    """Return x[b, s, h * e] as [b, h, s, e], a view that is not contiguous, as models split their projections."""
    return x.view(x.shape[0], -1, count, WIDTH).transpose(1, 2)


def attend(q, k, v, mask=None, **options):
    """Compute attention of q, k and v [b, s, h * e], as models write it."""
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


@pytest.mark.parametrize(
    "dtype", slow_except([torch.float32, torch.float64, torch.bfloat16], torch.float32, torch.bfloat16), ids=str
)
def test_scales_and_causal_flag_match_eager(dtype):
    check_capture(_several, *TOKENS, dtype=dtype, sizes=SIZES)


def test_repeat_kv_in_bfloat16_is_bitwise_equal_to_enable_gqa():
    """The gradients of repeated heads are summed in float32. transformers uses either, depending on tracing."""

    def repeat(x):
        x = heads(x, 2)[:, :, None]
        return x.expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, -1, WIDTH)

    def repeated(q, k, v):
        return sdpa(heads(q, 4), repeat(k), repeat(v), dropout_p=0.5)

    def shared(q, k, v):
        return sdpa(heads(q, 4), heads(k, 2), heads(v, 2), dropout_p=0.5, enable_gqa=True)

    ours = ORTModule(FunctionModule(repeated), rng="torch")
    for batch, length in ((2, 5), (1, 1), (3, 4)):
        tensors = [torch.randn(batch, length, WIDTH * n).bfloat16() for n in (4, 2, 2)]
        results = []
        for function in (ours, shared):
            torch.manual_seed(0)
            leaves = [t.clone().requires_grad_() for t in tensors]
            y = function(*leaves)
            results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected)


def test_masks_match_eager():
    def masked(q, k, v, visible, bias):
        return (
            attend(q, k, v, visible[:, None, None, :]),
            attend(q, k, v, bias),
            attend(q, k, v, bias[0, 0]),
            attend(q, k, v, torch.where(visible, 0.0, torch.finfo(torch.float32).min)[:, None, None, :].to(q.dtype)),
        )

    visible = Spec("b s", make=lambda sizes, dtype, g: torch.rand(sizes, generator=g) < 0.7)
    check_capture(masked, *TOKENS, visible, Spec("b 3 l s"), sizes=SIZES)


def test_grouped_broadcast_and_low_rank_shapes_match_eager():
    def shaped(q, k, v):
        grouped = sdpa(heads(q), heads(k)[:, :1], heads(v)[:, :1], enable_gqa=True)
        wide = sdpa(heads(q), heads(k), heads(v)[..., :5])
        shared = sdpa(heads(q), heads(k)[:1], heads(v)[:1])
        return grouped, wide, shared, sdpa(q, k, v), sdpa(q[0], k[0], v[0]), sdpa(q, k, v, is_causal=True)

    check_capture(shaped, *TOKENS, sizes=SIZES)


def _types(ours: ORTModule) -> list[str]:
    return [node.op_type for node in engine_of(ours).newest().captured.model.graph]


def _step(module, tensors):
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    torch.manual_seed(5)
    y = module(*leaves)
    state = torch.get_rng_state()
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None), state]


def _check_step(ours, module, tensors):
    """Compare output, gradients and the random state with eager's, judged by float64."""
    results = (_step(ours, tensors), _step(module, tensors), _step(module, [t.double() for t in tensors]))
    for index, (got, eager, exact) in enumerate(zip(*results, strict=True)):
        assert_no_worse_than_eager(f"result {index}", got, eager, exact)


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


@pytest.mark.parametrize(
    ("name", "dtype"), covering(slow_except(EXACT, "flash", "dropout"), [torch.float32, torch.bfloat16]), ids=str
)
def test_step_is_bitwise_equal_to_eager(name, dtype):
    """The kernels are eager's, and so are the dropout masks."""
    op_type, options = EXACT[name]
    module = FunctionModule(lambda q, k, v: attend(q, k, v, **options))
    ours = ORTModule(module, rng="torch")
    tensors = _tokens(dtype)
    for got, expected in zip(_step(ours, tensors), _step(module, tensors), strict=True):
        assert torch.equal(got, expected)
    assert op_type in _types(ours)


def test_dropout_with_a_mask_matches_eager():
    def masked(q, k, v, bias):
        return attend(q, k, v, bias, dropout_p=0.2) + attend(q, k, v, bias > 0, dropout_p=0.2)

    _check_step(ORTModule(FunctionModule(masked), rng="torch"), FunctionModule(masked), _tokens(masked=True))


@pytest.mark.parametrize(
    ("query", "key", "mask"),
    [
        ((2, 3, 0), (2, 3, 0), (3, 3)),
        ((2, 0, 4), (2, 3, 4), (0, 3)),
        ((2, 3, 4), (2, 0, 4), (3, 0)),
        ((1, 6, 0, 6), (1, 6, 0, 6), (0, 0)),
        ((1, 0, 3, 4), (1, 0, 3, 4), (3, 3)),
    ],
    ids=str,
)
def test_the_mask_of_empty_attention_has_no_gradient(query, key, mask):
    """PyTorch does not read it. Its flash kernel divides by the number of heads, which ends the process."""

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = torch.nn.Parameter(torch.ones(mask))

        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, attn_mask=self.mask)

    q, k = torch.randn(query, requires_grad=True), torch.randn(key, requires_grad=True)
    eager = Masked()
    expected = eager(q, k)
    model = ORTModule(eager, fallback_policy="FALLBACK_DISABLE")
    out = model(q, k)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert model.mask.grad is None
    assert q.grad.shape == q.shape


def test_disabled_flash_kernel_is_not_captured():
    module = FunctionModule(attend)
    with sdpa_kernel(SDPBackend.MATH):
        ours = ORTModule(module, rng="torch")
        _check_step(ours, module, _tokens())
    assert "FlashAttention" not in _types(ours)


def test_bool_mask_of_flash_attention_raises():
    """Capture converts bool masks to additive ones: adding True as 1 would be wrong."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="bools")
    op = builder(graph)
    q, mask = op.constant(torch.randn(1, 2, 3, 4), ir.DataType.FLOAT), op.constant([[True] * 3] * 3, ir.DataType.BOOL)
    with pytest.raises(GraphError, match="supports only additive masks"):
        op.own.FlashAttention(q, q, q, mask)


def _operands(shape=(2, 3, 4, 8), keys=5, groups=1, dtype=torch.float64):
    b, h, _, e = shape
    q = torch.randn(shape, dtype=dtype)
    return q, torch.randn(b, h // groups, keys, e, dtype=dtype), torch.randn(b, h // groups, keys, e, dtype=dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_flash_kernel_matches_math_path(causal, groups):
    """Their outputs are interchangeable: forward of one and backward of the other may run in the same step."""
    q, k, v = _operands(groups=groups)
    mask = None if causal else torch.randn(4, 5, dtype=q.dtype).masked_fill(torch.eye(4, 5) > 0, float("-inf"))
    if mask is not None:
        mask[2] = float("-inf")
    dy = torch.randn_like(q)
    assert _runs_flash(q, k, v, mask, causal, None)
    flash = attention(q, k, v, mask, causal, None)
    flash_gradients = attention_backward(dy, q, k, v, mask, *flash, causal, None)
    with sdpa_kernel(SDPBackend.MATH):
        assert not _runs_flash(q, k, v, mask, causal, None)
        math_path = attention(q, k, v, mask, causal, None)
        gradients = attention_backward(dy, q, k, v, mask, *math_path, causal, None)
    expected = (*flash, *flash_gradients)
    assert_each_no_worse("result", (*math_path, *gradients), expected, expected)


@pytest.mark.parametrize("keys", [0, 1, 5])
def test_queries_with_strided_rows_run_the_math_path(keys):
    q, k, v = _operands(keys=keys)
    q = q.mT.contiguous().mT
    assert not _runs_flash(q, k, v, None, False, None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = sdpa(*leaves)
    dy = torch.randn_like(output)
    y, logsumexp = attention(q, k, v, None, False, None)
    gradients = attention_backward(dy, q, k, v, None, y, logsumexp, False, None)
    expected = [output, *torch.autograd.grad(output, leaves, dy)]
    assert_each_no_worse("result", [y, *gradients], expected, expected)


@pytest.mark.parametrize("hidden", [False, True])
def test_the_gradient_of_like_values_is_not_lost_to_rounding(hidden: bool) -> None:
    """Each cotangent of a probability is 1024 + i/8, exact in float32; the gradient rests on its digits i alone."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 3, 4), torch.randn(1, 4, 9, 4)
    v = 1024 + torch.randint(0, 8, (1, 4, 9, 1)) / 8
    mask = torch.ones(3, 9, dtype=torch.bool)
    if hidden:
        mask[:, 5:] = False
        v[:, :, 5:] = 1e30  # what no row attends to has no part in the sum
    dy = torch.ones(1, 4, 3, 1)
    got = attend_backward(dy, q, k, v, ScoreOptions(None, None, mask), None, False)
    exact = attend_backward(*(x.double() for x in (dy, q, k, v)), ScoreOptions(None, None, mask), None, False)
    for gradient, right in zip(got[:2], exact[:2], strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=0, atol=2e-6 * right.abs().max().item())
