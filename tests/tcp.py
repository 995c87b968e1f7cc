"""How many bytes this process has sent over TCP, as the kernel counts them.

Gloo's connections stay open as long as their process group, so the difference between two calls is what collectives
have sent in between: their payloads and gloo's own words, without headers of TCP and IP.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct

__all__ = ["tcp_sent_nbytes"]

#: ``struct tcp_info`` of linux/tcp.h: where ``tcpi_bytes_sent`` and ``tcpi_bytes_retrans`` are.
_BYTES_SENT, _BYTES_RETRANSMITTED = 200, 208


def tcp_sent_nbytes() -> int:
    """Bytes sent over all TCP connections that are open, without those that were sent again."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own is closed by now
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as there:
                    total += _sent(there)
    return total


def _sent(there: socket.socket) -> int:
    if there.type != socket.SOCK_STREAM or there.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    info = there.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, again = (struct.unpack_from("Q", info, at)[0] for at in (_BYTES_SENT, _BYTES_RETRANSMITTED))
    return sent - again
