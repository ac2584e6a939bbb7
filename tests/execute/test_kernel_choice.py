"""The choice of kernels: by a cost model, by times measured in running steps, and by times on disk."""

import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from onnxtrain import ORTModule, cli
from onnxtrain.execute.cpp_program import program as cpp_program
from onnxtrain.execute.kernel_choice import expected, stored, times, trial, tuned_program
from onnxtrain.execute.kernel_choice.neighbours import worse_nearby
from onnxtrain.execute.kernel_choice.stored import file_of, load, save
from onnxtrain.execute.kernel_choice.times import MAX_CALLS, SAMPLES, Answer, Samples, rounded
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.native import Library
from onnxtrain.ops.definition import Call, Kernel
from onnxtrain.ops.matmul import compiled_gemm
from onnxtrain.testing import assert_no_worse_than_eager
from tests.limits import WAIT_LIMIT_S
from tests.machines import Describe
from tests.op_case import CaseCheck, OpCase, Spec

# Times


def test_sizes_are_rounded_up_to_two_binary_digits() -> None:
    assert [rounded(s) for s in (0, 1, 3, 5, 6, 7, 100, 128, 129, 2000, 2048)] == [
        0,
        1,
        3,
        6,
        6,
        8,
        128,
        128,
        192,
        2048,
        2048,
    ]


def answered(**seconds: float) -> Answer:
    """A settled answer; each call of a candidate took this many seconds."""
    answer = Answer("[8, 8]")
    names = tuple(seconds)
    for _ in range(100):
        if answer.choice:
            return answer
        name = answer.next(names)
        answer.add(name, seconds[name])
        answer.settle(names)
    raise AssertionError("it does not settle")


def test_the_fastest_is_chosen() -> None:
    answer = answered(aten=2e-3, onednn=1.5e-3)
    assert answer.choice == "onednn"
    assert answer.is_clean
    assert {s.calls for s in answer.samples.values()} == {SAMPLES + 1}


def test_a_difference_within_noise_keeps_the_expected_kernel() -> None:
    assert answered(aten=2e-3, onednn=1.98e-3).choice == "aten"


def test_a_hopeless_candidate_is_called_twice() -> None:
    answer = answered(aten=1e-3, onednn=4e-3)
    assert answer.samples["onednn"].calls == 2
    assert answer.choice == "aten"


def test_the_first_call_of_a_candidate_is_not_counted() -> None:
    answer = Answer("")
    for seconds in (9.0, 1e-3, 2e-3):
        answer.add("onednn", seconds)
    assert answer.samples["onednn"] == Samples(calls=3, clean=2, seconds=1e-3, at_least=1e-3)


def test_a_candidate_is_compiled_after_the_others_are_measured() -> None:
    library = create_autospec(Library, instance=True)
    library.is_ready.return_value = False
    lower = Kernel(lower=lambda n: Call(max))
    comes = replace(lower, library=library)
    answer = Answer("")
    case = trial._Case({"aten": lower, "compiled": comes}, answer, 1.0)
    for _ in range(SAMPLES + 1):
        assert case.ready() == ("aten",)
        library.request.assert_not_called()
        answer.add("aten", 1e-3)
        answer.settle(tuple(case.candidates))
    assert case.ready() == ("aten",)
    library.request.assert_called()
    assert case.choice is None
    library.is_ready.return_value = True
    assert case.ready() == ("aten", "compiled")
    library.is_ready.return_value = None  # its compile failed
    assert case.ready() == ("aten",)
    answer.settle(tuple(case.candidates))
    assert case.choice is lower


def test_a_busy_machine_keeps_the_expected_kernel_and_gives_no_clean_answer() -> None:
    answer = Answer("")
    while not answer.choice:
        name = answer.next(("aten", "onednn"))
        answer.add(name, 1e-3 if name == "onednn" else 9e-3, waited=0.5e-3)
        answer.settle(("aten", "onednn"))
    assert answer.choice == "aten"
    assert answer.samples["onednn"].calls == MAX_CALLS
    assert not answer.is_clean
    assert times.merged({}, {"q": answer}) == {}


def called(answer: Answer, count: int, waited: float) -> list[str]:
    """The candidates that `answer` calls, if each call takes 1 ms, of which threads wait this long."""
    names = []
    for _ in range(count):
        names.append(answer.next(("aten", "onednn")))
        answer.add(names[-1], 1e-3, waited)
    return names


