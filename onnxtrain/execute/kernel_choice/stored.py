"""Measured times on disk: one file per machine, versions of libraries and number of threads.

    <cache folder>/kernels/<hash>.json      {"machine": {...}, "answers": {question: {sizes, seconds, choice}}}

A file is replaced atomically, under a lock that all processes take. A file that cannot be read counts as empty, with a
warning.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import torch

from onnxtrain.execute.kernel_choice.times import MAX_CALLS, SAMPLES, Answer, Answers, Samples, merged
from onnxtrain.log import LOG
from onnxtrain.system.atomic_file import replacing
from onnxtrain.system.cache_folder import cache_folder
from onnxtrain.system.machine import current_machine

_VERSION = 3  # of the file's format, and of the set of candidates
_LOCK_SECONDS = 0.2  # a training step does not wait longer: the times are written next time


def setting() -> dict[str, Any]:
    """Return the facts that times depend on besides the question: processor, threads and library versions."""
    machine = current_machine()
    return {
        "processor": machine.processor,
        "instructions": [machine.vectors, *sorted(machine.onednn_instructions)],
        "threads": machine.threads,
        "torch": torch.__version__,
        "libraries": _libraries(),
        "version": _VERSION,
    }


@functools.cache
def _libraries() -> list[str]:
    """Return the versions of MKL and oneDNN, as PyTorch reports them."""
    lines = map(str.strip, torch.__config__.show().splitlines())
    return [line.removeprefix("- ") for line in lines if "MKL-DNN" in line or "Math Kernel Library" in line]


def file_of(folder: Path | None = None) -> Path:
    """Return the file for this machine in `folder`, by default in the cache folder."""
    text = json.dumps(setting(), sort_keys=True)
    name = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    return (cache_folder("kernels") if folder is None else folder) / name


def load(file: Path) -> Answers:
    """Return the answers in a file; none, with a warning, if it is damaged or from another machine."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["machine"] != setting():
            raise ValueError("it was measured on another machine")
        return {key: _answer(fields) for key, fields in content["answers"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"ignoring the measured kernel times in {file}, which cannot be read "
            f"({type(error).__name__}: {error}); the file is written anew",
            stacklevel=2,
        )
        return {}


def _answer(fields: Mapping[str, Any]) -> Answer:
    seconds = {str(name): float(value) for name, value in fields["seconds"].items()}
    choice = str(fields["choice"])
    if choice not in seconds or not all(math.isfinite(s) and s > 0 for s in seconds.values()):
        raise ValueError("expected positive times, and a time for the chosen kernel, in each answer")
    samples = {name: Samples(MAX_CALLS, SAMPLES, value) for name, value in seconds.items()}
    return Answer(str(fields["sizes"]), samples, choice=choice)


def save(file: Path, answers: Answers) -> None:
    """Add the clean answers to a file. If that fails, the times are lost; the log says so."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{file}.lock", timeout=_LOCK_SECONDS):
            every = merged(load(file), answers)
            content = {"machine": setting(), "answers": {key: _fields(a) for key, a in sorted(every.items())}}
            with replacing(file) as target:
                target.write(json.dumps(content, indent=1).encode())
    except (OSError, filelock.Timeout) as error:
        LOG.info("measured kernel times were not saved to %s: %s", file, error)


def _fields(answer: Answer) -> dict[str, Any]:
    seconds = {name: samples.seconds for name, samples in answer.samples.items()}
    return {"sizes": answer.sizes, "seconds": seconds, "choice": answer.choice}
