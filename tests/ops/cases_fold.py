"""Cases of Im2Col and Col2Im, with torch.nn.functional as the reference."""

import torch.nn.functional as F

from tests.op_case import OpCase, SizesOf, Spec

SIZES = [{"n": 2, "h": 7, "w": 6}, {"n": 1, "h": 4, "w": 5}]
UNPADDED = {"kernel_shape": [2, 3]}
PADDED = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 1, 1, 1], "dilations": [1, 2]}

CASES = [
    OpCase("onnxtrain", "Im2Col", (Spec("n 3 h w"),), lambda x: F.unfold(x, (2, 3)), UNPADDED, sizes=SIZES),
    OpCase(
        "onnxtrain",
        "Im2Col",
        (Spec("n 3 h w"),),
        lambda x: F.unfold(x, (3, 2), (1, 2), 1, (2, 1)),
        PADDED,
        sizes=SIZES,
        label="padded",
    ),
    OpCase(
        "onnxtrain",
        "Col2Im",
        (Spec("n 18 24"), SizesOf("7 6")),
        lambda x, size: F.fold(x, size, (2, 3)),
        UNPADDED,
        sizes=SIZES,
    ),
    OpCase(
        "onnxtrain",
        "Col2Im",
        (Spec("n 18 24"), SizesOf("7 6")),
        lambda x, size: F.fold(x, size, (3, 2), (1, 2), 1, (2, 1)),
        PADDED,
        sizes=SIZES,
        label="padded",
    ),
]
