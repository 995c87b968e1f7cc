"""From ``pip install`` of the built wheel to a verdict of ``narrowband plan`` on one's own model, timed step by step.

Everything is new: the environment, the caches of compiled loops and of pip, and the script. Run ``make package`` first.

.venv/bin/python benchmarks/newcomer.py --torch torch==2.13.0 --json benchmarks/results/newcomer.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from narrowband.report.record import provenance, write_json

ROOT = Path(__file__).parent.parent

#: What they have: twenty lines, of which the planner calls ``build``.
TRAIN = """\
import torch
from torch import nn


def build(batch):
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(1000, 256), *layers, nn.Linear(256, 1000))
    return model, (torch.randint(1000, (batch, 64)),)


def train(steps=100, batch=8):
    model, _ = build(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        text = torch.randint(1000, (batch, 65))
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    train()
"""


def main() -> None:
    """Walk the way, and write down how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch", help="requirement of PyTorch, as pip takes it")
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--nodes", default="4")
    parser.add_argument("--json", type=Path, help="also write the record to this file")
    given = parser.parse_args()
    wheels = sorted(ROOT.glob("dist/*.whl"))
    if len(wheels) != 1:
        parser.error(f"dist/ has {len(wheels)} wheels and should have one: run make package")
    began = provenance(None, ["python", *sys.argv])  # before anything is written
    with tempfile.TemporaryDirectory() as folder:
        rows, plan = _walk(Path(folder), wheels[0], given.torch, given.link, given.nodes)
    total = round(sum(row["seconds"] for row in rows), 1)
    print(f"{total:.0f} s from nothing to: {plan['said']}")
    if given.json is not None:
        config = {"torch": given.torch, "link": given.link, "nodes": int(given.nodes)}
        measured = {
            "rows": rows,
            "total_s": total,
            "verdict": plan["said"],
            "load_average": round(os.getloadavg()[0], 1),
        }
        write_json(given.json, began | {"config": config, "versions": plan["versions"], **measured})


def _walk(home: Path, wheel: Path, torch: str, link: str, nodes: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What they do, one after the other: a row for each step, and what the planner wrote and said."""
    (home / "train.py").write_text(TRAIN)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NUMBA", "XDG"))}
    environment = kept | {"HOME": str(home), "VIRTUAL_ENV": str(home / "env")}
    bin_ = home / "env" / "bin"
    planned = ["plan", "train.py:build", "--link", link, "--nodes", nodes, "--json", "rows.json"]
    steps = {
        "pip install": [str(bin_ / "python"), "-m", "pip", "install", "-q", "--no-cache-dir", torch, str(wheel)],
        "narrowband doctor": [str(bin_ / "narrowband"), "doctor"],
        "narrowband plan": [str(bin_ / "narrowband"), *planned],
        "narrowband plan, once more": [str(bin_ / "narrowband"), *planned],
    }
    rows, said = [_timed("python -m venv", lambda: venv.create(home / "env", with_pip=True))], ""
    for name, command in steps.items():
        done: list[subprocess.CompletedProcess[str]] = []
        row = _timed(name, lambda: done.append(_run(command, home, environment)))  # noqa: B023 - called at once
        rows.append(row)
        said = done[0].stdout if name == "narrowband plan" else said
        print(f"{row['seconds']:7.1f} s, {row['cpu_s']:6.1f} s of processors  {name}", flush=True)
    again = rows.pop()  # no part of the way: what of it was only for the first time
    rows[-1]["seconds_again"], rows[-1]["cpu_s_again"] = again["seconds"], again["cpu_s"]
    written = json.loads((home / "rows.json").read_text())
    return rows, {"said": _verdict(said), "versions": written["versions"]}


def _run(command: list[str], home: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=home, env=environment | {"COLUMNS": "500"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done


def _timed(name: str, step: Any) -> dict[str, Any]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    step()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"step": name, "seconds": round(seconds, 2), "cpu_s": round(cpu, 2)}


def _verdict(said: str) -> str:
    """The sentence below the table: it stands before the line for their script, and before the name of the file."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = next(at for at, line in enumerate(lines) if line.startswith(("In your script:", "written:")))
    return lines[last - 1]


if __name__ == "__main__":
    main()
