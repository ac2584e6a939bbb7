"""Cases of ONNX's random ops. Bodies are not compared: stock onnxruntime samples other values."""

import torch

from tests.op_case import OpCase, Spec

HALF = torch.float16


def normal(mean: float, scale: float):
    return lambda x: torch.empty_like(x).normal_(mean, scale)


CASES = [
    OpCase("", "RandomNormalLike", (Spec("b s"),), normal(1.0, 2.0), {"mean": 1.0, "scale": 2.0}, bodies=False),
    OpCase(
        "",
        "RandomUniformLike",
        (Spec("b s", "int64"),),
        lambda x: torch.empty(x.shape, dtype=HALF).uniform_(-1, 3),
        {"low": -1.0, "high": 3.0, "dtype": 10},
        bodies=False,
    ),
    OpCase("", "RandomNormal", (), lambda: torch.empty(3, 5).normal_(), {"shape": [3, 5]}, bodies=False),
    OpCase(
        "",
        "RandomUniform",
        (),
        lambda: torch.empty(3, 5, dtype=torch.float64).uniform_(2, 3),
        {"shape": [3, 5], "dtype": 11, "low": 2.0, "high": 3.0},
        bodies=False,
    ),
    OpCase("", "Bernoulli", (Spec("b s", low=0, high=1),), lambda x: x.bernoulli(), bodies=False),
    OpCase(
        "",
        "Bernoulli",
        (Spec("b s", torch.float32, low=0, high=1),),
        lambda x: x.bernoulli().bool(),
        {"dtype": 9},
        bodies=False,
        label="bool",
    ),
    OpCase(
        "",
        "Multinomial",
        (Spec("b 4", torch.float32),),
        lambda x: torch.multinomial(x.softmax(1), 6, replacement=True),
        {"sample_size": 6, "dtype": 7},
        bodies=False,
    ),
]
