"""Fused regions: which nodes are fused, that results stay the same, when kernels replace nodes. No compiler runs."""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.inductor_program import program as by_inductor
from onnxtrain.execute.program import Program
from onnxtrain.execute.regions import call as calling
from onnxtrain.execute.regions import program as fused
from onnxtrain.execute.regions.call import RegionCall
from onnxtrain.execute.regions.process import Process
from onnxtrain.execute.regions.program import FusedProgram
from onnxtrain.execute.regions.request import METADATA, Request
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.graph.builder import Builder
from onnxtrain.native import background, compiler
from onnxtrain.native.build import BuildError
from onnxtrain.options import Options
from onnxtrain.plan.regions import find_regions
from onnxtrain.plan.storage import Storages
from onnxtrain.testing import assert_no_worse_than_eager
from tests.execute.region_cases import (
    CPU,
    KINDS,
    SIZES,
    Block,
    Gated,
    Trained,
    fused_programs,
    gated,
    names,
    nodes_as_kernel,
    part_of,
    regions_of,
    wait_for,
    written,
)
from tests.reference import assert_matches
from tests.thinned import covering
from tests.zoo.checks import Comparison
from tests.zoo.entry import ZooModel
from tests.zoo.models import ZOO

pytestmark = [
    pytest.mark.usefixtures("regions_cache"),
    pytest.mark.compiler,
]

# Which nodes join


@pytest.mark.parametrize("kind", KINDS)
def test_each_pattern_is_one_region(kind: str) -> None:
    part = part_of(*KINDS[kind])
    _, (region,) = regions_of(part)
    tensor_nodes = [n for n in part.nodes if not part.host.issuperset(n.outputs)]
    assert list(region.part.nodes) == tensor_nodes
    assert set(region.part.outputs) == set(part.outputs)
    assert region.saved > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_all_floating_types_are_fused(dtype: torch.dtype) -> None:
    assert names(regions_of(part_of(*KINDS["silu * up"], dtype))[1]) == ["QuickGelu + Mul"]


def test_only_measured_patterns_gain() -> None:
    assert {kind for kind, graph_and_dims in KINDS.items() if regions_of(part_of(*graph_and_dims))[1][0].gains} == {
        "silu * up",
        "silu * up, backward",
        "add + RMS norm",
        "RMS norm, backward",
    }


def test_a_lone_norm_keeps_its_own_kernel() -> None:
    def norm(op: Builder, x: ir.Value, scale: ir.Value) -> ir.Value:
        return op.ms.SimplifiedLayerNormalization(x, scale, axis=-1, epsilon=1e-6)[0]

    (region,) = regions_of(part_of(norm, ["b s 48", "48"]))[1]
    assert names([region]) == ["SimplifiedLayerNormalization"]
    assert not region.gains


def test_nodes_that_would_form_a_cycle_are_not_fused() -> None:
    def around(op: Builder, x: ir.Value, w: ir.Value) -> ir.Value:
        y = op.Exp(x)
        return op.Add(y, op.MatMul(y, w))

    assert regions_of(part_of(around, ["b 8", "8 8"]))[1] == ()


def apart(op: Builder, x: ir.Value, w: ir.Value, wide: ir.Value) -> ir.Value:
    """Run both ops of the gate in place, with a matmul between them."""
    silu = op.ms.QuickGelu(op.MatMul(x, w), alpha=1.0)
    return op.MatMul(op.Mul(silu, op.MatMul(x, op.Transpose(w, perm=[1, 0]))), wide)


def test_nodes_are_reordered_to_be_adjacent() -> None:
    part, regions = regions_of(part_of(apart, ["b 8", "8 8", "8 64"]))
    assert names(regions) == ["QuickGelu + Mul"]
    assert [n.op_type for n in part.nodes] == ["MatMul", "Transpose", "MatMul", "QuickGelu", "Mul", "MatMul"]


def test_a_region_that_holds_more_memory_is_refused() -> None:
    """One call holds both inputs until its output exists, which would be the peak here instead of the wide matmul."""
    assert regions_of(part_of(apart, ["b 8", "8 8", "8 1"]))[1] == ()


