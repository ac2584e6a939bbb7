"""Subscribers see the tensors of every module in every step, the same in PyTorch and in a graph."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.observe.hooks import (
    GlobalSubscriberManager,
    StatisticsSubscriber,
    SubscriberBase,
    SubscriberManager,
    ZeROOffloadSubscriber,
    configure_ort_compatible_zero_stage3,
    inspect_activation,
)
from onnxtrain.observe.hooks.merge_activation_summary import main, merge
from onnxtrain.testing import assert_no_worse_than_eager


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 8))])
        self.two = Two()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = inspect_activation("middle", self.first(x)) if WATCHED["activation"] else self.first(x)
        for layer in self.layers:
            x = layer(x)
        a, b = self.two(x)
        return {"loss": (a * b).sum(), "index": a.argmax()}


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()


WATCHED = {"activation": False}


@pytest.fixture(autouse=True)
def nobody_watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(WATCHED, "activation", False)
    yield
    GlobalSubscriberManager.unsubscribe()


def trained(
    folder: Path, *, graph: bool, manager: SubscriberManager | None = None, **arguments: Any
) -> torch.nn.Module:
    torch.manual_seed(1)
    model: torch.nn.Module = Net()
    if graph:
        model = ORTModule(model, fallback_policy="FALLBACK_DISABLE")
    (manager or SubscriberManager()).subscribe(model, [StatisticsSubscriber(folder, **arguments)])
    for batch in (3, 5, 1):
        model(torch.randn(batch, 4))["loss"].backward()
    return model


def files(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*") if f.is_file()}


def without_digits(text: str) -> str:
    """Remove digits beyond the sixth: the kernels of a graph may round differently."""
    words = text.replace("[", " ").replace(",", " ").replace("]", " ").split()
    return " ".join(f"{float(w) + 0.0:.4g}" if w.lstrip("-")[:1].isdigit() and "." in w else w for w in words)


def test_a_graph_writes_the_same_files_as_pytorch_with_one_capture(tmp_path: Path) -> None:
    trained(tmp_path / "pt", graph=False)
    model = trained(tmp_path / "ort", graph=True)
    assert engine_of(model).captures == 1
    expected, written = files(tmp_path / "pt"), files(tmp_path / "ort")
    assert expected.keys() == written.keys()
    for name, text in expected.items():
        assert without_digits(text) == without_digits(written[name]), name
    assert expected["step_1/order.txt"].split() == [
        "Linear_1_0th_output",
        "ReLU_4_0th_output",
        "Linear_5_0th_output",
        "Sequential_3_0th_output",
        "Two_6_0th_output",
        "Two_6_1th_output",
        "Net_0_0th_output",
        "Net_0_1th_output",
    ]
    for step in range(3):
        assert f"step_{step}/Two_6_1th_output_backward" in written
        assert f"step_{step}/Net_0_1th_output_backward" not in written  # an index has no gradient


def test_the_gradients_are_those_without_subscribers(tmp_path: Path) -> None:
    plain = Net()
    watched = Net()
    watched.load_state_dict(plain.state_dict())
    SubscriberManager().subscribe(watched, [StatisticsSubscriber(tmp_path / "s")])
    graph = ORTModule(watched, fallback_policy="FALLBACK_DISABLE")
    x = torch.randn(3, 4)
    double = copy.deepcopy(plain).double()
    for model, batch in ((plain, x), (graph, x), (double, x.double())):
        model(batch)["loss"].backward()
    for got, eager, exact in zip(watched.parameters(), plain.parameters(), double.parameters(), strict=True):
        assert got.grad is not None
        assert eager.grad is not None
        assert exact.grad is not None
        assert_no_worse_than_eager("gradient", got.grad, eager.grad, exact.grad)


def test_the_contents_of_a_file(tmp_path: Path) -> None:
    special = torch.tensor([[float("nan"), float("inf"), -float("inf")], [0.0, -2.0, 4.0]])
    subscriber = StatisticsSubscriber(tmp_path / "s", bucket_size=2)
    manager = SubscriberManager()
    manager.subscribe(torch.nn.Identity(), [subscriber])
    subscriber.inspect(manager.get_run_context(), "special", special)
    subscriber.inspect(manager.get_run_context(), "none", torch.zeros(0, 3, dtype=torch.int64))
    written = files(tmp_path / "s")
    assert written["step_0/special_forward"].splitlines() == [
        "special forward",
        "shape: (2, 3)  dtype: torch.float32  elements: 6",
        "min: -2  max: 4  mean: 0.666666667  std: 3.05505046",
        "nan: 1  inf: 2  negative: 2  positive: 2  zero: 1",
        "first elements: [nan, inf, -inf, 0, -2, 4]",
    ]
    assert written["step_0/none_forward"].splitlines()[1:] == [
        "shape: (0, 3)  dtype: torch.int64  elements: 0",
        "first elements: []",
    ]


@pytest.mark.parametrize("graph", [False, True])
def test_only_some_steps(tmp_path: Path, graph: bool) -> None:
    trained(tmp_path / "s", graph=graph, start_step=1, end_step=2, run_on_cpu=True)
    assert {name.split("/")[0] for name in files(tmp_path / "s")} == {"step_1"}


@pytest.mark.parametrize("graph", [False, True])
def test_activations_inside_forward(tmp_path: Path, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WATCHED, "activation", True)
    trained(tmp_path / "s", graph=graph, manager=GlobalSubscriberManager)
    written = files(tmp_path / "s")
    for step in range(3):
        assert (
            written[f"step_{step}/middle_forward"].split("\n")[1:]
            == (written[f"step_{step}/Linear_1_0th_output_forward"].split("\n")[1:])
        )
        assert f"step_{step}/middle_backward" in written


def test_activations_need_a_subscriber() -> None:
    with pytest.raises(RuntimeError, match="Expected a subscriber of type StatisticsSubscriber"):
        inspect_activation("x", torch.zeros(1))


def test_a_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    with pytest.raises(FileExistsError, match="override_output_dir"):
        StatisticsSubscriber(tmp_path)
    StatisticsSubscriber(tmp_path, override_output_dir=True)
    assert not files(tmp_path)
    with pytest.raises(ValueError, match="bucket_size"):
        StatisticsSubscriber(tmp_path / "new", bucket_size=0)


class Doubles(SubscriberBase):
    """Changes the tensors in each of the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def pre_forward_module_apply_impl(self, run_rtx: Any, module: Any, args: Any, kwargs: Any) -> Any:
        self.seen.append(f"before {type(module).__name__}")
        return args, kwargs

    def pre_forward_tensor_apply_impl(self, run_rtx: Any, module: Any, tensor_idx: int, tensor: Any) -> Any:
        return tensor * 2

    def post_forward_module_apply_impl(self, run_rtx: Any, module: Any, args: Any, outputs: Any) -> Any:
        self.seen.append(f"after {type(module).__name__}")
        return args, outputs + 1

    def post_forward_tensor_apply_impl(self, run_rtx: Any, module: Any, tensor_idx: int, tensor: Any) -> Any:
        return tensor * 3

    def post_forward_outmost_module_apply_impl(self, run_rtx: Any, module: Any, args: Any, outputs: Any) -> Any:
        self.seen.append("outmost")
        return args, outputs + 5


