"""Check captured modules with parameters and buffers against eager PyTorch."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.graph.values import ATEN
from onnxtrain.testing import assert_no_worse_than_eager
from tests.torch_version import max_captures


def _step(module: torch.nn.Module, inputs: Sequence[Any], dtype: torch.dtype, autocast: bool) -> dict[str, Any]:
    """Return outputs, gradients and buffers after one forward and backward. Gradients accumulate over calls."""
    leaves = [t.detach().clone() for t in inputs]
    leaves = [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in leaves]
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        result = module(*leaves)
    outputs = [o for o in (result if isinstance(result, (tuple, list)) else [result]) if o is not None]
    generator = torch.Generator().manual_seed(5)
    pairs = [(o, torch.randn(o.shape, generator=generator).to(o)) for o in outputs if o.requires_grad]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
    results = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    results |= {f"gradient of input {i}": t.grad for i, t in enumerate(leaves) if t.requires_grad}
    results |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.requires_grad}
    return results | {f"buffer {name}": b.clone() for name, b in module.named_buffers()}


def check_module(
    module: torch.nn.Module,
    *calls: Sequence[Any],
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    aten: bool = False,
    exact: bool = False,
) -> ORTModule:
    """Compare outputs, gradients and buffers of the captured `module` with eager's, for all calls with one capture.

    Args:
        module: in the mode (train, eval) to test. It is not modified.
        calls: the inputs of each call; they may differ in sizes.
        dtype: of floating-point parameters, buffers and inputs.
        autocast: whether to run under CPU autocast in bfloat16.
        aten: whether the graph may have ATen nodes.
        exact: whether results must be bitwise equal, because the same kernels run in the same order.
    """
    eager, ours = copy.deepcopy(module).to(dtype), ORTModule(copy.deepcopy(module).to(dtype))
    reference = copy.deepcopy(module).double()
    for number, inputs in enumerate(calls):
        with warnings.catch_warnings():  # a fallback is an error
            warnings.filterwarnings("error", message=".*runs in PyTorch")
            got = _step(ours, inputs, dtype, autocast)
        expected, precise = _step(eager, inputs, dtype, autocast), _step(reference, inputs, torch.float64, False)
        assert got.keys() == expected.keys()
        for name, eager_value in expected.items():
            label = f"{name} of call {number}"
            if eager_value is None:
                assert got[name] is None, f"{label}: eager has none"
            elif exact:
                torch.testing.assert_close(
                    got[name], eager_value, rtol=0, atol=0, equal_nan=True, msg=lambda m, w=label: f"{w}: {m}"
                )
            else:
                assert_no_worse_than_eager(label, got[name], eager_value, precise[name])
    engine = engine_of(ours)
    assert 1 <= engine.captures <= max_captures(ours), f"{engine.captures} captures"
    operators = [n.attributes["operator"].as_string() for n in engine._newest.captured.model.graph if n.domain == ATEN]
    assert aten or not operators, f"not converted: {', '.join(operators)}"
    return ours


def ops_of(ours: ORTModule) -> list[str]:
    """Return the ops of the captured graph, each as domain::name."""
    engine = engine_of(ours)
    return [f"{n.domain or 'ai.onnx'}::{n.op_type}" for n in engine._newest.captured.model.graph]
