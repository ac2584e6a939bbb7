"""Captures of PyTorch's elementwise functions; copies, in-place writes and commutative ops."""

import copy
from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.ops import OPS
from onnxtrain.ops.definition import OpDef
from onnxtrain.ops.interfaces.commutative import COMMUTATIVE
from tests.op_case import Spec
from tests.ops.captures import FunctionModule, check_capture, check_captures, in_groups

POSITIVE = Spec("b s h", low=0.2, high=2.0)
INNER = Spec("b s h", low=-0.9, high=0.9)
ROW = Spec("h", low=0.5)
INTEGERS = Spec("b s h", "int64", -9, 9)
POSITIVE_INTEGERS = Spec("b s h", "int64", 1, 5)
BYTES = Spec("b s h", torch.uint8, 0, 200)
BOOLS = Spec("b s h", "bool")
ANY = Spec("b s h")

UNIT = Spec("b s h", low=0.05, high=0.95)

FUNCTIONS = {
    "angle": (lambda a: torch.angle(a) * a + torch.angle(a * a), ANY),
    "angle-int": (torch.angle, INTEGERS),
    "deg2rad": (torch.deg2rad, ANY),
    "deg2rad-int": (torch.deg2rad, INTEGERS),
    "rad2deg": (torch.rad2deg, ANY),
    "frac": (torch.frac, ANY),
    "logit": (torch.logit, UNIT),
    "logit-eps": (lambda a: torch.logit(a, 0.2), UNIT),
    "logaddexp2": (torch.logaddexp2, ANY, ANY),
    "round-decimals": (lambda a: torch.round(a, decimals=1) * a, ANY),
    "round-tens": (lambda a: torch.round(a, decimals=-1) * a, Spec("b s h", low=-50, high=50)),
    "erfc": (torch.erfc, ANY),
    "sinc": (torch.sinc, ANY),
    "entr": (torch.special.entr, POSITIVE),
    "xlogy": (torch.xlogy, ANY, POSITIVE),
    "xlogy-scalar": (lambda b: torch.xlogy(2.5, b), POSITIVE),
    "xlog1py": (torch.special.xlog1py, ANY, POSITIVE),
    "xlog1py-scalar": (lambda a: torch.special.xlog1py(a, 1.5), ANY),
    "hypot": (torch.hypot, ANY, POSITIVE),
    "copysign": (torch.copysign, ANY, ANY),
    "copysign-scalar": (lambda a: torch.copysign(a, -1.0), ANY),
    "fmax": (torch.fmax, ANY, ROW),
    "fmin": (torch.fmin, ANY, ROW),
    "add": (lambda a, b: a + b, ANY, ROW),
    "add-alpha": (lambda a, b: torch.add(a, b, alpha=0.3), ANY, ROW),
    "add-scalar": (lambda a: a + 1.7, ANY),
    "add-size": (lambda a: a + a.shape[1], ANY),
    "add-int": (lambda a, b: a + b, ANY, INTEGERS),
    "add-int-scalar": (lambda a: a + 2.5, INTEGERS),
    "add-int-float-alpha": (lambda a: torch.add(a, 1.5, alpha=2), INTEGERS),
    "add-bool": (lambda a, b: a + b, BOOLS, BOOLS),
    "add-bool-int": (lambda a, b: a + b, BOOLS, INTEGERS),
    "add-small-int": (lambda a, b: a + b, BYTES, BYTES),
    "add-double": (lambda a, b: a + b.double(), ANY, ROW),
    "add-0-d": (lambda a: a + a.double().sum(), ANY),
    "sub": (lambda a, b: torch.sub(a, b, alpha=2), ANY, ROW),
    "subtract": (lambda a: torch.subtract(a, 1), ANY),
    "rsub": (lambda a: 1 - a, ANY),
    "rsub-alpha": (lambda a, b: torch.rsub(a, b, alpha=0.5), ANY, ROW),
    "mul": (lambda a, b: a * b, ANY, ROW),
    "mul-size": (lambda a: a * a.shape[0], ANY),
    "mul-bool": (lambda a, b: a * b, BOOLS, BOOLS),
    "mul-mask": (lambda a, b: a * b, ANY, BOOLS),
    "multiply": (torch.multiply, ANY, ROW),
    "div": (lambda a, b: a / b, ANY, ROW),
    "div-scalar": (lambda a: a / 0.3, ANY),
    "div-size": (lambda a: a / a.shape[1], ANY),
    "div-int": (lambda a, b: a / b, INTEGERS, POSITIVE_INTEGERS),
    "div-floor": (lambda a: torch.div(a, 0.7, rounding_mode="floor"), ANY),
    "div-trunc": (lambda a: torch.div(a, 0.7, rounding_mode="trunc"), ANY),
    "div-trunc-int": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), INTEGERS, POSITIVE_INTEGERS),
    "div-floor-int": (lambda a, b: torch.div(a, b, rounding_mode="floor"), INTEGERS, POSITIVE_INTEGERS),
    "true-divide": (lambda a: torch.true_divide(a, 3), ANY),
    "floor-divide": (lambda a, b: a // b, INTEGERS, POSITIVE_INTEGERS),
    "reciprocal": (lambda a: 1 / a, POSITIVE),
    "remainder": (lambda a: a % 0.7, ANY),
    "remainder-int": (lambda a: a % 3, INTEGERS),
    "remainder-of-scalar": (lambda b: torch.remainder(7, b), POSITIVE_INTEGERS),
    "fmod": (lambda a: torch.fmod(a, 0.7), ANY),
    "fmod-int": (torch.fmod, INTEGERS, POSITIVE_INTEGERS),
    "neg": (lambda a: -a, ANY),
    "abs": (torch.abs, ANY),
    "abs-int": (torch.abs, INTEGERS),
    "sign": (torch.sign, ANY),
    "sgn": (torch.sgn, ANY),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), ANY, ANY),
    "lerp-tensor": (torch.lerp, ANY, ANY, INNER),
    "addcmul": (lambda a, b: torch.addcmul(a, b, b, value=2), ANY, ROW),
    "addcdiv": (lambda a, b: torch.addcdiv(a, a, b, value=0.5), ANY, ROW),
    "square": (torch.square, ANY),
    "pow": (lambda a: a**3, ANY),
    "pow-negative": (lambda a: a**-1.5, POSITIVE),
    "pow-tensor": (torch.pow, POSITIVE, ANY),
    "pow-of-scalar": (lambda b: 2**b, ANY),
    "pow-of-negative": (lambda b: torch.pow(-2.0, b), INTEGERS),
    "pow-int": (lambda a: a**2, INTEGERS),
    "float-power": (lambda a: torch.float_power(a, 2), ANY),
    "sqrt": (torch.sqrt, POSITIVE),
    "sqrt-int": (torch.sqrt, POSITIVE_INTEGERS),
    "rsqrt": (torch.rsqrt, POSITIVE),
    "exp": (torch.exp, ANY),
    "exp2": (torch.exp2, ANY),
    "expm1": (torch.expm1, ANY),
    "log": (torch.log, POSITIVE),
    "log1p": (torch.log1p, POSITIVE),
    "log2": (torch.log2, POSITIVE),
    "log10": (torch.log10, POSITIVE),
    "logaddexp": (torch.logaddexp, ANY, ROW),
    "sin": (torch.sin, ANY),
    "cos": (torch.cos, ANY),
    "tan": (torch.tan, INNER),
    "asin": (torch.arcsin, INNER),
    "acos": (torch.acos, INNER),
    "atan": (torch.atan, ANY),
    "sinh": (torch.sinh, ANY),
    "cosh": (torch.cosh, ANY),
    "asinh": (torch.asinh, ANY),
    "acosh": (lambda a: torch.acosh(a + 1), POSITIVE),
    "atanh": (torch.atanh, INNER),
    "atan2": (torch.atan2, ANY, ROW),
    "erf": (torch.erf, ANY),
    "floor": (torch.floor, ANY),
    "floor-int": (torch.floor, INTEGERS),
    "ceil": (torch.ceil, ANY),
    "round": (torch.round, ANY),
    "trunc": (torch.trunc, ANY),
    "fix": (torch.fix, ANY),
    "eq": (lambda a, b: a == b, INTEGERS, POSITIVE_INTEGERS),
    "eq-bool": (lambda a: a == True, BOOLS),  # noqa: E712  # the comparison under test
    "ne": (lambda a: a != 0.5, ANY),
    "lt": (lambda a, b: a < b, ANY, ROW),
    "lt-int": (lambda a: a < 2.5, INTEGERS),
    "lt-mixed": (lambda a, b: a < b, ANY, INTEGERS),
    "lt-bool": (lambda a, b: a < b, BOOLS, BOOLS),
    "le": (lambda a: a <= a.shape[0], ANY),
    "gt": (torch.greater, ANY, ROW),
    "ge": (lambda a: a >= 1, INTEGERS),
    "isnan": (torch.isnan, ANY),
    "isnan-int": (torch.isnan, INTEGERS),
    "isinf": (torch.isinf, ANY),
    "isposinf": (torch.isposinf, ANY),
    "isneginf": (torch.isneginf, ANY),
    "isfinite": (torch.isfinite, ANY),
    "and": (lambda a, b: a & b, BOOLS, BOOLS),
    "and-int": (lambda a: a & 3, INTEGERS),
    "or": (lambda a, b: a | b, BOOLS, BOOLS),
    "or-int": (lambda a, b: a | b, INTEGERS, POSITIVE_INTEGERS),
    "xor": (lambda a, b: a ^ b, BOOLS, BOOLS),
    "not": (lambda a: ~a, BOOLS),
    "not-int": (lambda a: ~a, INTEGERS),
    "bitwise-and": (lambda a: torch.bitwise_and(a, 6), INTEGERS),
    "logical-and": (torch.logical_and, ANY, INTEGERS),
    "logical-or": (torch.logical_or, ANY, INTEGERS),
    "logical-xor": (torch.logical_xor, BOOLS, INTEGERS),
    "logical-not": (torch.logical_not, ANY),
    "where": (torch.where, BOOLS, ANY, ROW),
    "where-mixed": (torch.where, BOOLS, ANY, INTEGERS),
    "where-scalar": (lambda c, a: torch.where(c, a, 0.3), BOOLS, ANY),
    "where-scalar-self": (lambda c, a: torch.where(c, 1, a), BOOLS, ANY),
    "where-scalars": (lambda c: torch.where(c, 1, 0), BOOLS),
    "where-float-scalars": (lambda c: torch.where(c, 1.0, 0.0), BOOLS),
    "masked-fill": (lambda a, m: a.masked_fill(m, float("-inf")), ANY, BOOLS),
    "masked-fill-row": (lambda a, m: a.masked_fill(m, 0.3), ANY, Spec("h", "bool")),
    "masked-fill-tensor": (lambda a, m, v: a.masked_fill(m, v.sum()), ANY, BOOLS, ROW),
    "masked-fill-int": (lambda a, m: a.masked_fill(m, -100), INTEGERS, BOOLS),
    "maximum": (torch.maximum, ANY, ROW),
    "max-other": (torch.max, ANY, ROW),
    "maximum-bool": (torch.maximum, BOOLS, BOOLS),
    "minimum": (torch.minimum, ANY, ROW),
    "min-other": (torch.min, INTEGERS, POSITIVE_INTEGERS),
    "clamp": (lambda a: a.clamp(-0.5, 1.0), ANY),
    "clamp-min": (lambda a: a.clamp(min=0), ANY),
    "clamp-max": (lambda a: a.clamp_max(0.4), ANY),
    "clamp-size": (lambda a: a.clamp(max=a.shape[0] - 2), ANY),
    "clamp-int": (lambda a: a.clamp(-2, 3), INTEGERS),
    "clamp-int-by-float": (lambda a: a.clamp(-1.5), INTEGERS),
    "clamp-tensor": (lambda a, b: a.clamp(-b, b), ANY, ROW),
    "clamp-min-tensor": (torch.clamp_min, ANY, ROW),
    "clip": (lambda a: a.clip(0, 1), ANY),
    "nan-to-num": (lambda a: torch.nan_to_num(a / (a > 0)), ANY),
    "nan-to-num-int": (torch.nan_to_num, INTEGERS),
    "to-double": (lambda a: a.double(), ANY),
    "to-half": (lambda a: a.half(), ANY),
    "to-int": (lambda a: (a * 9).long(), ANY),
    "to-uint8": (lambda a: (a * 200).to(torch.uint8), ANY),
    "to-bool": (lambda a: a.bool(), INTEGERS),
    "bool-to-float": (lambda a: a.float(), BOOLS),
    "type-as": (lambda a, b: b.type_as(a), ANY, INTEGERS),
    "clone": (lambda a: a.clone() * 2, ANY),
    "detach": (lambda a: a.detach() * a, ANY),
    "contiguous": (lambda a: a.transpose(0, 1).contiguous() * 2, ANY),
    "in-place": (lambda a: a.clone().add_(1).mul_(2).masked_fill_(a > 0, 0.5), ANY),
    "copy": (lambda a, b: torch.zeros_like(a).copy_(b), ANY, ROW),
}


