"""A capture is used at exactly the sizes at which it is valid."""

from __future__ import annotations

import sys
import threading
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
import transformers
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.capture.guards.guards import Guards, StoredGuards, compile_guards
from onnxtrain.capture.guards.size_decisions import SizeDecisions, example_candidates
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.symbols import functions
from tests.thinned import slow_except

Forward = Callable[..., Any]
Shapes = Sequence[tuple[int, ...]]


class FunctionModule(torch.nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.module = forward if isinstance(forward, torch.nn.Module) else None
        self.run = forward

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.run(*tensors)


@dataclass
class Capture:
    program: Any
    guards: Guards
    decisions: SizeDecisions

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        module = self.program.module(check_guards=False)
        module._forward_pre_hooks.clear()  # they assert sizes of at least 2
        return module(*tensors)


def export(forward: Forward, tensors: Sequence[torch.Tensor], example: Any = None) -> Capture:
    decisions = SizeDecisions(tensors, example)
    dims = (tuple(dict.fromkeys(range(t.dim()), Dim.AUTO) for t in tensors),) if tensors else None
    with decisions.recording():
        program = torch.export.export(
            FunctionModule(forward), tuple(decisions.examples), dynamic_shapes=dims, strict=False
        )
    program = program.run_decompositions({})
    return Capture(program, compile_guards(program, [f"x{i}" for i in range(len(tensors))], decisions), decisions)


class Engine:
    """Captures and chooses captures as onnxtrain's engine does."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.captures: list[Capture] = []

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.find(tensors)(tensors)

    def find(self, tensors: Sequence[torch.Tensor]) -> Capture:
        for capture in self.captures:
            if capture.guards(tensors):
                assert capture.guards.explain(tensors) == ""
                return capture
            assert capture.guards.explain(tensors)
        new = self.capture(tensors)
        for capture in self.captures:
            if capture.guards.adopt(new.guards):
                assert capture.guards(tensors)
                return capture
        self.captures.append(new)
        return new

    def capture(self, tensors: Sequence[torch.Tensor]) -> Capture:
        suggested = [example for c in self.captures if (example := c.guards.suggestion(tensors)) is not None]
        examples = example_candidates(tensors, suggested)
        for example in examples[:-1]:
            try:
                capture = export(self.forward, tensors, example)
            except Exception:  # noqa: BLE001  # forward rejects these sizes
                continue
            if capture.guards(tensors):
                return capture
        capture = export(self.forward, tensors)
        assert capture.guards(tensors)
        return capture


def tensors_of(shapes: Shapes) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        # The exported program runs eager's kernels.
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def captures_of(forward: Forward, calls: Sequence[Shapes]) -> int:
    engine = Engine(forward)
    for shapes in calls:
        tensors = tensors_of(shapes)
        assert equal(engine(*tensors), forward(*tensors)), shapes
    return len(engine.captures)


# Each is correct at all these sizes, in this order, with at most so many captures.
CASES: dict[str, tuple[Forward, list[Shapes], int]] = {
    "elementwise": (lambda x: x * 2, [[(4, 3)], [(1, 3)], [(4, 1)], [(1, 1)]], 1),
    "elementwise from 1": (lambda x: x * 2, [[(1, 3)], [(4, 3)], [(1, 7)]], 1),
    "reductions": (lambda x: (x.sum(0), x.softmax(1), x.std(0)), [[(4, 3)], [(1, 3)], [(4, 1)]], 1),
    "reshapes": (lambda x: x.t().reshape(-1, 2), [[(4, 3)], [(1, 2)], [(2, 1)], [(6, 1)]], 1),
    "matmul": (lambda x, y: x @ y, [[(4, 3), (3, 5)], [(1, 3), (3, 1)], [(1, 1), (1, 1)]], 1),
    "einsum": (lambda x, y: torch.einsum("bi,bj->bij", x, y), [[(4, 3), (4, 5)], [(1, 1), (1, 5)]], 1),
    "shifted": (lambda x: x[:, 1:] - x[:, :-1], [[(4, 7)], [(4, 2)], [(1, 2)], [(3, 1)]], 1),
    "sliced": (lambda x: x[:, :5].sum(0), [[(4, 7)], [(4, 5)], [(1, 9)], [(4, 3)], [(4, 1)]], 2),
    "squeezed": (lambda x: x.squeeze(0) * 2, [[(4, 3)], [(1, 3)], [(5, 3)]], 2),
    "broadcast": (lambda x, y: x + y, [[(4, 3), (4, 3)], [(4, 3), (1, 3)], [(1, 3), (4, 3)], [(1, 3), (1, 3)]], 3),
    "broadcast from 1": (lambda x, y: x + y, [[(1, 3), (1, 3)], [(4, 3), (4, 3)], [(4, 3), (1, 3)]], 2),
    "branch on 1": (lambda x: x * 2 if x.shape[0] == 1 else x * 3, [[(4, 3)], [(1, 3)], [(2, 3)], [(1, 1)]], 2),
    "branch on 1 from 1": (lambda x: x * 2 if x.shape[0] == 1 else x * 3, [[(1, 3)], [(4, 3)], [(1, 7)]], 2),
    "branch on size": (lambda x: x.sum() if x.shape[1] > 8 else x.mean(), [[(4, 3)], [(4, 9)], [(1, 1)], [(1, 30)]], 2),
    "branch on product": (lambda x: x * 2 if x.numel() > 6 else x * 1, [[(4, 3)], [(2, 3)], [(1, 6)], [(1, 7)]], 2),
    "branch that does not matter": (
        lambda x: (x if x.shape[0] == 1 else x.expand(x.shape[0], x.shape[1])) * 2,
        [[(4, 3)], [(1, 3)], [(1, 1)], [(5, 2)]],
        1,
    ),
    "branch on equality": (
        lambda x, y: x + y if x.shape == y.shape else x.sum() + y.sum(),
        [[(4, 3), (4, 3)], [(2, 3), (4, 3)], [(1, 3), (1, 3)], [(1, 3), (2, 3)]],
        2,
    ),
    "literal from a size": (
        lambda x: x * torch.tensor([2.0]) if x.shape[0] == 1 else x * torch.tensor([3.0]),
        [[(4, 3)], [(1, 3)], [(5, 3)]],
        2,
    ),
    "number from a size": (lambda x: x * (2.0 if x.shape[0] == 1 else 3.0), [[(4, 3)], [(1, 3)], [(5, 3)]], 2),
    "text of a size": (lambda x: x * len(str(x.shape[0])), [[(4, 3)], [(1, 3)], [(100, 3)], [(4, 3)]], 3),
    "text of sizes": (lambda x: x * len(f"{x.shape}{x.shape[1]:5d}"), [[(4, 3)], [(10, 3)], [(4, 3)]], 2),
    "int of a fraction": (lambda x: x * int(x.shape[0] * 0.5), [[(4, 3)], [(1, 3)], [(5, 3)]], 2),
    "root of a size": (lambda x: x / x.shape[0] ** 0.5, [[(4, 3)], [(1, 3)], [(5, 3)]], 1),
    "flag from a size": (
        lambda x: F.scaled_dot_product_attention(
            x, x.repeat(1, 3, 1), x.repeat(1, 3, 1), is_causal=x.shape[1] > 1 and True
        ),
        [[(2, 4, 8)], [(2, 1, 8)], [(1, 5, 8)]],
        2,
    ),
    "loop over a size": (lambda x: sum(x[i] for i in range(x.shape[0])), [[(3, 2)], [(1, 2)], [(4, 2)]], 3),
    "remainder by a fraction": (lambda x: x * 2 if x.shape[1] % 0.5 == 0 else x, [[(4, 3)], [(2, 3)], [(4, 5)]], 2),
    "size as a number": (lambda x: x / x.shape[0], [[(3, 2)], [(1, 2)], [(4, 2)]], 1),
    "size as max": (lambda x: x[: max(x.shape[0] - 3, 1)], [[(7, 2)], [(4, 2)], [(1, 2)]], 2),
    "size zero": (lambda x: x.sum(1) * 2, [[(4, 3)], [(0, 3)], [(4, 3)], [(2, 0)]], 3),
    "no tensor": (lambda: torch.ones(2), [[]], 1),
    "scalar": (lambda x: x * 2, [[()]], 1),
    "reshape of a scalar": (lambda x: x + x.sum().reshape(()), [[(3, 2)], [(1, 2)], [(5, 2)]], 1),
}


LIKE_OTHERS = (
    *("elementwise from 1", "reshapes", "einsum", "sliced", "broadcast from 1", "branch on 1 from 1", "branch on size"),
    *("branch on product", "text of sizes", "int of a fraction", "root of a size", "size as a number", "scalar"),
    # As in tests/traps/test_sizes.py:
    *("squeezed", "branch on 1", "text of a size", "loop over a size", "branch on equality", "number from a size"),
)


@pytest.mark.parametrize("name", slow_except(CASES, *(CASES.keys() - {*LIKE_OTHERS})))
def test_correct_at_all_sizes(name: str) -> None:
    forward, calls, captures = CASES[name]
    assert captures_of(forward, calls) <= captures


def test_layers_that_check_sizes_raise_as_in_eager() -> None:
    norm = torch.nn.BatchNorm1d(6, affine=False, track_running_stats=False)
    engine = Engine(norm)
    x = torch.randn(4, 6)
    assert equal(engine(x), norm(x))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        engine(torch.randn(1, 6))
    x = torch.randn(2, 6)
    assert equal(engine(x), norm(x))
    assert len(engine.captures) == 1


@pytest.mark.slow  # of ops: tests/traps/test_sizes.py; of models: tests/zoo/test_zoo.py
@pytest.mark.parametrize(
    "sizes", [[(2, 5), (1, 5), (3, 1), (1, 1)], [(1, 5), (2, 7), (1, 1)], [(1, 1), (2, 7)]], ids=str
)
def test_bert_is_one_capture(sizes: list[tuple[int, int]]) -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    model = transformers.BertForSequenceClassification(config).eval()

    def forward(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        return tuple(model(input_ids=ids, attention_mask=mask, labels=labels, return_dict=False))

    engine = Engine(forward)
    for batch, length in sizes:
        ids = torch.randint(0, 9, (batch, length))
        mask = torch.ones_like(ids)
        labels = torch.randint(0, 2, (batch,))
        assert equal(engine(ids, mask, labels), forward(ids, mask, labels))
    assert len(engine.captures) == 1


def guards_of(forward: Forward, *shapes: tuple[int, ...]) -> Guards:
    return export(forward, tensors_of(shapes)).guards


def test_a_condition_that_divides_by_zero_does_not_hold() -> None:
    """`torch.diff(x, dim=0).reshape(-1, 2)` asks for elements modulo the size of the difference, 0 for one row."""
    rows = sympy.Symbol("rows", integer=True, positive=True)
    condition = sympy.Eq(functions.Mod(functions.FloorDiv(12, rows - 1), 2), 0)
    guards = Guards.from_stored(StoredGuards(("x",), [[rows]], {rows: (0, 0)}, [(condition, False)], ()))
    assert [guards([torch.empty(rows)]) for rows in (1, 2, 3, 5)] == [False, True, True, False]


def test_explain_names_the_failing_condition() -> None:
    guards = guards_of(lambda x, y: (x if x.shape[1] > 3 else -x) + y, (4, 5), (4, 5))
    assert guards.explain(tensors_of([(2, 6), (2, 6)])) == ""
    text = guards.explain(tensors_of([(2, 6), (3, 6)]))
    assert "x0.size(0) == x1.size(0)" in text or "x1.size(0) == x0.size(0)" in text
    assert "x0.size(0) = 2" in text
    text = guards.explain(tensors_of([(2, 3), (2, 3)]))
    assert "forward would decide otherwise" in text
    assert f"{__file__}:" in text
    assert ".size(1) = 3" in text
    fixed = guards_of(lambda x: x @ torch.ones(3, 2), (4, 3))
    assert fixed.explain(tensors_of([(4, 5)])) == "x0.size(1) is 5, and was 3 at the capture"
    assert "is 0" in fixed.explain(tensors_of([(0, 3)]))
    squeezed = guards_of(lambda x: x.squeeze(0), (4, 3))
    assert "squeeze" in squeezed.explain(tensors_of([(1, 3)]))


# Data-dependent sizes


def split_by_sign(x: torch.Tensor) -> torch.Tensor:
    """As mixtures of experts do: the counts are the rows in sum, which the kernel of split checks."""
    positive = x[:, 0] > 0
    counts = torch.stack([positive.sum(), positive.logical_not().sum()]).tolist()
    parts = x[positive.long().argsort(descending=True, stable=True)].split(counts)
    return torch.cat([part * (i + 1) for i, part in enumerate(parts)]) + x


def checked(x: torch.Tensor) -> torch.Tensor:
    count = (x > 0).sum().item()
    torch._check(count > 3)
    return x * count


SELECTED: dict[str, Forward] = {
    "rows": lambda x: x[x[:, 0] > 0] * 2,
    "two of one mask": lambda x: (x[x[:, 0] > 0], x[x[:, 0] > 0].sum(0).expand(x[x[:, 0] > 0].shape[0], -1)),
    "concatenated": lambda x: torch.cat([x[x[:, 0] > 0], x[x[:, 0] <= 0]]),
    "matmul": lambda x: x[x[:, 0] > 0] @ x[x[:, 0] > 0].t(),
    "reshaped": lambda x: x[x > 0].reshape(-1, 1),
    "positions": lambda x: ((x > 0).nonzero(), x[torch.where(x > 0)]),
    "size as a number": lambda x: x * x[x > 0].shape[0],
    "element as a size": lambda x: torch.ones((x > 0).sum().item()) * 2,
}


@pytest.mark.parametrize("name", slow_except(SELECTED, "rows", "reshaped"))
def test_selected_elements_are_one_capture(name: str) -> None:
    engine = Engine(SELECTED[name])
    for shape in [(4, 3), (1, 3), (4, 1), (1, 1), (6, 5)]:
        for count in (0, 1, shape[0]):  # rows
            x = torch.where(torch.arange(shape[0])[:, None] < count, 1.0, -1.0).expand(shape).contiguous()
            assert equal(engine(x), SELECTED[name](x)), (shape, count)
    assert len(engine.captures) == 1


CONSTRAINED: dict[str, Forward] = {
    "two masks select equally many": lambda x: x[x[:, 0] > 0] + x[x[:, 1] > 0],
    "as many as another size": lambda x: x[x[:, 0] > 0][:, 0] + x[0],
    "no more than another size": lambda x: x[x[:, 0] > 0] + torch.ones_like(x)[: x[x[:, 0] > 0].shape[0]],
    "not 1": lambda x: x[x[:, 0] > 0].squeeze(0) * 2,
    "a check of the model's": checked,
}


def test_a_split_by_counts_is_captured() -> None:
    engine = Engine(split_by_sign)
    for rows in (4, 1, 6):
        for count in (0, 1, rows):
            x = torch.where(torch.arange(rows)[:, None] < count, 1.0, -1.0).expand(rows, 3).contiguous()
            assert equal(engine(x), split_by_sign(x)), (rows, count)


@pytest.mark.parametrize(
    "name", slow_except(CONSTRAINED, "two masks select equally many", "not 1", "a check of the model's")
)
def test_assumptions_on_data_dependent_sizes_are_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="only for certain numbers of selected elements"):
        export(CONSTRAINED[name], [torch.tensor([[1.0, 1, 1], [1, 1, 1], [1, 1, 1], [-1, -1, -1]])])


def test_dynamic_dims() -> None:
    assert guards_of(lambda x, y: x @ torch.ones(3, 2) + y, (4, 3), (1,)).dynamic_dims == {(0, 0)}


def test_without_decisions_only_assumed_sizes_are_valid() -> None:
    captured = export(lambda x: x * 2, tensors_of([(4, 3)]))
    guards = compile_guards(captured.program, ["x"])
    assert guards(tensors_of([(2, 2)]))
    assert not guards(tensors_of([(1, 3)]))
    assert "size decisions" in guards.explain(tensors_of([(1, 3)]))


def test_the_shape_proof_has_no_side_effects() -> None:
    guards = guards_of(lambda x: F.dropout(x, 0.5).squeeze(1), (4, 3))
    state = torch.get_rng_state()
    with torch.autocast("cpu"):
        assert guards(tensors := [torch.ones(1, 3)])
        assert not guards([torch.ones(4, 1)])
    assert torch.equal(torch.get_rng_state(), state)
    assert tensors[0].grad_fn is None


def test_recording_restores_pytorch() -> None:
    evaluate, greater = ShapeEnv.evaluate_expr, torch.SymInt.__gt__
    decisions = SizeDecisions(tensors_of([(4, 3)]))
    with decisions.recording():
        assert ShapeEnv.evaluate_expr is not evaluate
    assert ShapeEnv.evaluate_expr is evaluate
    assert torch.SymInt.__gt__ is greater
    with pytest.raises(RuntimeError), decisions.recording():
        raise RuntimeError
    assert ShapeEnv.evaluate_expr is evaluate


def test_decisions_of_other_threads_are_not_recorded() -> None:
    decisions = SizeDecisions(tensors_of([(4, 3)]))

    def other() -> None:
        torch.export.export(
            FunctionModule(lambda x: x if x.shape[0] > 3 else -x),
            (torch.ones(4, 3),),
            dynamic_shapes=(({0: Dim.AUTO},),),
            strict=False,
        )

    with decisions.recording():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert not decisions.recorded


def test_decisions_see_real_sizes() -> None:
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.shape[0] == 1, x.shape[0] > 1, int(x.shape[1]), bool(x.shape[0] == x.shape[1])))
        return x * 2

    tensors = tensors_of([(1, 3)])
    captured = export(forward, tensors, {(0, 0): 5, (0, 1): 4})
    assert seen == [(True, False, 3, False)]
    assert captured.guards(tensors)
    assert captured.guards(tensors_of([(1, 3)]))
    assert not captured.guards(tensors_of([(2, 3)]))
    assert not captured.guards(tensors_of([(1, 4)]))


def test_examples_keep_everything_but_sizes() -> None:
    x = torch.randn(3, 4, 5, 1).contiguous(memory_format=torch.channels_last).double().requires_grad_()
    (example,) = SizeDecisions([x], {(0, 3): 7}).examples
    assert example.shape == (3, 4, 5, 7)
    assert example.is_contiguous(memory_format=torch.channels_last)
    assert (example.dtype, example.requires_grad, example.is_leaf) == (torch.float64, True, True)
    assert SizeDecisions([x], {(0, 3): 1}).examples[0] is x


def test_example_candidates() -> None:
    ids, scores = torch.ones(1, 1, dtype=torch.long), torch.ones(1, 1)
    assert example_candidates([torch.ones(2, 3)]) == [{}]
    assert example_candidates([torch.ones(1, 3), torch.ones(2, 3)]) == [{}]  # to be broadcast
    assert [set(e) for e in example_candidates([torch.ones(1, 3), torch.ones(1)])] == [{(0, 0), (1, 0)}, set()]
    assert set(example_candidates([ids, ids])[0]) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert set(example_candidates([ids, scores])[0]) == {(0, 0), (0, 1), (1, 0)}
    assert example_candidates([ids], [{(0, 1): 9}])[0] == {(0, 1): 9}


def test_guards_are_fast(record_property: Any) -> None:
    guards = guards_of(lambda x, y: x + y, (4, 3), (4, 3))
    for name, tensors in (("common", tensors_of([(5, 6), (5, 6)])), ("of size 1", tensors_of([(1, 6), (1, 6)]))):
        assert guards(tensors)
        seconds = min(timeit.repeat(lambda: guards(tensors), number=1000, repeat=5)) / 1000  # noqa: B023
        sys.stdout.write(f"guards, {name}: {seconds * 1e6:.2f} µs\n")
        record_property(name, seconds)
