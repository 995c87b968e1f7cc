"""Which elements to send: values are those of a rule, and claims turn with scores and bytes."""

from __future__ import annotations

import re

import pytest

from narrowband.collectives import all_reduce_nbytes
from narrowband.report.record import provenance
from reproduce import sparsity
from reproduce.command import page
from reproduce.groups import DENSE, groups
from reproduce.models import ResNet

NUMEL = sum(p.numel() for p in ResNet(8).parameters())
PLAIN = all_reduce_nbytes(4 * NUMEL, 4)
SEEDS = (0, 1)
ROWS = {recipe.row.name: recipe.row for recipe in sparsity.EXPERIMENT.recipes}
EQUAL, GLOBAL, EVERY_STEP, THRESHOLD = sparsity._SPARSE
LGRECO = "lgreco"


def row(name, score, seed, sent=None):
    """Of what a rank sent in a step."""
    ratio = 1.0 if sent is None else PLAIN / sent
    return {
        "task": "cifar", "name": name, "spec": ROWS[name].spec, "seed": seed, "metric": "test accuracy, %",
        "higher_is_better": True, "epochs": 5, "nodes": 4, "parameters": NUMEL, "score": score,
        "sent_bytes_per_step": PLAIN / ratio, "ratio": ratio, "mean_ratio": ratio, "compressed_ratio": ratio,
        "payload_ratio": None, "matrix_ratio": None, "step_s": 0.1, "commit": "0123456789abcdef",
    }  # fmt: skip


def trained(scores=None, sent=None):
    """Rows of both seeds that sent the same and became as good, but for these scores and bytes."""
    scores, sent = scores or {}, sent or {}
    return [
        row(name, seed + scores.get(name, 70.0), seed, None if name == DENSE else sent.get(name, 20_000))
        for seed in SEEDS
        for name in (DENSE, "top-k", LGRECO, *sparsity._SPARSE)
    ]


def chosen_at(budget, *, factor=0.9, above=lambda value: 500 * value**-1.2):
    """The runs that values follow from: L-GreCo sent ``budget``, shares of a density ``factor`` of what the same sends
    for all layers, and a threshold ``above(value)``.
    """
    return [
        row(sparsity._BUDGET, 69.0, 100, budget),
        row(sparsity._GLOBAL_CANDIDATE, 69.0, 100, factor * sparsity._by_layers(sparsity._CANDIDATE, 4)),
        *(row(sparsity._candidate(value), 69.0, 100, above(value)) for value in sparsity._CANDIDATES),
    ]


def of(rows, text):
    (found,) = [claim for claim in sparsity.EXPERIMENT.claims(groups(rows)) if text in claim.text]
    return found


# ---- the rule --------------------------------------------------------------------------------------------------------


def test_the_rule_takes_the_number_with_two_digits_that_sends_what_is_closest():
    assert sparsity._closest(lambda x: 1000 * x, 43.6, 1e-4, 0.1) == 0.044
    assert sparsity._closest(lambda x: 1 / x, 1 / 0.0212, 0.001, 1.0) == 0.021
    assert sparsity._closest(lambda x: x, 5.0, 0.02, 0.08) == 0.08, "no further than candidates go"


def test_thresholds_between_candidates_are_on_a_line_in_logarithms():
    low, middle, high = sparsity._CANDIDATES
    found = groups(chosen_at(20_000))
    for value in (low, (low * middle) ** 0.5, middle, 0.9 * high, high):
        assert sparsity._above(value, found) == pytest.approx(500 * value**-1.2)


@pytest.mark.parametrize(
    ("text", "value", "sends"),
    [
        ("top-k of every layer has", sparsity._DENSITY_OF_LAYERS, lambda density: sparsity._by_layers(density, 4)),
        ("once an epoch, has", sparsity._DENSITY_BY_EPOCH, lambda density: 0.9 * sparsity._by_layers(density, 4)),
        ("every step, has", sparsity._DENSITY_OF_ALL, lambda density: sparsity._as_one(density, 4)),
        ("the threshold has", sparsity._VALUE, lambda value: 500 * value**-1.2),
    ],
)
def test_values_are_those_of_the_rule_or_the_page_says_which_are(text, value, sends):
    def claim(times):
        return of(chosen_at(times * sends(value)), text)

    assert claim(1.0).verdict() == "held"
    other = claim(1.3)
    assert other.verdict() == "not held"
    by_rule = float(re.search(r"the rule: ([\d.]+)$", other.figures)[1])
    assert by_rule != value
    assert sends(by_rule) == pytest.approx(1.3 * sends(value), rel=0.05)
    assert of(trained(), text).verdict() == "not tested"


