"""The Python examples of README and docs run, top to bottom, one page in one namespace."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest

from onnxtrain.ops import OPS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
