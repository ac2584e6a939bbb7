"""Every public name of onnxruntime-training 1.19.2 is there, or its import says what to use instead.

`wheel_names.txt` has the names that each public module of the wheel defines, and those that an `__init__` imports from
other modules of the wheel.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import onnx
import pytest
from onnxruntime.capi import build_and_package_info

import onnxtrain.dropin  # noqa: F401  puts onnxruntime.training in place
from onnxtrain.dropin.removed import REMOVED
from onnxtrain.errors import ArtifactError
from tests.dropin import names
from tests.dropin.test_surface import TRAINING, attribute_at

WHEEL = dict(line.split(":", 1) for line in Path(__file__).with_name("wheel_names.txt").read_text().splitlines())


def _is_removed(path: str) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in REMOVED)


def _needs_deepspeed(path: str) -> bool:
    return path in names.NEEDS_DEEPSPEED and importlib.util.find_spec("deepspeed") is None


@pytest.mark.parametrize("module", WHEEL)
def test_no_name_is_lost(module: str) -> None:
    for name in WHEEL[module].split():
        path = f"{module}.{name}".lstrip(".")
        statement = f"from {TRAINING}{'.' if module else ''}{module} import {name}"
        if _is_removed(path):
            with pytest.raises(ImportError, match=r"is not part of onnxtrain\. Use instead: "):
                exec(statement, {})
        elif not _needs_deepspeed(path):
            exec(statement, {})
    if not _is_removed(module):
        importlib.import_module(f"{TRAINING}.{module}".rstrip("."))


def test_removed_names_are_of_the_wheel() -> None:
    paths = {f"{module}.{name}" for module, text in WHEEL.items() for name in text.split()} | {*WHEEL}
    lost = [each for each in REMOVED if not any(path == each or path.startswith(f"{each}.") for path in paths)]
    assert lost == ["ortmodule.torch_cpp_extensions.cuda"]  # only scripts that build extensions


def test_the_accessor_has_the_model_that_blocks_extend() -> None:
    onnxblock = attribute_at("onnxblock")
    with onnxblock.empty_base() as accessor:
        assert isinstance(accessor, attribute_at("onnxblock.model_accessor").ModelAccessor)
        onnxblock.blocks.Constant(2.0)()
        assert [each.name for each in accessor.model.graph.initializer]
        assert not accessor.has_path
        with pytest.raises(ArtifactError, match="pass model_path to base"):
            _ = accessor.path
        model = accessor.model
    with onnxblock.base(model, "model.onnx") as accessor:
        assert accessor.model is not model
        assert accessor.has_path
        assert accessor.path == "model.onnx"


def test_the_registry_runs_registered_functions_in_order() -> None:
    registry, order = attribute_at("ortmodule.graph_optimizer_registry").GraphOptimizerRegistry, []
    registry.register("OnlyOfThisTest", "cpu", 0, lambda graph: order.append((graph.name, 0)))
    attribute_at("ortmodule").register_graph_optimizer("Other|OnlyOfThisTest", priority=1)(
        lambda graph: order.append((graph.name, 1))
    )
    registry.optimize_all("OnlyOfThisTest", "cpu", onnx.GraphProto(name="a"))
    registry.optimize_all("OnlyOfThisTest", "cuda", onnx.GraphProto(name="b"))
    assert order == [("a", 1), ("a", 0), ("b", 1)]


def test_shards_wrap_around() -> None:
    shard = attribute_at("utils.data.sampler").shard_wrapped_indices_for_worker
    assert [shard([4, 5, 6, 7, 8], rank, 3) for rank in range(3)] == [[4, 7], [5, 8], [6, 4]]
    assert [shard([4], rank, 3) for rank in range(3)] == [[4], [4], [4]]


def test_no_extension_needs_a_build(capsys: pytest.CaptureFixture[str]) -> None:
    ortmodule = attribute_at("ortmodule")
    assert attribute_at("ortmodule.torch_cpp_extensions").is_installed(ortmodule.ORTMODULE_TORCH_CPP_DIR)
    assert ortmodule.is_torch_cpp_extensions_installed(ortmodule.ORTMODULE_TORCH_CPP_DIR)
    attribute_at("ortmodule.torch_cpp_extensions.install").build_torch_cpp_extensions()
    assert capsys.readouterr().out
    assert getattr(build_and_package_info, "cuda_version", None) == ortmodule.ONNXRUNTIME_CUDA_VERSION
    assert getattr(build_and_package_info, "rocm_version", None) == ortmodule.ONNXRUNTIME_ROCM_VERSION


def test_a_row_can_be_annotated() -> None:
    table, inner = attribute_at("utils.ptable").PTable(), attribute_at("utils.ptable").PTable()
    row = table.add_row(["a", 1])
    assert isinstance(row, attribute_at("utils.ptable").Row)
    inner.add_row(["b"])
    row.append_annotation_table(inner)
    assert table.get_string() == "a  1\n  b\n"
