"""Operations that are launched early and awaited late on a device with streams."""

from __future__ import annotations

import copy

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute import host_batch
from onnxtrain.execute.host_batch import NumberOnHost
from onnxtrain.execute.program import Program
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.interfaces.host_reads import PendingInt
from onnxtrain.plan import streams
from onnxtrain.plan.cut import Part, single_part
from onnxtrain.plan.streams import Phase, Step, scheduled, steps
from tests.plan.stream_simulator import RaceError, simulate

GRADIENTS = """<ir_version: 10, opset_import: ["": 21, "onnxtrain": 1]>
g (float[N, 8] dy, float[8, 8] w, float[8, N] xt) => (float[N, 8] r, float[8, 8] dw, float[8, 8] dv, float[8, 8] du)
{
    du = MatMul(xt, dy)
    dx = MatMul(dy, w)
    s = onnxtrain.AllReduce<size = 1, group = "">(dx)
    g = onnxtrain.WaitCollective(s, dx)
    r = Relu(g)
    rt = Transpose<perm = [1, 0]>(r)
    dv = MatMul(rt, dy)
    scaled = Neg(xt)
    dw = MatMul(scaled, dy)
}"""

LOSS = """<ir_version: 10, opset_import: ["": 21, "onnxtrain": 1]>
loss (float[N, 4] x, float[4, 4] w, int64[N] labels, int64 ignored) => (int64[1, C] rows, float[N, 4] y)
{
    y = MatMul(x, w)
    equal = Equal(labels, ignored)
    kept = Not(equal)
    rows = NonZero(kept)
}"""


TYPES = {"Equal": ir.DataType.BOOL, "Not": ir.DataType.BOOL, "NonZero": ir.DataType.INT64}


def part_of(text: str, device: str = "cuda") -> Part:
    model = ir.from_onnx_text(text)
    for value in (v for node in model.graph for v in node.outputs if v.dtype is None):
        producer = value.producer()
        assert producer is not None
        value.dtype = TYPES.get(producer.op_type, ir.DataType.FLOAT)
        value.shape = ir.Shape(["N"] if producer.op_type in TYPES else ["N", 8])
    return scheduled(single_part(model), device)


def order(part: Part) -> list[str]:
    return [node.outputs[0].name or "" for node in part.nodes]


def test_independent_work_overlaps_a_collective() -> None:
    """Gradients of weights before and after it are computed meanwhile; what reads the sum comes after."""
    assert order(part_of(GRADIENTS, "cpu")) == ["du", "dx", "s", "g", "r", "rt", "dv", "scaled", "dw"]
    part = part_of(GRADIENTS)
    assert order(part) == ["dx", "s", "du", "scaled", "dw", "g", "r", "rt", "dv"]
    tensors = [torch.randn(3, 8), torch.randn(8, 8), torch.randn(8, 3)]
    results = [
        Program(p, "gradients", torch.device("cpu")).run(list(tensors), ())[0]
        for p in (part, part_of(GRADIENTS, "cpu"))
    ]
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_a_number_that_depends_on_integers_is_copied_first() -> None:
    part = part_of(LOSS)
    assert [(s.node.op_type, s.phase) for s in steps(part)][:4] == [
        ("Equal", Phase.RUN),
        ("Not", Phase.RUN),
        ("NonZero", Phase.START_READ),
        ("MatMul", Phase.RUN),
    ]
    assert not part_of(LOSS, "cpu").early_reads


@pytest.mark.parametrize("text", [GRADIENTS, LOSS])
def test_each_event_is_needed(text: str) -> None:
    part = part_of(text)
    plan = list(steps(part))
    simulate(part, plan)
    events = [s.node for s in plan if s.phase is Phase.FINISH_READ or s.node.op_type == "WaitCollective"]
    assert events
    for node in events:
        with pytest.raises(RaceError):
            simulate(part, plan, without=node)


