"""A linear layer and its cross entropy are one op: results equal eager's, and no tensor holds all logits."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.loss import linear_cross_entropy
from onnxtrain.testing import assert_no_worse_than_eager
from tests.passes.less_work import applied_by, check_equals_eager, forward_graph, refusals, shapes, wrap
from tests.thinned import slow_but_every
from tests.zoo.entry import Call, Draw

WIDTH, CLASSES, IGNORED = 8, 40, -100
chunk_losses = importlib.import_module("onnxtrain.passes.chunk_losses")  # the package has its function by this name


@pytest.fixture(autouse=True)
def _few_classes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models: 40 classes are a vocabulary, and eight rows a chunk."""
    monkeypatch.setattr(chunk_losses, "MIN_CLASSES", CLASSES)
    monkeypatch.setattr(linear_cross_entropy, "_MIN_CHUNK_ROWS", 8)
    monkeypatch.setattr(linear_cross_entropy, "_CHUNK_LOGITS", 8 * CLASSES)


class Words(nn.Module):
    """Scores of rows [batch, steps, width], by one of several ways to write them, and the loss."""

    def __init__(self, way: str = "linear", gives: str = "loss", bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.way, self.gives, self.options = way, gives, options
        self.before = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.table = nn.Parameter(torch.randn(WIDTH, CLASSES) / 4)
        self.register_buffer("weights", torch.linspace(0.5, 2, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = torch.tanh(self.before(x))
        options = dict(self.options)
        if options.pop("weighted", False):
            options["weight"] = self.weights.to(x.dtype)
        logits = hidden @ self.table if self.way == "matmul" else self.score(hidden)
        if self.way == "shifted":  # as a causal language model does by hand
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        if self.way == "cut twice":
            logits, labels = logits[:, 1:][:, :-1].reshape(-1, CLASSES)[1:], labels[:, 1:-1].reshape(-1)[1:]
        scores = logits.view(-1, CLASSES) if self.way != "cut twice" else logits
        loss = F.cross_entropy(scores, labels.view(-1), **options)
        return loss if self.gives == "loss" else (loss, logits)


def labelled(draw: Draw, batch: int, length: int) -> Call:
    labels = draw.ints(CLASSES, batch, length)
    keeps = draw.floats(batch, length) > -0.5
    keeps[0, -2:] = True  # the last label is one of those that every way reads
    return Call((draw.floats(batch, length, WIDTH, grad=True), labels.masked_fill(~keeps, IGNORED)))


VARIANTS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "weights": {"weighted": True},
    "no bias": {"bias": False},
    "matmul": {"way": "matmul"},
    "shifted": {"way": "shifted"},
    "cut twice": {"way": "cut twice"},
}


@pytest.mark.parametrize("options", slow_but_every(2, VARIANTS.values()), ids=VARIANTS)
def test_equals_eager(options: dict[str, Any], tmp_path: Path) -> None:
    check_equals_eager(lambda: Words(**options), labelled, ((3, 9), (2, 4), (1, 5)))
    model = wrap(Words(**options), tmp_path)
    model(*labelled(Draw(0), 3, 9).args).backward()
    assert applied_by(model, "chunk_losses")
    assert applied_by(model, "compute_loss_gradients_in_forward")
    graph = forward_graph(tmp_path)
    assert not any(shape.endswith(f",{CLASSES}]") for kind in ("Linear", "MatMul") for shape in shapes(graph, kind))


def test_under_autocast_scores_are_widened_chunk_by_chunk() -> None:
    torch.manual_seed(0)
    module = Words()
    x, labels = labelled(Draw(0), 3, 9).args
    results = []
    for run, dtype in ((ORTModule(module), torch.bfloat16), (module, torch.bfloat16), (module.double(), None)):
        module.to(torch.float32 if dtype else torch.float64).zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            loss = run(x if dtype else x.double(), labels)
        loss.backward()
        results.append([loss.detach(), *(p.grad.detach().clone() for p in module.parameters() if p.grad is not None)])
        if run is not module:
            assert applied_by(run, "chunk_losses")
    for got, eager, exact in zip(*results, strict=True):
        assert_no_worse_than_eager("result", got.to(torch.bfloat16), eager.to(torch.bfloat16), exact)


class _Largest(TorchDispatchMode):
    """The most elements that a tensor of the step has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(v.numel() for v in tree_leaves(result) if isinstance(v, torch.Tensor))])
        return result


def test_no_tensor_holds_all_scores() -> None:
    rows = 16 * WIDTH  # the parameters are smaller than the scores of so many
    x, labels = torch.randn(1, rows, WIDTH), torch.arange(rows)[None] % CLASSES
    module = Words()
    with _Largest() as seen:
        module(x, labels).backward()
    assert seen.elements == rows * CLASSES
    model = ORTModule(module, rng="torch")
    model(x, labels).backward()
    compiled = engine_of(model).newest()
    own, given = {**module.state_dict()}, iter((x, labels))
    tensors = [next(given) if s.kind == "input" else own[s.name] for s in compiled.captured.sources]
    with _Largest() as seen:
        compiled.unit.forward.run(tensors, ())
    assert seen.elements == rows * WIDTH
    (backward,) = compiled.unit._backwards.values()
    assert not any("CrossEntropy" in node.op_type for node in backward.program.part.nodes)


def test_a_frozen_layer_gets_no_gradient(tmp_path: Path) -> None:
    module = Words()
    module.score.requires_grad_(False)
    model = wrap(module, tmp_path)
    model(*labelled(Draw(0), 3, 9).args).backward()
    assert module.score.weight.grad is None
    joint = engine_of(model).newest().unit.forward.part.nodes
    (loss,) = [node for node in joint if node.op_type == "LinearCrossEntropy"]
    assert list(loss.attributes["gradients"].as_ints()) == [1, 0, 0]


def test_a_scaled_loss_a_second_backward_and_no_gradient() -> None:
    """Gradients are for dloss = 1 at first; what is kept of them is not changed."""
    module, (x, labels) = Words(), labelled(Draw(0), 3, 9).args
    model = ORTModule(module)
    grads = []
    for run in (model, module):
        module.zero_grad()
        loss = run(x, labels)
        (loss * 3).backward(retain_graph=True)
        (loss / 2).backward()
        grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    for got, eager in zip(*grads, strict=True):
        assert_no_worse_than_eager("gradient", got, eager, eager.double(), 1.0)
    with torch.no_grad():
        assert_no_worse_than_eager("loss", model(x, labels), module(x, labels), module(x, labels).double(), 1.0)


def test_no_label_at_all_gives_nan_and_no_gradient() -> None:
    module = Words()
    x, labels = torch.randn(2, 9, WIDTH), torch.full((2, 9), IGNORED)
    loss = ORTModule(module)(x, labels)
    loss.backward()
    assert loss.isnan()
    assert module.score.weight.grad is not None
    assert not module.score.weight.grad.any()


def test_float16_gradients_are_computed_from_the_scaled_loss() -> None:
    """Gradients of 4e-8 are 0 or 6e-8 in float16; those of a loss scaled by 16384 have all their digits."""
    torch.manual_seed(0)
    module, scale = Words().half(), 2.0**14
    with torch.no_grad():
        module.score.weight *= 1e-3
    model = ORTModule(module, rng="torch")
    x, labels = (1e-3 * torch.randn(4, 32, WIDTH)).half(), torch.randint(0, CLASSES, (4, 32))
    grads = []
    for run, kind, by in ((model, torch.half, scale), (module, torch.half, scale), (module.double(), None, 1.0)):
        module.to(kind or torch.float64).zero_grad()
        (run(x.to(kind or torch.float64), labels) * by).backward()
        grads.append({name: p.grad.double() / by for name, p in module.named_parameters() if p.grad is not None})
    ours, eager, exact = grads
    assert exact["before.weight"].abs().max() < 2.0**-24, "float16 holds them: the test shows nothing"
    for name, right in exact.items():
        assert_no_worse_than_eager(name, ours[name].half(), eager[name].half(), right)
    assert any("float16" in text for text in refusals(model, "compute_loss_gradients_in_forward"))
    assert applied_by(model, "chunk_losses")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gives": "both"}, "keep_outputs"),
        ({"reduction": "none"}, "not reduced"),
        ({"label_smoothing": 0.1}, "label smoothing"),
    ],
)
def test_refused_forms_equal_eager_and_have_a_reason(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    def loss(output: Any) -> torch.Tensor:
        return output[0] if isinstance(output, tuple) else output.mean()

    check_equals_eager(lambda: Words(**options), labelled, ((3, 9), (2, 4)), loss)
    model = wrap(Words(**options), tmp_path)
    loss(model(*labelled(Draw(0), 3, 9).args)).backward()
    assert any(reason in text for text in refusals(model, "chunk_losses"))
    assert not applied_by(model, "chunk_losses")


def test_few_classes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chunk_losses, "MIN_CLASSES", CLASSES + 1)
    model = wrap(Words(), tmp_path)
    model(*labelled(Draw(0), 3, 9).args).backward()
    assert not applied_by(model, "chunk_losses")
    assert not refusals(model, "chunk_losses")


@contextmanager
def _rows_of_a_chunk(count: int) -> Iterator[None]:
    before = linear_cross_entropy._MIN_CHUNK_ROWS, linear_cross_entropy._CHUNK_LOGITS
    linear_cross_entropy._MIN_CHUNK_ROWS, linear_cross_entropy._CHUNK_LOGITS = count, 1
    try:
        yield
    finally:
        linear_cross_entropy._MIN_CHUNK_ROWS, linear_cross_entropy._CHUNK_LOGITS = before


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    labels=st.lists(st.integers(-1, 6), max_size=12),
    chunk=st.integers(1, 5),
    mean=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([1e-3, 1.0, 60.0]),
)
@hypothesis.example([0, -1, -1], 1, False, torch.float32, 60.0)  # a loss of 9e-4 of logits of 40
def test_any_labels_in_any_chunks(labels: list[int], chunk: int, mean: bool, dtype: torch.dtype, scale: float) -> None:
    """Losses and gradients of random labels, -1 being ignored, whatever the rows of a chunk."""
    generator = torch.Generator().manual_seed(len(labels))
    x, w, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((len(labels), 3), (7, 3), 7))
    target = torch.tensor(labels, dtype=torch.int64)

    def eager(kind: torch.dtype) -> list[torch.Tensor]:
        operands = [(v * s).to(kind).requires_grad_() for v, s in ((x, scale), (w, 1), (b, 1))]
        loss = F.cross_entropy(F.linear(*operands), target, ignore_index=-1, reduction="mean" if mean else "sum")
        return [loss.detach(), *torch.autograd.grad(loss, operands)]

    operands = [(v * s).to(dtype) for v, s in ((x, scale), (w, 1), (b, 1))]
    arguments = (*operands, target, None, int(mean), -1, dtype, linear_cross_entropy.ATEN)
    with _rows_of_a_chunk(chunk):
        loss = linear_cross_entropy.linear_cross_entropy(*arguments)
        results = linear_cross_entropy.linear_cross_entropy_with_gradients(*arguments, mask=(True, True, True))
    eagers, exacts = eager(dtype), eager(torch.float64)
    for got, near, exact in zip((loss, *results), (eagers[0], *eagers), (exacts[0], *exacts), strict=True):
        assert got is not None
        assert_no_worse_than_eager("result", got, near, exact, 1.0)