def test_views_sampling_and_integers_are_not_fused() -> None:
    def mixed(op: Builder, x: ir.Value) -> ir.Value:
        halves = op.Mul(op.Reshape(op.Exp(x), op.constant([-1], ir.DataType.INT64)), op.scalar(0.5, like=x))
        dropped = op.Dropout(op.Exp(halves), op.scalar(0.5, ir.DataType.FLOAT), op.scalar(True, ir.DataType.BOOL))[0]
        return op.Cast(op.Exp(dropped), to=ir.DataType.INT64)

    _, regions = regions_of(part_of(mixed, ["b 8"]))
    assert names(regions) == ["Mul + Exp"]


def test_different_shapes_are_different_regions() -> None:
    def two(op: Builder, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ...]:
        return op.Exp(op.Exp(x)), op.Exp(op.Exp(y))

    assert names(regions_of(part_of(two, ["b 8", "s 8"]))[1]) == ["Exp + Exp"] * 2


def test_unfused_nodes_have_a_reason() -> None:
    def mixed(op: Builder, x: ir.Value, other: ir.Value) -> tuple[ir.Value, ...]:
        rounded = op.Neg(op.Cast(x, to=ir.DataType.INT64))
        return rounded, op.Exp(x), op.Exp(other), apart(op, x, other, op.Transpose(other, perm=[1, 0]))

    part = part_of(mixed, ["b 8", "8 8"])
    result = find_regions(part, Storages(part.nodes, SIZES, "cpu"))
    said = {node.op_type: reason for node, reason in result.refused}
    assert set(said) == {"Neg", "Exp", "QuickGelu", "Mul"}
    assert "INT64" in said["Neg"]
    assert "would save nothing" in said["Exp"]
    assert "would raise the peak by" in said["QuickGelu"]
    assert not result.regions


# One region as a call


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_contains_the_whole_region(kind: str, tmp_path: Path) -> None:
    region = regions_of(part_of(*KINDS[kind]))[1][0]
    RegionCall(region.part, nodes_as_kernel(written(tmp_path, region.part)))  # checks the kernel


def test_equal_regions_of_two_layers_are_compiled_once() -> None:
    def layers(op: Builder, x: ir.Value, w: ir.Value) -> ir.Value:
        return op.MatMul(gated(op, op.MatMul(gated(op, x, x), w), x), op.Concat(*[w] * 8, axis=1))

    first, second = regions_of(part_of(layers, ["b 8", "8 8"]))[1]
    shapes = [[5, 8], [5, 8]]
    assert len(first.part.inputs) == 1
    assert Request(first.part, shapes[:1]).key != Request(second.part, shapes).key
    third = regions_of(part_of(gated, ["h 8", "h 8"]))[1][0]
    assert Request(third.part, shapes).key == Request(second.part, [[9, 8], [9, 8]]).key


def test_a_wrong_kernel_is_refused(tmp_path: Path) -> None:
    part = regions_of(part_of(gated, ["b h", "b h"]))[1][0].part
    good = nodes_as_kernel(written(tmp_path, part))
    wrong: dict[str, Any] = {
        "the kernel's error is": lambda tensors: [good(tensors)[0] * 1.001],
        "shares memory with": lambda tensors: [tensors[0].mul_(torch.sigmoid(tensors[0])).mul_(tensors[1])],
        "from the kernel, got": lambda tensors: [good(tensors)[0].double()],
    }
    for message, kernel in wrong.items():
        with pytest.raises(BuildError, match=message):
            RegionCall(part, kernel)


def test_a_kernel_that_is_wrong_at_typical_sizes_is_refused(tmp_path: Path) -> None:
    """A loop over full vectors may be wrong while the remainder is right: the child process checks that."""
    part = regions_of(part_of(gated, ["b h", "b h"]))[1][0].part
    good = nodes_as_kernel(written(tmp_path, part))
    call = RegionCall(part, lambda tensors: [good(tensors)[0] * (1 + (tensors[0].numel() > 99))])
    with pytest.raises(BuildError, match="the kernel's error is"):
        call.compare([[16, 64], [16, 64]])


def fails(tensors: Sequence[torch.Tensor]) -> Any:
    raise RuntimeError("no more memory")


