"""Makes the pages that ``gallery.md`` links to, from the records in the repository, when the site is built.

Such a page holds the program that draws its charts, nine tenths of a megabyte, so they are in the site and not in the
repository. They are what ``narrowband report FILE.json`` and ``python -m reproduce.…`` write. Nothing is measured here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

DOCS = Path(__file__).parent
#: Where a record may be, by the name of its page.
PLACES = ("benchmarks/results/{}.json", "benchmarks/results/{}/summary.json", "reproduce/results/{}/summary.json")
LINK = re.compile(r"\]\(gallery/([^)#/]+)\.html\)")


def names() -> list[str]:
    """Of the pages that the gallery links to, in its order."""
    return list(dict.fromkeys(LINK.findall((DOCS / "gallery.md").read_text(encoding="utf-8"))))


def record_of(name: str) -> tuple[Path, Mapping[str, Any]]:
    """Where the record behind a page is, from the repository's root, and what it says.

    Raises:
        FileNotFoundError: there is none of this name.
    """
    for place in PLACES:
        path = Path(place.format(name))
        if (DOCS.parent / path).exists():
            return path, json.loads((DOCS.parent / path).read_text(encoding="utf-8"))
    raise FileNotFoundError(f"gallery.md links to gallery/{name}.html, and there is no record of that name")


def page_of(name: str) -> str:
    """The page that the command which wrote a record makes of it."""
    from narrowband.report.page import record_page
    from reproduce.html import html_of

    path, record = record_of(name)
    return html_of(record, name) if path.parts[0] == "reproduce" else record_page(record, name)


def on_files(files_of_site: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the pages."""
    if (root := str(DOCS.parent)) not in sys.path:
        sys.path.insert(0, root)  # reproduce is not installed
    for name in names():
        files_of_site.append(File.generated(config, f"gallery/{name}.html", content=page_of(name)))
    return files_of_site
