"""Cases of the matmul ops."""

from dataclasses import replace

import torch

from tests.op_case import OpCase, Spec


def _fused(transposed: str, alpha: float = 1.0):
    """The reference of FusedMatMul; `transposed` names the transposed operands."""

    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a = a.movedim(0, -2) if "batch_a" in transposed else a
        b = b.movedim(0, -2) if "batch_b" in transposed else b
        a = a.mT if "left" in transposed else a
        b = b.mT if "right" in transposed else b
        return alpha * (a @ b)

    return reference


def _matmul(label: str, a: str, b: str) -> OpCase:
    return OpCase("", "MatMul", (Spec(a), Spec(b)), torch.matmul, label=label)


def _fused_case(a: str, b: str, transposed: str = "", alpha: float = 1.0, label: str = "", **attributes: int) -> OpCase:
    differentiate = "batch" not in transposed
    return OpCase(
        "com.microsoft",
        "FusedMatMul",
        (Spec(a), Spec(b)),
        _fused(transposed, alpha),
        attributes={**attributes, "alpha": alpha},
        differentiate=differentiate,
        label=label or transposed.replace(" ", "-"),
    )


def _gemm(alpha: float, beta: float, left: int = 0, right: int = 0):
    def reference(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        product = alpha * ((a.T if left else a) @ (b.T if right else b))
        return product if c is None else product + beta * c

    return reference


# Stock onnxruntime computes wrong results for k = 0, and does not broadcast a batch of size 0.
FULL = [{"b": 2, "h": 3, "k": 4, "m": 5, "n": 6}, {"b": 3, "h": 1, "k": 7, "m": 1, "n": 2}, dict.fromkeys("bhkmn", 1)]
EMPTY = [{**FULL[0], letter: 0} for letter in "bhkmn"]


def _apart(*cases: OpCase) -> list[OpCase]:
    """Each case with its body, and without the body for dimensions of size 0."""
    full = [replace(case, sizes=FULL) for case in cases]
    return full + [replace(case, sizes=[FULL[0], *EMPTY], bodies=False, label=f"{case.label}-empty") for case in cases]


CASES = [
    _matmul("matrices", "m k", "k n"),
    _matmul("batch", "b m k", "b k n"),
    _matmul("batch-of-heads", "b h m k", "b h k n"),
    _matmul("shared-right", "b m k", "k n"),
    _matmul("vectors", "k", "k"),
    _fused_case("m k", "k n", label="plain"),
    _fused_case("k m", "k n", "left", transA=1),
    _fused_case("m k", "n k", "right", 0.5, transB=1),
    _fused_case("k m", "n k", "left right", 1.7, transA=1, transB=1),
    _fused_case("b m k", "b n k", "right", 0.25, "batch", transB=1),
    _fused_case("b k m", "b k n", "left", 1.0, "batch-left", transA=1),
    _fused_case("b h m k", "b h n k", "right", 2.0, "heads", transB=1),
    _fused_case("b m k", "n k", "right", 1.0, "shared", transB=1),
    _fused_case("m b h k", "b h k n", "batch_a", transBatchA=1),
    _fused_case("k b h m", "n b h k", "batch_a batch_b left right", transBatchA=1, transBatchB=1, transA=1, transB=1),
    OpCase("onnxtrain", "Linear", (Spec("b s k"), Spec("n k"), Spec("n")), torch.nn.functional.linear, label="tokens"),
    OpCase("onnxtrain", "Linear", (Spec("b k"), Spec("n k"), Spec("n")), torch.nn.functional.linear, label="rows"),
    OpCase("onnxtrain", "Linear", (Spec("k"), Spec("n k"), Spec("n")), torch.nn.functional.linear, label="vector"),
    OpCase("onnxtrain", "Linear", (Spec("a b s k"), Spec("n k")), torch.nn.functional.linear, label="no-bias"),
    OpCase("", "Gemm", (Spec("m k"), Spec("k n")), _gemm(0.5, 1), attributes={"alpha": 0.5}, label="scaled"),
    *_apart(
        _matmul("shared-left", "m k", "b k n"),
        _matmul("broadcast", "b 1 m k", "h k n"),
        _matmul("row-vector", "k", "k n"),
        _matmul("row-vector-batch", "k", "b h k n"),
        _matmul("column-vector", "m k", "k"),
        _matmul("column-vector-batch", "b m k", "k"),
        _fused_case("b k m", "k n", "left", 1.0, "shared-left", transA=1),
        _fused_case("b 1 k m", "h n k", "left right", 1.0, "broadcast", transA=1, transB=1),
        OpCase(
            "",
            "Gemm",
            (Spec("k m"), Spec("n k"), Spec("m n")),
            _gemm(0.5, 2, 1, 1),
            attributes={"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1},
            label="transposed",
        ),
        OpCase("", "Gemm", (Spec("m k"), Spec("k n"), Spec("n")), _gemm(1, 1), label="addmm"),
        OpCase(
            "", "Gemm", (Spec("m k"), Spec("k n"), Spec("m 1")), _gemm(1, 3), attributes={"beta": 3.0}, label="column"
        ),
        OpCase("", "Gemm", (Spec("m k"), Spec("k n"), Spec("")), _gemm(1, 1), label="number"),
    ),
]
