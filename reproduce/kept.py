"""Results of rows that take long: each is kept in a file of its own as soon as it is there, so that a run can go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from narrowband.report.record import machine, read_json, write_json

__all__ = ["Kept"]


class Kept:
    """The results of rows.

    Args:
        files: the file of each row.
        fields: some that the result of every row has.
        resume: whether the results of an earlier run count.
        on_event: called with each event, and first with one for each result of an earlier run.

    Attributes:
        found: index of a row → its result, as far as it is there.
    """

    def __init__(
        self,
        files: Sequence[Path],
        fields: tuple[str, ...],
        *,
        resume: bool,
        on_event: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._files, self._on_event, self._cpu = files, on_event or (lambda _: None), machine()["cpu"]
        self.found: dict[int, dict[str, Any]] = {}
        for number, file in enumerate(files):
            if resume and file.exists():
                self.found[number] = read_json(file, fields)
                self._on_event({"event": "row", "row": number, "result": self.found[number]})

    @property
    def missing(self) -> list[int]:
        """Indices of the rows whose results are not there."""
        return [number for number in range(len(self._files)) if number not in self.found]

    def note(self, event: dict[str, Any]) -> None:
        """Note an event of a run. That of a finished row, ``row``, has its result; it is kept, with this CPU's name."""
        if event["event"] == "row":
            self.found[event["row"]] = event["result"] = event["result"] | {"cpu": self._cpu}
            write_json(self._files[event["row"]], event["result"])
        self._on_event(event)
