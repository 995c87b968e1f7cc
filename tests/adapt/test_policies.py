"""What policies decide, from gradients whose best compression is known."""

from __future__ import annotations

import itertools
import logging
import math
from decimal import Decimal

import numpy as np
import pytest
import torch

import narrowband as nb
from narrowband.adapt import (
    Accordion,
    Constant,
    GlobalTopK,
    HardThreshold,
    KMeans,
    LayerPlan,
    LGreCo,
    Plan,
    Traffic,
    error_table,
    search_space,
)
from tests.thorough import thorough

METRICS = {"l2": 1, "l2_squared": 2}
TRAFFIC = Traffic(4)


def spread(seed=0):
    """Layers of very different sizes, energies and shapes of spectrum."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for at, (n, m, decay, scale) in enumerate(
        [(200, 120, 0.7, 1.0), (80, 300, 0.97, 0.2), (40, 40, 0.9, 3.0), (256, 64, 0.5, 0.01), (30, 500, 0.99, 1.0)]
    ):
        k = min(n, m)
        u = torch.linalg.qr(torch.randn(n, k, generator=generator))[0]
        v = torch.linalg.qr(torch.randn(m, k, generator=generator))[0]
        found[f"{at}.weight"] = scale * (u * decay ** torch.arange(k)) @ v.T
    return found


def totals(plan, gradients, power):
    """Bytes, and error by encoding and decoding with the plan's codecs (low rank: the best factors)."""
    nbytes, error = 0.0, 0.0
    for layer in plan.layers:
        table = error_table({layer.name: gradients[layer.name]}, [layer.spec], traffic=TRAFFIC)
        nbytes += table.sizes[0, 0]
        error += table.errors[0, 0] ** power
    return nbytes, error


@pytest.mark.parametrize(
    ("reference", "metric"),
    [
        *(("powersgd:rank=4", "l2"), ("topk:density=0.01+ef", "l2_squared"), ("qsgd:bits=4", "l2")),
        *thorough(("powersgd:rank=4", "l2_squared"), ("topk:density=0.01+ef", "l2"), ("qsgd:bits=4", "l2_squared")),
    ],
)
def test_lgreco_sends_less_at_no_more_error_than_its_reference(reference, metric):
    gradients = spread()
    plan = LGreCo(reference, metric=metric).decide(gradients, step=7, traffic=TRAFFIC)
    uniform = Constant(reference).decide(gradients, step=7, traffic=TRAFFIC)
    nbytes, error = totals(plan, gradients, METRICS[metric])
    usual_nbytes, usual_error = totals(uniform, gradients, METRICS[metric])
    assert error <= usual_error * (1 + 1e-9)
    assert nbytes < usual_nbytes
    assert plan.nbytes == nbytes
    assert plan.reference_nbytes == usual_nbytes
    assert plan.step == 7
    assert {layer.spec for layer in plan.layers} <= set(search_space(reference))


@pytest.mark.parametrize("metric", METRICS)
def test_lgreco_is_the_best_of_all_plans(metric):
    gradients = dict(itertools.islice(spread().items(), 4))
    choices = [f"powersgd:rank={r}" for r in (1, 2, 4, 8, 16)]
    plan = LGreCo("powersgd:rank=4", choices, metric=metric, discretization=100_000).decide(
        gradients, step=0, traffic=TRAFFIC
    )
    table = error_table(gradients, choices, traffic=TRAFFIC)
    errors = table.errors ** METRICS[metric]
    budget = errors[:, 2].sum()
    rows = np.arange(4)
    best = min(
        table.sizes[rows, list(choice)].sum()
        for choice in itertools.product(range(5), repeat=4)
        if errors[rows, list(choice)].sum() <= budget
    )
    assert plan.nbytes == best


def test_mixed_families_beat_each_alone():
    gradients = spread()
    reference = "powersgd:rank=4"
    families = {
        "low rank": search_space(reference),
        "sparse": search_space("topk:density=0.03+ef"),
        "quantized": [f"qsgd:bits={bits}+ef" for bits in range(2, 9)],
    }
    sizes = {
        name: LGreCo(reference, own).decide(gradients, step=0, traffic=TRAFFIC).nbytes for name, own in families.items()
    }
    mixed = LGreCo(reference, [*itertools.chain(*families.values()), "none"]).decide(gradients, step=0, traffic=TRAFFIC)
    assert mixed.nbytes < min(sizes.values())
    assert len({layer.family for layer in mixed.layers}) > 1


