"""Exchanges among real ranks, and cards that do not hear everything."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist

from narrowband.transport import multicast, probe
from narrowband.transport.membership import Membership
from narrowband.transport.multicast import Multicast
from narrowband.transport.sockets import MulticastSocket

ETHERNET = 1500


LIMIT_S = 240.0  # only what hangs takes this long
SHORT_S = 1.5  # after which a rank is lost that the test lets be lost (`Patient`)


def content(rank: int, nbytes: int, turn: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def places(rank: int, sizes: list[int]) -> list[torch.Tensor | None]:
    return [None if k == rank else torch.zeros(nbytes, dtype=torch.uint8) for k, nbytes in enumerate(sizes)]


def everything(rank: int, sizes: list[int]) -> list[list[tuple[int, int]]]:
    return [[] if k == rank or not nbytes else [(0, nbytes)] for k, nbytes in enumerate(sizes)]


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


class Patient(Membership):
    """Has any patience with ranks but those that the test lets be lost now: on a busy machine a living rank may stand
    still for longer than it should take to find that another one is gone.
    """

    losable: frozenset[int] = frozenset()

    def check(self, awaited, number, began_at, now):
        super().check(
            [peer for peer in awaited if peer in Patient.losable or peer in self._closed], number, began_at, now
        )

    def _gave_no_sign(self, peer, listened_s, now):
        return peer in Patient.losable and super()._gave_no_sign(peer, listened_s, now)


@contextlib.contextmanager
def faults(socket_class: type[MulticastSocket] = MulticastSocket) -> Iterator[None]:
    """Transports that are made meanwhile have such cards, and are `Patient`."""
    Patient.losable = frozenset()
    with patch.object(probe, "MulticastSocket", socket_class), patch.object(multicast, "Membership", Patient):
        yield


@contextlib.contextmanager
def transport(socket_class: type[MulticastSocket] = MulticastSocket, **options) -> Iterator[Multicast]:
    with faults(socket_class):
        made = Multicast(dist.group.WORLD, **{"timeout_s": LIMIT_S, **options})
    try:
        yield made
    finally:
        made.close()


class Deaf(MulticastSocket):
    """Rank 1 does not hear rank 0."""

    def receive(self):
        while (raw := super().receive()) is not None:
            if dist.get_rank() != 1 or raw[2:4] != b"\0\0":
                return raw
        return None


class Cut(MulticastSocket):
    """A card that neither sends nor receives while it is cut."""

    is_cut = False

    def send(self, header, payload=b""):
        return True if Cut.is_cut else super().send(header, payload)

    def receive(self):
        while (raw := super().receive()) is not None:
            if not Cut.is_cut:
                return raw
        return None


@contextlib.contextmanager
def capture() -> Iterator[list[str]]:
    """Warnings of the library's log."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("narrowband")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