def test_few_calls_are_trials_while_threads_wait_for_a_core() -> None:
    answer = Answer("")
    assert called(answer, 2, waited=0.0) == ["aten", "onednn"]
    busy = called(answer, 100, waited=0.5e-3)
    assert busy.count("onednn") <= 1 + times.SHARE * 100
    assert called(answer, 3, waited=0.0)[1:] != ["aten", "aten"]


def test_a_slow_candidate_is_dropped_on_a_busy_machine() -> None:
    answer = Answer("")
    for _ in range(SAMPLES + 1):
        answer.add("float32", 1e-3)
    for _ in range(2):
        answer.add("aten", 9e-3, waited=3e-3)
    answer.settle(("float32", "aten"))
    assert answer.choice == "float32"


# At other sizes


LINEAR = "onnxtrain::Linear() float"


@pytest.mark.parametrize(
    ("sizes", "worse"),
    [
        ("1024x384 384x384 384", {"onednn"}),
        ("4096x384 384x384 384", {"onednn"}),
        ("2048x384 384x384T 384", set()),  # other strides
        ("2048x384 1536x384 1536", {"onednn"}),  # one size differs, in two places
        ("1024x384 1536x384 1536", set()),  # two sizes differ
        ("64x384 384x384 384", set()),  # too far away
        ("0x384 384x384 384", set()),
        ("2048x384 384x384 -", set()),
    ],
)
def test_a_candidate_that_is_slower_at_a_nearby_size_is_skipped(sizes: str, worse: set[str]) -> None:
    answers = {
        f"{LINEAR} 2048x384 384x384 384": answered(aten=1e-3, onednn=1.3e-3, convolution=1.02e-3),
        f"{LINEAR.replace('float', 'float16')} {sizes}": answered(aten=9e-3, onednn=1e-3),
        f"{LINEAR} {sizes}": Answer("just asked"),
    }
    names = ("aten", "onednn", "convolution", "another")
    assert worse_nearby(LINEAR, sizes, names, answers) == worse
    assert (
        worse_nearby(LINEAR, sizes, ("onednn", "another"), answers) == set()
    )  # the fastest there is no candidate here


def test_the_nearest_sizes_decide() -> None:
    answers = {
        f"{LINEAR} 512x8 8x8 8": answered(aten=1e-3, onednn=2e-3),
        f"{LINEAR} 1024x8 8x8 8": answered(aten=2e-3, onednn=1e-3),
        f"{LINEAR} 4096x8 8x8 8": answered(aten=1e-3, onednn=2e-3),
    }
    assert worse_nearby(LINEAR, "1536x8 8x8 8", ("aten", "onednn"), answers) == {"aten"}


# On disk


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    return file_of(tmp_path)


def test_answers_outlive_the_process(file: pathlib.Path) -> None:
    save(file, {"q": answered(aten=2e-3, onednn=1e-3), "open": Answer("[1]")})
    (item,) = load(file).items()
    assert item[0] == "q"
    assert item[1].choice == "onednn"
    assert item[1].samples["aten"].seconds == 2e-3


def test_a_save_keeps_answers_of_other_processes(file: pathlib.Path) -> None:
    save(file, {"a": answered(aten=2e-3, onednn=1e-3)})
    save(file, {"b": answered(aten=1e-3, onednn=2e-3)})
    assert {key: answer.choice for key, answer in load(file).items()} == {"a": "onednn", "b": "aten"}


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"machine": 1, "answers": {}}',
        '{"machine": MACHINE, "answers": {"q": {}}}',
        '{"machine": MACHINE, "answers": {"q": {"sizes": "", "choice": "onednn", "seconds": {}}}}',
        '{"machine": MACHINE, "answers": {"q": {"sizes": "", "choice": "onednn", "seconds": {"onednn": "fast"}}}}',
        '{"machine": MACHINE, "answers": {"q": {"sizes": "", "choice": "onednn", "seconds": {"onednn": NaN}}}}',
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_rewritten(file: pathlib.Path, damage: str) -> None:
    file.write_text(damage.replace("MACHINE", json.dumps(stored.setting())))
    with pytest.warns(UserWarning, match="ignored") as caught:
        assert load(file) == {}
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="ignored"):
        save(file, {"q": answered(aten=2e-3, onednn=1e-3)})
    assert load(file).keys() == {"q"}


def test_each_machine_has_its_own_file(tmp_path: pathlib.Path, described_machine: Describe) -> None:
    """The number of threads, ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA make other settings of one machine."""
    files = []
    for facts in ({}, {"threads": 77}, {"vectors": "default"}, {"onednn_instructions": frozenset({"avx2"})}):
        described_machine("amx", **facts)
        files.append(file_of(tmp_path))
    assert len(set(files)) == len(files)


