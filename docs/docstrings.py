"""Show reStructuredText's few habits in the docstrings as Markdown: roles, literal blocks, simple tables.

The source reads well in an editor and in ``help()``; this is what the pages need on top.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`")
#: Google's section is the plural; the singular would be shown as a note, in which prompts are quotations.
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)
RULE = r"=+(?: +=+)+"
TABLE = re.compile(rf"^({RULE}\n(?:.+\n)+?{RULE}\n(?:.+\n)+?{RULE})$", re.MULTILINE)
#: Code, indented or between backticks, or (captured) a power such as 2**l, which Markdown would take for bold.
POWER = re.compile(r"^    .*$|`+[^`]+`+|(?<=\w)(\*\*)(?=[\w(−-])", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites every docstring when it is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Griffe calls this for every module, class, function and attribute."""
        if obj.docstring:
            parts = TABLE.split(obj.docstring.value)
            parts[0::2] = map(prose, parts[0::2])
            parts[1::2] = [f"```text\n{table}\n```" for table in parts[1::2]]
            obj.docstring.value = "".join(parts)


def prose(text: str) -> str:
    """Text outside tables, as Markdown."""
    text = LITERAL_BLOCK.sub(":", EXAMPLE.sub("Examples:", ROLE.sub(r"`\1`", text)))
    return POWER.sub(lambda match: r"\*\*" if match[1] else match[0], text)
