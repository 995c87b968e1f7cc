"""Options against steps that were worked out by hand, from figures that nobody measured: round ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from narrowband.collectives import LayerCollectives, Sent
from narrowband.feedback import compression
from narrowband.planning import (
    Bucket,
    Cluster,
    Codec,
    Host,
    Line,
    Link,
    Network,
    Option,
    Piece,
    Profile,
    Share,
    Trained,
    predict,
    way_of,
)
from narrowband.planning.choices import options, plan_of
from narrowband.planning.links import PAYLOAD_SHARE
from narrowband.planning.options import averaged_by_rank

SHAPE = (1000, 1000)
NUMEL = 1_000_000
SPEC = "qsgd:bits=8"

GATHERED = Codec(
    SPEC,
    "all_gather",
    (Piece(Line(0.1), Line(), ("all_gather",), (Line(),), Line(0.0, 0.05)),),
    residual_nbytes=400,
)
#: One bucket, at the end of backward.
BUCKET = Bucket(2.0, (("weight", SHAPE),), NUMEL, names=("weight",))
PROFILE = Profile(1.0, 2.0, 0.5, (BUCKET,), (GATHERED,), (Trained("weight", SHAPE),))


def rate_of(nbytes, seconds):
    """The link whose payload is so many bytes in so many seconds."""
    return f"{8 * nbytes / seconds / PAYLOAD_SHARE:.0f}bit"


def network(nodes, nbytes, seconds, *, per_node=1, hop_s=0.0):
    cores = 64 * per_node
    return Network(Link.of(rate_of(nbytes, seconds)), Cluster(nodes, per_node), Host(hop_s), cores)


def test_plain_ddp_is_compute_and_what_a_ring_sends():
    found = predict(PROFILE, Option(None), network(4, 4 * NUMEL * 2 * 3 / 4, 3.0))
    assert found.sent_nbytes == 6 * NUMEL
    assert found.outcome.step_s == pytest.approx(3.5 + 3.0)
    assert found.outcome.wire_s == pytest.approx(3.0)


def test_a_gathered_payload_is_encoded_sent_to_all_and_decoded_of_all():
    payload = NUMEL + NUMEL // 128 * 4 + 4  # 8 bits each, and the norm of each 128
    found = predict(PROFILE, Option(SPEC), network(2, payload, 1.0))
    assert found.collective == "all_gather"
    assert found.sent_nbytes == pytest.approx(payload, rel=1e-3)
    assert found.outcome.step_s == pytest.approx(3.5 + 0.1 + 1.0 + 2 * 0.05, rel=1e-3)
    assert found.residual_nbytes == 400


def test_latency_counts_every_hop_of_a_ring():
    found = predict(PROFILE, Option(None), network(5, 1e9, 1e-6, hop_s=0.01))
    assert found.outcome.latency_s == pytest.approx(2 * 4 * 0.01)
    delayed = network(5, 1e9, 1e-6, hop_s=0.01)
    delayed = replace(delayed, link=replace(delayed.link, delay_s=0.02))
    assert predict(PROFILE, Option(None), delayed).outcome.latency_s == pytest.approx(2 * 4 * 0.03)


def longest(nodes, per_node, steps):
    """Most hops to another machine that anything waits for, one after the other: in each of these steps a rank goes on
    when it has what the rank so many places before it sends."""
    machine = [rank // per_node for rank in range(nodes * per_node)]
    waited = [0] * len(machine)
    for step in steps:
        waited = [
            max(own, waited[rank - step] + (machine[rank] != machine[rank - step])) for rank, own in enumerate(waited)
        ]
    return max(waited)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (4, 1), (1, 4), (2, 2), (2, 4), (4, 4)])
def test_only_hops_between_machines_wait_for_the_link(nodes, per_node):
    ranks = nodes * per_node
    where = network(nodes, 1e12, 1e-6, per_node=per_node)
    where = replace(where, link=replace(where.link, delay_s=0.02))
    reduced = predict(PROFILE, Option(None), where).outcome.latency_s
    assert reduced == pytest.approx(0.02 * longest(nodes, per_node, [1] * 2 * (ranks - 1)))
    scattered = Piece(calls=("all_to_all", "all_gather"), work=(Line(), Line()))
    profile = replace(PROFILE, codecs=(Codec("uniform:bits=8", "scatter_reduce", (scattered,), residual_nbytes=0),))
    if ranks < 4:
        return
    found = predict(profile, Option("uniform:bits=8"), where)
    assert found.collective == "scatter_reduce"
    around = longest(nodes, per_node, [1] * (ranks - 1))  # what ranks compare, and the means
    rotation = longest(nodes, per_node, range(1, ranks))
    assert found.outcome.latency_s == pytest.approx(0.02 * (2 * around + rotation))


def test_on_two_levels_a_machine_sends_what_one_rank_would():
    flat = predict(PROFILE, Option(None), network(2, NUMEL, 1.0, per_node=4))
    levels = predict(PROFILE, Option("none", levels=True), network(2, NUMEL, 1.0, per_node=4))
    agreement = 8 * 4
    assert levels.sent_nbytes == pytest.approx(NUMEL, abs=agreement)  # 2·(2−1)/2 of a quarter of 4 bytes each
    assert levels.link_nbytes == pytest.approx(4 * NUMEL, abs=4 * agreement)
    assert flat.link_nbytes == pytest.approx(2 * 7 / 8 * 4 * NUMEL)


def test_on_two_levels_ranks_of_a_machine_wait_for_each_other_three_times():
    """Until all have written what is summed, until all know that it is finite, and until all have written averages."""
    where = network(2, 1e9, 1e-6, per_node=4, hop_s=0.01)
    found = predict(PROFILE, Option("none", levels=True), where)
    inside, agreement, between = 2 * 3, 1, 2
    assert found.outcome.step_s == pytest.approx(3.5 + 0.01 * (3 * inside + agreement + between))


def one_bucket(spec, name, shape, share):
    """A matrix in one bucket, and a codec that takes no time, measured of shares alone."""
    calls = ("all_reduce", "all_reduce") if name == "factor_reduce" else (name,)
    piece = Piece(calls=calls, work=tuple(Line() for _ in calls))
    bucket = Bucket(1.0, (("w", shape),), math.prod(shape), names=("w",))
    codec = Codec(spec, name, (piece,), residual_nbytes=0, share=share)
    return Profile(1.0, 1.0, 1.0, (bucket,), (codec,), (Trained("w", shape),))


def test_on_two_levels_factors_are_those_of_a_shard():
    """Of 2048 columns and 16 of 64 rows, at rank 4: not a quarter of the whole matrix's."""
    spec, cluster, agreement = "powersgd:rank=4", network(2, 1e6, 1.0, per_node=4), 8
    profile = one_bucket(spec, "factor_reduce", (64, 2048), Share(0, 4))
    found = predict(profile, Option(spec, levels=True), cluster)
    assert found.sent_nbytes == pytest.approx(4 * 4 * (16 + 2048), abs=2 * agreement)
    plan = plan_of(profile, Option(spec, levels=True), cluster.cluster)
    assert plan.layers[0].nbytes == 4 * 4 * (16 + 2048)
    plan.check({"w": (64, 2048)})  # a plan is for whole parameters


