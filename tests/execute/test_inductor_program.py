"""Programs by Inductor: what is compiled, for which calls it runs, and when it is refused. A stand-in compiles."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain.errors import GraphError
from onnxtrain.execute.inductor_program import program as by_inductor
from onnxtrain.execute.inductor_program.call import ArtifactCall
from onnxtrain.execute.inductor_program.call import load as load_artifact
from onnxtrain.execute.inductor_program.program import InductorProgram
from onnxtrain.execute.inductor_program.request import ArgumentSpec, Layout, ProgramRequest
from onnxtrain.execute.inductor_program.split import split
from onnxtrain.execute.inductor_program.stored import StoredProgram
from onnxtrain.execute.program import Program
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.native import background
from onnxtrain.native.build import BuildError, append_digest
from onnxtrain.ops.attention import flash, traced
from onnxtrain.ops.index.gather import plus_row_sums
from onnxtrain.ops.interfaces.traced_calls import TRACED_CALLS
from onnxtrain.ops.loss.cross_entropy_saving_logits import gradient_by_aten, loss_by_aten
from onnxtrain.plan.cut import Part
from onnxtrain.torch_compat import program_compiler
from onnxtrain.torch_compat.program_compiler import TraceError
from tests.execute.region_cases import CPU, Trained, part_of
from tests.reference import assert_matches

# Splitting


def viewed(op: Builder, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ...]:
    total = op.Add(x, y)
    turned = op.Transpose(total, perm=[1, 0])
    return total, turned, op.Transpose(x, perm=[1, 0]), op.Exp(turned), x


def test_inductor_computes_the_memory_and_pytorch_makes_the_views() -> None:
    part = part_of(viewed, ["b h", "b h"])
    parts = split(part)
    assert [v.producer().op_type for v in parts.computed.outputs if v is not None] == ["Add", "Exp"]  # type: ignore[union-attr]
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    roots, _ = Program(parts.computed, "computed", CPU).run([x, y], ())
    arguments = [(x, y)[i] for i in parts.inputs]
    results, _ = Program(parts.views, "views", CPU).run([*arguments, *roots], ())
    expected, _ = Program(part, "program", CPU).run([x, y], ())
    for got, want in zip(results, expected, strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
    total, turned, of_x, _, same = results
    assert turned.data_ptr() == total.data_ptr()
    assert of_x.data_ptr() == x.data_ptr()
    assert same is x


def test_a_program_without_results_of_its_own_is_not_compiled() -> None:
    with pytest.raises(GraphError, match="computes no tensor"):
        split(part_of(lambda op, x: op.Transpose(x, perm=[1, 0]), ["b h"]))


# Sizes and strides


@pytest.mark.parametrize(
    "make",
    [
        lambda b, h: torch.empty(b, h, 4),
        lambda b, h: torch.empty(h, b, 4).transpose(0, 1),
        lambda b, h: torch.empty(b, h, 12)[..., 4:8],
        lambda b, h: torch.empty(b, 1, 4).expand(b, h, 4),
        lambda b, h: torch.empty(4, h, b).permute(2, 1, 0),
    ],
)
def test_strides_follow_from_the_sizes_of_a_call(make: Callable[[int, int], torch.Tensor]) -> None:
    part = part_of(lambda op, x: op.Exp(x), ["b h 4"])
    layout = Layout(part, [ArgumentSpec.from_tensor(make(5, 7))], ())
    for b, h in ((5, 7), (2, 9), (31, 3)):
        tensor = make(b, h)
        values = layout.values([tensor], ())
        assert values == [b, h]
        assert layout.strides_at(values) == [tensor.stride()]


def test_equal_programs_have_one_artifact_for_all_sizes() -> None:
    part = part_of(lambda op, x: op.Exp(x), ["b h"])
    requests = [
        ProgramRequest(split(part).computed, [ArgumentSpec.from_tensor(tensor)], (), CPU)
        for tensor in (torch.empty(5, 7), torch.empty(3, 4), torch.empty(7, 5).T)
    ]
    assert requests[0].key == requests[1].key != requests[2].key


def test_a_stored_program_holds_its_constants(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    StoredProgram(b"\n artifact", "L['t0'] == 2", [torch.arange(3), torch.tensor(0.5)]).write(path)
    append_digest(path)
    artifact, guards, constants = StoredProgram.read(path)
    assert (artifact, guards) == (b"\n artifact", "L['t0'] == 2")
    assert torch.equal(constants[0], torch.arange(3))
    assert constants[1].item() == 0.5


def test_artifacts_are_loaded_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "library.so"
    StoredProgram(b"artifact", None, []).write(path)
    append_digest(path)
    loading: list[Path] = []
    most: list[int] = []

    def load(file: Path) -> Any:
        loading.append(file)
        most.append(len(loading))
        time.sleep(0.02)
        loading.remove(file)
        return len

    monkeypatch.setattr(program_compiler, "load", load)
    threads = [threading.Thread(target=load_artifact, args=(path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


# The successive programs of a training


class Compiler:
    """Runs a program node by node instead of compiling it.

    Attributes:
        programs: all that were made.
        calls: how many calls an artifact ran.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, guards: str | None = None) -> None:
        self.programs: list[InductorProgram] = []
        self.calls = 0
        self.change: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = lambda results: results
        self._requests: dict[str, tuple[Part, Layout]] = {}
        self._guards = guards
        watch, make_request = by_inductor.watch, by_inductor.ProgramRequest

        def watched(*arguments: Any) -> InductorProgram | None:
            program = watch(*arguments)
            if program is not None:
                self.programs.append(program)
            return program

        def request(part: Any, *arguments: Any) -> ProgramRequest:
            new_request = make_request(part, *arguments)
            self._requests[new_request.key] = part, new_request.layout
            return new_request

        monkeypatch.setattr(by_inductor, "watch", watched)
        monkeypatch.setattr(by_inductor, "ProgramRequest", request)
        monkeypatch.setattr(by_inductor, "build", lambda requests: [(r, Path(r.key)) for r in requests])
        monkeypatch.setattr(by_inductor, "load", self._load)
        monkeypatch.setattr(by_inductor, "_CALLS", 2)
        monkeypatch.setattr(by_inductor, "_TRIALS", 1)
        monkeypatch.setattr(background, "_PAUSE", 0.0)

    def _load(self, path: Path) -> Any:
        part, layout = self._requests[path.name]
        program = Program(part, "artifact", CPU)

        def artifact(arguments: list[Any]) -> Sequence[torch.Tensor]:
            self.calls += 1
            symbol_values = dict(zip((s.name for s in layout.symbols), arguments, strict=False))
            tensors = arguments[len(symbol_values) :]
            arguments.clear()
            results, _ = program.run(tensors, [sizes.evaluate(size, symbol_values) for size in layout.sizes])
            return self.change(list(results))

        return artifact, StoredProgram(b"", self._guards, [])

    def train(self, trained: Trained) -> None:
        """Take steps until all programs are compiled, compared and timed."""
        for _ in range(3):
            trained.check(3, 5)
        for program in self.programs:
            assert program.thread is not None
            program.thread.join()
        for _ in range(4):
            trained.check(3, 5)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    return Trained(monkeypatch, kernels="inductor", tuning=False)


