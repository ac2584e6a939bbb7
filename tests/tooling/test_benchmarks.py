"""The benchmark: ratios, goals, files, and a full run with the smallest workload. No time is asserted."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec
from xml.etree import ElementTree

import psutil
import pytest
import torch
from rich.console import Console
from rich.table import Table

import benchmarks.__main__ as program
from benchmarks import (
    background_compilation,
    less_work,
    other_programs,
    page,
    process_options,
    processes,
    results,
    steady_state,
    tables,
    warm_start,
)
from benchmarks.chart import overview_chart, speed_chart
from benchmarks.cpu_workloads import CPU_WORKLOADS, MINILM, MLP
from benchmarks.gemms import Gemms, matmul_flops
from benchmarks.gpu_workloads import GPU_GROUPS, GPU_WORKLOADS
from benchmarks.machine import Machine, describe_machine, measured_commit
from benchmarks.op_times import REST, OpTime, op_times
from benchmarks.peak_memory import peak_bytes
from benchmarks.real_workloads import REAL, REAL_REHEARSAL, REAL_WORKLOADS, real_group
from benchmarks.results import BackgroundCompilation, Circumstances, Measured, Rounds, Timed, speed_over
from benchmarks.variants import (
    COMPILE,
    COMPILING,
    CUDA_GRAPHS,
    EAGER,
    INDUCTOR,
    ONEDNN,
    ONNXTRAIN,
    VARIANTS,
    Stepper,
    make_batches,
    make_model,
    onednn_has_bfloat16,
    variants_of,
)
from benchmarks.workload import Batch, Goals, Workload
from onnxtrain import ORTModule
from onnxtrain.execute.inductor_program.program import MAKES_PROGRAMS
from onnxtrain.log import LOG
from onnxtrain.native import background as native_background
from onnxtrain.ops.matmul import compiled_gemm
from onnxtrain.ops.matmul.candidates import gemm_by_convolution, onednn_gemm
from onnxtrain.options import JSON_VARIABLE
from tests.machines import MACHINES
from tests.reference import assert_matches

MACHINE = Machine("A processor", 2, 2, "Linux x86_64", 8.0, 0.1, (("Python", "3.11"), ("torch", "2.13")))
QUIET = Circumstances(MACHINE, "python -m benchmarks", "2026-01-01", 0.01)
LOUD = dataclasses.replace(QUIET, others_cores=1.0)


def timed(variant: str, *rounds_s: float, first_s: float = 1.0) -> Timed:
    return Timed(variant, rounds_s, (first_s,), (0.5,), 1 << 20, (0.5, 0.25))


def made_up(circumstances: Circumstances = QUIET) -> Measured:
    """Eager takes 2, 4 and 6 seconds where onnxtrain takes 1 and 2."""
    variants = (
        timed(EAGER, 2.0, 4.0, 6.0),
        timed(ONEDNN, 1.0, 2.0, 2.0),
        timed(ONNXTRAIN, 1.0, 2.0, 2.0, first_s=4.0),
    )
    return Measured(MINILM.name, circumstances, 6144, variants, (0.9, 1.0, 1.1), 30)


# ----------------------------------------------------------------------------------------------------- what is measured


def test_the_ratio_is_taken_round_by_round() -> None:
    measured = made_up()
    eager, ours = measured.timed(EAGER), measured.timed(ONNXTRAIN)
    assert eager is not None
    assert ours is not None
    assert speed_over(ours, eager) == (2.0, 2.0, 2.5)
    assert measured.share(ours) == 0.5
    assert speed_over(timed("a", 2.0), timed("b", 3.0)) == (1.5, 1.5, 1.5)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of the variants' steps; each step of a fake variant takes a second."""
    steps: list[str] = []

    class Fake:
        prepare_s = 0.5
        losses = (0.0,)

        def __init__(self, workload: Workload, variant: str, model: Any) -> None:
            self.variant = variant

        def step(self, batch: Batch) -> float:
            steps.append(self.variant)
            return 1.0

    monkeypatch.setattr(steady_state, "Stepper", Fake)
    return steps


