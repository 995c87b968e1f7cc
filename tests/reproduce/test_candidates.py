from __future__ import annotations

import json
import math

import pytest
import torch

import narrowband as nb
from reproduce import candidates
from reproduce.candidates import Options, main
from reproduce.candidates_page import claims, lines
from reproduce.candidates_senders import (
    CANDIDATES,
    DEMO,
    SUBJECTS,
    ZERO_ONE,
    ZERO_ONE_RARE,
    Subject,
    block,
    natural,
    natural_dithering,
    sender,
    ternary,
)
from reproduce.candidates_steps import BETAS, WEIGHT_DECAY, demo_coefficients, stepping
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


def own(spec, parameters, ranks=2, steps=9, moments=0):
    return stepping(Subject("own", "row", spec, "own", moments=moments), frozenset({"w"}), ranks, 0, steps)


def test_whole_updates_of_one_rank_are_adamw():
    start = {"w": torch.randn(40, 30, generator=chance(1)), "bias": torch.randn(7, generator=chance(2))}
    parameters = {name: x.clone() for name, x in start.items()}
    ours = own("none", parameters, ranks=1)
    theirs = [torch.nn.Parameter(x.clone()) for x in start.values()]
    adamw = torch.optim.AdamW(theirs, lr=0.01, betas=BETAS, weight_decay=WEIGHT_DECAY)
    for step in range(9):
        gradients = {name: torch.randn(1, x.numel(), generator=chance(step)) for name, x in start.items()}
        for name, move in ours.moves(gradients, parameters, 0.01, step).items():
            parameters[name].view(-1).add_(move)
        for p, g in zip(theirs, gradients.values(), strict=True):
            p.grad = g.view_as(p)
        adamw.step()
    torch.testing.assert_close(list(parameters.values()), [p.detach() for p in theirs], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [1, 37, 64 * 64])
def test_demo_takes_the_largest_cosines_of_a_chunk_out_of_the_momentum_and_nothing_else(kept):
    """With an orthonormal transform, what is sent and what stays have the squares of the whole."""
    x = torch.randn(128, 192, generator=chance(3))
    sent = demo_coefficients(x, kept)
    assert sent.shape == (2, 3, 64, 64)
    assert ((sent != 0).sum((2, 3)) == kept).all()
    ours = own(f"DeMo of {kept}", {"w": x})
    move = ours.moves({"w": x.reshape(1, -1).expand(2, -1).clone()}, {"w": torch.zeros_like(x)}, 1.0, 0)["w"]
    stayed = ours.momentum["w"][0]
    arrived = x.reshape(-1) - stayed
    torch.testing.assert_close(sent.square().sum() + stayed.square().sum(), x.square().sum())
    assert torch.equal(move, -arrived.sign()) or kept == 64 * 64
    if kept == 64 * 64:
        torch.testing.assert_close(stayed, torch.zeros_like(stayed), atol=1e-5, rtol=0)


def test_zero_one_adam_is_adam_without_corrections_where_all_is_sent_and_ranks_agree():
    """One rank, a second moment in every step, and a momentum of one magnitude: signs and a scale have it whole."""
    g = 0.5 * torch.randn(30, 40, generator=chance(4)).sign()
    ours = own("0/1 Adam of 1000", {"w": g}, ranks=1)
    m = v = 0.0
    for step in range(5):
        move = ours.moves({"w": g.reshape(1, -1).clone()}, {"w": torch.zeros_like(g)}, 0.01, step)["w"]
        m, v = BETAS[0] * m + (1 - BETAS[0]) * 0.5, BETAS[1] * v + (1 - BETAS[1]) * 0.25
        torch.testing.assert_close(move, -0.01 * m / (math.sqrt(v) + 1e-8) * g.sign().view(-1), rtol=1e-4, atol=0)


def test_second_moments_lie_further_and_further_apart():
    shape, whole = torch.Size((100, 100)), 4 * 100 * 100
    signs = nb.compression("sign+ef").codec.payload_nbytes(shape)
    for kappa, count in ((2, 6), (1000, 20)):  # 0, 1, 2, 4, 6, 10, 14: the last one is not reached in 14 steps
        steps = 14 if kappa == 2 else 20
        ours = own(f"0/1 Adam of {kappa}", {}, steps=steps)
        assert ours.mean_nbytes([shape], steps) == pytest.approx(signs + whole * count / steps)


def test_averaged_moments_are_the_same_on_all_ranks_and_count():
    ours = own("none", {}, moments=2)
    for step in range(2):
        gradients = {"w": torch.randn(2, 1200, generator=chance(step))}
        ours.moves(gradients, {"w": torch.zeros(30, 40)}, 0.01, step)
        assert torch.equal(ours.first["w"][0], ours.first["w"][1]) == (step == 1)
    assert ours.mean_nbytes([torch.Size((30, 40))], 9) == 4 * 1200 + 2 * 4 * 1200 / 2


def test_updates_and_momentum_that_are_compared_send_as_much():
    shapes = [torch.Size((256, 64)), torch.Size((192, 64)), torch.Size((64, 64))]

    def sent(spec):
        return own(spec, {}, steps=600).mean_nbytes(shapes, 600)

    assert sent(DEMO) == pytest.approx(sent("topk:density=0.01+ef"), rel=0.05)
    assert sent(ZERO_ONE_RARE) == pytest.approx(sent("qsgd:bits=2+ef"), rel=0.05)
    assert sent(ZERO_ONE) > 2 * sent(ZERO_ONE_RARE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A quick run of a few subjects."""
    folder = tmp_path_factory.mktemp("candidates")
    write_all(folder / "data")
    words = ["--quick", "--batch", "4", "--data-dir", str(folder / "data"), "--output", str(folder / "out")]
    patch = pytest.MonkeyPatch()
    chosen = [
        subject for subject in SUBJECTS
        if subject.name in ("DeMo, rate 0.001", "none", "TernGrad", "qsgd:bits=2", "powersgd:rank=4,halves=1",
                            "clipped by layers")
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
    assert rows["own", "DeMo, rate 0.001"]["dense_nbytes"] > 70 * rows["own", "DeMo, rate 0.001"]["nbytes"]
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