def test_alpha_scales_the_budget_and_one_that_cannot_be_reached_is_said(caplog):
    gradients = spread()
    nbytes = [
        LGreCo("powersgd:rank=4", alpha=alpha).decide(gradients, step=0, traffic=TRAFFIC).nbytes
        for alpha in (0.7, 1.0, 2.0)
    ]
    assert nbytes == sorted(nbytes, reverse=True)
    assert len(set(nbytes)) == 3
    with caplog.at_level(logging.WARNING):
        plan = LGreCo("powersgd:rank=4", alpha=1e-6).decide(gradients, step=0, traffic=TRAFFIC)
    assert "no plan with these choices" in caplog.text
    least = error_table(gradients, search_space("powersgd:rank=4")).errors.min(axis=1)
    assert [layer.error for layer in plan.layers] == pytest.approx(least.tolist())


def test_time_is_saved_where_bytes_take_long():
    gradients = spread()
    by_bytes = LGreCo("powersgd:rank=4").decide(gradients, step=0, traffic=TRAFFIC)
    saved = []
    for slow in gradients:
        seconds = {name: 100.0 if name == slow else 1.0 for name in gradients}
        by_time = LGreCo("powersgd:rank=4", objective="time", seconds_per_byte=seconds).decide(
            gradients, step=0, traffic=TRAFFIC
        )
        took, takes = (sum(seconds[layer.name] * layer.nbytes for layer in plan.layers) for plan in (by_bytes, by_time))
        assert takes <= took
        saved.append(takes < took)
    assert any(saved)
    with pytest.raises(ValueError, match=r"no time for 5 of 5 layers: 0.weight, 1.weight, 2.weight …;"):
        LGreCo("powersgd:rank=4", objective="time", seconds_per_byte={}).decide(gradients, step=0, traffic=TRAFFIC)


def test_bytes_that_seem_to_take_no_time_are_not_sent_for_nothing():
    gradients = spread()

    def plan(seconds):
        policy = LGreCo("powersgd:rank=4", objective="time", seconds_per_byte=seconds)
        return policy.decide(gradients, step=0, traffic=TRAFFIC)

    by_bytes = LGreCo("powersgd:rank=4").decide(gradients, step=0, traffic=TRAFFIC)
    assert plan(dict.fromkeys(gradients, 0.0)).specs() == by_bytes.specs()
    most = error_table(gradients, ["powersgd:rank=8"], traffic=TRAFFIC).sizes[:, 0]
    for slow in gradients:
        found = plan({name: 1.0 if name == slow else 0.0 for name in gradients})
        free = [(layer.nbytes, size) for layer, size in zip(found.layers, most, strict=True) if layer.name != slow]
        assert sum(own for own, _ in free) < sum(size for _, size in free)


def test_layers_without_gradient_cost_least_and_break_nothing():
    gradients = spread() | {"dead.weight": torch.zeros(50, 50)}
    assert (
        LGreCo("topk:density=0.01+ef").decide(gradients, step=0, traffic=TRAFFIC).specs()["dead.weight"]
        == "topk:density=0.001+ef"
    )
    for policy in (KMeans("topk:density=0.01+ef"), GlobalTopK(0.01)):
        plan = policy.decide(gradients, step=0, traffic=TRAFFIC)
        dead = next(layer for layer in plan.layers if layer.name == "dead.weight")
        assert dead.error in (0.0, None)
        assert dead.nbytes <= 2500 * 4 * 3
    nothing = {name: torch.zeros_like(x) for name, x in gradients.items()}
    LGreCo("powersgd:rank=4").decide(nothing, step=0, traffic=TRAFFIC)


def test_search_spaces_are_the_papers():
    assert search_space("powersgd:rank=4,ef=false") == [f"powersgd:rank={r},ef=false" for r in range(2, 9)]
    assert search_space("qsgd:bits=4+ef") == [f"qsgd:bits={b}+ef" for b in range(2, 9)]
    densities = [nb.compression(spec).codec.density for spec in search_space("topk:density=0.01+ef")]
    assert densities == [float(f"0.{i:03}") for i in range(1, 101)]
    assert "topk:density=0.01+ef" in search_space("topk:density=0.01+ef")
    assert max(nb.compression(spec).codec.density for spec in search_space("topk:density=0.5+ef")) <= 1
    with pytest.raises(TypeError, match="a list of specs, such as"):
        LGreCo("powersgd:rank=4", "qsgd:bits=4")
    with pytest.raises(ValueError, match="neither bits nor rank nor density"):
        search_space("sign+ef")


