"""Draw bars for the top of a page as SVG: one file for light pages and one for dark ones.

The file contains everything that it shows as text, so that a picture can be compared with its record. No font is
embedded or fetched: the reader's own font is used, so there is room for a wide one. A picture is 600 pixels wide, and
still legible at 400.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from narrowband.files import write_text

__all__ = ["THEMES", "Bar", "Panel", "drawn", "embedded", "write"]

#: Theme → colours of text, secondary text, the background of a bar, a bar, and a bar that the page is about.
THEMES = {
    "light": ("#1f2937", "#5b6472", "#e8ebef", "#9aa5b4", "#00796b"),
    "dark": ("#e7eaee", "#a7b0bd", "#353b47", "#76808f", "#2dd4bf"),
}

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

#: In pixels: width of the picture, gap between two panels; heights of a heading, of a bar with label, of a bar alone.
_WIDTH, _GAP, _HEADING, _PITCH, _THICK = 600, 36, 58, 46, 11
_PANEL = (_WIDTH - _GAP) / 2

#: Sizes of the font in pixels: of a panel's title and note, and of a bar's label and value.
_TITLE, _NOTE, _LABEL = 19.5, 15.5, 18.0

#: Letters may become this much smaller, so that two panels fit beside each other. Otherwise panels are drawn one below
#: the other.
_SMALLEST = 0.85

#: Widths of characters in a wide font (DejaVu Sans), as a share of its size; of others; how much wider bold ones are.
_WIDTHS = dict.fromkeys("ijl", 0.28) | dict.fromkeys(" .,:;'()[]/|frtI-", 0.40) | dict.fromkeys("mwMWOQ%×±=−+<>", 0.95)
_OTHERS, _BOLD = 0.64, 1.12


@dataclass(frozen=True)
class Bar:
    """A bar of a panel.

    Attributes:
        label: what the bar stands for.
        value: the bar's length; None if there is none to show.
        said: the value as text.
        strong: whether the page is about this bar.
    """

    label: str
    value: float | None
    said: str
    strong: bool = False


@dataclass(frozen=True)
class Panel:
    """Bars that begin at zero and share a scale.

    Attributes:
        title: what is compared.
        note: unit and direction, below the title.
        bars: from top to bottom.
    """

    title: str
    note: str
    bars: Sequence[Bar]

    def text(self) -> str:
        """Describe the panel in a sentence, for readers who cannot see it."""
        return f"{self.title} ({self.note}): {'; '.join(f'{bar.label}: {bar.said}' for bar in self.bars)}."


def drawn(panels: Sequence[Panel], theme: str) -> str:
    """Draw panels, two per row if their texts fit, and return the text of the SVG file.

    Args:
        panels: if there are none, as where no row of a page is finished, the picture is empty.
        theme: a key of :data:`THEMES`.
    """
    fits = _PANEL / max([_PANEL, *map(_width, panels)])
    columns, scale = (2, fits) if fits >= _SMALLEST else (1, 1.0)
    width = _PANEL if columns == 2 else _WIDTH
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    heights = [_HEADING + _PITCH * max(len(panel.bars) for panel in row) for row in rows]
    height = sum(heights) + _GAP * max(0, len(rows) - 1)
    strong, weak = THEMES[theme][:2]
    title, note, label = (f"{size * scale:.3g}px" for size in (_TITLE, _NOTE, _LABEL))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"',
        f'  role="img" font-family="{escape(_FONT)}" fill="{strong}">',
        f"<title>{escape(' '.join(panel.text() for panel in panels))}</title>",
        "<style>",
        f".t {{ font-size: {title}; font-weight: 700 }}",
        f".n {{ font-size: {note}; fill: {weak} }}",
        f".l {{ font-size: {label} }}",
        f".v {{ font-size: {label}; font-weight: 700; text-anchor: end }}",
        "</style>",
    ]
    top = 0
    for row, tall in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            lines += _panel(panel, column * (_PANEL + _GAP), top, width, THEMES[theme])
        top += tall + _GAP
    return "\n".join([*lines, "</svg>"]) + "\n"


def _width(panel: Panel) -> float:
    """Return how wide a panel's texts are in a wide font, with a space of one letter's height before values."""
    lines = [_wide(bar.label, _LABEL) + _LABEL + _wide(bar.said, _LABEL * _BOLD) for bar in panel.bars]
    return max(_wide(panel.title, _TITLE * _BOLD), _wide(panel.note, _NOTE), *lines)


def _wide(text: str, size: float) -> float:
    return size * sum(_WIDTHS.get(letter, _OTHERS) for letter in text)


def _panel(panel: Panel, left: float, top: float, width: float, colours: Sequence[str]) -> Iterator[str]:
    *_, ground, plain, about = colours
    right, longest = left + width, max((bar.value or 0.0 for bar in panel.bars), default=0.0) or 1.0
    yield f'<text class="t" x="{left:g}" y="{top + 19:g}">{escape(panel.title)}</text>'
    yield f'<text class="n" x="{left:g}" y="{top + 41:g}">{escape(panel.note)}</text>'
    for at, bar in enumerate(panel.bars):
        y = top + _HEADING + at * _PITCH
        yield f'<text class="l" x="{left:g}" y="{y + 17:g}">{escape(bar.label)}</text>'
        yield f'<text class="v" x="{right:g}" y="{y + 17:g}">{escape(bar.said)}</text>'
        yield f'<rect x="{left:g}" y="{y + 25:g}" width="{width:g}" height="{_THICK}" rx="3" fill="{ground}"/>'
        if bar.value:
            long = max(2.0, width * bar.value / longest)
            colour = about if bar.strong else plain
            yield f'<rect x="{left:g}" y="{y + 25:g}" width="{long:.1f}" height="{_THICK}" rx="3" fill="{colour}"/>'


def write(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels in every theme, to ``path`` with ``-light.svg`` and ``-dark.svg`` appended."""
    for theme in THEMES:
        write_text(path.with_name(f"{path.name}-{theme}.svg"), drawn(panels, theme))


def embedded(panels: Sequence[Panel], place: str) -> str:
    """Return a line for a page of the documentation that shows the picture in the reader's theme.

    Args:
        panels: the panels of the picture.
        place: the path given to :func:`write`, relative to the page.
    """
    alt = " ".join(panel.text() for panel in panels).replace("[", "(").replace("]", ")")
    alts = {theme: alt if theme == "light" else "The same for a dark page." for theme in THEMES}
    return " ".join(f"![{alts[theme]}]({place}-{theme}.svg#only-{theme})" for theme in THEMES)
