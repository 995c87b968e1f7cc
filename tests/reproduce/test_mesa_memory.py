"""Sizes within a budget, steps beside plain ones, and what the page says of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from reproduce import mesa_memory
from reproduce.mesa_memory import Found, Limit, build, claims, largest
from reproduce.mesa_steps import Step
from reproduce.report import table

# ---- the search ------------------------------------------------------------------------------------------------------


@given(
    fixed=st.integers(0, 10**6),
    linear=st.integers(1, 10**4),
    quartic=st.floats(0, 10),
    grain=st.integers(1, 16),
    start=st.integers(1, 500),
    budget=st.integers(1, 10**8),
)
def test_what_is_found_fits_and_the_next_one_does_not(fixed, linear, quartic, grain, start, budget):
    def nbytes(size):
        return fixed + linear * size + int(quartic * size**4)

    if nbytes(grain) > budget:
        with pytest.raises(
            ValueError, match=f"a size of {grain} takes {nbytes(grain)} bytes, and the budget is {budget}"
        ):
            largest(nbytes, budget, start, grain)
        return
    found, tried = largest(nbytes, budget, start, grain)
    assert found % grain == 0
    assert nbytes(found) <= budget < nbytes(found + grain)
    assert tried == {size: nbytes(size) for size in tried}
    assert {found, found + grain} <= tried.keys()


@pytest.mark.parametrize(("grain", "quartic"), [(1, 0.0), (8, 0.0), (4, 1.0)])
def test_few_sizes_are_tried(grain, quartic):
    """Trials are whole processes."""
    tried = largest(lambda size: int(35e6 + 0.9e6 * size + quartic * size**4), 280_000_000, 64, grain)[1]
    assert len(tried) <= 7


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("larger", [{}, {"dim": 60}, {"blocks": 6}, {"image": 36}, {"batch": 3}], ids=str)
def test_every_axis_makes_the_model_or_its_input_larger(larger):
    model, (x,) = build(**{"batch": 2} | larger)
    assert model(x).shape == (larger.get("batch", 2), 10)
    assert len(model.blocks) == larger.get("blocks", 5)
    assert model.head.in_features == larger.get("dim", 48)
    assert model.positions.shape[1] == (larger.get("image", 32) // 4) ** 2 + 1
    assert not model.blocks[0].fused  # as in reproduce.mesa


def test_bases_are_what_the_model_has():
    for axis in mesa_memory._AXES:
        assert axis.base % axis.grain == 0
        build(
            **{"batch": 1, axis.argument: axis.base + axis.grain} | ({"batch": 1} if axis.argument != "batch" else {})
        )


# ---- claims and tables -----------------------------------------------------------------------------------------------

PLAIN, EIGHT = "bf16", "bf16, 8 bits"


def made_up(**changes):
    """With these numbers every claim holds."""
    limits = [
        Limit(
            axis,
            unit,
            base,
            paper,
            {way.name: plain for way in mesa_memory._WAYS} | {EIGHT: changes.get(axis, eight)},
            {},
        )
        for axis, unit, base, paper, plain, eight in (
            ("depth", "blocks", 5, 3.3, 10, 17),
            ("width", "channels", 48, 2.2, 84, 120),
            ("resolution", "px", 32, 1.5, 40, 56),
            ("batch", "images", 128, None, 256, 500),
        )
    ]
    ratios = {"dense": 1.0, "mesa": 1.5, "per sample": 1.6, "nearest": 1.4, "symmetric": 1.4, "attention": 1.3,
              "feed-forward": 1.2}  # fmt: skip
    steps = [
        Step(name, [changes.get(name, ratio) * wobble for wobble in (0.98, 1.0, 1.01, 1.01)], 0.25)
        for name, ratio in ratios.items()
    ]
    return Found(280_000_000, {PLAIN: 150_000_000}, changes.get("twice", 140_000_000), limits, steps)


def test_numbers_as_the_paper_has_them_hold_every_claim():
    found = claims(made_up())
    assert [claim.held for claim in found] == [True] * 9
    assert "5 × 3.40 = 17 within 280 MB; plain 10, so 1.70 times as much as that" in found[0].figures
    assert "140 MB with 256 images, 150 MB plain with 128" in found[3].figures
    assert "mesa 1.51 times a plain step (quartiles 1.48 to 1.52); -0.50 ± 0.03 from 2 times" in found[4].figures


@pytest.mark.parametrize(
    ("which", "change", "held"),
    [
        (0, {"depth": 16}, False),
        (1, {"width": 96}, False),
        (2, {"resolution": 44}, False),
        (3, {"twice": 150_000_000}, False),
        (4, {"mesa": 2.1}, False),
        (4, {"mesa": 1.99}, None),
        (5, {"per sample": 1.4}, False),
        (5, {"per sample": 1.501}, False),  # the same wobble: 0.1 % longer in every round
        (6, {"nearest": 1.6}, False),
        (7, {"symmetric": 1.6}, False),
        (8, {"feed-forward": 1.4}, False),
    ],
)
def test_other_numbers_do_not(which, change, held):
    expected = True if change == {"per sample": 1.501} else held
    assert claims(made_up(**change))[which].held is expected


def test_rounds_that_scatter_resolve_nothing():
    found = made_up()
    busy = [replace(step, ratios=[1.0, 2.5, 1.2, 1.9]) if step.name == "nearest" else step for step in found.steps]
    assert claims(replace(found, steps=busy))[6].verdict() == "not resolved"


def test_claims_without_their_steps_are_not_tested():
    found = replace(made_up(), steps=[Step("dense", [1.0], 1.0)])
    assert [claim.verdict() for claim in claims(found)[4:]] == ["not tested"] * 5


def test_tables_fit_a_terminal():
    found = made_up()
    record = {"found": {"budget": found.budget}, "config": {"rounds": 4, "batch": 100}}
    console = Console(width=80, record=True)
    for drawn in table(found.lines, mesa_memory._TITLES, mesa_memory._layout(record)):
        console.print(drawn)
    text = console.export_text()
    assert "…" not in text
    assert "3.40×" in text
    assert "1.85 times" in " ".join(text.split())  # 32 GB over DeiT-B's


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody tells a process's memory")
def test_a_quick_run_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    """Trials are by arithmetic here; tests of the benchmark have real ones."""
    asked = []

    def footprint(way, build, *, seed):
        batch = build.keywords["batch"]
        asked.append((way.name, batch))
        return 10_000_000 + batch * (400_000 if way.policy.bits == 8 else 1_000_000)

    monkeypatch.setattr(mesa_memory, "footprint", footprint)
    page, out = tmp_path / "page.md", tmp_path / "out"
    arguments = ["--quick", "--rounds", "1", "--workers", "1", "--output", str(out), "--markdown", str(page)]
    assert mesa_memory.main(arguments) == 0
    record = json.loads((out / "summary.json").read_text())
    budget = round(138_000_000 * 32 * 1024 / 17_691)
    assert record["found"]["budget"] == budget
    (limit,) = record["found"]["limits"]
    for way, each in ((PLAIN, 1_000_000), (EIGHT, 400_000)):
        size = limit["sizes"][way]
        assert 10_000_000 + size * each <= budget < 10_000_000 + (size + 8) * each
        assert {batch for name, batch in asked if name == way} >= {128, *(size for size, _ in limit["trials"][way])}
    assert record["found"]["twice"] == 10_000_000 + 256 * 400_000
    assert [step["name"] for step in record["found"]["steps"]] == ["dense", "mesa"]
    assert record["found"]["steps"][0]["ratios"] == [1.0]
    assert record["found"]["steps"][1]["kept_share"] == pytest.approx(0.25, abs=0.02)
    assert f"| batch, images | 128 | {limit['sizes'][PLAIN]} | {limit['sizes'][EIGHT]} |" in page.read_text()
    assert "written:" in capsys.readouterr().out
    tried = len(asked)
    assert mesa_memory.main(arguments) == 0
    assert len(asked) == tried  # it went on from what was kept
    assert mesa_memory.main([*arguments, "--no-resume"]) == 0
    assert len(asked) == 2 * tried
    assert mesa_memory.main([*arguments, "--seed", "1"]) == 0
    assert len(asked) == 3 * tried
    record = json.loads((out / "summary.json").read_text())
    written = page.read_text()
    mesa_memory.page(record, page)
    assert page.read_text() == written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--rounds", "0"], "rounds=0"), (["--workers", "0"], "workers=0"), (["--seed", "-1"], "seed")],
)
def test_a_wrong_option_is_one_line(arguments, message, tmp_path, capsys):
    assert mesa_memory.main([*arguments, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
