"""Generated programs: readable, found by debuggers and profilers, and frugal with memory."""

import linecache
import traceback

import pytest
import torch
from torch import nn
from torch.profiler import profile

from onnxtrain import ORTModule
from onnxtrain.execute.program import Program
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.encoder(x))
        return hidden.reshape(x.shape[1], x.shape[0] * 2, 4)


@pytest.fixture
def program() -> Program:
    module = ORTModule(Net())
    module(torch.randn(3, 5, 4))
    forward: Program = engine_of(module).newest().unit.forward
    return forward


def test_a_line_names_its_module_and_source_location(program: Program) -> None:
    lines = program.source.splitlines()
    linear = next(line for line in lines if "linear" in line and "=" in line)
    assert "encoder" in linear
    assert "test_program.py" in next(line for line in lines if "relu" in line and "=" in line)


def test_sizes_are_python_integers(program: Program) -> None:
    assert ".size(0)" in program.source
    assert "torch.tensor" not in program.source


class Smallest(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = torch.diagonal_scatter(x, x.diagonal() * 3)  # as long as the smallest of two sizes
        return scaled.min(1).values


def test_a_kernel_may_have_the_name_of_a_function_of_python() -> None:
    module = ORTModule(Smallest(), fallback_policy="FALLBACK_DISABLE")
    for shape in ((3, 2), (5, 4), (4, 5)):
        x = torch.randn(shape)
        assert_matches([module(x)], lambda module, x: [module(x)], Smallest(), x)


def test_tracebacks_show_the_generated_line(program: Program) -> None:
    assert linecache.getline(program.filename, 3).startswith("def program")
    with pytest.raises(RuntimeError) as caught:
        program.run([torch.randn(8, 5), torch.randn(8), torch.randn(3, 5, 4)], ())
    text = "".join(traceback.format_exception(caught.value))
    assert program.filename in text
    assert "# encoder" in text


def test_a_profiler_sees_each_node(program: Program) -> None:
    with torch.no_grad(), profile() as profiled:
        program.run([torch.randn(8, 4), torch.randn(8), torch.randn(3, 5, 4)], ())
    names = {event.key for event in profiled.key_averages()}
    assert "Linear encoder" in names


def test_tensors_are_freed_after_their_last_use(program: Program) -> None:
    lines = [line.strip() for line in program.source.splitlines()]
    linear = next(line.split(" = ")[0] for line in lines if line.startswith("linear"))
    assert any(line.startswith("del ") and linear in line for line in lines)
