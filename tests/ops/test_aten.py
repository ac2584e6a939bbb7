"""ATen nodes: operators without a definition run as in eager, with PyTorch's gradient, at all sizes of one capture."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_each_no_worse, assert_matches
from tests.thinned import slow_but_every, slow_except
from tests.torch_version import needs_torch

Call = Callable[[torch.Tensor], Any]


class Calls(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.linear(x))


def operators(module: ORTModule) -> list[str]:
    """Return the ATen operators of the forward graph."""
    graph = engine_of(module).newest().captured.model.graph
    return [node.attributes["operator"].as_string() for node in graph if node.op_type == "ATen"]


def backward_ops(module: ORTModule) -> list[str]:
    """Return the ops of the backward programs."""
    backwards = engine_of(module).newest().unit._backwards.values()
    return [node.op_type for backward in backwards for node in backward.program.part.nodes]


def dense(gradient: Any) -> torch.Tensor:
    """Make a sparse gradient dense, and a complex one real: the tolerance is one of real values."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient.to_dense()


def is_traced(module: ORTModule) -> bool:
    return "ATenGrad" not in backward_ops(module)


def compare(eager: nn.Module, batches: list[torch.Tensor]) -> ORTModule:
    """Compare outputs, gradients and the state of the generator with eager's, for all batches with one capture."""
    ours = ORTModule(copy.deepcopy(eager), rng="torch")
    wide = copy.deepcopy(eager).double()._apply(lambda t: t.cdouble() if t.is_complex() else t)
    for x in batches:
        results = []
        for module in (ours, eager, wide):
            torch.manual_seed(len(x))
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*runs in PyTorch")
                result = module(x.double() if module is wide and x.is_floating_point() else x)
            outputs = result if isinstance(result, tuple) else (result,)
            generator = torch.Generator().manual_seed(1)
            dtypes = [o.dtype for o in (results[0][0] if results else outputs)]  # of the samples, also in float64
            samples = [torch.randn(o.shape, dtype=d, generator=generator) for o, d in zip(outputs, dtypes, strict=True)]
            pairs = [(o, c.to(o.dtype)) for o, c in zip(outputs, samples, strict=True) if o.requires_grad]
            torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
            results.append((outputs, torch.get_rng_state()))
        assert_each_no_worse("output", *(outputs for outputs, _ in results))
        assert [o.requires_grad for o in results[0][0]] == [o.requires_grad for o in results[1][0]]
        assert torch.equal(results[0][1], results[1][1])
    for name, q in eager.named_parameters():
        p = ours.get_parameter(name)
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.layout == q.grad.layout
        assert_each_no_worse(name, *(dense(t.grad) for t in (p, q, wide.get_parameter(name))))
    assert engine_of(ours).captures == 1
    return ours


def rows(*counts: int) -> list[torch.Tensor]:
    return [torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in counts]


# The operators of PyTorch