# ---- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "better", "worse"),
    [
        ("a hard threshold is better than top-k of every layer", THRESHOLD, EQUAL),
        ("L-GreCo: is better than top-k of every layer", LGRECO, EQUAL),
        ("L-GreCo: is better than a hard threshold", LGRECO, THRESHOLD),
        ("L-GreCo: is better than global top-k in every step", LGRECO, EVERY_STEP),
        ("in every step is better than once an epoch", EVERY_STEP, GLOBAL),
    ],
)
def test_a_row_is_better_where_scores_say_so_beyond_noise_at_equal_bytes(text, better, worse):
    assert of(trained({better: 71.0}), text).verdict() == "held"
    assert of(trained({worse: 71.0}), text).verdict() == "not held"
    assert of(trained(), text).verdict() == "not held"
    rows = trained({better: 71.0})
    rows[-7:] = [line | {"score": 70.0} if line["name"] == better else line for line in rows[-7:]]
    assert of(rows, text).verdict() == "not resolved"
    more = of(trained({better: 71.0}, {better: 23_000}), text)
    assert more.verdict() == "not tested"
    assert f"{better} sent 1.15 times what {worse} did" in more.figures


def test_bytes_are_told_beside_scores_and_equal_within_a_tenth():
    for sent, verdict in ((20_000, "held"), (21_900, "held"), (22_100, "not held"), (18_000, "not held")):
        claim = of(trained(sent={THRESHOLD: sent}), "threshold sends what L-GreCo does")
        assert claim.verdict() == verdict
        assert f"bytes of threshold: {sent / 20_000:.2f} times L-GreCo's" in claim.figures


def test_what_was_made_equal_is_not_counted_as_a_finding():
    claims = sparsity.EXPERIMENT.claims(groups(trained()))
    assert [claim.text for claim in claims if claim.setup] == [
        claim.text for claim in claims if "by the rule" in claim.text or "sends what L-GreCo does" in claim.text
    ]


def test_the_reference_is_safe_within_a_hundredth_of_dense():
    text = "its reference is no worse than no compression"
    assert of(trained(), text).held
    assert of(trained({"top-k": 69.0}), text).held is False


def test_lgreco_keeps_its_references_accuracy_with_fewer_bytes():
    text = "no worse than its reference"
    assert of(trained(sent={"top-k": 50_000}), text).held
    assert of(trained({LGRECO: 69.0}, {"top-k": 50_000}), text).held is False
    assert of(trained(sent={"top-k": 19_000}), text).held is False


def test_claims_without_their_rows_are_not_tested():
    claims = sparsity.EXPERIMENT.claims(groups([row(DENSE, 70.0, 0)]))
    assert {claim.verdict() for claim in claims} == {"not tested"}
    rows = [line for line in trained({THRESHOLD: 71.0}) if line["name"] != LGRECO]
    assert of(rows, "a hard threshold is better").held, "which does not take L-GreCo's row"


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_each_rows_bytes_and_what_values_follow_from(tmp_path):
    path = tmp_path / "sparsity.md"
    rows = [*chosen_at(16_000), *trained({THRESHOLD: 70.5}, {THRESHOLD: 21_000})]
    page(sparsity.EXPERIMENT, rows, provenance(0, ["python", "-m", "reproduce.sparsity"]), path)
    text = path.read_text()
    assert re.search(r"^\| threshold \| 71\.00 ± 0\.71 \| \+0\.50 ± 0\.00 \|.*\| 1\.05× \|", text, re.MULTILINE)
    assert re.search(r"^\| budget: lgreco \| 69\.00 \| – \|.*\| 1\.00× \|", text, re.MULTILINE)
    assert "At 23 times fewer bytes than uncompressed" in text
    assert "+0.50 ± 0.00 with hard threshold" in text
    for part in ("What was asked", "What was run", "What came out"):
        assert len(re.findall(rf"^\*\*{part}\.\*\* (.+)$", text, re.MULTILINE)) == 1
    pictures = tmp_path / "pictures" / "sparsity"
    assert {picture.name for picture in pictures.iterdir()} == {"opening-light.svg", "opening-dark.svg"}
