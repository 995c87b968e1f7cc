"""Describe a lab: the number of ranks, and the link of each machine.

Quantities are written as in ``tc``: ``200mbit``, ``5ms``, ``0.1%``. They are checked when a :class:`LabConfig` is
created, so a typing error is reported before any namespace exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from narrowband.lab.supervisor import Link, Shape

__all__ = ["MAX_NODES", "LabConfig", "parse_delay", "parse_loss", "parse_rate", "read_rate"]

MAX_NODES = 256  # the supervisor keeps three descriptors per rank, and the usual limit is 1,024 descriptors

_RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_DELAY_UNITS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1)}
_MIN_RATE = 8_000  # bit/s: below this one full-size packet takes longer than TCP's first retransmission time-out
_MAX_RATE = 32 * 10**9  # bit/s: tbf's rate field holds 32 bits of bytes per second
_MAX_DELAY = 10.0  # seconds

_BURST_SECONDS = 0.002
_BURST_PACKETS = 8
_QUEUE_SECONDS = 0.1
_QUEUE_BYTES = 256 * 1024
_GSO_BYTES = 65536  # the kernel's own limit for one IPv4 super-packet
_NETEM_PACKETS = 1000
_ETHERNET_HEADER = 14
_HEADERS = 66  # Ethernet, IPv4 and TCP with a timestamp


def read_rate(text: str) -> int:
    """Parse bits per second, without limits: a number and ``bit``, ``kbit``, ``mbit`` or ``gbit``.

    Raises:
        ValueError: not of this form.
    """
    expected = "a number and bit, kbit, mbit or gbit per second, e.g. 200mbit, 1gbit, 2.5gbit"
    number, unit = _quantity("rate", text, r"([kmg]?bit)(?:/s)?", expected)
    return round(number * _RATE_UNITS[unit])


def parse_rate(text: str) -> int:
    """Parse bits per second: a number and ``bit``, ``kbit``, ``mbit`` or ``gbit`` (decimal units).

    Raises:
        ValueError: not of this form, or outside 8 kbit to 32 gbit.

    Example:
        >>> parse_rate("200mbit"), parse_rate("1.5 Gbit/s")
        (200000000, 1500000000)
    """
    rate = read_rate(text)
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise ValueError(f"rate {text!r} is outside what can be emulated, 8kbit to 32gbit; no rate means unshaped")
    return rate


def parse_delay(text: str) -> float:
    """Parse a delay, in seconds: a number and ``us``, ``ms`` or ``s``.

    Raises:
        ValueError: not of this form, or above 10 s.

    Example:
        >>> parse_delay("5ms")
        0.005
    """
    number, unit = _quantity("delay", text, r"(us|ms|s)", "a number and us, ms or s, e.g. 500us, 5ms, 0.1s")
    delay = float(number * _DELAY_UNITS[unit])
    if delay > _MAX_DELAY:
        raise ValueError(f"delay {text!r} is more than 10s; give the one-way delay between two ranks, e.g. 5ms")
    return delay


def parse_loss(text: str) -> float:
    """Parse the probability that a packet is lost, from a percentage.

    Raises:
        ValueError: not a percentage, or 100 % and more.

    Example:
        >>> parse_loss("0.1%")
        0.001
    """
    number, _ = _quantity("loss", text, r"(%)", "a percentage below 100, e.g. 0.1%, 1%")
    if number >= 100:
        raise ValueError(f"loss {text!r} lets no packet through; give a percentage below 100, e.g. 0.1%")
    return float(number / 100)


def _quantity(name: str, text: str, unit: str, expected: str) -> tuple[Decimal, str]:
    if not isinstance(text, str):
        raise TypeError(f"{name} is {text!r}, of type {type(text).__name__}; expected text: {expected}")
    match = re.fullmatch(rf"\s*(\d{{1,20}}(?:\.\d{{1,20}})?|\.\d{{1,20}})\s*{unit}\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise ValueError(f"{name} {text!r} cannot be read; expected {expected}")
    return Decimal(match[1]), match[2].lower()


@dataclass(frozen=True)
class LabConfig:
    """A lab: machines on one switch, each behind a link of its own, with one rank or several.

    Attributes:
        nodes: Number of machines.
        per_node: Ranks on each machine. They share its link, but reach each other without it. At most 256 ranks in all.
        rate: Rate of every link in each of its two directions, e.g. ``"200mbit"``, or of each machine's, e.g.
            ``"200mbit,1gbit"``; None leaves the links unshaped.
        up: Rate at which machines send, if it differs from that at which they receive; written as ``rate``.
        down: Rate at which machines receive, likewise.
        delay: One-way delay between two ranks, e.g. ``"5ms"`` (a round trip takes twice that).
        loss: Share of packets lost between two ranks, e.g. ``"0.1%"``. Loss is drawn for each packet of ``mtu`` bytes,
            so TCP's super-packets are turned off and the emulation costs more CPU time.
        timeout_s: Seconds after which all ranks are ended and the exit code is 124; None waits for ever.
        mtu: Largest IP packet on a link, in bytes.
        grace_s: Seconds between asking the ranks to end and killing them.

    Raises:
        ValueError, TypeError: a field that is out of range or cannot be read.
    """

    nodes: int = 4
    per_node: int = 1
    rate: str | None = "200mbit"
    up: str | None = None
    down: str | None = None
    delay: str | None = None
    loss: str | None = None
    timeout_s: float | None = None
    mtu: int = 1500
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        for name, low, high in (("nodes", 1, MAX_NODES), ("per_node", 1, MAX_NODES), ("mtu", 576, 65535)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}, of type {type(value).__name__}; expected an int")
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; expected {low} to {high}")
        if self.ranks > MAX_NODES:
            raise ValueError(
                f"nodes={self.nodes} with per_node={self.per_node} make {self.ranks} ranks, more than {MAX_NODES}"
            )
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {self.timeout_s}; expected seconds above 0; leave it out to wait for ever")
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(f"grace_s is {self.grace_s}; expected seconds, 0 or more")
        self.links()

    @property
    def ranks(self) -> int:
        """The number of ranks on all machines."""
        return self.nodes * self.per_node

    def links(self) -> list[Link]:
        """Every machine's link in kernel terms.

        Raises:
            ValueError: a rate cannot be read, or their number is neither one nor the number of machines.
        """
        up, down = (self._rates(text) for text in (self.up or self.rate, self.down or self.rate))
        return [Link(self.shape(a), self.shape(b)) for a, b in zip(up, down, strict=True)]

    def _rates(self, text: str | None) -> list[str | None]:
        each: list[str | None] = [text]
        if isinstance(text, str):  # parse_rate refuses other types
            each = [part.strip() for part in text.split(",")]
        if len(each) not in (1, self.nodes):
            raise ValueError(
                f"{text!r} has {len(each)} rates for {self.nodes} machines; give one for all, or one for each"
            )
        return each * self.nodes if len(each) == 1 else each

    def shape(self, text: str | None) -> Shape:
        """Return one direction of a link of this rate."""
        rate = parse_rate(text) // 8 if text is not None else 0
        delay = parse_delay(self.delay) if self.delay is not None else 0.0
        loss = parse_loss(self.loss) if self.loss is not None else 0.0
        burst = max(round(rate * _BURST_SECONDS), _BURST_PACKETS * (self.mtu + _ETHERNET_HEADER))
        # tbf counts a super-packet with the headers that each of its segments will carry.
        gso = min(_GSO_BYTES, (burst - _HEADERS) * (self.mtu - _HEADERS) // self.mtu) if rate else _GSO_BYTES
        return Shape(
            rate=rate,
            burst=burst,
            queue=max(round(rate * _QUEUE_SECONDS), _QUEUE_BYTES) + burst,
            gso=gso,
            gso_segments=1 if loss else 65535,
            delay_us=round(delay * 1e6),
            loss_percent=loss * 100,
            # All packets in flight wait in netem: room for twice the bandwidth-delay product, in packets.
            netem_packets=_NETEM_PACKETS + round(2 * (rate or _MAX_RATE // 8) * delay / self.mtu),
        )
