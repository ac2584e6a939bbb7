"""Captures of PyTorch's reductions, with NaN, infinities and ties among the elements."""

import math

import pytest
import torch

from tests.op_case import Spec
from tests.ops.captures import SIZES, check_capture, check_captures, in_groups
from tests.ops.cases_reduce import rows_of_minus_inf, ties
from tests.torch_version import needs_torch

FLOAT = Spec("b s h")
INT64 = Spec("b s h", "int64", -9, 9)
BOOL = Spec("b s h", "bool")
INT8 = Spec("b s h", torch.int8, -9, 9)
TIED = Spec("b s h", make=ties)
MASKED = Spec("b s h", make=rows_of_minus_inf)

FUNCTIONS = {
    "norm-3": (lambda x: x.norm(3), FLOAT),
    "norm-half": (lambda x: torch.linalg.vector_norm(x, 0.5, -1), FLOAT),
    "norm-0": (lambda x: torch.linalg.vector_norm(x, 0, -1) + x.sum(-1), FLOAT),
    "normalize-p": (lambda x: torch.nn.functional.normalize(x, 3.5, -1), FLOAT),
    "dist": (lambda x: torch.dist(x, x.roll(1, 0).detach() + 1, 3), FLOAT),
    "sum": (lambda x: x.sum(), FLOAT),
    "sum-dim": (lambda x: x.sum(-1), FLOAT),
    "sum-dims": (lambda x: x.sum((0, 2), keepdim=True), FLOAT),
    "sum-no-dims": (lambda x: x.sum(()), FLOAT),
    "sum-dtype": (lambda x: x.sum(-1, dtype=torch.float64), FLOAT),
    "sum-int": (lambda x: x.sum(0), INT64),
    "sum-small-int": (lambda x: x.sum(0), INT8),
    "sum-to-small-int": (lambda x: x.sum(0, dtype=torch.int8), INT8),
    "sum-bool": (lambda x: x.sum(-1), BOOL),
    "sum-0-d": (lambda x: x.sum().sum(0), FLOAT),
    "sum-to-size": (lambda x: x.sum_to_size(1, x.shape[1], 1), FLOAT),
    "nansum": (lambda x: (x / (x > 0)).nansum(-1), FLOAT),
    "count-nonzero": (lambda x: torch.count_nonzero(x, 1), TIED),
    "count-nonzero-all": (torch.count_nonzero, BOOL),
    "mean": (lambda x: x.mean(), FLOAT),
    "mean-dim": (lambda x: x.mean(1), FLOAT),
    "mean-dims": (lambda x: x.mean((-1, 0), keepdim=True), FLOAT),
    "mean-dtype": (lambda x: x.mean(dtype=torch.float64), FLOAT),
    "prod": (lambda x: x.prod(), FLOAT),
    "prod-dim": (lambda x: x.prod(1, keepdim=True), TIED),
    "prod-int": (lambda x: x.prod(-1), INT64),
    "cumsum": (lambda x: x.cumsum(-1), FLOAT),
    "cumsum-int": (lambda x: x.cumsum(1), INT64),
    "cumsum-bool": (lambda x: x.cumsum(1), BOOL),
    "cumsum-0-d": (lambda x: x.sum().cumsum(0), FLOAT),
    "max": (lambda x: x.max(), TIED),
    "max-int": (lambda x: x.max(), INT64),
    "max-dim": (lambda x: x.max(-1), TIED),
    "max-dim-keepdim": (lambda x: x.max(1, keepdim=True), FLOAT),
    "max-dim-int": (lambda x: x.max(0), INT64),
    "max-dim-0-d": (lambda x: x.sum().max(0), FLOAT),
    "min": (lambda x: x.min(), TIED),
    "min-dim": (lambda x: x.min(0), TIED),
    "amax": (lambda x: x.amax((0, 2)), TIED),
    "amin": (lambda x: x.amin(-1, keepdim=True), TIED),
    "amax-all": (lambda x: x.amax(), FLOAT),
    "any": (lambda x: x.any(), BOOL),
    "any-dim": (lambda x: x.any(-1, keepdim=True), BOOL),
    "any-dims": (lambda x: torch.any(x, dim=(0, 2)), BOOL),
    "any-no-dims": (lambda x: torch.any(x, dim=()), BOOL),
    "any-float": (lambda x: x.any(0), TIED),
    "any-uint8": (lambda x: x.any(0), Spec("b s h", torch.uint8, 0, 2)),
    "all": (lambda x: x.all(), BOOL),
    "all-dim": (lambda x: x.all(1), BOOL),
    "argmax": (lambda x: x.argmax(-1), TIED),
    "argmax-all": (lambda x: x.argmax(), FLOAT),
    "argmax-all-keepdim": (lambda x: torch.argmax(x, keepdim=True), FLOAT),
    "argmax-int": (lambda x: x.argmax(1, keepdim=True), INT64),
    "argmax-0-d": (lambda x: x.sum().argmax(), FLOAT),
    "argmin": (lambda x: x.argmin(0), TIED),
    "norm": (lambda x: x.norm(), FLOAT),
    "norm-1": (lambda x: x.norm(1, -1), FLOAT),
    "vector-norm": (lambda x: torch.linalg.vector_norm(x, dim=(0, 1)), FLOAT),
    "vector-norm-inf": (lambda x: torch.linalg.vector_norm(x, math.inf, dim=-1), FLOAT),
    "vector-norm-dtype": (lambda x: torch.linalg.vector_norm(x, dtype=torch.float64), FLOAT),
    "linalg-norm": (lambda x: torch.linalg.norm(x, dim=-1), FLOAT),
    "normalize": (lambda x: torch.nn.functional.normalize(x, dim=-1), FLOAT),
    "normalize-1": (lambda x: torch.nn.functional.normalize(x, p=1.0), FLOAT),
    "logsumexp": (lambda x: x.logsumexp(-1), FLOAT),
    "logsumexp-dims": (lambda x: torch.logsumexp(x, (0, 2), keepdim=True), FLOAT),
    "logsumexp-masked": (lambda x: x.logsumexp(-1), MASKED),
    "var": (lambda x: x.var(), FLOAT),
    "var-dim": (lambda x: x.var(-1, unbiased=False), FLOAT),
    "var-biased": (lambda x: torch.var(x, False), FLOAT),
    "var-correction": (lambda x: torch.var(x, (0, 2), correction=2, keepdim=True), FLOAT),
    "std": (lambda x: x.std(), FLOAT),
    "std-dim": (lambda x: x.std(-1, keepdim=True), FLOAT),
    "std-correction": (lambda x: torch.std(x, correction=0), FLOAT),
    "var-mean": (lambda x: torch.var_mean(x, -1, unbiased=False, keepdim=True), FLOAT),
    "var-mean-all": (lambda x: torch.var_mean(x, False), FLOAT),
    "std-mean": (lambda x: torch.std_mean(x, (0, 1), correction=0), FLOAT),
}
IN_ATEN = {
    "norm-3": (lambda x: x.norm(3, -1), FLOAT),
    "matrix-norm": (lambda x: torch.linalg.norm(x, 1, dim=(1, 2)), FLOAT),
}