def test_an_unwritable_folder_does_not_stop_training(tmp_path: pathlib.Path) -> None:
    (tmp_path / "taken").write_text("")
    save(file_of(tmp_path / "taken"), {"q": answered(aten=2e-3, onednn=1e-3)})


def _save_many(file: pathlib.Path, name: str) -> None:
    for number in range(20):
        stored._LOCK_SECONDS = 20  # no save may be skipped here
        save(file, {f"{name}{number}": answered(aten=2e-3, onednn=1e-3)})


@pytest.mark.everywhere
def test_two_processes_save_all_answers(file: pathlib.Path) -> None:
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_save_many, args=(file, name)) for name in "ab"]
    for process in both:
        process.start()
    for process in both:
        process.join(WAIT_LIMIT_S)
        assert process.exitcode == 0
    assert load(file).keys() == {f"{name}{number}" for name in "ab" for number in range(20)}


# In running steps


@pytest.fixture
def measure_everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    compiled_gemm.LIBRARY.wait()  # nothing is settled before it is built
    monkeypatch.setattr(cpp_program, "watch", lambda program: None)  # a function without a choice of kernels
    monkeypatch.setattr(trial, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(tuned_program, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(trial, "FAR_OFF", float("inf"))
    monkeypatch.setattr(trial._THREADS, "seconds_since", lambda before: 0.0)  # as on an idle machine
    yield
    tuned_program._ANSWERS.clear()


def taking(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Replace the measured times: these seconds for each named candidate, 0.1 s for the others."""
    add = Answer.add
    monkeypatch.setattr(Answer, "add", lambda self, name, *_: add(self, name, seconds.get(name, 0.1)))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def steps(module: ORTModule, x: torch.Tensor, count: int) -> None:
    """Run steps, each compared with eager PyTorch."""
    plain = module._torch_module if hasattr(module, "_torch_module") else module.module
    exact = Net().double()
    exact.load_state_dict(plain.state_dict())
    for _ in range(count):
        results = []
        for run, leaf in (
            (module, x.detach().requires_grad_()),
            (plain, x.detach().requires_grad_()),
            (exact, x.double().detach().requires_grad_()),
        ):
            run.zero_grad()
            y = run(leaf)
            y.backward(torch.ones_like(y) / 3)
            model = exact if run is exact else plain
            results.append((y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())))
        for got, eager, true in zip(*results, strict=True):
            assert_no_worse_than_eager("step", got, eager, true)


def forward_of(module: ORTModule) -> Any:
    return engine_of(module).newest().unit.forward


@pytest.mark.everywhere
@pytest.mark.usefixtures("measure_everything")
@pytest.mark.parametrize("slow", ["aten", "onednn"])
def test_the_faster_kernel_is_chosen_and_kept(
    slow: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking(monkeypatch, **{"aten": 1e-3, "onednn": 1e-3, slow: 2e-3})
    torch.manual_seed(0)
    module, x = ORTModule(Net(), cache_dir=tmp_path), torch.randn(3, 5, 16)
    steps(module, x, 2 * SAMPLES + 4)
    chosen = {a.choice for q, a in load(file_of(tmp_path)).items() if "Linear" in q}
    assert chosen == {"onednn" if slow == "aten" else "aten"}
    assert ("onednn_gemm" in forward_of(module).source) == (slow == "aten")
    with torch.profiler.profile() as profiled:  # shows the kernels that run without a profiler
        steps(module, x, 1)
    assert any("_linear_pointwise" in event.key for event in profiled.key_averages()) == (slow == "aten")


@pytest.mark.usefixtures("measure_everything")
def test_a_capture_on_another_thread_removes_no_candidate(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch disables oneDNN for the whole process while it traces."""
    variant = tuned_program.TunedProgram._variant

    def meanwhile(program: tuned_program.TunedProgram, kernels: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return variant(program, kernels)

    monkeypatch.setattr(tuned_program.TunedProgram, "_variant", meanwhile)
    taking(monkeypatch, onednn=1e-3)
    module = ORTModule(Net(), cache_dir=tmp_path)
    steps(module, torch.randn(3, 5, 16), 2 * SAMPLES + 4)
    assert "onednn_gemm" in forward_of(module).source


@pytest.mark.usefixtures("measure_everything")
def test_a_settled_program_only_compares_shapes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taking(monkeypatch, aten=1e-3)
    module = ORTModule(Net(), cache_dir=tmp_path)
    x = torch.randn(4, 16)
    steps(module, x, 2 * SAMPLES + 4)
    forward = forward_of(module)
    asked: list[Any] = []
    other_shapes = forward.namespace["other_shapes"]
    forward.namespace["other_shapes"] = lambda *call: (asked.append(call), other_shapes(*call))[1]
    steps(module, x, 3)
    assert not asked
    steps(module, torch.randn(4096, 16), 2 * SAMPLES + 4)  # other sizes are measured
    assert asked
    asked.clear()
    steps(module, torch.randn(4096, 16), 2)
    assert not asked
    steps(module, x, 2)  # settled sizes: once, then their shapes are the ones compared
    assert len(asked) == 1


@pytest.mark.usefixtures("measure_everything")
def test_with_tuning_off_earlier_answers_are_used_and_nothing_is_measured(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ORTModule(Net(), tuning=False, cache_dir=tmp_path)
    steps(module, torch.randn(8, 16), 3)
    assert not file_of(tmp_path).exists()
    assert "onednn_gemm" not in forward_of(module).source
    tuned_program._ANSWERS.clear()

    taking(monkeypatch, onednn=1e-3)
    steps(ORTModule(Net(), cache_dir=tmp_path), torch.randn(8, 16), 2 * SAMPLES + 4)
    tuned_program._ANSWERS.clear()
    again = ORTModule(Net(), tuning=False, cache_dir=tmp_path)
    steps(again, torch.randn(8, 16), 2)
    assert "onednn_gemm" in forward_of(again).source


@pytest.mark.usefixtures("measure_everything")
def test_the_time_limit_ends_a_measurement(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taking(monkeypatch)
    module = ORTModule(Net(), cache_dir=tmp_path, tuning=2)
    steps(module, torch.randn(3, 8, 16), 1)
    answers = tuned_program.answers_in(file_of(tmp_path))
    assert all(a.choice and sum(s.calls for s in a.samples.values()) == 1 for q, a in answers.items() if "Linear" in q)


@pytest.mark.everywhere
@pytest.mark.usefixtures("measure_everything")
@pytest.mark.parametrize("why", ["rng", "deterministic"])
def test_the_cost_model_alone_decides_if_results_must_be_bitwise_equal(why: str, tmp_path: pathlib.Path) -> None:
    if why == "deterministic":
        torch.use_deterministic_algorithms(True)
    try:
        options = {"rng": "torch"} if why == "rng" else {}
        module = ORTModule(Net(), cache_dir=tmp_path, **options)
        x = torch.randn(8, 16)
        first = module(x)
        assert all(torch.equal(first, module(x)) for _ in range(10))
        assert not isinstance(forward_of(module), tuned_program.TunedProgram)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not file_of(tmp_path).exists()


def test_small_matmuls_are_not_measured(tmp_path: pathlib.Path) -> None:
    module = ORTModule(Net(), cache_dir=tmp_path)
    steps(module, torch.randn(8, 16), 3)
    assert tuned_program.answers_in(file_of(tmp_path)) == {}


def test_a_drained_list_keeps_no_tensor_alive() -> None:
    tensors = [torch.randn(3, 3)]
    drained = tuned_program.drain(tensors)
    assert next(drained).shape == (3, 3)
    assert tensors == []


@pytest.mark.usefixtures("measure_everything")
@pytest.mark.parametrize("far_off", [1.5, 100.0])  # here oneDNN is expected to take six times as long
def test_a_candidate_that_is_expected_to_be_far_slower_is_not_tried(
    far_off: float, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "FAR_OFF", far_off)
    steps(ORTModule(Net(), cache_dir=tmp_path), torch.randn(3, 2, 16), 4)
    tried = {name for answer in tuned_program.answers_in(file_of(tmp_path)).values() for name in answer.samples}
    assert ("onednn" in tried) == (far_off > 6)


@pytest.mark.usefixtures("measure_everything")
@pytest.mark.parametrize("looks", [True, False])
def test_a_program_skips_candidates_that_are_slower_at_nearby_sizes(
    looks: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not looks:
        monkeypatch.setattr(trial, "worse_nearby", lambda *_: set())
    module = ORTModule(Net(), cache_dir=tmp_path)
    steps(module, torch.randn(64, 16), 2)
    answers = tuned_program.answers_in(file_of(tmp_path))
    asked = set(answers)
    assert asked
    for key in asked:
        answers[key] = answered(aten=1e-3, onednn=2e-3, convolution=2e-3, compiled=2e-3)
    steps(module, torch.randn(96, 16), 2)
    assert (set(answers) == asked) == looks


@pytest.mark.usefixtures("measure_everything")
def test_the_first_step_tries_nothing(tmp_path: pathlib.Path) -> None:
    module = ORTModule(Net(), cache_dir=tmp_path)
    steps(module, torch.randn(64, 16), 1)
    answers = tuned_program.answers_in(file_of(tmp_path))
    assert not answers
    steps(module, torch.randn(96, 16), 1)
    assert answers


def test_expected_shapes_are_integers() -> None:
    case = OpCase("onnxtrain", "Linear", (Spec("b s k"), Spec("n k")), torch.nn.functional.linear)
    (node,) = CaseCheck(case, torch.float32).model.graph
    assert expected.expected_shapes(node) == ((32, 32, 32), (32, 32))


# The command


def test_the_tune_command_measures_shows_and_forgets(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--folder", str(tmp_path)]
    assert cli.main(["tune", *folder]) == 0
    assert "nothing measured yet" in capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cli.main(["tune", "--shapes", "256x128x256", *folder]) == 0
    capsys.readouterr()
    save(file_of(tmp_path), {"onnxtrain::Linear() float 8x8": answered(aten=2e-3, onednn=1e-5)})
    assert cli.main(["tune", *folder]) == 0
    shown = capsys.readouterr().out
    assert "10 µs" in shown
    assert "onednn" in shown
    assert cli.main(["tune", "--clear", *folder]) == 0
    assert load(file_of(tmp_path)) == {}


def test_the_tune_command_ignores_answers_at_nearby_sizes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearby = "onnxtrain::Linear() float 512x128 256x128 256"
    save(file_of(tmp_path), {nearby: answered(aten=1e-3, onednn=2e-3)})
    seen: list[set[str]] = []
    monkeypatch.setattr(trial, "worse_nearby", lambda *arguments: seen.append(set(arguments[3])) or set())
    assert cli.main(["tune", "--shapes", "256x128x256", "--folder", str(tmp_path)]) == 0
    assert seen
    assert not any(nearby in answers for answers in seen)
    assert nearby in load(file_of(tmp_path))


@pytest.mark.parametrize("text", ["12", "0x4x4", "axbxc", "1x2x3x4"])
def test_the_tune_command_explains_the_format_of_sizes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--shapes", text]) == cli.USAGE
    assert "ROWSxINPUTSxOUTPUTS" in capsys.readouterr().err


@pytest.mark.skipif(not pathlib.Path("/proc/self/schedstat").exists(), reason="only Linux says how long threads wait")
def test_time_spent_waiting_for_a_core_is_counted() -> None:
    threads = trial._Threads()
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[:1])
        before = threads.seconds_waited()
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            deadline = time.monotonic() + WAIT_LIMIT_S
            while threads.seconds_since(before) == 0.0 and time.monotonic() < deadline:
                sum(range(100_000))
        finally:
            busy.kill()
            busy.wait()
    finally:
        os.sched_setaffinity(0, cores)
    assert threads.seconds_since(before) > 0.0


def test_ended_threads_do_not_count_as_waiting() -> None:
    threads = trial._Threads()
    gate = threading.Event()
    other = threading.Thread(target=gate.wait)
    other.start()
    before = threads.seconds_waited()
    gate.set()
    other.join()
    assert threads.seconds_since(before) >= 0.0
    assert threads.seconds_since(threads.seconds_waited()) >= 0.0


def test_concurrent_threads_close_no_file_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_LIST_SECONDS", -1.0)  # the files are opened each time
    open_now: set[int] = set()
    twice: list[int] = []

    def opening(*args: Any) -> int:
        file = os.open(*args)
        open_now.add(file)
        return file

    def closing(file: int) -> None:
        if file not in open_now:
            twice.append(file)
            return
        open_now.discard(file)
        time.sleep(0)  # another thread may come between
        os.close(file)

    own = {"open": opening, "close": closing}
    monkeypatch.setattr(trial, "os", SimpleNamespace(**{**vars(os), **own}))
    threads = trial._Threads()
    asking = [threading.Thread(target=lambda: [threads.seconds_waited() for _ in range(25)]) for _ in range(4)]
    for one in asking:
        one.start()
    for one in asking:
        one.join()
    assert not twice
    assert len(open_now) == len(threads._files)
