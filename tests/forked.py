"""Ranks of a lab that do not import PyTorch: each is forked from a process that has, and enters its rank's namespaces.

::

    with forking() as forked:
        run(LabConfig(nodes=2), forked("import torch.distributed as dist; ..."))

The lab starts a small program per rank, which passes its environment, its output, its namespaces and the lab's
``/etc/hosts`` on to the server that ``forking`` has started, and ends as the process does that runs the code. The
server comes from the fork server of :mod:`tests.ranks`, whose processes have imported PyTorch, Numba and narrowband.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any, NoReturn

__all__ = ["forking"]

_POLL_S = 0.02

# Flags of mount and unshare, from the kernel's headers.
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_CLONE_NEWNS = 0x20000

#: What the lab starts. Its namespaces go with it when it ends, so it waits.
_CLIENT = """
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("user", "net", "uts")]
hosts = open("/etc/hosts").read()
told = {"environment": dict(os.environ), "hosts": hosts, "code": sys.argv[2], "arguments": sys.argv[3:]}
told = json.dumps(told).encode()
socket.send_fds(server, [len(told).to_bytes(4, "big")], [1, 2, *spaces])
server.sendall(told)
sys.exit(int.from_bytes(server.recv(1) or b"\\x01", "big"))
"""


@contextlib.contextmanager
def forking() -> Iterator[Callable[..., list[str]]]:
    """Start a server; yield a function of Python code and its arguments that returns the command for a lab."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    folder = tempfile.TemporaryDirectory()
    path = f"{folder.name}/s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = context.Process(target=_serve, args=(listener,))
        server.start()
    try:
        yield lambda code, *arguments: [
            sys.executable,
            "-S",
            "-E",
            "-c",
            _CLIENT,
            path,
            textwrap.dedent(code),
            *arguments,
        ]
    finally:
        server.kill()
        server.join()
        server.close()
        folder.cleanup()


def _serve(listener: socket.socket) -> None:
    """Fork a process for each connection that waits for the rank, and the rank from it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(connection)
        connection.close()


def _attend(connection: socket.socket) -> NoReturn:
    """Run a rank; tell its exit code. It ends when the lab has ended the program that asked for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, (out, err, *spaces), _, _ = socket.recv_fds(connection, 4, 5)
    told = connection.makefile("rb").read(int.from_bytes(size, "big"))
    rank = os.fork()
    if rank == 0:
        _run(json.loads(told), out, err, spaces)
    while not (done := os.waitpid(rank, os.WNOHANG))[0]:
        if select.select([connection], [], [], _POLL_S)[0]:
            os.kill(rank, signal.SIGKILL)
            os._exit(1)
    connection.sendall(bytes([os.waitstatus_to_exitcode(done[1]) % 256]))
    os._exit(0)


def _run(told: dict[str, Any], out: int, err: int, spaces: list[int]) -> NoReturn:
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = (os.fdopen(each, "w", buffering=1) for each in (1, 2))
    own = os.stat("/proc/self/ns/user").st_ino
    for space in spaces[os.fstat(spaces[0]).st_ino == own :]:
        _call("setns", space, 0)
    _see(told["hosts"])
    os.environ.clear()
    os.environ.update(told["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *told["arguments"]]
    code = 0
    try:
        exec(compile(told["code"], "<rank>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _see(hosts: str) -> None:
    """Let this process have an ``/etc/hosts`` of its own, where that is allowed. The lab's mounts would not do: its
    ``/proc`` does not know processes that it has not started.
    """
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile("w") as file:
        file.write(hosts)
        file.flush()
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _call("mount", file.name.encode(), b"/etc/hosts", None, _MS_BIND, None)


def _call(name: str, *arguments: int | bytes | None) -> None:
    longs = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*longs):
        raise OSError(ctypes.get_errno(), name)
