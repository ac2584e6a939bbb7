"""The choice between the Triton kernel of 4-bit weights and bitsandbytes, on a CPU: the kernel itself is replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onnxtrain.ops.quantization import four_bit_matmul
from onnxtrain.ops.quantization.four_bit_matmul import MATMUL_BNB4, dequantize_and_matmul, matmul_by_triton
from tests.op_case import case_graph
from tests.ops.cases_four_bit import case

SHAPE, BLOCK = (48, 32), 32
LAYOUT = (SHAPE, BLOCK, 1)
NESTED = (None, None, None)


def arguments(rows: int = 3) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (SHAPE[0] * SHAPE[1] // 2,), dtype=torch.uint8, generator=generator)
    scale = torch.rand(SHAPE[0] * SHAPE[1] // BLOCK, generator=generator)
    return torch.randn(rows, SHAPE[0], generator=generator), packed, scale, NESTED, LAYOUT


def library(a: torch.Tensor, b: torch.Tensor, absmax: torch.Tensor, nested: Any, layout: Any) -> torch.Tensor:
    return dequantize_and_matmul(a, b, (absmax, *nested), layout, 0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replace the kernel, the library and the clock; returns a list of the functions that have been called."""
    monkeypatch.setattr(four_bit_matmul, "_is_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def replace(function: Callable[..., torch.Tensor], is_faster: bool) -> list[str]:
        calls: list[str] = []

        def counted(name: str, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            return lambda *args: (calls.append(name), run(*args))[1]

        monkeypatch.setattr(four_bit_matmul, "run_kernel", counted("kernel", function))
        monkeypatch.setattr(four_bit_matmul, "bnb_matmul", counted("library", library))
        monkeypatch.setattr(four_bit_matmul, "is_faster", lambda run, other: is_faster)
        return calls

    return replace


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_faster_one_runs(kernel: Callable[..., list[str]], is_faster: bool) -> None:
    calls = kernel(library, is_faster)
    for _ in range(2):
        assert torch.equal(matmul_by_triton(*arguments()), library(*arguments()))
    chosen = "kernel" if is_faster else "library"
    assert calls == ["library", "kernel", chosen, chosen]
    matmul_by_triton(*arguments(rows=64))  # another number of rows is another kind of call
    assert calls[4:] == ["library", "kernel", chosen]


def test_a_wrong_kernel_does_not_run(kernel: Callable[..., list[str]], caplog: pytest.LogCaptureFixture) -> None:
    calls = kernel(lambda *args: library(*args) * 1.01, True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(matmul_by_triton(*arguments()), library(*arguments()))
    assert calls == ["library", "kernel", "library", "library"]
    assert len([r for r in caplog.records if "results differ" in r.getMessage()]) == 1


def test_nothing_is_compared_while_a_graph_is_recorded(
    kernel: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = kernel(library, True)
    with monkeypatch.context() as recording:
        recording.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        matmul_by_triton(*arguments())
    assert calls == ["library"]
    matmul_by_triton(*arguments())
    assert calls[1:] == ["library", "kernel", "kernel"]


def test_no_rows_run_no_kernel(kernel: Callable[..., list[str]]) -> None:
    calls = kernel(library, True)
    assert matmul_by_triton(*arguments(rows=0)).shape == (0, SHAPE[1])
    assert calls == ["library"]


@pytest.mark.parametrize("trans_b", [0, 1])
def test_a_program_for_a_gpu_calls_it_for_the_gradient(trans_b: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bitsandbytes has kernels, and not if the results must be the same in each process."""
    pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
    monkeypatch.setattr(four_bit_matmul, "may_run_triton", lambda node, device: device == "cuda")
    node = case_graph(case(6, 64, 32, 1, trans_b), torch.bfloat16).graph[0]
    by_triton, by_bitsandbytes, _ = MATMUL_BNB4.kernels
    chosen = by_bitsandbytes if trans_b else by_triton
    assert MATMUL_BNB4.kernel(node, "cuda") is chosen
    assert MATMUL_BNB4.kernel(node, "cpu") is by_bitsandbytes
    torch.use_deterministic_algorithms(True)
    try:
        assert MATMUL_BNB4.kernel(node, "cuda") is by_bitsandbytes
    finally:
        torch.use_deterministic_algorithms(False)