@pytest.mark.parametrize("graph", [False, True])
def test_a_subscriber_may_change_tensors(graph: bool) -> None:
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Identity())
    subscriber, manager = Doubles(), SubscriberManager()
    manager.subscribe(model, [subscriber])
    if graph:
        model = ORTModule(model, fallback_policy="FALLBACK_DISABLE")
    inner = (10 * 2 * 2 + 1) * 3
    for step in range(2):
        assert model(torch.tensor([10.0])).item() == (inner + 1) * 3 + 5
        assert manager.get_run_context().global_states.execution_step == step + 1
    order = ["before Sequential", "before Identity", "after Identity", "after Sequential", "outmost"]
    assert subscriber.seen[: len(order)] == order
    assert manager.get_subscriber(Doubles) is subscriber


def test_after_unsubscribing_nothing_is_left(tmp_path: Path) -> None:
    manager = SubscriberManager()
    model = trained(tmp_path / "s", graph=True, manager=manager)
    before = files(tmp_path / "s")
    manager.unsubscribe()
    model(torch.randn(3, 4))["loss"].backward()
    assert files(tmp_path / "s") == before
    assert manager.get_run_context().global_states.execution_step == 0


def test_only_subscribers_subscribe() -> None:
    with pytest.raises(TypeError, match="SubscriberBase, got str"):
        SubscriberManager().subscribe(torch.nn.Identity(), ["x"])


