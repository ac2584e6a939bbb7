"""The places that state the version agree."""

import re
from pathlib import Path

import onnxtrain

ROOT = Path(__file__).parents[2]


def test_the_version_is_one() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changelog, flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == onnxtrain.__version__
    assert f"\nversion: {newest[1]}\n" in citation
    assert f"\ndate-released: {newest[2]}\n" in citation
