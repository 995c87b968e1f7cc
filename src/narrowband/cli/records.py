"""The record of a benchmark: the file of ``--json``, which is written while the benchmark measures.

A record is never overwritten by another measurement. If the file has rows of the same configuration, code, versions,
machine and environment, the same command goes on from them, if the benchmark can. Otherwise the file is renamed before
the first row is written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.cli.exits import check_output
from narrowband.errors import UnsupportedError
from narrowband.units import counted

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console
    from typing_extensions import Self

__all__ = ["Record", "written_first"]

_Row = dict[str, Any]

#: What has to be the same for a command to go on from earlier rows, in words.
_SAME = {
    "config": "other options",
    "sources": "other code",
    "versions": "other versions of Python or of packages",
    "machine": "another machine",
    "environment": "other environment variables",
}


@contextlib.contextmanager
def written_first(write: Callable[[], object]) -> Iterator[bool]:
    """Write a result, and then run the block, which prints it. Neither loses the other: what a closed pipe keeps from
    being printed is written by then, and an error of writing is raised when the block has printed.

    Yields:
        Whether the result is written.

    Example:
        >>> from narrowband.files import write_text
        >>> with written_first(lambda: write_text(Path("runs/found.json"), "{}")) as written:
        ...     print(written)
        True
    """
    refused: OSError | None = None
    try:
        write()
    except OSError as error:
        refused = error
    yield refused is None
    if refused is not None:
        raise refused


class Record:
    """A benchmark's record. As a context it says, if an error or Ctrl-C ends the block, where the rows so far are.

    Args:
        path: of the file; None: nothing is written.
        config: the options that decide what is measured.
        console: for messages.
        reads: files that the command reads, which must not be overwritten.
        goes_on: whether the benchmark can go on from earlier rows.
        of: the name that the rows have in the file; only of ``rows`` a page is made.
        about: further fields of the file.

    Attributes:
        known: the rows of an earlier run to go on from.

    Raises:
        ValueError: the file cannot be written, or holds something else than such a record.
    """

    def __init__(
        self,
        path: Path | None,
        config: Mapping[str, Any],
        console: Console,
        *,
        reads: Iterable[Path | str] = (),
        goes_on: bool = True,
        of: str = "rows",
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.known: list[_Row] = []
        self._path, self._console, self._goes_on, self._of = path, console, goes_on, of
        self._written: dict[str, str] = {}  # the messages about what was written: sentence → style
        self._error: OSError | None = None
        self._is_kept = self._is_finished = False
        self._aside: Path | None = None  # the name that the file of another measurement gets
        if path is None:
            return
        self._page = _page_of(path) if of == "rows" else None
        check_output(path, self._page, reads=reads)
        from narrowband.report.record import provenance

        self._fields = provenance(config.get("seed")) | {"config": dict(config)} | dict(about or {})
        if path.exists() and path.stat().st_size:
            self._look_at_earlier(path)

    def _look_at_earlier(self, path: Path) -> None:
        from narrowband.report.record import read_json

        before = read_json(path, ("config", self._of), remedy="give another name, or delete the file")
        own = json.loads(json.dumps({name: self._fields[name] for name in _SAME}))  # lists instead of tuples
        other = [words for name, words in _SAME.items() if before.get(name) != own[name]]
        if self._goes_on and not other:
            self.known = list(before[self._of])
            rows = counted(len(self.known), "row")
            said = f"{path} has {rows}; finished ones are not measured again. Delete the file to measure all again"
            self._print(said, "dim")
        else:
            self._aside = _free_name(Path(os.path.realpath(path)))
            what = f"was measured with {', '.join(other)}" if other else "is of an earlier run"
            said = f"{path} {what}: this run starts from the beginning, and renames that file to {self._aside.name}"
            self._print(said, "yellow")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._is_kept and not self._is_finished:
            then = "; the same command goes on from there" if self._goes_on else ""
            self._print(f"What was measured so far is in {self._path}{then}.", "yellow")

    def follow(
        self, rows: Iterable[_Row], names: Sequence[str], show: Callable[[str], object] = lambda _: None
    ) -> Iterator[_Row]:
        """Yield rows as they are measured. After each, keep all so far, and known rows whose turn comes later.

        Args:
            rows: an iterator that measures.
            names: the fields that tell rows apart.
            show: called with the first of these when a row is kept.
        """
        done: list[_Row] = []
        later = self.known
        for row in rows:
            done.append(row)
            later = [other for other in later if any(other.get(name) != row.get(name) for name in names)]
            self.keep([*done, *later])
            show(str(row[names[0]]))
            yield row

    def keep(self, rows: list[_Row]) -> None:
        """Write the rows so far, so that Ctrl-C or a time-out loses nothing. If the disk is full, measuring goes on."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._write(self._path, {self._of: rows})
                self._is_kept = True

    def finish(self, rows: list[_Row], **more: Any) -> None:
        """Write all rows and ``more``, and make a page of them.

        Call this before anything is printed, so that a closed pipe or a full device on standard output does not lose
        the measurement. A full disk does not lose it either: :meth:`say` raises the error after rows were printed.
        """
        self._is_finished = True
        if self._path is None:
            return
        try:
            content = self._write(self._path, {self._of: rows} | more)
        except OSError as error:
            self._error = error
            return
        self._written[f"written to {self._path}"] = "dim"
        if self._page is None:
            return
        from narrowband.files import write_text
        from narrowband.report.record_page import record_page

        try:
            write_text(self._page, record_page(content, self._path.stem))
        except (OSError, UnsupportedError) as error:  # the record is written, and matters more than its page
            self._written[f"no page of it: {error}"] = "yellow"
        else:
            self._written[f"a page of it: {self._page}"] = "dim"

    def say(self) -> None:
        """Print where the rows are.

        Raises:
            OSError: the file could not be written.
        """
        if self._error is not None:
            raise self._error
        for sentence, style in self._written.items():
            self._print(sentence, style)

    def _write(self, path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
        from narrowband.report.record import write_json

        content = {**self._fields, **found}
        if self._aside is not None:
            there = Path(os.path.realpath(path))
            with contextlib.suppress(FileNotFoundError):  # it was renamed or deleted while this run measured
                there.rename(_free_name(there) if self._aside.exists() else self._aside)
            self._aside = None
        write_json(path, content)
        return content

    def _print(self, sentence: str, style: str) -> None:
        self._console.print(sentence, style=style, markup=False, highlight=False)


def _page_of(path: Path) -> Path | None:
    """Return the path of the page that is made of a record; None if pages cannot be made here.

    Raises:
        ValueError: it would be that of the record.
    """
    from narrowband.report.page import can_make_pages

    page = path.with_suffix(".html") if can_make_pages() else None
    if page == path:
        raise ValueError(
            f"--json {path} is also the name of the page that is made from it; choose a name that ends in .json"
        )
    return page


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.stem}.old{n or ''}{path.suffix}") for n in itertools.count())
    return next(name for name in names if not name.exists())
