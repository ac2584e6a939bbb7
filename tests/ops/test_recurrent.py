"""Captures of LSTM, GRU and RNN modules: one capture for all lengths, as accurate as eager with all options."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import DebugOptions, ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.onnx_file import without_case_suffix
from onnxtrain.ops.recurrent import layer_kernels
from onnxtrain.ops.recurrent.cells import CELLS, Cell
from onnxtrain.testing import assert_no_worse_than_eager
from tests.processor import skip_without_narrow_lstms
from tests.thinned import covering, slow_but_every, slow_except

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
LENGTHS = ((4, 3), (1, 3), (7, 1))  # steps and samples
WIDTH, HIDDEN = 6, 5


class Recurrent(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layer = KINDS[kind](WIDTH, HIDDEN, **options)

    def forward(self, x: torch.Tensor, *hx: torch.Tensor) -> list[torch.Tensor]:
        y, last = self.layer(x, (tuple(hx) if len(hx) > 1 else hx[0]) if hx else None)
        last = last if isinstance(last, tuple) else (last,)
        return [torch.relu(y) + y[:, :1], *(torch.tanh(state) for state in last)]


def results(run: Any, module: nn.Module, inputs: list[torch.Tensor], autocast: bool = False) -> list[torch.Tensor]:
    """Return the outputs, and the gradients of inputs and parameters."""
    module.zero_grad(set_to_none=True)
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        outputs = run(*inputs)
    generator = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    torch.autograd.backward(outputs, cotangents)
    leaves = [*inputs, *module.parameters()]
    return [*(o.detach() for o in outputs), *(t.grad for t in leaves if t.grad is not None)]


def inputs_of(module: Recurrent, steps: int, samples: int, hx: bool) -> list[torch.Tensor]:
    layer = module.layer
    x = torch.randn(*((samples, steps) if layer.batch_first else (steps, samples)), WIDTH)
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    count = 2 if isinstance(layer, nn.LSTM) else 1
    first = [torch.randn(rows, samples, layer.proj_size or HIDDEN), torch.randn(rows, samples, HIDDEN)]
    return [x, *first[: count if hx else 0]]


def compare(module: Recurrent, hx: bool = False, autocast: bool = False, rng: str = "fast") -> ORTModule:
    """Compare with eager at all lengths with one capture, in float32 and, without autocast, in float64."""
    for dtype in (torch.float32,) if autocast else (torch.float32, torch.float64):
        module = copy.deepcopy(module).to(dtype)
        ours, exact = ORTModule(copy.deepcopy(module), rng=rng), copy.deepcopy(module).double()
        for steps, samples in LENGTHS:
            inputs = [t.to(module.layer.weight_hh_l0) for t in inputs_of(module, steps, samples, hx)]
            got = results(ours, ours, inputs, autocast)
            eager = results(module, module, inputs, autocast)
            precise = results(exact, exact, [t.double() for t in inputs])
            largest = max(float(t.abs().max()) for t in precise)
            for index, (g, e, x) in enumerate(zip(got, eager, precise, strict=True)):
                assert_no_worse_than_eager(f"{steps}x{samples}: {index}", g, e, x, largest)
        assert engine_of(ours).captures == 1
    return ours


# Options of the module, and whether initial states are passed.
FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "batch first": ({"batch_first": True}, False),
    "both directions, two layers": ({"bidirectional": True, "num_layers": 2}, True),
    "no bias": ({"bias": False, "num_layers": 2, "batch_first": True}, True),
}


@pytest.mark.parametrize(("kind", "form"), covering(KINDS, slow_but_every(2, FORMS)))
def test_all_lengths_on_one_capture(kind: str, form: str) -> None:
    torch.manual_seed(0)
    options, hx = FORMS[form]
    compare(Recurrent(kind, **options), hx)


def test_relu() -> None:
    torch.manual_seed(0)
    compare(Recurrent("rnn", nonlinearity="relu", bidirectional=True))


@pytest.mark.everywhere
@pytest.mark.parametrize("kind", slow_but_every(3, KINDS))
def test_autocast(kind: str) -> None:
    if kind == "lstm":
        skip_without_narrow_lstms()
    torch.manual_seed(0)
    compare(Recurrent(kind, num_layers=2, bidirectional=True, batch_first=True), autocast=True)


@pytest.mark.parametrize("kind", slow_except(KINDS, "gru"))
def test_eval_mode_and_no_gradient(kind: str) -> None:
    torch.manual_seed(0)
    module = Recurrent(kind, num_layers=2, dropout=0.5).eval()
    ours = compare(module)
    x = torch.randn(3, 2, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for got, expected in zip(ours(x), copy.deepcopy(module).double()(x), strict=True):
            assert_no_worse_than_eager("no gradient", got, expected, expected)


@pytest.mark.parametrize("kind", slow_except(KINDS, "lstm"))
def test_dropout_between_layers_samples_as_eager(kind: str) -> None:
    torch.manual_seed(0)
    compare(Recurrent(kind, num_layers=3, dropout=0.4, batch_first=True, bidirectional=True), rng="torch")


@pytest.mark.parametrize(("frozen", "kind"), covering(["weight", ""], KINDS))
def test_frozen_weights(frozen: str, kind: str) -> None:
    torch.manual_seed(0)
    module = Recurrent(kind, num_layers=2)
    for name, parameter in module.layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    compare(module)


def test_lstm_with_projections_stays_an_aten_node() -> None:
    """ONNX lacks projections; the number of steps is still a dynamic dimension."""
    torch.manual_seed(0)
    compare(Recurrent("lstm", proj_size=3, batch_first=True), hx=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_a_gpu_run_cudnn(kind: str) -> None:
    """All layers are one ATen node, with eager's kernel."""
    torch.manual_seed(0)
    compare(Recurrent(kind, num_layers=2, bidirectional=True).cuda())


