"""The documentation: its Python examples run, its links are valid, and a table of contents lists each page."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest

from onnxtrain.ops import OPS
from tests.thinned import slow_except
from tools import reference_pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = {DOCS / "reference" / name for name in reference_pages.PAGES}
PAGES = [ROOT / "README.md", *sorted(set(DOCS.rglob("*.md")) - GENERATED)]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


# The slow tests have those whose imports take seconds, and those that an example of tests/docs/test_examples.py is as.
SLOW_PAGES = {
    *(DOCS / "tutorials" / f"{name}.md" for name in ("hugging-face", "lora", "cnn", "memory-budget")),
    *(DOCS / "how-to" / f"{name}.md" for name in ("qlora", "on-device-training")),
}


@pytest.mark.parametrize("page", slow_except(PAGES, *(page for page in PAGES if page not in SLOW_PAGES)), ids=named)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page's Python blocks, top to bottom, in one namespace."""
    blocks = [
        (text[: match.start()].count("\n") + 1, match[1])
        for text in [page.read_text()]
        for match in re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    ]
    if not blocks:
        pytest.skip("a page without Python examples")
    monkeypatch.chdir(tmp_path)
    before = dict(OPS)
    namespace: dict[str, object] = {"__name__": "example"}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            for line, source in blocks:
                exec(compile("\n" * line + source, str(page), "exec"), namespace)
    finally:
        OPS.clear()
        OPS.update(before)  # an example may define an op


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        path = (page.parent / target).resolve()
        assert path.exists() or path in GENERATED, f"{named(page)} links to {target}"


def test_a_table_of_contents_lists_each_page() -> None:
    listed = {DOCS / "index.md"}
    for page in DOCS.rglob("index.md"):
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            entries = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{entry}.md").resolve() for entry in entries}
    assert listed == {page for page in DOCS.rglob("*.md") if not page.name.startswith("_")} | GENERATED
