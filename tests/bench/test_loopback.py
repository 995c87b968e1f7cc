"""Ranks on loopback: what their server leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from narrowband.bench import loopback


def test_ctrl_c_while_ranks_start_is_ctrl_c(tmp_path, monkeypatch):
    """Whatever has not started by then is nobody's to wait for."""
    starts = []

    def start(self):
        starts.append(self.name)
        if len(starts) == 2:
            raise KeyboardInterrupt  # as the signal's handler would
        own(self)

    kind = loopback.rank_context().Process
    own = kind.start
    monkeypatch.setattr(kind, "start", start)
    log = tmp_path / "log"
    log.touch()
    with pytest.raises(KeyboardInterrupt):
        loopback.run_on_loopback("http.server", [], 2, log)
    assert len(starts) == 2


CTRL_C = "import os, signal; os.killpg(0, signal.SIGINT)"

STOPPED = """
import os, signal, sys, tempfile
from multiprocessing import forkserver
from pathlib import Path
from narrowband.bench import loopback

at, loopback.IMPORTS = sys.argv[1:]  # not PyTorch, which takes seconds
own = getattr(forkserver, at, None)

def stopped(*args):
    if at == "ensure_running":
        own(*args)
    os.killpg(0, signal.SIGINT)  # Ctrl-C
    return own(*args)

if own is not None:
    setattr(forkserver, at, stopped)
with tempfile.TemporaryDirectory() as folder:
    log = Path(folder, "log")
    log.touch()
    loopback.run_on_loopback("platform", [], 2, log)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere there is no fork server")
@pytest.mark.parametrize(
    ("at", "imported"),
    [
        ("ensure_running", "platform"),  # at the server's start
        ("", "ctrl_c"),  # while the server imports
        ("read_signed", "platform"),  # at that of a rank, before its pid is known
    ],
)
def test_neither_the_server_nor_a_rank_says_anything_of_ctrl_c(at, imported, tmp_path):
    (tmp_path / "ctrl_c.py").write_text(CTRL_C)
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, at, imported],
        capture_output=True,
        text=True,
        timeout=600,  # only what hangs takes this long
        check=False,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert done.stderr.count("Traceback") == 1, done.stderr  # of the script itself
    assert done.stderr.strip().endswith("KeyboardInterrupt")


IN_A_LONG_PLACE = """
import sys, tempfile
from pathlib import Path
from narrowband.bench import loopback

loopback.IMPORTS = "platform"  # not PyTorch, which takes seconds
log = Path(sys.argv[1], "log")
log.touch()
code = loopback.run_on_loopback("platform", [], 2, log)
print(code, tempfile.gettempdir() == sys.argv[1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere there is no fork server")
@pytest.mark.parametrize("length", [75, 76])  # 75 bytes is the longest in which sockets fit
def test_ranks_start_though_sockets_do_not_fit_into_the_folder_for_temporary_files(length):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        place = f"{short}/{'x' * (length - len(short) - 1)}"
        os.mkdir(place)
        done = subprocess.run(
            [sys.executable, "-c", IN_A_LONG_PLACE, place],
            env=os.environ | {"TMPDIR": place},
            capture_output=True,
            text=True,
            check=True,
            timeout=180.0,
        )
    assert (done.stdout, done.stderr) == ("0 True\n", "")
