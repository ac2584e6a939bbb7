"""Captures of PyTorch's convolutions, which run PyTorch's own kernels: results are bitwise equal."""

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.errors import GraphError
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.convolution.input_gradient import gradients_in_blocks
from tests.op_case import Spec
from tests.ops.captures import check_capture
from tests.ops.modules import check_module, ops_of
from tests.thinned import slow_but_every

X = {1: (4, 9), 2: (4, 9, 8), 3: (4, 6, 5, 7)}


def calls(rank: int, *batches: int) -> list[list[torch.Tensor]]:
    """Return inputs of several batch sizes; every second one has larger spatial sizes."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(n, X[rank][0], *(s + index % 2 for s in X[rank][1:])) for index, n in enumerate(batches)]
    return [[torch.randn(shape, generator=generator)] for shape in shapes]


CONVOLUTIONS = (
    nn.Conv1d(4, 6, 3, stride=2, padding=1),
    nn.Conv2d(4, 6, 3),
    nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2, bias=False),
    nn.Conv2d(4, 8, 3, groups=4),
    nn.Conv2d(4, 6, 3, padding="same"),
    nn.Conv2d(4, 6, (3, 4), padding="same", dilation=(1, 3)),
    nn.Conv1d(4, 6, 2, padding="same"),
    nn.Conv2d(4, 6, 3, padding="valid", stride=2),
    nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
    nn.Conv3d(4, 6, 2, stride=2),
    nn.ConvTranspose1d(4, 6, 3, stride=2),
    nn.ConvTranspose2d(4, 6, 3),
    nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2, bias=False),
    nn.ConvTranspose3d(4, 6, 2, stride=2),
)


@pytest.mark.parametrize("module", slow_but_every(2, CONVOLUTIONS), ids=str)
def test_convolution_is_bitwise_equal_to_eager(module):
    rank = module.weight.dim() - 2
    ours = check_module(module, *calls(rank, 3, 2, 1), exact=True, aten=module.padding_mode != "zeros")
    op_type = "ConvTranspose" if isinstance(module, nn.modules.conv._ConvTransposeNd) else "Conv"
    assert f"ai.onnx::{op_type}" in ops_of(ours)


@pytest.mark.parametrize("channels", [16, 24, 32])
@pytest.mark.parametrize(("strides", "pads"), [([1, 1], [1, 1]), ([1, 1], [0, 2]), ([2, 2], [1, 1])])
def test_gradient_of_channels_last_images_is_as_exact_as_of_contiguous_ones(channels, strides, pads):
    """PyTorch's kernel for channels_last adds all output channels in a row: 1.3 to 1.4 times the mean error."""
    torch.manual_seed(0)
    x, w = torch.randn(4, channels, 20, 20), torch.randn(channels, channels, 3, 3)
    dy = torch.randn_like(torch.conv2d(x, w, None, strides, pads))

    def run(function, memory_format, dtype):
        images = (t.to(dtype).contiguous(memory_format=memory_format) for t in (dy, x))
        return function(*images, w.to(dtype), strides, pads, [1, 1], [True, True, True])

    def eager(dy, x, w, *options):
        *geometry, mask = options
        return torch.ops.aten.convolution_backward(dy, x, w, [w.size(0)], *geometry, False, [0, 0], 1, mask)

    exact = run(eager, torch.contiguous_format, torch.float64)
    contiguous = run(eager, torch.contiguous_format, torch.float32)
    got = run(gradients_in_blocks, torch.channels_last, torch.float32)
    for mine, theirs, right in zip(got, contiguous, exact, strict=True):
        assert (mine - right).pow(2).mean() <= 1.2**2 * (theirs - right).pow(2).mean()
    assert got[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [True, False, True], [False] * 3])
def test_gradients_in_blocks_are_those_of_the_mask(mask):
    x, w = torch.randn(2, 3, 7, 7), torch.randn(24, 3, 3, 3)
    dy = torch.randn(2, 24, 5, 5).contiguous(memory_format=torch.channels_last)
    got = gradients_in_blocks(dy, x, w, [1, 1], [0, 0], [1, 1], mask)
    assert [gradient is not None for gradient in got] == mask


