"""The process that owns a lab's namespaces. ``runner.py`` runs it as a script.

    runner ── supervisor ──(new pid, mount and network namespace)── init ── rank 0, rank 1, …
                                                                      │       each in a network namespace of its own
                                                                      └ the switch: a bridge with one veth per rank

Nothing in the lab has a name that could outlive it. The network namespaces are anonymous: they exist while *init* or a
rank runs, and their links vanish with them. *init* is process 1 of its pid namespace, so when it ends, the kernel kills
every process in the lab, including those that left their session. *init* ends with the supervisor, and the supervisor
with the runner's thread (``PR_SET_PDEATHSIG``), however that ended: SIGKILL of any of the three clears the lab.

Each link is shaped at both ends, and so in both directions: a token bucket (tbf) on the rank's interface limits what it
sends, and one on the switch's port what it receives. Delay and loss (netem) are on the port only, above its token
bucket, so each packet is delayed or lost once, and a lost packet still counts as sent.

The standard input is a socket to the runner. One line of JSON comes in (:class:`Spec`), and one goes out
(``{"problems": […]}``, or the results of :meth:`Ranks.run` and :meth:`Network.counters`). End of file means that the
runner is gone.

This file imports only the standard library and pyroute2: importing torch takes seconds and starts threads, and a
process with threads may not enter a user namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import re
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

__all__ = ["ADDRESS_PREFIX", "INTERFACE", "Link", "Shape", "Spec", "node_address"]

INTERFACE = "lab0"  # the rank's only network card
ADDRESS_PREFIX = 16

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWUSER = 0x00020000, 0x04000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_PR_SET_PDEATHSIG = 1
_LOOPBACK = 1  # index of lo in every network namespace
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TIMEOUT_EXIT_CODE = 124  # as coreutils' timeout
_LINE_BYTES = 65536  # an unfinished line is passed on when it gets this long

_NO_NAMESPACES = (
    "This process may not create network namespaces ({error}). Run it as root (sudo), or let users create namespaces: "
    "sysctl user.max_user_namespaces above 0, and where they exist kernel.unprivileged_userns_clone=1 (Debian) and "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu). A container needs --privileged, or --cap-add SYS_ADMIN "
    "--cap-add NET_ADMIN and a seccomp profile that allows unshare, setns and mount."
)
_NO_MODULE = (
    "The kernel has no {kind}, {purpose}: load it with `sudo modprobe {module}`, or use a kernel built with {option}."
)
_MODULES = {  # kind: module, build option, purpose
    "bridge": ("bridge", "CONFIG_BRIDGE", "which the lab's switch is made of"),
    "veth": ("veth", "CONFIG_VETH", "which the lab's links are made of"),
    "tbf": ("sch_tbf", "CONFIG_NET_SCH_TBF", "which limits the rate of links (unshaped links work)"),
    "netem": ("sch_netem", "CONFIG_NET_SCH_NETEM", "which delay and loss need (the lab works without those two)"),
}


@dataclass(frozen=True)
class Shape:
    """One direction of a link in kernel terms. Rates are in bytes per second, sizes in bytes.

    ``rate`` 0 means no token bucket. ``burst`` is the depth of the token bucket, and ``queue`` limits the bytes that
    wait for tokens. ``gso`` limits TCP's super-packets to the size of the bucket, because a larger one would be split
    in software, packet by packet.
    """

    rate: int
    burst: int
    queue: int
    gso: int
    gso_segments: int
    delay_us: int
    loss_percent: float
    netem_packets: int

    @property
    def netem(self) -> bool:
        """Whether the link has delay or loss."""
        return self.delay_us > 0 or self.loss_percent > 0


@dataclass(frozen=True)
class Link:
    """A machine's link: the shape for sending, and that for receiving."""

    up: Shape
    down: Shape


@dataclass(frozen=True)
class Spec:
    """The runner's request. If ``command`` is None, the lab is set up and taken down again.

    ``rank_env[r]`` is laid over ``env``; the remaining fields are those of :class:`narrowband.lab.LabConfig`.
    """

    runner_pid: int
    nodes: int
    per_node: int
    mtu: int
    links: list[Link]
    command: list[str] | None
    env: dict[str, str]
    rank_env: list[dict[str, str]]
    timeout_s: float | None
    grace_s: float

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_json(line: bytes) -> Spec:
        fields = json.loads(line)
        links = [Link(Shape(**link["up"]), Shape(**link["down"])) for link in fields["links"]]
        return Spec(**{**fields, "links": links})


