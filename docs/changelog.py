"""Shows CHANGELOG.md of the repository as a page of the site."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page


def on_page_markdown(_: str, /, *, page: Page, config: MkDocsConfig, **_others: object) -> str | None:
    """Put the file in the place of what the page says; its links start at the repository and not at ``docs``."""
    if page.file.src_uri != "changelog.md":
        return None
    text = (Path(config.config_file_path).parent / "CHANGELOG.md").read_text(encoding="utf-8")
    return text.replace("](docs/", "](")
