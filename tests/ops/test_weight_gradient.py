"""The compiled kernel of a convolution's weight gradient, and when it is measured and chosen."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.execute.kernel_choice import trial, tuned_program
from onnxtrain.execute.kernel_choice.stored import file_of, load
from onnxtrain.execute.kernel_choice.times import SAMPLES, Answer
from onnxtrain.ops.convolution.weight_gradient import LIBRARY, convolution_gradients, weight_gradient
from onnxtrain.testing import assert_no_worse_than_eager
from tests.op_case import CaseCheck, OpCase
from tests.ops import cases_convolution
from tests.ops.compiled_candidates import compiled, compiled_for, let_cases_compile, on_other_processors
from tests.ops.test_compiled_kernels import counting

pytestmark = pytest.mark.compiler


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of the compiled kernel."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(LIBRARY, "functions", counting(LIBRARY, counts))
    return counts


CASES = [case for case in cases_convolution.CASES if case.name == "ConvGrad"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_autograd(case: OpCase, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    let_cases_compile(monkeypatch)
    check = CaseCheck(case, torch.float32, compiled)
    ran = [check.check_sizes(sizes) for sizes in case.size_sets()]
    assert ran[0]
    attributes = dict(case.attributes)
    is_supported = len(attributes["strides"]) == 2 and attributes["group"] == 1
    wants_weight = attributes.get("output_mask", (1, 1, 1))[1] == 1
    assert bool(calls) == (is_supported and wants_weight)


def gradients(
    x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, geometry: tuple[list[int], ...]
) -> tuple[torch.Tensor, ...]:
    """Return eager PyTorch's gradients of x, w and b."""
    b = torch.zeros(w.size(0), dtype=w.dtype)
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    return torch.autograd.grad(torch.nn.functional.conv2d(*leaves, *geometry), leaves, dy)


# Images, channels, output channels, image size, kernel size, strides, pads, dilations
GEOMETRIES = [
    (2, 3, 5, (7, 9), (3, 3), (1, 1), (1, 1), (1, 1)),
    (1, 1, 1, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1)),
    (3, 32, 32, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 7, 17, (11, 6), (3, 2), (2, 3), (1, 0), (1, 1)),
    (2, 13, 33, (10, 12), (2, 3), (1, 2), (2, 3), (3, 2)),
    (1, 6, 16, (4, 300), (3, 3), (1, 1), (1, 1), (1, 1)),  # a row longer than a block
    (5, 64, 20, (5, 5), (5, 5), (1, 1), (2, 2), (1, 1)),  # several images in a block
    (3, 25, 96, (33, 17), (1, 1), (2, 2), (0, 0), (1, 1)),
    (2, 8, 8, (3, 3), (3, 3), (1, 1), (4, 4), (1, 1)),  # windows outside of the image
    (4, 120, 150, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1)),  # threads split the output channels
]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_geometry_matches_eager(
    geometry: tuple[Any, ...], layout: torch.memory_format, threads: int, calls: Any
) -> None:
    images, channels, out_channels, size, kernel, *steps = geometry
    torch.manual_seed(0)
    strides, pads, dilations = (list(v) for v in steps)
    x = torch.randn(images, channels, *size).contiguous(memory_format=layout)
    w = torch.randn(out_channels, channels, *kernel).contiguous(memory_format=layout)
    y = torch.nn.functional.conv2d(x, w, None, strides, pads, dilations)
    dy = torch.randn_like(y)
    count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = convolution_gradients(dy, x, w, strides, pads, dilations, [True, True, True])
        repeated = weight_gradient(dy, x, w, strides, pads, dilations)
    finally:
        torch.set_num_threads(count)
    assert calls == {"weight_gradient": 2}
    assert results[1] is not None
    assert torch.equal(repeated, results[1]), "two runs differ"
    eager = gradients(x, w, dy, (strides, pads, dilations))
    exact = gradients(x.double(), w.double(), dy.double(), (strides, pads, dilations))
    for name, got, eager_gradient, exact_gradient in zip(("dx", "dw", "db"), results, eager, exact, strict=True):
        assert got is not None
        assert_no_worse_than_eager(name, got, eager_gradient, exact_gradient)


