"""Pages of runs and of records, in a real browser: they load by themselves, and every chart has its marks."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from importlib import metadata

import pytest

from narrowband.averaging import LayerStats
from narrowband.cli import main
from narrowband.errors import UnsupportedError
from narrowband.report import run_page as run_pages
from narrowband.report.record_page import Curves, record_page
from narrowband.report.recorder import Run, read_run
from narrowband.report.run_page import run_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)")

SPECS = ("powersgd:rank=4", "powersgd:rank=2")


def layer(step, at, error=0.3):
    return LayerStats(SPECS[(step + at) % 2], 64 * 64, 32768, 1024 * (at + 1), error, 0.1 * step * (at + 1))


def a_run(*, seconds=0.2, skipped=(7,), losses=True, ended=True, layers=3, spec="powersgd:rank=4"):
    values = {
        step: {
            "seconds": seconds, "waiting_s": 0.05, "encode_s": 0.01, "wire_s": 0.1, "decode_s": 0.01, "decide_s": 0.0,
            "sent_bytes": 2e4, "raw_bytes": 4e5, "skipped": float(step in skipped), "relative_error": 0.3,
            **({"loss": 2.0 / step} if losses else {}),
        }
        for step in range(1, 21)
    }  # fmt: skip
    of_layers = {step: {f"blocks.{at}.</script>w": layer(step, at) for at in range(layers)} for step in (1, 10, 20)}
    start = {"spec": spec, "ranks": 4, "machine": {"cpu": "<b>x</b>"}, "versions": {"torch": "2"}}
    return Run(start, values, of_layers, ended=ended)


def plain_run(**what):
    """The same training without compression."""
    return a_run(spec="none", **what)


#: The kind of mark that each chart of a whole run has, and how many at least.
MARKS = {"loss": ("line", 2), "clock": ("line", 2), "time": ("line", 3), "parts": ("line", 3), "sent": ("line", 2),
         "error": ("line", 1), "layers": ("rect", 3), "errors": ("rect", 3), "policy": ("rect", 9),
         "residuals": ("rect", 9), "skipped": ("rect", 1)}  # fmt: skip


def seen(page, tmp_path, *flags):
    """What a browser makes of a page: its document, and what went wrong, on a machine without any network."""
    path = tmp_path / "page.html"
    path.write_text(page)
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'browser'}"]
    command = [CHROMIUM, "--headless", "--no-sandbox", *quiet, "--enable-logging=stderr", *flags]
    done = subprocess.run(
        [*command, "--virtual-time-budget=20000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def charts_of(document):
    """Name → the chart's drawing."""
    parts = re.split(r'<div class="chart[^"]*" id="(\w+)"', document)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def page():
    return run_page(a_run(), "a run", beside=plain_run(seconds=0.1, skipped=()))


@pytest.fixture(scope="module")
def by_light(page, tmp_path_factory):
    return seen(page, tmp_path_factory.mktemp("light"))


@needs_browser
def test_every_chart_of_a_run_has_its_marks_and_nothing_is_fetched(page, by_light):
    document, errors = by_light
    assert errors == []
    charts = charts_of(document)
    assert charts.keys() == MARKS.keys()
    for name, (kind, least) in MARKS.items():
        marks = re.findall(rf'class="mark-{kind} role-mark[^"]*".*?</g>', charts[name])
        assert sum(mark.count("<path") for mark in marks) >= least, name
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', page.partition("<script>")[0])


@needs_browser
def test_it_is_light_or_dark_as_the_reader_has_it(page, by_light, tmp_path):
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]
    inks = set()
    for document, errors in (by_light, seen(page, tmp_path, *dark)):
        assert errors == []
        axis = charts_of(document)["loss"]
        inks |= {tuple(sorted(set(re.findall(r'fill="(#\w+)"', axis))))}
    assert len(inks) == 2


