"""Puts Mermaid into the built site, from the package mermaidx, so that pictures are drawn without another host."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig


def on_files(files_of_site: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the script that pages with a picture load."""
    script = files("mermaidx") / "assets" / "mermaid.js"
    files_of_site.append(File.generated(config, "javascripts/mermaid.js", abs_src_path=str(script)))
    return files_of_site
