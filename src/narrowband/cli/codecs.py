"""``narrowband codecs``."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING

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
      python -c "import narrowband as nb; help(nb.codec('topk'))"  # what its keys mean
      python -c "import narrowband as nb; print(nb.codec('qsgd:bits=2').payload_nbytes(1_000_000))"
    """

    def __call__(self, console: Console) -> int:
        from narrowband import codecs, feedback

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