@pytest.mark.parametrize("names", in_groups(FUNCTIONS))
def test_captured_function_matches_eager(names: list[str]) -> None:
    check_captures(FUNCTIONS, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_captured_function_alone_matches_eager(name: str) -> None:
    function, *specs = FUNCTIONS[name]
    check_capture(function, *specs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, (_, *specs) in FUNCTIONS.items() if any(s.dtype == "float" for s in specs)])
def test_captured_function_matches_eager_in_bfloat16(name: str) -> None:
    function, *specs = FUNCTIONS[name]
    check_capture(function, *specs, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "copy",
    [torch.clone, lambda x: x.to(x.dtype, copy=True), lambda x: x.to("cpu", x.dtype, copy=True), lambda x: x + 0],
)
def test_copy_shares_no_memory(copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(2, 3)
    y = ORTModule(FunctionModule(copy))(x)
    y.zero_()
    assert x.all()


def test_requested_memory_format_is_kept() -> None:
    x = torch.randn(2, 3, 4, 5)
    for function in (
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.to(torch.float64, memory_format=torch.channels_last),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.transpose(1, 2).contiguous(),
    ):
        assert ORTModule(FunctionModule(function))(x).stride() == function(x).stride()


def test_powers_of_unsupported_types_stay_aten_nodes() -> None:
    check_capture(lambda a: a**2, Spec("b s h", torch.int16, -9, 9), aten=True)


def test_a_scalar_keeps_its_precision_beside_bfloat16() -> None:
    """0.1 rounded to bfloat16 is 0.1001, which would change the result."""
    x = torch.full((64,), 255.0, dtype=torch.bfloat16)
    module = check_capture(lambda a: a * 0.1, Spec("b"), dtype=torch.bfloat16, sizes=[{"b": 64}])
    assert torch.equal(module(x), x * 0.1)


@pytest.mark.parametrize("op", [OPS[key] for key in COMMUTATIVE.entries], ids=lambda op: op.name)
def test_commutative_op_ignores_the_order_of_operands(op: OpDef) -> None:
    dtype = (
        torch.bool if op.name in ("And", "Or", "Xor") else torch.int64 if op.name.startswith("Bit") else torch.float32
    )
    a, b = (torch.randn(3, 4, generator=torch.Generator().manual_seed(n)).mul(9).to(dtype) for n in (1, 2))
    node = ir.Node(op.domain, op.name, [ir.Value(), ir.Value()])
    first, second = (op.kernels[0].lower(op.view(node), *pair).evaluate() for pair in ((a, b), (b, a)))
    assert torch.equal(first, second)


OVERWRITES = {
    "zero_": lambda y, x: y.zero_(),
    "fill_": lambda y, x: y.fill_(2.0),
    "fill_ with a tensor": lambda y, x: y.fill_(x.sum()),
    "copy_": lambda y, x: y.copy_(torch.ones_like(x)),
    "fill": lambda y, x: torch.fill(y, 2.0),
    "of a view": lambda y, x: y.view(-1).zero_(),
}


@pytest.mark.parametrize("name", OVERWRITES)
def test_overwritten_values_have_zero_gradients(name: str) -> None:
    """As in eager, the gradient is not None, which an optimizer with momentum or weight decay distinguishes."""

    class Overwrites(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            return OVERWRITES[name](y, x).view(x.shape) + y

    module = Overwrites()
    ours = ORTModule(copy.deepcopy(module), fallback_policy="FALLBACK_DISABLE")
    for rows in (3, 5):
        results = []
        for model in (module, ours):
            x = torch.arange(rows * 4.0).view(rows, 4).requires_grad_()
            y = model(x)
            results.append((y, *torch.autograd.grad(y.sum(), [x, *model.parameters()])))
        assert all(map(torch.equal, *results))
