"""Format a table as text."""

from __future__ import annotations

from collections.abc import Sequence


class Row:
    """A row, and the tables shown below it."""

    def __init__(self, columns: Sequence[object]) -> None:
        self.columns = [str(column) for column in columns]
        self.annotations: list[PTable] = []

    def append_annotation_table(self, ptable: PTable) -> None:
        """Add a table below the row."""
        self.annotations.append(ptable)


class PTable:
    """A table that can be formatted as text.

    Args:
        sortable: sort the rows by their texts.
    """

    def __init__(self, sortable: bool = False) -> None:
        self._sortable = sortable
        self._rows: list[Row] = []

    def add_row(self, columns: Sequence[object]) -> Row:
        """Add a row, and return it."""
        row = Row(columns)
        self._rows.append(row)
        return row

    def get_string(self, first_column_width: int | None = None, second_column_width: int | None = None) -> str:
        """Return the formatted table, "" without rows. The arguments are minimum widths of the first two columns."""
        rows = sorted(self._rows, key=lambda row: row.columns) if self._sortable else self._rows
        widths = [0] * max((len(row.columns) for row in rows), default=0)
        for index, minimum in enumerate((first_column_width, second_column_width)):
            if minimum and index < len(widths):
                widths[index] = minimum
        for row in rows:
            for index, text in enumerate(row.columns):
                widths[index] = max(widths[index], len(text))
        lines = []
        for row in rows:
            lines.append(
                "  ".join(f"{text:<{width}}" for text, width in zip(row.columns, widths, strict=False)).rstrip()
            )
            for table in row.annotations:
                lines += [f"  {line}" for line in table.get_string().splitlines()]
        return "".join(f"{line}\n" for line in lines)
