"""Describe the link between machines, as users write it, and the ranks that train over it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from narrowband.lab.config import parse_delay, read_rate
from narrowband.units import counted, format_rate, format_seconds

__all__ = ["PAYLOAD_SHARE", "Cluster", "Host", "Link", "up_and_down"]

#: The share of a link's rate that is left for payload: of the 1,514 bytes of an Ethernet frame, 66 are headers of
#: Ethernet, IPv4 and TCP with its timestamp.
PAYLOAD_SHARE = (1514 - 66) / 1514


@dataclass(frozen=True)
class Host:
    """The measured cost of messages in this machine's software, whatever the link.

    Attributes:
        hop_s: seconds of a message of a few bytes from one rank to the next.
        cpu_s_per_byte: seconds of a core to send a byte and receive one.
    """

    hop_s: float = 0.0
    cpu_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Link:
    """The link that connects a machine with the others.

    Attributes:
        up: bits per second at which a machine sends.
        down: bits per second at which it receives.
        delay_s: seconds, one way.

    Example:
        >>> from narrowband.planning import Link
        >>> str(Link.of("200mbit", "20ms"))
        '200 Mbit/s, 20 ms one way'
    """

    up: float
    down: float
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.up > 0 and self.down > 0 and math.isfinite(self.delay_s) and self.delay_s >= 0):
            raise ValueError(
                f"up={self.up}, down={self.down}, delay_s={self.delay_s}: expected rates above 0 and a finite delay, "
                "0 or more"
            )

    @classmethod
    def of(cls, rate: str, delay: str | None = None) -> Link:
        """Parse what users write: ``200mbit``, or ``20mbit/100mbit`` where machines send slower than they receive.

        Raises:
            ValueError: the text is no rate or delay, or a rate is zero.
        """
        rates = [read_rate(each) for each in up_and_down(rate)]
        if not all(rates):
            raise ValueError(
                f"a link with rate {rate!r} carries nothing; expected a rate such as 200mbit or 20mbit/100mbit"
            )
        return cls(rates[0], rates[1], 0.0 if delay is None else parse_delay(delay))

    @property
    def rate(self) -> float:
        """Bits per second at which every machine sends and receives at the same time, as in a collective."""
        return min(self.up, self.down)

    def __str__(self) -> str:
        rates = format_rate(self.up)
        if self.down != self.up:
            rates += f" up and {format_rate(self.down)} down"
        return rates + (f", {format_seconds(self.delay_s)} one way" if self.delay_s else "")


def up_and_down(rate: str) -> tuple[str, str]:
    """Split a rate, as users write it, into those of sending and receiving.

    Example:
        >>> up_and_down("20mbit/100mbit"), up_and_down("200 Mbit/s")
        (('20mbit', '100mbit'), ('200 Mbit', '200 Mbit'))
    """
    up, slash, down = rate.replace("/s", "").partition("/")
    return up, down if slash else up


@dataclass(frozen=True)
class Cluster:
    """The machines and ranks that train together.

    Attributes:
        nodes: number of machines.
        per_node: ranks on each machine, which share its link.
    """

    nodes: int
    per_node: int = 1

    def __post_init__(self) -> None:
        for name in ("nodes", "per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def ranks(self) -> int:
        """The number of ranks on all machines."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        if self.per_node == 1:
            return counted(self.nodes, "rank")
        return f"{counted(self.nodes, 'machine')} of {self.per_node} ranks"