def test_on_two_levels_a_small_shard_is_not_compressed():
    """A quarter of 2048 elements is less than what training compresses."""
    spec, cluster, agreement = "qsgd:bits=4", network(2, 1e6, 1.0, per_node=4), 8
    profile = one_bucket(spec, "all_gather", (16, 128), Share(0, 4))
    found = predict(profile, Option(spec, levels=True), cluster)
    assert found.sent_nbytes == pytest.approx(4 * 512, abs=2 * agreement)
    assert found.residual_nbytes == 0
    assert plan_of(profile, Option(spec, levels=True), cluster.cluster).layers[0].nbytes == 4 * 512
    with pytest.raises(KeyError, match="was not measured"):  # what was measured of shares is not of all
        predict(profile, Option(spec), network(2, 1e6, 1.0))


def test_on_two_levels_the_rank_counts_that_sends_most():
    """Of 63 rows one rank of two has 31, which are too few to be compressed, and the other 32."""
    bucket = Bucket(1.0, (("w", (63, 32)),), 63 * 32, names=("w",))
    profile = Profile(1.0, 1.0, 1.0, (bucket,), trained=(Trained("w", (63, 32)),))
    for spec, rows in (("qsgd:bits=4", 31), ("none", 32)):
        own, size = averaged_by_rank(profile, Option(spec, levels=True), Cluster(3, 2))
        assert (own.numel, own.trained, size) == (rows * 32, (Trained("w", (rows, 32)),), 3)