@needs_browser
def test_a_benchmark_has_a_chart_for_every_number_that_differs(tmp_path):
    rows = [
        {"codec": "none", "rate": "1gbit", "step_s": 0.5, "sent_bytes": 100, "nodes": 4, "rounds": [1, 2]},
        {"codec": "topk", "rate": "1gbit", "step_s": 0.2, "sent_bytes": 10, "nodes": 4, "error": None},
    ]
    page = record_page({"rows": rows, "command": "narrowband bench"}, "a record")
    document, errors = seen(page, tmp_path)
    assert errors == []
    charts = charts_of(document)
    assert len(charts) == 2  # nodes are the same everywhere
    assert "step, seconds" in document
    for chart in charts.values():
        assert ">none<" in chart
        assert ">topk<" in chart
        assert re.search(r'class="mark-rect role-mark[^"]*".*?<path.*?<path', chart)


@needs_browser
def test_what_is_had_for_what_is_a_chart_of_dots_with_names(tmp_path):
    rows = [
        {"name": name, "ratio_to_plain": ratio, "kept_bytes": kept}
        for name, ratio, kept in (("plain", 1.0, 1000), ("8 bits", 1.1, 200), ("nothing", 1.2, 0))
    ]
    document, errors = seen(record_page({"rows": rows, "command": "narrowband bench"}, "a record"), tmp_path)
    assert errors == []
    chart = charts_of(document)["plane0"]
    assert ">plain<" in chart
    assert ">8 bits<" in chart
    assert ">nothing<" not in chart  # its logarithm has no place
    assert re.search(r'class="mark-symbol role-mark[^"]*".*?<path.*?<path', chart)


def specs_of(page):
    return json.loads(re.search(r"const charts = (\{.*\});\n", page)[1])


def test_every_chart_is_one_that_vega_lite_knows():
    """Which is looked at here, and not whenever a page is made: that takes many times as long as all the rest."""
    alt, jsonschema = pytest.importorskip("altair"), pytest.importorskip("jsonschema")
    rows = [
        {"name": name, "ratio_to_plain": at + 1.0, "kept_bytes": at + 1.0, "step_s": at, "sent_bytes_per_step": at}
        for at, name in enumerate("abc")
    ]
    curves = [Curves("losses", "nats", {"a": [(1, 2.0), (2, 1.0)]})]
    charts = specs_of(run_page(a_run(), "x", beside=plain_run())) | specs_of(record_page({"rows": rows}, "x", curves))
    assert charts.keys() >= {*MARKS, "curves0", "plane0", "plane2", "chart0"}
    for name, unit in (("loss", 1), ("clock", 0.2)):  # rows of the one become those of the other
        steps = [row["step"] for row in charts[name]["datasets"]["rows"] if row["what"] == "this run"]
        assert steps == pytest.approx([unit * (step if unit == 1 else step - 1) for step in range(1, 21)], abs=0.21)
    for spec in charts.values():
        alt.Chart.from_dict(spec)  # checks it
    with pytest.raises(jsonschema.ValidationError):
        alt.Chart.from_dict(charts["loss"] | {"mark": {"type": "scribble"}})


def test_units_of_fields_are_written_out():
    rows = [{"name": name, "tokens_per_s": at, "step_ms": at, "sent_nbytes": at} for at, name in enumerate("ab")]
    page = record_page({"rows": rows}, "a record")
    assert re.findall(r"<h2>([^<$]+)</h2>", page) == ["tokens per second", "step, milliseconds", "sent, bytes"]


def test_the_sentence_says_what_compression_did_and_when_it_was_not_worth_it():
    def verdict(page):
        return re.search(r'<p class="verdict">(.*?)</p>', page)[1].replace("&#39;", "'")

    slower = verdict(run_page(a_run(), "x", beside=plain_run(seconds=0.1)))
    assert "A step sent 20 kB instead of 400 kB, 20 times less, and took 200 ms" in slower
    assert "waited 50 ms (25%) for averages" in slower
    assert "compression made steps 2.00 times as slow: on this link, do not compress." in slower
    assert slower.endswith("The loss of the last steps is 0.0% above that without compression.")
    better = plain_run(seconds=0.8)
    for values in better.steps.values():
        values["loss"] *= 0.8
    faster = verdict(run_page(a_run(), "x", beside=better))
    assert "made steps 4.00 times as fast. The loss of the last steps is 25.0% above" in faster
    assert verdict(run_page(a_run(losses=False), "x", beside=plain_run(seconds=0.8))).endswith("4.00 times as fast.")
    for seconds in (0.191, 0.2, 0.21):
        same = verdict(run_page(a_run(losses=False), "x", beside=plain_run(seconds=seconds)))
        assert same.endswith("which is the same to 5%: on this link, do not compress.")
    longer = plain_run()
    longer.steps |= {step: longer.steps[20] | {"loss": 1e-3} for step in range(21, 41)}
    one_side = verdict(run_page(a_run(), "x", beside=longer))
    assert one_side.endswith("last steps up to 20, which both runs have, is 0.0% above that without compression.")


