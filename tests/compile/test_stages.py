"""Stages are verified, timed, reported and written to disk as soon as they are done."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import DebugOptions, ORTModule
from onnxtrain import stages as stages_module
from onnxtrain.errors import GraphError, ORTModuleFallbackException
from onnxtrain.options import Options
from onnxtrain.plan import differentiation
from onnxtrain.report import PassReport, Refusal
from onnxtrain.stages import Stages
from tests.graph.small import graph_of


def model() -> ir.Model:
    op, (x,) = graph_of(x=("b", 4))
    op.graph.outputs.append(op.Neg(op.Exp(x)))
    return ir.Model(op.graph, ir_version=10)


def broken() -> ir.Model:
    faulty = model()
    faulty.graph[0].outputs[0].shape = None
    return faulty


@dataclass
class Joint:
    model: ir.Model


@dataclass
class Changes:
    applied: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)


def test_the_report_lists_what_each_stage_did(monkeypatch):
    clock = iter([0.0, 0.002, 1.0, 1.005, 2.0, 2.001, 3.0])
    monkeypatch.setattr(stages_module.time, "perf_counter", lambda: next(clock))
    stages = Stages(Options(), "training")
    first = model()
    assert stages.record("capture", first) is first
    refusal = Refusal("eliminate_common_subexpressions", "Exp", "random")
    eliminate_common_subexpressions = PassReport("eliminate_common_subexpressions", 1.5, ("merged 2",), (refusal,))
    joint = Joint(model())
    assert (
        stages.record_joint("differentiate", joint, Changes(["merged 2"], [refusal], [eliminate_common_subexpressions]))
        is joint
    )
    stages.end("plan", joint.model)
    report = stages.report()
    assert [s.name for s in report.stages] == ["capture", "differentiate", "plan"]
    # The time of verification (to 1.0 and to 2.0) belongs to no stage.
    assert [round(s.took_ms) for s in report.stages] == [2, 5, 1]
    assert [s.nodes for s in report.stages] == [2, 2, 2]
    assert report.stages[1].applied == ("merged 2",)
    assert report.refused == (refusal,)
    assert report.stages[1].passes == (eliminate_common_subexpressions,)


def test_a_malformed_graph_is_refused():
    with pytest.raises(GraphError, match="has no type"):
        Stages(Options(), "training").record("capture", broken())


def test_nothing_is_written_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Stages(Options(), "training").record("capture", model())
    assert not list(tmp_path.iterdir())


def test_each_compilation_of_a_module_saves_graphs_under_its_own_prefix(tmp_path):
    owner = nn.Linear(1, 1)
    for _ in range(2):
        stages = Stages(Options(save_graphs=tmp_path / "graphs" / "net"), "training", owner=owner)
        stages.record("capture", model())
        stages.record("optimize", model())
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.onnx"))
    stages = ("optimized_pre_grad", "torch_exported")
    assert names == [f"graphs/{prefix}_{name}_training.onnx" for prefix in ("net_2", "net") for name in stages]
    for name in names:
        onnx.checker.check_model(str(tmp_path / name), full_check=True)


def test_another_module_overwrites_the_graphs_of_the_first(tmp_path):
    for _ in range(2):
        stages = Stages(Options(save_graphs=tmp_path / "net"), "training", owner=nn.Linear(1, 1))
        stages.record("capture", model())
    assert [path.name for path in tmp_path.iterdir()] == ["net_torch_exported_training.onnx"]


def test_graphs_between_graph_breaks_are_saved_separately(tmp_path):
    def halves(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    torch.compile(halves, backend="onnxtrain", options={"save_graphs": tmp_path / "half"})(torch.ones(3))
    assert {path.name for path in tmp_path.iterdir()} >= {
        "half_torch_exported_training.onnx",
        "half_2_torch_exported_training.onnx",
    }


TRAINING = ["torch_exported", "optimized_pre_grad", "optimized", "execution_model"]


@pytest.mark.parametrize(
    ("mode", "names"), [("training", ["capture", "optimize", "optimize-joint"]), ("inference", ["capture", "optimize"])]
)
def test_the_files_of_save_onnx_have_the_names_that_users_know(tmp_path, mode, names):
    options = Options(save_graphs=tmp_path / "bert", onnx_opset=18)
    stages = Stages(options, mode)
    for name in names:
        stages.record(name, model())
    stages.end("plan", model())
    assert {p.name for p in tmp_path.iterdir()} == {f"bert_{kind}_{mode}.onnx" for kind in TRAINING}
    written = onnx.load(tmp_path / f"bert_optimized_{mode}.onnx")
    assert written.opset_import[0].version == 18


def test_files_of_stages_before_a_failure_are_written(tmp_path):
    stages = Stages(Options(save_graphs=tmp_path / "bert"), "training")
    stages.record("capture", model())
    with pytest.raises(GraphError):
        stages.record("optimize", broken())
    assert [p.name for p in tmp_path.iterdir()] == ["bert_torch_exported_training.onnx"]


def test_the_forward_graph_is_written_before_gradients_are_built(tmp_path, monkeypatch):
    """A gradient that cannot be built leaves the optimized forward graph on disk."""

    def fails(*arguments):
        raise GraphError("there is no gradient")

    monkeypatch.setattr(differentiation, "differentiate", fails)
    options = DebugOptions(save_onnx=True, onnx_prefix="m", save_path=tmp_path)
    with pytest.raises(ORTModuleFallbackException, match="there is no gradient"):
        ORTModule(nn.Linear(2, 2), options, fallback_policy="FALLBACK_DISABLE")(torch.ones(1, 2))
    assert {path.name for path in tmp_path.iterdir()} == {
        "m_torch_exported_training.onnx",
        "m_optimized_pre_grad_training.onnx",
    }
    onnx.checker.check_model(onnx.load(tmp_path / "m_optimized_pre_grad_training.onnx"))