# Merging two runs


def test_merged_files_can_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "pt", graph=False)
    trained(tmp_path / "ort", graph=True, end_step=2)
    (tmp_path / "ort" / "step_0" / "ReLU_4_0th_output_forward").unlink()
    command = [
        "--pt_dir",
        str(tmp_path / "pt"),
        "--ort_dir",
        str(tmp_path / "ort"),
        "--output_dir",
        str(tmp_path / "m"),
    ]
    monkeypatch.setattr(sys, "argv", ["merge_activation_summary", *command])
    monkeypatch.delitem(sys.modules, "onnxtrain.observe.hooks.merge_activation_summary")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("onnxtrain.observe.hooks.merge_activation_summary", run_name="__main__")
    assert ended.value.code == 0
    merged = files(tmp_path / "m")
    assert sorted(merged) == [f"merge_{run}/step_{step}_.txt" for run in ("ort", "pt") for step in (0, 1)]
    assert without_digits(merged["merge_pt/step_1_.txt"]) == without_digits(merged["merge_ort/step_1_.txt"])
    assert merged["merge_pt/step_1_.txt"].index("Linear_1") < merged["merge_pt/step_1_.txt"].index("Linear_5")
    assert "ReLU_4_0th_output_forward: missing" in merged["merge_ort/step_0_.txt"]
    with pytest.raises(SystemExit):
        main(command)
    assert main([*command, "--overwrite"]) == 0


def test_runs_without_a_common_step(tmp_path: Path) -> None:
    for name in ("pt", "ort"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="no step in common"):
        merge(tmp_path / "pt", tmp_path / "ort", tmp_path / "m")


def test_configuring_zero_stage_3_writes_statistics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onnxtrain.log._logged", set())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="DeepSpeed is not installed"):
        configure_ort_compatible_zero_stage3()

    class DeepSpeedZeRoOffload:  # stands in for DeepSpeed's
        def __init__(self, module: torch.nn.Module) -> None:
            self.module = module
            self.setup_zero_stage3_hooks()

        def setup_zero_stage3_hooks(self) -> None:
            self.is_set_up = True

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "deepspeed" or None)
    offload_module = SimpleNamespace(DeepSpeedZeRoOffload=DeepSpeedZeRoOffload)
    monkeypatch.setattr("importlib.import_module", lambda name: offload_module)
    configure_ort_compatible_zero_stage3()
    assert "configure_ort_compatible_zero_stage3() has no effect without debug=True" in caplog.text
    DeepSpeedZeRoOffload(torch.nn.Linear(2, 2)).module(torch.ones(1, 2))
    assert not list(tmp_path.iterdir())
    configure_ort_compatible_zero_stage3(debug=True, stats_output_dir=tmp_path, stats_overwrite=True)
    offload = DeepSpeedZeRoOffload(torch.nn.Linear(2, 2))
    offload.module(torch.ones(1, 2))
    assert offload.is_set_up
    assert {file.name for file in (tmp_path / "step_0").iterdir()} == {"order.txt", "Linear_0_0th_output_forward"}
    SubscriberManager().subscribe(offload.module, [ZeROOffloadSubscriber(offload)])
    assert "ZeROOffloadSubscriber has no effect" in caplog.text
    assert offload.module(torch.ones(1, 2)).shape == (1, 2)
