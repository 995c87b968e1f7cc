from __future__ import annotations

import json

import pytest
import torch

from reproduce import candidates
from reproduce.candidates import Options, main
from reproduce.candidates_page import claims, lines
from reproduce.candidates_senders import (
    CANDIDATES,
    SUBJECTS,
    Subject,
    block,
    natural,
    natural_dithering,
    sender,
    ternary,
)
from tests.reproduce.synthetic import write_all


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


def mean_of(arrives, x, times=3000):
    generator = chance()
    return sum(arrives(x, generator).double() for _ in range(times)) / times


def test_natural_compression_rounds_to_powers_of_two_and_is_right_in_the_mean():
    x = torch.tensor([0.0, 1.0, -1.5, 0.3, -7.9, 1e-3])
    found = natural(x, chance())
    assert found[0] == 0
    assert found[1] == 1
    assert (found[1:].abs().log2() % 1 == 0).all()
    assert (found * x >= 0).all()
    torch.testing.assert_close(mean_of(natural, x), x.double(), rtol=0.03, atol=0)


def test_natural_dithering_has_the_levels_of_its_bits_and_is_right_in_the_mean():
    x = torch.randn(200, generator=chance(1))
    found = natural_dithering(x, chance(), bits=3)
    for begin in (0, 128):
        shares = found[begin : begin + 128].abs() / x[begin : begin + 128].abs().max()
        assert {round(float(share), 6) for share in shares} <= {0.0, 0.25, 0.5, 1.0}
    mean = mean_of(lambda x, generator: natural_dithering(x, generator, bits=3), x)
    torch.testing.assert_close(mean, x.double(), rtol=0, atol=0.1)


def test_terngrad_has_three_values_and_is_right_in_the_mean_of_what_is_clipped():
    x = torch.randn(500, generator=chance(1))
    found = ternary(x, chance())
    limit = 2.5 * x.std()
    assert {round(abs(float(value)), 5) for value in found} == {0.0, round(float(limit), 5)}
    torch.testing.assert_close(mean_of(ternary, x), x.clamp(-limit, limit).double(), rtol=0, atol=0.12)


def test_a_block_is_of_neighbours_and_goes_around_the_end():
    x = torch.arange(1.0, 41.0)
    for seed in range(30):
        at = block(x, chance(seed), 0.1).nonzero().view(-1)
        assert at.numel() == 4
        assert sorted((at - at[0]) % 40) in ([0, 1, 2, 3], [0, 37, 38, 39], [0, 1, 38, 39], [0, 1, 2, 39])


@pytest.mark.parametrize("name", CANDIDATES)
def test_with_feedback_nothing_is_lost(name):
    own = sender(Subject("g", name, f"{name}+ef"), ranks=3, seed=0, steps=9)
    shape, total, arrived = torch.Size((30, 40)), torch.zeros(1200), torch.zeros(1200)
    for step in range(9):
        x = torch.randn(3, 1200, generator=chance(step))
        total += x.mean(0)
        arrived += own.send("w", x, shape, step)
    torch.testing.assert_close(arrived + own.residuals["w"].mean(0), total, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "spec", ["qsgd:bits=2+ef", "randomk:density=0.1+ef", "topk:density=0.05+ef", "powersgd:rank=2"]
)
def test_what_the_library_sends_is_late_and_not_lost(spec):
    own = sender(Subject("g", spec, spec), ranks=3, seed=0, steps=9)
    shape, total, arrived = torch.Size((30, 40)), torch.zeros(1200), torch.zeros(1200)
    for step in range(9):
        x = torch.randn(3, 1200, generator=chance(step))
        total += x.mean(0)
        arrived += own.send("w", x.clone(), shape, step)
    if spec.startswith("powersgd"):  # of the average alone
        left = own.state.residual("w")
    else:
        left = torch.stack([feedback.residual("w") for feedback in own.feedbacks]).mean(0)
    torch.testing.assert_close(arrived + left, total, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("last", "rounds"), [(0, 1), (2, 5)])
def test_plans_change_ranks_and_lose_nothing(last, rounds):
    """Of two layers the one with a quickly falling spectrum gets the smaller rank; the bytes of what was sent count."""
    own = sender(Subject("g", "planned", "powersgd:rank=4", every=4, last=last, rounds=rounds), 3, 0, 12)
    shapes = {"flat": torch.Size((48, 64)), "steep": torch.Size((64, 96))}
    spectra = {"flat": torch.ones(48), "steep": 2.0 ** -torch.arange(64.0)}
    total, arrived = ({name: torch.zeros(shape.numel()) for name, shape in shapes.items()} for _ in range(2))
    sent = 0
    for step in range(12):
        for name, (n, m) in shapes.items():
            x = spectra[name][:, None] * torch.randn(3, n, m, generator=chance(step)) + (name == "flat")
            total[name] += x.mean(0).view(-1)
            arrived[name] += own.send(name, x.view(3, -1), shapes[name], step)
            chosen = own.ranks.get(name, own.chosen)
            sent += chosen.layer_nbytes(shapes[name]) * (rounds if step == own.planned and name in own.changed else 1)
    assert own.planned == 8
    assert own.ranks["steep"] != own.ranks["flat"]
    for name, x in total.items():
        torch.testing.assert_close(arrived[name] + own.state.residual(name), x, rtol=0, atol=1e-3)
    assert own.mean_nbytes(list(shapes.values()), 12) == sent / 12