def test_accordion_compresses_less_where_norms_change():
    policy = Accordion(low="powersgd:rank=8", high="powersgd:rank=2")
    x = torch.ones(40, 40)

    def specs(*scales):
        return list(
            policy.decide({str(i): x * s for i, s in enumerate(scales)}, step=0, traffic=TRAFFIC).specs().values()
        )

    low, high = policy.low, policy.high
    assert specs(1.0, 1.0, 1.0) == [low] * 3  # nothing to compare with
    assert specs(0.9, 0.4, 1.6) == [high, low, low]
    saved = policy.state_dict()
    assert specs(0.9, 0.4, 1.6) == [high] * 3
    again = Accordion(low="powersgd:rank=8", high="powersgd:rank=2")
    again.load_state_dict(saved)
    assert (
        again.decide({str(i): x * s for i, s in enumerate((0.9, 0.4, 0.1))}, step=0, traffic=TRAFFIC).specs()["2"]
        == low
    )


def test_accordions_plan_can_be_the_budget():
    gradients = spread()
    alone = Accordion(low="powersgd:rank=8", high="powersgd:rank=2")
    policy = LGreCo(
        Accordion(low="powersgd:rank=8", high="powersgd:rank=2"), [f"powersgd:rank={r}" for r in range(1, 17)]
    )
    for scale in (1.0, 0.9):
        scaled = {name: x * scale for name, x in gradients.items()}
        plain, plan = alone.decide(scaled, step=0, traffic=TRAFFIC), policy.decide(scaled, step=0, traffic=TRAFFIC)
        assert totals(plan, scaled, 1)[1] <= totals(plain, scaled, 1)[1] * (1 + 1e-9)
        assert plan.nbytes <= plain.nbytes
    assert plan.nbytes < plain.nbytes


def test_kmeans_compresses_large_layers_that_lose_little_most():
    gradients = {f"{i}.weight": torch.randn(64, 64) for i in range(3)} | {"large.weight": 1e-3 * torch.randn(512, 512)}
    plan = KMeans("topk:density=0.01+ef", clusters=2).decide(gradients, step=0, traffic=TRAFFIC)
    densities = {layer.name: nb.compression(layer.spec).codec.density for layer in plan.layers}
    assert densities["large.weight"] == pytest.approx(0.001)
    assert all(densities[f"{i}.weight"] == pytest.approx(0.1) for i in range(3))


def test_global_topk_takes_the_largest_of_all():
    gradients = spread()
    plan = GlobalTopK(0.02).decide(gradients, step=0, traffic=TRAFFIC)
    flat = torch.cat([x.flatten().abs() for x in gradients.values()])
    threshold = flat.topk(int(0.02 * flat.numel() + 0.5)).values[-1]
    for layer in plan.layers:
        expected = max(1, int((gradients[layer.name].abs() >= threshold).sum()))
        assert nb.compression(layer.spec).codec.kept(layer.shape) == expected


def digits(number):
    return len(Decimal(repr(number)).normalize().as_tuple().digits)


@pytest.mark.parametrize("density", [0.01, 0.03, 0.1, 0.0625, 0.1 + 0.2])
def test_the_densities_around_a_reference_are_short(density):
    specs = search_space(f"topk:density={density}")
    chosen = [nb.codec(spec).density for spec in specs]
    assert [f"topk:density={each}" for each in chosen] == specs
    assert density in chosen
    assert all(digits(each) <= 5 for each in chosen if each != density)


def test_the_densities_of_global_topk_have_no_more_digits_than_it_takes_to_keep_what_was_counted():
    gradients = spread()
    for layer in GlobalTopK(0.02).decide(gradients, step=0, traffic=TRAFFIC).layers:
        density, numel = nb.compression(layer.spec).codec.density, gradients[layer.name].numel()
        assert layer.spec == f"topk:density={density}+ef"
        k = nb.codec(f"topk:density={density}").kept(layer.shape)
        for fewer in range(1, digits(density)):
            assert nb.codec(f"topk:density={k / numel:.{fewer}g}").kept(layer.shape) != k


