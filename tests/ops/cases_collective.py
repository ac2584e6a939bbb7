"""Cases of collectives in a group of one rank; tests of tensor and expert parallelism run them on several."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.graph.values import OWN
from tests.op_case import OpCase, Spec

IN_GROUP = {"size": 1, "rank": 0, "group": "alone"}
SUM = {"size": 1, "group": "alone"}


def _of_one(name: str, **attributes: Any) -> OpCase:
    return OpCase(OWN, name, (Spec("b s"),), lambda x: x * 1, attributes)


def _losses(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, None]:
    return F.cross_entropy(logits, target, reduction="none", ignore_index=1), None


def _gradient(cotangent: torch.Tensor, log_probabilities: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    own = F.one_hot(target, log_probabilities.shape[1])
    return (log_probabilities.exp() - own) * cotangent.where(target != 1, 0.0)[:, None]


CASES = [
    _of_one("AllReduce", **SUM),
    _of_one("AllGather", **IN_GROUP),
    _of_one("ReduceScatter", **IN_GROUP),
    _of_one("GatherParameters", **IN_GROUP),
    _of_one("ReduceGradients", **IN_GROUP),
    _of_one("CopyToGroup", **SUM),
    _of_one("LocalShard", **IN_GROUP),
    _of_one("ShareOfSum", size=1),
    OpCase(OWN, "WaitCollective", (Spec("b s"), Spec("b s", grad=False)), lambda pending, source: pending * 1),
    OpCase(
        OWN,
        "AllToAll",
        (Spec("3 s"), Spec("1", "int64", value=[3]), Spec("1", "int64", value=[3])),
        lambda x, *counts: x * 1,
        {"group": "alone"},
    ),
    OpCase(
        OWN,
        "ShardedCrossEntropy",
        (Spec("n 4"), Spec("n", "int64", 0, 4)),
        _losses,
        {**IN_GROUP, "ignore_index": 1},
    ),
    OpCase(
        OWN,
        "ShardedCrossEntropyGrad",
        (Spec("n"), Spec("n 4"), Spec("n", "int64", 0, 4)),
        _gradient,
        {"rank": 0, "ignore_index": 1},
    ),
]
