"""The compiled GEMM, a candidate kernel of every matmul op."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtrain.ops import definition_of
from onnxtrain.ops.matmul.compiled_gemm import LIBRARY, gemm
from onnxtrain.ops.native_kernels import NOTE
from onnxtrain.system.machine import current_machine
from onnxtrain.testing import assert_no_worse_than_eager
from tests import op_case
from tests.op_case import CaseCheck
from tests.ops import cases_matmul
from tests.ops.compiled_candidates import compiled, compiled_for, let_cases_compile, on_other_processors
from tests.ops.test_compiled_kernels import counting
from tests.reference import assert_matches
from tests.thinned import covering

pytestmark = pytest.mark.compiler


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls of the compiled kernel."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(LIBRARY, "functions", counting(LIBRARY, counts))
    return counts


def test_every_matmul_op_has_it_and_matches_autograd(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch, subtests: Any
) -> None:
    let_cases_compile(monkeypatch)
    ran: set[str] = set()
    for case in cases_matmul.CASES:
        with subtests.test(str(case)):
            calls.clear()
            check = CaseCheck(case, torch.float32, compiled)
            assert next(iter([check.check_sizes(sizes) for sizes in case.size_sets()]))
            if calls:
                ran.add(case.name)
    assert {"MatMul", "Linear", "Gemm", "FusedMatMul"} <= ran


SIZES = [
    (512, 256, 1024),
    (1, 1, 1),
    (5, 3, 2),
    (7, 385, 17),  # k: one more than a block of depth
    (97, 40, 130),  # one row and two columns more than a block
    (64, 512, 33),  # rows that map to few cache sets
    (13, 1000, 31),
    (200, 9, 8),
]


@pytest.mark.parametrize(
    ("sizes", "transposed", "threads"),
    covering(SIZES, [pytest.param(False, id="b"), pytest.param(True, id="transposed b")], [1, 2, 5]),
)
def test_all_sizes(sizes: tuple[int, int, int], transposed: bool, threads: int, calls: Counter[str]) -> None:
    m, k, n = sizes
    torch.manual_seed(0)
    a, bias = torch.randn(m, k + 3)[:, :k], torch.randn(n)
    b = torch.randn(n, k).t() if transposed else torch.randn(k, n)
    count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        without_bias, with_bias = (gemm(a, b, added, 1.0) for added in (None, bias))
        scaled = gemm(a.view(1, m, k) if a.is_contiguous() else a.unsqueeze(0), b, None, 0.5)
        again = gemm(a, b, bias, 1.0)
    finally:
        torch.set_num_threads(count)
    assert calls == {"gemm": 4}
    assert torch.equal(again, with_bias), "two runs must give the same bits"
    assert torch.equal(scaled, without_bias.unsqueeze(0) * 0.5)
    exact = a.double() @ b.double()
    assert_no_worse_than_eager("y", without_bias, a @ b, exact)
    assert_no_worse_than_eager("y + bias", with_bias, torch.addmm(bias, a, b), exact + bias.double())


def test_nan_and_inf_do_not_spread_to_other_elements(calls: Counter[str]) -> None:
    """The padding of a partial tile is zero, not uninitialized memory."""
    a, b = torch.ones(7, 20), torch.ones(20, 19)
    a[6, 3], b[5, 18], b[0, 2] = math.inf, math.nan, math.inf
    for operand in (b, b.t().contiguous().t()):
        assert_matches(gemm(a, operand, None, 1.0), torch.matmul, a, b)
    assert calls == {"gemm": 2}


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_no_elements(sizes: tuple[int, int, int], calls: Counter[str]) -> None:
    m, k, n = sizes
    y = gemm(torch.ones(m, k), torch.ones(k, n), torch.ones(n), 1.0)
    assert torch.equal(y, torch.ones(m, n))
    assert not calls


def test_other_strides_run_pytorchs_kernel(calls: Counter[str]) -> None:
    a, b, bias = torch.randn(6, 8), torch.randn(8, 10), torch.randn(10)
    for x, y, z in (
        (torch.randn(8, 6).t(), b, bias),
        (torch.randn(6, 1).expand(6, 8), b, bias),
        (a, torch.randn(16, 20)[::2, ::2], bias),
        (a, b, torch.randn(1).expand(10)),
    ):
        assert_matches(gemm(x, y, z, 1.0), lambda x, y, z: x @ y + z, x, y, z)
    assert not calls


def test_only_wide_outputs_are_tried() -> None:
    [case] = [c for c in cases_matmul.CASES if c.name == "Linear"][:1]
    [node] = op_case.case_graph(case, torch.float32).graph
    node.metadata_props[NOTE] = "on"
    definition, machine = definition_of(node), current_machine()
    kernel, view = compiled(node, "cpu"), definition.view(node)
    assert kernel.name == "compiled"
    rest = [()] * (len(definition.inputs) - 2)
    assert kernel.seconds(view, ((512, 256), (2048, 256), *rest), machine) < math.inf
    assert kernel.seconds(view, ((512, 256), (2047, 256), *rest), machine) == math.inf
    wide = ((512, 256), (8000, 256), *rest)
    assert kernel.seconds(view, wide, machine) > definition.candidates(node, "cpu")[0].seconds(view, wide, machine)


@on_other_processors
def test_other_vector_lengths(processor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = compiled_for(processor, LIBRARY, monkeypatch, tmp_path)
    for sizes, transposed in itertools.product(SIZES, (False, True)):
        counts: Counter[str] = Counter()
        monkeypatch.setattr(LIBRARY, "functions", counting(library, counts))
        test_all_sizes(sizes, transposed, 2, counts)