def test_what_stands_beside_a_run_was_not_compressed(tmp_path, capsys):
    """Files that were given the wrong way round would be told that compression is slow."""
    run, plain = written(tmp_path / "run.jsonl", a_run()), written(tmp_path / "plain.jsonl", plain_run(seconds=0.8))
    assert main(["report", str(plain), "--beside", str(run)]) == 2
    assert "without compression, recorded with 'none'; it was recorded with 'powersgd:rank=4'" in (
        " ".join(capsys.readouterr().err.split())
    )
    assert not (tmp_path / "plain.html").exists()
    assert main(["report", str(run), "--beside", str(plain)]) == 0


def test_a_run_that_diverged_is_called_so_before_all_else():
    def shown(run, beside=None):
        page = run_page(run, "x", beside=beside)
        cards = {what: value for value, what in re.findall(r'<b>(.*?)</b><span class="soft">(.*?)</span>', page)}
        verdict = re.search(r'<p class="verdict">(.*?)</p>', page)[1]
        return verdict, cards, page.count("no longer finite since step")

    diverged, plain, spiked = a_run(seconds=0.1), plain_run(seconds=0.1), a_run()
    for step in range(13, 21):
        for each in (diverged, plain):
            each.steps[step].update(loss=math.nan, relative_error=math.inf)
    spiked.steps[12]["loss"] = spiked.steps[19]["loss"] = math.inf  # and then goes on
    said, cards, times = shown(diverged, plain_run())
    assert said.startswith("This run diverged: its loss is no longer finite since step 13. A step sent 20 kB")
    assert "The loss of the last steps" not in said
    assert (cards["last loss"], cards["last loss, uncompressed"]) == ("diverged", "0.1")
    assert cards["relative error"] == "not finite"
    assert times > 1  # beside the chart, which cannot show it, too
    said, cards, _ = shown(a_run(), plain)
    assert said.startswith("The run without compression diverged: its loss is no longer finite since step 13. A step")
    assert cards["last loss, uncompressed"] == "diverged"
    said, cards, times = shown(spiked, plain_run())
    assert said.endswith("The loss of the last steps is 2.6% below that without compression.")  # of the finite ones
    assert (cards["last loss"], times) == ("0.1", 0)


def test_what_was_not_recorded_has_no_chart_and_a_run_that_goes_on_says_so():
    page = run_page(a_run(losses=False, skipped=(), layers=0, ended=False), "x")
    assert "still going" in page
    assert "did not call recorder.close()" in page
    for name in ("loss", "skipped", "layers", "policy", "residuals"):
        assert f'id="{name}"' not in page
    assert 'id="time"' in page


def test_names_from_the_run_cannot_become_code():
    page = run_page(a_run(), "<script>alert(1)</script>")
    assert "<script>alert" not in page
    assert "<b>x</b>" not in page
    charts = page[page.index("const charts") : page.index("const darkness")]
    assert "</script" not in charts


def test_times_are_added_up_once_for_each_run_and_not_for_every_point(monkeypatch):
    made, clock = [], run_pages._clock
    monkeypatch.setattr(run_pages, "_clock", lambda run: made.append(run) or clock(run))
    run, beside = a_run(), plain_run(seconds=0.1)
    run_page(run, "x", beside=beside)
    assert made == [run, beside]


def test_a_long_run_makes_no_long_page():
    run = a_run()
    short = len(run_page(run, "x"))
    values = run.steps[20]
    long = Run(run.start, dict.fromkeys(range(1, 50000), values), run.layers)
    assert len(run_page(long, "x")) < short + 1_000_000


