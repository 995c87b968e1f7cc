"""However a lab ends, nothing is left of it; and who may have one."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import narrowband
from narrowband.lab import LabConfig, LabReport, run
from tests.lab.processes import LIMIT_S, python
from tests.thorough import thorough

SOURCE = str(Path(narrowband.__file__).parents[1])


# ------------------------------------------------------------------------------------------------ leftovers


def processes(token: str) -> dict[int, str]:
    """Process id and network namespace of each process with ``token`` among its arguments."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if token.encode() in (entry / "cmdline").read_bytes():
                    found[int(entry.name)] = os.readlink(entry / "ns" / "net")
            except OSError:  # it ended meanwhile
                continue
    return found


def namespaces() -> set[str]:
    """Network namespaces that a process lives in or that have a name."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.add(os.readlink(entry / "ns" / "net"))
            except OSError:
                continue
    named = Path("/var/run/netns")
    found |= {f"net:[{entry.stat().st_ino}]" for entry in named.iterdir()} if named.exists() else set()
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.02)


@pytest.fixture
def token() -> Iterator[str]:
    """A word for the command line of every process that a test starts; when the test ends, none may be left, and no
    link may have appeared outside the lab."""
    word = f"lab-test-{uuid.uuid4().hex}"
    links = socket.if_nameindex()
    yield word
    assert socket.if_nameindex() == links
    left = processes(word)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


class Driver:
    """A Python process that calls ``run``, for tests that end it from outside."""

    def __init__(self, config: str, command: list[str], prepare: Callable[[], None] | None = None) -> None:
        code = f"import sys; from narrowband.lab import *; r = run({config}, sys.argv[1:]); print(r.to_dict())"
        self.process = subprocess.Popen(
            python(code, *command),
            env={**os.environ, "PYTHONPATH": SOURCE},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare,  # noqa: PLW1509  the test process has no other thread at work
        )

    def wait_for_output(self, lines: int) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline() for _ in range(lines)]

    def finish(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, output, errors


# a rank that starts a child in a session of its own, says so, and stays
LINGERING = """
    import subprocess, sys, time
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", sys.argv[1]], start_new_session=True)
    print("ready")
    time.sleep(1000)
