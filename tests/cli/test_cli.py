"""The command as a user meets it: through ``main`` where that is enough, as a process where signals matter."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import narrowband
from narrowband.cli import main
from narrowband.cli.codecs import Codecs
from narrowband.cli.dispatch import _COMMANDS
from narrowband.cli.lab import Lab
from narrowband.codecs import available
from narrowband.lab import LabReport
from narrowband.report.gpu import GPU
from tests.cli.ctrl_c import stopped

ROOT = Path(__file__).parents[2]


def test_version(narrow):
    assert narrow("--version") == (0, f"narrowband {narrowband.__version__}\n", "")


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_help_names_every_command(narrow, words):
    code, out, _ = narrow(*words)
    assert code == 0
    for command in ("demo", "bench kernels", "bench ddp", "bench adapt", "lab", "adapt", "memory", "codecs", "doctor"):
        assert f"narrowband {command}" in out
    assert "``" not in out


def test_help_says_of_every_command_a_whole_sentence(narrow):
    """What stands beside a command's name may go on in the next line, and ends as sentences do."""
    _, out, _ = narrow("--help")
    table = out.partition("usage:")[2].partition("examples:")[0]
    entries = re.split(r"^ *narrowband (?=[a-z])", table, flags=re.MULTILINE)[1:]
    assert len(entries) == 17
    assert [entry for entry in entries if not entry.rstrip().endswith((".", "?"))] == []


@pytest.mark.parametrize("words", [("bench",), ("bench", "--help")])
def test_help_of_a_family_names_its_commands(narrow, words):
    code, out, _ = narrow(*words)
    assert code == 0
    assert "narrowband bench ddp" in out
    assert "narrowband demo" not in out


@pytest.mark.parametrize(
    "command", ["demo", "bench kernels", "bench ddp", "bench memory", "lab", "memory", "codecs", "doctor", "report"]
)
def test_help_teaches_with_examples(narrow, command):
    code, out, _ = narrow(*command.split(), "--help")
    assert code == 0
    assert "Examples:" in out
    assert len(re.findall(rf"^  (narrowband {command}|python)", out, re.MULTILINE)) >= 1
    assert not re.search(rf"narrowband {command}.*narrowband {command}", out.partition("Examples:")[2])  # one a line
    assert "``" not in out