def written(path, run):
    start = {"kind": "start", "narrowband_run": 1, **run.start}
    steps = [{"kind": "step", "step": step, "steps": 1, "values": values} for step, values in run.steps.items()]
    path.write_text("\n".join(map(json.dumps, [start, *steps])) + "\n")
    return path


def test_the_command_makes_a_page_of_a_run_or_of_a_record(tmp_path, capsys):
    path = written(tmp_path / "run.jsonl", a_run())
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # it is still going
    assert main(["report", str(path)]) == 0
    assert '<h1>run</h1>\n<p class="soft">This run is still going' in (tmp_path / "run.html").read_text()
    named = written(tmp_path / "named.json", a_run())  # a recorder takes any name
    beside = written(tmp_path / "beside", plain_run())
    assert main(["report", str(named), "--beside", str(beside)]) == 0
    assert "A step sent" in (tmp_path / "named.html").read_text()
    record = tmp_path / "bench.json"
    record.write_text(json.dumps({"rows": [{"codec": "a", "ms": 1.0}, {"codec": "b", "ms": 2.0}]}))
    assert main(["report", str(record), "--output", str(tmp_path / "b.html")]) == 0
    assert "ms" in (tmp_path / "b.html").read_text()
    assert read_run(path).steps


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.jsonl", None, "No such file"),
        ("run.jsonl", "", "no records yet"),
        ("run.jsonl", '{"kind": "step"}\n', "its first line does not start a run"),
        ("run.jsonl", '{"rows": []}', "its first line does not start a run; nb.Recorder"),
        ("bench.json", '{"rows": [', "incomplete or not a JSON"),
        ("bench.json", "[]", "another program wrote it; give the file of an nb.Recorder, or what a benchmark wrote"),
        ("bench.json", '{"config": {}}', "has no rows"),
        (
            "bench.json",
            '{"rows": [{"codec": "a", "ms": 1.0}], "machine": 3}',
            "machine is 3; expected an object. Another program wrote this record",
        ),
    ],
)
def test_a_file_that_cannot_be_shown_is_one_sentence_and_nothing_is_written(tmp_path, capsys, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "delete" not in said
    assert [each.name for each in tmp_path.iterdir()] == ([] if content is None else [name])


def installed(folder, monkeypatch, name, version):
    """Let a package seem to be of another version than it is."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


def test_without_what_draws_it_is_one_sentence_with_a_remedy(tmp_path, capsys, monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    assert main(["report", str(written(tmp_path / "run.jsonl", a_run()))]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith(
        "altair is not installed: install the extra 'report' of narrowband: pip install '.[report]' in the clone"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    ("package", "version", "remedy"),
    [
        ("altair", "4.2.2", "altair>=5.5,<7"),
        ("altair", "7.0.0", "altair>=5.5,<7"),
        ("vl-convert-python", "0.14.0", "vl-convert-python>=1.7,<2"),
    ],
)
def test_another_version_of_what_draws_is_one_sentence_with_a_remedy(
    tmp_path, capsys, monkeypatch, package, version, remedy
):
    installed(tmp_path / "packages", monkeypatch, package, version)
    path = written(tmp_path / "run.jsonl", a_run())
    assert main(["report", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{package} {version} is installed, and narrowband works with" in said
    assert said.endswith(f"pip install -U '{remedy}'")
    assert not (tmp_path / "run.html").exists()
    # A measurement is kept all the same, without a page.
    rows = tmp_path / "rows.json"
    assert (
        main(
            [
                "bench",
                "kernels",
                "--loops",
                "topk-exact-select",
                "--repeats",
                "1",
                "--numel",
                "4096",
                "--json",
                str(rows),
            ]
        )
        == 0
    )
    assert json.loads(rows.read_text())["rows"]
    assert not rows.with_suffix(".html").exists()


def test_programs_that_do_not_go_together_are_one_sentence(monkeypatch):
    monkeypatch.setattr("altair.SCHEMA_VERSION", "v99.1.0")
    with pytest.raises(UnsupportedError, match=r"Vega-Lite v99.1, which this vl-convert does not support .*\[report\]"):
        run_page(a_run(), "x")
