from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import narrowband as nb
from narrowband.activations.ranges import DRIFT
from reproduce import fidelity
from reproduce.activations import gradient
from reproduce.fidelity import Setting, measure, passes
from reproduce.fidelity_errors import KINDS, Fidelity, deviation, of_blocks, places_of, spread
from reproduce.fidelity_page import _percent, claims, layout_of, titles_of
from reproduce.report import table
from reproduce.tasks import Patches, Wikitext
from tests.kernels.tables import reference
from tests.reproduce.synthetic import write_all

BATCHES = ROUNDINGS = 2  # of a quick run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    there = tmp_path_factory.mktemp("data")
    write_all(there, images=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(there / "cache"))
        yield there


@pytest.fixture(scope="module")
def quick(folder, tmp_path_factory):
    """The directory of a quick run, what was told in each of its measurements, and the gradients that it took."""
    out, told, seen = tmp_path_factory.mktemp("out"), [], []

    def watched(setting, *, tell, **how):
        said = []
        told.append((setting, said))
        return measure(setting, tell=lambda **words: (said.append(words["said"]), tell(**words)), **how)

    def remembered(*given, **how):
        seen.append(gradient(*given, **how))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity, "measure", watched)
        patch.setattr(fidelity, "gradient", remembered)
        arguments = ["--quick", "--data-dir", str(folder), "--output", str(out), "--markdown", str(out / "page.md")]
        assert fidelity.main(arguments) == 0
    return out, told, seen


@pytest.fixture(scope="module")
def summary(quick):
    return json.loads((quick[0] / "summary.json").read_text())


@pytest.fixture(scope="module", params=["vit", "gpt"])
def rows(request, summary):
    """Of a model, by bits, what has a range, and rounding: "norms" where layer norms have 8 bits, "bf16" under that."""
    found = (Fidelity(**row) for row in summary["rows"])
    return {
        (row.bits, row.granularity, "bf16" if row.amp else row.rounding if row.norms is None else "norms"): row
        for row in found
        if row.task == request.param
    }


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_squares_are_those_of_pairs():
    """Of every two different roundings of a batch, and of the means of every two different batches."""
    sizes, batches, roundings = [3, 5, 1], 4, 3
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(batches, sum(sizes), generator=generator)
    rough = exact[:, None] + torch.randn(batches, roundings, sum(sizes), generator=generator)
    missed = [[part.double().split(sizes) for part in row] for row in rough - exact[:, None]]
    for at in range(len(sizes)):
        own = [[parts[at] for parts in row] for row in missed]
        means = [sum(row) / roundings for row in own]
        expected = (
            sum(float(e @ e) for row in own for e in row) / (batches * roundings),
            sum(float(a @ b) for row in own for a, b in itertools.permutations(row, 2)) / (batches * roundings * 2),
            sum(float(a @ b) for a, b in itertools.permutations(means, 2)) / (batches * (batches - 1)),
        )
        found = [float(each[at]) for each in deviation(exact, rough, sizes)]
        assert found == pytest.approx(expected, rel=1e-5)


def test_noise_of_roundings_is_no_bias():
    """All roundings that there could be, errors of ±2 around 1 and a batch's own: on average nothing but the 1 is left
    over batches, and the noise is in no bias.
    """
    own = torch.tensor([[0.5], [-0.5]])
    outcomes = [
        deviation(torch.zeros(2, 1), torch.tensor(signs).view(2, 2, 1) + 1 + own[:, None], [1])
        for signs in itertools.product((-2.0, 2.0), repeat=4)
    ]
    single, bias, left = (torch.stack(each).mean().item() for each in zip(*outcomes, strict=True))
    assert single == pytest.approx(4 + 1 + 0.25)
    assert bias == pytest.approx(1 + 0.25)
    assert left == pytest.approx(1 - 0.25)  # of batches there were two, whose own errors are opposite


def test_one_rounding_is_all_bias():
    exact, rough = torch.zeros(2, 2), torch.tensor([[[3.0, 4.0]], [[3.0, -4.0]]])
    single, bias, left = deviation(exact, rough, [2])
    assert (single.item(), bias.item(), left.item()) == (25, 25, 9 - 16)


