"""Print tables in terminals that are too narrow for them as a paragraph per row, because a cut number is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

__all__ = ["FittingTable"]

#: Columns of names may be folded to this many characters.
_FOLDED = 12

#: More characters than any table is wide.
_WIDE = 10_000


class FittingTable(Table):
    """A table whose columns of numbers are never cut.

    Columns whose overflow is ``fold`` may be as narrow as a dozen characters. If there is still too little room, each
    row is printed as a paragraph: its first cell, and below it the other columns, each as name and value.

    Example:
        >>> from rich.console import Console
        >>> table = FittingTable("codec", "step", "sent", title="2 ranks")
        >>> table.add_row("none", "901 ms", "79.9 MB")
        >>> Console(width=16).print(table)  # doctest: +NORMALIZE_WHITESPACE
        2 ranks
        none
          step 901 ms,
          sent 79.9 MB
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._least(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text.from_markup(str(self.title), style="italic")
        heads = [_line(column.header) for column in self.columns]
        for row in zip(*(column.cells for column in self.columns), strict=True):
            name, *values = map(_line, row)
            yield Text.from_markup(name.markup or heads[0].markup, style="bold")
            said = [Text.assemble(head, " ", value) for head, value in zip(heads[1:], values, strict=True) if value]
            yield Padding(Text(", ").join(said), (0, 0, 0, 2))
        if self.caption:
            yield Text.from_markup(str(self.caption), style="dim italic")

    def _least(self, console: Console, options: ConsoleOptions) -> int:
        """Return the width below which a number would be cut."""
        whole = self.__rich_measure__(console, options.update(max_width=_WIDE)).maximum
        return whole - sum(max(0, _width(column) - _FOLDED) for column in self.columns if column.overflow == "fold")


def _line(cell: RenderableType) -> Text:
    """Join the lines of a cell into one."""
    return Text.from_markup(" ".join(str(cell).split("\n")))


def _width(column: Column) -> int:
    """Return the width of the column's longest line."""
    cells = (column.header, *column.cells)
    return max(cell_len(Text.from_markup(line).plain) for cell in cells for line in str(cell).split("\n"))
