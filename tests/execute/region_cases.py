"""Parts to fuse, a module of two blocks, and a stand-in for the compiler, for the tests of fused regions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.program import Program
from onnxtrain.execute.regions import program as fused
from onnxtrain.execute.regions import request
from onnxtrain.execute.regions.program import FusedProgram
from onnxtrain.execute.regions.request import Request
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.dtypes import ONNX_DTYPES
from onnxtrain.plan.cut import Part, single_part
from onnxtrain.plan.regions import Region, find_regions
from onnxtrain.plan.storage import Storages
from onnxtrain.testing import assert_no_worse_than_eager

Build = Callable[..., Any]
SIZES = {"b": 5, "s": 7, "h": 11}
CPU = torch.device("cpu")


def part_of(build: Build, dims: Sequence[str], dtype: torch.dtype = torch.float32) -> Part:
    """The graph that `build` makes of inputs with these shapes, as one part; letters are dynamic sizes."""
    inputs = []
    for index, words in enumerate(dims):
        value = ir.Value(name=f"x{index}")
        shape = tuple(int(w) if w.isdigit() else w for w in words.split())
        set_type(value, TensorType(ONNX_DTYPES[dtype], shape))
        inputs.append(value)
    op = builder(ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}, name="example"))
    outputs = build(op, *inputs)
    op.graph.outputs.extend(outputs if isinstance(outputs, tuple) else (outputs,))
    return single_part(ir.Model(op.graph, ir_version=10))


def regions_of(part: Part) -> tuple[Part, tuple[Region, ...]]:
    result = find_regions(part, Storages(part.nodes, SIZES, "cpu"))
    return result.part, result.regions


def names(regions: Sequence[Region]) -> list[str]:
    return [str(region) for region in regions]


def gated(op: Builder, gate: ir.Value, up: ir.Value) -> ir.Value:
    return op.Mul(op.ms.QuickGelu(gate, alpha=1.0), up)


def gated_backward(op: Builder, dy: ir.Value, gate: ir.Value, up: ir.Value, silu: ir.Value) -> tuple[ir.Value, ...]:
    return op.ms.QuickGeluGrad(op.Mul(dy, up), gate, alpha=1.0), op.Mul(dy, silu)


def gelu_gated(op: Builder, gate: ir.Value, up: ir.Value) -> ir.Value:
    return op.Mul(op.ms.Gelu(gate), up)


def gelu_gated_backward(op: Builder, dy: ir.Value, gate: ir.Value, up: ir.Value) -> tuple[ir.Value, ...]:
    return op.ms.GeluGrad(op.Mul(dy, up), gate), op.Mul(dy, op.ms.Gelu(gate))


def added_norm(op: Builder, x: ir.Value, residual: ir.Value, scale: ir.Value) -> tuple[ir.Value, ...]:
    total = op.Add(x, residual)
    y, inv_std = op.ms.SimplifiedLayerNormalization(total, scale, axis=-1, epsilon=1e-6)
    return total, y, inv_std


def norm_backward(op: Builder, dy: ir.Value, x: ir.Value, scale: ir.Value, inv_std: ir.Value, more: ir.Value) -> Any:
    dx, dscale = op.ms.SimplifiedLayerNormalizationGrad(dy, x, scale, inv_std, axis=-1)
    return op.Add(dx, more), dscale


def softmax_of_scaled(op: Builder, x: ir.Value, mask: ir.Value) -> ir.Value:
    return op.Softmax(op.Add(op.Mul(x, op.scalar(0.125, like=x)), mask), axis=-1)


def layer_norm_of_sum(op: Builder, x: ir.Value, residual: ir.Value, scale: ir.Value, b: ir.Value) -> ir.Value:
    return op.own.LayerNormalization(op.Add(x, residual), scale, b, axis=-1, epsilon=1e-5)[0]


def summed(op: Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    return op.ReduceSum(op.Exp(op.Sub(x, y)), op.constant([-1], ir.DataType.INT64), keepdims=1)


KINDS: dict[str, tuple[Build, Sequence[str]]] = {
    "silu * up": (gated, ["b s h", "b s h"]),
    "silu * up, backward": (gated_backward, ["b s h"] * 4),
    "gelu * up": (gelu_gated, ["b s h", "b s h"]),
    "gelu * up, backward": (gelu_gated_backward, ["b s h"] * 3),
    "add + RMS norm": (added_norm, ["b s 48", "b s 48", "48"]),
    "RMS norm, backward": (norm_backward, ["b s 48", "b s 48", "48", "b s 1", "b s 48"]),
    "scaled softmax": (softmax_of_scaled, ["b s h", "b 1 h"]),
    "add + layer norm": (layer_norm_of_sum, ["b h 40", "b h 40", "40", "40"]),
    "sum": (summed, ["b s h", "b s h"]),
}


def nodes_as_kernel(path: Path) -> Callable[[Sequence[torch.Tensor]], Any]:
    """The kernel of a fake compiler: the region of a request, run node by node."""
    model, _ = request.read_request(path)
    program = Program(single_part(model), "written", CPU)
    return lambda tensors: program.run(tensors, ())[0]


def written(folder: Path, part: Part) -> Path:
    shapes = [[SIZES[s] if isinstance(s, str) else s for s in sizes.dims_of(v)] for v in part.inputs]
    folder.mkdir(parents=True, exist_ok=True)
    Request(part, shapes).write(folder)
    return folder


def a_request(width: int = 11) -> Request:
    dims = f"b {width}"
    return Request(regions_of(part_of(gated, [dims, dims]))[1][0].part, [[5, width], [5, width]])


class Block(nn.Module):
    def __init__(self, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Gated(nn.Module):
    """Elementwise ops between matmuls: one region in forward, and one in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x).tanh() * self.up(x)