def test_values_of_batches_have_the_mean_of_all_and_are_blind_to_the_others_batches():
    """Of what is left over batches they are pseudo-values: of a mean of products of pairs, the mean of those is it."""
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(5, 7, generator=generator)
    rough = exact[:, None] + torch.randn(5, 3, 7, generator=generator)
    by_batch = spread(exact, rough)
    for values, whole in zip(by_batch, deviation(exact, rough, [7]), strict=True):
        assert values.mean().item() == pytest.approx(whole.item())
    for at in range(5):
        single, bias, _ = deviation(exact[at : at + 1], rough[at : at + 1], [7])
        assert by_batch[0][at].item() == pytest.approx(single.item())
        assert by_batch[1][at].item() == pytest.approx(bias.item())
    means = (rough - exact[:, None]).mean(1).double()
    products = [[(a @ b).item() for b in means] for a in means]
    pairs = [products[a][b] for a, b in itertools.permutations(range(5), 2)]
    for at in range(5):
        others = [products[a][b] for a, b in itertools.permutations([i for i in range(5) if i != at], 2)]
        assert by_batch[2][at].item() == pytest.approx(5 * sum(pairs) / 20 - 4 * sum(others) / 12)


class _Regression:
    def loss(self, output, y):
        return F.mse_loss(output, y)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("granularity", ["group", "layer"])
def test_a_linear_layers_error_is_that_of_the_papers_equations(bits, granularity):
    """Two layers without anything between: backward needs what is between them for the second weight alone.

    Equation 5 of the paper in float64, with levels of which one is zero (in 2 bits: equation 3), and ranges by 6 and 7:
    over the batches before, and this one, too, where it moves an end by more than a small share of the width.
    """
    torch.manual_seed(0)
    samples, hidden, decay, groups = 128, 32, 0.9, {"group": 8, "layer": 1}[granularity]
    model = nn.Sequential(nn.Linear(16, hidden), nn.Linear(hidden, 3))
    batches = [(torch.randn(samples, 16), torch.randn(samples, 3)) for _ in range(3)]
    per = {"group": "head", "layer": "layer"}[granularity]
    settled = fidelity._settled(model, per, False, batches[:2], lambda **_: None)
    policy = nb.ActivationPolicy(bits=bits, granularity=granularity, rounding="nearest")
    keeping = fidelity._Rounded(model, policy, settled)
    x, y = batches[2]
    sizes = [p.numel() for p in model.parameters()]
    exact = gradient(model, _Regression(), x, y, fidelity.nullcontext())
    rough = gradient(model, _Regression(), x, y, keeping())
    single, _, _ = deviation(exact[None], rough[None, None], sizes)
    found = (single / torch.stack([part.double().square().sum() for part in exact.split(sizes)])).sqrt()

    first, second = (layer.weight.detach().double() for layer in model)
    bias1, bias2 = (layer.bias.detach().double() for layer in model)
    alpha = beta = None
    for inputs, _ in batches:
        h = inputs.double() @ first.T + bias1
        parts = h.view(samples, groups, -1)
        low, high = parts.amin((0, 2)), parts.amax((0, 2))
        before = alpha, beta
        alpha = high - low if alpha is None else decay * alpha + (1 - decay) * (high - low)
        beta = low if beta is None else decay * beta + (1 - decay) * low
    moved = torch.maximum((beta - before[1]).abs(), (alpha + beta - sum(before)).abs())
    if bool((moved <= DRIFT * alpha).all()):
        alpha, beta = before
    ranges = reference.code_ranges(torch.stack((alpha, beta)).float(), bits=bits, symmetric=False, zeroed=bits > 2)
    low, step = ranges.double()[..., None]
    codes = ((parts - low) / step).round().clamp(0, 2**bits - 1)
    restored = (codes * step + low).view(samples, hidden)
    upstream = 2 / (3 * samples) * (h @ second.T + bias2 - y.double())
    expected = ((upstream.T @ (restored - h)).norm() / (upstream.T @ h).norm()).item()
    assert found.tolist() == pytest.approx([0, 0, expected, 0], rel=5e-3, abs=1e-6)
    assert expected > 1e-3
    assert keeping.saved.raw_bytes - keeping.saved.kept_bytes == 4 * samples * hidden - samples * hidden * bits // 8


