"""Huge pages for large tensors: same results, and far fewer page faults if the system has such pages."""

import resource
import sys
from pathlib import Path

import pytest
import torch

from onnxtrain.ops import huge_pages
from onnxtrain.ops.matmul.candidates import gemm_in_large_pages
from onnxtrain.testing import assert_no_worse_than_eager

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def record_advice(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The begin and length of the memory for which huge pages are requested."""
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda begin, count, advice: advised.append((begin, count)))
    return advised


def test_only_complete_pages_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    advised = record_advice(monkeypatch)
    like = torch.empty(0)
    small = huge_pages.empty((1024, 1024), like)
    assert not advised
    large = huge_pages.empty((1025, 8192), like)
    ((begin, count),) = advised
    assert begin % (2 << 20) == 0
    assert count % (2 << 20) == 0
    assert large.data_ptr() <= begin
    assert begin + count <= large.data_ptr() + large.nbytes
    assert count >= large.nbytes - (4 << 20)
    assert small.shape == (1024, 1024)


def test_gemms_match_those_with_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "LARGE", 0)
    for rows in ((3, 5), (0,), (1,), (7, 1, 2)):
        a, b, bias = torch.randn(*rows, 4), torch.randn(4, 6), torch.randn(6)
        exact = a.double() @ b.double()
        got = gemm_in_large_pages(a, b, bias, 1.0), gemm_in_large_pages(a, b, None, 0.5)
        assert_no_worse_than_eager("with bias", got[0], a @ b + bias, exact + bias)
        assert_no_worse_than_eager("scaled", got[1], 0.5 * (a @ b), 0.5 * exact)


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not _SETTING.exists() or "[madvise]" not in _SETTING.read_text(),
    reason="large pages are not for the asking here",
)
@pytest.mark.slow  # whether the system has huge pages left depends on other processes
def test_fewer_page_faults() -> None:
    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = faults()
    huge_pages.empty((64 << 18,), torch.empty(0)).fill_(1)
    assert faults() - before < 8192  # of 16384 small pages
