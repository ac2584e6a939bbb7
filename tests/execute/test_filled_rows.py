"""With `cuda_graphs`, the number of packed tokens is rounded up: all batches need few recordings."""

from __future__ import annotations

import copy
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnxtrain import ORTModule
from onnxtrain.execute import packed_variants
from onnxtrain.execute.packing import DENSE, MIN_TOKENS, KeptTokens, PackingCheck
from onnxtrain.execute.recorded_program import CALLS, MAX_SIZES, Recording, Recordings
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.index.labelled_rows import MIN_STEP, STEPS, rounded_up
from onnxtrain.plan.cut import single_part
from onnxtrain.testing import assert_no_worse_than_eager
from tests.execute.cpu_recorder import CpuRecorder, Recorders, Trained
from tests.execute.test_packing import OnGpu
from tests.passes.less_work import CLASSES, WIDTH, WORDS, refusals
from tests.passes.test_pack_tokens import (
    FORMS,
    Biased,
    Encoder,
    batch_of,
    bool_mask,
    causal_mask,
    check,
    infinite_mask,
    results,
)
from tests.thinned import slow_but_every


class Bag(nn.Module):
    """A layer on each word, and the mean over the words that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.score = nn.Embedding(WORDS, WIDTH, 0), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        real = (words != 0)[..., None]
        x = torch.tanh(self.inner(self.words(words))) * real
        loss: torch.Tensor = self.score(x.sum(1) / real.sum(1).clamp(min=1)).square().mean()
        return loss


class Attentive(Bag):
    """The same with self-attention."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(WIDTH, 3 * WIDTH), causal

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        real = words != 0
        q, k, v = (y.view(*words.shape, 2, -1).transpose(1, 2) for y in self.qkv(self.words(words)).split(WIDTH, -1))
        seen = real[:, None, None, :]
        if self.causal:
            seen = seen & torch.ones(words.size(1), words.size(1), dtype=torch.bool).tril()
        x = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        loss: torch.Tensor = self.score((self.inner(x) * real[..., None]).sum(1)).square().mean()
        return loss


def padded(seed: int, batch: int = 12, steps: int = 40) -> torch.Tensor:
    """A batch of sequences of random lengths, none of them empty."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (batch, steps), generator=generator)
    return words * (torch.arange(steps) < torch.randint(15, 25, (batch, 1), generator=generator))


@pytest.fixture
def answers(log: Recorders, monkeypatch: pytest.MonkeyPatch) -> list[KeptTokens | None]:
    """The kept tokens of each batch, with recorded programs and attention that does not wait for lengths."""
    decisions: list[KeptTokens | None] = []
    kept_tokens = PackingCheck.kept_tokens

    def asked(self: PackingCheck, *arguments: Any) -> KeptTokens | None:
        decisions.append(kept_tokens(self, *arguments))
        return decisions[-1]

    monkeypatch.setattr(PackingCheck, "kept_tokens", asked)
    monkeypatch.setattr(packed_variants, "flash_runs", lambda *arguments: True)
    return decisions


def filled(model: nn.Module, rng: str = "fast") -> ORTModule:
    return ORTModule(model, cuda_graphs=True, skip_padding="always", rng=rng)


def count(kept: KeptTokens | None) -> tuple[int, int]:
    """The numbers of kept tokens and of rows that run."""
    assert kept is not None
    return int(kept.cu[-1]), kept.rows.numel()


# Numbers of rows


def test_row_counts_are_at_most_an_eighth_apart() -> None:
    counts = [rounded_up(n) for n in range(1, 40000)]
    assert all(r >= n and r % MIN_STEP == 0 for n, r in enumerate(counts, 1))
    assert all(r <= max(n * (1 + 1 / STEPS), n + MIN_STEP) for n, r in enumerate(counts, 1))
    assert counts == sorted(counts)
    for low in (512, 1000, 4096, 9999):  # a recording for each of them is remembered
        assert len(set(counts[low - 1 : 2 * low - 2])) <= MAX_SIZES + 1
    waste = [r / n - 1 for n, r in enumerate(counts, 1) if n >= MIN_TOKENS]
    assert sum(waste) / len(waste) < 0.05


# Equal to eager


@pytest.mark.parametrize(
    ("mask_of", "head", "dtype"),
    [
        pytest.param(bool_mask, "mean", torch.float32, marks=pytest.mark.slow),
        pytest.param(infinite_mask, "first", torch.float64, marks=pytest.mark.slow),
        (causal_mask, "chosen", torch.float32),
    ],
)
def test_fill_rows_change_no_result(
    mask_of: Any, head: str, dtype: torch.dtype, answers: list[KeptTokens | None]
) -> None:
    torch.manual_seed(0)
    module = Encoder(mask_of, head=head).to(dtype)
    wrapped = filled(module)
    trailing = [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0] * 5, [0] * 5]
    forms = [FORMS["right"], trailing, FORMS["none"], FORMS["one token"]]
    if head == "first":  # it reads the first row of a sequence without any token too, which sees nothing
        del forms[1]
    for seed, form in enumerate(forms):
        check(wrapped, module, *batch_of(form, seed))
    assert [None if kept is None else kept.rows.numel() for kept in answers] == [torch.tensor(f).numel() for f in forms]


def test_row_counts_above_the_least_step_are_rounded(answers: list[KeptTokens | None]) -> None:
    torch.manual_seed(0)
    module = Encoder(causal_mask)
    wrapped = filled(module)
    for length in (39, 10, 1):
        mask = torch.zeros(9, 40, dtype=torch.long)
        mask[:, :30] = torch.ones(9, 30)
        mask[-1, length:] = 0
        check(wrapped, module, *batch_of(mask.tolist()))
    kept = [count(answer) for answer in answers]
    assert kept == [(270, 320), (250, 256), (241, 256)]


class Normalised(nn.Module):
    """Divides attention's output by its norm: 0 / 0 for a fully masked row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.score = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.view(*words.shape, 4, -1).transpose(1, 2) for y in self.qkv(self.words(words)).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(q, k, v, bool_mask(q, mask)).transpose(1, 2).flatten(2)
        y = y / y.norm(dim=-1, keepdim=True)
        return self.score((y * mask[..., None]).sum(1)).square().mean()


