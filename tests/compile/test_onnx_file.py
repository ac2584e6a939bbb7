"""Files are valid, readable ONNX, and are written completely or not at all."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onnxtrain import onnx_file
from onnxtrain.errors import GraphError, OptionError
from onnxtrain.graph.values import TensorType, set_type
from tests.graph.small import graph_of
from tests.reference import assert_matches

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def model() -> ir.Model:
    op, (x, weight) = graph_of(x=("b", 4), weight=(5, 4))
    weight.name = "encoder.weight"
    with op.at({"module": "encoder", "line": "model.py:12 in forward"}):
        y = op.own.Linear(x, weight, None)
    y.name = "linear"
    op.graph.outputs.append(y)
    return ir.Model(op.graph, ir_version=10)


def test_a_file_holds_functions_names_and_origins(tmp_path):
    source = model()
    before = str(source)
    path = tmp_path / "new folder" / "model.onnx"
    onnx_file.write(source, path)
    assert str(source) == before
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.producer_name == "onnxtrain"
    assert [i.name for i in proto.graph.input] == ["x", "encoder.weight"]
    (node,) = proto.graph.node
    assert (node.op_type, list(node.output)) == ("Linear", ["linear"])
    assert {p.key: p.value for p in node.metadata_props} == {"module": "encoder", "line": "model.py:12 in forward"}
    assert node.doc_string == "encoder, model.py:12 in forward"
    assert [f.name for f in proto.functions] == ["Linear"]
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    weight = np.ones((5, 4), np.float32)
    (result,) = session.run(None, {"x": X, "encoder.weight": weight})
    assert_matches(result, lambda x, w: x @ w.T, X, weight)


def test_each_case_of_an_op_has_its_own_function_name(tmp_path):
    """With overloads of one name, onnxruntime up to 1.24.1 would run the first for all calls."""
    op, (x, y) = graph_of(x=("b", 4), y=("b", "c", 4))
    results = [op.ms.QuickGelu(x, alpha=a) for a in (1.0, 2.0, 1.0)] + [op.own.LogSigmoid(v) for v in (x, y)]
    op.graph.outputs.extend([*results, op.ms.ReluGrad(x, x), op.ms.ReluGrad(y, y)])
    path = tmp_path / "model.onnx"
    onnx_file.write(ir.Model(op.graph, ir_version=10), path)
    proto = onnx.load(path)
    names = [(f.domain, f.name) for f in proto.functions]
    assert len(set(names)) == len(names)
    assert not any(each.overload for each in (*proto.graph.node, *proto.functions))
    assert [n.op_type for n in proto.graph.node][:3] == ["QuickGelu", "QuickGelu_case2", "QuickGelu"]

    wide = np.stack([X, -X, X * 2], 1)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"x": X, "y": wide})
    for result, alpha in zip(outputs, (1.0, 2.0, 1.0), strict=False):
        assert_matches(result, lambda x, alpha=alpha: x * (alpha * x).sigmoid(), X, name=f"QuickGelu with {alpha}")
    for result, given in zip(outputs[3:], (X, wide), strict=False):
        assert_matches(result, torch.nn.functional.logsigmoid, given)
    for result, given in zip(outputs[5:], (X, wide), strict=True):
        np.testing.assert_array_equal(result, np.where(given > 0, given, 0))


@pytest.mark.parametrize("opset", [17, 23, 24])
def test_the_opset_can_be_chosen_for_graph_and_functions(tmp_path, opset):
    path = tmp_path / "model.onnx"
    onnx_file.write(model(), path, opset)
    proto = onnx.load(path)
    assert {i.domain: i.version for i in proto.opset_import}[""] == opset
    for function in proto.functions:
        assert {i.domain: i.version for i in function.opset_import}[""] == opset


def test_an_opset_that_cannot_express_the_graph_is_replaced_by_the_next_that_can(tmp_path, caplog):
    op, (x,) = graph_of(x=("b", 4))
    bits = op.Cast(x, to=ir.DataType.INT64)
    op.graph.outputs.append(op.BitwiseAnd(bits, bits))
    written = ir.Model(op.graph, ir_version=10)
    onnx_file.write(written, tmp_path / "model.onnx", 15)
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 18
    assert "in opset 18 instead of 15" in caplog.text
    assert "BitwiseAnd" in caplog.text
    with pytest.raises(OptionError, match="unknown ONNX opset"):
        onnx_file.write(written, tmp_path / "other.onnx", 99)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    onnx_file.write(model(), path)
    old = path.read_bytes()

    def refuse(*args, **kwargs):
        raise onnx.checker.ValidationError("no")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    with pytest.raises(GraphError, match="not valid ONNX"):
        onnx_file.write(model(), path, 18)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_outputs_that_are_inputs_or_repeated_become_separate_values(tmp_path):
    op, (x,) = graph_of(x=("b", 4))
    y = op.Neg(x)
    y.name = "y"
    op.graph.outputs.extend([y, x, y])
    path = tmp_path / "model.onnx"
    onnx_file.write(ir.Model(op.graph, ir_version=10), path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [o.name for o in session.get_outputs()] == ["y", "x_output_1", "y_output_2"]
    for result, expected in zip(session.run(None, {"x": X}), (-X, X, -X), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_tensors_too_large_for_one_file_are_external_data(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "MAX_BYTES", 1000)
    op, (x,) = graph_of(x=("b", 64))
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    op.graph.outputs.append(op.MatMul(x, op.constant(weight, ir.DataType.FLOAT)))
    path = tmp_path / "model.onnx"
    onnx_file.write(ir.Model(op.graph, ir_version=10), path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert path.stat().st_size < weight.nbytes
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    rows = np.ones((2, 64), np.float32)
    assert_matches(session.run(None, {"x": rows})[0], torch.matmul, rows, weight)


def test_aten_nodes_stay_and_the_file_is_valid(tmp_path):
    op, (x,) = graph_of(x=("b", 4))
    node = ir.Node("org.pytorch.aten", "ATen", [x], [ir.AttrString("operator", "aten::frac")], num_outputs=1)
    op.graph.append(node)
    set_type(node.outputs[0], TensorType(ir.DataType.FLOAT, ("b", 4)))
    op.graph.outputs.append(op.Neg(node.outputs[0]))
    onnx_file.write(ir.Model(op.graph, ir_version=10), tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(proto)
    assert {i.domain for i in proto.opset_import} == {"", "org.pytorch.aten"}
    assert [n.op_type for n in proto.graph.node] == ["ATen", "Neg"]