class MissingError(Exception):
    """This machine lacks something. ``args`` are sentences that say what."""


def cores_of(rank: int, nodes: int, cores: Collection[int]) -> list[int]:
    """Return a rank's share of this machine's cores: equal shares or, with more ranks than cores, one shared core.

    So each rank has cores to itself, like a machine of its own. Without this, the scheduler moves ranks between cores,
    and some run ahead of others and then wait.
    """
    order, n = sorted(cores), len(cores)
    if nodes >= n:
        return [order[rank % n]]
    return order[rank * n // nodes : (rank + 1) * n // nodes]


def node_address(node: int) -> str:
    """Return the IPv4 address of a machine of the lab, in 10.213.0.0/16, which exists in the lab's namespaces only."""
    return f"10.213.{(node + 1) // 256}.{(node + 1) % 256}"


# ---------------------------------------------------------------------------------------------------- namespaces

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: int | bytes | None) -> None:
    """Call a C library function that returns -1 on failure. Pass ints as longs: ctypes would pass 32 bits."""
    longs = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    if getattr(_libc, name)(*longs) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _enter_namespaces() -> None:
    """Enter new mount, network and (for children) pid namespaces; without privileges, in a new user namespace."""
    flags = _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWPID
    try:
        _call("unshare", flags)
        return
    except PermissionError:
        uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags | _CLONE_NEWUSER)
    # The user id stays the same, so ranks access files as before, and lose all capabilities at exec.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _arrange_files(nodes: int, per_node: int) -> None:
    """Let ranks resolve the names rank0, rank1, … of ranks and node0, … of machines, and mount the lab's own /proc.

    Some containers forbid this. Failures are ignored, because without it c10d only warns about names, and process ids
    look odd.
    """
    with contextlib.suppress(OSError):
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        with open("/etc/hosts") as file:
            hosts = file.read()
        # torch's store looks up the names of IPv4 addresses in their IPv6 form.
        for form in ("", "::ffff:"):
            for node in range(nodes):
                names = " ".join(f"rank{node * per_node + at}" for at in range(per_node))
                hosts += f"\n{form}{node_address(node)} {names}" + (f" node{node}" if per_node > 1 else "")
        hosts += "\n"
        # The new hosts file needs a file system of its own: mount one on /proc, which always exists and is replaced
        # below.
        _call("mount", b"tmpfs", b"/proc", b"tmpfs", 0, None)
        try:
            with open("/proc/hosts", "w") as file:
                file.write(hosts)
            _call("mount", b"/proc/hosts", b"/etc/hosts", None, _MS_BIND, None)
        finally:
            _call("umount2", b"/proc", _MNT_DETACH)
    with contextlib.suppress(OSError):
        _call("mount", b"proc", b"/proc", b"proc", 0, None)


# ------------------------------------------------------------------------------------------------------- network


