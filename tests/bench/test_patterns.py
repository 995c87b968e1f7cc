"""Fewer patterns decide the same about every module as many."""

from __future__ import annotations

import fnmatch

from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband.activations import ActivationPolicy
from narrowband.bench.offers import AGAIN, AS_IT_IS, EIGHT, FOUR, Kind, Unit
from narrowband.bench.patterns import compact, decisions, globbed


def test_twelve_blocks_with_one_choice_have_one_pattern():
    names = ["", "blocks"] + [f"blocks.{at}{inside}" for at in range(12) for inside in ("", ".norm", ".mlp", ".mlp.0")]
    for kind, rules in (
        (AGAIN[1], {"blocks.*": "checkpoint:bits=8"}),
        (EIGHT, {"blocks.*": 8}),
        (FOUR, {"blocks.*": 4, "blocks.*:layer_norm": 8}),
    ):
        units = [Unit(f"blocks.{at}", nested=True) for at in range(12)]
        long = ActivationPolicy(bits="off", modules={k: v for unit in units for k, v in kind.rules(unit).items()})
        assert compact(long, names).modules == rules


def test_those_that_are_not_named_are_left_alone():
    """The last two have nothing, and ``blocks.*`` would be them, too."""
    names = ["", "blocks", *(f"blocks.{at}" for at in range(14))]
    long = ActivationPolicy(bits="off", modules=dict.fromkeys((f"blocks.{at}" for at in range(12)), 8))
    short = compact(long, names)
    assert short.modules == {"blocks.[0-9]": 8, "blocks.1[01]": 8}
    assert short.bits_for("matmul", "blocks.12") == "off"


@settings(max_examples=50, deadline=None)
@given(st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 130), st.integers(0, 12)), min_size=1, max_size=40))
def test_patterns_of_names_match_these_and_no_others(those):
    names = [f"{a}.{i}.x.{j}" for a, i, j in those] + [f"{a}.{i}" for a, i, _ in those if a == "b"]
    patterns = globbed(dict.fromkeys(names))
    everything = {f"{a}.{i}" for a in "ab" for i in range(140)} | {
        f"{a}.{i}.x.{j}" for a, i, _ in those for j in range(20)
    }
    assert {name for name in everything if any(fnmatch.fnmatchcase(name, p) for p in patterns)} == set(names)
    assert len(patterns) <= len(set(names))


@st.composite
def models(draw):
    """Names of modules in the order of ``named_modules``, and the blocks among them."""
    names, units = [""], []
    for family in draw(st.lists(st.sampled_from(["blocks", "enc.layers", "blocks.0.blocks"]), unique=True, min_size=1)):
        inside = draw(st.sampled_from([(), ("norm", "mlp", "mlp.0"), ("0", "1")]))
        for at in range(draw(st.integers(1, 13))):
            own = [f"{family}.{at}", *(f"{family}.{at}.{each}" for each in inside)]
            names += own
            parts = ("mlp",) if "mlp" in inside else ()
            units.append(Unit(own[0], whole=draw(st.booleans()), nested=bool(inside), parts=parts))
    parents = {name.rpartition(".")[0] for name in names} | {"enc", "head"}
    names = sorted({*names, *parents}, key=lambda name: name.split("."))
    names.remove("")
    return ["", *names], [*units, Unit("head")]


KINDS = (
    AS_IT_IS, EIGHT, FOUR, *AGAIN, Kind("but for", 8, without="gelu"), Kind("part", 8, again="mlp", inputs=8),
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(models(), st.data())
def test_a_plan_of_units_decides_the_same_in_fewer_patterns(model, data):
    names, units = model
    usual = data.draw(st.sampled_from(KINDS))
    rules = {}
    for unit in units:
        kind = data.draw(st.sampled_from([usual, usual, usual, *KINDS]))
        rules |= kind.rules(unit) if kind.fits(unit) else {}
    long = ActivationPolicy(bits="off", modules=rules)
    short = compact(long, names)
    assert decisions(short, names) == decisions(long, names)
    assert len(short.modules) <= len(long.modules)
    short.check([*names, *(pattern.partition(":")[0] for pattern in long.modules)])  # no pattern for nothing


PATTERNS = st.sampled_from(
    ["blocks.*", "blocks.?", "*", "*.mlp", "blocks.1*", "enc.layers.*", *(f"blocks.{at}" for at in range(6)),
     *(f"blocks.{at}.mlp" for at in range(4)), *(f"blocks.{at}.*" for at in range(4))]
)  # fmt: skip
NAMES = ["", "blocks", *(f"blocks.{at}{part}" for at in range(6) for part in ("", ".mlp", ".mlp.0")), "enc.layers.0"]


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.tuples(PATTERNS, st.sampled_from(["", "", ":gelu", ":checkpoint"])),
        st.sampled_from([8, 4, "off"]),
        max_size=14,
    ),
    st.dictionaries(PATTERNS, st.sampled_from(["checkpoint", "checkpoint:bits=8"]), max_size=8),
    st.permutations(range(22)),
)
def test_whatever_patterns_a_policy_has_and_in_whatever_order_fewer_decide_the_same(bits, again, order):
    rules = [(pattern + of, value) for (pattern, of), value in bits.items()] + list(again.items())
    long = ActivationPolicy(modules=dict(rules[at] for at in order if at < len(rules)))
    assert decisions(compact(long, NAMES), NAMES) == decisions(long, NAMES)


def test_decisions_are_those_of_the_context():
    """Which modules backward runs again, as the context finds them in a model."""
    from torch import nn

    from narrowband.activations.modules import Modules

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())), nn.Sequential(nn.Linear(2, 2)))
    for modules in (
        {"0": "checkpoint"},
        {"*": "checkpoint"},
        {"0.*": "checkpoint", "0": 8},
        {"?": "checkpoint", "1": 4},
    ):
        policy = ActivationPolicy(modules=modules)
        found = Modules(model, policy)
        again = {found.name_of(module) for module in found.recomputed}
        decided = decisions(policy, found.names)
        assert {name for name, (first, *_) in decided.items() if first} == again