"""


# ------------------------------------------------------------------------------------------------ ends


@pytest.mark.lab
def test_a_rank_that_fails_ends_the_others(token: str) -> None:
    code = "import os, sys\nif os.environ['RANK'] == '1': sys.exit(3)\n" + textwrap.dedent(LINGERING)
    report = run(LabConfig(nodes=3, timeout_s=LIMIT_S), python(code, token))
    assert report.exit_code == 3
    assert [rank.exit_code for rank in report.ranks] == [128 + signal.SIGTERM, 3, 128 + signal.SIGTERM]


@pytest.mark.lab
def test_a_rank_ended_by_a_signal_is_reported_as_the_shell_does() -> None:
    assert run(LabConfig(nodes=1), ["sh", "-c", "kill -9 $$"]).exit_code == 128 + signal.SIGKILL


@pytest.mark.lab
def test_what_ranks_leave_running_ends_with_the_last_of_them(token: str) -> None:
    report = run(LabConfig(nodes=2), python(LINGERING.replace("    time.sleep(1000)\n", ""), token))
    assert report.exit_code == 0


@pytest.mark.lab
def test_a_time_out_ends_ranks_that_do_not_want_to(token: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + textwrap.dedent(LINGERING)
    for timeout_s in (2.0, 8.0, 32.0):  # until both are ready in time, however busy the machine is
        report = run(LabConfig(nodes=2, timeout_s=timeout_s, grace_s=0.2), python(code, token))
        assert report.exit_code == 124
        if capfd.readouterr().out.count("ready") == 2:
            break
    assert [rank.exit_code for rank in report.ranks] == [128 + signal.SIGKILL] * 2


@pytest.mark.lab
@pytest.mark.parametrize("number", [signal.SIGTERM, *thorough(signal.SIGINT)])
def test_a_stop_signal_reaches_the_ranks_first_and_then_takes_its_course(token: str, number: signal.Signals) -> None:
    code = """
        import os, signal, sys, time
        def save(number, frame):
            os.write(1, f"saved after {number}\\n".encode()); sys.exit(0)  # print is not reentrant
        signal.signal(signal.SIGINT, save); signal.signal(signal.SIGTERM, save)
        print("ready"); time.sleep(1000)
    """
    driver = Driver(f"LabConfig(nodes=2, grace_s={LIMIT_S})", python(code, token))
    driver.wait_for_output(2)
    driver.process.send_signal(number)
    exit_code, output, _ = driver.finish()
    assert exit_code == -number
    assert sorted(output.splitlines()) == [f"[rank {rank}] saved after {int(number)}" for rank in range(2)]


@pytest.mark.thorough
@pytest.mark.lab
def test_a_second_ctrl_c_does_not_wait_for_ranks_that_ignore_the_first(token: str) -> None:
    code = """
        import os, signal, time
        signal.signal(signal.SIGINT, lambda number, frame: os.write(1, b"not now\\n")); print("ready")
        while True: time.sleep(1000)
    """
    driver = Driver("LabConfig(nodes=2, grace_s=1000)", python(code, token))
    driver.wait_for_output(2)
    driver.process.send_signal(signal.SIGINT)
    assert sorted(driver.wait_for_output(2)) == ["[rank 0] not now\n", "[rank 1] not now\n"]
    driver.process.send_signal(signal.SIGINT)
    assert driver.finish()[0] == -signal.SIGINT
    wait_for(lambda: not processes(token), "the ranks' end")


@pytest.mark.lab
@pytest.mark.parametrize("victim", ["supervisor", *thorough("runner", "init")])
def test_sigkill_leaves_no_process_and_no_namespace(token: str, victim: str) -> None:
    driver = Driver("LabConfig(nodes=2)", python(LINGERING, token))
    driver.wait_for_output(2)
    (supervisor,) = children(driver.process.pid)
    (init,) = children(supervisor)
    used = set(processes(token).values()) | {os.readlink(f"/proc/{init}/ns/net")}
    used.discard(os.readlink("/proc/self/ns/net"))
    assert len(used) == 3  # two ranks and the switch; a rank's child shares the rank's
    os.kill({"runner": driver.process.pid, "supervisor": supervisor, "init": init}[victim], signal.SIGKILL)
    _, _, errors = driver.finish()
    assert victim == "runner" or "without a report" in errors
    wait_for(lambda: not processes(token), "the ranks' end")
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (supervisor, init)), "the supervisor's end")
    wait_for(lambda: not used & namespaces(), "the namespaces' end")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.lab
def test_a_lab_runs_from_a_thread() -> None:
    reports: list[LabReport] = []
    thread = threading.Thread(target=lambda: reports.append(run(LabConfig(nodes=2), ["true"])))
    thread.start()
    thread.join()
    assert [report.exit_code for report in reports] == [0]


@pytest.mark.lab
def test_ranks_end_when_nobody_reads_their_output(token: str) -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys, time\nwhile True: print(sys.argv[1]); time.sleep(0.01)"
    report = run(LabConfig(nodes=2, timeout_s=LIMIT_S), python(code, token), stdout=write)
    os.close(write)
    assert report.exit_code == 128 + signal.SIGPIPE


# ------------------------------------------------------------------------------------------------ who may


def as_a_containers_root() -> None:
    """Root without the two capabilities that a container's root usually lacks, from the next exec on."""
    libc = ctypes.CDLL(None)
    for capability in (12, 21):  # CAP_NET_ADMIN, CAP_SYS_ADMIN
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def as_nobody() -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: every other test here takes the unprivileged path already")
@pytest.mark.parametrize("prepare", [as_a_containers_root, as_nobody])
def test_an_unprivileged_user_gets_a_lab_or_a_clear_message(token: str, prepare: Callable[[], None]) -> None:
    def allowed(command: list[str]) -> bool:
        try:
            done = subprocess.run(command, check=False, preexec_fn=prepare, capture_output=True)
            return done.returncode == 0
        except PermissionError:
            return False

    if not allowed([sys.executable, "-c", ""]):
        pytest.skip("that user may not run this Python interpreter")
    assert not allowed(["unshare", "--net", "true"])
    driver = Driver("LabConfig(nodes=2)", python("import os; print(os.geteuid())", token), prepare)
    exit_code, output, errors = driver.finish()
    if allowed(["unshare", "--user", "--map-current-user", "--net", "true"]):
        assert exit_code == 0, errors
        uid = 65534 if prepare is as_nobody else 0
        assert sorted(output.splitlines()[:2]) == [f"[rank {rank}] {uid}" for rank in range(2)]
    else:
        assert exit_code == 1
        assert "UnsupportedError: This process may not create network namespaces" in errors
        assert "sudo" in errors


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to take rights away")
def test_without_namespaces_the_message_says_how_to_get_them(token: str) -> None:
    def without_capabilities() -> None:  # such a root may make a user namespace but not map itself into it
        libc = ctypes.CDLL(None)
        for capability in range(64):
            libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP

    exit_code, _, errors = Driver("LabConfig(nodes=2)", ["echo", token], without_capabilities).finish()
    assert exit_code == 1
    assert "UnsupportedError: This process may not create network namespaces" in errors
    assert "sudo" in errors
