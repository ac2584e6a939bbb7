"""The compiled product, a candidate of every op that is one."""

from __future__ import annotations

import itertools
import math
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtrain import testing
from onnxtrain.native import Library, compiler
from onnxtrain.ops import definition_of
from onnxtrain.ops.matmul.compiled_product import LIBRARY, product
from onnxtrain.ops.native_kernels import NOTE
from onnxtrain.system.machine import current_machine
from onnxtrain.testing import CaseCheck, assert_no_worse_than_eager
from tests.ops import cases_matmul
from tests.ops.compiled_candidates import compiled, let_cases_compile
from tests.ops.test_compiled_kernels import counting

pytestmark = pytest.mark.compiler


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the compiled kernel ran."""
    found: Counter[str] = Counter()
    monkeypatch.setattr(LIBRARY, "functions", counting(LIBRARY, found))
    return found


def test_every_product_op_has_it_and_matches_autograd(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch, subtests: Any
) -> None:
    let_cases_compile(monkeypatch)
    ran: set[str] = set()
    for case in cases_matmul.CASES:
        with subtests.test(str(case)):
            calls.clear()
            check = CaseCheck(case, torch.float32, compiled)
            assert next(iter([check.check_sizes(known) for known in case.size_sets()]))
            if calls:
                ran.add(case.name)
    assert {"MatMul", "Linear", "Gemm", "FusedMatMul"} <= ran


SIZES = [
    (512, 256, 1024),
    (1, 1, 1),
    (5, 3, 2),
    (7, 385, 17),  # one more than is added in one go
    (97, 40, 130),  # one row and two columns more than a part
    (64, 512, 33),  # rows that meet in few sets of a cache
    (13, 1000, 31),
    (200, 9, 8),
]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("transposed", [False, True], ids=("b", "transposed b"))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_sizes(sizes: tuple[int, int, int], transposed: bool, threads: int, calls: Counter[str]) -> None:
    m, k, n = sizes
    torch.manual_seed(0)
    a, bias = torch.randn(m, k + 3)[:, :k], torch.randn(n)
    b = torch.randn(n, k).t() if transposed else torch.randn(k, n)
    count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = [product(a, b, with_, 1.0) for with_ in (None, bias)]
        scaled = product(a.view(1, m, k) if a.is_contiguous() else a.unsqueeze(0), b, None, 0.5)
        again = product(a, b, bias, 1.0)
    finally:
        torch.set_num_threads(count)
    assert calls == {"product": 4}
    assert torch.equal(again, found[1]), "two runs give the same bits"
    assert torch.equal(scaled, found[0].unsqueeze(0) * 0.5)
    exact = a.double() @ b.double()
    assert_no_worse_than_eager("y", found[0], a @ b, exact)
    assert_no_worse_than_eager("y + bias", found[1], torch.addmm(bias, a, b), exact + bias.double())


def test_numbers_that_are_missing_or_infinite_stay_where_they_belong(calls: Counter[str]) -> None:
    """What stands behind the last column or row of a tile is zero and not what lay there."""
    a, b = torch.ones(7, 20), torch.ones(20, 19)
    a[6, 3], b[5, 18], b[0, 2] = math.inf, math.nan, math.inf
    for operand in (b, b.t().contiguous().t()):
        torch.testing.assert_close(product(a, operand, None, 1.0), a @ b, equal_nan=True)
    assert calls == {"product": 2}


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_no_elements(sizes: tuple[int, int, int], calls: Counter[str]) -> None:
    m, k, n = sizes
    found = product(torch.ones(m, k), torch.ones(k, n), torch.ones(n), 1.0)
    assert torch.equal(found, torch.ones(m, n))
    assert not calls


def test_other_orders_are_left_to_pytorch(calls: Counter[str]) -> None:
    a, b, bias = torch.randn(6, 8), torch.randn(8, 10), torch.randn(10)
    for x, y, z in (
        (torch.randn(8, 6).t(), b, bias),
        (torch.randn(6, 1).expand(6, 8), b, bias),
        (a, torch.randn(16, 20)[::2, ::2], bias),
        (a, b, torch.randn(1).expand(10)),
    ):
        torch.testing.assert_close(product(x, y, z, 1.0), x @ y + z)
    assert not calls


def test_only_wide_outputs_are_worth_a_trial() -> None:
    [case] = [c for c in cases_matmul.CASES if c.name == "Linear"][:1]
    [node] = testing.case_graph(case, torch.float32).graph
    node.metadata_props[NOTE] = "on"
    definition, machine = definition_of(node), current_machine()
    kernel, view = compiled(node, "cpu"), definition.view(node)
    assert kernel.name == "compiled"
    rest = [()] * (len(definition.inputs) - 2)
    assert kernel.seconds(view, ((512, 256), (2048, 256), *rest), machine) < math.inf
    assert kernel.seconds(view, ((512, 256), (2047, 256), *rest), machine) == math.inf
    wide = ((512, 256), (8000, 256), *rest)
    assert kernel.seconds(view, wide, machine) > definition.candidates(node, "cpu")[0].seconds(view, wide, machine)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86")
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_other_vector_lengths(processor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONNXTRAIN_CACHE_DIR", str(tmp_path))
    plain = compiler.flags()
    monkeypatch.setattr(compiler, "flags", lambda **_: (*plain[:-1], f"-march={processor}"))
    library = Library(LIBRARY.name, LIBRARY.source, LIBRARY.signatures)
    assert library.wait(), library.why_not
    for sizes, transposed in itertools.product(SIZES, (False, True)):
        found: Counter[str] = Counter()
        monkeypatch.setattr(LIBRARY, "functions", counting(library, found))
        test_all_sizes(sizes, transposed, 2, found)
