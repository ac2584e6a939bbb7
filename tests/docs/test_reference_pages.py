"""The generated reference: each option, operator, command and error has its section."""

import re
from pathlib import Path

import pytest

from onnxtrain import cli, errors
from onnxtrain.ops import OPS
from onnxtrain.options import PROCESS_VARIABLES, knobs
from onnxtrain.options.former import FORMER
from onnxtrain.options.json_file import KEYS
from onnxtrain.options.without_effect import JSON_KEYS, VARIABLES
from onnxtrain.torch_compat.internal import ENTRIES
from tools import reference_pages


def sections(page: str, level: int = 2) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", page, flags=re.MULTILINE)


def test_options() -> None:
    page = reference_pages.options_page()
    assert {knob.name for knob in knobs()} < set(sections(page))
    for name in (*PROCESS_VARIABLES, *VARIABLES, *JSON_KEYS):
        assert f"| `{name}` |" in page
    for knob in knobs():
        for variable in (knob.variable, *(old.variable for old in knob.old_names)):
            assert not variable or f"`{variable}`" in page
    assert all(f"`{option}`" in page for option in (*KEYS.values(), *FORMER))


def test_operators() -> None:
    page = reference_pages.operators_page()
    assert sorted(sections(page, 3)) == sorted(name for _, name in OPS)
    assert "| `scalar_factors` | How scalar factors move through ops" in page


def test_commands() -> None:
    page = reference_pages.command_line_page()
    assert sections(page) == list(cli.COMMANDS)
    assert "--budget" in page


def test_errors() -> None:
    page = reference_pages.errors_page()
    assert {name for name, each in vars(errors).items() if isinstance(each, type)} == set(sections(page))
    assert "* Unknown option." in page
    assert "* The model is not prepared." in page


def test_internals() -> None:
    page = reference_pages.internals_page()
    assert all(f"| `{name}` |" in page for name in ENTRIES)
    assert "## symbols" in page


def test_a_current_page_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_pages, "PAGES", {"page.md": lambda: "text"})
    reference_pages.write_pages(tmp_path)
    first = (tmp_path / "page.md").stat().st_mtime_ns
    reference_pages.write_pages(tmp_path)
    assert (tmp_path / "page.md").stat().st_mtime_ns == first