class Network:
    """The switch in this process's network namespace and one namespace per machine, with shaped links between them.

    Attributes:
        namespaces: One descriptor per machine, for ``setns``.

    Raises:
        MissingError: the kernel lacks what the spec needs.
    """

    def __init__(self, spec: Spec) -> None:
        from pyroute2 import IPRoute

        self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._switch = IPRoute()
        self._require_kinds([shape for link in spec.links for shape in (link.up, link.down)])
        _quiet_ipv6()
        self._bridge = self._add_link("switch", kind="bridge", mtu=spec.mtu, br_stp_state=0, br_mcast_snooping=0)
        self._switch.link("set", index=self._bridge, state="up")
        self.namespaces: list[int] = []
        self._ports: list[int] = []
        for node, link in enumerate(spec.links):
            self._add_machine(node, link, spec.mtu)

    def counters(self) -> list[dict[str, int]]:
        """Return the bytes and packets of each machine, as counted by its port on the switch.

        Bytes are those of Ethernet frames with their headers. A TCP super-packet is one packet with one set of headers.
        """
        found = []
        for port in self._ports:
            stats = self._switch.link("get", index=port)[0].get_attr("IFLA_STATS64")
            found.append(
                {
                    "sent_bytes": stats["rx_bytes"],
                    "received_bytes": stats["tx_bytes"],
                    "sent_packets": stats["rx_packets"],
                    "received_packets": stats["tx_packets"],
                }
            )
        return found

    def _add_machine(self, node: int, link: Link, mtu: int) -> None:
        from pyroute2 import IPRoute

        _call("unshare", _CLONE_NEWNET)
        netns = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _quiet_ipv6()
        _call("setns", self._home, _CLONE_NEWNET)
        here, there = (
            {"mtu": mtu, "gso_max_size": shape.gso, "gso_max_segs": shape.gso_segments}
            for shape in (link.down, link.up)
        )
        peer = {"ifname": INTERFACE, "net_ns_fd": netns, **there}
        port = self._add_link(f"port{node}", kind="veth", peer=peer, **here)
        if link.down.netem:
            self._add_netem(self._switch, port, link.down)
            self._add_tbf(self._switch, port, link.down, parent="1:1", handle="10:")
        else:
            self._add_tbf(self._switch, port, link.down)
        self._switch.link("set", index=port, master=self._bridge, state="up")
        _call("setns", netns, _CLONE_NEWNET)
        try:
            with IPRoute() as own:
                card = own.link_lookup(ifname=INTERFACE)[0]
                self._add_tbf(own, card, link.up)
                own.addr("add", index=card, address=node_address(node), prefixlen=ADDRESS_PREFIX)
                for index in (_LOOPBACK, card):
                    own.link("set", index=index, state="up")
        finally:
            _call("setns", self._home, _CLONE_NEWNET)
        self.namespaces.append(netns)
        self._ports.append(port)

    def _add_link(self, name: str, **attributes: Any) -> int:
        self._switch.link("add", ifname=name, **attributes)
        index: int = self._switch.link_lookup(ifname=name)[0]
        return index

    @staticmethod
    def _add_tbf(ipr: Any, index: int, shape: Shape, *, handle: str = "1:", **place: str) -> None:
        if shape.rate:
            sizes = {"rate": shape.rate, "burst": shape.burst, "limit": shape.queue}
            ipr.tc("add", "tbf", index=index, handle=handle, **sizes, **place)

    @staticmethod
    def _add_netem(ipr: Any, index: int, shape: Shape) -> None:
        losses = {"delay": shape.delay_us, "loss": shape.loss_percent, "limit": shape.netem_packets}
        ipr.tc("add", "netem", index=index, handle="1:", **losses)

    def _require_kinds(self, shapes: Sequence[Shape]) -> None:
        """Create one object of each kind and delete it: the kernel loads modules on demand, so only trying tells."""
        from pyroute2 import NetlinkError

        switch = self._switch

        def link(kind: str, **attributes: Any) -> None:
            switch.link("del", index=self._add_link("trial", kind=kind, **attributes))

        def qdisc(add: Callable[[Any, int], None]) -> None:
            add(switch, _LOOPBACK)
            switch.tc("del", index=_LOOPBACK, root=True)

        trials: dict[str, Callable[[], None]] = {
            "bridge": lambda: link("bridge"),
            "veth": lambda: link("veth", peer={"ifname": "trial-peer"}),
        }
        limited = [shape for shape in shapes if shape.rate]
        if limited:
            trials["tbf"] = lambda: qdisc(lambda ipr, index: self._add_tbf(ipr, index, limited[0]))
        slow = [shape for shape in shapes if shape.netem]
        if slow:
            trials["netem"] = lambda: qdisc(lambda ipr, index: self._add_netem(ipr, index, slow[0]))
        missing = []
        for kind, trial in trials.items():
            try:
                trial()
            except NetlinkError as error:
                if error.code not in (errno.EOPNOTSUPP, errno.ENOENT):  # an unknown kind of link, of qdisc
                    raise
                module, option, purpose = _MODULES[kind]
                missing.append(_NO_MODULE.format(kind=kind, purpose=purpose, module=module, option=option))
        if missing:
            raise MissingError(*missing)


def _quiet_ipv6() -> None:
    """Turn off IPv6 on new links in this network namespace, because its discovery packets would count as traffic.
    Loopback keeps IPv6. If /proc/sys is read-only, the few packets are sent and counted.
    """
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv6/conf/default/disable_ipv6", "w") as file:
        file.write("1")


