"""Fused regions with the real compiler: parts, models, a second process."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.program import Program
from onnxtrain.execute.regions import build as building
from onnxtrain.execute.regions.build import build
from onnxtrain.execute.regions.call import RegionCall, load
from onnxtrain.execute.regions.request import Request
from onnxtrain.graph import sizes
from onnxtrain.plan.cut import Part
from onnxtrain.testing import assert_no_worse_than_eager
from tests.execute.region_cases import CPU, KINDS, SIZES, Trained, fused_programs, part_of, regions_of, wait_for
from tests.zoo.checks import Comparison
from tests.zoo.models import ZOO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("regions_cache"),
    pytest.mark.compiler,
]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *itertools.product(KINDS, (torch.float32, torch.float64)),
        *itertools.product(("silu * up, backward", "scaled softmax", "add + layer norm"), (torch.bfloat16,)),
    ],
    ids=str,
)
def test_a_compiled_region_equals_its_nodes(kind: str, dtype: torch.dtype) -> None:
    build, dims = KINDS[kind]
    part = regions_of(part_of(build, dims, dtype))[1][0].part
    shapes = [[SIZES[s] if isinstance(s, str) else s for s in sizes.dims_of(v)] for v in part.inputs]
    call = compiled(part, shapes)
    for b, s, h in ((2, 3, 5), (4, 2, 64), (33, 9, 130), (1, 3, 4), (3, 0, 2), (2, 2, 2)):
        symbol_values = {"b": b, "s": s, "h": h}
        inputs = [
            torch.randn([sizes.evaluate(n, symbol_values) for n in sizes.dims_of(v)], dtype=dtype) for v in part.inputs
        ]
        compare(call, part, inputs)
    with_special = [t.clone() for t in inputs]
    for tensor in with_special:
        tensor.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=dtype)[: tensor.numel()]
    compare(call, part, with_special)


def compiled(part: Part, shapes: Sequence[Sequence[int]]) -> RegionCall:
    ((_, library),) = build([Request(part, shapes)])
    assert isinstance(library, Path), library
    return RegionCall(part, load(library))


def compare(call: RegionCall, part: Part, inputs: Sequence[torch.Tensor]) -> None:
    got = call(*inputs)
    nodes = Program(part, "nodes", CPU)
    own, exact = nodes.run(inputs, ())[0], nodes.run([t.double() for t in inputs], ())[0]
    for value, a, b, c in zip(part.outputs, got, own, exact, strict=True):
        assert value is not None
        assert_no_worse_than_eager(str(value.name), a, b, c)


def test_a_model_trains_with_compiled_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(monkeypatch, kernels="fused-all")
    trained.prepared()
    assert all(program.settled for program in trained.programs)
    for shape in ((3, 5), (1, 4), (4, 1), (2, 0), (7, 9), (33, 2)):
        trained.check(*shape)


def test_a_model_trains_with_cached_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a second process, without running the compiler."""
    outputs = []
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(TRAINS)], capture_output=True, text=True, check=False
        )
        assert child.returncode == 0, child.stderr
        outputs.append(json.loads(child.stdout.splitlines()[-1]))
    first, second = outputs
    assert first["compiled"] > 0
    assert second["compiled"] == 0
    assert first["calls"] == second["calls"] > 0
    assert first["gradient"] == second["gradient"]


TRAINS = """
    import json
    import torch
    from onnxtrain import ORTModule
    from onnxtrain.execute.regions import process, program as fused

    programs, compiled = [], []
    watch, compile = fused.watch, process.Process.compile
    fused.watch = lambda *a: programs.append(watch(*a)) or programs[-1]
    process.Process.compile = lambda *a: compiled.append(a) or compile(*a)
    fused._CALLS, fused.MIN_ELEMENTS = 1, 1

    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.RMSNorm(8), torch.nn.Linear(8, 256))
    module = ORTModule(block, rng="fast", kernels="fused-all", tuning=False)
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        x.grad = None
        module(x).square().sum().backward()
        for program in programs:
            if program._thread is not None:
                program._thread.join()
    calls = sum(len(program.calls) for program in programs)
    print(json.dumps({"compiled": len(compiled), "calls": calls, "gradient": x.grad.tolist()}))
"""


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_of_the_zoo_trains_with_compiled_regions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = fused_programs(monkeypatch)
    entry = next(e for e in ZOO if e.name == name)
    compare = Comparison(entry, torch.float32, wrap=lambda m: ORTModule(m, rng="fast", kernels="fused-all"))
    compare.change(nn.Module.eval)
    for _ in range(4):
        compare.train(*entry.sizes[0])
    wait_for(programs)
    assert sum(len(program.calls) for program in programs) > 4
    assert not building._refused
    for shape in entry.sizes:
        compare.train(*shape)