def test_every_gradient_finds_the_same_estimates_and_other_roundings():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 3))
    x, y = torch.randn(128, 16), torch.randn(128, 3)
    settled = fidelity._settled(model, "head", False, [(x, y)], lambda **_: None)
    for rounding, same in (("nearest", True), ("stochastic", False)):
        policy = nb.ActivationPolicy(bits=4, rounding=rounding)
        keeping = fidelity._Rounded(model, policy, settled)
        first = gradient(model, _Regression(), x, y, keeping())
        gradient(model, _Regression(), 100 * x, y, keeping())  # what it teaches is forgotten
        assert torch.equal(first, gradient(model, _Regression(), x, y, keeping())) == same
        again = fidelity._Rounded(model, policy, settled)
        assert torch.equal(first, gradient(model, _Regression(), x, y, again()))


# ---- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "blocks"), [(Patches, 5), (Wikitext, 4)])
def test_kinds_and_blocks_each_take_every_parameter_once(task, blocks):
    names = [name for name, _ in task(32, 0, 0, 1, None).model().named_parameters()]
    places = places_of(names)
    there = of_blocks(places)
    assert there == ["embed", *(f"block {at + 1}" for at in range(blocks)), "behind"]
    for own in (there, KINDS, names, ["all"]):
        assert sorted(at for place in own for at in places[place]) == list(range(len(names)))
    assert {names[at] for at in places["qkv"]} == {
        f"blocks.{at}.qkv.{part}" for at in range(blocks) for part in ("weight", "bias")
    }
    assert {names[at].partition(".")[0] for at in places["behind"]} == {"norm", "head"}


# ---- two models ------------------------------------------------------------------------------------------------------


def test_there_is_a_row_per_policy_behind_the_yardstick(rows):
    policies = set(itertools.product((8, 4, 2), ("head", "layer"), ("stochastic", "nearest")))
    policies |= {(bits, per, "stochastic") for bits, per in ((8, "channel"), (8, "256"), (4, "256"))}
    policies |= {(4, "head", "norms"), (2, "head", "norms"), (None, None, "bf16"), (8, "head", "bf16")}
    assert next(iter(rows)) == (None, None, None)
    assert set(rows) == {(None, None, None)} | policies


def test_every_pass_is_told(quick):
    _, told, _ = quick
    assert [setting.task for setting, _ in told] == ["vit", "gpt"]
    for setting, said in told:
        assert len(said) == passes(setting, BATCHES, ROUNDINGS)
        phases = [phase for phase, _ in itertools.groupby(word.split(",")[0] for word in said)]
        assert phases == ["training", "estimating ranges", "gradients"]


def test_fewer_bits_keep_less_and_err_more(rows):
    for granularity, rounding in itertools.product(("head", "layer"), ("stochastic", "nearest")):
        eight, four, two = (rows[bits, granularity, rounding] for bits in (8, 4, 2))
        assert eight.plain_bytes == four.plain_bytes == two.plain_bytes > 3 * eight.kept_bytes
        assert eight.kept_bytes > four.kept_bytes > two.kept_bytes
        assert 0 < eight.error["all"] < four.error["all"] < two.error["all"]
        assert eight.error["all"] < 0.1


def test_norms_in_eight_bits_keep_more_and_err_less(rows):
    for bits in (4, 2):
        few, own = rows[bits, "head", "stochastic"], rows[bits, "head", "norms"]
        assert few.kept_bytes < own.kept_bytes < rows[8, "head", "stochastic"].kept_bytes
        assert own.error["all"] < few.error["all"]


def test_ranges_of_neighbours_lie_beside_their_codes(rows):
    """8 bytes for 256 elements; a range per channel costs nothing, since all samples share it."""
    assert rows[8, "channel", "stochastic"].kept_bytes == rows[8, "head", "stochastic"].kept_bytes
    for bits in (8, 4):
        per_head, fixed = (rows[bits, per, "stochastic"].kept_bytes for per in ("head", "256"))
        share = (bits / 8 + 8 / 256) / (bits / 8)
        # Statistics have no codes; and the last 256 are filled up.
        assert 1 + (share - 1) * 0.7 < fixed / per_head < 1.01 * share


