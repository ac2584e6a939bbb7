"""An addend of the result of dropout, or of a norm's gradient, is added by the op that writes this result."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule
from onnxtrain.errors import GraphError
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.onnx_file import without_case_suffix
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.norm import rms_norm_kernels
from onnxtrain.ops.random import keyed_bits
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.fuse_sums import fuse_sums
from onnxtrain.testing import assert_no_worse_than_eager
from tests.ops import cases_keyed_dropout
from tests.ops.captures import FunctionModule
from tests.ops.test_compiled_kernels import counting
from tests.passes.less_work import wrap
from tests.passes.test_fuse_gated_activations import backward_kinds, kinds
from tests.passes.test_pack_tokens import FORMS
from tests.passes.test_pack_transformer_layers import Sentences
from tests.passes.test_pack_without_mask import batch_of
from tests.reference import assert_matches
from tests.thinned import covering

Tensor = torch.Tensor
Form = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]
P = 0.25
SIZES: tuple[Mapping[str, int], ...] = ({"b": 3, "s": 5}, {"b": 2, "s": 4}, {"b": 1, "s": 7})


def keyed(x: Tensor) -> Tensor:
    """Dropout with the mask of the key that the generator gives next."""
    return cases_keyed_dropout.keyed_dropout(round(P * 2**16))(x, keyed_bits.sample_key())


def ahead(drop, x, residual):
    return residual + drop(x.sin())


def behind(drop, x, residual):
    return drop(x.sin()) + residual


def residual_read_elsewhere(drop, x, residual):
    return (residual + drop(x)) * residual.cos()


def residual_of_itself(drop, x, residual):
    x = x * residual
    return x + drop(x)


def residual_is_a_view(drop, x, residual):
    return torch.stack([residual, x])[0] + drop(x.sin())


def transposed(drop, x, residual):
    return residual.transpose(0, 1) + drop(x.sin().transpose(0, 1))


def two_dropouts(drop, x, residual):
    return drop(x.sin()) + drop(residual.cos())


def sum_of_three(drop, x, residual):
    return residual + drop(x) + x.exp()


ONCE: tuple[Form, ...] = (
    ahead,
    behind,
    residual_read_elsewhere,
    residual_of_itself,
    residual_is_a_view,
    transposed,
    two_dropouts,
    sum_of_three,
)


def two_layers(drop, x, residual):
    h = residual + drop(x.sin())
    return h + drop(h.cos())


def broadcast(drop, x, residual):
    return residual[:, :1] + drop(x)


def broadcast_dropout(drop, x, residual):
    return residual + drop(x[:1])


def of_a_narrow_type(drop, x, residual):
    return residual + drop(x.to(torch.bfloat16))


def dropout_read_elsewhere(drop, x, residual):
    y = drop(x)
    return (residual + y) * y


def twice_the_dropout(drop, x, residual):
    y = drop(x)
    return y + y - residual


def difference(drop, x, residual):
    return residual - drop(x)


STAYS: tuple[Form, ...] = (
    broadcast,
    broadcast_dropout,
    of_a_narrow_type,
    dropout_read_elsewhere,
    twice_the_dropout,
    difference,
)


def results(module: nn.Module, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients under a random cotangent, with the masks of one seed."""
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    torch.manual_seed(8)
    y = module(*leaves)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent)]


def check(form: Form, dtype: torch.dtype = torch.float32, **options: Any) -> ORTModule:
    """Compare with PyTorch under the same masks, at all sizes, on one capture."""
    ours = ORTModule(FunctionModule(lambda x, residual: form(lambda t: F.dropout(t, P), x, residual)), **options)
    eager = FunctionModule(lambda x, residual: form(keyed, x, residual))
    for sizes in SIZES:
        tensors = [torch.randn(sizes["b"], sizes["s"], 6).to(dtype) for _ in range(2)]
        triples = results(ours, tensors, dtype), results(eager, tensors, dtype), results(eager, tensors, torch.float64)
        for name, got, theirs, exact in zip(("y", "dx", "dresidual"), *triples, strict=True):
            assert_no_worse_than_eager(f"{name} at {sizes}", got, theirs, exact)
    assert engine_of(ours).captures == 1
    return ours


def with_residual(ours: nn.Module, part: str = "forward") -> int:
    """Count the KeyedDropouts of a program that add a residual."""
    nodes = getattr(engine_of(ours).newest().parts, part).nodes
    return sum(n.op_type == "KeyedDropout" and len(n.inputs) == 3 for n in nodes)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.float32) for form in ONCE), (ahead, torch.float64), (ahead, torch.bfloat16)],
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_a_form_becomes_one_op(form: Form, dtype: torch.dtype) -> None:
    ours = check(form, dtype)
    assert with_residual(ours) == 1
    assert kinds(ours).count("Add") == (form is sum_of_three)
    x_is_read_elsewhere = form in (residual_of_itself, sum_of_three)  # so its gradient is a sum as well
    assert with_residual(ours, "backward") == x_is_read_elsewhere
    assert "KeyedDropout" in backward_kinds(ours)