def test_the_faster_of_the_two_stays(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(monkeypatch)
    compiler.train(model)
    assert [p.refused for p in compiler.programs] == ["", ""]
    assert {p.chosen for p in compiler.programs} <= {"artifact", "program"}
    for program in compiler.programs:
        program._seconds = {"artifact": [1.0], "program": [2.0]}
        program._choose()
    before = compiler.calls
    for shape in ((3, 5), (2, 9)):
        model.check(*shape)
    assert compiler.calls == before + 4
    for program in compiler.programs:
        program._seconds = {"artifact": [2.0], "program": [1.0]}
        program._choose()
    model.check(3, 5)
    assert compiler.calls == before + 4


def test_sizes_of_0_and_1_run_the_ordinary_program(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(monkeypatch)
    compiler.train(model)
    for program in compiler.programs:
        program._run = program._compiled
    before = compiler.calls
    for shape in ((1, 5), (0, 5), (3, 1)):
        model.check(*shape)
    assert compiler.calls == before


def test_sizes_that_the_trace_excluded_run_the_ordinary_program(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch, guards="L['t1'] <= 6")
    model = trained(monkeypatch)
    compiler.train(model)
    for program in compiler.programs:
        program._run = program._compiled
    before = compiler.calls
    model.check(3, 7)
    assert compiler.calls == before
    model.check(3, 6)
    assert compiler.calls == before + 2


def _wrong(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return [result + 1 for result in results]


def _transposed(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return [r.transpose(-1, -2).contiguous().transpose(-1, -2) if r.dim() > 1 else r for r in results]


def _not_finite(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.full_like(result, torch.nan) for result in results]


def _random(results: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.rand(1)
    return results


def _shared(results: list[torch.Tensor]) -> list[torch.Tensor]:
    flat = torch.empty(sum(r.numel() for r in results))
    parts = flat.split([r.numel() for r in results])
    return [part.view(r.shape).copy_(r) for part, r in zip(parts, results, strict=True)]


def _failing(results: list[torch.Tensor]) -> list[torch.Tensor]:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_wrong, "differs"),
        (_not_finite, "differs"),
        (_transposed, "with strides"),
        (_random, "another state"),
        (_shared, "shares memory"),
        (_failing, "no such kernel"),
    ],
)
def test_a_wrong_artifact_is_not_used(
    change: Any, reason: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.change = change
    compiler.train(trained(monkeypatch))
    assert all(reason in program.refused for program in compiler.programs)
    assert all(program.chosen is None for program in compiler.programs)
    assert "is not run by Inductor" in caplog.text


def test_an_error_in_a_later_call_ends_the_use_of_an_artifact(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward runs again, node by node; the arguments of backward were freed."""
    model = trained(monkeypatch)
    compiler.train(model)
    forward, backward = compiler.programs
    for program in compiler.programs:
        program._run = program._compiled
    compiler.change = _failing
    backward._run = backward._ordinary
    model.check(3, 5)
    assert "no such kernel" in forward.refused
    backward._run = backward._compiled
    with pytest.raises(RuntimeError, match="no such kernel"):
        model.check(3, 5)
    model.check(3, 5)


def test_a_failed_compilation_leaves_the_program(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_inductor, "build", lambda requests: [(r, BuildError("no compiler")) for r in requests])
    compiler.train(trained(monkeypatch))
    assert [program.refused for program in compiler.programs] == ["no compiler"] * 2
    assert compiler.calls == 0


def test_a_call_takes_its_strides_only_and_frees_its_arguments() -> None:
    part = part_of(lambda op, x: op.Exp(x), ["b h"])
    tensors = [torch.randn(5, 3)]
    layout = Layout(part, [ArgumentSpec.from_tensor(t) for t in tensors], ())

    def artifact(arguments: list[Any]) -> Sequence[torch.Tensor]:
        assert not tensors
        return [arguments[-1].exp()]

    parts = split(part)
    call = ArtifactCall(parts, layout, artifact, StoredProgram(b"", None, []), Program(parts.views, "v", CPU).run)
    assert not call.takes([tensors[0].T.contiguous().T], ())
    assert call.takes(tensors, ())
    call.run(tensors, ())


def test_dropout_in_training_is_compared_at_the_same_random_state(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxtrain import ORTModule

    model = ORTModule(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), kernels="inductor")
    x = torch.randn(6, 8)
    for _ in range(8):
        model(x).sum().backward()
        for program in compiler.programs:
            if program.thread is not None:
                program.thread.join()
    assert [program.refused for program in compiler.programs] == ["", ""]
    assert compiler.calls > 2


# Tracing


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_a_trace_is_the_attention_of_a_program(causal: bool, masked: bool) -> None:
    if causal and masked:
        pytest.skip("the mask holds the causal one")
    q, k, v, dy = (torch.randn(2, 5, 4, 8).transpose(1, 2) for _ in range(4))
    mask = torch.randn(2, 1, 5, 5) if masked else None
    y, logsumexp = flash.attention(q, k, v, mask, causal, None)
    gradients = flash.attention_backward(dy, q, k, v, mask, y, logsumexp, causal, None)
    got_y, got_logsumexp = TRACED_CALLS[flash.attention](q, k, v, mask, causal, None)
    saved = got_y, got_logsumexp
    got = (*saved, *TRACED_CALLS[flash.attention_backward](dy, q, k, v, mask, *saved, causal, None))
    for a, b in zip(got, (y, logsumexp, *gradients), strict=True):
        assert torch.equal(a, b)
    meta = [None if t is None else t.to("meta") for t in (dy, q, k, v, mask, y, logsumexp)]
    on_meta = traced._backward_on_fakes(*meta, None, causal, None, 0.0)
    assert [t.stride() for t in on_meta] == [t.stride() for t in got[2:]]


def test_a_sum_of_rows_in_a_trace_equals_that_of_a_program() -> None:
    added, rows, dy = torch.randn(7, 4), torch.randint(7, (9,)), torch.randn(9, 4)
    got = TRACED_CALLS[plus_row_sums](added, rows, dy, 2)
    assert_matches(got, plus_row_sums, added, rows, dy, 2)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (0, 3)])
def test_a_gradient_of_logits_in_a_trace_equals_that_of_a_program(reduction: int, shape: tuple[int, int]) -> None:
    rows, classes = shape
    scores, weights = torch.randn(shape), torch.rand(classes)
    labels = torch.randint(classes, (rows,)).masked_fill(torch.arange(rows) == 2, -100)
    dy = torch.randn(rows) if reduction == 0 else torch.randn(())
    for weight in (None, weights):
        _, *saved, total = loss_by_aten(scores, labels, weight, reduction, -100)
        arguments = (dy, scores, *saved, labels, weight, total, reduction, -100)
        assert torch.equal(TRACED_CALLS[gradient_by_aten](*arguments), gradient_by_aten(*arguments))


def test_constants_of_a_trace_are_arguments() -> None:
    constant = torch.arange(3.0)
    mode, symbols = program_compiler.symbolic_sizes({"b": 5})
    with mode:
        x = torch.empty(symbols["b"], 3)
    traced = program_compiler.trace(mode, lambda b, x: [x * constant + constant.sum()], [symbols["b"], x])
    assert [c.data_ptr() for c in traced.constants] == [constant.data_ptr()]
    assert len(traced.arguments) == 3
    value = torch.randn(2, 3)
    assert torch.equal(traced.graph(2, value, constant)[0], value * constant + constant.sum())


def test_a_function_that_reads_elements_is_not_traced() -> None:
    mode, symbols = program_compiler.symbolic_sizes({"b": 5})
    with mode:
        x = torch.empty(symbols["b"])
    with pytest.raises(TraceError, match="unique"):
        program_compiler.trace(mode, lambda b, x: [x.unique()], [symbols["b"], x])


def test_random_operators_of_generated_code_must_be_in_order() -> None:
    lines = [
        "buf3 = torch.ops.aten.native_dropout.default(buf2, 0.1, True)",
        "buf1 = torch.ops.aten.sum.default(buf0)",
        "buf9 = torch.ops.onnxtrain.attention.default(buf6, buf7, buf8, None, False, None, 0.1)",
    ]
    assert program_compiler.samples_in_order("\n".join(lines), 2)
    assert not program_compiler.samples_in_order("\n".join(lines), 3)
    assert not program_compiler.samples_in_order("\n".join(reversed(lines)), 2)


def test_guards_are_conditions_on_the_symbolic_sizes() -> None:
    assert program_compiler.hold("L['t0'] <= 6 and L['t1'] % 2 == 0", (6, 4))
    assert not program_compiler.hold("L['t0'] <= 6 and L['t1'] % 2 == 0", (7, 4))
    assert not program_compiler.hold("Unknown(L['t0'])", (7,))
