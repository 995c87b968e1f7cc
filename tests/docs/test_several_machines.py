"""The scripts of clusters that a page shows: their syntax, and the ``torchrun`` lines in them."""

from __future__ import annotations

import math
import re
import subprocess

import pytest

import narrowband as nb
from narrowband.collectives import all_reduce_nbytes
from narrowband.collectives.choice import LayerCollectives
from tests.docs import commands, pages

PAGE = pages.read(pages.ROOT / "docs" / "how-to" / "several-machines.md")
SCRIPTS = {block.title: block.text for block in PAGE.of("text")}


def check_torchrun(text, folder):
    """Have torchrun's parser read a command, with numbers and a name in the place of variables."""
    words = re.sub(r"\$\w+", "1", text)
    commands.check(commands.Line(" ".join(words.split()), PAGE.name), folder)


def test_the_script_for_slurm_is_one(tmp_path):
    script = SCRIPTS["job.sbatch"]
    (tmp_path / "job.sbatch").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "job.sbatch")], check=True)
    (common,) = re.findall(r'^ranks="(.+)"$', script, re.MULTILINE)
    runs = re.findall(r"^srun --kill-on-bad-exit \$ranks (.+?)(?: \|\| exit 1)?$", script, re.MULTILINE)
    assert [run.split(maxsplit=2)[2] for run in runs] == ["-m narrowband.cli doctor --peers", "train.py"]
    for run in runs:
        check_torchrun(f"{common} {run}", tmp_path)


def test_the_job_for_kubernetes_is_one(tmp_path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install '.[dev]'")
    service, job = yaml.safe_load_all(SCRIPTS["job.yaml"])
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    shell, option, line = pod["containers"][0]["command"]
    assert (shell, option) == ("sh", "-c")
    assert f"--nnodes {job['spec']['completions']} " in line
    assert f"--master-addr {job['metadata']['name']}-0.{pod['subdomain']} " in line
    check_torchrun(line, tmp_path)


def test_a_small_model_sends_less_by_as_much_as_the_page_says():
    """Payloads of its model are gathered on four ranks, and those of a larger one are added up on their way."""
    spec = nb.compression("qsgd:bits=4")

    def times_less(*shapes, small=0):
        chosen = LayerCollectives([(spec, shape) for shape in shapes], size=4)
        raw = sum(all_reduce_nbytes(4 * math.prod(shape), 4) for shape in shapes)
        uncompressed = all_reduce_nbytes(4 * small, 4)
        return (raw + uncompressed) / (sum(chosen.sent_nbytes(spec, shape) for shape in shapes) + uncompressed)

    page = (pages.ROOT / "docs" / "how-to" / "several-machines.md").read_text()
    assert f"here {times_less((256, 64), (10, 256), small=266):.1f} times less was sent" in page
    assert f"A larger\nmodel sends {times_less((1000, 1000)):.1f} times less" in page