TRACED: dict[str, Call] = {
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "complex": lambda x: torch.view_as_real(torch.fft.fft(x) * torch.fft.fft(x).conj()),
    "solve": lambda x: torch.linalg.solve(x.t() @ x + torch.eye(6, dtype=x.dtype), x.t()),
    "several results": lambda x: torch.linalg.eigh(x.t() @ x).eigenvalues,
    "one of several results": lambda x: torch.linalg.svd(x.t() @ x)[1],
    "indices among the results": lambda x: torch.mode(x, dim=1).values,
    "a result that the derivative uses": lambda x: torch.erfinv(x.tanh()),
    "in place": lambda x: x.tanh().clone().erfinv_(),
    "cdist": lambda x: torch.cdist(x, x.flip(0) + 1),
    "random": lambda x: x * torch.poisson(x.exp()),
    "random without gradient": lambda x: (x * torch.randn_like(x), torch.randint_like(x, 5)),
}
_TALL_OR_WIDE = "different formulas for tall and for wide matrices"
AT_RUN_TIME: dict[str, Call] = {
    _TALL_OR_WIDE: lambda x: torch.linalg.svd(x, full_matrices=False)[1],
    "a formula that samples": lambda x: nn.functional.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", slow_but_every(2, TRACED))
def test_gradient_is_traced(name: str) -> None:
    ours = compare(Calls(TRACED[name]).double(), rows(7, 9, 8))
    assert operators(ours), "expected an ATen node in the graph"
    assert is_traced(ours)


_ONE_CAPTURE = needs_torch(2, 12, "captures svd twice: its result's shape implies whether the matrix is tall or wide")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_ONE_CAPTURE if name == _TALL_OR_WIDE else ()) for name in AT_RUN_TIME]
)
def test_gradient_is_taken_at_run_time(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="onnxtrain"):
        ours = compare(Calls(AT_RUN_TIME[name]).double(), rows(7, 9, 4))
    assert operators(ours)
    assert not is_traced(ours)
    assert "cannot be traced" in caplog.text  # the reason follows


def test_forward_is_not_recomputed_in_backward() -> None:
    ours = compare(Calls(lambda x: torch.erfinv(x.tanh())).double(), rows(5, 6))
    assert operators(ours) == ["aten::erfinv"]
    assert "ATen" not in backward_ops(ours)  # d erfinv/dx reads erfinv(x)


def test_gradient_traced_at_larger_sizes_is_valid_at_size_1() -> None:
    ours = compare(Calls(lambda x: torch.cdist(x, x * 2)).double(), rows(4, 1, 3))
    assert is_traced(ours)


