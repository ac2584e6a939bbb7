"""The table of ONNX Runtime Training's names in docs/how-to/migration.md is true, and each name is there."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

import onnxtrain.dropin  # noqa: F401  puts onnxruntime.training in place
from tests.dropin import names
from tests.dropin.test_surface import NAMES, attribute_at


def test_the_page_has_the_table() -> None:
    assert names.written()[1] == names.table(), "run: python -m tests.dropin.names"
    assert {*names.DIFFERS, *names.GONE} <= {path.rstrip(".") for path in names.paths()}


def test_each_name_is_used_by_a_test() -> None:
    tested = [path for paths in names.TESTS.values() for path in paths]
    used = [attribute_at(path) for path in (*names.CALLS, *tested)]
    values = {
        path: attribute_at(path) for path in names.paths() if path not in NAMES
    }  # others are modules without names
    unused = [p for p, v in values.items() if not inspect.ismodule(v) and not any(v is each for each in used)]
    assert not unused


@pytest.mark.parametrize("file", names.TESTS)
def test_the_test_files_use_the_names(file: str) -> None:
    text = (Path(__file__).parents[1] / file).read_text()
    assert [path for path in names.TESTS[file] if path.rpartition(".")[2] not in text] == []


@pytest.mark.parametrize("path", names.NEEDS_DEEPSPEED)
def test_names_that_need_deepspeed_say_so(path: str) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        with pytest.raises(ImportError, match=r"requires DeepSpeed.*pip install deepspeed"):
            attribute_at(path)
    else:
        attribute_at(path)


@pytest.mark.parametrize("path", names.CALLS)
def test_names_that_work_can_be_called(path: str) -> None:
    assert path in names.paths()
    names.CALLS[path](attribute_at(path))


def test_removed_names_give_the_alternative() -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.library\.triton_op"):
        attribute_at("ort_triton.register_triton_kernel")(len)
