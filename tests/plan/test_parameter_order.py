"""Collectives of sharded parameters start early and are awaited late, within the bytes that may be in flight."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxtrain.ops import view
from onnxtrain.plan.cut import single_part
from onnxtrain.plan.parameter_order import limit_in_flight
from onnxtrain.plan.streams import scheduled

BYTES = 8 * 8 * 4  # of each parameter, and of each gradient

FORWARD = """<ir_version: 10, opset_import: ["": 21, "onnxtrain": 1]>
g (float[8, 8] x, float[8, 8] p1, float[8, 8] p2, float[8, 8] p3) => (float[8, 8] y3)
{
    g1 = onnxtrain.GatherParameters<size = 1, rank = 0, group = "", in_flight_bytes = LIMIT>(p1)
    w1 = onnxtrain.WaitCollective(g1, p1)
    y1 = MatMul(x, w1)
    g2 = onnxtrain.GatherParameters<size = 1, rank = 0, group = "", in_flight_bytes = LIMIT>(p2)
    w2 = onnxtrain.WaitCollective(g2, p2)
    y2 = MatMul(y1, w2)
    padded = Neg(p3)
    g3 = onnxtrain.GatherParameters<size = 1, rank = 0, group = "", in_flight_bytes = LIMIT>(padded)
    w3 = onnxtrain.WaitCollective(g3, padded)
    y3 = MatMul(y2, w3)
}"""

BACKWARD = """<ir_version: 10, opset_import: ["": 21, "onnxtrain": 1]>
g (float[8, 8] x, float[8, 8] w) => (float[8, 8] n1, float[8, 8] w2, float[8, 8] w3, float[8, 8] dx)
{
    d1 = MatMul(x, x)
    dx = MatMul(x, w)
    r1 = onnxtrain.ReduceGradients<size = 1, rank = 0, group = "", in_flight_bytes = LIMIT>(d1)
    w1 = onnxtrain.WaitCollective(r1, d1)
    n1 = Neg(w1)
    d2 = MatMul(dx, w)
    r2 = onnxtrain.ReduceGradients<size = 1, rank = 0, group = "", in_flight_bytes = LIMIT>(d2)
    w2 = onnxtrain.WaitCollective(r2, d2)
    d3 = MatMul(d2, w)
    r3 = onnxtrain.ReduceGradients<size = 1, rank = 0, group = "", in_flight_bytes = LIMIT>(d3)
    w3 = onnxtrain.WaitCollective(r3, d3)
    unread = onnxtrain.WaitCollective(r3, d3)
}"""

ORDERS = {
    (FORWARD, 0): "g1 w1 y1 g2 w2 y2 padded g3 w3 y3",
    (FORWARD, BYTES): "g1 g2 w1 y1 padded g3 w2 y2 w3 y3",
    (FORWARD, 2 * BYTES): "g1 g2 padded g3 w1 y1 w2 y2 w3 y3",
    (BACKWARD, 0): "d1 r1 w1 dx n1 d2 r2 w2 d3 r3 w3 unread",
    (BACKWARD, BYTES): "d1 r1 dx d2 w1 n1 r2 d3 w2 r3 unread w3",
    (BACKWARD, 2 * BYTES): "d1 r1 dx d2 r2 d3 w1 n1 r3 unread w2 w3",
}


def model_of(text: str, limit: int) -> ir.Model:
    model = ir.from_onnx_text(text.replace("LIMIT", str(limit)))
    for value in (v for node in model.graph for v in node.outputs):
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape([8, 8])
    return model


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("text", "limit"), ORDERS, ids=lambda value: value if isinstance(value, int) else value[70:85])
def test_collectives_overlap_within_the_bytes_in_flight(text: str, limit: int, device: str) -> None:
    part = scheduled(single_part(model_of(text, limit)), device)
    assert " ".join(str(node.outputs[0].name) for node in part.nodes) == ORDERS[text, limit]


@pytest.mark.parametrize(("budget", "limit"), [(None, 1000), (0.5, 1000), ("auto", 1000), (800, 100), (80_000, 1000)])
def test_a_budget_that_is_the_same_on_all_ranks_limits_the_bytes_in_flight(
    budget: float | str | None, limit: int
) -> None:
    model = model_of(FORWARD, 1000)
    limit_in_flight(model.graph, budget)
    gathers = [node for node in model.graph if node.op_type == "GatherParameters"]
    assert [view(node).in_flight_bytes for node in gathers] == [limit] * 3
