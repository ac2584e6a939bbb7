"""The demonstration and the benchmark: their data, measurements, tables and page."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

import examples.minilm.__main__ as demo
from benchmarks.machine import Machine
from examples.minilm.charts import Series, chart, running_mean
from examples.minilm.data import (
    Batch,
    Paragraph,
    count_tokens,
    held_out_batches,
    load_corpus,
    make_batch,
    training_batches,
)
from examples.minilm.memory import peak_bytes
from examples.minilm.page import render
from examples.minilm.progress import Clock, LiveProgress, PlainProgress, as_minutes, make_progress
from examples.minilm.result import EAGER, NUDGED, ONNXTRAIN, Evaluation, Phase, Record, Result, Step
from examples.minilm.settings import FULL, QUICK
from examples.minilm.table import rows, terminal_table
from examples.minilm.training import Variant, nudge, train_interleaved
from onnxtrain.report import CompileReport, Refusal, StageReport

STAGES = (
    StageReport("capture", 1200.0, 40),
    StageReport("optimize", 30.0, 33, applied=("merged <two> nodes",), refused=(Refusal("fold", "Add_1", "a & b"),)),
)
MACHINE = Machine("A processor", 2, 2, "Linux x86_64", 8.0, 0.1, (("Python", "3.11"), ("torch", "2.13")))
LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Letters:
    """A tokenizer of letters."""

    def __call__(
        self, text: list[str], *, truncation: bool, max_length: int, padding: bool, return_tensors: str
    ) -> dict[str, torch.Tensor]:
        assert truncation
        assert padding
        assert return_tensors == "pt"
        cut = [[1 + LETTERS.find(letter) for letter in one.lower()][:max_length] for one in text]
        longest = max(map(len, cut))
        return {
            "input_ids": torch.tensor([one + [0] * (longest - len(one)) for one in cut]),
            "attention_mask": torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in cut]),
        }


class Tiny(torch.nn.Module):
    """Mean of embeddings with dropout, called as the classifier is."""

    def __init__(self, labels: int = 3) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.dropout = torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(16, labels)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        mask = attention_mask.unsqueeze(-1)
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.head(self.dropout(mean))
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits, labels), logits=logits)


class FakeORTModule(torch.nn.Module):
    """Stands in for onnxtrain where only the demonstration itself is looked at."""

    def __init__(self, model: torch.nn.Module, rng: str = "fast") -> None:
        super().__init__()
        self.model = model
        self.rng = rng

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.model(**inputs)

    def report(self) -> CompileReport:
        return CompileReport(STAGES)


def tiny_batches(count: int) -> list[Batch]:
    paragraphs = [Paragraph(LETTERS[index : index + 5], index % 3) for index in range(4)]
    return [make_batch(paragraphs, Letters(), max_length=4) for _ in range(count)]


def made_up_result() -> Result:
    def record(name: str, took_s: float, shift: float, count: int) -> Record:
        steps = [Step(3.0 - 0.1 * n + shift * n, took_s * (5 if n == 0 else 1), 100) for n in range(count)]
        return Record(name, 0.5, steps, [Evaluation(0, 3.0, 0.05), Evaluation(count, 1.0, 0.7)], int(took_s * 2**30))

    return Result(
        settings=replace(QUICK, training_steps=8, exact_steps=4),
        machine=MACHINE,
        command="python -m examples.minilm --quick",
        topics=("one", "two & <three>"),
        train_paragraphs=80,
        held_out_paragraphs=20,
        training=Phase((record(EAGER, 0.2, 0.0, 8), record(ONNXTRAIN, 0.1, 0.01, 8))),
        exact=Phase((record(EAGER, 0.2, 0.0, 4), record(ONNXTRAIN, 0.1, 1e-7, 4), record(NUDGED, 0.2, 2e-7, 4))),
        stages=STAGES,
        peak_batch=(16, 64),
        took_s=61.0,
    )


# ------------------------------------------------------------------------------------------------------------- the data


def test_the_reference_text_gives_enough_topics_and_no_paragraph_twice() -> None:
    corpus = load_corpus(seed=0)
    assert len(corpus.topics) >= 10
    texts = [paragraph.text for paragraph in (*corpus.train, *corpus.held_out)]
    assert len(texts) == len(set(texts)) > 500
    for label, topic in enumerate(corpus.topics):
        held = sum(paragraph.label == label for paragraph in corpus.held_out)
        learnt = sum(paragraph.label == label for paragraph in corpus.train)
        assert held + learnt >= 20, topic
        assert held / (held + learnt) == pytest.approx(0.2, abs=0.025), topic


def test_the_corpus_depends_on_nothing_but_the_seed() -> None:
    assert load_corpus(seed=3) == load_corpus(seed=3)
    assert load_corpus(seed=3) != load_corpus(seed=4)
    assert len(load_corpus(seed=0, max_topics=6).topics) == 6


def test_a_paragraph_of_several_topics_belongs_to_the_most_specific() -> None:
    shared = [f"shared words number {n} and some more of them here" for n in range(5)]
    own = [f"own words number {n} and some more of them here" for n in range(9)]
    texts = {"all of it": "\n\n".join((*own, *shared)), "part": "\n \n".join((*shared, "too short"))}
    corpus = load_corpus(seed=0, texts=texts, min_paragraphs=5)
    labels = {paragraph.text: corpus.topics[paragraph.label] for paragraph in (*corpus.train, *corpus.held_out)}
    assert labels == {**dict.fromkeys(own, "all of it"), **dict.fromkeys(shared, "part")}
    assert load_corpus(seed=0, texts=texts, min_paragraphs=6).topics == ("all of it",)


def test_batches_are_full_padded_to_their_longest_and_shuffled_anew_each_epoch() -> None:
    corpus = load_corpus(seed=0, max_topics=2)
    sizes = {"batch_size": 16, "max_length": 30}
    per_epoch = len(corpus.train) // 16
    batches = training_batches(corpus, Letters(), steps=2 * per_epoch, seed=0, **sizes)
    assert len(batches) == 2 * per_epoch
    assert all(len(batch["labels"]) == 16 and batch["input_ids"].shape[1] <= 30 for batch in batches)
    assert not torch.equal(batches[0]["labels"], batches[per_epoch]["labels"])
    held_out = held_out_batches(corpus, Letters(), **sizes)
    assert sum(len(batch["labels"]) for batch in held_out) == len(corpus.held_out)
    short = make_batch([Paragraph("abc", 0), Paragraph("a", 1)], Letters(), max_length=30)
    assert short["input_ids"].shape == (2, 3)
    assert count_tokens(short) == 4


def test_a_batch_larger_than_the_corpus_is_refused() -> None:
    corpus = load_corpus(seed=0, max_topics=2)
    with pytest.raises(ValueError, match="expected a batch size from 1 to"):
        training_batches(corpus, Letters(), steps=1, batch_size=10_000, max_length=8, seed=0)


# --------------------------------------------------------------------------------------------------------- the training


def variants(*names: str) -> list[Variant]:
    result = []
    for name in names:
        torch.manual_seed(0)
        result.append(Variant(name, Tiny(), QUICK, steps=6))
    return result


def test_variants_draw_the_same_masks_and_take_turns_in_going_first() -> None:
    one, other = variants("one", "other")
    order: list[str] = []
    for variant in (one, other):
        variant.model.register_forward_hook(lambda *_, name=variant.record.name: order.append(name))
    train_interleaved([one, other], tiny_batches(6))
    assert one.record.losses == other.record.losses
    assert len(set(one.record.losses)) == 6
    assert order == ["one", "other", "other", "one"] * 3


def test_the_generator_continues_as_if_only_the_first_had_trained() -> None:
    alone = variants("alone")
    train_interleaved(alone, tiny_batches(5))
    expected = torch.get_rng_state()
    train_interleaved(variants("one", "other", "third"), tiny_batches(5))
    assert torch.equal(torch.get_rng_state(), expected)


def test_nudged_weights_are_the_neighbours_of_the_old_ones() -> None:
    model = Tiny()
    before = [parameter.clone() for parameter in model.parameters()]
    for old, new in zip(before, nudge(model).parameters(), strict=True):
        assert (new > old).all()
        assert torch.equal(torch.nextafter(new, torch.full_like(new, -math.inf)), old)


def test_evaluation_is_without_dropout_and_leaves_the_model_training() -> None:
    (one,) = variants("one")
    batches = tiny_batches(2)
    train_interleaved([one], batches, held_out=batches, evaluate_after=frozenset({1, 2}))
    first, last = one.record.evaluations
    assert (first.step, last.step) == (1, 2)
    assert 0.0 <= last.accuracy <= 1.0
    one.evaluate(batches)
    assert one.record.evaluations[-1] == last
    assert one.model.training


def test_the_peak_counts_activations_and_not_gradients() -> None:
    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1 << 20))
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=((x * self.scale).exp().sum() + self.weight[0]))

    x = torch.zeros(1 << 18)
    model = Wide()
    # x * scale, its exp, and in backward two products as large; weight's gradient comes through a zero-filled tensor.
    least = 2 * x.nbytes
    most = 4 * x.nbytes + model.weight.nbytes
    assert least <= peak_bytes(model, {"x": x}) <= most + 4096
    assert model.weight.grad is None


# ------------------------------------------------------------------------------------------------------------ the table


def test_the_table_compares_both() -> None:
    result = made_up_result()
    shown = {row.label: row for row in rows(result)}
    assert shown["median step"].eager == "200 ms"
    assert shown["median step"].onnxtrain == "100 ms"
    assert shown["median step"].compared == "2.00 times the speed"
    assert shown["time to first step"].compared == "-0.5 s"
    assert shown["held-out accuracy"].onnxtrain == "70.0%"
    assert shown["largest loss difference"].onnxtrain == "3.0e-07"
    assert shown["peak memory"].compared == "0.50 of eager's"
    text = io.StringIO()
    Console(file=text, width=100).print(terminal_table(result))
    assert all(row.label in text.getvalue() for row in rows(result))


# ------------------------------------------------------------------------------------------------------------- the page


class Page(HTMLParser):
    """Collects tags and checks that each is closed."""

    VOID = frozenset({"meta", "br", "link", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network() -> None:
    text = render(made_up_result())
    page = Page(text)
    tags = [tag for tag, _ in page.seen]
    assert tags.count("svg") == 4
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.seen)
    for outside in ("http:", "https:", "url(", "@import"):
        assert outside not in text
    assert "prefers-color-scheme: dark" in text
    for shown in ("two &amp; &lt;three&gt;", "merged &lt;two&gt; nodes", "capture", "A processor", "2.00×", "QUICK=1"):
        assert shown in text


def test_the_page_renders_a_run_of_one_step() -> None:
    result = made_up_result()
    for record in (*result.training.records, *result.exact.records):
        del record.steps[1:]
    Page(render(replace(result, stages=())))


def test_the_page_says_when_both_losses_are_the_same_numbers() -> None:
    result = made_up_result()
    assert "same number as eager" not in render(result)
    result.exact[ONNXTRAIN].steps[:] = result.exact[EAGER].steps
    text = render(result)
    Page(text)
    assert "same number as eager" in text


def test_a_chart_is_xml_and_skips_values_without_a_logarithm() -> None:
    line = Series("loss <1>", "ours", [1, 2, 3, 4], [1e-7, 0.0, 1e-5, float("nan")])
    tree = ElementTree.fromstring(chart([line], title="a & b", x_label="step", y_label="difference", log=True))
    assert len(tree.findall("circle")) == 2
    assert len(tree.findall("polyline")) == 2
    assert [circle.findtext("title") for circle in tree.findall("circle")] == [
        "loss <1>, 1: 1e-07",
        "loss <1>, 3: 1e-05",
    ]


def test_a_chart_keeps_its_points_inside() -> None:
    line = Series("s", "ours", list(range(50)), [math.sin(n) * 1e4 for n in range(50)], points=True)
    tree = ElementTree.fromstring(chart([line], title="t", x_label="x", y_label="y"))
    width, height = (float(part) for part in tree.attrib["viewBox"].split()[2:])
    for circle in tree.findall("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= width
        assert 0 <= float(circle.attrib["cy"]) <= height


@pytest.mark.parametrize("values", [[], [2.0], [2.0, 2.0]])
def test_a_chart_of_little_is_a_chart(values: list[float]) -> None:
    line = Series("s", "ours", list(range(len(values))), values)
    ElementTree.fromstring(chart([line], title="t", x_label="x", y_label="y"))
    ElementTree.fromstring(chart([line], title="t", x_label="x", y_label="y", log=True))


def test_the_running_mean_starts_with_the_first_values() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


# --------------------------------------------------------------------------------------------------------- the progress


def watch(console: Console) -> None:
    records = [Record(EAGER, steps=[Step(2.5, 0.5, 100)]), Record(ONNXTRAIN, steps=[Step(2.25, 0.25, 100)])]
    with make_progress(console) as progress:
        progress.say("Preparing")
        progress.begin("Training", records, steps=1)
        progress.doing("compiling")
        progress.update(75.0)


def test_progress_is_plain_lines_without_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, width=60)
    assert isinstance(make_progress(console), PlainProgress)
    watch(console)
    text = file.getvalue()
    assert "\x1b" not in text
    assert "step 1/1  eager PyTorch: loss 2.5000, 200 tokens/s  |  onnxtrain: loss 2.2500, 400 tokens/s" in text
    assert "1:15 left" in text


def test_progress_is_drawn_on_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, _environ={})
    assert isinstance(make_progress(console), LiveProgress)
    watch(console)
    for shown in ("Training", "2.5000", "400", "step 1 of 1", "1:15 left", "compiling"):
        assert shown in file.getvalue()


def test_the_remaining_time_follows_the_work_done() -> None:
    clock = Clock(10)
    assert clock.left_s() is None
    clock.spend(10)
    assert clock.left_s() == 0.0
    assert as_minutes(None) == "–:––"
    assert as_minutes(125.9) == "2:05"


# -------------------------------------------------------------------------------------------------------- the whole run


def test_the_command_line_chooses_the_size() -> None:
    assert demo.parse([]) == (FULL, Path("build/demo"))
    assert demo.parse(["--quick"])[0] == QUICK
    few, folder = demo.parse(["--steps", "3", "--batch-size", "8", "--seed", "5", "--out", "here"])
    assert few == replace(FULL, training_steps=3, exact_steps=3, batch_size=8, seed=5)
    assert folder == Path("here")
    with pytest.raises(SystemExit):
        demo.parse(["--steps", "0"])


def scale_weights(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    return model


def test_the_whole_run_with_stand_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "ORTModule", FakeORTModule)
    monkeypatch.setattr(demo, "load_tokenizer", Letters)
    monkeypatch.setattr(demo, "load_classifier", lambda topics, seed: Tiny(len(topics)))
    # One ulp may leave four rounded losses as they were. Whether it does depends on the text, which differs by Python.
    monkeypatch.setattr(demo, "nudge", scale_weights)
    demo.main(["--quick", "--steps", "4", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    eager, ours, nudged = written["exact"]["records"]
    assert [step["loss"] for step in eager["steps"]] == [step["loss"] for step in ours["steps"]]
    assert [step["loss"] for step in eager["steps"]] != [step["loss"] for step in nudged["steps"]]
    assert written["training"]["records"][0]["peak_bytes"] > 0
    Page((tmp_path / "index.html").read_text(encoding="utf-8"))
    shown = capsys.readouterr().out
    assert "held-out accuracy" in shown
    assert "index.html" in shown