def results(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = model(x)
    y.mul(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def fused_programs(monkeypatch: pytest.MonkeyPatch) -> list[FusedProgram]:
    """Collect every fused program made from now on; each compiles after three calls, at any size."""
    programs: list[FusedProgram] = []
    watch = fused.watch

    def watched(*arguments: Any) -> FusedProgram | None:
        program = watch(*arguments)
        if program is not None:
            programs.append(program)
        return program

    monkeypatch.setattr(fused, "watch", watched)
    monkeypatch.setattr(fused, "_CALLS", 3)
    monkeypatch.setattr(fused, "MIN_ELEMENTS", 1)
    return programs


def wait_for(programs: Sequence[FusedProgram]) -> None:
    """Wait until all regions are compiled."""
    for program in programs:
        if program._thread is not None:
            program._thread.join()


class Trained:
    """A module of two blocks and a layer with its fused programs, and the same module in eager."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.programs = fused_programs(monkeypatch)
        torch.manual_seed(0)
        # The output is large, so the peak of memory is there, and regions may hold slightly more elsewhere.
        self.eager = nn.Sequential(Block(), Block(), nn.Linear(8, 128), nn.Tanh()).to(dtype)
        self.exact = copy.deepcopy(self.eager).double()
        self.module = ORTModule(copy.deepcopy(self.eager), **{"native": True, "rng": "fast", **options})
        self.dtype = dtype

    def check(self, *shape: int) -> None:
        x = torch.randn(*shape, 8, dtype=self.dtype)
        got = results(self.module, x)
        eager, exact = results(self.eager, x), results(self.exact, x.double())
        largest = max((v.abs().max().item() for v in exact.values() if v.numel()), default=0.0)
        for name, value in eager.items():
            ours = got[name] if name in got else got[f"_module.{name}"]
            assert_no_worse_than_eager(name, ours, value, exact[name], largest)

    def prepared(self) -> None:
        """Step until the fake compiler has built all regions."""
        for _ in range(4):
            self.check(3, 5)
        assert all(program._thread is not None for program in self.programs)
        wait_for(self.programs)