@pytest.mark.parametrize("names", in_groups(FUNCTIONS))
def test_captured_function_matches_eager(names: list[str]) -> None:
    check_captures(FUNCTIONS, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_captured_function_alone_matches_eager(name: str) -> None:
    function, spec = FUNCTIONS[name]
    check_capture(function, spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, spec) in FUNCTIONS.items() if spec.dtype == "float"])
def test_captured_function_matches_eager_in_bfloat16(name: str) -> None:
    function, spec = FUNCTIONS[name]
    check_capture(function, spec, dtype=torch.bfloat16)


@needs_torch(2, 12, "has no gradient of aminmax")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_aminmax(dtype: torch.dtype) -> None:
    check_capture(lambda x: tuple(torch.aminmax(x, dim=-1)), FLOAT, dtype=dtype)


@pytest.mark.parametrize("name", IN_ATEN)
def test_norms_without_an_onnx_form_stay_aten_nodes(name: str) -> None:
    function, spec = IN_ATEN[name]
    check_capture(function, spec, sizes=SIZES[:1], aten=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mean_and_variance_of_a_count_beyond_half_precision(dtype: torch.dtype) -> None:
    """The count 131072 overflows float16, in which a gradient divided by it would be 0."""
    check_capture(lambda x: x.mean() + x.var(), Spec("b s"), dtype=dtype, sizes=[{"b": 512, "s": 256}])


def test_covariances() -> None:
    sizes = ({"b": 3, "s": 4}, {"b": 2, "s": 5}, {"b": 5, "s": 3})

    def covariances(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.cov(x), torch.cov(x, correction=0), torch.corrcoef(x)

    check_capture(covariances, Spec("b s"), sizes=sizes)
    check_capture(covariances, Spec("s"), sizes=sizes)
    check_capture(covariances, Spec("b s"), sizes=({"b": 4, "s": 1},))  # NaN except without correction
