"""Captures of PyTorch's losses, which run its own kernels."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from tests.op_case import Spec
from tests.ops.captures import check_capture, check_captures
from tests.ops.modules import check_module, ops_of
from tests.thinned import covering, slow_but_every, slow_except
from tests.torch_version import needs_torch

SIZES = ({"n": 4, "d": 3}, {"n": 2, "d": 5}, {"n": 1, "d": 2})
REDUCTIONS = ["none", "mean", "sum"]
CLASSES = 7
CROSS_ENTROPY = "onnxtrain::CrossEntropy"


def labels(shape, dtype, generator):
    """Return class indices, of which one is the default ignore_index and one is class 2."""
    targets = torch.randint(CLASSES, shape, generator=generator)
    flat = targets.view(-1)
    flat[0] = 2
    if flat.numel() > 1:
        flat[1] = -100
    return targets


SCORES, LABELS = Spec(f"n {CLASSES}"), Spec("n", "int64", make=labels)
WEIGHTS = Spec(f"{CLASSES}", low=0.5, high=2.0)
PAIR = (Spec("n d"), Spec("n d"))


@pytest.mark.parametrize(("inner", "reduction"), covering(["", "d", "d 2", "d 2 2"], REDUCTIONS))
def test_cross_entropy(inner, reduction):
    ours = check_capture(
        lambda x, t, w: F.cross_entropy(x, t, w.detach(), reduction=reduction) + w.sum() * 0,
        Spec(f"n {CLASSES} {inner}"),
        Spec(f"n {inner}", "int64", make=labels),
        WEIGHTS,
        sizes=SIZES,
    )
    assert CROSS_ENTROPY in ops_of(ours)


def double_in_place(x):
    """Run an in-place operation, and an operator that PyTorch functionalizes by retracing the export."""
    torch.isclose(x.detach(), x.detach())
    return (x * 1).mul_(2)


@pytest.mark.parametrize(("loss", "reduction"), covering([F.cross_entropy, F.nll_loss], REDUCTIONS))
def test_a_loss_of_classes_after_an_in_place_operation(loss, reduction):
    """PyTorch's Python reference implementations of these losses take different arguments."""
    check_capture(lambda x, t: loss(double_in_place(x), t, reduction=reduction), SCORES, LABELS, sizes=SIZES)


@pytest.mark.parametrize("reduction", slow_except(REDUCTIONS, "mean"))
def test_a_loss_of_pairs_after_an_in_place_operation(reduction):
    check_capture(
        lambda x, y: F.hinge_embedding_loss(double_in_place(x), y.detach().sign(), reduction=reduction),
        *PAIR,
        sizes=SIZES,
    )
    check_capture(
        lambda x, y: F.margin_ranking_loss(double_in_place(x), y, y.detach().sign(), reduction=reduction),
        *PAIR,
        sizes=SIZES,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_cross_entropy_in_other_types(dtype):
    check_capture(F.cross_entropy, SCORES, LABELS, sizes=SIZES, dtype=dtype)


def test_cross_entropy_with_an_ignored_class():
    check_capture(lambda x, t: F.cross_entropy(x, t % 7, ignore_index=2), SCORES, LABELS, sizes=SIZES[:2])


def test_cross_entropy_with_all_ignored():
    """The mean of no losses is NaN, and so are its gradients."""
    for reduction in REDUCTIONS:
        check_capture(
            lambda x, t, r=reduction: F.cross_entropy(x, t * 0 - 100, reduction=r), SCORES, LABELS, sizes=SIZES[:1]
        )


@pytest.mark.parametrize(("weighted", "reduction"), covering([False, True], REDUCTIONS))
def test_label_smoothing(weighted, reduction):
    def smoothed(x, t, w):
        weight = w.detach() if weighted else None
        loss = F.cross_entropy(x, t, weight, reduction=reduction, label_smoothing=0.1)
        return loss + w.sum() * 0

    check_capture(smoothed, SCORES, LABELS, WEIGHTS, sizes=SIZES)
    images = (Spec(f"n {CLASSES} d"), Spec("n d", "int64", make=labels), WEIGHTS)
    check_capture(smoothed, *images, sizes=SIZES[:2])


_NEEDS_SYMBOLIC_NUMEL = needs_torch(
    2, 13, "cannot export it: the loss makes an integer of a symbolic number of elements"
)


@_NEEDS_SYMBOLIC_NUMEL
@pytest.mark.parametrize(("weighted", "smoothing", "reduction"), covering([False, True], [0.0, 0.2], REDUCTIONS))
def test_probabilities_as_targets(weighted, smoothing, reduction):
    def soft(x, t, w):
        weight = w.detach() if weighted else None
        loss = F.cross_entropy(x, t.softmax(1), weight, reduction=reduction, label_smoothing=smoothing)
        return loss + w.sum() * 0

    check_capture(soft, Spec(f"n {CLASSES} d"), Spec(f"n {CLASSES} d"), WEIGHTS, sizes=SIZES[:2])


@_NEEDS_SYMBOLIC_NUMEL
def test_probabilities_in_another_type():
    check_capture(lambda x, t: F.cross_entropy(x.bfloat16(), t.softmax(1)), SCORES, SCORES, sizes=SIZES[:2])


@pytest.mark.parametrize("inner", slow_except(["", "d", "d 2", "d 2 2"], "", "d 2"))
def test_nll_loss(inner):
    specs = Spec(f"n {CLASSES} {inner}"), Spec(f"n {inner}", "int64", make=labels)
    check_captures({r: (partial(F.nll_loss, reduction=r), *specs) for r in REDUCTIONS}, REDUCTIONS, sizes=SIZES)


# Of 4 dimensions, PyTorch itself requires contiguous scores.
@pytest.mark.parametrize(("inner", "loss"), covering(["", "d", "d 2 2"], [F.cross_entropy, F.nll_loss]))
def test_losses_of_scores_with_the_classes_last(inner, loss):
    check_capture(
        lambda x, t: loss(x.movedim(-1, 1), t),
        Spec(f"n {inner} {CLASSES}"),
        Spec(f"n {inner}", "int64", make=labels),
        sizes=SIZES,
    )


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, CLASSES)

    def forward(self, x, target):
        logits = self.linear(x)
        return F.cross_entropy(logits, target), logits


