"""What takes longer the later it is imported is imported first."""

import subprocess
import sys

import pytest
import torch

PROGRAM = """
import sys
from onnxtrain import ORTModule
print(*sys.modules)
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch was built without torch.distributed")
def test_the_functional_collectives_are_imported_before_other_packages() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    modules = run.stdout.split()
    first = modules.index("torch.distributed._functional_collectives")
    assert first < min(modules.index("onnx_ir"), modules.index("onnxtrain.graph"), modules.index("onnxtrain.ops"))
