"""Fused regions: which nodes join, that results stay, who swaps what when. Only slow tests compile in earnest."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.program import Program
from onnxtrain.execute.regions import build as building
from onnxtrain.execute.regions import call as calling
from onnxtrain.execute.regions import program as fused
from onnxtrain.execute.regions import request
from onnxtrain.execute.regions.call import RegionCall
from onnxtrain.execute.regions.program import FusedProgram
from onnxtrain.execute.regions.request import Request
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.native.build import BuildError, seal
from onnxtrain.native.compiler import find as find_compiler
from onnxtrain.ops import builder
from onnxtrain.ops.constructors import ONNX_DTYPES
from onnxtrain.ops.definition import OPSET
from onnxtrain.plan.cut import Part, whole
from onnxtrain.plan.regions import Region, find
from onnxtrain.plan.storage import Storages
from onnxtrain.testing import assert_no_worse_than_eager

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="compiled regions are for Linux"),
]

Build = Callable[..., Any]
SIZES = {"b": 5, "s": 7, "h": 11}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no region that did not compile in another test."""
    monkeypatch.setenv("ONNXTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "_refused", {})
    return tmp_path / "cache" / "regions"


def part_of(build: Build, dims: Sequence[str], dtype: torch.dtype = torch.float32) -> Part:
    """What `build` writes of inputs with these sizes (letters are open, numbers fixed), as one part."""
    inputs = []
    for index, words in enumerate(dims):
        value = ir.Value(name=f"x{index}")
        shape = tuple(int(w) if w.isdigit() else w for w in words.split())
        set_type(value, TensorType(ONNX_DTYPES[dtype], shape))
        inputs.append(value)
    op = builder(ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}, name="example"))
    made = build(op, *inputs)
    op.graph.outputs.extend(made if isinstance(made, tuple) else (made,))
    return whole(ir.Model(op.graph, ir_version=10))


def regions_of(part: Part) -> tuple[Part, tuple[Region, ...]]:
    return find(part, Storages(part.nodes, SIZES, "cpu"))


def names(regions: Sequence[Region]) -> list[str]:
    return [str(region) for region in regions]


# Which nodes join


def gated(op: Builder, gate: ir.Value, up: ir.Value) -> ir.Value:
    return op.Mul(op.ms.QuickGelu(gate, alpha=1.0), up)


