"""What PyTorch's reductions become, and their bodies at NaN, infinities and ties."""

import math

import pytest
import torch

from onnxtrain.testing import Spec
from tests.ops.captures import SIZES, check_capture
from tests.ops.cases_reduce import rows_of_minus_inf, ties
from tests.torch_version import needs_torch

ANY = Spec("b s h")
WHOLE = Spec("b s h", "int64", -9, 9)
TRUTH = Spec("b s h", "bool")
SMALL = Spec("b s h", torch.int8, -9, 9)
TIED = Spec("b s h", make=ties)
MASKED = Spec("b s h", make=rows_of_minus_inf)

FUNCTIONS = {
    "norm-3": (lambda x: x.norm(3), ANY),
    "norm-half": (lambda x: torch.linalg.vector_norm(x, 0.5, -1), ANY),
    "norm-0": (lambda x: torch.linalg.vector_norm(x, 0, -1) + x.sum(-1), ANY),
    "normalize-p": (lambda x: torch.nn.functional.normalize(x, 3.5, -1), ANY),
    "dist": (lambda x: torch.dist(x, x.roll(1, 0).detach() + 1, 3), ANY),
    "sum": (lambda x: x.sum(), ANY),
    "sum-dim": (lambda x: x.sum(-1), ANY),
    "sum-dims": (lambda x: x.sum((0, 2), keepdim=True), ANY),
    "sum-no-dims": (lambda x: x.sum(()), ANY),
    "sum-dtype": (lambda x: x.sum(-1, dtype=torch.float64), ANY),
    "sum-int": (lambda x: x.sum(0), WHOLE),
    "sum-small-int": (lambda x: x.sum(0), SMALL),
    "sum-to-small-int": (lambda x: x.sum(0, dtype=torch.int8), SMALL),
    "sum-bool": (lambda x: x.sum(-1), TRUTH),
    "sum-0-d": (lambda x: x.sum().sum(0), ANY),
    "sum-to-size": (lambda x: x.sum_to_size(1, x.shape[1], 1), ANY),
    "nansum": (lambda x: (x / (x > 0)).nansum(-1), ANY),
    "count-nonzero": (lambda x: torch.count_nonzero(x, 1), TIED),
    "count-nonzero-all": (torch.count_nonzero, TRUTH),
    "mean": (lambda x: x.mean(), ANY),
    "mean-dim": (lambda x: x.mean(1), ANY),
    "mean-dims": (lambda x: x.mean((-1, 0), keepdim=True), ANY),
    "mean-dtype": (lambda x: x.mean(dtype=torch.float64), ANY),
    "prod": (lambda x: x.prod(), ANY),
    "prod-dim": (lambda x: x.prod(1, keepdim=True), TIED),
    "prod-int": (lambda x: x.prod(-1), WHOLE),
    "cumsum": (lambda x: x.cumsum(-1), ANY),
    "cumsum-int": (lambda x: x.cumsum(1), WHOLE),
    "cumsum-bool": (lambda x: x.cumsum(1), TRUTH),
    "cumsum-0-d": (lambda x: x.sum().cumsum(0), ANY),
    "max": (lambda x: x.max(), TIED),
    "max-int": (lambda x: x.max(), WHOLE),
    "max-dim": (lambda x: x.max(-1), TIED),
    "max-dim-keepdim": (lambda x: x.max(1, keepdim=True), ANY),
    "max-dim-int": (lambda x: x.max(0), WHOLE),
    "max-dim-0-d": (lambda x: x.sum().max(0), ANY),
    "min": (lambda x: x.min(), TIED),
    "min-dim": (lambda x: x.min(0), TIED),
    "amax": (lambda x: x.amax((0, 2)), TIED),
    "amin": (lambda x: x.amin(-1, keepdim=True), TIED),
    "amax-all": (lambda x: x.amax(), ANY),
    "any": (lambda x: x.any(), TRUTH),
    "any-dim": (lambda x: x.any(-1, keepdim=True), TRUTH),
    "any-dims": (lambda x: torch.any(x, dim=(0, 2)), TRUTH),
    "any-no-dims": (lambda x: torch.any(x, dim=()), TRUTH),
    "any-float": (lambda x: x.any(0), TIED),
    "any-uint8": (lambda x: x.any(0), Spec("b s h", torch.uint8, 0, 2)),
    "all": (lambda x: x.all(), TRUTH),
    "all-dim": (lambda x: x.all(1), TRUTH),
    "argmax": (lambda x: x.argmax(-1), TIED),
    "argmax-all": (lambda x: x.argmax(), ANY),
    "argmax-all-keepdim": (lambda x: torch.argmax(x, keepdim=True), ANY),
    "argmax-int": (lambda x: x.argmax(1, keepdim=True), WHOLE),
    "argmax-0-d": (lambda x: x.sum().argmax(), ANY),
    "argmin": (lambda x: x.argmin(0), TIED),
    "norm": (lambda x: x.norm(), ANY),
    "norm-1": (lambda x: x.norm(1, -1), ANY),
    "vector-norm": (lambda x: torch.linalg.vector_norm(x, dim=(0, 1)), ANY),
    "vector-norm-inf": (lambda x: torch.linalg.vector_norm(x, math.inf, dim=-1), ANY),
    "vector-norm-dtype": (lambda x: torch.linalg.vector_norm(x, dtype=torch.float64), ANY),
    "linalg-norm": (lambda x: torch.linalg.norm(x, dim=-1), ANY),
    "normalize": (lambda x: torch.nn.functional.normalize(x, dim=-1), ANY),
    "normalize-1": (lambda x: torch.nn.functional.normalize(x, p=1.0), ANY),
    "logsumexp": (lambda x: x.logsumexp(-1), ANY),
    "logsumexp-dims": (lambda x: torch.logsumexp(x, (0, 2), keepdim=True), ANY),
    "logsumexp-masked": (lambda x: x.logsumexp(-1), MASKED),
    "var": (lambda x: x.var(), ANY),
    "var-dim": (lambda x: x.var(-1, unbiased=False), ANY),
    "var-biased": (lambda x: torch.var(x, False), ANY),
    "var-correction": (lambda x: torch.var(x, (0, 2), correction=2, keepdim=True), ANY),
    "std": (lambda x: x.std(), ANY),
    "std-dim": (lambda x: x.std(-1, keepdim=True), ANY),
    "std-correction": (lambda x: torch.std(x, correction=0), ANY),
    "var-mean": (lambda x: torch.var_mean(x, -1, unbiased=False, keepdim=True), ANY),
    "var-mean-all": (lambda x: torch.var_mean(x, False), ANY),
    "std-mean": (lambda x: torch.std_mean(x, (0, 1), correction=0), ANY),
}
IN_ATEN = {
    "norm-3": (lambda x: x.norm(3, -1), ANY),
    "matrix-norm": (lambda x: torch.linalg.norm(x, 1, dim=(1, 2)), ANY),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_functions_become(name: str) -> None:
    function, spec = FUNCTIONS[name]
    check_capture(function, spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, spec) in FUNCTIONS.items() if spec.dtype == "float"])
