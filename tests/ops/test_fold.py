"""What PyTorch's unfold and fold of images become."""

import torch.nn.functional as F

from onnxtrain.testing import Spec
from tests.ops.captures import check_capture
from tests.ops.modules import ops_of

SIZES = ({"n": 3, "h": 8, "w": 6}, {"n": 2, "h": 6, "w": 8})


def test_unfold_and_fold():
    def there_and_back(x):
        columns = F.unfold(x, 3, padding=1, stride=2)
        return columns, F.fold(columns * 2, x.shape[2:], 3, padding=1, stride=2)

    ours = check_capture(there_and_back, Spec("n 4 h w"), sizes=SIZES)
    assert {"onnxtrain::Im2Col", "onnxtrain::Col2Im"} <= set(ops_of(ours))


def test_a_single_sample_is_left_to_pytorch():
    check_capture(lambda x: F.unfold(x, 3), Spec("4 h w"), sizes=SIZES, aten=True)
