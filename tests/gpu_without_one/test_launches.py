"""What a training step launches on a GPU: few kernels, on one device, without waiting for any of them."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.gpu_without_one.fake_gpu import needs_cuda_build
from tests.gpu_without_one.launches import PendingRows, Step, eager_bytes_kept, onnxtrain_step
from tests.gpu_without_one.models import MODELS

pytestmark = [needs_cuda_build, pytest.mark.slow]

# Launches of a layer, forward and backward, in eager PyTorch with flash attention and without dropout: counted on fake
# tensors, batch 8 x 512, bfloat16. Each dropout of a layer's activations adds one launch in each direction.
EAGER = {"bert": 42, "gpt2": 50, "llama": 109}
ACTIVATION_DROPOUTS = {"bert": 2, "gpt2": 2, "llama": 0}


@functools.cache
def step(name: str, layers: int, dropout: float, autocast: torch.dtype | None, narrow: bool) -> Step:
    make, inputs = MODELS[name]

    def module() -> torch.nn.Module:
        return make(layers, dropout).to(torch.bfloat16 if narrow else torch.float32)

    # Packing asks for the number of tokens: `docs/gpu.md` lists what waits.
    return onnxtrain_step(module, inputs, autocast=autocast, skip_padding="never")


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_launches_no_more_than_eager(name: str, dropout: float) -> None:
    if dropout and not ACTIVATION_DROPOUTS[name]:
        pytest.skip("it has no dropout of activations")
    one, two = (step(name, layers, dropout, None, True) for layers in (1, 2))
    count = len(two.forward) - len(one.forward) + len(two.backward) - len(one.backward)
    assert count <= EAGER[name] + 2 * (ACTIVATION_DROPOUTS[name] if dropout else 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def test_a_step_stays_on_its_device_and_waits_for_nothing(name: str, autocast: torch.dtype | None) -> None:
    """Nothing falls back; under autocast as well."""
    recorded = step(name, 1, 0.1, autocast, False)
    for launches in (recorded.forward, recorded.backward):
        assert not launches.waits()
        assert not launches.on_several_devices()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_attention_is_one_kernel_in_each_direction(name: str) -> None:
    """No scores in memory, and no matmul in float32 under autocast."""
    recorded = step(name, 1, 0.1, torch.bfloat16, False)
    for launches in (recorded.forward, recorded.backward):
        assert sum("attention" in operator for operator in launches.counts()) == 1
        products = [k for k in launches.kernels if k.operator in ("mm", "bmm", "addmm", "baddbmm")]
        assert {dtype for k in products for dtype in k.reads} == {torch.bfloat16}


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_keeps_no_more_bytes_than_eager(name: str, dropout: float) -> None:
    """Between forward and backward: of a layer, and of a model of one layer with its vocabulary."""
    make, inputs = MODELS[name]
    eager = [eager_bytes_kept(lambda n=n: make(n, dropout).to(torch.bfloat16), inputs) for n in (1, 2)]
    kept = [step(name, layers, dropout, None, True).kept for layers in (1, 2)]
    assert kept[0] <= eager[0]
    assert kept[1] - kept[0] <= eager[1] - eager[0]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_no_matmul_has_rows_that_are_not_aligned(name: str) -> None:
    """The vocabularies of 30,522 and 50,257 are padded."""
    recorded = step(name, 1, 0.0, None, True)
    matmuls = [k for p in (recorded.forward, recorded.backward) for k in p.kernels if k.operator in ("mm", "addmm")]
    padded = [k for k in matmuls if any(size > 30000 for shape in (*k.read_shapes, *k.shapes) for size in shape)]
    assert len(padded) == 3, "the logits, and both gradients"
    assert all(size % 64 == 0 for k in matmuls for shape in (*k.read_shapes, *k.shapes) for size in shape)


def test_labels_are_counted_before_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the count, and not for the layers."""
    monkeypatch.setattr("onnxtrain.ops.index.labelled_rows.PendingInt", PendingRows)
    make, inputs = MODELS["bert"]
    recorded = onnxtrain_step(
        lambda: make(1, 0.1).to(torch.bfloat16), inputs, skip_padding="never", keep_outputs=("loss",)
    )
    operators = [kernel.operator for kernel in recorded.forward.kernels]
    assert not recorded.forward.waits()
    assert operators.index("count_nonzero") < operators.index("embedding")
    assert operators.index("nonzero_static") > operators.index("addmm")
