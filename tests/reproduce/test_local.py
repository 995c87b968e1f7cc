"""Updates or gradients: rows are what the page says, and claims turn with losses and bytes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import narrowband as nb
from narrowband.adapt.traffic import Traffic, dense_nbytes
from narrowband.averaging.flat import local as local_part
from narrowband.bench.models import GPT
from narrowband.report.record import provenance
from reproduce import local, local_rows
from reproduce.command import Options, chosen, main, page
from reproduce.groups import DENSE, groups
from reproduce.report import table
from reproduce.row import Row
from reproduce.settings import settings
from reproduce.tasks import Plays, Wikitext, _as_wide, load
from reproduce.training import train
from tests.ranks import run_ranks
from tests.reproduce.synthetic import write_all

EXPERIMENT = local.EXPERIMENT
ROWS = {recipe.row.name: recipe.row for recipe in EXPERIMENT.recipes if recipe.row.task == "shakespeare"}
ROWS_OF_OTHER_TEXT = {recipe.row.name: recipe.row for recipe in EXPERIMENT.recipes if recipe.row.task == "gpt"}
NUMEL = 830_000

#: Payload ratios, and how many times less traffic there is.
BYTES = {
    "gradients, top 1%": (78.0, 39.0),
    "updates, top 1%": (77.0, 38.0),
    "gradients, sign": (30.0, 30.0),
    "gradients, 1 bit, rotated": (30.0, 30.0),
    "gradients, 2 bits, rotated": (15.0, 15.0),
    "every 15, 1 bit, rotated, in place": (390.0, 390.0),
    "updates, sign, in place": (30.0, 30.0),
    "updates, 2 bits": (14.2, 7.1),
    "updates, top 2%, 2 bits, in place": (157.0, 78.0),
    "updates, top 6%, 2 bits, in place": (58.0, 29.0),
    **{f"every {n}, top 1/16, 2 bits, in place": (60.0 * n, 30.0 * n) for n in (15, 30)},
    **{f"every {n}, 2 bits, in place": (13.0 * n, 13.0 * n) for n in (3, 15, 30)},
    **{f"every {n}, top 1/64, 2 bits{where}": (200.0 * n, 100.0 * n) for n in (15, 30) for where in ("", ", in place")},
    **{f"every {n}, DiLoCo": (float(n), float(n)) for n in (3, 15, 30)},
}


def model_of(task, width):
    """The model of a row that has read nothing yet."""
    return GPT(_as_wide({"shakespeare": Plays, "gpt": Wikitext}[task].shape, width))


def row(name, loss, seed=0, *, ratios=None, task="shakespeare", **more):
    own = ROWS.get(name) or ROWS_OF_OTHER_TEXT[name]
    payload, ratio = (None, None) if own.isolated else ratios or BYTES.get(name, (1.0, 1.0))
    return {
        "task": task, "name": name, "spec": own.spec, "seed": seed, "metric": "held-out perplexity",
        "higher_is_better": False, "epochs": own.epochs, "nodes": 4, "parameters": NUMEL,
        "score": None if loss is None else math.exp(loss), "sent_bytes_per_step": 6.0 * NUMEL / ratio if ratio else 0.0,
        "ratio": ratio,
        "mean_ratio": ratio, "payload_ratio": payload, "matrix_ratio": payload, "step_s": 0.1,
        "commit": "0123456789abcdef", **more,
    }  # fmt: skip


#: Losses with which all claims hold.
LOSSES = {
    "dense": 1.500,
    "nothing is sent": 1.900,
    "updates": 1.490,
    "updates, length 1": 1.540,
    "updates, 2 bits": 1.495,
    "updates, sign, in place": 1.505,
    "updates, top 1%": 1.530,
    "updates, top 2%, 2 bits, in place": 1.530,
    "updates, top 6%, 2 bits, in place": 1.520,
    "gradients, 4 bits": 1.520,
    "gradients, sign": 1.800,
    "gradients, 1 bit, rotated": 1.485,
    "gradients, 2 bits, rotated": 1.484,
    "every 15, 1 bit, rotated, in place": 1.52,
    "gradients, top 1%": 1.700,
    **{
        f"every {n}, {name}": loss
        for n in (15, 30)
        for name, loss in (("DiLoCo", 1.52), ("SparseLoCo", 1.56), ("top 1/64, 2 bits, in place", 1.51),
                           ("top 1/16, 2 bits, in place", 1.52), ("2 bits, in place", 1.52))
    },
    "every 3, 2 bits, in place": 1.505,
    "every 3, DiLoCo": 1.9,
    "every 15, top 1/64, 2 bits": 1.53,
    "every 15, Streaming DiLoCo": 1.53,
    **{f"every 15, {name}, longer": 1.50 for name in ("DiLoCo", "2 bits, in place", "top 1/16, 2 bits, in place")},
    "updates, 2 bits, FSDP2": 1.5,
    "Muon, dense": 1.450,
    "Muon, updates, 2 bits": 1.4645,
}  # fmt: skip


def of_rates(task):
    """The same of rows that learning rates are chosen by."""
    return {
        f"{local_rows.BASES[kind].name}, rate {rate:g}": 1.5 + abs(math.log(rate / local_rows.RATE[task][kind])) / 100
        for kind, rates in local_rows.RATES[task].items()
        for rate in rates
    }


def made_up(*, without=(), ratios=None, apart=0.001, task="shakespeare", **losses):
    """One seed of every row, and three of the dense one, which are ``apart``: the spread of dense rows is the noise."""
    ratios = ratios or {}
    told = {name: loss for name, loss in (LOSSES | of_rates(task) | losses).items() if name not in without}
    rows = [
        row(name, loss, 1000 if ", rate " in name else 0, ratios=ratios.get(name), task=task)
        for name, loss in told.items()
    ]
    return rows + [row(DENSE, told[DENSE] + sign * apart, 1 + (sign < 0), task=task) for sign in (1, -1)]


def of(rows, text, task="shakespeare"):
    (claim,) = [
        claim for claim in EXPERIMENT.claims(groups(rows)) if text in claim.text and claim.text.startswith(f"{task}: ")
    ]
    return claim


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_have_one_name_each_and_specs_that_exist():
    rows = chosen(EXPERIMENT, Options(long=True))
    names = [(row.task, row.name, row.seed, row.epochs) for row in rows]
    assert len(set(names)) == len(names)
    for own in rows:
        nb.compression(own.spec)
    assert {own.name.removesuffix(", shorter").partition(", rate ")[0] for own in rows if own.task == "gpt"} < set(ROWS)
    usual, another = {"shakespeare": 7, "gpt": 8}, {"shakespeare": 10, "gpt": 3}
    for own in rows:
        differs = own.name.endswith((", longer", ", shorter")) or (own.task == "gpt" and ", rate " in own.name)
        assert own.epochs == (another if differs else usual)[own.task]
    (shorter,) = {row.seed for row in rows if row.name.endswith(", shorter")}
    assert shorter == 0


def test_the_most_telling_rows_come_first_and_others_on_request():
    rows = chosen(EXPERIMENT, Options())
    assert len(rows) <= 42, "an hour and a half of rows of two minutes"
    assert [own.name for own in rows[:6]] == [
        "dense", "nothing is sent", "updates", "updates, sign, in place", "updates, top 1%", "gradients, top 1%",
    ]  # fmt: skip
    assert all(own.updates < 2 for own in rows[:21])
    assert all(own.updates == 15 for own in rows[21:])
    assert {own.task for own in rows} == {"shakespeare"}
    names = {own.name for own in rows}
    assert all([own.seed for own in rows if own.name == name] == [0, 1, 2] for name in names)
    tested = EXPERIMENT.claims(groups([own for own in made_up() if own["name"] in names]))
    held = [claim.text for claim in tested if claim.held]
    assert [any(words in text for text in held) for words in (BETTER_TOP, "at least 400", "in place are better")] == [
        True
    ] * 3


def test_rows_are_adamws_but_for_those_of_other_optimizers():
    for own in chosen(EXPERIMENT, Options(long=True)):
        assert (own.min_numel, own.width) == (1024, 64)
        assert (own.clip, own.schedule) == (1.0, "cosine")
        if own.name.startswith(("Muon", "SGD")):
            continue
        assert (own.optimizer, own.momentum, own.beta2, own.weight_decay) == ("adamw", 0.9, 0.95, 0.1)
        if ", rate " not in own.name:
            short = "rounds" if own.name.endswith("DiLoCo") else "short rounds"
            kind = {0: "nothing" if own.isolated else "gradients", 1: "updates", 3: short}.get(own.updates, "rounds")
            if own.name in ("gradients, top 1%", "gradients, sign") or "updates, top" in own.name:
                kind = f"compressed {kind}"
            elif own.name.startswith(("updates, sign", "updates, 2 bits")):
                kind = "signs of updates"
            assert own.lr == local_rows.RATE[own.task][kind]
    assert (ROWS["SGD, dense"].updates, ROWS["SGD, updates, 2 bits"].updates) == (0, 1)
    assert ROWS["SGD, updates, 2 bits"].outer == "1"
    assert ROWS["Muon, updates, 2 bits"].outer == "auto"


@pytest.mark.parametrize("every", [15, 30])
def test_rounds_are_the_papers_and_ours_at_their_bytes(every):
    diloco, sparseloco = (ROWS[f"every {every}, {name}"] for name in ("DiLoCo", "SparseLoCo"))
    own = ROWS["every 15, top 1/64, 2 bits"]
    assert (diloco.spec, diloco.outer) == ("none", "nesterov")
    assert (sparseloco.outer, own.outer) == ("1", "auto")
    assert {each.updates for each in (diloco, sparseloco)} == {every}
    theirs, ours = (nb.compression(each.spec) for each in (sparseloco, own))
    assert (theirs.codec.tile, theirs.codec.density) == ("64x64", 64 / 64**2)
    assert theirs.feedback.decay == 0.95
    assert theirs.codec.payload_nbytes((256, 128)) == ours.codec.payload_nbytes((256, 128))
    in_place = {
        name: row
        for name, row in ROWS.items()
        if row.residuals == "in-place" and row.updates == every and not name.endswith("longer")
    }
    sparse = {f"every {every}, top {share}, 2 bits, in place" for share in ("1/64", "1/16")}
    quantized = in_place.pop(f"every {every}, 2 bits, in place")
    assert (quantized.spec, quantized.outer) == ("uniform:bits=2+ef", "nesterov")
    if every == 15:
        rotated = in_place.pop("every 15, 1 bit, rotated, in place")
        assert (rotated.spec, rotated.outer) == ("eden:bits=1+ef", "nesterov")
    assert in_place.keys() == sparse
    assert {row.outer for row in in_place.values()} == {"1"}
    assert {nb.compression(row.spec).codec.mean for row in in_place.values()} == {"senders"}
    like = nb.compression(in_place[f"every {every}, top 1/64, 2 bits, in place"].spec).codec
    assert replace(like, mean="ranks") == ours.codec
    parameters = [tuple(p.shape) for p in model_of("shakespeare", 64).parameters()]
    large = [shape for shape in parameters if len(shape) > 1]
    shapes = [*large, (sum(math.prod(shape) for shape in parameters if len(shape) == 1),)]
    sent = sum(Traffic(4).nbytes([(nb.compression(sparseloco.spec), shape) for shape in shapes]))
    rounds, steps = {15: 23, 30: 12}[every], 326  # of the last epoch
    least = local._LESS_ROUNDS[every][-1]
    assert least <= steps / rounds * sum(dense_nbytes(shape, 4) for shape in shapes) / sent < 1.5 * least
    streaming = ROWS["every 15, Streaming DiLoCo"]
    assert (streaming.fragments, streaming.overlap, streaming.outer) == (3, 2, "nesterov")


def test_learning_rates_are_chosen_by_a_seed_of_their_own():
    sweep = [own for own in chosen(EXPERIMENT, Options(long=True)) if ", rate " in own.name]
    assert len(sweep) == sum(len(rates) for kinds in local_rows.RATES.values() for rates in kinds.values())
    assert (
        local_rows.RATES["shakespeare"].keys() == local_rows.RATE["shakespeare"].keys() == local_rows.RATE["gpt"].keys()
    )
    for task, kinds in local_rows.RATES.items():
        for kind, tried in kinds.items():
            rate = local_rows.RATE[task][kind]
            assert {rate / 2, rate, 2 * rate} <= {*tried}
    for kind in local_rows.RATES["shakespeare"].keys() - local_rows.RATES["gpt"].keys():
        assert local_rows.RATE["gpt"][kind] == local_rows.RATE["shakespeare"][kind]
    for own in sweep:
        assert own.seed == 1000
        base, _, rate = own.name.partition(", rate ")
        there = ROWS if own.task == "shakespeare" else ROWS_OF_OTHER_TEXT
        epochs = 7 if own.task == "shakespeare" else 3
        assert own == replace(there[base], name=own.name, lr=float(rate), seed=1000, epochs=epochs)


def test_updates_and_the_momentum_of_gradients_do_not_go_together():
    with pytest.raises(ValueError, match=r"updates=1 is steps .* leave out .* dgc"):
        replace(ROWS["updates"], optimizer="dgc")


# ---- claims ----------------------------------------------------------------------------------------------------------

CLAIMS = 1 + 1 + 2 + 2 + 4 + 14 + 6 + 1 + 1
RATES = 8
CHEAP, TOP = "in every step with at least 25 times less traffic", "in every step with at least 70 times less traffic"
BETTER_TOP, BETTER_SIGN = "updates, top 1% than gradients", "updates, sign, in place than gradients"
FIFTEEN, THIRTY = (
    f"every {n} steps with at least {less} times less traffic than DDP in float32"
    for n, less in ((15, "1,000"), (30, "2,000"))
)
LENGTH = "the measured length helps"


def test_every_claim_can_hold():
    claims = EXPERIMENT.claims(groups(made_up()))
    assert [claim.verdict() for claim in claims] == ["held"] * (CLAIMS + RATES)


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        (
            CHEAP,
            {
                "updates, sign, in place": 1.54,
                "updates, top 6%, 2 bits, in place": 1.54,
            },
        ),
        (TOP, {"updates, top 2%, 2 bits, in place": 1.56}),
        (BETTER_TOP, {"gradients, top 1%": 1.52}),
        (BETTER_SIGN, {"gradients, sign": 1.45, "gradients, 1 bit, rotated": 1.44}),
        ("gradients, 1 bit, rotated is better than updates", {"updates, sign, in place": 1.46}),
        ("worth it: every 15, 1 bit, rotated", {"every 15, 1 bit, rotated, in place": 1.95}),
        (
            FIFTEEN,
            {f"every 15, top 1/64, 2 bits{where}": loss for where, loss in ((", in place", 1.55), ("", 1.60))},
        ),
        (
            THIRTY,
            {"every 30, top 1/64, 2 bits, in place": 1.55},
        ),
        (
            "in place are better than apart: every 15",
            {"every 15, top 1/64, 2 bits, in place": 1.55, "every 15, top 1/64, 2 bits": 1.52},
        ),
        ("worth it: every 30, SparseLoCo", {"every 30, SparseLoCo": 1.95}),
        (LENGTH, {"updates": 1.55}),
        ("learning rate of rounds, 0.008", {"every 15, DiLoCo, rate 0.004": 1.4}),
    ],
)
def test_a_claim_does_not_hold_where_losses_say_otherwise(text, losses):
    assert of(made_up(**losses), text).verdict() == "not held"
    others = [claim for claim in EXPERIMENT.claims(groups(made_up(**losses))) if text not in claim.text]
    assert all(claim.held for claim in others)


def test_rotated_gradients_are_compared_with_signs_and_with_uncompressed_ones():
    worse = made_up(**{"gradients, 1 bit, rotated": 1.85})
    for text in ("rotated is better than gradients, sign", "gradients of every step with at least 25"):
        claims = [claim for claim in EXPERIMENT.claims(groups(worse)) if text in claim.text]
        assert claims
        assert {claim.verdict() for claim in claims} == {"not held"}


def test_a_row_that_diverged_is_worse():
    rows = made_up(**{"updates, top 1%": None, "updates, top 2%, 2 bits, in place": None})
    assert of(rows, TOP).held is of(rows, BETTER_TOP).held is False
    assert "updates, top 2%, 2 bits, in place diverged" in of(rows, TOP).figures
    assert "updates, top 1% diverged" in of(rows, BETTER_TOP).figures
    assert of(made_up(**{"every 15, DiLoCo": None}), FIFTEEN).held
    least = f"{local_rows.RATES['shakespeare']['gradients'][0]:g}"
    assert f"{least}: diverged" in of(made_up(**{f"dense, rate {least}": None}), "learning rate of gradients").figures


@pytest.mark.parametrize("text", [CHEAP, TOP, BETTER_TOP, FIFTEEN, THIRTY, LENGTH])
def test_noise_leaves_a_claim_open(text):
    assert of(made_up(apart=0.2), text).verdict() == "not resolved"


def test_claims_count_bytes_on_the_wire_and_not_payloads():
    """Among four ranks a payload that is gathered is sent three times, where an all-reduce sends one and a half."""
    assert of(made_up(), TOP).figures.startswith("updates, top 2%, 2 bits, in place 1.53, dense 1.50: +2.00 %")
    only = of(made_up(without=("updates, top 2%, 2 bits, in place",)), TOP)
    assert only.verdict() == "not tested"
    assert only.figures.startswith("no row sends so little: updates, sign, in place: 30 times less traffic")
    assert "updates, top 1%: 38 times less traffic than DDP in float32 among 4 ranks, payloads 77 times" in only.figures

    sparse = "every 15, top 1/64, 2 bits, in place"
    best = of(made_up(), FIFTEEN)
    assert best.figures.startswith(f"{sparse} 1.51, every 15, DiLoCo 1.52")
    assert "1,500 times less traffic than DDP in float32 among 4 ranks, payloads 3,000 times smaller" in best.figures
    assert "losses in nats per byte" in best.figures
    names = (sparse, "every 15, top 1/64, 2 bits", "every 15, SparseLoCo")
    more = dict.fromkeys(names, (1999.0, 999.5))
    none = of(made_up(ratios=more), FIFTEEN)
    assert none.verdict() == "not tested"
    assert f"{sparse}: 1,000 times less traffic" in none.figures
    less = more | {"every 15, top 1/64, 2 bits": (2000.0, 1000.0)}
    other = of(made_up(ratios=less, apart=1e-4), FIFTEEN)
    assert other.verdict() == "not held"
    assert other.figures.startswith("every 15, top 1/64, 2 bits 1.53")


def test_the_best_of_the_rows_that_send_so_little_is_taken_and_named():
    assert "updates, sign, in place 1.50, dense 1.50: +0.33 %" in of(made_up(), CHEAP).figures, (
        "2 bits are better and send more"
    )
    other = of(made_up(**{"updates, sign, in place": 1.6, "updates, top 6%, 2 bits, in place": 1.506}), CHEAP)
    assert other.held
    assert other.figures.startswith("updates, top 6%, 2 bits, in place 1.51")
    cheap = of(made_up(ratios={"updates, 2 bits": (25.0, 25.0)}), CHEAP)
    assert cheap.figures.startswith("updates, 2 bits")
    names = [
        f"updates, {what}" for what in ("sign, in place", "top 1%", *(f"top {n}%, 2 bits, in place" for n in (2, 6)))
    ]
    none = of(made_up(ratios=dict.fromkeys(names, (24.0, 24.0))), CHEAP)
    assert none.verdict() == "not tested"
    assert none.figures.startswith("no row sends so little: updates, sign, in place: 24 times less traffic")


def test_losses_at_other_bytes_are_not_compared():
    claim = of(made_up(ratios={"updates, sign, in place": (25.0, 25.0)}), BETTER_SIGN)
    assert claim.verdict() == "not tested"
    assert "updates, sign, in place sent 1.20 times what gradients, sign did" in claim.figures


def test_claims_without_their_rows_are_not_tested():
    claims = EXPERIMENT.claims(groups([row(DENSE, 1.5)]))
    assert len(claims) == CLAIMS + RATES
    assert {claim.verdict() for claim in claims} == {"not tested"}
    assert of(made_up(without=("updates, length 1",)), LENGTH).figures.startswith("needs the row updates, length 1")
    assert of([row("updates, sign, in place", 1.5)], CHEAP).figures == "needs the row dense of task shakespeare"


def test_another_text_has_claims_of_its_own():
    rows = made_up() + made_up(task="gpt", **{"updates, top 2%, 2 bits, in place": 1.6})
    assert of(rows, TOP).held
    assert of(rows, TOP, "gpt").held is False
    claims = [claim.text for claim in EXPERIMENT.claims(groups(rows)) if claim.text.startswith("gpt: ")]
    # It has no residuals apart, no signs of gradients, no rounds in one bit, and no updates of length 1.
    assert len(claims) == CLAIMS - 1 - 2 - 1 - 1 + len(local_rows.RATES["gpt"])
    assert not any(words in text for text in claims for words in ("apart", "gradients, sign", "length 1"))


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_every_row_is_in_a_table_with_its_distance_from_its_own_dense_row(tmp_path):
    path = tmp_path / "local.md"
    rows = made_up() + made_up(task="gpt", without=("Muon, dense", "Muon, updates, 2 bits"))
    tables = dict(EXPERIMENT.layout.tables(groups(rows)))
    assert list(tables) == [
        *(f"shakespeare, {part}" for part in local._PARTS),
        "gpt, sent",
        "gpt, length",
        "gpt, others",
    ]
    assert set(tables) <= set(EXPERIMENT.titles)
    assert {line.name for key, own in tables.items() if key.startswith("shakespeare") for line in own} == {*LOSSES}
    names = [line.name for line in tables["shakespeare, sent"]]
    assert (names[0], names[-1]) == (DENSE, "nothing is sent")
    lines = {line.name: line.loss for line in tables["shakespeare, others"]}
    assert lines["Muon, dense"] == "–"
    assert lines["Muon, updates, 2 bits"].startswith("+1.00 % ± ")

    page(EXPERIMENT, rows, provenance(0, ["python"]), path)
    text = path.read_text()
    assert re.search(r"\| every 15, top 1/64, 2 bits \| 4\.62 \| \+2\.00 % ± 0\.41 % \| 3\.32 kB \| 1,500 \|", text)
    assert "### tiny shakespeare as bytes, GPT: what ranks send" in text
    assert "59 of 59 claims held ([each, with its figures](#claims))." in text
    assert (tmp_path / "pictures/local/opening-light.svg").exists()


def test_tables_fit_a_terminal():
    console = Console(width=90, record=True)
    for drawn in table(groups(made_up()), EXPERIMENT.titles, EXPERIMENT.layout):
        console.print(drawn)
    assert "…" not in console.export_text()


def test_a_page_names_what_is_averaged_and_how():
    own = settings(
        {"updates": 15, "outer": "nesterov", "clip": 1.0, "optimizer": "adamw", "momentum": 0.9, "nesterov": False}
        | {"beta2": 0.95}
    )
    assert own["averaged"] == (
        "updates, after every 15 steps, with an outer SGD, learning rate 0.7, Nesterov's momentum 0.9"
    )
    assert own["clipping of each rank's gradients"] == "at norm 1"
    in_place = settings({"updates": 15, "outer": "4", "residuals": "in-place", "optimizer": "adamw"})
    assert in_place["averaged"] == "updates, after every 15 steps, with an outer length of 4, residuals in place"
    assert "clipping of averaged gradients" not in own
    assert own["optimizer"] == "AdamW, β₁ 0.9, β₂ 0.95, ε 1e-08"


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    there = tmp_path_factory.mktemp("data")
    write_all(there, images=16)
    return there


def trained(rank, world_size, row, folder):
    """What the row came to, and its parameters at the end."""
    task = load(
        row.task, batch=row.batch, seed=row.seed, rank=rank, world_size=world_size, directory=folder, limit=row.limit
    )
    made, model = [], task.model
    task.model = lambda: made.append(model()) or made[-1]
    result = train(row, task, lambda **_: None)
    return result, torch.cat([local_part(p).flatten() for p in made[0].parameters()])


def test_updates_after_every_second_step_send_half_and_make_ranks_equal(folder):
    short = Row(
        "shakespeare", DENSE, "none", optimizer="adamw", epochs=1, lr=1e-3, batch=4, clip=1.0, limit=64 * 25 + 64,
        min_numel=1024,
    )  # fmt: skip
    results = {}
    for every, outer in ((0, "1"), (2, "auto")):
        (first, here), (second, there) = run_ranks(trained, 2, replace(short, updates=every, outer=outer), folder)
        assert first["steps"] == 6
        assert first["score"] == second["score"] < 256
        assert torch.equal(here, there)
        results[every] = first
    assert results[0]["ratio"] == pytest.approx(1.0, rel=1e-4)
    for ratio in ("ratio", "mean_ratio", "compressed_ratio", "payload_ratio"):
        # The length is measured in all of the first rounds, by a few kilobytes.
        assert results[2][ratio] / results[0][ratio] == pytest.approx(2.0, rel=0.01)
    assert results[2]["raw_bytes_per_step"] == pytest.approx(results[0]["raw_bytes_per_step"])
    assert results[2]["curve"] != results[0]["curve"]


@pytest.mark.parametrize(
    "own", [{"updates": 3, "fragments": 3, "overlap": 1, "spec": "qsgd:bits=4"}, {"updates": 2, "shards": 2}]
)
def test_rows_with_fragments_and_with_shards_learn_and_end_equal(folder, own):
    short = Row(
        "shakespeare", DENSE, "none", optimizer="adamw", epochs=1, lr=1e-3, batch=4, clip=1.0, limit=64 * 25 + 64,
        min_numel=1024,
    )  # fmt: skip
    shards = own.get("shards", 1)
    results = run_ranks(trained, 2 * shards, replace(short, **own), folder)
    for at, (result, parameters) in enumerate(results):
        assert result["score"] == results[0][0]["score"] < 256
        assert torch.equal(parameters, results[at % shards][1])
    (plain, _), _ = run_ranks(trained, 2, replace(short, updates=own["updates"], spec=own.get("spec", "none")), folder)
    # As much as whole replicas send; the last average is of the whole model, and of parts under way once more.
    assert result["payload_ratio"] == pytest.approx(plain["payload_ratio"], rel=0.02 if shards > 1 else 0.5)
    said = settings(result)
    if shards > 1:
        assert said["replicas"] == "2 of 2 ranks each, sharded by FSDP2"
    else:
        assert said["averaged"].endswith("in 3 fragments in turn, on their way for 1 step")


def test_a_whole_quick_run(folder, tmp_path, capsys):
    arguments = ["--quick", "--rows", DENSE, "updates, 2 bits", "--tasks", "shakespeare", "--nodes", "2"]
    arguments += ["--data-dir", str(folder), "--output", str(tmp_path / "out"), "--markdown", str(tmp_path / "page.md")]
    assert main(EXPERIMENT, arguments) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    dense, two_bits = summary["groups"]
    assert (dense["name"], two_bits["name"]) == (DENSE, "updates, 2 bits")
    assert dense["ratio"] == pytest.approx(1.0, rel=1e-4)
    assert 13 < two_bits["ratio"] < 15
    assert 13 < two_bits["payload_ratio"] < 15
    text = (tmp_path / "page.md").read_text()
    assert "- **averaged**: updates, in every step, with an outer length that is measured: *updates, 2 bits*" in text
    assert "shakespeare updates, 2 bits, seed 0" in capsys.readouterr().out