def test_the_simulator_finds_values_that_are_read_too_early() -> None:
    part = part_of(GRADIENTS)
    plan = list(steps(part))
    waits = next(i for i, s in enumerate(plan) if s.node.op_type == "WaitCollective")
    with pytest.raises(RaceError, match="is read before it is launched"):
        simulate(part, [*plan[:waits], plan[waits + 1], plan[waits], *plan[waits + 2 :]])
    part = part_of(LOSS)
    without_start = [s for s in steps(part) if s.phase is not Phase.START_READ]
    with pytest.raises(RaceError, match="not launched"):
        simulate(part, without_start)
    early = [Step(node, Phase.START_READ) for node in part.early_reads] + without_start
    with pytest.raises(RaceError, match="is read before it is launched"):
        simulate(part, early)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.score = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(words)
        logits = self.score(torch.tanh(self.mix(hidden + hidden.mean(1, keepdim=True))))
        return {"loss": nn.functional.cross_entropy(logits.view(-1, 11), labels.view(-1)), "logits": logits}


def test_labels_are_counted_before_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Masked()
    words = torch.randint(11, (3, 5))
    batches = [words.masked_fill(torch.rand(3, 5) >= labelled, -100) for labelled in (0.3, 1.0, 0.0)]
    gradients = []
    for devices in (frozenset[str](), frozenset({"cpu"})):
        monkeypatch.setattr(streams, "DEVICES", devices)
        model = ORTModule(module, keep_outputs=("loss",), skip_padding="never")
        for labels in batches:
            module.zero_grad()
            model(words, labels)["loss"].backward()
            gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        source = engine_of(model).newest().unit.forward.source
        assert ("start_read" in source) == bool(devices)
    assert source.index("start_read(") < source.index(" = embedding")
    for expected, got in zip(gradients[:3], gradients[3:], strict=True):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def gradients_of(model: nn.Module, words: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(words, labels)["loss"].backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_labels_that_the_host_knows_are_not_counted_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that were changed on the device since are counted there: none is skipped."""
    torch.manual_seed(0)
    monkeypatch.setattr(streams, "DEVICES", frozenset({"cpu"}))
    eager, words = Masked(), torch.randint(11, (3, 5))
    model = ORTModule(copy.deepcopy(eager), keep_outputs=("loss",), skip_padding="never")
    number_of = NumberOnHost.__call__

    def asked(self: NumberOnHost, *tensors: torch.Tensor) -> PendingInt | None:
        number = number_of(self, *tensors)
        numbers.append(None if number is None else number.result())
        return number

    monkeypatch.setattr(NumberOnHost, "__call__", asked)
    for labelled, is_known, is_changed in (
        (0.3, False, False),
        (0.6, True, False),
        (0.2, True, True),
        (0.0, True, False),
    ):
        numbers: list[int | None] = []
        labels = words.masked_fill(torch.rand(3, 5) >= labelled, -100)
        if is_known:
            host_batch.remember(labels, labels.clone())
        if is_changed:
            labels[:, 1:] = 3
        for got, expected in zip(gradients_of(model, words, labels), gradients_of(eager, words, labels), strict=True):
            torch.testing.assert_close(got, expected, equal_nan=True)
        assert numbers == [int((labels >= 0).sum()) if is_known and not is_changed else None]


def test_a_pending_number_is_copied_to_pinned_memory_and_awaited_by_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PendingInt(torch.tensor(7)).result() == 7
    log = []

    class Event:
        def record(self, stream: str) -> None:
            log.append(f"recorded on {stream}")

        def synchronize(self) -> None:
            log.append("awaited")

    class Number(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    empty_like = torch.empty_like

    def pinned(tensor: torch.Tensor, device: str, pin_memory: bool) -> torch.Tensor:
        log.append(f"{device}, pinned: {pin_memory}")
        return empty_like(tensor).as_subclass(torch.Tensor)

    monkeypatch.setattr(torch, "empty_like", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "its stream")
    pending = PendingInt(torch.tensor(7).as_subclass(Number))
    assert log == ["cpu, pinned: True", "recorded on its stream"]
    assert pending.result() == 7
    assert log[2:] == ["awaited"]


@pytest.mark.gpu
def test_ignored_labels_are_skipped_on_a_gpu() -> None:
    torch.manual_seed(0)
    eager = Masked().cuda()
    model = ORTModule(copy.deepcopy(eager), keep_outputs=("loss",), skip_padding="never")
    for labelled in (0.3, 0.6, 1.0):
        words = torch.randint(11, (3, 5), device="cuda")
        labels = words.masked_fill(torch.rand(3, 5, device="cuda") >= labelled, -100)
        for module in (eager, model):
            module.zero_grad()
            module(words, labels)["loss"].backward()
        for got, expected in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)