def test_cotangents_may_have_any_strides() -> None:
    """An operator in backward may require contiguous tensors, while the gradient of a sum has strides of 0."""
    eager = Calls(lambda x: torch.view_as_real(torch.fft.fft(x)))
    ours = ORTModule(copy.deepcopy(eager))

    def gradients(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(module(x).sum(), [*module.parameters()])

    assert_matches(gradients(ours, torch.ones(5, 6)), gradients, eager, torch.ones(5, 6))


def test_as_strided_of_a_contiguous_tensor() -> None:
    ours = compare(Calls(lambda x: torch.as_strided(x * 2, (3, 2), (2, 1), 1)).double(), rows(4, 6))
    assert operators(ours) == ["aten::as_strided"]


def overlapping(x: torch.Tensor) -> torch.Tensor:
    """As Longformer: chunks of two rows that overlap by one, of a tensor whose last two dimensions are transposed."""
    x = (x * 2).unflatten(1, (3, 2)).transpose(0, 1)
    batch, rows, columns = x.shape
    first, second, third = x.stride()
    return x.as_strided((batch, rows - 1, 2, columns), (first, second, second, third))


def test_as_strided_of_a_transposed_tensor() -> None:
    ours = compare(Calls(overlapping).double(), rows(4, 6))
    assert operators(ours) == ["aten::as_strided"]


def test_as_strided_of_a_tensor_with_gaps_falls_back() -> None:
    """The strides of the slice differ between PyTorch and the graph."""
    ours = ORTModule(Calls(lambda x: torch.as_strided((x * 2)[:, ::2], (3, 2), (2, 1))))
    with pytest.warns(UserWarning, match="of a non-contiguous tensor: strides differ"):
        ours(torch.ones(4, 6))


def test_composite_operators_are_decomposed() -> None:
    ours = compare(Calls(lambda x: torch.trapezoid(x, dim=1)).double(), rows(4, 6))
    assert not operators(ours)


def test_singular_matrix_raises() -> None:
    ours = ORTModule(Calls(torch.linalg.inv))
    ours(torch.randn(6, 6))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        ours(torch.ones(6, 6))


@pytest.mark.parametrize("message", [("x is not finite",), ()], ids=["message", "none"])
def test_assertion_about_elements_is_kept(message: tuple[str, ...]) -> None:
    def finite(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.isfinite().all(), *message)
        return x.sin()

    ours = compare(Calls(finite), [x.float() for x in rows(5, 3)])
    assert operators(ours) == ["aten::_assert_async"]
    with pytest.raises(RuntimeError, match="".join(message) or None):
        ours(torch.full((4, 6), torch.inf))


def test_complex_parameters() -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = torch.fft.fft(x) * torch.view_as_complex(torch.stack([x, x], -1))
            y = (z @ self.weight.t()).conj()
            return y.abs() + y.real  # two contributions to one complex gradient

    ours = compare(Filter(), [x.float() for x in rows(5, 3)])
    assert is_traced(ours)


def test_complex_scalars() -> None:
    """A scalar is saved as a tensor, and conjugated in backward."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x * 2)
        return torch.view_as_real(z * (1 + 2j) + 2j / (z + 4) - z / (1 - 3j))

    assert is_traced(compare(Calls(scaled), [x.float() for x in rows(5, 3)]))


@pytest.mark.parametrize("uses", [1, 2])
def test_sparse_gradients_stay_sparse(uses: int) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(11, 4, sparse=True, mode="sum")

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return sum((self.bag(ids.roll(shift, 0)) * (shift + 1) for shift in range(uses)), torch.zeros(()))

    batches = [torch.randint(11, (n, 3), generator=torch.Generator().manual_seed(n)) for n in (5, 4)]
    ours = compare(Bags(), batches)
    assert all(p.grad is not None and p.grad.is_sparse for p in ours.parameters())


def test_recurrent_layers_and_embedding_bags() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(11, 6, mode="mean")
            self.lstm = nn.LSTM(6, 5, num_layers=2, dropout=0.3, batch_first=True)
            self.gru = nn.GRU(5, 4, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            first, _ = self.lstm(self.bag(ids.reshape(-1, 3)).view(ids.shape[0], -1, 6))
            second, last = self.gru(first)
            return second.sum() + last.square().sum()

    batches = [torch.randint(11, (n, 12), generator=torch.Generator().manual_seed(n)) for n in (4, 2)]
    assert operators(compare(Recurrent(), batches))


# Operators of the user


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("onnxtrain_tests", "FRAGMENT") as library:
        yield library


def save_first_input(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def test_custom_operator_with_a_registered_gradient(library: torch.library.Library) -> None:
    library.define("sine(Tensor x, float scale) -> Tensor")
    library.impl("sine", lambda x, scale: torch.from_numpy(x.detach().numpy().copy()).sin() * scale, "CPU")
    torch.library.register_fake("onnxtrain_tests::sine", lambda x, scale: torch.empty_like(x), lib=library)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save_first_input(ctx, inputs, output)
        ctx.scale = inputs[1]

    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 3 * dy * ctx.saved_tensors[
            0
        ].cos() * ctx.scale, None  # three times the derivative, so that only this rule passes

    torch.library.register_autograd("onnxtrain_tests::sine", backward, setup_context=setup, lib=library)
    ours = compare(Calls(lambda x: torch.ops.onnxtrain_tests.sine(x, 2.0)).double(), rows(4, 6, 1))
    assert operators(ours) == ["onnxtrain_tests::sine"]
    assert "Cos" in backward_ops(ours)  # the rule is traced into ordinary nodes


@pytest.mark.parametrize("weighted", slow_except([False, True], True))
def test_lists_optional_tensors_and_nested_results(library: torch.library.Library, weighted: bool) -> None:
    library.define("parts(Tensor[] xs, Tensor? w) -> (Tensor, Tensor[])")

    def parts(xs: list[torch.Tensor], w: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        total = torch.stack(xs).sum(0)
        return total if w is None else total * w, [x * 3 for x in xs]

    library.impl("parts", parts, "CompositeExplicitAutograd")

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        xs, w = inputs
        ctx.save_for_backward(*xs, *([] if w is None else [w]))
        ctx.count = len(xs)

    def backward(ctx: Any, dy: torch.Tensor, dys: list[torch.Tensor]) -> tuple[Any, ...]:
        xs, w = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        shared = dy * w[0] if w else dy
        return [shared + 3 * d for d in dys], dy * torch.stack(xs).sum(0) if w else None

    torch.library.register_autograd("onnxtrain_tests::parts", backward, setup_context=setup, lib=library)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, each = torch.ops.onnxtrain_tests.parts([x, x * 2], x.sin() if weighted else None)
        return total, each[1]

    ours = compare(Calls(call).double(), rows(4, 6))
    assert operators(ours) == ["onnxtrain_tests::parts"]
    assert is_traced(ours)


def test_custom_operator_that_writes_to_its_argument(library: torch.library.Library) -> None:
    library.define("scale_(Tensor(a!) x, float factor) -> ()")
    library.impl("scale_", _scale, "CPU")
    torch.library.register_fake("onnxtrain_tests::scale_", lambda x, factor: None, lib=library)

    def call(x: torch.Tensor) -> torch.Tensor:
        copied = x.detach().clone()
        torch.ops.onnxtrain_tests.scale_(copied, 3.0)
        return copied * x

    ours = compare(Calls(call).double(), rows(4, 6))
    assert operators(ours) == ["onnxtrain_tests::scale_"]


def _scale(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


def test_custom_operator_without_a_meta_function_falls_back(library: torch.library.Library) -> None:
    library.define("unknown(Tensor x) -> Tensor")
    library.impl("unknown", lambda x: x * 2, "CPU")
    ours = ORTModule(Calls(torch.ops.onnxtrain_tests.unknown))
    with pytest.warns(UserWarning, match=r'torch\.library\.register_fake\("onnxtrain_tests::unknown"\)'):
        ours(torch.ones(2, 6))


def test_operators_without_a_form_are_warned_of_once() -> None:
    model = ORTModule(Calls(torch.special.i0))
    with pytest.warns(UserWarning, match="Calls calls operators without an ONNX form: aten::i0"):
        model(torch.randn(2, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 6))
        model(torch.randn(3, 6).requires_grad_())


class Shares(nn.Module):
    """Operators without a conversion read one input, activation and parameter, between ops with a conversion."""

    def __init__(self, calls: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...], chained: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = nn.Parameter(torch.randn(6, 4))
        self.calls, self.chained = calls, chained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results: list[torch.Tensor] = []
        for call in self.calls:
            shared = results[-1] if results and self.chained else self.linear(x)  # equal nodes, if not chained
            results.append(call(shared.tanh(), self.factor) + x)
        return self.linear(sum(results))  # type: ignore[no-any-return]


WITHOUT_CONVERSION = (
    lambda a, b: torch.linalg.svdvals(a) * b,
    lambda a, b: torch.linalg.det(a[:4] + b[:4]) * b,
    lambda a, b: torch.special.i0(a) * b,
    lambda a, b: torch.lgamma(a * b),
)


@pytest.mark.parametrize(
    ("count", "chained"),
    [
        (4, False),
        pytest.param(4, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_operators_that_share_values_have_eagers_gradients_to_the_last_bit(count: int, chained: bool) -> None:
    module = Shares(WITHOUT_CONVERSION[:count], chained)
    ours, x = ORTModule(copy.deepcopy(module)), torch.randn(6, 4)
    cotangent, gradients = torch.randn(6, 4), []
    for model in (module, ours):
        taken = x.clone().requires_grad_()
        y = model(taken)
        gradients.append((y, *torch.autograd.grad(y, [taken, *model.parameters()], cotangent)))
    assert len(operators(ours)) >= count
    assert [torch.equal(a, b) for a, b in zip(*gradients, strict=True)] == [True] * 5
