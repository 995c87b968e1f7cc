"""Run what a page of the documentation shows, as a reader would: in order, on real ranks, in a folder of its own.

A page's ``python`` blocks share one namespace, that of a script called ``train.py``. A block with another title, as in
```` ```python title="model.py" ````, is a file of that name in the folder, which the script may import or read. A block
that stands indented, in a collapsible ``??? example``, is the page's *script*: what a reader has before its lines.

HTML comments in a page say what its text says in words. Each stands on a line of its own, ahead of a block:

``<!-- run: 2 ranks -->``
    A new run begins here: new process groups and an empty namespace, in which the scripts of the page come first.
    Files of earlier runs are there. A page without this comment is one run of 2 ranks.
``<!-- not run: reason -->``
    The next block is only compiled. There should be almost none.
``<!-- printed: by rank 0 -->``
    The next block is what a run of the page prints.
README.md and docs/index.md show lines without the script around them; readme.py, beside this file, stands for it. There
a block that wraps the model begins a run.

In a block, ``# prints 42`` behind a statement says what rank 0 prints there.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import socket
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import run_ranks

__all__ = ["LANGUAGES", "ROOT", "SCRIPT", "Block", "Page", "read", "run"]

ROOT = Path(__file__).parent.parent.parent
#: What blocks are written in. One in none of these would be checked by nobody.
LANGUAGES = ("python", "diff", "console", "toml", "text", "mermaid")
#: A reader's own training script, in pages that are about any script.
SCRIPT = "train.py"
#: Pages that show lines without the script around them.
EXCERPTS = (ROOT / "README.md", ROOT / "docs" / "index.md")

_README = Path(__file__).parent / "readme.py"
_FENCE = re.compile(r"(?P<indent> *)(?P<ticks>```+) *(?P<language>[^ `]*)(?P<rest>[^`]*)")
_TITLE = re.compile(r'title="([^"]+)"')
_COMMENT = re.compile(r" *<!-- *(run|not run|printed): *(.*?) *-->")
_RANKS = re.compile(r"([1-9]) ranks?")
_PRINTS = re.compile(r".*\S +# prints (.+)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of its first line."""

    language: str
    text: str
    line: int
    title: str = ""
    script: bool = False
    not_run: str = ""
    printed: bool = False

    @property
    def runs(self) -> bool:
        """Whether it is executed, and not a file that others import or read."""
        return self.language in ("python", "diff") and self.title in ("", SCRIPT) and not self.not_run

    @property
    def code(self) -> str:
        """What python runs: of a diff, what a reader has afterwards."""
        if self.language != "diff":
            return self.text
        return "".join("\n" if line[0] == "-" else line[1:] or "\n" for line in self.text.splitlines(keepends=True))


@dataclass(frozen=True)
class Page:
    """A page's blocks in order, and its runs: how many ranks, and which of the blocks. ``before``: after readme.py."""

    path: Path
    blocks: list[Block]
    runs: list[tuple[int, list[Block]]]
    before: bool = False

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return str(self.path.relative_to(ROOT)) if self.path.is_relative_to(ROOT) else self.path.name

    def imports(self, package: str) -> bool:
        """Whether its blocks import this package."""
        return any(re.search(rf"^(from|import) {package}\b", block.text, re.MULTILINE) for block in self.of("python"))

    def of(self, language: str) -> list[Block]:
        """Its blocks in one language."""
        return [block for block in self.blocks if block.language == language]


def read(path: Path) -> Page:
    """Take a page apart.

    Raises:
        ValueError: a fence that is never closed, or a comment of ours that says nothing.
    """
    blocks: list[Block] = []
    ranks, runs = 2, [(2, [])]
    before = path in EXCERPTS
    not_run, printed = "", False
    lines = iter(enumerate(path.read_text().splitlines(), start=1))
    for number, line in lines:
        comment, fence = _COMMENT.fullmatch(line), _FENCE.fullmatch(line)
        if comment:
            kind, said = comment.groups()
            if kind == "run":
                match = _RANKS.fullmatch(said)
                if match is None:
                    raise ValueError(f"{path}:{number}: 'run: {said}'; expected 'run: 2 ranks'")
                ranks = int(match[1])
                if not runs[-1][1]:
                    runs.pop()
                runs.append((ranks, []))
            elif kind == "printed":
                printed = True
            else:
                not_run = said
        if not fence:
            continue
        body: list[str] = []
        for _, inside in lines:
            if inside.strip() == fence["ticks"]:
                break
            body.append(inside)
        else:
            raise ValueError(f"{path}:{number}: this block has no end")
        title = _TITLE.search(fence["rest"])
        text = textwrap.dedent("\n".join(body)) + "\n"
        block = Block(
            fence["language"],
            text,
            number + 1,
            title[1] if title else "",
            script=bool(fence["indent"]),
            not_run=not_run,
            printed=printed,
        )
        not_run, printed = "", False
        blocks.append(block)
        if before and "DistributedDataParallel(model)" in block.text and runs[-1][1]:
            runs.append((ranks, []))
        if block.runs:
            runs[-1][1].append(block)
    scripts = [block for block in blocks if block.runs and block.script]
    runs = [(ranks, [*(s for s in scripts if s.line < own[0].line), *(b for b in own)]) for ranks, own in runs if own]
    return Page(path, blocks, runs, before)


def run(page: Page, folder: Path, *, timeout_s: float = 240.0) -> None:
    """Run a page in ``folder``.

    Raises:
        RankError: a block raised; the traceback names the page and the line.
        AssertionError: a block did not print what the page says.
    """
    for block in page.blocks:
        if block.title:
            (folder / block.title).write_text(block.text)
    for block in [*page.of("python"), *page.of("diff")]:
        compile(block.code, str(page.path), "exec")
    every: set[str] = set()
    before = [(str(_README), 1, _README.read_text())] if page.before else []
    for ranks, blocks in page.runs:
        sources = [*before, *((str(page.path), block.line, block.code) for block in blocks)]
        printed = run_ranks(_run_sources, ranks, str(folder), _free_port(), sources, timeout_s=timeout_s, group=False)[
            0
        ]
        every.update(printed.splitlines())
        for block in blocks:
            for line in block.text.splitlines():
                expected = _PRINTS.fullmatch(line)
                if expected:
                    assert expected[1] in printed.splitlines(), f"{page.name} says {line!r}, but printed:\n{printed}"
    for block in page.blocks:
        if block.printed:
            missing = sorted(set(block.text.splitlines()) - every)
            assert missing == [], f"{page.name}:{block.line} says {missing}, but printed: {sorted(every)}"


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _run_sources(rank: int, world_size: int, folder: str, port: int, sources: list[tuple[str, int, str]]) -> str:
    """What one rank of ``torchrun`` does with a script; returns what it printed."""
    here = os.getcwd()
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    for script in Path(folder).glob("*.py"):
        sys.modules.pop(script.stem, None)  # of another page, in this process that runs several
    printed = io.StringIO()
    names = {"__name__": "__main__"}
    try:
        with contextlib.redirect_stdout(printed):
            for path, line, text in sources:
                exec(compile("\n" * (line - 1) + text, path, "exec", dont_inherit=True), names)
        names.clear()
        gc.collect()  # handles end before the process group does
    finally:
        os.chdir(here)
        sys.path.remove(folder)
        for name in [name for name, module in sys.modules.items() if _lies_in(module, folder)]:
            del sys.modules[name]
        for name in environment:
            os.environ.pop(name, None)
    return printed.getvalue()


def _lies_in(module: object, folder: str) -> bool:
    return str(getattr(module, "__file__", None)).startswith(folder)
