"""The page of benchmarks: what was measured, on which machine, by which command, and which goals were missed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.chart import speed_chart
from benchmarks.contenders import COMPILE, COMPILE_DYNAMIC, EAGER, ONEDNN, ONNXTRAIN
from benchmarks.cpu_workloads import CPU_WORKLOADS
from benchmarks.results import Behind, Measured, speed_over
from benchmarks.tables import Rows, behind_rows, duration, spent_rows, workload_rows
from benchmarks.workload import Workload

_METHOD = """\
# Benchmarks

Written by `python -m benchmarks --write` from what was measured; `make bench` measures.

    python -m benchmarks                         everything; on two cores, two to four minutes a workload
    python -m benchmarks --only gpt2 cnn         these workloads
    python -m benchmarks --no-compile            without torch.compile: about a minute a workload
    python -m benchmarks --quick                 few rounds, to see that it runs: figures are rough

Each run writes `build/bench/<workload>.json` (every single time), `table.txt` and `speeds.svg`.

**Contenders.** Eager PyTorch; eager with every `nn.Linear` written by hand on oneDNN's inner product, forward and
backward; onnxtrain, `ORTModule(model)` with default options; `torch.compile(model)` and `torch.compile(model,
dynamic=True)`. A step clears the gradients, runs forward and backward, and takes a step of the same
`torch.optim.AdamW(fused=True)`.

**Times.** One process holds a copy of the model for each contender. After warm-up, which lasts until nothing is
compiled any more, they take one step each in turn, on the same batch, in an order that changes with every round. Of
steps shorter than 10 ms a turn has as many as fill that time: one step after another program's would be a step with
empty caches, which is not how a model trains. Ratios are taken round by round: the median, and quartiles. The first
step is measured in a fresh process with empty caches, eager's and onnxtrain's in several, in turn: the median. What is
imported for it counts, with Python's sources compiled as those of an installed package are.

**Peak memory** is the most that a step holds at once on top of what was there before it, as PyTorch's allocator counts.

**Products.** The matrix products and convolutions of the eager step, without attention's, run alone in the same
rounds, each by the fastest kernel known. That time over the step's time, the share, says how near a contender is to the
limit that they set. Of it onnxtrain's step counts the part that it computes: rows that nobody reads are left out.

**What the time goes to.** Under PyTorch's profiler, after the timed rounds: onnxtrain's step by the ops of its graph,
eager's by PyTorch's operators.

**Other programs.** A run refuses to start beside busy programs unless `--loaded` is given, and counts what others take
meanwhile. A table that was disturbed says so.
"""


def write_page(results: Sequence[tuple[Workload, Measured]], behind: Behind | None, folder: Path) -> Path:
    """Writes benchmarks.md and benchmarks.svg into a folder; the path of the page."""
    (folder / "benchmarks.svg").write_text(speed_chart(results), encoding="utf-8")
    parts = [_METHOD, "## Summary", _summary(results).as_markdown(), _LEGEND, "![Speeds](benchmarks.svg)"]
    on_cpu = [(w, m) for w, m in results if w.device == "cpu"]
    on_gpu = [(w, m) for w, m in results if w.device == "cuda"]
    parts += ["## On a CPU", *(_section(workload_rows(w, m), m) for w, m in on_cpu)]
    if behind is not None:
        parts += [_section(behind_rows(behind), behind)]
    measured = {workload.name for workload, _ in results}
    missing = [workload.title for workload in CPU_WORKLOADS.values() if workload.name not in measured]
    missing += [] if behind is not None else ["steps while kernels compile"]
    if missing:
        parts.append(f"Not measured in these runs: {'; '.join(missing)}.")
    parts += ["## On a GPU", *(_section(workload_rows(w, m), m) for w, m in on_gpu)]
    if not on_gpu:
        parts.append(_NO_GPU)
    page = folder / "benchmarks.md"
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n", encoding="utf-8")
    return page


_NO_GPU = """\
Not measured: there was no GPU. Where there is one, `python -m benchmarks --only gpu` measures BERT-large, GPT-2 medium
and a Llama of 1.2 billion parameters in bfloat16, and BiasGelu and Slice at ONNX Runtime Training's own sizes.
"""
_LEGEND = """\
`×` a contender: how many times its speed onnxtrain has, in *italics* where the project's goal is missed. Products: what
its matrix products alone take of onnxtrain's step. Limit: how many times eager's speed a step of nothing but these
products would have.
"""


def _summary(results: Sequence[tuple[Workload, Measured]]) -> Rows:
    against = (EAGER, ONEDNN, COMPILE, COMPILE_DYNAMIC)
    header = ("", "eager", "onnxtrain", *(f"× {name}" for name in against), "products", "limit")
    rows = []
    for workload, measured in results:
        eager, ours = measured.of(EAGER), measured.of(ONNXTRAIN)
        if eager is None or ours is None:
            continue
        share, limit = measured.share(ours), measured.limit()
        times = (eager.total_s, ours.total_s) if workload.cold else (eager.median_s, ours.median_s)
        rows.append((
            workload.title,
            *(duration(seconds) for seconds in times),
            *(_ratio(workload, measured, name) for name in against),
            "" if share is None else _marked(f"{share:.0%}", share, workload.goals.share),
            "" if limit is None else f"{limit:.2f}",
        ))  # fmt: skip
    return Rows("Summary", header, tuple(rows))


def _ratio(workload: Workload, measured: Measured, name: str) -> str:
    ours, other = measured.of(ONNXTRAIN), measured.of(name)
    if ours is None or other is None:
        return ""
    ratio = other.total_s / ours.total_s if workload.cold else speed_over(ours, other)[1]
    return _marked(f"{ratio:.2f}", ratio, workload.goals.speed.get(name))


def _marked(text: str, reached: float, goal: float | None) -> str:
    return text if goal is None or round(reached, 2) >= goal else f"*{text}*"


def _section(rows: Rows, of: Measured | Behind) -> str:
    found = of.circumstances
    machine = found.machine
    where = f"{machine.processor}, {machine.threads} threads, {machine.memory_gib:.0f} GiB, {found.date}"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions)
    said = " ".join(rows.notes)
    spent = spent_rows(of) if isinstance(of, Measured) else None
    parts = [f"### {rows.title}", rows.as_markdown(), said, *([spent.as_markdown()] if spent else [])]
    return "\n\n".join([*parts, f"{where}. {versions}. `{found.command}`"])