def test_a_convolution_in_channels_last_computes_the_gradient_of_its_images_in_blocks():
    module = ORTModule(nn.Sequential(nn.Conv2d(3, 24, 3), nn.Conv2d(24, 24, 3), nn.Conv2d(24, 8, 3)))
    module(torch.randn(2, 3, 12, 12)).sum().backward()
    (backward,) = engine_of(module).newest().unit._backwards.values()
    assert "gradients_in_blocks" in backward.program.source


def test_only_required_gradients_are_computed():
    """With a frozen weight, a frozen bias, and an input that requires no gradient."""
    for frozen in ("weight", "bias"):
        module = nn.Conv2d(4, 6, 3)
        getattr(module, frozen).requires_grad_(False)
        check_module(module, *calls(2, 3, 2), exact=True)
    check_capture(lambda x, w: F.conv2d(x.detach(), w), Spec("n 4 8 h"), Spec("6 4 3 3"), sizes=({"n": 2, "h": 5},))


@pytest.mark.everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_float64_and_bfloat16_are_bitwise_equal_to_eager(dtype, described_machine):
    """The described processor has bfloat16 instructions; on others the operands may be widened."""
    described_machine("amx")
    check_module(nn.Conv2d(4, 6, 3, padding=1), *calls(2, 3, 2), dtype=dtype, exact=True)
    check_module(nn.ConvTranspose2d(4, 6, 3, stride=2), *calls(2, 3, 2), dtype=dtype, exact=True)


@pytest.mark.everywhere
def test_bfloat16_on_this_processor_matches_eager():
    check_module(nn.Conv2d(4, 6, 3, padding=1), *calls(2, 3, 2), dtype=torch.bfloat16)
    check_module(nn.ConvTranspose2d(4, 6, 3, stride=2), *calls(2, 3, 2), dtype=torch.bfloat16)


def test_autocast_matches_eager():
    check_module(nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 2)), *calls(2, 3, 2), autocast=True)


def test_channels_last_input_gives_channels_last_output():
    module = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 2)).to(memory_format=torch.channels_last)
    inputs = [[x.to(memory_format=torch.channels_last)] for [x] in calls(2, 3, 2)]
    ours = check_module(module, *inputs, exact=True)
    assert ours(inputs[0][0]).is_contiguous(memory_format=torch.channels_last)


def test_single_sample_without_a_batch_axis():
    check_module(nn.Conv2d(4, 6, 3), *([x[0]] for [x] in calls(2, 3, 2)), exact=True)
    check_module(nn.ConvTranspose1d(4, 6, 3), *([x[0]] for [x] in calls(1, 3, 2)), exact=True)


def test_torch_convolution_matches_eager():
    check_capture(
        lambda x, w, b: torch.convolution(x, w, b, [2, 1], [1, 0], [1, 1], False, [0, 0], 2),
        Spec("n 4 h 6"),
        Spec("6 2 3 3"),
        Spec("6"),
        sizes=({"n": 3, "h": 6}, {"n": 2, "h": 9}),
    )


def test_asymmetric_padding_raises():
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23})
    op = builder(graph)
    x, w = ir.Value(name="x"), ir.Value(name="w")
    for value, shape in ((x, ("n", 4, 8, 8)), (w, (6, 4, 3, 3))):
        set_type(value, TensorType(ir.DataType.FLOAT, shape))
    with pytest.raises(GraphError, match="same padding at both ends"):
        op.Conv(x, w, pads=[1, 0, 0, 1])


def test_convolution_without_input_channels_stays_an_aten_node():
    """PyTorch then returns no output channels, whatever the weight's shape is."""
    check_capture(F.conv1d, Spec("n 0 h"), Spec("3 0 1"), aten=True, sizes=({"n": 3, "h": 6}, {"n": 2, "h": 9}))


def test_an_input_without_elements_may_have_another_dtype_than_the_weight():
    module = nn.Conv1d(4, 6, 3, bias=False)
    x = torch.ones(0, 4, 6, dtype=torch.float64)
    got, expected = ORTModule(module, fallback_policy="FALLBACK_DISABLE")(x), module(x)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