def test_a_warm_up_has_each_density_for_as_long():
    dgc = Subject("g", "warm", "dgc:density=0.01", "sgd", (0.5, 0.25), 0.5)
    own = sender(dgc, ranks=2, seed=0, steps=8)
    sizes = [own.nbytes(torch.Size((40, 50)), step) for step in range(8)]
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3] > sizes[4] == sizes[7]
    everything = sender(Subject("g", "all", "dgc:density=0.01", "sgd", (), 0.5), ranks=2, seed=0, steps=8)
    assert everything.nbytes(torch.Size((40, 50)), 3) == 4 * 2000


def test_rows_that_are_compared_send_as_much():
    shapes = [torch.Size((256, 64)), torch.Size((64, 64))]
    for groups in (
        ("qsgd:bits=3", "natural dithering, 3 bits", "uniform:bits=3,symmetric=true+ef"),
        ("randomk:density=0.1+ef", "random block, 10 %+ef"),
        ("powersgd:rank=4", "powersgd:rank=8,halves=1", "powersgd:rank=4,halves=2"),
        ("powersgd:rank=2", "powersgd:rank=4,halves=1", "powersgd:rank=2,halves=2"),
    ):
        sizes = {sum(sender(Subject("g", s, s), 2, 0, 9).nbytes(shape, 0) for shape in shapes) for s in groups}
        assert len(sizes) == 1, sizes
    dgc = ("dgc:density=0.01", "dgc:density=0.0164,values=fp16", "dgc:density=0.0245,values=int8")
    values = [sum(sender(Subject("g", s, s), 2, 0, 9).nbytes(shape, 0) for shape in shapes) for s in dgc]
    assert values[0] >= max(values[1:]) > 0.95 * values[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A quick run of a few subjects."""
    folder = tmp_path_factory.mktemp("candidates")
    write_all(folder / "data")
    words = ["--quick", "--batch", "4", "--data-dir", str(folder / "data"), "--output", str(folder / "out")]
    patch = pytest.MonkeyPatch()
    chosen = [
        subject for subject in SUBJECTS
        if subject.name in ("none", "TernGrad", "qsgd:bits=2", "powersgd:rank=4,halves=1", "clipped by layers")
    ]  # fmt: skip
    patch.setattr(candidates, "SUBJECTS", tuple(chosen))
    assert main(words) == 0
    yield folder, words, chosen
    patch.undo()


def test_a_quick_run_has_a_row_for_every_subject(finished):
    folder, _, chosen = finished
    summary = json.loads((folder / "out/summary.json").read_text())
    rows = {(row["group"], row["name"]): row for row in summary["rows"]}
    assert rows.keys() == {(subject.group, subject.name) for subject in chosen}
    assert summary["config"]["steps"] == 2
    assert rows["bits", "TernGrad"]["cumulated"] > 0
    assert rows["training", "none"]["nbytes"] == rows["training", "none"]["dense_nbytes"]
    assert 1 < rows["training", "none"]["perplexity"] != rows["training", "TernGrad"]["perplexity"]


def test_finished_rows_are_taken_and_a_page_is_written(finished, monkeypatch):
    folder, words, _ = finished
    for name in ("stream", "train"):
        monkeypatch.setattr(candidates, name, lambda *_: pytest.fail("measured again"))
    assert main([*words, "--markdown", str(folder / "page.md")]) == 0
    page = (folder / "page.md").read_text()
    assert "| TernGrad | no |" in page
    assert "python -m reproduce.candidates" in page


def rows_of(scores):
    return [
        {"group": group, "name": name, "spec": name, "kind": "stream", "seed": seed, "nbytes": 10.0,
         "dense_nbytes": 40.0, "cumulated": score, "perplexity": None}
        for (group, name), own in scores.items()
        for seed, score in enumerate(own)
    ]  # fmt: skip


def test_claims_are_of_pairs_and_their_noise():
    text = "random elements lose less than a random block"
    for blocks, verdict in (
        ([2.0, 2.1, 1.9], "held"),
        ([0.5, 0.6, 0.55], "not held"),
        ([0.9, 1.2, 1.0], "not resolved"),
    ):
        found = lines(rows_of({
            ("random", "randomk:density=0.1+ef"): [1.0, 1.1, 0.9],
            ("random", "random block, 10 %+ef"): blocks,
        }))  # fmt: skip
        said = {claim.text: claim.verdict() for claim in claims(found)}
        assert said[text] == verdict
        assert set(said.values()) == {verdict, "not tested"}


def test_what_cannot_be_run_is_refused():
    for options, word in (({"ranks": 3}, "batch=16"), ({"steps": 0}, "steps=0"), ({"seeds": ()}, "seed")):
        with pytest.raises(ValueError, match=word):
            Options(**options)