def test_fill_rows_attend_to_kept_tokens_as_padding_does(answers: list[KeptTokens | None]) -> None:
    """A zero that does not occur in eager would become NaN here, and so would all gradients."""
    torch.manual_seed(0)
    module = Normalised()
    wrapped = filled(module)
    for form in FORMS["right"], FORMS["inside"], [[1, 1, 1, 0], [0, 1, 0, 0]]:
        check(wrapped, module, *batch_of(form))
    assert all(kept is not None and kept.cu[-1] < kept.rows.numel() for kept in answers)


def test_create_graph_reruns_the_module_on_the_batch(answers: list[KeptTokens | None]) -> None:
    torch.manual_seed(0)
    module = Normalised().double()
    wrapped = filled(module)
    batch = batch_of(FORMS["right"])
    gradients = []
    for run in (wrapped, module):
        with sdpa_kernel(SDPBackend.MATH):  # the only backend with a second derivative
            (g,) = torch.autograd.grad(run(*batch), module.words.weight, create_graph=True)
        gradients.append(torch.autograd.grad(g.square().sum(), module.score.weight)[0])
    assert_no_worse_than_eager("second derivative", *gradients, gradients[1])


# When


def test_a_batch_that_saves_little_after_rounding_runs_dense(answers: list[KeptTokens | None]) -> None:
    module = Bag()
    wrapped = ORTModule(module, cuda_graphs=True)
    for real in (449, 448, 385):  # of 512
        words = torch.zeros(512, dtype=torch.long)
        words[:real] = 1
        wrapped(words.view(8, 64)).backward()
    assert answers[0] is None and 449 <= DENSE * 512 < rounded_up(449)  # noqa: PT018
    assert [count(kept) for kept in answers[1:]] == [(448, 448), (385, 448)]


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (Encoder(bool_mask, head="labels"), {}, "its results determine sizes"),
        (Biased("added"), {}, "reads the sequence lengths on the host"),
        (Attentive(False), {"memory_budget_bytes": 10**9}, ""),
        (Attentive(False), {"cuda_graphs": False}, ""),
    ],
)
def test_row_counts_are_rounded_only_if_programs_are_recorded(
    model: nn.Module, options: dict[str, Any], reason: str, answers: list[KeptTokens | None]
) -> None:
    wrapped = ORTModule(model, **{"cuda_graphs": True, "skip_padding": "always", **options})
    words = batch_of(FORMS["right"])
    check(wrapped, model, *([padded(0)] if isinstance(model, Attentive) else words))
    (kept,) = answers
    assert kept is not None
    assert kept.cu_filled is None
    assert count(kept)[0] == count(kept)[1]
    said = [text for text in refusals(wrapped, "pack_tokens") if "rounded up" in text]
    assert [reason in text for text in said] == [True] * bool(reason)


