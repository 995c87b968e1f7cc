"""``narrowband codecs``."""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated

import tyro

from narrowband.cli.exits import DONE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from narrowband.codecs import Codec

__all__ = ["Codecs", "example"]

#: Shape of the tensor whose payload size is printed.
_SHAPE = (5000, 5000)

#: Example value for a key that has no default.
_EXAMPLE_VALUE = 0.001


def example(kind: type[Codec]) -> Codec:
    """Make a codec of this kind with its defaults, and with an example value for keys that have none."""
    required = [f.name for f in fields(kind) if f.default is MISSING]  # type: ignore[arg-type]
    return kind(**dict.fromkeys(required, _EXAMPLE_VALUE))


@dataclass(frozen=True)
class Codecs:
    """List every codec, feedback and method: what it does, its keys with their defaults, and what it costs.

    A spec string is ``name[:key=value,…][+feedback]``. It is the same in code, on the command line and in checkpoints.

    Examples:
      narrowband codecs
      narrowband codecs topk +ef
      python -c "import narrowband as nb; print(nb.codec('qsgd:bits=2').payload_nbytes(1_000_000))"
    """

    names: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[NAME …]")] = ()
    """Only these, and what each of their keys means: topk, +ef, or a whole spec."""

    def __call__(self, console: Console) -> int:
        from narrowband import codecs, feedback

        if self.names:
            self._explain(console)
            return DONE
        table = _table(f"Codecs, and bits per element of a {_SHAPE[0]:,} × {_SHAPE[1]:,} float32 matrix", "bits")
        for kind in codecs.available().values():
            codec = example(kind)
            table.add_row(_named(str(codec), kind), _bits(codec), _summary(kind))
        behind = _table("Feedback, written behind a codec: what is done about what it loses")
        for name, kept in feedback.available().items():
            behind.add_row(_named(f"+{name}", kept), _summary(kept))
        methods = _table("Methods, which bring their codec and their feedback along", "bits")
        for method_class in feedback.methods().values():
            method = method_class()
            methods.add_row(_named(str(method), method_class), _bits(method.codec), _summary(method_class))
        console.print(table, "", behind, "", methods, sep="\n")
        return DONE

    def _explain(self, console: Console) -> None:
        from narrowband import codecs, feedback

        behind = {f"+{name}": kind for name, kind in feedback.available().items()}
        kinds: dict[str, type] = {**codecs.available(), **behind, **feedback.methods()}
        asked = [name for text in self.names for name in re.findall(r"(?:^|\+)[^:+]+", text)]
        for name in asked:
            if name not in kinds:
                close = get_close_matches(name, kinds, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"unknown codec or feedback {name!r}{hint}; there are: {', '.join(kinds)}")
        for name in dict.fromkeys(asked):
            console.print(_named(name, kinds[name]), _told(kinds[name], console.width), "", sep="\n", highlight=False)


def _table(title: str, *numbers: str) -> Table:
    from rich.table import Column

    from narrowband.report.narrow import FittingTable

    return FittingTable(
        Column("example, keys and defaults", no_wrap=True),
        *(Column(number, justify="right") for number in numbers),
        Column("what it does", overflow="fold"),
        title=title,
        title_justify="left",
        show_lines=True,
    )


def _named(text: str, kind: type) -> str:
    from rich.markup import escape

    return "\n".join([f"[bold]{escape(text)}", *_keys(kind)])


def _bits(codec: Codec) -> str:
    return f"{codec.payload_nbytes(_SHAPE) * 8 / math.prod(_SHAPE):.3g}" if codec.fixed_size else "by data"


def _summary(kind: type) -> str:
    from rich.markup import escape

    return escape((kind.__doc__ or "").strip().splitlines()[0].replace("``", "`"))


def _keys(kind: type) -> list[str]:
    shown = []
    for f in fields(kind):
        if not f.init:
            continue
        default = str(f.default).lower() if isinstance(f.default, bool) else str(f.default) or '""'
        shown.append(f"  {f.name} (required)" if f.default is MISSING else f"  {f.name}={default}")
    return shown


def _told(kind: type, width: int) -> str:
    """Return what a class is for, and the meaning of its keys, for a terminal of this width."""
    from rich.markup import escape

    text = re.sub(r":\w+:`[~\w.]*?(\w+)`", r"`\1`", inspect.cleandoc(kind.__doc__ or "").replace("``", "`"))
    first, *others = text.split("\n\n")
    keys = "\n\n".join(other.removeprefix("Args:") for other in others if other.startswith("Args:"))
    found = [textwrap.fill(" ".join(first.split()), width)]
    found += [
        textwrap.fill(" ".join(key.split()), width, initial_indent="  ", subsequent_indent=" " * 6)
        for key in re.split(r"\n(?= {4}\w+: )", keys)[1:]
    ]
    return escape("\n".join(found))
