"""Programs that are recorded and replayed, as on a GPU, by a recorder that runs on a CPU.

A replay computes into the memory of the recorded results: a tensor that was returned without a copy gets wrong values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.profiler import profile

from onnxtrain import ORTModule
from onnxtrain.execute.cuda_recorder import recorder_for
from onnxtrain.execute.recorded_program import (
    CALLS,
    MAX_MOVES,
    MAX_RECORDINGS,
    MAX_SIZES,
    Recording,
    Recordings,
    Results,
)
from onnxtrain.execute.recorded_results import NotRecordedError
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.frontend.prepare import prepare
from onnxtrain.plan.cut import single_part
from onnxtrain.report import CompileReport
from tests.execute.cpu_recorder import CpuRecorder, Recorders, Trained


class Network(nn.Module):
    """Results that share memory, a result that shares an input's, a mutated buffer, and arithmetic on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 12)
        self.norm = nn.BatchNorm1d(12)
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 5)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.norm((self.table(tokens) + x).transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(h).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(1, 2) / x.shape[1], -1) @ v
        y = torch.tanh(self.out(mixed))
        return y, y.reshape(-1, 5), x.transpose(0, 1), y.square().mean()


@pytest.fixture(scope="module")
def compiled(everything: Recorders) -> nn.Module:
    torch.manual_seed(1)
    return ORTModule(Network().double(), rng="torch", cuda_graphs=True)


@pytest.fixture
def network(compiled: nn.Module, log: Recorders) -> Trained:
    return Trained(compiled.train(), log)


def small(log: Recorders, **options: Any) -> Trained:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    return Trained(ORTModule(module, rng="torch", cuda_graphs=True, **options), log)


def forward(model: nn.Module, seed: int = 0, rows: int = 3, length: int = 4) -> tuple[torch.Tensor, ...]:
    """The results of the network, and its input."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(7, (rows, length), generator=generator)
    x = torch.randn(rows, length, 12, generator=generator, dtype=torch.float64).requires_grad_()
    return (*model(tokens, x), x)


def step(model: nn.Module, seed: int = 0, rows: int = 3, length: int = 4) -> list[torch.Tensor]:
    """Run forward and backward; returns the results and the input's gradient. Those of parameters accumulate."""
    y, flat, turned, loss, x = forward(model, seed, rows, length)
    ((y * flat.reshape(y.shape).detach() + turned.transpose(0, 1)[..., :5]).sum() + loss).backward()
    assert x.grad is not None
    return [y, flat, turned, loss, x.grad]


