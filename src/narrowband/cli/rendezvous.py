"""``narrowband rendezvous``: the store in which peers meet that come and go."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowband.cli.exits import DONE

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Rendezvous"]


@dataclass(frozen=True)
class Rendezvous:
    """Serve the store where peers meet that come and go: nb.compress_updates(…, peers=nb.Rendezvous("host:port")).

    It holds about a kilobyte per round, and no parameters. Run it where it stays up, on a machine that all peers reach;
    it has to outlive any of them. Anyone who reaches the port can take part, so keep it in your own network. Stop it
    with Ctrl-C.
    """

    port: int = 29400
    """To listen at; 0 takes any that is free."""
    host: str = "0.0.0.0"
    """Address of the interface to listen at; by default all of IPv4. :: are all of IPv6 and IPv4."""

    def __call__(self, console: Console) -> int:
        """Serve until SIGINT or SIGTERM."""
        from narrowband.updates.stores import serve

        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port} must be 1 to 65535, or 0 for any free port")
        stopped = threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        try:
            try:
                store = serve(self.port, self.host)
            except OSError as error:
                why = (error.strerror or str(error)).partition(" (while")[0]  # Python repeats the address
                raise ValueError(
                    f"cannot listen at host {self.host}, port {self.port}: {why}; give an address of this machine to "
                    "--host and a free port to --port"
                ) from error
            host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
            console.print(
                f"peers meet at {host}:{store.port} (Ctrl-C ends it)",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            console.file.flush()
            while not stopped.wait(1.0):
                pass
        finally:
            signal.signal(signal.SIGTERM, before)
        return DONE
