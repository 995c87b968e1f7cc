"""A model in a budget of memory: units, offers, the choice, and what it takes when it is trained."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from narrowband.activations import ActivationPolicy, compress_activations
from narrowband.bench import budget
from narrowband.bench.devices import moved
from narrowband.bench.held import residual_nbytes, tensors_of
from narrowband.bench.offers import AS_IT_IS, Kind, Offer, alive, cheapest, smallest, units_of
from narrowband.bench.subjects import subject
from narrowband.bench.trials import Job
from narrowband.bench.ways import PLAIN, survey
from tests.thorough import thorough


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Tower(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tower(batch: int, width: int = 64, blocks: int = 4):
    return Tower(blocks, width), (torch.randn(batch, 32, width),)


# ---- the choice ------------------------------------------------------------------------------------------------------

offers = st.builds(
    lambda kept, again, moment, tenths: Offer(AS_IT_IS, kept, again, moment, tenths / 10),
    st.integers(0, 60), st.sampled_from([0, 0, 10, 25]), st.integers(-5, 5), st.integers(0, 30),
)  # fmt: skip
units = st.lists(st.lists(offers, min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(units, st.integers(0, 200), st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_the_choice_holds_no_more_than_it_may_and_none_is_faster(units, room, gradients):
    """Of choices that leave a grain of the room for every unit."""
    gradients = gradients[: len(units)]
    choices = [(alive(own, gradients), sum(o.seconds for o in own)) for own in itertools.product(*units)]
    there = [seconds for held, seconds in choices if held <= room * (1 - len(units) / 10_000)]
    found = cheapest(units, room, gradients)
    if found is None:
        assert not there
    else:
        assert all(offer in own for offer, own in zip(found, units, strict=True))
        assert alive(found, gradients) <= room
        assert sum(o.seconds for o in found) <= min(there, default=1000) + 1e-9


def test_a_step_holds_the_most_that_backward_has_at_once():
    first, second, third = Offer(AS_IT_IS, 5, again=100), Offer(AS_IT_IS, 7, again=90, moment=5), Offer(AS_IT_IS, 95)
    assert alive([first]) == 105
    assert alive([first, second]) == 107
    assert alive([first, second, third]) == 107  # the third has been freed when the second is computed again
    assert alive([first, second, third], [1, 10, 100]) == 217  # the first, beside all gradients
    assert alive([replace(first, loss=1000), replace(second, loss=200)]) == 212  # at the loss, which comes last


def test_gradients_that_come_while_activations_go_take_no_room_of_theirs():
    """Ten bytes are kept by each, and ten are the gradients of each: never more than forty at once."""
    plain, small = Offer(AS_IT_IS, 10), Offer(Kind("in 8 bits", 8), 3, seconds=1.0)
    units, gradients = [[plain, small]] * 3, [10] * 3
    assert cheapest(units, 41, gradients) == [plain] * 3
    assert cheapest(units, 39, gradients) == [small, plain, plain]
    assert cheapest(units, 32, gradients) is None


# ---- units -----------------------------------------------------------------------------------------------------------


def saved_by(model, inputs):
    saved = survey(model, inputs, PLAIN)
    return {name: kept.raw_bytes for name, kept in saved.by_module.items() if kept.raw_bytes and name != "(outside)"}


def test_units_are_the_blocks_that_a_model_repeats_in_the_order_of_forward():
    model, inputs = tower(8)
    units = units_of(model, saved_by(model, inputs))
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert all(unit.parts == ("mlp",) for unit in units[:-1])
    assert not units[-1].nested


@pytest.mark.parametrize("name", ["deit-tiny", "gpt", "resnet18"])
def test_every_byte_belongs_to_one_unit(name):
    model, inputs = subject(name, 1)
    saved = saved_by(model, inputs)
    units = units_of(model, saved)
    for module in saved:
        assert sum(unit.has(module) for unit in units) == 1, module
    assert len(units) >= 6


def test_a_model_without_modules_inside_is_one_unit_that_cannot_be_recomputed():
    model, inputs = nn.GELU(), (torch.randn(64, 256, requires_grad=True),)
    (unit,) = units_of(model, {"": 65536})
    assert unit.patterns() == [""]
    assert not Kind("recomputed", again="").fits(unit)
    with compress_activations(model, policy=ActivationPolicy(bits="off", modules=Kind("", 8).rules(unit))):
        model(*inputs)


# ---- a policy of choices ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def search():
    return budget._Search(Job(functools.partial(tower, 64), optimizer="sgd", alone=False), lambda _: None)


@pytest.fixture(scope="module")
def surveyed(search):
    return search._survey


def offer(surveyed, unit, name):
    return next(o for o in surveyed.offers[unit] if o.kind.name == name)


def test_offers_keep_what_a_step_with_their_policy_keeps(surveyed):
    names = ["recomputed", "in 8 bits", "as it is", "in 8 bits with mlp recomputed", "in 4 bits"]
    chosen = [offer(surveyed, at, name) for at, name in enumerate(names)]
    for policy in (surveyed.policy([o.kind for o in chosen]), surveyed.named(chosen)):
        saved = survey(surveyed.bench.model, surveyed.bench.inputs, policy)
        assert saved.kept_bytes == pytest.approx(
            sum(o.kept for o in chosen), rel=0.1
        )  # neighbours share what lies between them
    assert offer(surveyed, 0, "recomputed").again == surveyed.offers[0][0].kept
    assert offer(surveyed, 0, "recomputed from 8 bits").kept < offer(surveyed, 0, "recomputed").kept / 3


def test_units_of_one_kind_have_one_pattern_and_others_do_not(surveyed):
    alike = [offer(surveyed, at, "recomputed from 8 bits") for at in range(4)] + [surveyed.offers[4][0]]
    assert surveyed.named(alike).modules == {"blocks.*": "checkpoint:bits=8"}
    unlike = [offer(surveyed, 0, "in 8 bits"), *alike[1:]]
    assert surveyed.named(unlike).modules == {
        "blocks.0": 8, "blocks.0.*": 8, "blocks.[1-3]": "checkpoint:bits=8",
    }  # fmt: skip


# ---- units that cannot be computed again -----------------------------------------------------------------------------


class Moody(Block):
    """A block that backward can run again or, for some reason, cannot."""

    class Part(nn.Module):
        def __init__(self, why: str | None, width: int) -> None:
            super().__init__()
            self.why, self.linear, self.calls = why, nn.Linear(width, width), 0
            self.generator = torch.Generator().manual_seed(0)
            self.register_buffer("mean", torch.zeros(width))

        def forward(self, x):
            self.calls += 1
            if self.why == "random":
                x = x * torch.rand(x.shape, generator=self.generator)
            elif self.why == "straight through":  # the same result, and another gradient
                y = x * torch.rand(x.shape, generator=self.generator)
                x = x + (y - y.detach())
            elif self.why == "calls":
                x = x * self.calls
            elif self.why == "statistics":
                self.mean.add_(x.detach().mean((0, 1)))
            elif self.why == "shape" and self.calls % 2 == 0:
                x = torch.cat([x, x]).exp()[: len(x)]
            return self.linear(x)

    def __init__(self, why: str | None, width: int = 64) -> None:
        super().__init__(width)
        self.why, self.first = why, self.Part(why if why != "input" else None, width)

    def forward(self, x):
        if self.why == "input":
            x.mul_(2)
        y = super().forward(x)
        return y + self.first(y)


def moody(*why: str | None):
    model = Tower(0)
    model.blocks.extend(Moody(each) for each in why)
    return model, (torch.randn(4, 32, 64),)


def recomputed(surveyed):
    """Blocks that are offered recomputation from exact inputs, and from those in 8 bits."""
    blocks = [each for each in zip(surveyed.units, surveyed.offers, strict=True) if each[0].name.startswith("blocks.")]
    return tuple([unit.name for unit, own in blocks if kind in [offer.kind for offer in own]] for kind in budget.AGAIN)


SAID = {
    "calls": "its second run computes something else than the first",
    "shape": "CheckpointError: ",
    "input": "modified by an inplace operation",
    "random": "its second run computes something else than the first",
    "statistics": "its second run changes its buffers once more",
}


@pytest.mark.parametrize("why", [("calls", "shape", "input"), *thorough(*([each] for each in SAID))])
def test_a_unit_that_cannot_be_computed_again_is_left_out_alone_and_named(why):
    """The next test is about the two other reasons."""
    surveyed = budget._Survey(Job(functools.partial(moody, None, None, *why, None)), lambda _: None)
    last = 2 + len(why)
    for offered in recomputed(surveyed):
        assert offered == ["blocks.0", "blocks.1", f"blocks.{last}"]
    for at, each in enumerate(why, start=2):
        (note,) = (note for note in surveyed.notes if f"blocks.{at}," in note)
        assert note.startswith(f"Not offered recomputation: blocks.{at}, since ")
        assert SAID[each] in note
    assert not any(f"blocks.{at}" in note for note in surveyed.notes for at in (0, 1, last))


def test_several_units_at_fault_share_a_sentence_by_reason():
    why = ("random", "random", "statistics", None, "random", "statistics")
    surveyed = budget._Survey(Job(functools.partial(moody, *why)), lambda _: None)
    assert recomputed(surveyed)[0] == ["blocks.3"]
    about = [note for note in surveyed.notes if "blocks" in note and "first" not in note.split(", since")[0]]
    assert [note.partition(", since")[0].rpartition(": ")[2] for note in about] == ["blocks.[014]", "blocks.[25]"]
    assert "its second run computes something else than the first" in about[0]
    assert "its second run changes its buffers once more" in about[1]
    assert "has other gradients than the first" in surveyed.notes[0]  # of two steps, whatever the policy


def test_what_only_gradients_tell_is_found_where_they_repeat():
    """The second run gives the same result, and saves other numbers on its way, with which backward goes on."""

    class Anew(Tower):
        def forward(self, x):
            for block in self.blocks:
                block.first.generator.manual_seed(0)
            return super().forward(x)

    def build():
        model = Anew(0)
        model.blocks.extend(Moody(each) for each in (None, None, "straight through", None, None))
        return model, (torch.randn(4, 32, 64),)

    surveyed = budget._Survey(Job(build), lambda _: None)
    assert recomputed(surveyed)[0] == [f"blocks.{at}" for at in (0, 1, 3, 4)]
    assert surveyed.notes[0] == "Not offered recomputation: blocks.2, since gradients are others than without it."


def test_a_module_that_fails_later_ends_no_search():
    """Here in the last step of all, in which a kind with a part recomputed is measured."""

    class Late(Block):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > self.last:
                raise LookupError("enough")
            return super().forward(x)

    def build(last):
        model = Tower(2)
        model.blocks.append(Late())
        Late.last = last
        return model, (torch.randn(4, 32, 64),)

    calls = budget._Survey(Job(functools.partial(build, 10**9)), lambda _: None).bench.model.blocks[2].calls
    surveyed = budget._Survey(Job(functools.partial(build, calls - 1)), lambda _: None)
    assert "which is not offered: LookupError: enough" in surveyed.notes[-1]
    assert recomputed(surveyed)[0] == ["blocks.0", "blocks.1", "blocks.2"]


class Counting(Tower):
    """What it computes depends on how often it was called."""

    class Block(Block):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))


def counting():
    return Counting(), (torch.randn(4, 32, 64),)


def test_blocks_whose_second_run_is_another_are_not_recomputed():
    surveyed = budget._Survey(Job(counting), lambda _: None)
    assert recomputed(surveyed) == ([], [])
    assert any("blocks.[0-3], since its second run computes something else" in note for note in surveyed.notes)


class Silent(Tower):
    def forward(self, x):
        return 0.0 * super().forward(x)


def silent():
    return Silent(2), (torch.randn(16, 32, 64),)


def test_gradients_of_zero_are_not_off():
    search = budget._Search(Job(silent, alone=False), lambda _: None)
    found = search.within(search.throughout + (search.plain - search.throughout) * 7 // 10)
    assert found.reached
    assert found.gradient_error == 0


# ---- what training takes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "per_element"),
    [(None, 0), ("qsgd:bits=4", 0), ("topk:density=0.01+ef", 4), ("topk:density=0.01+ef:store=bf16", 2),
     ("dgc:density=0.001", 8), ("powersgd:rank=4", 4)],
)  # fmt: skip
def test_residuals_are_counted_with_what_feedback_keeps(codec, per_element):
    model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 10), nn.Linear(10, 3))
    assert residual_nbytes(model, codec) == per_element * (100 * 200 + 200 * 10)  # 30 elements are few


@pytest.mark.parametrize(("name", "nbytes"), [("adamw", 8), ("sgd", 4)])
def test_the_optimizers_state_is_counted(name, nbytes):
    model = nn.Linear(100, 100)
    found = tensors_of(model, (torch.zeros(2, 100),), name)
    assert found["optimizer"] == pytest.approx(nbytes * 10_100, abs=100)
    assert (found["parameters"], found["gradients"], found["inputs"]) == (40_400, 40_400, 800)


def test_inputs_are_counted_and_moved_wherever_they_are():
    inputs = ({"x": torch.zeros(1000, 8), "more": [torch.zeros(8), "no tensor"]}, (torch.zeros(2),))
    assert tensors_of(nn.Linear(2, 2), inputs, "sgd")["inputs"] == 4 * 8010
    (batch, (last,)) = moved(inputs, "meta")
    assert {batch["x"].device.type, batch["more"][0].device.type, last.device.type} == {"meta"}
    assert batch["more"][1] == "no tensor"


def test_an_unknown_optimizer_and_an_unknown_codec_are_refused():
    with pytest.raises(ValueError, match="optimizer='adam' is none of adamw, sgd, adafactor"):
        tensors_of(nn.Linear(2, 2), (), "adam")
    with pytest.raises(ValueError, match="unknown codec 'topp'"):
        tensors_of(nn.Linear(2, 2), (), "sgd", "topp")


@pytest.mark.parametrize("share", [0.6, *thorough(0.8, 0.4)])
def test_what_is_predicted_is_what_is_measured_and_within_the_budget(search, share):
    found = search.within(int(search.plain * share))
    assert found.reached
    assert found.measured <= search.plain * share
    assert found.predicted == pytest.approx(found.measured, rel=0.05)
    assert found.gradient_error < 0.05
    kept = survey(*tower(64), found.policy)
    assert kept.kept_bytes == pytest.approx(found.kept, rel=0.01)


def test_kinds_with_gradients_far_off_are_chosen_only_where_nothing_else_fits(search, surveyed, monkeypatch):
    """Here all but the offers with the fewest bytes are exact, and those would take no time."""
    kinds = {"recomputed from 8 bits", "in 4 bits", "in 8 bits with mlp recomputed"}

    def changed(offer):
        far = offer.kind.name in kinds
        return replace(offer, error=0.9 if far else 0.0, seconds=0.0 if far else 1.0 + offer.seconds)

    offers = [[changed(offer) for offer in own] for own in surveyed.offers]
    monkeypatch.setattr(surveyed, "offers", offers)
    exact = [[o for o in own if not o.error] for own in offers]
    least = alive(smallest(exact, surveyed.gradients), surveyed.gradients)
    assert not any(o.error for o in search._chosen(least + least // 100))
    assert any(o.error for o in search._chosen(least - least // 10))


def test_a_budget_that_is_met_as_it_is_changes_nothing(search):
    found = search.within(search.plain)
    assert found.reached
    assert found.policy.is_off
    assert (found.measured, found.gradient_error) == (search.plain, 0)
    assert found.predicted == pytest.approx(search.plain, rel=0.01)


def test_a_budget_that_cannot_be_met_is_answered_with_the_least(search):
    found = search.within(1000)
    assert not found.reached
    assert found.measured < 0.5 * search.plain
