"""Pages and pictures in docs/ are what ``python -m reproduce.pages`` makes of the records, and nothing else."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from narrowband.planning import DDP
from reproduce import benchmarks, guide, predictions
from reproduce.pages import FRONT, GUIDE, PAGES, main, record_of
from reproduce.pictures import THEMES, Bar, Panel, drawn, write

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def texts(picture):
    """What a reader sees, label before value."""
    return [element.text for element in ET.fromstring(picture).iter(f"{SVG}text")]


def bars(picture):
    """Lengths of bars, without the ground below them."""
    rectangles = list(ET.fromstring(picture).iter(f"{SVG}rect"))
    whole = max(float(bar.get("width")) for bar in rectangles)
    ground = rectangles[0].get("fill")
    return [float(bar.get("width")) / whole for bar in rectangles if bar.get("fill") != ground]


@pytest.mark.parametrize("module", PAGES)
def test_a_page_says_what_its_record_says(module, tmp_path):
    """Run ``python -m reproduce.pages`` where this fails, and look at what has changed."""
    pictures = DOCS / "results" / "pictures" / module
    again = tmp_path / "pictures" / module
    again.mkdir(parents=True)
    for picture in pictures.glob("*.png"):  # of curves, which matplotlib draws when rows are trained
        (again / picture.name).touch()
    PAGES[module](record_of(module), tmp_path / f"{module}.md")
    assert (tmp_path / f"{module}.md").read_text() == (DOCS / "results" / f"{module}.md").read_text()
    for picture in pictures.glob("*.svg"):
        assert (again / picture.name).read_text() == picture.read_text()


def test_the_page_of_benchmarks_says_what_its_records_say(tmp_path):
    benchmarks.page(benchmarks.records(), tmp_path / "benchmarks.md")
    assert (tmp_path / "benchmarks.md").read_text() == (DOCS / "results" / "benchmarks.md").read_text()
    for theme in THEMES:
        place = f"pictures/benchmarks/opening-{theme}.svg"
        assert (tmp_path / place).read_text() == (DOCS / "results" / place).read_text()


def test_the_page_of_predictions_says_what_its_record_says(tmp_path):
    predictions.page(predictions.record(), tmp_path / "predictions.md")
    assert (tmp_path / "predictions.md").read_text() == (DOCS / "results" / "predictions.md").read_text()
    for theme in THEMES:
        place = f"pictures/predictions/opening-{theme}.svg"
        assert (tmp_path / place).read_text() == (DOCS / "results" / place).read_text()


def test_claims_about_predictions_follow_their_rows():
    """Of two links, one where all is well and one where the error, the side and the choice are wrong."""
    found = predictions.record() | {"further": {}}
    rows = [
        {
            "codec": codec,
            "rate": rate,
            "nodes": 2,
            "predicted_step_s": said,
            "measured_step_s": 1.0,
            "error": said - 1.0,
        }
        for rate, said_fp16 in (("200mbit", 1.05), ("1gbit", 1.5))
        for codec, said in (("DDP", 1.0), ("fp16", said_fp16))
    ]
    for row in rows:
        row["at_that_speed_error"] = 0.0
    verdicts = [
        {
            "rate": "200mbit",
            "nodes": 2,
            "slower_by": 0.0,
            "is_right": True,
            "sides": [{"codec": "fp16", "is_right": None}],
        },
        {
            "rate": "1gbit",
            "nodes": 2,
            "slower_by": 0.3,
            "is_right": False,
            "sides": [{"codec": "fp16", "is_right": False}],
        },
    ]
    held = [claim.held for claim in predictions.claims(found | {"rows": rows, "verdicts": verdicts})]
    assert held == [True, False, False, False]
    held = [claim.held for claim in predictions.claims(found | {"rows": rows[:2], "verdicts": verdicts[:1]})]
    assert held == [True, True, True, True]


def test_records_of_rounds_and_of_levels_have_sections_and_claims_of_their_own(tmp_path):
    """Of rounds, one prediction is far off, and on the wrong side; the page says which."""
    found = predictions.record() | {"further": {}}
    config = {"model": "gpt-demo", "per_node": 1}
    rows = [
        {
            "codec": codec,
            "rate": "20mbit/100mbit",
            "nodes": 4,
            "predicted_step_s": said,
            "measured_step_s": 1.0,
            "error": said - 1.0,
            "at_that_speed_error": 0.0,
        }
        for codec, said in ((DDP, 1.1), ("updates every 15, qsgd:bits=2+ef", 1.4), ("qsgd:bits=4", 0.5))
    ]
    sides = [{"codec": "qsgd:bits=4", "is_right": True}, {"codec": rows[1]["codec"], "is_right": False}]
    verdict = {"rate": "20mbit/100mbit", "nodes": 4, "slower_by": 0.0, "is_right": True, "sides": sides}
    verdict |= {"predicted_best": DDP, "measured_best": DDP}
    rounds = found | {"config": config, "rows": rows, "verdicts": [verdict], "command": "narrowband bench plan --every"}
    levels = rounds | {"config": config | {"per_node": 2}}
    for name, each in (("plan", found), ("plan-rounds", rounds), ("plan-levels", levels)):
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    found = predictions.record(tmp_path)
    titles = ["Rounds of updates, asymmetric links", "Several ranks in a machine"]
    assert list(found["further"]) == titles
    assert [claim.held for claim in predictions.claims(found) if claim.topic == titles[0]] == [
        False,
        False,
        False,
        True,
    ]
    predictions.page(found, tmp_path / "predictions.md")
    page = (tmp_path / "predictions.md").read_text()
    for title in titles:
        assert f"### {title}" in page, "claims"
        assert f"## {title}" in page, "rows"
    where = "4 ranks, 20 Mbit/s up and 100 Mbit/s down"
    assert f"### {where}" in page
    assert f"- `qsgd:bits=4`, {where}: -50.0%\n- updates every 15, `qsgd:bits=2+ef`, {where}: +40.0%\n" in page
    assert "not updates every 15, `qsgd:bits=2+ef` on 4 machines of 2 ranks at 20 Mbit/s up" in page
    assert "trained a GPT of 3.3 million parameters on 4 machines of 2 ranks" in page
    assert page.count("Command: `narrowband bench plan --every`") == 2


def test_the_readme_says_how_far_predictions_are_off():
    off = [abs(row["error"]) for row in predictions.record()["rows"]]
    said = f"off by [{100 * statistics.median(off):.1f} % in the median](docs/results/predictions.md) of {len(off)}."
    assert said in (ROOT / "README.md").read_text().replace("\n", " ")


def test_tables_of_the_guide_say_what_their_records_say():
    page = (DOCS / GUIDE).read_text()
    assert guide.rewritten(page, record_of("local"), record_of("local_times")) == page
    old = page.replace("uncompressed | 1 × | 1", "uncompressed | 2 × | 2").replace(" min |", " hours |")
    assert guide.rewritten(old, record_of("local"), record_of("local_times")) == page
    with pytest.raises(ValueError, match=r"has 2 tables that begin with '\| sent \| less traffic"):
        guide.rewritten(page + page, record_of("local"), record_of("local_times"))
    with pytest.raises(ValueError, match=r"has 0 tables that begin with '\| sent \| 20 Mbit/s"):
        guide.rewritten(page.replace("| 20 Mbit/s |", "| 30 Mbit/s |"), record_of("local"), record_of("local_times"))


@pytest.mark.parametrize("module", ["benchmarks", "predictions", *PAGES])
def test_a_page_opens_with_three_short_paragraphs(module):
    page = (DOCS / "results" / f"{module}.md").read_text()
    for part in ("What was asked", "What was run", "What came out"):
        (said,) = re.findall(rf"^\*\*{part}\.\*\* (.+)$", page, re.MULTILINE)
        assert said[0].isupper() or said.startswith("`"), said
        assert said[-1] in ".?", said
        assert len(said) < 600, said


@pytest.mark.parametrize("module", ["benchmarks", "predictions", *PAGES])
def test_pages_call_what_is_not_compressed_uncompressed(module):
    """Records call these rows dense, which a reader need not know."""
    pages = [DOCS / "results" / f"{module}.md", *(DOCS / "results/pictures" / module).glob("*.svg")]
    for page in pages:
        assert not re.search(r"\bdense\b", page.read_text()), page


def corrections():
    """Rows of the page of corrected claims: what was said, what was wrong with it, what is said now."""
    for line in (DOCS / "results" / "corrections.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| said", "| ---")):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("row", list(corrections()), ids=lambda row: row[0][:40])
def test_what_was_corrected_is_still_what_the_page_says(row):
    """Where this fails, the page of corrections tells figures that another page has no longer."""
    _, _, now = row
    linked = re.findall(r"\]\(([^)#]+\.md)", now)
    pages = "\n".join((DOCS / "results" / page).read_text() for page in linked)
    for figure in re.findall(r"[+-]?\d+\.\d+(?: %)? ± \d+\.\d+(?: %)?|\d+\.\d+", now) if linked else ():
        assert figure in pages, figure


@pytest.mark.parametrize("theme", THEMES)
def test_the_front_picture_shows_the_records_figures(theme):
    picture = (DOCS / f"{FRONT}-{theme}.svg").read_text()
    assert picture == drawn(benchmarks.front(benchmarks.records()), theme)
    results = ROOT / "benchmarks" / "results"
    steps = {row["codec"]: row for row in json.loads((results / "ddp-200mbit.json").read_text())["rows"]}
    record = json.loads((ROOT / "reproduce" / "results" / "optimizers" / "summary.json").read_text())
    gaps = {(line["optimizer"], line["spec"]): line["gap"] for line in record["lines"]}
    specs = {
        "uncompressed": "none",
        "16 bits": "fp16",
        "4 bits": "qsgd:bits=4",
        "PowerSGD, rank 4": "powersgd:rank=4",
        "largest 1 %": "topk:density=0.01+ef",
    }
    shown = texts(picture)
    for label, spec in specs.items():
        assert shown[shown.index(label) + 1] == f"{steps[spec]['ratio_to_compute']:.1f}×"
    shown = shown[shown.index("Loss that it adds") :]
    for label, spec in specs.items():
        with_adamw, with_sgd = (float(text.replace("−", "-")) for text in shown[shown.index(label) + 1].split(" / "))
        assert with_adamw == pytest.approx(gaps["adamw", spec], abs=0.051)
        assert with_sgd == pytest.approx(gaps["sgd", spec], abs=0.051)


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.name)
def test_who_cannot_see_the_front_picture_is_told_its_figures(page):
    (alt,) = re.findall(r"(?:alt=\"|!\[)([^\"\]]*200 Mbit/s[^\"\]]*)", page.read_text())
    for bar in itertools.chain.from_iterable(panel.bars for panel in benchmarks.front(benchmarks.records())):
        for figure in bar.said.rstrip("×").split(" / "):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", alt), (bar, figure)


def test_the_command_writes_every_page_and_the_front_picture(tmp_path, capsys):
    guided = tmp_path / GUIDE
    guided.parent.mkdir(parents=True)
    guided.write_text((DOCS / GUIDE).read_text())
    assert main(["--docs", str(tmp_path)]) == 0
    assert {path.stem for path in (tmp_path / "results").glob("*.md")} == {*PAGES, "benchmarks", "predictions"}
    assert (tmp_path / f"{FRONT}-dark.svg").exists()
    assert "dgc.md" in re.sub(r"\s", "", capsys.readouterr().out)


PANELS = [
    Panel("Left <b>", "s; less is better", [Bar("a & b", 9.0, "9.0 s"), Bar("c", 1.5, "1.5 s", strong=True)]),
    Panel("Right", "MB", [Bar("nothing", 0.0, "0 MB"), Bar("none", None, "diverged"), Bar("all", 2.0, "2 MB")]),
    Panel("Below", "MB", [Bar("d", 1.0, "1 MB")]),
]


def test_bars_are_as_long_as_their_values():
    assert bars(drawn(PANELS, "light")) == pytest.approx([1.0, 1.5 / 9.0, 1.0, 1.0], abs=1e-3)


def test_a_picture_is_read_out_and_stands_alone():
    picture = drawn(PANELS, "dark")
    title = ET.fromstring(picture).find(f"{SVG}title").text
    assert title.startswith("Left <b> (s; less is better): a & b: 9.0 s; c: 1.5 s. Right (MB): nothing: 0 MB;")
    assert texts(picture)[:4] == ["Left <b>", "s; less is better", "a & b", "9.0 s"]
    assert not re.search(r"href|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", picture)


def test_a_picture_is_written_for_every_theme(tmp_path):
    write(PANELS, tmp_path / "new" / "bars")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"bars-light.svg", "bars-dark.svg"}


def test_in_a_wide_font_no_text_of_a_picture_runs_into_another():
    matplotlib = pytest.importorskip("matplotlib", reason="it brings a wide font along")
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    plain, bold = (ImageFont.truetype(str(folder / f"{name}.ttf"), 1000) for name in ("DejaVuSans", "DejaVuSans-Bold"))
    pictures = [DOCS / f"{FRONT}-light.svg", *DOCS.glob("results/pictures/*/opening-light.svg")]
    for path in pictures:
        picture = ET.fromstring(path.read_text())
        style = picture.find(f"{SVG}style").text
        sizes = {kind: float(size) / 1000 for kind, size in re.findall(r"\.(\w) \{ font-size: ([\d.]+)px", style)}
        panel = max(float(bar.get("width")) for bar in picture.iter(f"{SVG}rect"))
        label = 0.0
        for text in picture.iter(f"{SVG}text"):
            kind = text.get("class")
            width = (bold if kind in "tv" else plain).getlength(text.text) * sizes[kind]
            taken = label + 10.0 + width if kind == "v" else width
            assert taken < panel, (path, text.text)
            label = width if kind == "l" else 0.0