@pytest.mark.parametrize("timed", [False, True])
def test_a_kernel_that_fails_at_run_time_is_replaced_by_its_nodes(
    timed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = regions_of(part_of(gated, ["b h", "b h"]))[1][0].part
    call = RegionCall(part, nodes_as_kernel(written(tmp_path, part)))
    if timed:
        call.try_both()
    call.kernel = fails
    x = torch.randn(4, 4)
    for _ in range(3):
        assert torch.equal(call(x, x)[0], torch.nn.functional.silu(x) * x)
    assert call.chosen == "nodes"
    assert sum("no more memory" in r.getMessage() for r in caplog.records) == 1


def test_small_sizes_and_strided_tensors_run_the_nodes(tmp_path: Path) -> None:
    part = regions_of(part_of(gated, ["b h", "b h"]))[1][0].part
    kernel = nodes_as_kernel(written(tmp_path, part))
    calls: list[int] = []
    call = RegionCall(part, lambda tensors: (calls.append(1), kernel(tensors))[1])
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
def test_the_faster_of_kernel_and_nodes_is_kept(
    kernel_s: float, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake clock."""
    clock = [0.0]
    part = regions_of(part_of(gated, ["b h", "b h"]))[1][0].part
    kernel = nodes_as_kernel(written(tmp_path, part))
    call = RegionCall(part, kernel)
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
    call.try_both()
    while call.chosen is None:
        assert torch.equal(call(x, x)[0], torch.nn.functional.silu(x) * x)
    assert call.chosen == chosen
    assert call.gain() == 2.0 - kernel_s


# In a module


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A fake compiler, whose kernels run the region's nodes; returns the requests."""
    asked: list[Path] = []
    turn = threading.Lock()

    def build(requests: Sequence[Request], dump: Path | None) -> Iterator[tuple[Request, Path]]:
        for wanted in requests:
            folder = tmp_path / wanted.key
            with turn:  # both programs ask
                folder.mkdir(exist_ok=True)
                wanted.write(folder)
                asked.append(folder)
            yield wanted, folder

    monkeypatch.setattr(fused, "build", build)
    monkeypatch.setattr(fused, "load", nodes_as_kernel)
    return asked


@pytest.mark.parametrize(
    ("kernels", "dtype"), covering(["fused", "fused-all"], [torch.float32, torch.float64]), ids=str
)
def test_training_equals_eager_at_all_sizes(
    kernels: str, dtype: torch.dtype, made_up: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(monkeypatch, dtype, kernels=kernels)
    trained.prepared()
    forward, backward = trained.programs
    assert forward.calls
    assert backward.calls
    for shape in ((3, 5), (1, 4), (4, 1), (2, 0), (0, 3), (7, 9), (3, 5)):
        trained.check(*shape)
    if kernels == "fused-all":
        assert forward.settled
        assert backward.settled
        assert {call.chosen for call in (*forward.calls, *backward.calls)} == {"kernel"}


def test_each_region_runs_by_its_kernel_as_soon_as_it_is_built(
    made_up: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, there, go = fused.build, threading.Semaphore(0), threading.Semaphore(0)

    def one_by_one(requests: Sequence[Request], dump: Path | None) -> Iterator[Any]:
        for built in build(requests, dump):
            there.release()  # all before is swapped in
            go.acquire()
            yield built

    def counted(path: Path) -> Any:
        kernel = nodes_as_kernel(path)
        return lambda tensors: (ran.append(path), kernel(tensors))[1]

    ran: list[Path] = []
    monkeypatch.setattr(fused, "build", one_by_one)
    monkeypatch.setattr(fused, "load", counted)
    trained = Trained(monkeypatch, kernels="fused-all")
    for _ in range(4):
        trained.check(3, 5)
    for program in trained.programs:
        there.acquire()
        assert not program.calls
    go.release()
    there.acquire()
    some = sum(len(program.calls) for program in trained.programs)
    assert some
    assert not any(program.settled for program in trained.programs)
    for shape in ((1, 4), (7, 9)):
        trained.check(*shape)
    ran.clear()
    trained.check(3, 5)
    assert len(ran) == some
    go.release(100)
    wait_for(trained.programs)
    assert sum(len(program.calls) for program in trained.programs) > some
    assert all(program.settled for program in trained.programs)
    trained.check(3, 5)


def test_background_work_is_throttled_in_slices(made_up: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on other threads is divided into slices, each followed by a pause."""
    rests: Counter[int] = Counter()  # of each thread
    before: dict[int, list[int]] = {}  # so many rests before each piece
    did: set[str] = set()
    clock = SimpleNamespace(
        monotonic=time.monotonic, thread_time=time.thread_time, sleep=lambda s: rests.update([threading.get_ident()])
    )
    monkeypatch.setattr(background, "time", clock)

    def noted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noting(*arguments: Any) -> Any:
            thread = threading.current_thread()
            if thread is not threading.main_thread():
                before.setdefault(id(thread), []).append(rests[threading.get_ident()])
                did.add(name)
            return function(*arguments)

        monkeypatch.setattr(owner, name, noting)

    pieces = ("Storages", "find_regions", "Request", "load", "RegionCall")
    for name in pieces:
        noted(fused, name)
    noted(FusedProgram, "_fused")
    trained = Trained(monkeypatch, kernels="fused-all")
    trained.prepared()
    assert did == {*pieces, "_fused"}
    assert all(numbers == list(range(len(numbers))) for numbers in before.values())


@pytest.mark.parametrize(("narrow", "order"), [(1, [16, 8]), (3, [8, 16])])
def test_the_region_that_saves_most_is_compiled_first(
    narrow: int, order: list[int], made_up: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three equal regions of width 8 save more than one of width 16."""
    programs = fused_programs(monkeypatch)
    gates = [*(Gated(8) for _ in range(narrow)), nn.Linear(8, 16), Gated(16), nn.Linear(16, 256)]
    module = ORTModule(nn.Sequential(*gates), rng="fast", kernels="fused-all")
    with torch.no_grad():
        for _ in range(4):
            module(torch.randn(6, 8))
    wait_for(programs)
    assert [json.loads((folder / METADATA).read_text())["shapes"][0][-1] for folder in made_up] == order


OFTEN = {"no-grad-region"}  # its nodes are reordered into regions; the others run with --slow
MODELS = [
    pytest.param(
        *(entry, dtype),
        id=f"{entry}-{str(dtype).removeprefix('torch.')}",
        marks=[] if entry.name in OFTEN else [pytest.mark.slow],
    )
    for entry in ZOO
    if entry.falls_back is None
    for dtype in (torch.float32, torch.float64)
    # Without regions too, attention's backward gives 6e-17 at length 1 where eager gives 0.
    if not (entry.name == "t5" and dtype == torch.float64)
]


@pytest.mark.parametrize(("entry", "dtype"), MODELS)
def test_models_of_the_zoo_train_as_eager(
    entry: ZooModel, dtype: torch.dtype, made_up: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = fused_programs(monkeypatch)
    compare = Comparison(entry, dtype, wrap=lambda m: ORTModule(m, rng="fast", kernels="fused-all"))
    compare.change(nn.Module.eval)
    for _ in range(4):
        compare.train(*entry.sizes[0])
    wait_for(programs)
    for shape in entry.sizes:
        compare.train(*shape)


def test_kernel_and_nodes_are_interleaved_until_settled(made_up: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_TRIALS", 2)
    trained = Trained(monkeypatch, kernels="fused")
    trained.prepared()
    assert not any(program.settled for program in trained.programs)
    for _ in range(6):
        trained.check(3, 5)
    assert all(program.settled for program in trained.programs)
    assert all(call.chosen in ("kernel", "nodes") for program in trained.programs for call in program.calls)
    trained.check(2, 3)


@pytest.mark.parametrize("options", [{"kernels": "native"}, {"rng": "torch"}, {"kernels": "pytorch"}])
def test_options_that_disable_regions_watch_no_program(
    options: dict[str, Any], made_up: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(monkeypatch, **{"kernels": "fused-all", **options})
    for _ in range(5):
        trained.check(3, 5)
    assert not trained.programs
    assert not made_up


@pytest.mark.parametrize("kernels", ["fused", "fused-all"])
@pytest.mark.parametrize(("device", "compiled"), [("cpu", "regions"), ("cuda", "programs")])
def test_a_gpu_has_whole_programs_instead_of_regions(kernels: str, device: str, compiled: str) -> None:
    program = Program(part_of(*KINDS["silu * up"]), "forward", CPU)
    arguments = program, Options(kernels=kernels), torch.device(device), lambda *_: program
    regions, whole = fused.watch(*arguments), by_inductor.watch(*arguments, frees_arguments=False)
    assert (regions is not None, whole is not None) == (compiled == "regions", compiled == "programs")
    watched = regions or whole
    assert watched is not None
    assert program.run == watched.run


def test_the_report_of_a_program_on_a_gpu_has_no_regions() -> None:
    module = ORTModule(Block(64, 64))
    module(torch.randn(256, 64)).sum().backward()
    compiled = engine_of(module).newest()
    assert all(report.applied for report in compiled.regions())
    unit = copy.copy(compiled.unit)
    unit.device_type = "cuda"
    for report in replace(compiled, unit=unit).regions():
        assert not report.applied
        assert "whole programs" in report.refused[0].reason


def test_variables_of_onnxruntime_training_enable_regions(monkeypatch: pytest.MonkeyPatch, made_up: list[Path]) -> None:
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "0")
    trained = Trained(monkeypatch)
    trained.check(3, 5)
    assert not trained.programs
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    trained = Trained(monkeypatch)
    trained.prepared()
    assert all(program.settled for program in trained.programs)  # "on": without a trial


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings about regions, without the one about a missing compiler."""
    texts = [r.getMessage() for r in caplog.records if r.name == "onnxtrain" and r.levelno >= logging.WARNING]
    return [text for text in texts if "fused kernel" in text]


def broke(process: Process, folder: Path, cache: Path, limit_s: float) -> None:
    raise BuildError("it broke")


@pytest.mark.parametrize(
    ("owner", "name", "replacement", "message"),
    [
        (compiler, "find", lambda: None, "there is no C++ compiler"),
        (Process, "compile", broke, "it broke"),
    ],
)
def test_a_failing_compiler_is_warned_of_once(
    owner: Any,
    name: str,
    replacement: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(owner, name, replacement)
    for _ in range(2):  # modules of two programs each
        trained = Trained(monkeypatch, kernels="fused-all")
        trained.prepared()
        assert not any(program.calls for program in trained.programs)
        trained.check(3, 5)
    (said,) = warnings_of(caplog)
    assert message in said


def test_a_wrong_kernel_is_warned_of_once_and_not_used(
    made_up: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(path: Path) -> Any:
        good = nodes_as_kernel(path)
        return lambda tensors: [t * 1.001 for t in good(tensors)]

    monkeypatch.setattr(fused, "load", load)
    trained = Trained(monkeypatch, kernels="fused-all")
    trained.prepared()
    assert not any(program.calls for program in trained.programs)
    trained.check(3, 5)
    said = warnings_of(caplog)
    assert said
    assert len(said) == len(set(said))
    assert all("the kernel's error is" in text for text in said)


def test_several_threads_compile_once(made_up: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    prepare = FusedProgram._prepare
    monkeypatch.setattr(FusedProgram, "_prepare", lambda self, *a: (started.append(self), prepare(self, *a)))
    trained = Trained(monkeypatch, kernels="fused-all")
    trained.check(3, 5)  # captured once
    forward, backward = trained.programs
    x = torch.randn(3, 5, 8, requires_grad=True)
    outputs: list[torch.Tensor] = []

    def work() -> None:
        outputs.extend(trained.module(x).detach() for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trained.prepared()
    assert started.count(forward) == 1
    assert started.count(backward) == 1
    assert len(outputs) == 20
    expected, exact = trained.eager(x).detach(), trained.exact(x.double()).detach()
    for each in outputs:
        assert_no_worse_than_eager("y", each, expected, exact)


def test_a_library_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_text("no library")
    with pytest.raises(BuildError, match="loading the library"):
        calling.load(tmp_path / "library.so")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x * x

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 4 * x * dys[0]


def test_a_backward_with_a_custom_function_is_fused(made_up: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context is not a tensor, and is kept for backward among the tensors."""

    class Gated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(Doubled.apply(x) * 0.5) * x

    programs = fused_programs(monkeypatch)
    module = ORTModule(Gated(), rng="fast", kernels="fused-all")
    for _ in range(5):
        x = torch.randn(3, 4, requires_grad=True)
        module(x).sum().backward()
        assert_matches(x.grad, lambda x: torch.autograd.grad((torch.tanh(x * x) * x).sum(), x)[0], x)
        wait_for(programs)
    assert made_up