def test_each_layer_adds_its_own() -> None:
    ours = check(two_layers)
    assert with_residual(ours) == 2
    assert "Add" not in kinds(ours)


@pytest.mark.parametrize("form", STAYS, ids=lambda f: f.__name__)
def test_similar_subgraphs_are_not_fused(form: Form) -> None:
    ours = check(form)
    assert "KeyedDropout" in kinds(ours)
    assert with_residual(ours) == 0
    refused = [r.reason for r in engine_of(ours).newest().report.refused if r.pass_name == "fuse_sums"]
    assert refused == ["not fused into KeyedDropout: dropout has other users"] * (form is dropout_read_elsewhere)


def test_a_dropout_that_is_given_out_stays() -> None:
    def both(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(x, P)
        return residual + y, y

    ours = ORTModule(FunctionModule(both))
    x, residual = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    h, y = ours(x, residual)
    assert torch.equal(h, residual + y)
    assert with_residual(ours) == 0


@pytest.mark.parametrize("form", [ahead, two_dropouts, two_layers], ids=lambda f: f.__name__)
def test_the_pass_changes_no_draw(form: Form) -> None:
    """By operators, which round alike with and without it: every bit of a result shows the mask."""
    tensors = [torch.randn(5, 7, 6) for _ in range(2)]
    runs = [
        results(
            ORTModule(
                FunctionModule(lambda x, r: form(lambda t: F.dropout(t, P), x, r)),
                kernels="pytorch",
                disabled_passes=names,
            ),
            tensors,
            torch.float32,
        )
        for names in ((), ("fuse_sums",))
    ]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize(
    ("p", "training", "rng"), [(0.0, True, "fast"), (1.0, True, "fast"), (P, False, "fast"), (P, True, "torch")]
)
def test_dropout_without_samples_or_with_eagers_is_unchanged(p: float, training: bool, rng: str) -> None:
    module = FunctionModule(lambda x, residual: residual + F.dropout(x * 2, p, training))
    ours = ORTModule(module, rng=rng)
    tensors = [torch.randn(5, 6) for _ in range(2)]
    for got, expected in zip(*(results(m, tensors, torch.float32) for m in (ours, module)), strict=True):
        assert torch.equal(got, expected)
    assert "KeyedDropout" not in kinds(ours)
    assert "Add" in kinds(ours)


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_gradient_alone(wanted: int) -> None:
    ours = ORTModule(FunctionModule(lambda x, residual: residual + F.dropout(x, P)))
    tensors = [torch.randn(4, 6, requires_grad=i == wanted) for i in range(2)]
    dy = torch.randn(4, 6)
    torch.manual_seed(1)
    (got,) = torch.autograd.grad(ours(*tensors), tensors[wanted], dy)

    def expected(dy: Tensor) -> Tensor:
        torch.manual_seed(1)
        return keyed(dy) if wanted == 0 else dy

    assert_matches(got, expected, dy)
    assert backward_kinds(ours) == ["KeyedDropout"] * (wanted == 0)


def test_a_residual_of_another_shape_is_refused() -> None:
    op = builder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="shapes"))
    x, key = op.constant([[1.0, 2.0]], ir.DataType.FLOAT), op.constant([1, 2], ir.DataType.INT64)
    with pytest.raises(GraphError, match="KeyedDropout: residual must have the type of the output it is added to"):
        op.own.KeyedDropout(x, key, op.constant([1.0, 2.0], ir.DataType.FLOAT), dropped=6554)