def test_densities_and_thresholds_may_be_numpys_or_large():
    for number in (np.float64(0.02), np.float32(0.02)):
        assert GlobalTopK(number).start == GlobalTopK(float(number)).start
        assert HardThreshold(number).start == HardThreshold(float(number)).start
    assert HardThreshold(1e20).start.codec.value == 1e20
    plan = HardThreshold(np.float64(0.5)).decide(spread(), step=0, traffic=TRAFFIC)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "make",
    [
        lambda: LGreCo("qsgd:bits=4", choices=[]),
        lambda: LGreCo("qsgd:bits=4", alpha=0),
        lambda: LGreCo("qsgd:bits=4", metric="l1"),
        lambda: LGreCo("qsgd:bits=4", every=0),
        lambda: LGreCo("qsgd:bits=4", choices=["qsgd:bits=99"]),
        lambda: LGreCo("sign+ef"),
        lambda: LGreCo("qsgd:bits=4", objective="time"),
        lambda: LGreCo("qsgd:bits=4", objective="speed"),
        lambda: Accordion(low="nothing", high="qsgd:bits=2"),
        lambda: Accordion(low="qsgd:bits=4", high="qsgd:bits=2", eta=0),
        lambda: KMeans("qsgd:bits=4", clusters=0),
        lambda: GlobalTopK(2.0),
    ],
)
def test_what_cannot_be_decided_by_is_refused(make):
    with pytest.raises(ValueError, match=r"."):
        make()


def test_plans_go_through_json_and_say_what_is_wrong():
    plan = LGreCo("powersgd:rank=4").decide(spread(), step=3, traffic=TRAFFIC)
    assert Plan.from_json(plan.to_json()) == plan
    shapes = {layer.name: layer.shape for layer in plan.layers}
    plan.check(shapes)
    for other, said in (
        ({**shapes, "new.weight": (3, 3)}, "lacks new.weight"),
        ({name: shape for name, shape in shapes.items() if name != "0.weight"}, "unknown 0.weight"),
        ({**shapes, "0.weight": (1, 2)}, "other shapes for 0.weight"),
    ):
        with pytest.raises(ValueError, match=said):
            plan.check(other)
    text = plan.to_json()
    for edited, said in (
        (text[:-5], "not JSON"),
        ("[]", "not a plan"),
        ("{}", "not a plan"),
        (
            text.replace('"version": 2', '"version": 9'),
            "the plan has version 9, but this narrowband reads",
        ),
        (text.replace('"layers"', '"layer"'), "the plan lacks the key 'layers'"),
        (text.replace('"policy"', '"police"'), "the plan lacks the key 'policy'"),
        (text.replace("powersgd:rank=", "powersgd:rnk=", 1), "0.weight"),
        (text.replace('"spec"', '"sepc"', 1), "layer '0.weight' of the plan lacks the key 'spec'"),
        (text.replace('"spec"', '"sepc": 0, "spec"', 1), "layer '0.weight' of the plan has the unknown key 'sepc'"),
        (text.replace('"nbytes": ', '"nbytes": -', 1), "must have a number from 0 on as 'nbytes'"),
        (text.replace('"error": ', '"error": NaN, "was": ', 1), "must have a number from 0 on, or null as 'error'"),
        (text.replace('"shape": [', '"shape": 7, "was": [', 1), "must have a list of whole numbers as 'shape'"),
        (text.replace('"0.weight"', '"1.weight"'), "twice"),
        (text.replace('"budget"', '"buget"'), "the plan has the unknown key 'buget'; there are: version, layers"),
        (text.replace('"world_size": 4', '"world_size": 0'), "must have a whole number from 1 on as 'world_size'"),
        ('{"version": 2, "policy": "x", "world_size": 4, "layers": [3]}', "layer 0 of the plan must be a JSON object"),
    ):
        assert edited != text
        with pytest.raises(ValueError, match=said):
            Plan.from_json(edited)
    assert math.isclose(plan.ratio, plan.dense_nbytes / plan.nbytes)


def test_a_plan_can_be_printed():
    layers = (LayerPlan("a.weight", (4, 4), "topk:density=0.5+ef", 1500, 0.1), LayerPlan("b", (2, 8), "none", 64, None))
    assert str(Plan(layers, "mine", 4)).splitlines() == [
        "topk:density=0.5+ef  1.5 kB  a.weight",
        "none                   64 B  b",
        "each of 4 ranks sends 1.56 kB per step for all layers",
    ]


