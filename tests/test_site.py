"""What a visitor meets: the site as it is built, and the README."""

from __future__ import annotations

import functools
import html
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from narrowband.activations import ActivationPolicy
from narrowband.report.tables import demo_table

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
#: Pages of records; what was corrected on them is a table of its own.
RESULTS = [page for page in PAGES if page.startswith("results/") and page != "results/corrections.md"]

#: Where a guide's first heading is what people search for, the menu says the same.
NAMED_AS_IN_THE_MENU = ("how-to/", "results/", "tutorials/", "explanation/", "architecture", "gallery")


@pytest.fixture(scope="module")
def config():
    mkdocs = pytest.importorskip("mkdocs.config", reason="the docs extra is not installed: make docs")
    return mkdocs.load_config(str(ROOT / "mkdocs.yml"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if folder := os.environ.get("NARROWBAND_SITE"):  # .ci/run has built it already, in the same way
        assert (Path(folder) / "index.html").exists(), (
            f"NARROWBAND_SITE={folder} has no index.html: make docs builds one"
        )
        return Path(folder)
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: make docs installs it")
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def entries(nav):
    """Title and page of every entry of the menu; the title is None where the page's own is taken."""
    for entry in nav:
        if isinstance(entry, str):
            yield None, entry
            continue
        ((title, below),) = entry.items()
        if isinstance(below, str):
            yield title, below
        else:
            yield from entries(below)


class Elements(HTMLParser):
    """Start tags of a page, with their attributes, in order."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@functools.cache
def elements(page):
    """Start tags and attributes of a page; pages of the gallery are long."""
    return Elements(page).found


def test_the_menu_is_short_and_has_every_page(config):
    assert len(config["nav"]) <= 7
    assert sorted(page for _, page in entries(config["nav"])) == PAGES


def test_the_menu_calls_pages_what_they_call_themselves(config):
    for title, page in entries(config["nav"]):
        if title is not None and page.startswith(NAMED_AS_IN_THE_MENU):
            assert re.search(r"^# (.+)$", (DOCS / page).read_text(), re.MULTILINE)[1] == title, page


@pytest.mark.parametrize("page", RESULTS)
def test_a_page_of_results_begins_with_a_conclusion_and_a_picture(page):
    text = (DOCS / page).read_text()
    beginning = text[: text.index("| --- |")]
    for part in ("What was asked", "What was run", "What came out"):
        assert re.search(rf"^\*\*{part}\.\*\* ", beginning, re.MULTILINE), part
    pictures = re.findall(r"!\[.+?\]\(([^)#]+)(?:#only-(?:light|dark))?\)", beginning)
    assert pictures
    for picture in pictures:
        assert (DOCS / page).parent.joinpath(picture).exists(), picture


def test_every_picture_of_the_repository_is_shown():
    shown = {
        (DOCS / page).parent.joinpath(place).resolve()
        for page in PAGES
        for place in re.findall(r"\]\(([^)#\s]+\.(?:png|svg))", (DOCS / page).read_text())
    }
    assert {path.resolve() for path in (*DOCS.rglob("*.png"), *DOCS.rglob("*.svg"))} == shown


def test_pictures_are_there_and_said_in_words(site):
    for page in site.rglob("*.html"):
        for tag, attributes in elements(page):
            if tag == "img":
                assert attributes["alt"], f"{page}: {attributes['src']}"
                assert (page.parent / attributes["src"].partition("#")[0]).exists(), f"{page}: {attributes['src']}"


def test_pages_with_a_picture_in_mermaid_load_it_from_the_site(site):
    pages = [page for page in site.rglob("*.html") if 'class="mermaid"' in page.read_text(encoding="utf-8")]
    assert [page.name for page in pages] == ["architecture.html"]
    assert (site / "architecture.html").read_text(encoding="utf-8").count('class="mermaid"') == 2
    assert '<script src="javascripts/mermaid.js">' in pages[0].read_text(encoding="utf-8")
    assert b"mermaid" in (site / "javascripts/mermaid.js").read_bytes()[:1000]


def test_nothing_is_fetched_from_another_host(site):
    for page in site.rglob("*.html"):
        for tag, attributes in elements(page):
            place = attributes.get("src") or (attributes.get("href") if tag == "link" else None) or ""
            assert not re.match(r"(https?:)?//", place), f"{page} fetches {place}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


# ---- the gallery -----------------------------------------------------------------------------------------------------

#: Records whose numbers lie in lists within rows, or have another unit in every row: their pages would show little.
WITHOUT_A_PAGE = {
    "everything",
    "everything-sharded",
    "fidelity",
    "host",
    "lgreco_times",
    "local_times",
    "memory-budgets",
}


def records():
    """Name and record of everything in the repository that has rows."""
    results = ROOT / "benchmarks" / "results"
    for path in (
        *results.glob("*.json"),
        *results.glob("*/summary.json"),
        *ROOT.glob("reproduce/results/*/summary.json"),
    ):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("rows"):
            yield path.parent.name if path.stem == "summary" else path.stem, record


def linked_from_the_gallery(site):
    """Pages that the gallery links to or shows, by their names."""
    found = elements(site / "gallery.html")
    places = [attributes.get("href") or attributes.get("src") or "" for _, attributes in found]
    return {place[len("gallery/") : -len(".html")] for place in places if place.startswith("gallery/")}


def test_the_gallery_links_to_a_page_of_every_record(site):
    names = {name for name, _ in records()} | {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.jsonl")}
    assert names >= WITHOUT_A_PAGE
    assert linked_from_the_gallery(site) == names - WITHOUT_A_PAGE
    assert {path.stem for path in (site / "gallery").iterdir()} == names - WITHOUT_A_PAGE


def test_each_page_of_the_gallery_has_its_charts_and_needs_no_other_file(site):
    for name, record in records():
        if name in WITHOUT_A_PAGE:
            continue
        page = site / "gallery" / f"{name}.html"
        text, found = page.read_text(encoding="utf-8"), elements(page)
        charts = json.loads(re.search(r"^const charts = (\{.*\});$", text, re.MULTILINE)[1])
        assert charts, name
        assert list(charts) == [of["id"] for tag, of in found if tag == "div" and of.get("class") == "chart"], name
        assert all(chart["datasets"]["rows"] for chart in charts.values()), name
        assert not any("url" in chart["data"] for chart in charts.values()), name
        assert "vegaEmbed(" in text, name  # what draws them
        assert str(record["commit"]) in text, name
        assert [of for tag, of in found if "src" in of or "href" in of or tag in ("link", "iframe")] == [], name


def test_a_page_of_the_gallery_has_as_many_bars_as_its_record_has_rows(site):
    text = (site / "gallery" / "ddp-200mbit.html").read_text(encoding="utf-8")
    charts = json.loads(re.search(r"^const charts = (\{.*\});$", text, re.MULTILINE)[1])
    rows = dict(records())["ddp-200mbit"]["rows"]
    assert [bar["value"] for bar in charts["chart0"]["datasets"]["rows"]] == [
        row["step_s"]
        for row in rows
        if row["step_s"] is not None  # where it could not run
    ]


def test_no_page_of_the_gallery_is_in_the_repository():
    assert not (DOCS / "gallery").exists()


def documented(site, room):
    """Names that a page of the reference documents, in its order."""
    ids = re.findall(r'<h[2-6] id="([^"]+)"', (site / "reference" / f"{room}.html").read_text(encoding="utf-8"))
    return [html.unescape(name) for name in ids]


@pytest.mark.parametrize(
    ("room", "first"),
    [
        ("gradients", "compress_gradients"),
        ("averaging", "Averager"),
        ("activations", "compress_activations"),
        ("pipeline", "Boundary"),
        ("coded", "CodedDataParallel"),
        ("transport", "Transport"),
        ("adapt", "LGreCo"),
        ("codecs", "codec"),
    ],
)
def test_a_page_of_the_reference_begins_with_what_is_called_and_leaves_nothing_out(site, room, first):
    names = documented(site, room)
    assert names[0].rpartition(".")[2] == first
    module = importlib.import_module(f"narrowband.{room}")
    public = {
        name
        for name in module.__all__
        if inspect.isclass(getattr(module, name)) or inspect.isroutine(getattr(module, name))
    }
    assert {name.rpartition(".")[2] for name in names} >= public


def test_examples_in_docstrings_are_shown_as_code(site):
    """Prompts would otherwise become quotations within quotations."""
    pages = [page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html")]
    assert not any("<blockquote>" in page for page in pages)
    assert sum("Examples:" in page and "&gt;&gt;&gt; </span>" in page for page in pages) > 4


def test_the_search_finds_names_and_ideas_and_needs_no_server(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {entry["location"]: entry["title"] for entry in index["docs"]}
    assert titles["reference/gradients.html#narrowband.gradients.compress_gradients"].startswith("compress_gradients")
    assert "Error feedback" in titles.values()
    for page in PAGES:
        assert page.removesuffix(".md") + ".html" in titles
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert script.startswith("var __index = ")
    assert (site / "javascripts" / "iframe-worker.js").exists()


# ---- the README ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text()


def cells(page, first):
    """The table row whose first cell holds these words."""
    (line,) = [line for line in page.splitlines() if line.startswith("| ") and first in line.split("|")[1]]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_readme_is_short_and_its_links_lead_somewhere(readme):
    assert len(readme.splitlines()) <= 150
    places = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", readme)
    for place in filter(None, (one for pair in places for one in pair)):
        assert place.startswith("https://") or (ROOT / place.partition("#")[0]).exists(), place


def test_the_first_screen_says_how_to_try_it(readme):
    first = readme[: readme.index("\n## ")]
    for words in (
        "make demo",
        "make test",
        "import narrowband as nb",
        "nb.compress_gradients(model, ",
        "When it does not pay",
    ):
        assert words in first


def record(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]


def test_the_tables_of_the_readme_are_those_of_the_records(readme):
    slow, fast = ({row["codec"]: row for row in record(f"ddp-{rate}.json")} for rate in ("200mbit", "1gbit"))
    for words, codec in {
        "uncompressed": "none",
        "`fp16`": "fp16",
        "`qsgd:bits=4`)": "qsgd:bits=4",
        "largest 1 %": "topk:density=0.01+ef",
        "PowerSGD (": "powersgd:rank=4",
        "Deep Gradient": "dgc:density=0.001",
        "own fp16 hook": "torch: fp16 hook",
        "own PowerSGD": "torch: PowerSGD hook, rank 4",
    }.items():
        first = readme[: readme.index("\n## ")]
        assert cells(first, words) == [
            f"{slow[codec]['link_bytes_per_step'] / 1e6:.1f} MB",
            f"{slow[codec]['ratio_to_compute']:.1f}×",
            f"{fast[codec]['ratio_to_compute']:.1f}×",
        ]
    memory = {row["name"]: row for row in record("memory-deit-tiny-jemalloc.json")}
    for words, name in {
        "plain": "bf16",
        " 8 bits": "bf16, 8 bits",
        "4 bits (": "bf16, 4 bits",
        "full": "bf16, checkpoint",
    }.items():
        kept, peak, step, off = cells(readme[readme.index("## In little memory") :], words)
        assert float(off.rstrip(" %").replace("–", "0")) == round(100 * memory[name]["gradient_error"], 1)
        assert kept == f"{memory[name]['kept_bytes'] / 1e6:.0f} MB"
        assert peak == f"{memory[name]['peak_bytes'] / 1e6:.0f} MB"
        assert step.rstrip("×") in (f"{memory[name]['ratio_to_same_precision']:.2f}", "1")


def test_a_page_says_what_a_small_tensor_costs():
    rows = {row["numel"]: row for row in record("memory-tensors.json")}
    least = rows[ActivationPolicy().min_numel]
    more, saved = least["packed_us"] - least["kept_us"], least["saved_nbytes"]
    page = " ".join((DOCS / "explanation" / "activations.md").read_text().split())
    assert (
        f"{least['numel']:,} elements: to pack a tensor of that size takes {more:.0f} µs more than to keep it" in page
    )
    assert f"and saves {saved / 1e3:.0f} kB" in page


def test_the_guide_says_what_8_bits_cost_in_other_architectures():
    guide, changes = (
        " ".join((ROOT / page).read_text().split()) for page in ("docs/how-to/activations.md", "CHANGELOG.md")
    )
    every = []
    for name, words in {"memory-zoo.json": "that are not timm's", "memory-zoo-timm.json": "with PyTorch 2.15"}.items():
        rows = [row for row in record(name) if "skipped" not in row]
        slowest = max(rows, key=lambda row: row["ratio_to_plain"])
        median, kept = (statistics.median(row[key] for row in rows) for key in ("ratio_to_plain", "kept_share"))
        assert (
            f"{words}, the median step takes {median:.2f} times as long and keeps {100 * kept:.0f} % of the bytes; the "
            f"slowest, {slowest['name']}, takes {slowest['ratio_to_plain']:.2f} times."
        ) in guide
        every += [row["ratio_to_plain"] for row in rows]
    assert f"Over all {len(every)} the median is {statistics.median(every):.2f}." in guide
    assert (
        f"the median step takes {statistics.median(every):.2f} times as long, and the slowest {max(every):.2f} times"
    ) in changes


def test_pages_say_what_the_largest_hundredth_costs():
    lines = json.loads((ROOT / "reproduce" / "results" / "optimizers" / "summary.json").read_text())["lines"]
    gap = {line["optimizer"]: line["gap"] for line in lines if line["spec"] == "topk:density=0.01+ef"}
    page = " ".join((DOCS / "explanation" / "gradient-compression.md").read_text().split())
    assert f"a loss {gap['sgd']:.1f} % above uncompressed training with SGD, and {gap['adamw']:.1f} % above it" in page
    said = f"a small GPT then lost {gap['sgd']:.0f} % with SGD and {gap['adamw']:.0f} % with AdamW"
    assert said in (DOCS / "index.md").read_text()


def test_the_readme_says_how_much_faster_stages_are(readme):
    stages = {row["name"]: row["times_none"] for row in record("pipeline-100mbit.json")}
    few = stages["uniform:bits=8/qsgd:bits=4"]
    assert f"trains {few:.1f} times as many tokens per second at 100 Mbit/s" in readme
    assert f"{few / stages['fp16']:.1f} times those in 16 bits" in readme


def test_the_guide_to_activations_says_what_they_cost_beside_the_same_precision():
    page = " ".join((DOCS / "how-to" / "activations.md").read_text().split())
    names = ("bf16, 8 bits", "bf16, 4 bits", "bf16, checkpoint")
    rows = {row["name"]: row["ratio_to_same_precision"] for row in record("memory-deit-tiny-jemalloc.json")}
    eight, four, whole = (f"{rows[name]:.2f}" for name in names)
    said = f"8 bits take {eight} times as long, 4 bits {four} and checkpointing {whole} times"
    assert said in page


def test_first_steps_shows_the_table_and_the_verdict_of_the_recorded_demo():
    text = (DOCS / "tutorials" / "first-steps.md").read_text()
    summary = json.loads((ROOT / "benchmarks" / "results" / "demo" / "summary.json").read_text())
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(demo_table(summary["rows"]))
    table = [line.strip() for line in console.export_text().splitlines() if line.strip()]
    assert "\n".join(table[1:]) in text  # the first is its title
    shown = [line for line in text.splitlines() if line.startswith(("At 1", "eden:bits=1 sends "))]
    assert len(shown) == 4
    assert set(shown) <= set(summary["verdict"].splitlines())


def test_the_figures_of_the_front_page_are_those_of_the_records():
    page = (DOCS / "index.md").read_text()
    steps = {row["codec"]: row["ratio_to_compute"] for row in record("ddp-200mbit.json")}
    stages = {row["name"]: row["times_none"] for row in record("pipeline-100mbit.json")}
    memory = {row["name"]: row["kept_bytes"] for row in record("memory-deit-tiny-jemalloc.json")}
    assert f"{steps['none']:.1f}× → {steps['qsgd:bits=4']:.1f}×" in page
    few = stages["uniform:bits=8/qsgd:bits=4"]
    assert f"{few:.1f}× the tokens" in page
    assert f"{few / stages['fp16']:.1f} times those in 16 bits" in page
    assert f"{1 - memory['bf16, 8 bits'] / memory['bf16']:.0%}".replace("%", " %") + " less kept" in page