def small_step(model: nn.Module, seed: int = 0, rows: int = 3) -> list[torch.Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    y = model(x)
    y.sum().backward()  # with an expanded cotangent
    assert x.grad is not None
    return [y, x.grad]


def test_training_is_the_same(network: Trained, log: Recorders) -> None:
    """New inputs, accumulated gradients, parameters and buffers that change in place; kept results stay unchanged."""

    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        kept = []
        for number in range(CALLS + 6):
            kept += step(model, number)
            log.poison()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return kept

    network.both(train)
    assert log.since() == (2, 12)


def test_two_forwards_before_their_backwards(network: Trained, log: Recorders) -> None:
    def interleaved(model: nn.Module) -> list[torch.Tensor]:
        for _ in range(CALLS):
            forward(model)[3].backward()
        first, second = (forward(model, seed)[3] for seed in (5, 6))
        log.poison()
        third = forward(model, 7)[3]
        (first * 2).backward(retain_graph=True)
        log.poison()
        second.backward()
        first.backward()
        third.backward()
        return [first, second, third]

    network.both(interleaved)
    assert log.since() == (6, 7)  # what three forwards keep is alive at the same time


def test_results_that_share_memory_share_it_with_recordings(network: Trained, log: Recorders) -> None:
    def change(model: nn.Module) -> list[torch.Tensor]:
        for _ in range(CALLS + 1):
            y, flat, turned, _, x = forward(model)
        with torch.no_grad():
            y[0, 0, 0] = 9
            turned[0, 0, 0] = 8
        return [y, flat, turned, x]

    network.both(change)
    assert log.since() == (1, 1)


class Shared(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y, y.view(-1)


def test_results_that_are_no_views_may_be_changed_in_place(log: Recorders) -> None:
    """Autograd refuses in-place changes of views returned by an autograd function."""

    def results(model: nn.Module) -> list[torch.Tensor]:
        for _ in range(CALLS + 1):
            outputs = model(torch.ones(2, 3, requires_grad=True))
        outputs[0].mul_(2)
        return [*(t.detach() for t in outputs), torch.tensor([t._is_view() for t in outputs])]

    Trained(ORTModule(Shared(), rng="torch", cuda_graphs=True), log).both(results)
    assert log.since() == (1, 1)


def test_changing_a_saved_tensor_is_refused_as_in_eager(network: Trained, log: Recorders) -> None:
    """Also if the change would not affect the memory of the recording."""
    for _ in range(CALLS + 1):
        step(network.model)
    y, _, _, loss, _ = forward(network.model)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified (by an )?in-?place"):
        loss.backward()
    loss = forward(network.model)[3]
    with torch.no_grad():
        network.model.get_parameter("out.weight").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert log.since() == (3, 4)  # the second loss was computed while the first one's graph was alive


def test_a_moved_parameter_is_read_at_its_new_address(log: Recorders) -> None:
    trained = small(log)
    model = trained.model
    for _ in range(CALLS + 1):
        small_step(model)
    log.since()
    for moves in range(1, MAX_MOVES + 3):
        weight = model.get_parameter("2.weight")
        old = weight.data
        weight.data = weight.data * 1.5
        old.fill_(float("nan"))
        for number in range(CALLS + 3):
            gradient = small_step(model, number)
            log.poison()
            log.busy = True
            torch.testing.assert_close(gradient, small_step(model, number), rtol=0, atol=0)
            log.busy = False
        records, plays = log.since()
        # Once it has moved too often, it is copied at each call, and nothing is recorded any more when it moves.
        assert (records, plays) == ((2, 4) if moves <= MAX_MOVES + 1 else (0, 2 * (CALLS + 3)))


def test_other_strides_at_the_same_address_are_another_recording(log: Recorders) -> None:
    trained = small(log)
    for _ in range(CALLS + 2):
        small_step(trained.model)
    weight = trained.model.get_parameter("2.weight")
    weight.data = weight.data.t()
    trained.start = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    trained.both(lambda model: [t for number in range(CALLS + 2) for t in small_step(model, number)])
    assert log.since()[0] == 4


def test_each_set_of_sizes_has_its_recording(network: Trained, log: Recorders) -> None:
    shapes = [(3, 4), (1, 4), (2, 5)] * (CALLS + 2)
    network.both(lambda model: [t for i, (rows, length) in enumerate(shapes) for t in step(model, i, rows, length)])
    assert log.since() == (6, 12)
    assert log.settled == 0


def test_the_least_recently_used_recording_is_dropped(log: Recorders) -> None:
    model = small(log).model.eval()

    def call(rows: int) -> None:
        with torch.no_grad():
            model(torch.randn(rows, 4, dtype=torch.float64))

    for rows in range(2, 2 + MAX_SIZES):
        for _ in range(CALLS + 1):
            call(rows)
    assert log.since() == (MAX_SIZES, MAX_SIZES)
    for rows in (2, 20, 2, 3):  # 20 takes the place of 3, and 3 that of 4
        call(rows)
    assert log.since() == (0, 2)
    assert log.settled == 2
    assert len(log.programs[-1].entries) == MAX_SIZES


def test_evaluation(log: Recorders) -> None:
    trained = small(log)
    for context in (torch.no_grad, torch.inference_mode):

        def evaluate(model: nn.Module, context: Callable[[], Any] = context) -> list[torch.Tensor]:
            with context():
                return [model(torch.full((3, 4), float(i), dtype=torch.float64)) for i in range(CALLS + 3)]

        trained.model.eval()
        trained.both(evaluate)
        assert log.since() == (1, 3)
        trained.model.train()
        trained.both(lambda model: [t for i in range(CALLS + 2) for t in small_step(model, i)])
        assert log.since()[1] >= 4


def test_sizes_of_zero_and_one(log: Recorders) -> None:
    trained = small(log)
    shapes = [0, 1, 5] * (CALLS + 2)
    trained.both(lambda model: [t for i, rows in enumerate(shapes) for t in small_step(model, i, rows)])
    assert log.since() == (6, 12)


class Summed(nn.Module):
    """Its backward takes a size that no argument has; a gradient is a view of a cotangent; a result has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2).sum(0), (x + self.bias).flatten(), (x * 3)[:, 1:]


@pytest.mark.parametrize("result", [0, 1, 2])
def test_sizes_and_views_of_backward(log: Recorders, result: int) -> None:
    trained = Trained(ORTModule(Summed().double(), rng="torch", cuda_graphs=True), log)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        collected = []
        for number in range(2 * CALLS + 4):
            x = torch.full((3 + number % 2, 4), 0.1 * number, dtype=torch.float64, requires_grad=True)
            y = model(x)[result]
            collected += [y, torch.tensor(y.stride())]
            for cotangent in (torch.full_like(y, number), torch.tensor(float(number)).double().expand_as(y)):
                collected += torch.autograd.grad(y, x, cotangent, retain_graph=True)
                log.poison()
        return collected

    trained.both(gradients)
    assert (
        log.since()[0] == 2 + 4
    )  # forward at two sizes; backward at two sizes, with cotangents of two stride patterns


def test_early_gradients(log: Recorders) -> None:
    trained = small(log, early_gradients=True)
    trained.both(lambda model: [t for number in range(CALLS + 2) for t in small_step(model, number)])
    records, plays = log.since()
    assert records > 2
    assert plays == 2 * records


def test_blocks_of_one_graph_have_their_own_recordings(log: Recorders) -> None:
    torch.manual_seed(1)
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
    module = nn.Sequential(nn.Sequential(*blocks)).double()
    trained = Trained(prepare(module, regional=True, rng="torch", cuda_graphs=True), log)
    trained.both(lambda model: [t for number in range(CALLS + 2) for t in small_step(model, number)])
    assert log.since() == (6, 12)


def test_replays_of_several_threads_are_exclusive(log: Recorders) -> None:
    model = small(log).model
    batches = [torch.full((3, 4), float(seed), dtype=torch.float64) for seed in range(4)]
    log.busy = True
    expected = [model(x).detach() for x in batches]
    log.busy = False

    def equal(pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
        return all(torch.equal(model(pair[0]), pair[1]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(equal, zip(batches, expected, strict=True)))
    records, plays = log.since()
    # One for each thread that held a result while another one called; the first may be dropped for one that copies it.
    assert records <= MAX_RECORDINGS + 1
    # A call runs the ordinary program only while the results of all recordings are alive, or recording has not begun.
    assert plays == 4 * 20 - CALLS or records >= MAX_RECORDINGS, (records, plays)


def test_nothing_is_replayed_while_the_caller_records_or_profiles(log: Recorders) -> None:
    model = small(log).model
    for _ in range(CALLS + 1):
        small_step(model)
    assert log.since() == (2, 2)
    log.busy = True
    small_step(model)
    log.busy = False
    with profile() as profiled:
        small_step(model)
    assert any(event.key.startswith("Linear") for event in profiled.key_averages())
    assert log.since() == (0, 0)
    small_step(model)
    assert log.since() == (0, 2)


def test_a_failing_recorder_leaves_the_ordinary_program(log: Recorders, caplog: pytest.LogCaptureFixture) -> None:
    trained = small(log)
    log.error = RuntimeError("operation not permitted when stream is capturing\nmore")
    trained.both(lambda model: [t for number in range(2 * CALLS + 3) for t in small_step(model, number)])
    assert log.since() == (2, 0)  # it is tried once for each program
    assert "capturing" in caplog.text
    assert "more" not in caplog.text


class Dropped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * 2, 0.5)


def test_each_replay_samples_anew(log: Recorders) -> None:
    trained = Trained(ORTModule(Dropped().double(), rng="torch", cuda_graphs=True), log)

    def masks(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        outputs = []
        for _ in range(CALLS + 4):
            x = torch.ones(4, 9, dtype=torch.float64, requires_grad=True)
            y = model(x)
            outputs += [y.detach(), *torch.autograd.grad(y.sum(), x)]
            log.poison()
        assert not any(torch.equal(a, b) for a, b in zip(outputs[:-2:2], outputs[2::2], strict=True))
        return [*outputs, torch.rand(1)]

    trained.both(masks)
    assert log.since() == (2, 8)


class Foreign(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.matrix_exp(x[:3])


class Selected(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)[x > 0].sum()


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor) -> torch.Tensor:
        return dy[0] * 2


class Called(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        custom: torch.Tensor = Custom.apply(x)
        return custom.exp()


def report_of(model: nn.Module) -> CompileReport:
    report: CompileReport = engine_of(model).newest().report
    return report


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (Foreign(), {}, "it may sample on the host"),
        (Selected(), {}, "its results determine sizes"),
        (Called(), {}, "it runs the user's Python"),
        (nn.Linear(3, 3), {"memory_budget_bytes": 10**6}, "which memory_budget_bytes does not count"),
    ],
)
def test_refusals_are_in_the_report_and_the_log(
    log: Recorders, caplog: pytest.LogCaptureFixture, module: nn.Module, options: dict[str, Any], reason: str
) -> None:
    model = ORTModule(module, rng="torch", cuda_graphs=True, **options)
    for _ in range(CALLS + 2):
        x = torch.randn(4, 3, requires_grad=True)
        model(x).sum().backward()
    (refusal, *_) = [r for r in report_of(model).refused if r.pass_name == "cuda_graphs"]
    assert reason in refusal.reason
    (said,) = [r.getMessage() for r in caplog.records if str(refusal) in r.getMessage()] or [""]
    assert reason in said


def test_values_that_the_host_reads_are_refused(log: Recorders) -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 21]>
        expand (float[N] x, int64[1] n) => (float[M] y) { m = Add(n, n) y = Expand(x, m) }"""
    )
    device = torch.device("cpu")
    refusal = Recordings(CpuRecorder(log), device, frozenset()).refusal(single_part(model))
    assert refusal is not None
    assert "the host reads a value" in refusal.reason


def test_tensors_of_another_device_are_refused(log: Recorders) -> None:
    """Here the recorder's device differs: a recording would contain the value of a CPU tensor."""
    model = small(log).model
    log.busy = True
    small_step(model)
    log.busy = False
    program = engine_of(model).newest().unit.forward
    tensors = [torch.ones(4, 4), torch.ones(4)]
    elsewhere = Recordings(CpuRecorder(log), torch.device("meta"), frozenset())
    with pytest.raises(NotRecordedError, match="an argument is on cpu, expected meta"):
        Recording(program.part, program.run, elsewhere, tensors, (), (0, 0))


def test_the_option_warns_without_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("onnxtrain.execute.cuda_recorder.recorder_for", recorder_for)
    monkeypatch.setattr("onnxtrain.log._logged", set())
    ORTModule(nn.Linear(2, 2), cuda_graphs=True)(torch.ones(1, 2))
    assert "cuda_graphs has no effect on the device cpu" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), (32,)),
        (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), (7, 32)),
    ],
)
def test_training_on_a_gpu_equals_eager(
    module: nn.Module, shape: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two streams, and at two sizes."""
    play, plays = Recording.run, list[Recording]()

    def counted(self: Recording, tensors: list[torch.Tensor]) -> Results:
        plays.append(self)
        return play(self, tensors)

    monkeypatch.setattr(Recording, "run", counted)
    eager = module.cuda().double()
    model = ORTModule(copy.deepcopy(eager), rng="torch", cuda_graphs=True)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for number in range(2 * CALLS + 8):
        x = torch.randn(3 + number % 2, *shape, device="cuda", dtype=torch.float64)
        stream = streams[number // 2 % 2]
        stream.wait_stream(streams[0])
        with torch.cuda.stream(stream):
            y = model(x)
            y.square().mean().backward()
        streams[0].wait_stream(stream)
        expected = eager(x)
        expected.square().mean().backward()
        torch.testing.assert_close(y, expected)
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
            assert other.grad is not None
            with torch.no_grad():
                mine.sub_(other.grad, alpha=0.1)
                other.sub_(other.grad, alpha=0.1)
    assert len(plays) == 2 * 2 * 4