def test_the_first_variant_changes_with_every_round(order: list[str]) -> None:
    cold = dataclasses.replace(MLP, cold=True)
    result = steady_state.measure(cold, (EAGER, ONNXTRAIN), 3, lambda _: None)
    assert order[:6] == [EAGER, ONNXTRAIN, ONNXTRAIN, EAGER, EAGER, ONNXTRAIN]
    assert result["variants"][1]["rounds_s"] == [1.5, 1.0, 1.0], "preparation is part of a cold first step"
    assert result["items"] == 3 * 16


def test_rounds_end_when_they_take_long(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cold = dataclasses.replace(MLP, cold=True)
    monkeypatch.setattr(steady_state, "_MAX_ROUNDS_S", 0.0)
    result = steady_state.measure(cold, (EAGER, ONNXTRAIN), 9, lambda _: None)
    assert len(result["variants"][0]["rounds_s"]) == 3
    assert result["items"] == 3 * 16
    monkeypatch.setattr(steady_state, "make_batches", lambda _: make_batches(MLP) * 9)
    result = steady_state.measure(cold, (EAGER, ONNXTRAIN), 9, lambda _: None)
    assert len(result["variants"][0]["rounds_s"]) == 9, "each batch has its round"


@pytest.mark.parametrize("variant", [ONEDNN, ONNXTRAIN])
def test_variants_take_the_same_step(variant: str) -> None:
    model, (batch,) = make_model(MLP), make_batches(MLP)

    def losses(model: torch.nn.Module, batch: Batch, variant: str = EAGER) -> torch.Tensor:
        stepper = Stepper(MLP, variant, model)
        for _ in range(3):
            stepper.step(batch)
        return torch.tensor(stepper.losses, dtype=next(model.parameters()).dtype)

    computed = losses(model, batch, variant)
    assert_matches(computed, losses, model, batch)
    assert computed[-1] < computed[0], "the optimizer took no step"


def test_onednn_runs_each_linear_under_autocast_too() -> None:
    if not onednn_has_bfloat16():
        pytest.skip("oneDNN has no inner product in bfloat16 on this processor")
    model = torch.nn.Linear(64, 32)
    x = torch.randn(16, 64, requires_grad=True)
    own = VARIANTS[ONEDNN](torch.nn.Sequential(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = own(x)
    assert y.dtype == torch.bfloat16
    assert "OneDnnLinear" in type(y.grad_fn).__name__
    y.sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("has", [False, True])
def test_variants_that_cannot_run_a_workload_are_skipped(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.variants.onednn_has_bfloat16", lambda: has)
    narrow = CPU_WORKLOADS["minilm-bf16"]
    assert (ONEDNN in variants_of(narrow)) is has
    assert ONEDNN in variants_of(MLP)
    assert ONEDNN not in variants_of(GPU_WORKLOADS["bert-large"])
    assert {EAGER, ONNXTRAIN, COMPILE} <= set(variants_of(narrow))


def test_gemms_are_those_of_the_step() -> None:
    model, (batch,) = make_model(MLP), make_batches(MLP)
    stepper = Stepper(MLP, EAGER, model)
    gemms = Gemms(lambda: stepper.step(batch))
    assert gemms.count == 4 + 3 + 4, "forward, gradients of all inputs but the first, gradients of weights"
    assert gemms.run() > 0


def test_flops_are_counted_for_every_kernel() -> None:
    """32 rows through a Linear of 8 to 16, forward and both gradients: three GEMMs with the same number of FLOPs."""
    x, weight, dy = torch.randn(32, 8), torch.randn(16, 8), torch.randn(32, 16)
    each = 2 * 32 * 8 * 16

    def eager() -> None:
        torch.nn.functional.linear(x, weight, torch.zeros(16))
        dy @ weight
        dy.t() @ x

    def others() -> None:
        onednn_gemm(x, weight.t(), None, 1.0)
        onednn_gemm(dy, weight, None, 1.0)
        gemm_by_convolution(dy, x, 1.0)

    def in_given_memory() -> None:
        torch.mm(x, weight.t(), out=torch.empty(32, 16))
        torch.addmm(torch.zeros(32, 16), x, weight.t(), out=torch.empty(32, 16))
        torch.addmm(torch.zeros(16), x, weight.t(), out=torch.empty(32, 16))

    assert matmul_flops(eager) == matmul_flops(others) == matmul_flops(in_given_memory) == 3 * each
    if compiled_gemm.LIBRARY.wait():  # there is a compiler
        assert matmul_flops(lambda: compiled_gemm.gemm(x, weight.t(), None, 1.0)) == each
        compiled_gemm.gemm(x, weight.t(), None, 1.0)  # not counted any more
    assert matmul_flops(lambda: torch.nn.functional.conv2d(torch.zeros(1, 2, 4, 4), torch.zeros(2, 2, 1, 1))) == 0


def test_recurrent_layers_have_no_gemms_to_time() -> None:
    layer = torch.nn.LSTM(8, 8)
    assert Gemms(lambda: layer(torch.randn(3, 2, 8))[0].sum().backward()).count == 0


def test_the_peak_counts_bytes_held_at_once() -> None:
    x = torch.zeros(1 << 18)

    def step() -> None:
        y = x + 1
        z = y + 1
        del y
        (z + 1).sum()

    assert 2 * x.nbytes <= peak_bytes(step) <= 2 * x.nbytes + 4096


def test_steps_during_a_compilation_are_distinguished_from_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of one period between two compilations does not end the measurement."""
    held, steps = [False], []
    compiling = iter([False] * 5 + [True] + [False] * 18 + [True])  # in the first period and in the third

    @contextlib.contextmanager
    def stopped() -> Iterator[None]:
        held[0] = True
        yield
        held[0] = False

    step = Stepper.step
    monkeypatch.setattr(Stepper, "step", lambda self, batch: (steps.append(held[0]), step(self, batch))[1])
    monkeypatch.setattr(background_compilation, "compilers_stopped", stopped)
    monkeypatch.setattr(background_compilation, "is_compiling", lambda: next(compiling, False))
    result = background_compilation.measure(MLP, lambda _: None)
    assert [len(turn) for turn in result["during_s"]] == [12] * 3
    assert [len(turn) for turn in result["alone_s"]] == [4] * 3
    assert steps == [False, *([False] * 12 + [True] * 4) * 5]


def test_compilers_are_stopped_while_steps_are_timed_alone() -> None:
    child = native_background.start(["sleep", "100"], subprocess.DEVNULL)
    process = psutil.Process(child.pid)
    try:
        with background_compilation.compilers_stopped():
            assert _becomes_true(lambda: process.status() == psutil.STATUS_STOPPED)
            assert native_background.throttle_lock.locked()
        assert _becomes_true(lambda: process.status() != psutil.STATUS_STOPPED)
    finally:
        native_background.end(child)


def _becomes_true(condition: Callable[[], bool]) -> bool:
    return any(condition() or time.sleep(0.01) for _ in range(500))


def test_compilers_that_do_not_end_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compilation, "is_compiling", lambda: True)
    result = background_compilation.measure(MLP, lambda _: None, max_s=0.1)
    assert len(result["during_s"]) == len(result["alone_s"]) >= 1


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"No module named benchmarks\.missing"):
        processes.run("benchmarks.missing", [], {}, lambda _: None)


def test_all_models_of_a_gpu_can_be_made() -> None:
    with torch.device("meta"):
        for workload in GPU_WORKLOADS.values():
            model = workload.make_model()
            assert all(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())


def test_a_rehearsal_has_the_workloads_of_a_gpu() -> None:
    names = [f"{model}-{kind}" for kind in ("dense", "padded") for model in ("bert", "gpt2", "llama")]
    for gpu, rehearsal in zip(GPU_GROUPS["gpu"], GPU_GROUPS["gpu-rehearsal"], strict=True):
        assert (gpu.name, rehearsal.name) == (names[0], f"{names.pop(0)}-rehearsal")
        assert (gpu.device, rehearsal.device) == ("cuda", "cpu")
        assert variants_of(gpu) == variants_of(rehearsal)
        assert {EAGER, ONNXTRAIN, INDUCTOR, COMPILE} <= set(variants_of(gpu))


def test_bfloat16_is_in_the_group_where_the_processor_has_it() -> None:
    for name, narrow in (("avx512", {False}), ("amx-limited", {False}), ("avx512-bf16", {False, True})):
        group = real_group(MACHINES[name])
        assert {workload.narrow for workload in group} == narrow
        assert len(group) == 7 * len(narrow)


def test_a_rehearsal_has_the_workloads_of_real_size() -> None:
    for workload, rehearsal in zip(REAL, REAL_REHEARSAL, strict=True):
        assert rehearsal.name == f"{workload.name}-rehearsal"
        assert rehearsal.narrow is workload.narrow
        assert variants_of(workload) == variants_of(rehearsal) == (EAGER, ONNXTRAIN, COMPILE)


def test_published_sizes() -> None:
    millions = {"bert-base": 110, "gpt2-124m": 124, "vit-base": 87, "whisper-tiny": 38, "mixtral": 123}
    if not REAL_WORKLOADS["qwen-lora"].missing():
        millions["qwen-lora"] = 494 + 9  # adapters of rank 16
    with torch.device("meta"):
        models = {name: REAL_WORKLOADS[name].make_model() for name in millions}
    assert {name: round(sum(p.numel() for p in m.parameters()) / 1e6) for name, m in models.items()} == millions


FEW_MODELS = ("bert-base", "gpt2-124m")


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(
            each, id=each.name, marks=[] if each.name.startswith(FEW_MODELS) and not each.narrow else [pytest.mark.slow]
        )
        for each in REAL_REHEARSAL
    ],
)
def test_real_sizes_train_in_a_rehearsal(workload: Workload) -> None:
    if missing := workload.missing():
        pytest.skip(f"{', '.join(missing)} not installed: the extra qlora has them")
    model, (batch,) = make_model(workload), make_batches(workload)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0  # else the loss of a step may rise

    def losses(model: torch.nn.Module, batch: Batch, variant: str = EAGER) -> torch.Tensor:
        stepper = Stepper(workload, variant, model)
        for _ in range(3):
            stepper.step(batch)
        return torch.tensor(stepper.losses, dtype=next(model.parameters()).dtype)

    computed = losses(model, batch, ONNXTRAIN)
    assert computed[-1] < computed[0], "the optimizer took no step"
    if not workload.narrow and not workload.name.startswith(
        ("qwen-qlora", "mixtral")
    ):  # those have no kernels in float64
        assert_matches(computed, losses, model, batch)


def test_a_workload_without_its_packages_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program.Run, "measure", lambda self, name: pytest.fail("measured"))
    lacking = dataclasses.replace(REAL_WORKLOADS["qwen-qlora"], packages=("torch", "missing_package"))
    monkeypatch.setitem(program.WORKLOADS, lacking.name, lacking)
    assert program.main(["--only", lacking.name, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Not installed: missing_package (pip install onnxtrain[qlora]); not measured: qwen-qlora." in said


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_padding_has_no_labels(name: str) -> None:
    batches = make_batches(GPU_WORKLOADS[f"{name}-padded-rehearsal"])
    assert len(batches) > 1
    for batch in batches:
        padding = batch["attention_mask"] == 0
        assert padding.any()
        assert (batch["labels"][padding] == -100).all()
        assert not batch["input_ids"][padding].any()
        assert batch["attention_mask"].sum(1).min() >= 2


def test_a_warm_up_ends_in_time_beside_a_thread_that_makes_programs() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name=f"{MAKES_PROGRAMS}a program")
    thread.start()
    try:
        assert steady_state.is_compiling()
        steady_state.warm_up({}, [{}], lambda _: None, max_s=0.3)
    finally:
        ended.set()
        thread.join()


def test_inductors_log_is_part_of_the_result(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(*arguments: object) -> None:
        LOG.info("%s: 1.00 ms compiled by Inductor, 2.00 ms as PyTorch's operators", "forward")
        LOG.info("captured")

    monkeypatch.setattr(steady_state, "warm_up", warm_up)
    monkeypatch.setattr(steady_state, "Gemms", lambda step: None)
    monkeypatch.setattr(steady_state, "_PROFILED", ())
    level = LOG.level
    result = steady_state.measure(MLP, (EAGER, INDUCTOR), 1, lambda _: None)
    assert result["log"] == ["forward: 1.00 ms compiled by Inductor, 2.00 ms as PyTorch's operators"]
    assert LOG.level == level
    assert order[:25] == [EAGER, *[INDUCTOR] * 24], "its programs are compiled meanwhile"


def test_a_machine_names_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert any(name == "GPU" and value.startswith("NVIDIA H100, 80 GiB") for name, value in describe_machine().lines())


# -------------------------------------------------------------------------------------------------------- what is shown


def drawn(table: Table) -> str:
    file = io.StringIO()
    Console(file=file, width=180).print(table)
    return file.getvalue()


def shown(rows: tables.Rows) -> str:
    return drawn(rows.for_terminal())


def test_a_table_says_which_goals_are_met_and_which_missed() -> None:
    workload = dataclasses.replace(MINILM, goals=Goals({EAGER: 2.0, ONEDNN: 1.4}, share=0.6))
    text = shown(tables.workload_rows(workload, made_up()))
    assert "2 ×: met" in text
    assert "1.4 ×: missed" in text
    assert "goal 60%: missed" in text
    assert "First step +3.0 s after eager's; goal 2 s: missed" in text
    assert "Undisturbed: other programs kept 0.01 cores busy" in text
    assert "2.00 × (2.00 – 2.50)" in text
    assert "4,000.0 ms (3,000.0 ms – 5,000.0 ms)" in text
    pairs = {ONNXTRAIN: (4.0, 5.0, 2.5), EAGER: (1.0, 1.5, 1.0)}
    more = tuple(dataclasses.replace(t, first_s=pairs.get(t.variant, t.first_s)) for t in made_up().variants)
    several = shown(tables.workload_rows(workload, dataclasses.replace(made_up(), variants=more)))
    assert "First step +3.0 s after eager's (+1.5 to +3.5 in 3 pairs of processes); goal 2 s: missed" in several


def test_the_memory_of_cuda_graphs_is_in_their_pool() -> None:
    """A measured step allocates nothing. In the rehearsal on a CPU, the variant records no graphs."""
    measured = made_up()
    variants = tuple(dataclasses.replace(measured.variants[0], variant=name) for name in (ONNXTRAIN, CUDA_GRAPHS))
    measured = dataclasses.replace(measured, variants=variants)
    cells = {}
    for device in ("cuda", "cpu"):
        rows = tables.workload_rows(dataclasses.replace(MINILM, device=device), measured)
        column = rows.header.index("peak memory")
        cells[device] = [row[column] for row in rows.rows]
        assert any(note.startswith("in its pool: ") for note in rows.notes) == (device == "cuda")
    in_mib = cells["cpu"][0]
    assert in_mib.endswith("MiB")
    assert cells == {"cuda": [in_mib, "in its pool"], "cpu": [in_mib, in_mib]}


def test_a_disturbed_run_says_so() -> None:
    assert "DISTURBED, not to be quoted" in shown(tables.workload_rows(MINILM, made_up(LOUD)))


def test_the_program_refuses_to_run_beside_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program, "wait_and_count", lambda: 1.5)
    monkeypatch.setattr(program.Run, "measure", lambda self, name: pytest.fail("measured"))
    assert program.main(["--only", MLP.name, "--out", str(tmp_path)]) == 2


def test_no_workload_is_begun_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program.Run, "measure", lambda self, name: pytest.fail("measured"))
    assert program.main(["--only", MLP.name, "--minutes", "0", "--loaded", "--out", str(tmp_path)]) == 0
    assert f"Not begun, for --minutes 0: {MLP.name}." in capsys.readouterr().out
    assert program.parse(["--only", "gpu"]).minutes < 8
    assert program.parse(["--only", "gpu", "cpu"]).minutes == math.inf


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"_busy_s": iter([100.0, 106.0]), "_own_s": iter([50.0, 53.0])}
    for name, readings in clocks.items():
        monkeypatch.setattr(other_programs, name, lambda readings=readings: next(readings))
    monkeypatch.setattr(other_programs, "time", SimpleNamespace(monotonic=iter([0.0, 2.0]).__next__))
    assert other_programs.OtherPrograms().cores() == (6.0 - 3.0) / 2.0


def test_steps_while_kernels_compile_have_two_goals() -> None:
    good = BackgroundCompilation("MiniLM", QUIET, ((1.2, 1.4), (1.4, 1.7)), ((1.0, 1.0), (1.0, 1.0)), 3.0)
    assert shown(tables.background_rows(good)).count("met") == 2
    bad = dataclasses.replace(good, during_s=((1.6, 1.6), (1.6, 1.9)))
    assert shown(tables.background_rows(bad)).count("missed") == 2
    slower = dataclasses.replace(bad, alone_s=((1.0, 1.0), (1.5, 1.5)))
    assert slower.slowdown[1] == pytest.approx((1.6 + 1.75 / 1.5) / 2), "per period, as the machine's speed changes"


def test_results_come_back_from_their_files(tmp_path: Path) -> None:
    background = BackgroundCompilation("MiniLM", QUIET, ((1.2,),), ((1.0, 1.0),), 3.0)
    for result in (made_up(), background):
        results.write(result, tmp_path)
    assert results.read(tmp_path, ["minilm", "gpt2", "background"]) == [made_up(), background]


def test_op_times_of_both_variants_are_side_by_side() -> None:
    ours = (OpTime("Linear", 6.0, 2), OpTime("Gelu", 1.0, 1), OpTime(REST, 3.0, 0))
    eager = (*(OpTime(f"aten::op{i}", 2.0, i) for i in range(10)), OpTime(REST, 0.0, 0))
    measured = made_up()
    op_times = {ONNXTRAIN: ours, EAGER: eager, ONEDNN: ()}
    with_op_times = tuple(dataclasses.replace(t, op_times=op_times[t.variant]) for t in measured.variants)
    table = tables.op_time_rows(dataclasses.replace(measured, variants=with_op_times))
    assert table is not None
    assert table.rows[0] == ("Linear × 2", "6.0 ms", "60%", "aten::op0 × 0", "2.0 ms", "10%")
    assert [row[3:] for row in table.rows[-2:]] == [("other ops", "4.0 ms", "20%"), (REST, "0.0 µs", "0%")]
    assert tables.op_time_rows(measured) is None


def test_ops_of_a_graph_are_distinguished_from_pytorchs_operators() -> None:
    eager = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    x = torch.randn(4, 8)
    kinds = {each.op for each in op_times(lambda: ORTModule(eager)(x).sum().backward())}
    assert {"Linear", REST} <= kinds
    assert not any(kind.startswith("aten::") for kind in kinds)
    assert "aten::addmm" in {each.op for each in op_times(lambda: eager(x).sum().backward())}


def test_the_chart_is_xml_with_a_bar_for_each_variant() -> None:
    chart = speed_chart([(MINILM, made_up()), (CPU_WORKLOADS["gpt2"], made_up())])
    root = ElementTree.fromstring(chart)
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles.count("onnxtrain: 2.00 × (quartiles 2.00 – 2.50)") == 2
    assert len(titles) == 4
    ElementTree.fromstring(speed_chart([]))


def test_the_chart_shows_totals_of_cold_runs_and_cuts_long_bars() -> None:
    cold = dataclasses.replace(MINILM, cold=True)
    fast = dataclasses.replace(
        made_up(), variants=(timed(EAGER, 30.0, 30.0), timed(ONEDNN, 20.0, 20.0), timed(ONNXTRAIN, 1.0, 5.0))
    )
    root = ElementTree.fromstring(speed_chart([(cold, fast)]))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [f"{ONEDNN}: 1.50 ×", f"{ONNXTRAIN}: 10.00 ×"]
    points = [element.get("points", "").split() for element in root.iter("{http://www.w3.org/2000/svg}polygon")]
    tips = [max(float(point.split(",")[0]) for point in corners) for corners in points]
    width = (tips[0] - 330) / 1.5  # of eager's speed
    assert tips[1] == pytest.approx(330 + 5 * width + 6.5, abs=0.2)


def test_the_page_names_machine_and_commit(tmp_path: Path) -> None:
    measured = made_up(dataclasses.replace(QUIET, commit="abc1234"))
    written = page.write_page([(MINILM, measured)], tmp_path).read_text(encoding="utf-8")
    assert "| **2.00** | 2.00 – 2.50 |" in written
    assert "A processor, 2 threads" in written
    assert "commit abc1234; `python -m benchmarks`" in written
    assert "Disturbed" not in written
    for name in ("speeds.svg", "speeds-overview.svg"):
        ElementTree.fromstring((tmp_path / name).read_text(encoding="utf-8"))


def test_the_page_has_a_table_of_real_sizes_where_they_were_measured(tmp_path: Path) -> None:
    bert = REAL_WORKLOADS["bert-base"]
    small = (MINILM, made_up())
    assert "Real sizes" not in page.write_page([small], tmp_path).read_text(encoding="utf-8")
    without = (tmp_path / "speeds.svg").read_text(encoding="utf-8")
    measured = dataclasses.replace(made_up(), workload=bert.name)
    first, second = page.write_page([small, (bert, measured)], tmp_path).read_text(encoding="utf-8").split("Real sizes")
    assert MINILM.title in first
    assert bert.title not in first
    assert bert.title in second
    assert MINILM.title not in second
    assert first.count("A processor") == second.count("A processor") == 1
    assert (tmp_path / "speeds.svg").read_text(encoding="utf-8") == without


def test_the_overview_shows_chosen_variants() -> None:
    titles = [each.text for each in ElementTree.fromstring(overview_chart([(MINILM, made_up())])).iter() if each.text]
    assert "onnxtrain" in titles
    assert ONEDNN not in titles


def test_the_measured_commit() -> None:
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|", measured_commit())


def test_less_work_is_compared_with_eager_and_with_the_pass_off() -> None:
    scene = less_work.SCENES["padding"]
    measured = (Rounds(EAGER, (2.0,)), Rounds(less_work.OFF, (1.0,)), Rounds(less_work.ON, (0.5,)))
    first = {EAGER: 2.5, less_work.OFF: 8.0, less_work.ON: 7.1}
    text = drawn(less_work.table(scene, measured, first, {EAGER: 100.0, less_work.ON: 25.0}))
    assert "4.00 (4.00-4.00)" in text
    assert "7.1 s" in text
    assert "25 MB" in text
    assert "0.25" in text


def test_a_warm_start_is_measured_interleaved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def run(module: str, arguments: list[str], environment: dict[str, str], tell: object) -> dict[str, float]:
        asked.append(f"{module} {arguments[-1]}")
        Path(environment["ORTMODULE_CACHE_DIR"]).mkdir(exist_ok=True)
        return {"first_s": 1.0 if arguments[-1] == EAGER else 1.5}

    monkeypatch.setattr(processes, "run", run)
    times = warm_start.measure(MINILM.name, 2, tmp_path, lambda text: None)
    turn = [f"benchmarks.first_step {EAGER}", f"benchmarks.first_step {ONNXTRAIN}"]
    assert asked == [f"benchmarks.steady_state {ONNXTRAIN}", *turn, *turn]
    assert "+0.50 s" in drawn(warm_start.table(MINILM.title, times))
    warm_start.measure(MINILM.name, 1, tmp_path, lambda text: None)
    assert asked[5:] == turn, "the caches were filled"


def test_settled_steps_of_process_options_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_state, "warm_up", create_autospec(steady_state.warm_up))
    monkeypatch.setattr(process_options, "_STEADY_S", 0.0)
    seconds = process_options.child(process_options.STEADY, "mlp32-small")
    assert seconds["elapsed"] > 0
    assert seconds["processor"] > 0


@pytest.mark.parametrize("option", process_options.OPTIONS)
def test_process_options_are_measured_interleaved(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(module: str, arguments: list[str], environment: dict[str, str], tell: object) -> dict[str, float]:
        chosen = json.loads(Path(environment[JSON_VARIABLE]).read_text())["process_wide"]
        asked.append(chosen)
        seconds = 1.5 if chosen else 2.0
        return {"elapsed": seconds, "processor": seconds / 2}

    monkeypatch.setattr(processes, "run", run)
    pairs = process_options.measure(option, MINILM.name, 2, lambda text: None)
    assert asked == [[], [option]] * 3, "the first pair fills the caches"
    assert len(pairs) == 2
    times = ["2000.0 ms", "1500.0 ms", "0.75", "1000.0 ms", "750.0 ms", "0.75"]
    assert process_options.row(option, MINILM.name, pairs)[3:] == times


@pytest.mark.compiler  # else torch.compile is left out
def test_first_steps_that_have_a_goal_are_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def run(module: str, arguments: list[str], environment: dict[str, str], tell: object) -> dict[str, float]:
        if module == "benchmarks.steady_state":
            raise InterruptedError
        asked.append(arguments[-1])
        return {}

    monkeypatch.setattr(processes, "run", run)
    plan = program.parse(["--only", MLP.name, "--quick", "--repeats", "3", "--out", str(tmp_path)])
    watch = SimpleNamespace(begin=lambda name: None, doing=lambda text: None)
    with pytest.raises(InterruptedError):
        program.Run(plan, QUIET.machine, tmp_path, watch).measure(MLP.name)
    assert asked == [EAGER, ONEDNN, ONNXTRAIN, *COMPILING, *[EAGER, ONNXTRAIN] * 2]


def test_the_command_line_chooses() -> None:
    plan = program.parse(["--only", "gpt2", "cpu", "--no-compile", "--quick"])
    assert plan.names == (*CPU_WORKLOADS, "background")
    assert COMPILE not in plan.variants
    assert (plan.rounds, plan.warm, plan.pages) == (3, False, None)
    assert program.parse(["--only", "--write"]).names == ()
    assert (plan.repeats, program.parse([]).repeats, program.parse(["--repeats", "0"]).repeats) == (1, None, 0)
    with pytest.raises(SystemExit):
        program.parse(["--rounds", "0"])


# ------------------------------------------------------------------------------------------------------------ all of it


@pytest.mark.slow
def test_a_rehearsal_of_real_sizes_runs(tmp_path: Path) -> None:
    names = ["whisper-tiny-rehearsal", "mixtral-rehearsal", "qwen-lora-rehearsal"]
    docs = tmp_path / "docs"
    docs.mkdir()
    arguments = ["--only", *names, "--quick", "--no-compile", "--loaded", "--repeats", "0", "--out", str(tmp_path)]
    assert program.main([*arguments, "--write", str(docs)]) == 0
    for result in results.read(tmp_path, names):
        assert isinstance(result, Measured)
        assert [timed.variant for timed in result.variants] == [EAGER, ONNXTRAIN]
        assert all(timed.peak_bytes > 0 for timed in result.variants)
        assert bool(result.gemms_s) is (result.workload != "mixtral-rehearsal"), "its experts are not recorded as GEMMs"
    assert "tiny" not in (docs / "_measured.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_rehearsal_of_the_gpu_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["bert-padded-rehearsal", "gpt2-dense-rehearsal", "llama-padded-rehearsal"]
    arguments = ["--only", *names, "--quick", "--no-compile", "--loaded", "--out", str(tmp_path)]
    assert program.main(arguments) == 0
    for result in results.read(tmp_path, names):
        assert isinstance(result, Measured)
        assert [timed.variant for timed in result.variants] == [EAGER, ONNXTRAIN, INDUCTOR, CUDA_GRAPHS]
        assert {len(timed.rounds_s) for timed in result.variants} == {3}
    assert "Loss of step" in capsys.readouterr().out


@pytest.mark.slow
def test_a_full_run_with_the_smallest_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    docs.mkdir()
    arguments = ["--only", MLP.name, "--variants", EAGER, ONNXTRAIN, "--quick", "--rounds", "2", "--loaded"]
    assert program.main([*arguments, "--out", str(out), "--write", str(docs)]) == 0
    values = json.loads((out / f"{MLP.name}.json").read_text(encoding="utf-8"))
    assert [one["variant"] for one in values["variants"]] == [EAGER, ONNXTRAIN]
    for one in values["variants"]:
        assert len(one["rounds_s"]) == 2
        assert len(one["first_s"]) == 1
        assert one["peak_bytes"] > 0
        assert one["op_times"][-1]["op"] == REST
    assert values["items"] == 32
    assert values["gemms"] == 11
    assert MLP.title in capsys.readouterr().out
    assert MLP.title in (out / "table.txt").read_text(encoding="utf-8")
    ElementTree.fromstring((out / "speeds.svg").read_text(encoding="utf-8"))
    assert MLP.title in (docs / "_measured.md").read_text(encoding="utf-8")
