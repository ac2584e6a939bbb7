"""A module that forward imports makes real tensors, also in a capture."""

import builtins
import copy
import importlib
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.capture.export import untraced_imports as untraced_imports_module
from onnxtrain.capture.export.untraced_imports import untraced_imports
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from tests.reference import assert_matches

LIBRARY = """
    import torch

    STEPS = torch.arange(3.0)
    WEIGHT = torch.nn.Parameter(torch.ones(3))

    def scaled(x, scale=torch.tensor(2.0)):
        return x * scale
"""


class Imports(nn.Module):
    def __init__(self, name: str, statement: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.name = name
        self.statement = statement

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        library = __import__(self.name) if self.statement else importlib.import_module(self.name)
        return self.inner(x) + library.scaled(x.sum())  # type: ignore[no-any-return]


@pytest.mark.parametrize("statement", [True, False])
def test_its_tensors_are_real(statement: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"library_of_forward_{statement}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(LIBRARY))
    monkeypatch.syspath_prepend(tmp_path)
    importing = builtins.__import__, importlib.import_module
    eager = Imports(name, statement)
    ours = ORTModule(copy.deepcopy(eager), fallback_policy="FALLBACK_DISABLE")
    x = torch.randn(2, 3)
    output = ours(x)
    assert importing == (builtins.__import__, importlib.import_module)
    library = sys.modules.pop(name)
    made = (library.STEPS, library.WEIGHT, *library.scaled.__defaults__)
    assert not any(isinstance(tensor, FakeTensor) for tensor in made)
    assert library.STEPS.tolist() == [0.0, 1.0, 2.0]
    assert_matches(output, eager, x)
    sys.modules.pop(name)


def test_an_import_of_what_is_imported_already_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr(untraced_imports_module, "untraced", lambda: entered.append("untraced") or nullcontext())
    scope = {"__package__": "sympy.core"}
    with untraced_imports():
        importing = builtins.__import__
        importing("sympy")
        importing("basic", scope, {}, ("Basic",), 1)
        importing("", scope, {}, ("basic",), 1)
        importing("logic.boolalg", scope, {}, ("And",), 2)
        importlib.import_module("sympy")
    assert not entered