class Layers(nn.Module):
    """Pre-norm blocks."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(count))
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + F.dropout(linear(norm(x)), P, self.training)
        return x.square().mean()


def gradients(ours: nn.Module, rows: int) -> list[Tensor]:
    ours.zero_grad()
    torch.manual_seed(4)
    x = torch.randn(rows, 16)
    ours(x).backward()
    return [p.grad.clone() for p in ours.parameters() if p.grad is not None]


def test_recompute_under_a_budget_samples_the_same_masks() -> None:
    torch.manual_seed(0)
    layers = Layers(8)
    plain, least = ORTModule(layers, kernels="pytorch"), ORTModule(layers, kernels="pytorch", memory_budget_bytes=0.5)
    for rows in (256, 33):
        grads = [gradients(m, rows) for m in (plain, least)]
        assert len(grads[0]) == 32
        assert all(map(torch.equal, *grads))
    assert with_residual(plain, "backward") == 0
    assert with_residual(least, "backward") > 0


def test_the_sum_overwrites_dropouts_input() -> None:
    """Nobody reads the product behind dropout: no more memory is asked for. By operators, and by the kernel."""
    torch.manual_seed(0)
    layers = Layers()
    names = ("drop_", "drop_compiled_")
    for native, name in zip((False, True), names, strict=True):
        ours = ORTModule(layers, kernels="native" if native else "pytorch")
        gradients(ours, 9)
        source = engine_of(ours).newest().unit.forward.source
        assert source.count(f" {name}(linear") == 3, source


def test_a_value_that_is_read_elsewhere_is_not_overwritten() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y, z = self.inner(x), self.inner(x.cos())
            return x + F.dropout(y, P), y.t() @ x, F.dropout(z.t(), P) @ z  # a view and its base

    torch.manual_seed(0)
    module = Reads()
    ours = ORTModule(module)
    x = torch.randn(5, 6)
    torch.manual_seed(2)
    results = ours(x)

    def expected(inner: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(2)
        y, z = inner(x), inner(x.cos())
        return x + keyed(y), y.t() @ x, keyed(z.t()) @ z

    assert_matches(results, expected, module.inner, x)


@pytest.mark.slow  # test_the_pass_changes_no_draw compares the same with padding
def test_rows_without_padding_add_it_too(tmp_path: Path) -> None:
    """Padding goes before keys come: masks are those of the rows that are left, with the pass and without."""
    words, labels = batch_of(FORMS["right"])
    losses = []
    for disabled in ((), ("fuse_sums",)):
        torch.manual_seed(0)
        packed = wrap(
            Sentences(dropout=P), tmp_path, skip_padding="always", kernels="pytorch", disabled_passes=disabled
        )
        torch.manual_seed(5)
        losses.append(packed(words, labels))
        graph = ir.load(tmp_path / "m_packed_optimized_pre_grad_training.onnx").graph
        nodes = [node for node in graph if without_case_suffix(node.op_type) == "KeyedDropout"]
        assert sum(len(node.inputs) == 3 for node in nodes) == (0 if disabled else 4)
        assert len(nodes) == 4
        assert sum(without_case_suffix(node.op_type) == "ReluDropout" for node in graph) == 2
    assert torch.equal(*losses)


@pytest.mark.compiler
def test_one_call_of_the_kernel_drops_and_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    call_counts: Counter[str] = Counter()
    monkeypatch.setattr(keyed_bits.LIBRARY, "functions", counting(keyed_bits.LIBRARY, call_counts))
    ours = ORTModule(Layers())
    gradients(ours, 9)
    assert call_counts == {"dropout_float": 6}
    source = engine_of(ours).newest().unit.forward.source
    assert " + " not in source
    assert ".add" not in source


class RmsNorms(nn.Module):
    """Pre-norm blocks as T5 and Llama have them: the gradient of each norm's input is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(6, eps=1e-5) for _ in range(2))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = x + self.linear(norm(x)).tanh()
        return x


@pytest.mark.parametrize(
    ("least", "dtype"),
    covering(
        [pytest.param(1, id="compiled"), pytest.param(2**60, id="operators")],
        [torch.float32, torch.float64, torch.bfloat16],
    ),
)
def test_the_gradient_of_a_norm_adds_that_of_the_residual(
    least: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rms_norm_kernels, "_MIN_ELEMENTS", least)
    torch.manual_seed(0)
    module = RmsNorms().to(dtype)
    ours, exact = ORTModule(module), copy.deepcopy(module).double()
    for sizes in SIZES:
        x = torch.randn(sizes["b"], sizes["s"], 6).to(dtype)
        dy = torch.randn_like(x)
        triples = []
        for run, wide in ((ours, dtype), (module, dtype), (exact, torch.float64)):
            leaf = x.to(wide).requires_grad_()
            triples.append(torch.autograd.grad(run(leaf), [leaf, *run.parameters()], dy.to(wide)))
        names = ["dx", *(name for name, _ in module.named_parameters())]
        for label, *gradients in zip(names, *triples, strict=True):
            assert_no_worse_than_eager(f"{label} at {sizes}", *gradients)
    nodes = engine_of(ours).newest().parts.backward.nodes
    assert [len(n.inputs) for n in nodes if n.op_type == "SimplifiedLayerNormalizationGrad"] == [5, 5]
    assert "fused an addition into 2 SimplifiedLayerNormalizationGrad" in str(ours.report())


def test_a_sum_with_a_later_value_is_refused_by_name() -> None:
    """All that the op reads would be held until then."""
    op = builder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="late"))
    x, inv_std = op.constant([[1.0, 2.0]], ir.DataType.FLOAT), op.constant([[3.0]], ir.DataType.FLOAT)
    dx, _ = op.ms.SimplifiedLayerNormalizationGrad(x, x, None, inv_std)
    later = op.Exp(x)
    op.graph.outputs.append(op.Add(dx, later))
    changes = Changes("fuse_sums")
    fuse_sums(op.graph, changes)
    assert op.graph[-1].op_type == "Add"
    assert [r.reason.split(": ")[1] for r in changes.refused] == [f"{later.name} is computed later"]


def test_a_sum_after_a_checkpoint_stays() -> None:
    """It is kept, as in eager: within the checkpoint it would be recomputed, and the product before it."""

    class Checkpointed(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for norm, linear in zip(self.norms, self.linears, strict=True):
                run = lambda x, norm=norm, linear=linear: F.dropout(linear(norm(x)), P)
                x = x + checkpoint(run, x, use_reentrant=False)
            return x.square().mean()

    torch.manual_seed(0)
    ours = ORTModule(Checkpointed(), kernels="pytorch")
    gradients(ours, 9)
    assert with_residual(ours) == 0
    assert kinds(ours).count("Add") == 3
    assert backward_kinds(ours).count("LayerNormalization") == 3
    assert "Linear" not in backward_kinds(ours)
