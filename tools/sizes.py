"""Fail if a package file or function is too long, or if code has notes about unfinished work.

`python tools/sizes.py` checks the sizes of the package, and all Python files for such notes.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "onnxtrain"
FOLDERS = (PACKAGE, "tests", "tools", "examples", "benchmarks")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_LINES_OF = {"onnxtrain/compile.py": 150}  # the pipeline at a glance: stages belong in their folders
LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")  # split, so that this file passes its own check


def too_long(path: str, source: str) -> Iterator[str]:
    """Yield a complaint for the file and for each of its functions that exceeds its limit."""
    lines, limit = len(source.splitlines()), MAX_LINES_OF.get(path, MAX_FILE_LINES)
    if lines > limit:
        yield f"{path}:1: the file has {lines} lines, at most {limit} are allowed: divide it"
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES} are allowed"


def leftovers(path: str, source: str) -> Iterator[str]:
    """Yield a complaint for each note about unfinished work, which belongs in an issue or a refusal."""
    for number, line in enumerate(source.splitlines(), 1):
        if note := LEFTOVER.search(line):
            yield f"{path}:{number}: {note[0]}: make it an issue, or refuse with a reason"


def main() -> int:
    """Print all complaints, and return the exit status."""
    complaints: list[str] = []
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path, source = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
            complaints += leftovers(path, source)
            if folder == PACKAGE:
                complaints += too_long(path, source)
    print("\n".join(complaints or ["sizes: all within limits"]))
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
