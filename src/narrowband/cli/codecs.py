"""``narrowband codecs``."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING

from narrowband.cli.exits import DONE

if TYPE_CHECKING:
    from rich.console import Console

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
      python -c "import narrowband as nb; print(nb.codec('qsgd:bits=2').payload_nbytes(1_000_000))"
    """

    def __call__(self, console: Console) -> int:
        from rich.markup import escape

        from narrowband import codecs, feedback
        from narrowband.report.narrow import FittingTable

        table = FittingTable(
            title=f"Codecs, and bits per element of a {_SHAPE[0]:,} × {_SHAPE[1]:,} float32 matrix",
            title_justify="left",
            show_lines=True,
        )
        table.add_column("example, keys and defaults", no_wrap=True)
        table.add_column("bits", justify="right")
        table.add_column("what it does", overflow="fold")
        for kind in codecs.available().values():
            codec = example(kind)
            bits = f"{codec.payload_nbytes(_SHAPE) * 8 / math.prod(_SHAPE):.3g}" if kind.fixed_size else "by data"
            table.add_row("\n".join([f"[bold]{escape(str(codec))}", *_keys(kind)]), bits, escape(_summary(kind)))
        console.print(table)
        console.print("Behind a '+', what is done about what compression loses:")
        for name, kept in feedback.available().items():
            console.print(f"  [bold]+{name}[/bold]  {escape(_summary(kept))}", highlight=False)
        console.print("Methods, which bring their codec and their feedback along:")
        for method_class in feedback.methods().values():
            method = method_class()
            bits = f"{method.codec.payload_nbytes(_SHAPE) * 8 / math.prod(_SHAPE):.3g} bits"
            console.print(
                f"  [bold]{escape(str(method))}[/bold]  {bits}. {escape(_summary(method_class))}", highlight=False
            )
            console.print("   " + ", ".join(line.strip() for line in _keys(method_class)), highlight=False)
        return DONE


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0].replace("``", "`")


def _keys(kind: type) -> list[str]:
    shown = []
    for f in fields(kind):
        if not f.init:
            continue
        default = str(f.default).lower() if isinstance(f.default, bool) else str(f.default)
        shown.append(f"  {f.name} (required)" if f.default is MISSING else f"  {f.name}={default}")
    return shown
