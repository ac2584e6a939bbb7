"""The effects of options that no other test file covers."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, torch
from onnxtrain import ORTModule

def searches(**options):
    ORTModule(torch.nn.Linear(1, 1), **options)
    found, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    return found

print(searches(), searches(tuning="exhaustive"))
os.environ["ORTMODULE_CONV_ALGO_SEARCH"] = "EXHAUSTIVE"
print(searches())
"""


def test_an_exhaustive_search_is_cudnns_benchmark() -> None:
    """Runs in its own process: PyTorch's test tools, which other tests import, forbid setting the flag."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if k != "ORTMODULE_CONV_ALGO_SEARCH"},
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == ["False", "True", "True"]
