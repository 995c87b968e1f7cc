"""Makes the pages that ``gallery.md`` links to, from the records in the repository, when the site is built.

Run by itself (``python docs/gallery.py``), it takes the picture of a run's page with Chromium instead.

Such a page holds the program that draws its charts, nine tenths of a megabyte, so they are in the site and not in the
repository. They are what ``narrowband report FILE.json`` and ``python -m reproduce.…`` write. Nothing is measured here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

DOCS = Path(__file__).parent
#: Where a record may be, by the name of its page.
PLACES = ("benchmarks/results/{}.json", "benchmarks/results/{}/summary.json", "reproduce/results/{}/summary.json")
#: The run of which there is a page, too, and a picture of that.
RUN = "run"
RUN_FILE = DOCS.parent / "benchmarks" / "results" / f"{RUN}.jsonl"
PICTURE = DOCS / "pictures" / "report-dark.png"
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
    from narrowband.report.record_page import record_page
    from narrowband.report.recorder import read_run
    from narrowband.report.run_page import run_page
    from reproduce.html import html_of

    if name == RUN:
        return run_page(read_run(RUN_FILE), RUN)
    path, record = record_of(name)
    return html_of(record, name) if path.parts[0] == "reproduce" else record_page(record, name)


def on_files(files_of_site: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the pages."""
    from mkdocs.structure.files import File

    if (root := str(DOCS.parent)) not in sys.path:
        sys.path.insert(0, root)  # reproduce is not installed
    for name in names():
        files_of_site.append(File.generated(config, f"gallery/{name}.html", content=page_of(name)))
    return files_of_site


# ---- the picture -----------------------------------------------------------------------------------------------------

#: Charts that are on it, and its width and height in pixels.
_SHOWN = ("policy", "residuals")
_SIZE = (1000, 900)
_HIDE = """<style>
  .chart:not(SHOWN), :is(h2, p):has(+ .chart:not(SHOWN)), h2:has(+ p + .chart:not(SHOWN)), details { display: none; }
</style>"""


def take_picture(path: Path) -> None:
    """Write a picture of the run's page, with some of its charts, as Chromium shows it to who prefers dark pages.

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    browser = next((place for place in found if place is not None), None)
    if browser is None:
        raise FileNotFoundError("Chromium takes the picture: install it (Debian's package is called chromium)")
    hide = _HIDE.replace("SHOWN", ", ".join(f"#{name}" for name in _SHOWN))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(page_of(RUN).replace("</head>", f"{hide}</head>", 1), encoding="utf-8")
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000",
             "--force-dark-mode", "--blink-settings=preferredColorScheme=0", f"--user-data-dir={folder}/browser",
             f"--window-size={_SIZE[0]},{_SIZE[1]}", f"--screenshot={path}", page.as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip


if __name__ == "__main__":
    take_picture(PICTURE)
    print(f"written: {PICTURE}")  # noqa: T201  a script's word
