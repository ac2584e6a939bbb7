"""The table of the predecessor's names in docs/how-to/migration.md is true, and each name is there."""

from __future__ import annotations

import pytest

import onnxtrain.dropin  # noqa: F401  puts onnxruntime.training in place
from tests.dropin import names
from tests.dropin.test_surface import found


def test_the_page_has_the_table() -> None:
    assert names.written()[1] == names.table(), "run: python -m tests.dropin.names"
    assert {*names.DIFFERS, *names.GONE} <= {path.rstrip(".") for path in names.paths()}


@pytest.mark.parametrize("path", names.CALLS)
def test_names_that_work_can_be_called(path: str) -> None:
    assert path in names.paths()
    names.CALLS[path](found(path))


def test_removed_names_give_the_alternative() -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.library\.triton_op"):
        found("ort_triton.register_triton_kernel")(len)
    with pytest.raises(RuntimeError, match="DeepSpeed"):
        found("utils.hooks.configure_ort_compatible_zero_stage3")()