def test_without_onednn() -> None:
    """Our LSTM kernels run in float32; the flag may change between forward and backward."""
    torch.manual_seed(0)
    module = Recurrent("lstm", bidirectional=True)
    ours = ORTModule(copy.deepcopy(module))
    inputs = inputs_of(module, 4, 3, hx=True)
    double = copy.deepcopy(module).double()
    wide = [t.double().requires_grad_() for t in inputs]
    exact = double(*wide)
    exact_gradients = torch.autograd.grad(exact, wide, [torch.ones_like(t) for t in exact])
    for in_forward, in_backward in ((False, False), (False, True), (True, False)):
        with torch.backends.mkldnn.flags(enabled=in_forward):
            outputs = ours(*(t.requires_grad_() for t in inputs))
            eager = module(*inputs)
        with torch.backends.mkldnn.flags(enabled=in_backward):
            got, expected = (torch.autograd.grad(o, inputs, [torch.ones_like(t) for t in o]) for o in (outputs, eager))
        for g, e, x in zip(outputs, eager, exact, strict=True):
            assert_no_worse_than_eager("output", g.detach(), e.detach(), x.detach())
        for g, e, x in zip(got, expected, exact_gradients, strict=True):
            assert_no_worse_than_eager("gradient", g, e, x)


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_without_steps_raises_as_in_eager(kind: str) -> None:
    module = Recurrent(kind)
    ours = ORTModule(copy.deepcopy(module))
    ours(torch.randn(3, 2, WIDTH))
    for run in (module.layer, ours):
        with pytest.raises(RuntimeError, match="sequence length"):
            run(torch.randn(0, 2, WIDTH))


def nodes(path: Any) -> Iterator[str]:
    return (without_case_suffix(node.op_type) for node in ir.load(path).graph)


def test_graph_has_one_node_per_layer(tmp_path: Any) -> None:
    module = Recurrent("lstm", num_layers=2, dropout=0.2)
    ours = ORTModule(module, DebugOptions(save_onnx=True, onnx_prefix="m", save_path=tmp_path))
    ours(torch.randn(4, 3, WIDTH))[0].sum().backward()
    assert [n for n in nodes(tmp_path / "m_torch_exported_training.onnx") if n in ("LSTMLayer", "Dropout", "ATen")] == [
        "LSTMLayer",
        "Dropout",
        "LSTMLayer",
    ]
    assert list(nodes(tmp_path / "m_optimized_training.onnx")).count("LSTMLayerGrad") == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("count", [1, 2])
def test_results_share_no_memory(cell: Cell, count: int, dtype: torch.dtype) -> None:
    """A program may overwrite each result in place, so the last h must not be a view of y, nor c of the saved bytes."""
    rows = cell.gates * HIDDEN
    shapes = [(rows, WIDTH), (rows, HIDDEN), (rows,), (rows,)] * count
    weights = [torch.randn(shape, dtype=dtype) for shape in shapes]
    x, h0 = torch.randn(4, 3, WIDTH, dtype=dtype), torch.randn(count, 3, HIDDEN, dtype=dtype)
    c0 = h0.clone() if cell.has_state else None
    outputs = layer_kernels.layer(cell, False, True, False, x, h0, c0, *weights)
    y, saved = outputs[0], outputs[-count:]
    c = outputs[2] if cell.has_state else None
    dc = None if c is None else torch.ones_like(c)
    gradients = layer_kernels.layer_backward(
        cell, False, (True, True), False, torch.ones_like(y), torch.ones_like(h0), dc, x, h0, c0, weights, y, c, *saved
    )
    for tensors in (outputs, gradients):
        pointers = [t.untyped_storage().data_ptr() for t in (*tensors, x, h0, *weights) if t.numel()]
        assert len(set(pointers)) == len(pointers)