def test_under_autocast_errors_are_those_of_the_arithmetic_and_of_eight_bits(rows):
    plain, eight = rows[None, None, "bf16"], rows[8, "head", "bf16"]
    assert plain.bias == plain.error
    assert 0 < plain.error["all"] < eight.error["all"] < 0.1
    assert plain.plain_bytes == plain.kept_bytes < rows[8, "head", "stochastic"].plain_bytes
    assert eight.kept_bytes < 0.5 * eight.plain_bytes


def test_what_activations_do_not_enter_is_exact(rows):
    """The gradient of the last layer's bias is that of the logits, which forward computed exactly."""
    for key, row in rows.items():
        if "head.bias" in row.error:
            assert (row.error["head.bias"] == 0) == (key[0] is not None and key[2] != "bf16")


def test_nearest_is_all_bias_and_stochastic_is_not(rows):
    """Two batches and two roundings are few: the bias of many elements can be told from none, and not in 8 bits."""
    for (bits, per, rounding), row in rows.items():
        if rounding == "nearest":
            assert row.bias == row.error
        elif bits == 4 and per != "256":
            assert row.bias["down"] < row.error["down"] / 2


def test_noise_is_measured_by_the_distance_of_batches(rows):
    yardstick, *others = rows.values()
    for row in others:
        assert row.added == pytest.approx(row.error["all"] ** 2 / (yardstick.error["all"] ** 2 / 2), rel=1e-6)


def test_errors_are_those_of_the_gradients_that_were_taken(quick, summary):
    """Of the vision transformer's two batches, and of the first policy's two roundings of each."""
    a, b, *rough = quick[2]
    norm = (a.double().square().sum() + b.double().square().sum()).item() / 2
    between, first = summary["rows"][:2]
    assert between["error"]["all"] == pytest.approx(math.sqrt((a - b).double().square().sum().item() / norm), rel=1e-5)
    missed = sum((r - e).double().square().sum().item() for r, e in zip(rough[:4], (a, b, a, b), strict=True)) / 4
    assert first["name"] == "8 bits, head, stochastic"
    assert first["error"]["all"] == pytest.approx(math.sqrt(missed / norm), rel=1e-5)


def test_too_little_data_is_refused(folder):
    setting = Setting("vit", "images", batch=1000, lr=1e-3, weight_decay=0.0)
    with pytest.raises(ValueError, match="less than one batch of 1000"):
        measure(setting, batches=2, roundings=2, data_dir=folder)


# ---- claims and tables -----------------------------------------------------------------------------------------------


SOME = {(8, "channel"), (8, "256"), (4, "256")}
WOBBLE = (0.98, 1.01, 1.02, 0.99)  # of batches


def fidelity_of(bits, granularity, rounding, told, **options):
    """A row whose batches differ by some per cent."""
    figures = ("error", "bias", "over_batches")
    name = f"{bits} bits, {granularity}, {rounding}"
    row = Fidelity("vit", name, bits, None, granularity, rounding, 100, 10, None, *({"all": told[f]} for f in figures))
    squares = {figure: [share * told[figure] ** 2 for share in told.get("wobble", WOBBLE)] for figure in figures}
    return replace(row, per_batch=squares, added=told["error"] ** 2, **options)


def made_up(**changes):
    """Rows with which every claim holds, beside a yardstick of √2, and with changes to them by name."""
    rows = [Fidelity("vit", "another batch", *(None,) * 7, {"all": math.sqrt(2)}, {}, {})]
    per = {"channel": 0.9, "head": 1.0, "layer": 1.5, "256": 1.2}
    for bits, granularity, rounding in itertools.product((8, 4, 2), per, ("stochastic", "nearest")):
        if granularity in ("channel", "256") and (rounding == "nearest" or (bits, granularity) not in SOME):
            continue
        error = 2.0**-bits * per[granularity] * (1 if rounding == "nearest" else 1.4)
        told = {"error": error, "bias": error if rounding == "nearest" else error / 10, "over_batches": error / 20}
        if rounding == "stochastic":
            told["over_batches"] /= 10
        told |= changes.get(f"{bits}_{granularity}_{rounding}", {})
        rows.append(fidelity_of(bits, granularity, rounding, told))
    for name, bits, usual, options in (
        ("4 bits, norms 8", 4, 0.1, {"norms": 8}),
        ("bf16, 8 bits", 8, 0.01, {"amp": True}),
    ):
        told = {"error": usual, "bias": 0.01, "over_batches": 0.001} | changes.get(name, {})
        rows.append(fidelity_of(bits, "head", "stochastic", told, name=name, **options))
    return rows


