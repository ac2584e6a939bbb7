"""Run random programs in onnxtrain and in eager PyTorch, and report differences.

python -m tests.fuzz --programs 10000          from seed 0 on
python -m tests.fuzz --minutes 5 --jobs 2      as many as there is time for
python -m tests.fuzz --replay 4711             one of them again, with all results and bounds
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.fuzz.reduce import reduced
from tests.fuzz.replay import replayed
from tests.fuzz.script import script
from tests.fuzz.worker import Case, Judges, processors


def main(arguments: Sequence[str]) -> int:
    """Run the programs; return the number of distinct findings as the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, help="how many; without, as many as there is time for")
    parser.add_argument("--minutes", type=float, help="how long at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next has the next one")
    parser.add_argument("--jobs", type=int, default=processors(), help="processes")
    parser.add_argument("--limit", type=float, default=120, help="seconds a program may take")
    parser.add_argument("--reduce", type=float, default=120, help="seconds to shrink the first of each kind of finding")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="the folder for scripts of findings")
    parser.add_argument("--replay", type=int, help="a seed: run its program alone, here, and show it")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        for line in replayed(options.replay):
            _say(line)
        return 0
    if options.programs is None and options.minutes is None:
        options.minutes = 5.0
    run = _Run(options)
    run.programs()
    run.show()
    return min(len(run.findings), 100)


_SCRIPTS = 12  # of one kind of finding


class _Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.counts: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.findings: dict[str, list[Case]] = {}
        self.unstable: list[int] = []
        self.start = time.monotonic()

    def programs(self) -> None:
        options = self.options
        judges = Judges(options.jobs, options.limit)
        smaller = Judges(1, options.limit) if options.reduce else None
        seeds: Iterator[int] = itertools.count(options.seed)
        if options.programs is not None:
            seeds = itertools.islice(seeds, options.programs)
        deadline = self.start + 60 * options.minutes if options.minutes else float("inf")
        said = self.start
        try:
            for case in judges.all(itertools.takewhile(lambda _: time.monotonic() < deadline, seeds)):
                self.counts[case.verdict.kind] += 1
                if case.verdict.kind in ("refused", "discarded"):
                    self.reasons[f"{case.verdict.signature}"] += 1
                if case.verdict.kind == "unstable":
                    self.unstable.append(case.program.seed)
                if case.verdict.is_finding:
                    self._note(case, smaller)
                if time.monotonic() - said > 60:
                    said = time.monotonic()
                    _say(f"{said - self.start:6.0f} s: {self._counted()}")
        finally:
            judges.close()
            if smaller is not None:
                smaller.close()

    def _note(self, case: Case, judges: Judges | None) -> None:
        cases = self.findings.setdefault(case.verdict.signature, [])
        cases.append(case)
        _say(f"seed {case.program.seed}: {case.verdict.kind}: {case.verdict.detail.splitlines()[0][:200]}")
        if len(cases) > _SCRIPTS:
            return
        if judges is not None and case.verdict.kind != "hang":
            case = reduced(case, judges.one, self.options.reduce)
        self.options.out.mkdir(parents=True, exist_ok=True)
        path = self.options.out / f"{case.verdict.kind}_{case.program.seed}.py"
        path.write_text(script(case), encoding="utf-8")
        _say(f"    {path}")

    def _counted(self) -> str:
        return f"{self.counts.total()} programs: " + ", ".join(f"{n} {kind}" for kind, n in self.counts.most_common())

    def show(self) -> None:
        took = time.monotonic() - self.start
        _say(f"\n{self._counted()}; {took:.0f} s, PyTorch {torch.__version__}, seeds from {self.options.seed}")
        for reason, count in self.reasons.most_common(40):
            _say(f"{count:>6}  {reason}")
        if self.unstable:
            _say(f"unstable: seeds {', '.join(map(str, self.unstable))}")
        for signature, cases in sorted(self.findings.items(), key=lambda item: -len(item[1])):
            _say(f"{len(cases):>6}  {signature}\n        seeds {', '.join(str(c.program.seed) for c in cases[:8])}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