def test_cross_entropy_under_autocast():
    """Logits are bfloat16, the loss is float32."""
    calls = [[torch.randn(n, 5), torch.randint(CLASSES, (n,))] for n in (4, 2)]
    check_module(Classifier(), *calls, autocast=True)


def test_label_out_of_range_raises():
    ours = ORTModule(Classifier())
    with pytest.raises(IndexError, match="out of bounds"):
        ours(torch.randn(2, 5), torch.tensor([1, CLASSES]))


POINTWISE = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda x, t, reduction: F.smooth_l1_loss(x, t, reduction=reduction, beta=0.5),
    "smooth_l1_of_zero_beta": lambda x, t, reduction: F.smooth_l1_loss(x, t, reduction=reduction, beta=0.0),
    "huber": lambda x, t, reduction: F.huber_loss(x, t, reduction=reduction, delta=0.5),
    "kl_div": lambda x, t, reduction: F.kl_div(x, t.softmax(1), reduction=reduction),
    "kl_div_of_logarithms": lambda x, t, reduction: F.kl_div(x, t, reduction=reduction, log_target=True),
    "soft_margin": lambda x, t, reduction: F.soft_margin_loss(x, t.detach().sign(), reduction=reduction) + t.sum() * 0,
    "binary": lambda x, t, reduction: F.binary_cross_entropy(x.sigmoid(), t.sigmoid(), reduction=reduction),
    "binary_of_logits": lambda x, t, reduction: F.binary_cross_entropy_with_logits(x, t.sigmoid(), reduction=reduction),
    "hinge_embedding": lambda x, t, reduction: (
        F.hinge_embedding_loss(x, t.detach().sign(), reduction=reduction) + t.sum() * 0
    ),
    "poisson": lambda x, t, reduction: F.poisson_nll_loss(x, t.abs() + 2, reduction=reduction, full=True),
    "poisson_of_rates": lambda x, t, reduction: F.poisson_nll_loss(x.abs(), t, log_input=False, reduction=reduction),
    "margin_ranking": lambda x, t, reduction: F.margin_ranking_loss(x, t, t.detach().sign(), 0.3, reduction=reduction),
    "triplet": lambda x, t, reduction: F.triplet_margin_loss(x, t, x * t, reduction=reduction, swap=True),
    "cosine_embedding": lambda x, t, reduction: F.cosine_embedding_loss(
        x, t, t.detach().sum(1).sign(), 0.1, reduction=reduction
    ),
}


@pytest.mark.filterwarnings("ignore:reduction. .mean. divides")
@pytest.mark.parametrize("name", slow_but_every(2, POINTWISE))
def test_pointwise(name):
    losses = {r: (partial(POINTWISE[name], reduction=r), *PAIR) for r in REDUCTIONS}
    check_captures(losses, REDUCTIONS, sizes=SIZES)


_MSE_OF_ONE_TYPE = needs_torch(2, 12, "has no gradient of it")


@pytest.mark.parametrize("name", [pytest.param("mse", marks=_MSE_OF_ONE_TYPE), "smooth_l1", "l1"])
def test_pointwise_of_mixed_types(name):
    check_capture(lambda x, t: POINTWISE[name](x.bfloat16(), t, reduction="mean"), *PAIR, sizes=SIZES[:2])


@pytest.mark.parametrize("name", ["binary_of_logits", "kl_div"])
def test_decomposed_losses_of_mixed_dtypes_stay_aten_nodes(name):
    check_capture(lambda x, t: POINTWISE[name](x.bfloat16(), t, reduction="sum"), *PAIR, sizes=SIZES[:2], aten=True)


def test_broadcast_targets():
    check_capture(lambda x, t: F.mse_loss(x, t.expand_as(x)), Spec("n 4 d"), Spec("n 1 d"), sizes=SIZES)


def test_weighted_binary_cross_entropy():
    def weighted(x, t, weight, pos_weight):
        t = t.sigmoid()
        weight, pos_weight = weight.detach().abs(), pos_weight.detach().abs()
        return (
            F.binary_cross_entropy_with_logits(x, t, weight, pos_weight=pos_weight),
            F.binary_cross_entropy_with_logits(x, t, weight, reduction="sum"),
            F.binary_cross_entropy(x.sigmoid(), t, weight),
        )

    ours = check_capture(weighted, *PAIR, Spec("n d"), Spec("d"), sizes=SIZES)
    assert "onnxtrain::BinaryCrossEntropyWithLogits" in ops_of(ours)


def test_distances():
    check_capture(lambda x, t: (F.pairwise_distance(x, t), F.cosine_similarity(x, t)), *PAIR, sizes=SIZES)


def test_cosine_of_a_zero_vector():
    check_capture(lambda x, t: F.cosine_similarity(x * 0, t), *PAIR, sizes=SIZES[:1])