def held(rows):
    return [claim.held for claim in claims(rows)]


def test_claims_hold_where_figures_do():
    found = claims(made_up())
    assert [claim.held for claim in found] == [True] * 10
    assert "4 bits, stochastic: 8.75% and 13.1%" in found[4].figures
    assert found[2].figures.startswith("0.766% ± 0.02")


@pytest.mark.parametrize(
    ("which", "changes"),
    [
        (0, {"8_head_stochastic": {"error": 0.11}}),
        (1, {"bf16, 8 bits": {"error": 0.11}}),
        (2, {"4_head_stochastic": {"error": 1.1}}),
        (3, {"4 bits, norms 8": {"error": 1.1}}),
        (4, {"4_layer_nearest": {"error": 0.06}}),
        (5, {"8_channel_stochastic": {"error": 0.006}}),
        (6, {"8_256_stochastic": {"error": 0.005}}),
        (7, {"4_layer_stochastic": {"bias": 0.1}}),
        (8, {"4_head_stochastic": {"over_batches": 0.01}}),
        (9, {"2_layer_nearest": {"error": 0.6}}),
    ],
)
def test_one_figure_that_is_wrong_is_enough(which, changes):
    assert held(made_up(**changes))[which] is False


def test_what_batches_scatter_more_than_is_not_resolved():
    """Some batches say one thing and some the other."""
    changes = {"4_layer_nearest": {"error": 0.0625, "wobble": (0.9, 1.1, 1.05, 0.95)}}
    found = claims(made_up(**changes))[4]
    assert (found.held, found.verdict()) == (None, "not resolved")
    assert "4 bits, nearest: 6.25% and 6.25%, not resolved" in found.figures
    assert "8 bits, nearest: 0.391% and 0.586%;" in found.figures


@pytest.mark.parametrize(
    ("share", "said"),
    [(None, "–"), (0.0, "0%"), (3e-5, "<0.01%"), (0.012345, "1.23%"), (0.999, "100%"), (4.2, "420%"), (42.4, "42×")],
)
def test_shares_are_short(share, said):
    assert _percent(share) == said


def test_tables_fit_a_terminal(rows):
    found = list(rows.values())
    console = Console(width=80, record=True)
    for drawn in table(found, titles_of("images", found[0].task), layout_of(found, {"images": "trained"})):
        console.print(drawn)
    text = console.export_text()
    assert "images: trained" in text
    assert "8 bits, layer, stochastic" in text
    assert "…" not in text


# ---- the command -----------------------------------------------------------------------------------------------------


def test_what_is_written_can_be_repeated(quick, summary):
    assert {"commit", "machine", "versions", "seed", "settings", "claims"} <= summary.keys()
    assert summary["command"].startswith("python -m reproduce.fidelity --quick")
    assert [row["task"] for row in summary["rows"]] == ["vit"] * 20 + ["gpt"] * 20
    page = (quick[0] / "page.md").read_text()
    assert page.count("| --- |") == 6
    assert page.count("| 4 bits, head, nearest |") == 6
    assert "| row | embed | 1 | 2 | 3 | 4 | behind |" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "lstm"], "there are: vit, gpt"),
        (["--batches", "1"], "at least 2"),
        (["--roundings", "1"], "at least 2"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, message, tmp_path, capsys):
    assert fidelity.main([*arguments, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_missing_data_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert fidelity.main(["--data-dir", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "--data-dir" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        fidelity.main(["--help"])
    assert ended.value.code == 0
    assert "yardstick" in capsys.readouterr().out
