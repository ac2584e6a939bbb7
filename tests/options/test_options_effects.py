"""The effects of options that no other test file covers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch
from onnxtrain import ORTModule
ORTModule(torch.nn.Linear(1, 1))
before = torch.backends.cudnn.benchmark
ORTModule(torch.nn.Linear(1, 1), **({} if sys.argv[1] == "variable" else {"tuning": "exhaustive"}))
print(before, torch.backends.cudnn.benchmark)
"""


@pytest.mark.parametrize(("way", "expected"), [("option", "False True"), ("variable", "True True")])
def test_an_exhaustive_search_is_cudnns_benchmark(way: str, expected: str) -> None:
    """Runs in its own process: PyTorch's test tools, which other tests import, forbid setting the flag."""
    environment = {k: v for k, v in os.environ.items() if k != "ORTMODULE_CONV_ALGO_SEARCH"}
    if way == "variable":
        environment["ORTMODULE_CONV_ALGO_SEARCH"] = "EXHAUSTIVE"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, way],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == expected