# --------------------------------------------------------------------------------------------------------- ranks


class _Lines:
    """Forwards the output of one rank: unchanged without a prefix, else in whole lines that each start with it."""

    def __init__(self, source: int, sink: int, prefix: bytes) -> None:
        self.source, self._sink, self._prefix, self._rest = source, sink, prefix, b""

    def pump(self) -> bool:
        """Read once and write the complete lines; return False at the end of the stream.

        Raises:
            BrokenPipeError: nobody reads the output any more.
        """
        chunk = os.read(self.source, _LINE_BYTES)
        if not self._prefix:
            _write(self._sink, chunk)
            return bool(chunk)
        # A lone carriage return, as of progress bars, also ends a line; one at the end may be half of a \r\n.
        *lines, self._rest = re.split(rb"\r\n|\n|\r(?!\Z)", self._rest + chunk)
        if self._rest and (not chunk or len(self._rest) >= _LINE_BYTES):
            lines.append(self._rest.rstrip(b"\r"))
            self._rest = b""
        _write(self._sink, b"".join(self._prefix + line + b"\n" for line in lines))
        return bool(chunk)


def _write(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # a terminal that another program left in non-blocking mode
            select.select([], [fd], [])


class Ranks:
    """The rank processes in this pid namespace, from their start until all their descendants have ended.

    The stop signals must stay blocked until :meth:`run`, so that none is lost.
    """

    def __init__(self, spec: Spec, command: list[str], namespaces: list[int]) -> None:
        self._spec, self._command = spec, command
        self._selector = selectors.DefaultSelector()
        self._streams: set[int] = set()
        self._running: dict[int, int] = {}  # process id: rank
        self._number = spec.nodes * spec.per_node
        self._exit_codes = [0] * self._number
        self._outcome = 0  # exit code of the lab, above 0 as soon as the ranks are being ended
        self._kill_at = float("inf")
        for rank in range(self._number):
            self._start(rank, namespaces[rank // spec.per_node])

    def run(self) -> dict[str, Any]:
        """Wait for the ranks. End all if one fails, the time is up, a stop signal arrives, or the runner is gone.

        Returns:
            ``seconds`` from start to the last rank's end, ``exit_codes`` of the ranks, and ``exit_code``: that of the
            first rank to fail, 124 for a time-out, 128 + n for signal n.
        """
        wake_up, wake_fd = socket.socketpair()
        for end in (wake_up, wake_fd):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_fd.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # for the wake-up only
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda number, _: self._stop(number, 128 + number))
        self._selector.register(wake_up, selectors.EVENT_READ, lambda: wake_up.recv(_LINE_BYTES))
        self._selector.register(0, selectors.EVENT_READ, _leave)  # the runner sends nothing more, so this is its end
        started = time.monotonic()
        time_out = started + (self._spec.timeout_s or float("inf"))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        while True:
            self._reap(os.WNOHANG)
            now = time.monotonic()
            if not self._running or now >= self._kill_at:
                break
            if now >= time_out:
                self._stop(signal.SIGTERM, _TIMEOUT_EXIT_CODE)
            deadline = self._kill_at if self._outcome else time_out
            self._poll(None if deadline == float("inf") else max(deadline - now, 0.0))
        self._end_descendants()
        seconds = time.monotonic() - started
        while self._streams:
            self._poll(None)
        return {"seconds": seconds, "exit_code": self._outcome, "exit_codes": self._exit_codes}

    def _start(self, rank: int, netns: int) -> None:
        pipes = [os.pipe(), os.pipe()]
        pid = os.fork()
        if pid == 0:
            try:
                self._become(rank, netns, [write for _, write in pipes])
            except OSError as error:
                _write(2, f"cannot run {self._command[0]!r}: {error}\n".encode(errors="replace"))
                os._exit(127 if error.errno == errno.ENOENT else 126)  # the exit codes of a shell
            finally:
                os._exit(126)
        self._running[pid] = rank
        prefix = b"[rank %d] " % rank if self._number > 1 else b""
        for sink, (read, write) in enumerate(pipes, start=1):
            os.close(write)
            self._streams.add(read)
            self._selector.register(
                read, selectors.EVENT_READ, functools.partial(self._pump, _Lines(read, sink, prefix))
            )

    def _become(self, rank: int, netns: int, outputs: list[int]) -> NoReturn:
        os.setsid()
        for number in (*_STOP_SIGNALS, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        _call("setns", netns, _CLONE_NEWNET)
        _call("unshare", _CLONE_NEWUTS)
        per_node = self._spec.per_node
        socket.sethostname(f"rank{rank}" if per_node == 1 else f"node{rank // per_node}")
        with contextlib.suppress(OSError):  # a container may forbid it; ranks then share all cores
            os.sched_setaffinity(0, cores_of(rank, self._number, os.sched_getaffinity(0)))
        for fd, source in enumerate([os.open(os.devnull, os.O_RDONLY), *outputs]):
            os.dup2(source, fd)
        os.execvpe(self._command[0], self._command, {**self._spec.env, **self._spec.rank_env[rank]})

    def _poll(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()

    def _pump(self, lines: _Lines) -> None:
        try:
            if lines.pump():
                return
        except BrokenPipeError:
            self._stop(signal.SIGTERM, 128 + signal.SIGPIPE)
        self._selector.unregister(lines.source)
        self._streams.discard(lines.source)
        os.close(lines.source)

    def _reap(self, options: int) -> None:
        """Reap processes that have ended: ranks, and their orphans, which process 1 inherits."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, options))[0]:
                pid, status = ended
                if pid in self._running:
                    code = os.waitstatus_to_exitcode(status)
                    code = 128 - code if code < 0 else code  # as the shell reports a signal
                    self._exit_codes[self._running.pop(pid)] = code
                    if code:
                        self._stop(signal.SIGTERM, code)

    def _stop(self, number: int, outcome: int) -> None:
        """Ask all ranks to end, once. The first call sets the lab's exit code."""
        if self._outcome:
            return
        self._outcome = outcome
        self._kill_at = time.monotonic() + self._spec.grace_s
        for pid in self._running:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # it leads no group yet, and blocks signals until it does
                os.kill(pid, number)

    def _end_descendants(self) -> None:
        if os.getpid() != 1:
            raise RuntimeError("not process 1 of a pid namespace: refusing to kill everything")
        with contextlib.suppress(ProcessLookupError):  # nobody left
            os.kill(-1, signal.SIGKILL)
        self._reap(0)


# ------------------------------------------------------------------------------------------------------ processes


def _leave() -> NoReturn:
    os._exit(1)  # the kernel then kills everything in the pid namespace


def _reply(message: dict[str, Any]) -> None:
    _write(0, json.dumps(message).encode() + b"\n")


def _init(spec: Spec) -> None:
    """Process 1 of the lab's pid namespace: build the network, run the ranks, report."""
    from pyroute2 import NetlinkError

    _die_with_parent()
    _arrange_files(spec.nodes, spec.per_node)
    problems: list[str] = []
    try:
        network = Network(spec)
    except MissingError as error:
        problems = list(error.args)
    except (PermissionError, NetlinkError) as error:
        if error.args[0] not in (errno.EPERM, errno.EACCES):
            raise
        problems = [_NO_NAMESPACES.format(error=error)]
    if problems or spec.command is None:
        _reply({"problems": problems})
    else:
        result = Ranks(spec, spec.command, network.namespaces).run()
        _reply({**result, "counters": network.counters()})


def main() -> int:
    """Enter the namespaces, fork *init*, relay stop signals to it, and end when it ends.

    The runner starts this process with stop signals blocked. They stay blocked until both processes handle them.
    """
    spec = Spec.from_json(sys.stdin.buffer.readline())
    try:
        _enter_namespaces()
    except OSError as error:
        _reply({"problems": [_NO_NAMESPACES.format(error=error)]})
        return 0
    _die_with_parent()
    if os.getppid() != spec.runner_pid:
        return 1  # the runner was gone before it could be noticed
    init = os.fork()
    if init == 0:
        try:
            _init(spec)
            os._exit(0)
        except BaseException:  # must not propagate: the outer frames are the supervisor's
            traceback.print_exc()
        finally:
            os._exit(1)
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda number, _: os.kill(init, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])


if __name__ == "__main__":
    del sys.path[0]  # this directory: its modules are narrowband.lab's, not top-level ones
    sys.exit(main())