@pytest.mark.parametrize("command", list(_COMMANDS))
def test_help_has_no_line_that_a_narrow_terminal_would_break_but_commands(narrow, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "50")
    code, out, _ = narrow(*command.split(), "--help")
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 50 and not line.startswith(("  ", "usage: "))] == []
    assert f"\n\nusage: narrowband {command}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("demmo",), "unknown command 'demmo' (did you mean 'demo'?)"),
        (
            ("bench", "kernls"),
            "unknown command 'bench kernls' (did you mean 'bench kernels'?); there are: bench kernels,",
        ),
        (("bench", "nothing-like-it"), "unknown command 'bench nothing-like-it'; there are: bench kernels, bench ddp,"),
        (("bench", "ddp", "--codecs", "topk:densty=1"), "did you mean 'density'?"),
        (("bench", "kernels", "--numel", "3"), "numel=3"),
        (("demo", "--steps", "0"), "steps=0"),
        (("codecs", "topkk"), "unknown codec or feedback 'topkk' (did you mean 'topk'?); there are: none, fp16"),
        (("codecs", "topk+eff"), "unknown codec or feedback '+eff' (did you mean '+ef'?)"),
        (("demo", "--codecs", "updates", "sign+ef"), 'write them in quotes, "updates sign+ef"'),
        (("demo", "--", "python"), "takes nothing after '--'"),
        (("lab", "--nodes", "2"), "narrowband lab --nodes 4 --rate 200mbit -- python train.py"),
        (
            ("lab", "--nodes", "2", "--rate=none", "python", "a.py"),
            "narrowband lab --nodes 2 --rate=none -- python a.py",
        ),
        (("lab", "--rate", "quick", "--", "true"), "rate 'quick' cannot be read"),
        (("lab", "--", "no-such-program-anywhere"), "'no-such-program-anywhere'"),
    ],
)
def test_a_mistake_is_one_line_without_a_traceback(narrow, words, message):
    code, out, err = narrow(*words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not out


def test_options_that_do_not_exist_are_refused(narrow):
    code, _, err = narrow("demo", "--stepz", "3")
    assert code == 2
    assert "--stepz" in err


@pytest.mark.parametrize("how", ["option", "environment"])
def test_debug_shows_the_traceback(narrow, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("NARROWBAND_DEBUG", "1")
    with pytest.raises(ValueError, match="steps=0"):
        main(["demo", "--steps", "0", *(["--debug"] if how == "option" else [])])


def test_debug_behind_the_dashes_belongs_to_the_user(narrow):
    code, _, err = narrow("lab", "--nodes", "0", "--", "true", "--debug")
    assert code == 2
    assert "nodes" in err


def test_in_a_narrow_terminal_no_word_about_codecs_is_cut():
    console = Console(record=True, width=40, file=io.StringIO())
    Codecs()(console)
    text = console.export_text()
    assert "…" not in text
    assert "none\n  bits 32, what it does" in text


def test_codecs_are_all_there_with_keys_and_costs(narrow):
    code, out, _ = narrow("codecs")
    assert code == 0
    for name in available():
        assert re.search(rf"\b{name}\b", out)
    assert "density=0.01" in out
    assert "4.25" in out  # qsgd: 4 bits and 32 per bucket of 128
    for name, key in (("+ef", "decay=1.0"), ("+ef-mixed", "sends=sum"), ("+aq-sgd", 'folder=""'), ("dgc", "clip=inf")):
        assert re.search(rf"│ {re.escape(name)}\b[^├]*│   {re.escape(key)} ", out)


def test_codecs_says_what_the_keys_of_a_spec_mean(narrow, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, err = narrow("codecs", "topk:density=0.1,values=int8+ef:decay=0.9", "dgc", "topk")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 60
    assert re.findall(r"^(\S+)$", out, re.MULTILINE) == ["topk", "+ef", "dgc"]
    said = " ".join(out.split())
    assert "density: the share of elements that is kept." in said
    assert "store: how the residual is stored between steps" in said
    assert "(see `DGCSGD`)" in said


def test_codecs_says_of_each_key_of_all_that_there_are_what_it_means(narrow):
    _, listed, _ = narrow("codecs")
    names = re.findall(r"^│ (\+?[a-z][a-z0-9-]*)", listed, re.MULTILINE)
    assert {"topk", "+ef", "dgc"} <= set(names)
    for name in names:
        _, out, _ = narrow("codecs", name)
        keys = re.findall(r"^  (\w+)[= ]", out, re.MULTILINE)
        assert [key for key in keys if not re.search(rf"^  {key}: \S", out, re.MULTILINE)] == [], name


@pytest.fixture
def gradients(tmp_path):
    generator = torch.Generator().manual_seed(0)
    found = {f"{i}.weight": torch.randn(64, 96, generator=generator) * 4.0**-i for i in range(4)}
    torch.save(found | {"0.bias": torch.ones(64), "frozen.weight": None}, tmp_path / "gradients.pt")
    return tmp_path / "gradients.pt"


REFERENCE = ("--reference", "qsgd:bits=4")
ACCORDION = ("--low", "qsgd:bits=6", "--high", "qsgd:bits=3", "--before", "gradients.pt")
POLICIES = {
    "lgreco": REFERENCE, "constant": REFERENCE, "kmeans": REFERENCE, "accordion": ACCORDION,
    "lgreco+accordion": ACCORDION, "global-topk": ("--density", "0.02"), "threshold": ("--value", "0.1"),
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_adapt_writes_plans_that_training_can_follow(narrow, gradients, tmp_path, monkeypatch, policy):
    path = tmp_path / "plan.json"
    monkeypatch.chdir(tmp_path)
    words = ("--policy", policy, "--ranks", "8", *POLICIES[policy], "--output", str(path))
    code, out, err = narrow("adapt", str(gradients), *words)
    assert (code, err) == (0, "")
    plan = narrowband.Plan.load(path)
    assert [layer.name for layer in plan.layers] == [f"{i}.weight" for i in range(4)]
    assert plan.world_size == 8
    assert all(name in out for name in plan.specs())
    if policy == "lgreco":
        said = " ".join(out.split())
        assert "among 8 ranks 1." in said
        assert "times fewer bytes than qsgd:bits=4 for all layers, at no more error" in said


@pytest.mark.parametrize("policy", ["lgreco", "threshold"])
def test_adapt_writes_what_its_table_shows(narrow, gradients, tmp_path, policy):
    plan, told = tmp_path / "plan.json", tmp_path / "rows.json"
    words = ["--policy", policy, *POLICIES[policy], "--ranks", "8", "--output", str(plan)]
    code, out, err = narrow("adapt", str(gradients), *words, "--json", str(told))
    assert (code, err) == (0, "")
    said = "".join(out.split())
    assert f"written:{plan}" in said
    assert f"written:{told}" in said
    written, saved = json.loads(told.read_text()), narrowband.Plan.load(plan)
    assert written.keys() >= {"command", "commit", "machine", "versions", "config", "rows", "all"}
    assert written["config"]["gradients"] == str(gradients)
    assert {row["layer"]: row["spec"] for row in written["rows"]} == saved.specs()
    assert [row["nbytes"] for row in written["rows"]] == [layer.nbytes for layer in saved.layers]
    whole = written["all"]
    assert (whole["ranks"], whole["nbytes"], whole["ratio"]) == (8, saved.nbytes, saved.ratio)
    for row in (*written["rows"], whole):
        assert f"{row['ratio']:.1f}" in out
        assert row["relative_error"] is None if policy == "threshold" else f"{row['relative_error']:.2g}" in out
    assert (whole["times_fewer"] is None) == (policy == "threshold")


def test_adapt_draws_a_profile(narrow, gradients, tmp_path):
    code, _, err = narrow("adapt", str(gradients), "--plot", str(tmp_path / "plan.png"))
    assert (code, err) == (0, "")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_adapt_says_what_is_wrong_with_a_file(narrow, tmp_path):
    path = tmp_path / "gradients.pt"
    path.write_text("no tensors")
    assert narrow("adapt", str(path))[0] == 2
    torch.save([torch.ones(3)], path)
    assert "must hold a dict of tensors" in narrow("adapt", str(path))[2]
    torch.save({"bias": torch.ones(3)}, path)
    assert "at least min_numel=1024" in narrow("adapt", str(path))[2]


@pytest.mark.parametrize("words", [("--help",), ("doctor",)])
def test_a_narrow_terminal_cuts_no_word(narrow, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = narrow(*words)
    assert not re.search(r"\w…( |$)", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 40


def test_doctor_says_what_there_is(narrow, tmp_path):
    code, out, _ = narrow("doctor", "--json", str(tmp_path / "found.json"))
    assert code == 0
    for word in ("torch", "gloo", "CUDA", "numba", "matplotlib", "emulated rates"):
        assert word in out
    findings = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert {"name": "gloo", "good": True, "detail": "collectives on CPU"} in findings


@pytest.mark.parametrize(
    ("version", "good", "said"),
    [
        ("2.10.1+cpu", False, "too old"), ("2.11.0", True, "tried with 2.11 to 2.15"), ("2.15.3", True, "tried with"),
        ("2.16.0a0+git1234567", False, "newer than any that was tried"), ("3.0.0", False, "pip install 'torch<2.16'"),
    ],
)  # fmt: skip
def test_doctor_says_whether_this_pytorch_was_tried(version, good, said, monkeypatch):
    from narrowband.cli import doctor

    monkeypatch.setattr(torch, "__version__", version)
    (found,) = doctor._pytorch()
    assert found.good is good
    assert said in found.detail
    assert version in found.detail


def test_doctor_says_once_what_links_lack(monkeypatch):
    from narrowband import lab
    from narrowband.cli import doctor

    monkeypatch.setattr(lab, "requirements", lambda config: ["no namespaces"] + ["no netem"] * bool(config.delay))
    assert [(each.good, each.detail) for each in doctor._links()] == [(False, "no namespaces"), (False, "no netem")]
    monkeypatch.setattr(lab, "requirements", lambda _: ["no namespaces"])
    assert [each.detail for each in doctor._links()] == ["no namespaces", "need the same as emulated rates"]


def test_help_of_the_lab_runs_scripts_that_are_there(narrow):
    _, out, _ = narrow("lab", "--help")
    scripts = re.findall(r"-- python (\S+)", out)
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


def test_those_are_the_versions_that_are_tried():
    from narrowband.cli import doctor

    oldest, newest = doctor._TRIED
    assert f'"torch>=2.{oldest}"' in (ROOT / "pyproject.toml").read_text()
    assert f"range({oldest}, {newest + 1})" in (ROOT / "noxfile.py").read_text()


def test_doctor_says_what_a_gpu_and_its_software_are():
    from narrowband.cli import doctor

    card = GPU("Card 9", 2, 80 * 10**9, "9.0", "570.86.15", "12.8", "3.4.0", "2.27.3")
    found = {each.name: each for each in doctor._about_gpu(card, (["a", "b", "c"], ["all_zero", "d"]))}
    assert found["CUDA"].detail == "2 × Card 9, 80 GB, compute capability 9.0"
    assert found["driver"].detail == "570.86.15; torch is built for CUDA 12.8"
    assert found["loops on GPU"].detail == "3 in Triton 3.4.0; 2 in plain torch: all_zero, d"
    assert all(each.good for each in found.values())

    old = dataclasses.replace(card, driver=None, triton=None)
    found = {each.name: each for each in doctor._about_gpu(old, None)}
    assert "neither the system nor nvidia-smi tells" in found["driver"].detail
    assert not found["loops on GPU"].good
    assert "Triton is missing" in found["loops on GPU"].detail


def test_bench_kernels_writes_what_other_programs_read(narrow, tmp_path):
    target = tmp_path / "kernels.json"
    code, out, _ = narrow(
        "bench", "kernels", "--numel", "5000", "--repeats", "1", "--loops", "all-finite", "--json", str(target)
    )
    assert code == 0
    assert "all-finite" in out
    written = json.loads(target.read_text())
    assert written.keys() >= {"command", "commit", "machine", "versions", "seed", "rows"}
    assert written["rows"][0].keys() >= {"loop", "backend", "numel", "ms", "ratio_to_copy"}


def test_bench_adapt_writes_what_other_programs_read(narrow, tmp_path):
    path = tmp_path / "adapt.json"
    words = ("--model", "gpt-tiny", "--steps", "40", "--json", str(path), "--plans", str(tmp_path / "plans"))
    words += ("--ranks", "4", "16", "--references", "powersgd:rank=4", "qsgd:bits=4+ef")
    code, out, err = narrow("bench", "adapt", *words)
    assert (code, err) == (0, "")
    rows = json.loads(path.read_text())["rows"]
    references = [row["name"] for row in rows[:4:2]]
    names = [*references, *(f"mixed, at {name}" for name in references)]
    assert [(row["name"], row["ranks"]) for row in rows[:-1]] == [(name, ranks) for name in names for ranks in (4, 16)]
    assert rows[-1]["name"] == "program alone"
    assert 0 <= rows[-1]["over_bound"] < 0.01
    for row in rows[:-1]:
        assert row["name"].split(":")[0] in out
        assert row["times_fewer"] > 1
        assert row["times_fewer"] >= row["times_fewer_by_payloads"] * (1 - 1e-9)
        assert row["error_of_reference"] <= 1 + 1e-9
        assert row["nbytes"] < row["reference_nbytes"]
        assert 0 < row["relative_error"] < 1
        assert 0 < row["reference_relative_error"] < 1
    for own, mixed in zip(rows[:4], rows[4:-1], strict=True):
        assert mixed["nbytes"] <= own["nbytes"]  # at the same error
        assert mixed["families"] != own["families"] or mixed["nbytes"] == own["nbytes"]
    assert f"planswrittento{tmp_path / 'plans'}" in "".join(out.split())
    saved = {file.stem: narrowband.Plan.load(file) for file in (tmp_path / "plans").iterdir()}
    assert saved["powersgd-rank-4-among-4"].nbytes == rows[0]["nbytes"]
    assert saved["mixed-at-powersgd-rank-4-among-16"].nbytes == rows[5]["nbytes"]
    assert len(saved) == len(rows) - 1


def test_bench_ddp_writes_what_other_programs_read(narrow, tmp_path):
    target = tmp_path / "ddp.json"
    words = "--nodes 2 --rate none --model gpt-tiny --codecs none --rounds 1 --steps 1"
    code, out, _ = narrow("bench", "ddp", *words.split(), "--json", str(target))
    assert code == 0
    assert "no-communication" in out
    rows = json.loads(target.read_text())["rows"]
    assert [row["codec"] for row in rows] == ["no-communication", "none"]
    for row in rows:
        assert row.keys() >= {
            "codec", "rate", "nodes", "step_s", "ratio_to_compute", "sent_bytes_per_step", "link_bytes_per_step",
            "relative_error",
        }  # fmt: skip


@pytest.mark.lab
def test_lab_passes_on_the_exit_code_and_writes_the_counts(narrow, tmp_path):
    target = tmp_path / "lab.json"
    # Rank 1 waits for rank 0's word: once a rank has failed, all are ended.
    told = """[ $RANK = 0 ] && echo '{"loss": 1.5, "worst": NaN}' > $NARROWBAND_TOLD/0.json
        until [ -s $NARROWBAND_TOLD/0.json ]; do sleep 0.02; done; exit $RANK"""
    code, out, _ = narrow("lab", "--nodes", "2", "--json", str(target), "--", "sh", "-c", told)
    assert code == 1
    assert "exit code" in out
    assert f"written:{target}" in "".join(out.split())
    written = json.loads(target.read_text())
    assert [rank["rank"] for rank in written["ranks"]] == [0, 1]
    assert written["exit_code"] == 1
    assert written["told"] == [{"loss": 1.5, "worst": None}, None]  # JSON has no NaN


@pytest.mark.lab
def test_ctrl_c_loses_no_counts_of_a_lab(tmp_path):
    target, told = tmp_path / "lab.json", 'echo "[$RANK]" > "$NARROWBAND_TOLD/$RANK.json"'
    both = f'until [ -s "$NARROWBAND_TOLD/1.json" ]; do sleep 0.02; done; touch {tmp_path}/ready-$RANK'
    ranks = ["sh", "-c", f"{told}; {both}; exec sleep 60"]
    said = stopped(["lab", "--nodes", "2", "--json", str(target), "--", *ranks], tmp_path, "ready-0")
    assert f"written: {target}" in said
    written = json.loads(target.read_text())
    assert written["exit_code"] == 128 + signal.SIGINT
    assert [rank["exit_code"] for rank in written["ranks"]] == [128 + signal.SIGINT] * 2
    assert written["told"] == [[0], [1]]
    assert all(rank["sent_bytes"] >= 0 for rank in written["ranks"])


def test_ctrl_c_keeps_finished_rows_and_resume_goes_on(narrow, tmp_path):
    words = ["demo", "--nodes", "2", "--model", "gpt-tiny", "--steps", "12", "--codecs", "qsgd:bits=4"]
    words += ["--out", str(tmp_path)]
    said = stopped(words, tmp_path, "rows/none-*.json")
    assert "the same command with --resume goes on from there" in said
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("rows/*.json")}

    code, out, err = narrow(*words, "--resume")
    assert (code, err) == (0, "")
    assert "Verdict" in out
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["codec"] for row in summary["rows"]] == ["none", "fp16", "qsgd:bits=4"]
    assert summary.keys() >= {"rows", "verdict", "machine", "versions", "seed", "commit", "command"}
    assert Path(tmp_path / "loss.png").exists() or "matplotlib" in out


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody says what a process has loaded")
@pytest.mark.parametrize(
    ("mapped", "libc", "said"),
    [
        ("7f00-7f01 r-xp /usr/lib/libjemalloc.so.2", "glibc", "jemalloc: memory that forward frees is used again"),
        ("7f00-7f01 r-xp /usr/lib/libc.so.6", "glibc", "glibc's malloc, with which compress_activations"),
        ("7f00-7f01 r-xp /usr/lib/libc.so", "", None),
    ],
)
def test_doctor_says_which_allocator_hands_out_memory(mapped, libc, said, monkeypatch):
    from narrowband.cli import doctor

    monkeypatch.setattr(doctor.Path, "read_text", lambda _: mapped)
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: (libc, ""))
    details = [finding.detail for finding in doctor._allocator()]
    assert [detail.startswith(said) for detail in details] == ([True] if said else [])


def doctor_beside(package, says, tmp_path):
    """The doctor, where a package fails as it is imported."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise {says}")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "narrowband.cli", "doctor"]
    env = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(command, check=False, env=env, capture_output=True, text=True)


def test_doctor_says_that_numba_does_not_work(tmp_path):
    done = doctor_beside("numba", "ImportError('Numba needs NumPy 2.3 or less')", tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"no +loops on CPU +Numba needs NumPy 2.3 or less", done.stdout)


@pytest.mark.parametrize(
    "says",
    [
        "ImportError('libcudnn.so.9: cannot open shared object file')",  # a build for CUDA without CUDA's libraries
        "ModuleNotFoundError(\"No module named 'torch'\", name='torch')",  # what Python says where there is none
    ],
)
def test_doctor_says_that_pytorch_cannot_be_imported(says, tmp_path):
    done = doctor_beside("torch", says, tmp_path)
    assert done.returncode == 2, done.stdout
    assert f"torch cannot be imported: {says.partition('(')[0]}: " in done.stderr
    assert "pip check says what is missing" in done.stderr
    assert "report it" not in done.stderr


def test_doctor_finds_the_project_that_has_our_name_on_pypi(narrow, tmp_path, monkeypatch):
    from narrowband.cli import doctor

    monkeypatch.setattr(doctor, "_NAMESAKE", "namesake-of-nobody")
    assert [finding.name for finding in doctor._namesake()] == []
    (tmp_path / "Namesake_Of_Nobody-0.2.1.dist-info").mkdir()
    (tmp_path / "Namesake_Of_Nobody-0.2.1.dist-info" / "METADATA").write_text(
        "Name: Namesake-Of-Nobody\nVersion: 0.2.1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    _, out, _ = narrow("doctor")
    said = " ".join(out.split())
    assert "no import narrowband the distribution 'namesake-of-nobody' 0.2.1 is installed: another project" in said
    assert "pip uninstall namesake-of-nobody torch-narrowband; pip install . in the clone" in said


def test_the_demo_tells_one_rank_that_it_sends_nothing(narrow, tmp_path):
    words = "demo --nodes 1 --model gpt-tiny --steps 2 --codecs qsgd:bits=4 --out"
    code, out, err = narrow(*words.split(), str(tmp_path))
    assert (code, err) == (0, "")
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    assert "One rank sends nothing: what follows shows what codecs cost, and not what they save." in said
    assert "One rank sends nothing, so there is nothing to compress" in said
    assert "Estimated step" not in said
    assert "nan" not in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["estimates"] == []
    assert [row["times_less_traffic"] for row in summary["rows"]] == [None] * 3


@pytest.mark.parametrize(("timeout", "code", "says"), [(2.0, 124, True), (2.0, 1, False), (None, 124, False)])
def test_the_lab_says_that_its_time_was_up(timeout, code, says):
    console = Console(file=io.StringIO(), width=120)
    Lab(timeout=timeout)._show(LabReport(seconds=2.1, exit_code=code, ranks=[]), console)
    assert console.file.getvalue().endswith("The ranks were ended after --timeout 2 s.\n") == says
