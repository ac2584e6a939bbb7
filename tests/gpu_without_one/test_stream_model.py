"""The model of several compute streams: what they can save is bounded by the GPU, by dependencies and by the host."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxtrain.plan.cut import single_part
from tests.gpu_without_one.stream_model import Times, times

PRODUCTS = """<ir_version: 10, opset_import: ["": 21]>
g (bfloat16[N, 768] x, bfloat16[768, 768] v, bfloat16[768, 768] w) => (bfloat16[N, 768] a, bfloat16[N, 768] c)
{
    a = MatMul(x, v)
    b = MatMul(x, w)
    c = MatMul(b, w)
}"""


@pytest.mark.parametrize(
    ("shared", "path", "launches", "gain"), [(10.0, 5.0, 0.0, 0.0), (4.0, 5.0, 0.0, 0.5), (4.0, 5.0, 4.0, 0.0)]
)
def test_the_largest_bound_decides(shared: float, path: float, launches: float, gain: float) -> None:
    assert Times(10.0, shared, path, launches).gain(5.0) == gain


def test_small_gemms_could_overlap_unless_the_library_splits_them() -> None:
    model = ir.from_onnx_text(PRODUCTS)
    for node in model.graph:
        node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.BFLOAT16, ir.Shape(["N", 768])
    split, alone = (times(single_part(model), {"N": 256}, splits) for splits in (True, False))
    assert split.launches == alone.launches == 3
    assert split.serial == split.shared
    assert alone.serial > alone.shared
    for modelled in (split, alone):
        assert modelled.path == pytest.approx(modelled.serial * 2 / 3)
    assert split.gain(0.0) == 0
    assert alone.gain(0.0) == pytest.approx(1 / 3)
    assert alone.gain(1e-5) == 0  # the host is slower