def test_files_that_hold_no_plan_are_refused_by_name(tmp_path):
    path = tmp_path / "new" / "plan.json"
    plan = Constant("qsgd:bits=4").decide(spread(), step=0, traffic=TRAFFIC)
    plan.save(path)
    assert Plan.load(path) == plan
    for content, said in ((path.read_bytes()[:40], "not JSON"), (bytes(range(128, 256)), "it is not text")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=said) as caught:
            Plan.load(path)
        assert str(caught.value).startswith(f"{path}: ")


def test_plans_take_numpys_numbers_and_are_as_whole_as_those_from_json():
    def plan(layer=(), **changes):
        own = {"name": "w", "shape": (2, 3), "spec": "sign+ef", "nbytes": 9, "error": None}
        return Plan(**{"layers": (LayerPlan(**own | dict(layer)),), "policy": "mine", "world_size": 4, **changes})

    numpys = {"shape": tuple(np.array([2, 3])), "nbytes": np.int64(9), "error": np.float32(0.5)}
    made = plan(numpys, world_size=np.int64(4), step=np.int32(3), budget=np.float32(2.5), reference_nbytes=np.int64(7))
    assert made == plan({"error": 0.5}, step=3, budget=2.5, reference_nbytes=7)
    assert Plan.from_json(made.to_json()) == made
    for layer, changes, said in (
        ({"nbytes": -1}, {}, "layer 'w' of the plan must have a number from 0 on as 'nbytes'"),
        ({"nbytes": math.inf}, {}, "'nbytes'"),
        ({"error": math.nan}, {}, "'error', not nan"),
        ({"shape": (2, 0.5)}, {}, "'shape'"),
        ({"shape": 6}, {}, "'shape', not 6"),
        ({"name": 3}, {}, "'name'"),
        ({"spec": None}, {}, "'spec'"),
        ({"spec": "sign+ef-mixed"}, {}, "layer 'w': ef-mixed chooses"),
        ({}, {"world_size": 0}, "'world_size', not 0"),
        ({}, {"world_size": 2.0}, "'world_size', not 2.0"),
        ({}, {"step": -1}, "'step', not -1"),
        ({}, {"budget": math.inf}, "'budget', not inf"),
        ({}, {"model": "sign+ef-mixed"}, "the plan's model: ef-mixed chooses"),
        ({}, {"policy": None}, "'policy'"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(layer, **changes)
    text = made.to_json()
    for edited, said in (
        (text.replace('"step": 3', '"step": 3, "step": 4'), "the key 'step' is given twice"),
        (text.replace('"nbytes": 9', '"nbytes": 9, "nbytes": 10'), "the key 'nbytes' is given twice"),
        (text.replace('"step": 3', f'"step": 1{"0" * 400}'), "as 'step'"),
        (text.replace('"step": 3', f'"step": 1{"0" * 5000}'), "not JSON"),
        ("[" * 100_000, "not JSON"),
        (text.replace("sign+ef", "sign+ef-mixed"), "layer 'w': ef-mixed chooses"),
    ):
        with pytest.raises(ValueError, match=said):
            Plan.from_json(edited)


@pytest.mark.parametrize(
    "policy",
    [
        LGreCo("qsgd:bits=4"),
        LGreCo(Accordion("qsgd:bits=4", "qsgd:bits=2")),
        Accordion("qsgd:bits=4", "qsgd:bits=2"),
        KMeans("qsgd:bits=4"),
        GlobalTopK(0.02),
        HardThreshold(0.5),
        Constant("sign"),
    ],
)
def test_without_gradients_there_is_nothing_to_decide_and_empty_ones_are_layers(policy):
    with pytest.raises(ValueError, match=r"no gradients were given|at least one layer"):
        policy.decide({}, step=0, traffic=TRAFFIC)
    gradients = {"none": torch.zeros(0, 4), "one": torch.ones(()), "zeros": torch.zeros(3, 5), "w": torch.randn(40, 30)}
    plan = policy.decide(gradients, step=0, traffic=TRAFFIC)
    plan.check({name: tuple(x.shape) for name, x in gradients.items()})
    assert Plan.from_json(plan.to_json()) == plan


def test_more_elements_than_32_bits_can_index_are_refused_before_they_are_copied():
    huge = torch.zeros(1).expand(2**30)
    with pytest.raises(ValueError, match=r"index with 32 bits: 2147483648 elements are more"):
        GlobalTopK(0.01).decide({"a": huge, "b": huge}, step=0, traffic=TRAFFIC)


def test_a_norm_that_is_none_is_a_critical_regime():
    policy = Accordion("qsgd:bits=4", "qsgd:bits=2")
    given = ({"w": torch.full((4, 4), value)} for value in (1.0, math.nan, 1.0, 1.0))
    chosen = [policy.decide(gradients, step=0, traffic=TRAFFIC).layers[0].spec for gradients in given]
    assert chosen == ["qsgd:bits=4", "qsgd:bits=4", "qsgd:bits=4", "qsgd:bits=2"]
    for broken in ({"w": None}, {"w": "1.0"}, {"w": torch.ones(())}):
        with pytest.raises(ValueError, match="as the norm of 'w', expected a number"):
            policy.load_state_dict(broken)
    assert policy.state_dict() == {"w": 4.0}


def test_a_policy_that_saves_a_state_and_loads_none_is_no_class():
    with pytest.raises(TypeError, match=r"^Counting has a state_dict and no load_state_dict, which handles call"):

        class Counting(GlobalTopK):
            def state_dict(self):
                return {"decisions": 1}

    class Loads(GlobalTopK):
        def load_state_dict(self, state):
            super().load_state_dict({})

    class Both(Loads):
        def state_dict(self):
            return {"decisions": 1}

    Both(0.01).load_state_dict(Both(0.01).state_dict())


def test_times_of_policies_are_whole_numbers():
    numpys = {"every": np.int64(4), "warmup_steps": np.int32(3), "last": np.int64(2)}
    policy = nb.LGreCo("powersgd:rank=2", **numpys)
    assert repr(policy) == repr(nb.LGreCo("powersgd:rank=2", every=4, warmup_steps=3, last=2))
    for name in numpys:
        with pytest.raises(TypeError, match=rf"lgreco: {name}=0.5 is not a whole number"):
            nb.LGreCo("powersgd:rank=2", **(numpys | {name: 0.5}))


def test_which_steps_a_policy_looks_at():
    def seen(**how):
        policy = nb.LGreCo("powersgd:rank=2", **how)
        return [step for step in range(11) if policy.sees(step)]

    assert seen(every=4) == list(range(11))
    assert seen(every=4, last=4) == list(range(11))
    assert seen(every=4, last=1) == [3, 7]
    assert seen(every=4, last=2, warmup_steps=3) == [1, 2, 5, 6, 9, 10]
    for last in (-1, 5):
        with pytest.raises(ValueError, match=f"last={last} must be"):
            nb.LGreCo("powersgd:rank=2", every=4, last=last)


def test_accordion_takes_no_gradient_for_no_change():
    """Norms are as exact for gradients of 1e30 and of 1e-30, whose squares leave the range of float32."""
    policy = Accordion("qsgd:bits=4", "qsgd:bits=2")
    ones = torch.ones(4, 4)
    windows = [
        {"frozen": ones * a, "huge": 1e30 * ones * b, "tiny": 1e-30 * ones * b}
        for a, b in ((1, 1), (0, 1), (0, 1.2), (0, 3), (1, 3), (1, 3))
    ]
    chosen = [policy.decide(window, step=0, traffic=TRAFFIC).specs() for window in windows]
    low = {name: [specs[name] == "qsgd:bits=4" for specs in chosen] for name in windows[0]}
    assert low == {
        "frozen": [True, True, False, False, True, False],
        "huge": [True, False, False, True, False, False],
        "tiny": [True, False, False, True, False, False],
    }


@pytest.mark.parametrize(
    ("warmup_steps", "step", "count"), [(0, 0, 1), (0, 4, 4), (0, 8, 4), (3, 3, 3), (3, 7, 4), (9, 9, 9)]
)
def test_a_threshold_counts_the_bytes_of_a_step_not_of_a_windows_sum(warmup_steps, step, count):
    gradient = torch.linspace(0, 2, 1200).view(40, 30)
    policy = HardThreshold(1.0, every=4, warmup_steps=warmup_steps)
    sent = nb.codec("threshold:value=1.0").encode(gradient).numel()
    plan = policy.decide({"w": gradient * count}, step=step, traffic=Traffic(2))
    assert plan.nbytes == sent
    summed = HardThreshold(1.0, steps=count, every=4).decide({"w": gradient * count}, step=step, traffic=Traffic(2))
    assert summed.nbytes == sent
