"""Write a command's HTML page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from onnxtrain.errors import OptionError


def write_page(file: Path, text: str) -> None:
    """Write the page and print its path.

    Raises:
        OptionError: the file cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            "The page cannot be written.",
            where=str(file),
            expected="a writable file",
            got=error,
            todo="give another path",
        ) from error
    Console().print(f"wrote {file}", markup=False)