def gated_backward(op: Builder, dy: ir.Value, gate: ir.Value, up: ir.Value, silu: ir.Value) -> tuple[ir.Value, ...]:
    return op.ms.QuickGeluGrad(op.Mul(dy, up), gate, alpha=1.0), op.Mul(dy, silu)


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
    "add + RMS norm": (added_norm, ["b s 48", "b s 48", "48"]),
    "RMS norm, backward": (norm_backward, ["b s 48", "b s 48", "48", "b s 1", "b s 48"]),
    "scaled softmax": (softmax_of_scaled, ["b s h", "b 1 h"]),
    "add + layer norm": (layer_norm_of_sum, ["b h 40", "b h 40", "40", "40"]),
    "sum": (summed, ["b s h", "b s h"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_one_region(kind: str) -> None:
    part = part_of(*KINDS[kind])
    _, (region,) = regions_of(part)
    tensor_nodes = [n for n in part.nodes if not part.host.issuperset(n.outputs)]
    assert list(region.part.nodes) == tensor_nodes
    assert set(region.part.outputs) == set(part.outputs)
    assert region.saved > 0


def test_only_measured_kinds_gain() -> None:
    assert {kind for kind, made in KINDS.items() if regions_of(part_of(*made))[1][0].gains} == {
        "silu * up",
        "silu * up, backward",
        "add + RMS norm",
        "RMS norm, backward",
    }


def test_what_would_make_a_cycle_stays_apart() -> None:
    def around(op: Builder, x: ir.Value, w: ir.Value) -> ir.Value:
        y = op.Exp(x)
        return op.Add(y, op.MatMul(y, w))

    assert regions_of(part_of(around, ["b 8", "8 8"]))[1] == ()


def apart(op: Builder, x: ir.Value, w: ir.Value, wide: ir.Value) -> ir.Value:
    """Both operators of the gate write over what they read, and a product stands between them."""
    silu = op.ms.QuickGelu(op.MatMul(x, w), alpha=1.0)
    return op.MatMul(op.Mul(silu, op.MatMul(x, op.Transpose(w, perm=[1, 0]))), wide)


def test_nodes_move_together_past_others() -> None:
    part, regions = regions_of(part_of(apart, ["b 8", "8 8", "8 64"]))
    assert names(regions) == ["QuickGelu + Mul"]
    assert [n.op_type for n in part.nodes] == ["MatMul", "Transpose", "MatMul", "QuickGelu", "Mul", "MatMul"]


def test_a_region_that_holds_more_memory_is_refused() -> None:
    """One call holds both inputs until its output is there: here that is the peak, above it is the wide product."""
    assert regions_of(part_of(apart, ["b 8", "8 8", "8 1"]))[1] == ()


def test_views_random_draws_and_integers_stay_outside() -> None:
    def mixed(op: Builder, x: ir.Value) -> ir.Value:
        halves = op.Mul(op.Reshape(op.Exp(x), op.constant([-1], ir.DataType.INT64)), op.scalar(0.5, like=x))
        dropped = op.Dropout(op.Exp(halves), op.scalar(0.5, ir.DataType.FLOAT), op.scalar(True, ir.DataType.BOOL))[0]
        return op.Cast(op.Exp(dropped), to=ir.DataType.INT64)

    _, regions = regions_of(part_of(mixed, ["b 8"]))
    assert names(regions) == ["Mul + Exp"]


def test_other_shapes_are_other_regions() -> None:
    def two(op: Builder, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ...]:
        return op.Exp(op.Exp(x)), op.Exp(op.Exp(y))

    assert names(regions_of(part_of(two, ["b 8", "s 8"]))[1]) == ["Exp + Exp"] * 2


# One region as a call


def nodes_as_kernel(path: Path) -> Callable[[Sequence[torch.Tensor]], Any]:
    """What a made-up compiler gives: the region that was written down, run node by node."""
    model, _ = request.read(path)
    program = Program(whole(model), "written", torch.device("cpu"))
    return lambda tensors: program.run(tensors, ())[0]


def written(folder: Path, part: Part) -> Path:
    shapes = [[SIZES[s] if isinstance(s, str) else s for s in sizes.of(v)] for v in part.inputs]
    folder.mkdir(parents=True, exist_ok=True)
    Request(part, shapes).write(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_is_written_down_whole(kind: str, tmp_path: Path) -> None:
    region = regions_of(part_of(*KINDS[kind]))[1][0]
    RegionCall(region.part, nodes_as_kernel(written(tmp_path, region.part)), timed=False)  # checks the kernel


def test_equal_regions_of_two_layers_are_compiled_once() -> None:
    def layers(op: Builder, x: ir.Value, w: ir.Value) -> ir.Value:
        return op.MatMul(gated(op, op.MatMul(gated(op, x, x), w), x), op.Concat(*[w] * 8, axis=1))

    first, second = regions_of(part_of(layers, ["b 8", "8 8"]))[1]
    shapes = [[5, 8], [5, 8]]
    assert len(first.part.inputs) == 1
    assert Request(first.part, shapes[:1]).key != Request(second.part, shapes).key
    third = regions_of(part_of(gated, ["h 8", "h 8"]))[1][0]
    assert Request(third.part, shapes).key == Request(second.part, [[9, 8], [9, 8]]).key


def test_a_kernel_that_is_wrong_is_refused(tmp_path: Path) -> None:
    part = regions_of(part_of(gated, ["b h", "b h"]))[1][0].part
    good = nodes_as_kernel(written(tmp_path, part))
    wrong: dict[str, Any] = {
        "off by": lambda tensors: [good(tensors)[0] * 1.001],
        "another tensor": lambda tensors: [tensors[0].mul_(torch.sigmoid(tensors[0])).mul_(tensors[1])],
        "the kernel gives": lambda tensors: [good(tensors)[0].double()],
    }
    for message, kernel in wrong.items():
        with pytest.raises(BuildError, match=message):
            RegionCall(part, kernel, timed=False)


def test_small_sizes_and_strides_go_by_the_nodes(tmp_path: Path) -> None:
    part = regions_of(part_of(gated, ["b h", "b h"]))[1][0].part
    kernel = nodes_as_kernel(written(tmp_path, part))
    calls: list[int] = []
    call = RegionCall(part, lambda tensors: (calls.append(1), kernel(tensors))[1], timed=False)
    calls.clear()
    for shape, taken in (((2, 2), 1), ((1, 4), 0), ((4, 1), 0), ((0, 3), 0), ((5, 3), 1)):
        x, y = torch.randn(shape), torch.randn(shape)
        assert torch.equal(call(x, y)[0], torch.nn.functional.silu(x) * y)
        assert len(calls) == taken, shape
        calls.clear()
    x = torch.randn(4, 6)
    assert torch.equal(call(x.T, x.T)[0], torch.nn.functional.silu(x.T) * x.T)
    assert not calls


@pytest.mark.parametrize(("kernel_s", "chosen"), [(1.0, "kernel"), (3.0, "nodes")])
def test_the_faster_way_stays(kernel_s: float, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own."""
    clock = [0.0]
    part = regions_of(part_of(gated, ["b h", "b h"]))[1][0].part
    kernel = nodes_as_kernel(written(tmp_path, part))
    call = RegionCall(part, kernel, timed=True)
    nodes = call._nodes
    monkeypatch.setattr(calling.time, "perf_counter", lambda: clock[0])

    def timed(run: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slower(*arguments: Any) -> Any:
            clock[0] += seconds
            return run(*arguments)

        return slower

    monkeypatch.setattr(call, "kernel", timed(kernel, kernel_s))
    monkeypatch.setattr(call, "_nodes", timed(nodes, 2.0))
    x = torch.randn(4, 4)
    while call.chosen is None:
        assert torch.equal(call(x, x)[0], torch.nn.functional.silu(x) * x)
    assert call.chosen == chosen
    assert call.gain() == 2.0 - kernel_s


# In a module


class Block(nn.Module):
    def __init__(self, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def results(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = model(x)
    y.mul(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


class Trained:
    """A module of two blocks and a layer, with its fused programs, and eager's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.programs: list[FusedProgram] = []
        watch = fused.watch

        def watched(*arguments: Any) -> FusedProgram | None:
            program = watch(*arguments)
            if program is not None:
                self.programs.append(program)
            return program

        monkeypatch.setattr(fused, "watch", watched)
        monkeypatch.setattr(fused, "_CALLS", 3)
        monkeypatch.setattr(fused, "LEAST", 1)
        torch.manual_seed(0)
        # What the last layer gives is large: the peak is there, and regions may hold a little more elsewhere.
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
            found = got[name] if name in got else got[f"_module.{name}"]
            assert_no_worse_than_eager(name, found, value, exact[name], largest)

    def prepared(self) -> None:
        """Steps until the compiler, which is made up, has done its work."""
        for _ in range(4):
            self.check(3, 5)
        for program in self.programs:
            assert program._work is not None
            program._work.join()


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A compiler that gives the region's own nodes; what it was asked for."""
    asked: list[Path] = []
    turn = threading.Lock()

    def build(wanted: Request, dump: Path | None) -> Path:
        folder = tmp_path / wanted.key
        with turn:  # both programs ask
            folder.mkdir(exist_ok=True)
            wanted.write(folder)
            asked.append(folder)
        return folder

    monkeypatch.setattr(fused, "build", build)
    monkeypatch.setattr(fused, "load", nodes_as_kernel)
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("regions", ["auto", "on"])
def test_a_model_trains_as_before_at_all_sizes(
    regions: str, dtype: torch.dtype, made_up: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(monkeypatch, dtype, regions=regions)
    trained.prepared()
    forward, backward = trained.programs
    assert forward.calls
    assert backward.calls
    for shape in ((3, 5), (1, 4), (4, 1), (2, 0), (0, 3), (7, 9), (3, 5)):
        trained.check(*shape)
    if regions == "on":
        assert forward.settled
        assert backward.settled
        assert {call.chosen for call in (*forward.calls, *backward.calls)} == {"kernel"}


def test_in_trial_both_ways_run_until_it_is_settled(made_up: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_TRIALS", 2)
    trained = Trained(monkeypatch, regions="auto")
    trained.prepared()
    assert not any(program.settled for program in trained.programs)
    for _ in range(6):
        trained.check(3, 5)
    assert all(program.settled for program in trained.programs)
    assert all(call.chosen in ("kernel", "nodes") for program in trained.programs for call in program.calls)
    trained.check(2, 3)


@pytest.mark.parametrize("options", [{"regions": "off"}, {"rng": "torch"}, {"native": False}])
def test_where_nothing_is_to_be_swapped_nothing_is_watched(
    options: dict[str, Any], made_up: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(monkeypatch, **{"regions": "on", **options})
    for _ in range(5):
        trained.check(3, 5)
    assert not trained.programs
    assert not made_up


def test_variables_of_onnxruntime_training_switch_regions(monkeypatch: pytest.MonkeyPatch, made_up: list[Path]) -> None:
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "0")
    trained = Trained(monkeypatch)
    trained.check(3, 5)
    assert not trained.programs
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    trained = Trained(monkeypatch)
    trained.prepared()
    assert all(program.settled for program in trained.programs)  # "on": without a trial


def test_a_compiler_that_fails_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(building, "in_background", lambda *_: (1, "first\nit broke"))
    trained = Trained(monkeypatch, regions="on")
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        trained.prepared()
        again = Trained(monkeypatch, regions="on")
        again.prepared()
    said = [r.getMessage() for r in caplog.records if r.name == building.__name__]
    assert said
    assert len(said) == len(building._refused)
    assert all("ended with 1" in text and "it broke" in text for text in said)
    assert not any(program.calls for program in trained.programs)
    trained.check(3, 5)


# The cache


def a_request() -> Request:
    return Request(regions_of(part_of(gated, ["b h", "b h"]))[1][0].part, [[5, 11], [5, 11]])


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often a made-up compiler ran, which writes a sealed file."""
    found: list[str] = []

    def compiled(command: list[str], limit_s: float) -> tuple[int, str]:
        found.append(command[-1])
        library = Path(command[-1], request.LIBRARY)
        library.write_bytes(b"a library")
        seal(library)
        return 0, ""

    monkeypatch.setattr(building, "in_background", compiled)
    return found


def test_what_is_compiled_is_not_compiled_again(compilations: list[str]) -> None:
    assert building.build(a_request()) == building.build(a_request())
    assert len(compilations) == 1


@pytest.mark.parametrize("damage", [lambda data: data[:5], lambda data: b"", lambda data: b"x" + data[1:]])
def test_a_damaged_entry_is_compiled_again(damage: Callable[[bytes], bytes], compilations: list[str]) -> None:
    path = building.build(a_request())
    whole_file = path.read_bytes()
    path.write_bytes(damage(whole_file))
    assert building.build(a_request()).read_bytes() == whole_file
    assert len(compilations) == 2


def test_the_folder_of_debugging_gets_graph_and_library(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxtrain.options import Options

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTMODULE_TRITON_DEBUG", "0")
    assert Options.resolve().regions_dump is None
    monkeypatch.setenv("ORTMODULE_TRITON_DEBUG", "1")
    folder = Options.resolve().regions_dump
    assert folder == Path("triton_debug")
    path = building.build(a_request(), folder)
    assert sorted(f.name for f in (folder / path.stem).iterdir()) == ["library.so", "region.json", "region.onnx"]
    assert [n.op_type for n in ir.load(folder / path.stem / "region.onnx").graph] == ["QuickGelu", "Mul"]


def test_a_cache_that_cannot_be_written_is_said(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir()
    cache.write_text("a file in the place of the folder")
    with pytest.raises(BuildError, match="cannot be used"):
        building.build(a_request())
    assert sum("cannot be used" in r.getMessage() for r in caplog.records) == 1


TWO = """
    import sys, time
    from pathlib import Path
    from onnxtrain.execute.regions import build as building, request
    from onnxtrain.native.build import seal

    class Wanted:
        key = "same"
        def write(self, folder): pass

    def compiled(command, limit_s):
        print("compiled", flush=True)
        time.sleep(0.3)
        library = Path(command[-1], request.LIBRARY)
        library.write_bytes(b"a library")
        seal(library)
        return 0, ""

    building.in_background = compiled
    print(building.build(Wanted()).name)
"""


@pytest.mark.slow
def test_two_processes_compile_a_region_once() -> None:
    both = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(TWO)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [line for child in both for line in child.communicate()[0].split()]
    assert sorted(said) == ["compiled", "region-same.so", "region-same.so"]


# The real compiler


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_region_computes_what_its_nodes_do(kind: str, dtype: torch.dtype) -> None:
    build, dims = KINDS[kind]
    part = regions_of(part_of(build, dims, dtype))[1][0].part
    shapes = [[SIZES[s] if isinstance(s, str) else s for s in sizes.of(v)] for v in part.inputs]
    call = RegionCall(part, calling.load(building.build(Request(part, shapes))), timed=False)
    for b, s, h in ((2, 3, 5), (4, 2, 64), (33, 9, 130), (1, 3, 4), (3, 0, 2), (2, 2, 2)):
        known = {"b": b, "s": s, "h": h}
        inputs = [torch.randn([sizes.evaluate(n, known) for n in sizes.of(v)], dtype=dtype) for v in part.inputs]
        compare(call, part, inputs)
    with_special = [t.clone() for t in inputs]
    for tensor in with_special:
        tensor.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=dtype)[: tensor.numel()]
    compare(call, part, with_special)


def compare(call: RegionCall, part: Part, inputs: Sequence[torch.Tensor]) -> None:
    got = call(*inputs)
    nodes = Program(part, "nodes", torch.device("cpu"))
    own, exact = nodes.run(inputs, ())[0], nodes.run([t.double() for t in inputs], ())[0]
    for value, a, b, c in zip(part.outputs, got, own, exact, strict=True):
        assert value is not None
        assert_no_worse_than_eager(str(value.name), a, b, c)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_model_trains_with_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(monkeypatch, regions="on")
    for _ in range(4):
        trained.check(3, 5)
    for program in trained.programs:
        assert program._work is not None
        program._work.join()
    assert all(program.settled for program in trained.programs)
    for shape in ((3, 5), (1, 4), (4, 1), (2, 0), (7, 9), (33, 2)):
        trained.check(*shape)