def test_nan_and_infinity_do_not_spread(calls: Counter[str]) -> None:
    """The kernel pads channels of a tile and borders of an image with zeros, not with neighbouring memory."""
    x, dy = torch.ones(1, 7, 4, 4), torch.ones(1, 9, 4, 4)
    x[0, 3, 0, 0], x[0, 6, 3, 3], dy[0, 8, 1, 1] = math.nan, math.inf, math.nan
    geometry = ([1, 1], [1, 1], [1, 1])
    w = torch.empty(9, 7, 3, 3)
    dw = weight_gradient(dy, x, w, *geometry)
    assert calls
    exact = gradients(x.double(), w.double(), dy.double(), geometry)[1]
    assert_no_worse_than_eager("dw", dw, exact.float(), exact)


@pytest.mark.parametrize("empty", ["images", "channels"])  # PyTorch does not support 0 output channels
def test_gradient_of_empty_tensors_is_zero(empty: str, calls: Counter[str]) -> None:
    sizes = {"images": 2, "channels": 3, "out": 4, empty: 0}
    x, w = torch.ones(sizes["images"], sizes["channels"], 5, 5), torch.ones(sizes["out"], sizes["channels"], 3, 3)
    dy = torch.ones(sizes["images"], sizes["out"], 5, 5)
    dw = weight_gradient(dy, x, w, [1, 1], [1, 1], [1, 1])
    assert torch.equal(dw, torch.zeros_like(w))
    assert not calls


@on_other_processors
def test_other_vector_lengths(processor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = compiled_for(processor, LIBRARY, monkeypatch, tmp_path)
    for geometry, layout in itertools.product(GEOMETRIES, (torch.channels_last, torch.contiguous_format)):
        counts: Counter[str] = Counter()
        monkeypatch.setattr(LIBRARY, "functions", counting(library, counts))
        test_geometry_matches_eager(geometry, layout, 2, counts)


# Kernel choice


class TwoConvolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of measured times: all kernels are measured, and the compiled one takes half the time."""
    for module in (trial, tuned_program):
        monkeypatch.setattr(module, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(trial, "FAR_OFF", math.inf)
    monkeypatch.setattr(trial._THREADS, "seconds_since", lambda before: 0.0)  # this machine may be busy
    add = Answer.add
    monkeypatch.setattr(Answer, "add", lambda self, name, *_: add(self, name, 1e-3 if name == "compiled" else 2e-3))
    return tmp_path


def steps(folder: Path, count: int, **options: Any) -> None:
    torch.manual_seed(0)
    module, x = ORTModule(TwoConvolutions(), cache_dir=folder, **options), torch.randn(2, 3, 8, 8)
    for _ in range(count):
        module(x).square().sum().backward()


def choices(folder: Path) -> set[str]:
    return {answer.choice for key, answer in load(file_of(folder)).items() if "ConvGrad" in key}


def test_faster_kernel_is_chosen(answers: Path, calls: Counter[str]) -> None:
    steps(answers, 2 * SAMPLES + 4)
    assert calls
    assert choices(answers) == {"compiled"}


def test_no_choice_is_stored_until_the_library_is_compiled(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIBRARY.wait()
    functions = LIBRARY.functions
    monkeypatch.setattr(LIBRARY, "functions", None)
    torch.manual_seed(0)
    module, x = ORTModule(TwoConvolutions(), cache_dir=answers), torch.randn(2, 3, 8, 8)
    for _ in range(5 * SAMPLES):
        module(x).square().sum().backward()
    assert choices(answers) == set()
    monkeypatch.setattr(LIBRARY, "functions", functions)
    for _ in range(SAMPLES + 2):
        module(x).square().sum().backward()
    assert choices(answers) == {"compiled"}


def test_without_a_compiler_another_kernel_is_chosen(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIBRARY, "functions", None)
    monkeypatch.setattr(LIBRARY, "failure", "there is no compiler")
    steps(answers, 2 * SAMPLES + 4)
    assert choices(answers) <= {"aten"}


@pytest.mark.parametrize("options", [{"kernels": "pytorch"}, {"rng": "torch"}], ids=str)
def test_options_that_exclude_compiled_kernels(options: Any, answers: Path, calls: Counter[str]) -> None:
    steps(answers, 2 * SAMPLES + 4, **options)
    assert not calls