# Recorded


@pytest.mark.parametrize("model", slow_but_every(2, [Bag(), Attentive(False), Attentive(True)]), ids=str)
def test_many_batches_need_few_recordings(model: nn.Module, answers: list[KeptTokens | None], log: Recorders) -> None:
    trained = Trained(filled(model.double(), rng="torch"), log)
    batches = [padded(seed) for seed in range(14)]

    def train(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        losses = []
        for words in batches:
            loss = model(words)
            loss.backward()
            log.poison()
            losses.append(loss.detach())
        return losses

    trained.both(train)
    rows = [count(kept)[1] for kept in answers[:14]]
    assert len({count(kept) for kept in answers}) > 6 > 2 >= len(set(rows))
    recorded = sum(max(0, rows.count(size) - CALLS) for size in set(rows))
    assert log.since() == (2 * sum(rows.count(size) > CALLS for size in set(rows)), 2 * recorded)
    assert recorded > 6


def test_many_sizes_are_warned_of_once(log: Recorders, caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(nn.Linear(3, 3), cuda_graphs=True)

    def call(*sizes: int) -> int:
        for size in sizes:
            model(torch.ones(size, 3)).sum().backward()
        return sum("pad_to_multiple_of" in record.getMessage() for record in caplog.records)

    assert call(*range(2, 2 * MAX_SIZES + 1)) == 0
    assert call(*range(2 * MAX_SIZES + 1, 3 * MAX_SIZES)) == 1


# On a GPU


@pytest.mark.gpu
def test_packed_batches_need_few_recordings_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on sequences of random lengths; after the one copy, in a mode in which synchronizing raises."""
    plays, play, kept_tokens = list[Recording](), Recording.run, PackingCheck.kept_tokens

    def counted(self: Recording, tensors: list[torch.Tensor]) -> Any:
        plays.append(self)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return play(self, tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    answers = list[KeptTokens | None]()
    monkeypatch.setattr(Recording, "run", counted)
    monkeypatch.setattr(
        PackingCheck, "kept_tokens", lambda *arguments: answers.append(kept_tokens(*arguments)) or answers[-1]
    )
    eager = OnGpu().cuda().bfloat16()
    inner, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    wrapped = filled(inner)
    for seed in range(14):
        words = padded(seed).cuda()
        outcomes = [results(run, module, words) for run, module in ((wrapped, inner), (eager, eager), (exact, exact))]
        largest = max(t.abs().max().item() for t in outcomes[2])
        for index, (ours, theirs, right) in enumerate(zip(*outcomes, strict=True)):
            assert_no_worse_than_eager(f"result {index}", ours, theirs, right, largest)
    sizes = [count(kept)[1] for kept in answers]
    assert len(plays) == 2 * sum(max(0, sizes.count(size) - CALLS) for size in set(sizes)) > 6
    assert len(set(plays)) <= 2 * len(set(sizes))


@pytest.mark.gpu
def test_each_replay_samples_as_eager_on_gpu() -> None:
    eager = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.1)).cuda()
    model = ORTModule(copy.deepcopy(eager), rng="torch", cuda_graphs=True)
    x = torch.randn(64, 16, device="cuda")
    for number in range(CALLS + 5):  # includes the warm-ups of a recording
        samples = []
        for run in (model, eager):
            torch.manual_seed(number)
            y = [run(x), run(x)]
            assert not torch.equal(*y)
            samples.append([*y, torch.rand(4, device="cuda")])
        for ours, theirs in zip(*samples, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_attention_that_reads_sequence_lengths_on_the_host_is_not_recorded(log: Recorders) -> None:
    """In float32, a GPU runs one sequence at a time."""
    types = [TensorType(ir.DataType.FLOAT, ("t", 2, 16))] * 3 + [TensorType(ir.DataType.INT64, ("n",))]
    values = [ir.Value(name=f"x{i}") for i in range(len(types))]
    for value, kind in zip(values, types, strict=True):
        set_type(value, kind)
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 23}, name="attention")
    q, k, v, cu = values
    graph.outputs.append(builder(graph).own.VarlenAttention(q, k, v, cu, cu))
    part = single_part(ir.Model(graph, ir_version=10))
    refused = [Recordings(CpuRecorder(log), torch.device(d), frozenset()).refusal(part) for d in ("cuda", "cpu")]
    assert refused[0] is not None
    assert "the host reads" in refused[0].reason
    assert refused[1] is None
