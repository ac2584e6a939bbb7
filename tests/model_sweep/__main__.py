"""Train models small, in onnxtrain and in eager PyTorch.

They are the classes of transformers' auto mappings, PyTorch's own recurrent and transformer modules, and models of
diffusers if it is installed (the extra `diffusers`), which --write needs.

python -m tests.model_sweep                       all of them
python -m tests.model_sweep --only Gpt2 Bert      those whose names contain one of these
python -m tests.model_sweep --library torch       those of one library, or of several
python -m tests.model_sweep --every 3             each third
python -m tests.model_sweep --layers 12           with more layers than two: later ones are copies of the second, and
                                                  of ten or more some are omitted from the capture
python -m tests.model_sweep --write               all, and the page of the documentation from their outcomes
python -m tests.model_sweep --keep --only Gpt2    replace the outcomes of these in the file, which keeps all others;
                                                  with --write, also the page, once the file has all classes
"""

from __future__ import annotations

import argparse
import collections
import difflib
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import torch
import transformers

from benchmarks.machine import measured_commit
from tests.model_sweep import diffusers_models
from tests.model_sweep.catalog import LIBRARIES, Entry, entries
from tests.model_sweep.isolated import isolated
from tests.model_sweep.page import PAGE, page, read_outcomes
from tests.model_sweep.small_configs import LAYERS


def main(arguments: Sequence[str]) -> int:
    """Run the sweep; the exit status is 1 where a class is wrong, raises, crashes or hangs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), help="texts that names contain, in any case")
    parser.add_argument("--library", nargs="*", default=LIBRARIES, choices=LIBRARIES, help="libraries of the classes")
    parser.add_argument("--every", type=int, default=1, help="each n-th class")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of transformers' models (default: 2)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit", type=float, default=240, help="seconds a class may take")
    parser.add_argument("--out", type=Path, default=Path("build/model-sweep.jsonl"), help="the outcomes, one a line")
    parser.add_argument("--keep", action="store_true", help="keep the outcomes of all other classes in the file")
    parser.add_argument("--write", action="store_true", help="write docs/reference/models.md")
    parser.add_argument("--incomplete", action="store_true", help="write it also if classes have no outcome")
    options = parser.parse_args(arguments)
    every = entries()
    try:
        chosen = [e for e in select(every, options.only) if e.library in options.library][:: options.every]
    except LookupError as error:
        parser.error(str(error))
    if options.write and options.layers != LAYERS:
        parser.error(f"--write: the page is of models of {LAYERS} layers; leave --layers out")
    kept = read_outcomes(options.out) if options.keep and options.out.exists() else []
    missing = {e.key for e in every} - {e.key for e in chosen} - {outcome.entry.key for outcome in kept}
    if options.write and not options.incomplete and not diffusers_models.installed():
        parser.error(
            "--write needs diffusers, whose models are on the page: pip install 'onnxtrain[diffusers]'; "
            "or pass --incomplete"
        )
    if options.write and not options.incomplete and missing:
        parser.error(f"--write needs all classes, and {len(missing)} have no outcome, such as {min(missing)[1]}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    counts: collections.Counter[str] = collections.Counter()
    commit = measured_commit()
    with ThreadPoolExecutor(options.jobs) as threads, options.out.open("a" if options.keep else "w") as file:
        for outcome in threads.map(lambda entry: isolated(entry, options.limit, options.layers), chosen):
            counts[outcome.kind] += 1
            file.write(json.dumps(asdict(replace(outcome, commit=commit))) + "\n")
            file.flush()
            first = f"{outcome.first_s:6.2f} s" if outcome.first_s else "        "
            number = sum(counts.values())
            _say(f"{number:4} {outcome.kind:8} {first} {outcome.entry.name}  {outcome.detail}")
    _say(str(dict(counts)))
    if options.write:
        PAGE.write_text(page(read_outcomes(options.out), _versions()), encoding="utf-8")
    return int(any(counts[kind] for kind in ("wrong", "error", "crash", "hang")))


def select(every: Sequence[Entry], only: Sequence[str]) -> Sequence[Entry]:
    """Return the classes whose names contain one of these texts; all if there are none.

    Raises:
        LookupError: no name contains one of them; the error says which names are similar.
    """
    for text in only:
        if not any(text.lower() in entry.name.lower() for entry in every):
            names = {entry.name[: len(text)].lower(): entry.name for entry in every}  # one for each such beginning
            near = [names[start] for start in difflib.get_close_matches(text.lower(), names)]
            raise LookupError(
                f"--only {text}: no class of the sweep has this text in its name"
                + (f"; similar names: {', '.join(near)}" if near else "")
            )
    return [e for e in every if not only or any(text.lower() in e.name.lower() for text in only)]


def _versions() -> dict[str, str]:
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "diffusers": metadata.version("diffusers") if diffusers_models.installed() else "",
    }


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
