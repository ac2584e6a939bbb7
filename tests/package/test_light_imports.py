"""What is left out of imports comes when it is asked for, and nothing of it stays in anybody's way."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch._library.utils import get_source

from onnxtrain.light_imports import _Deferring, _line_of_caller, _module_of_caller

_LEFT_OUT = """
import io, inspect, sys, types
import torch
before = list(sys.meta_path), torch._library.utils.get_source
import onnxtrain
onnxtrain.ORTModule
assert "networkx" not in sys.modules
assert "torch._export.serde.schema" not in sys.modules
assert (list(sys.meta_path), torch._library.utils.get_source) == before
assert torch.library.inspect is inspect

from torch._functorch._activation_checkpointing import graph_info_provider, knapsack_evaluator
import networkx
assert type(networkx) is types.ModuleType and networkx.path_graph(3).number_of_edges() == 2
assert graph_info_provider.nx.DiGraph is knapsack_evaluator.nx.DiGraph is networkx.DiGraph

archive = sys.modules["torch.export.pt2_archive"]
assert not hasattr(archive, "nothing_of_this_name")
assert archive.PT2ArchiveWriter.__name__ == "PT2ArchiveWriter" and type(archive) is types.ModuleType
from torch.export.pt2_archive import PT2ArchiveReader, constants
file = io.BytesIO()
torch.export.save(torch.export.export(torch.nn.Linear(2, 3), (torch.ones(4, 2),)), file)
file.seek(0)
assert torch.export.load(file).module()(torch.ones(4, 2)).shape == (4, 3)
print("whole")
"""

_THERE_ALREADY = """
import sys
import networkx
import onnxtrain  # before torch
onnxtrain.ORTModule
from torch._functorch._activation_checkpointing import graph_info_provider
assert graph_info_provider.nx is networkx
print("whole")
"""


@pytest.mark.parametrize("program", [_LEFT_OUT, _THERE_ALREADY], ids=["left out", "there already"])
def test_imports(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.returncode) == ("whole", 0), done.stderr


def test_an_operator_is_registered_from_the_same_place() -> None:
    def both() -> tuple[str, str]:
        return get_source(2), _line_of_caller(2)

    theirs, ours = both()
    assert ours == theirs
    frame = inspect.currentframe()
    assert _module_of_caller(frame) is inspect.getmodule(frame) is sys.modules[__name__]
    assert _module_of_caller(torch.nn.Linear) is inspect.getmodule(torch.nn.Linear)


def test_a_package_that_fails_is_run_again() -> None:
    """As Python runs a failed import again."""
    runs: list[str] = []

    class Failing:
        def exec_module(self, module: ModuleType) -> None:
            runs.append(module.__name__)
            if len(runs) == 1:
                raise OSError("the disk")
            module.__dict__["found"] = 7

    module = ModuleType("package")
    loader = _Deferring(Failing())  # type: ignore[arg-type]
    module.__dict__["__spec__"] = type("Spec", (), {"loader": loader})
    loader.exec_module(module)
    with pytest.raises(OSError, match="the disk"):
        _ = module.found
    assert module.found == 7
    assert runs == ["package", "package"]