def test_a_round_is_shared_by_its_steps_and_hides_behind_nothing():
    option = Option("none", every=10)
    found = predict(PROFILE, option, network(2, 4 * NUMEL, 5.0))
    assert found.outcome.step_s == pytest.approx(3.5 + 5.0 / 10, rel=1e-3)
    assert found.sent_nbytes == pytest.approx(4 * NUMEL / 10, rel=1e-3)
    assert found.residual_nbytes == 4 * NUMEL  # the copy that updates are measured from


def test_accumulation_puts_the_other_micro_batches_before_the_last():
    where = network(2, 4 * NUMEL, 5.0)
    once, accumulated = (predict(profile, Option(None), where) for profile in (PROFILE, PROFILE.accumulated(4)))
    assert accumulated.outcome.step_s == pytest.approx(once.outcome.step_s + 3 * (1.0 + 2.0))
    assert accumulated.outcome.wire_s == pytest.approx(once.outcome.wire_s)
    assert accumulated.sent_nbytes == once.sent_nbytes
    rounds = [predict(profile, Option("none", every=10), where) for profile in (PROFILE, PROFILE.accumulated(4))]
    assert rounds[1].outcome.step_s - rounds[0].outcome.step_s == pytest.approx(9.0)
    early = replace(PROFILE, buckets=(replace(BUCKET, ready_s=0.5),))
    hidden = network(2, 4 * NUMEL, 1.0)  # in what is left of backward
    assert predict(early.accumulated(4), Option(None), hidden).outcome.step_s == pytest.approx(3.5 + 9.0)


def test_ten_thousand_ranks_send_no_more_than_a_ring_does():
    found = predict(PROFILE, Option(None), network(10_000, NUMEL, 1.0))
    assert found.sent_nbytes == pytest.approx(8 * NUMEL, rel=1e-3)
    assert found.outcome.step_s == pytest.approx(3.5 + 8.0, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 10, 100, 1000, 10_000])
def test_bytes_among_any_number_of_ranks_are_those_that_the_collectives_say(ranks):
    """So what the picture of a range shows rests on no formula of its own."""
    spec, shapes = "topk:density=0.01+ef", [(1000, 1000), (300, 2000), (64, 500)]
    layers = tuple((f"{at}.weight", shape) for at, shape in enumerate(shapes))
    way = way_of(replace(PROFILE, buckets=(Bucket(1.0, layers, 0),)), spec, ranks)
    calls = ("all_gather",) if way.name == "all_gather" else ("all_to_all", "all_gather")
    piece = Piece(calls=calls, work=(Line(),) * len(calls))
    profile = replace(
        PROFILE, buckets=(Bucket(1.0, layers, 0),), codecs=(Codec(spec, way.name, (piece,), residual_nbytes=0),)
    )
    found = predict(profile, Option(spec), network(ranks, 1e6, 1.0))
    assert found.collective == ("all_gather" if ranks < 7 else "sparse_reduce")
    chosen = compression(spec)
    sent = way.message_nbytes([Sent(chosen.codec, shape, 0) for shape in shapes], ranks, chosen.feedback)
    flag = 2 * (ranks - 1) * 4 // ranks if ranks < 7 else 0
    assert found.sent_nbytes == sum(sent) + 8 * (ranks - 1) + flag  # ranks compare 8 bytes
    collectives = LayerCollectives([(chosen, shape) for shape in shapes], ranks)
    by_layer = sum(collectives.sent_nbytes(chosen, shape) for shape in shapes)
    trailers = 4 * (ranks - 1) * len(calls)
    # Indices of sums are those of all layers together, which takes less of them the fewer each owner has.
    assert (1.0 if ranks < 7 else 0.85) * by_layer <= sum(sent) <= by_layer + trailers


