"""Writing the page that a command makes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from onnxtrain.errors import OptionError


def write_page(file: Path, text: str) -> None:
    """Writes the page and says so.

    Raises:
        OptionError: the file cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            "The page cannot be written.",
            where=str(file),
            expected="a file that may be written",
            got=error,
            todo="name another file",
        ) from error
    Console().print(f"wrote {file}", markup=False)