def test_what_functions_become_in_bfloat16(name: str) -> None:
    function, spec = FUNCTIONS[name]
    check_capture(function, spec, dtype=torch.bfloat16)


@needs_torch(2, 12, "has no gradient of it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_extremes(dtype: torch.dtype) -> None:
    check_capture(lambda x: tuple(torch.aminmax(x, dim=-1)), ANY, dtype=dtype)


@pytest.mark.parametrize("name", IN_ATEN)
def test_norms_without_an_onnx_form_run_in_aten(name: str) -> None:
    function, spec = IN_ATEN[name]
    check_capture(function, spec, sizes=SIZES[:1], aten=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_mean_over_more_elements_than_half_precision_can_count(dtype: torch.dtype) -> None:
    """65536 overflows float16: a gradient divided by it there would be 0."""
    check_capture(lambda x: x.mean() + x.var(), Spec("b s"), dtype=dtype, sizes=[{"b": 512, "s": 256}])


def test_covariances() -> None:
    sizes = ({"b": 3, "s": 4}, {"b": 2, "s": 5}, {"b": 5, "s": 3})

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.cov(x), torch.cov(x, correction=0), torch.corrcoef(x)

    check_capture(both, Spec("b s"), sizes=sizes)
    check_capture(both, Spec("s"), sizes=sizes)
    check_capture(both, Spec("b s"), sizes=({"b": 4, "s": 1},))  # NaN, but for the one without correction