def test_on_a_slower_processor_everything_but_the_link_takes_longer():
    where = network(2, 1e6, 1.0)
    for option in (Option(None), Option(SPEC), Option("none", every=2)):
        fast, slow = (predict(profile, option, where).outcome for profile in (PROFILE, PROFILE.on_slower(3.0)))
        assert slow.compute_s == pytest.approx(3 * fast.compute_s)
        assert slow.codec_s == pytest.approx(3 * fast.codec_s)
        assert slow.wire_s == pytest.approx(fast.wire_s)


def test_asymmetric_links_go_at_the_slower_rate():
    link = Link.of("20mbit/100mbit", "20ms")
    assert (link.up, link.down, link.rate, link.delay_s) == (20e6, 100e6, 20e6, 0.02)
    assert Link.of("1 Gbit/s").rate == 1e9


@pytest.mark.parametrize("rate", ["0mbit", "1gbit/0bit", "fast", "", "5", "10parsec"])
def test_a_link_that_cannot_be_is_refused(rate):
    with pytest.raises(ValueError, match="200mbit"):
        Link.of(rate)


def test_options_are_what_the_cluster_allows():
    flat = options(["none", SPEC], "adamw", Cluster(4), rounds=[30])
    assert Option(None) in flat
    assert Option(SPEC, every=30) in flat
    assert Option("none", every=15) in flat  # was measured with AdamW
    assert not any(option.levels for option in flat)
    levels = options(["none", SPEC], "adamw", Cluster(2, 4), rounds=[])
    assert Option(SPEC, levels=True) in levels
    assert not any(option.every for option in levels)
    with pytest.raises(ValueError, match="one rank each: remove every or per_node"):
        options(["none"], "adamw", Cluster(2, 4), rounds=[30])


def test_sixteen_bits_are_an_option_whatever_the_codecs_are():
    assert Option("fp16") in options(["qsgd:bits=4"], "adamw", Cluster(4), rounds=[])
    levels = options(["qsgd:bits=4"], "adamw", Cluster(2, 4), rounds=[])
    assert {Option("fp16"), Option("fp16", levels=True)} <= set(levels)
    assert [option.spec for option in options(["none", "fp16"], "sgd", Cluster(4), rounds=[])] == [None, "none", "fp16"]


def test_a_spec_is_one_option_however_it_is_written():
    found = options(["qsgd", "dgc:density=0.01,clip=1", "qsgd:bits=4"], "sgd", Cluster(4), rounds=[7])
    assert [option.spec for option in found if not option.every] == [
        None, "fp16", "qsgd:bits=4", "dgc:density=0.01,clip=1.0",
    ]  # fmt: skip
    assert [option.spec for option in found if option.every] == ["none", "qsgd:bits=4"]


@pytest.mark.parametrize("option", [Option(None), Option("topk:density=0.01+ef"), Option("powersgd:rank=4")])
def test_a_plan_has_the_spec_for_every_layer(option):
    plan = plan_of(PROFILE, option, Cluster(4))
    plan.check({"weight": SHAPE})
    assert plan.default == (option.spec or "none")
    assert plan.world_size == 4
