"""Which collective carries what, what it costs, and which is chosen."""

from __future__ import annotations

import pytest

import narrowband as nb
from narrowband.collectives import COLLECTIVES, Peers, all_reduce_nbytes, check, choose, collective
from narrowband.collectives.scatter_reduce import ScatterReduce
from tests.collectives.test_exchange import ALL_REDUCE, WAYS


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("nbytes", [4, 1 << 10, 1 << 15, 1 << 17, 1 << 22])
def test_what_is_chosen_sends_least(size, nbytes):
    for spec in ALL_REDUCE:
        assert choose(nb.codec(spec), nbytes, size).name == "all_reduce"
    for spec in ("topk:density=0.01", "threshold:value=1"):
        assert choose(nb.codec(spec), nbytes, size).name == "all_gather"
    gather, scatter = (size - 1) * nbytes, 2 * (size - 1) * nbytes // size
    for spec in ("qsgd:bits=4", "uniform:bits=8", "sign"):
        expected = "scatter_reduce" if gather > scatter + ScatterReduce.overhead_nbytes else "all_gather"
        assert choose(nb.codec(spec), nbytes, size).name == expected


def test_among_two_ranks_a_second_phase_never_pays():
    assert choose(nb.codec("qsgd:bits=8"), 1 << 40, 2).name == "all_gather"
    assert choose(nb.codec("qsgd:bits=8"), 1 << 40, 3).name == "scatter_reduce"


def test_a_ring_all_reduce_sends_everything_but_the_own_share_twice():
    assert [all_reduce_nbytes(1000, size) for size in (1, 2, 4, 10)] == [0, 1000, 1500, 1800]


@pytest.mark.parametrize("spec", ["topk:density=0.01", "qsgd:bits=4", "uniform:bits=8", "sign", "threshold:value=1"])
def test_all_reduce_is_refused_where_payloads_do_not_add_up(spec):
    with pytest.raises(nb.UnsupportedError, match="cannot be added"):
        check(nb.codec(spec), "all_reduce")


@pytest.mark.parametrize("spec", ["topk:density=0.01", "threshold:value=1", "randomk:density=0.1"])
def test_scatter_reduce_is_refused_where_a_sum_cannot_be_encoded(spec):
    with pytest.raises(nb.UnsupportedError, match=r"would drop most of a sum.*'all_gather' or 'auto'"):
        check(nb.codec(spec), "scatter_reduce")


@pytest.mark.parametrize(("kind", "spec"), WAYS)
def test_what_works_is_not_refused(kind, spec):
    check(nb.codec(spec), kind)


def test_every_collective_is_found_by_the_name_it_has():
    for name in (*COLLECTIVES, "factor_reduce"):
        assert collective(name).name == name
    with pytest.raises(KeyError):
        collective("dense")


def test_factors_need_powersgd():
    assert "powersgd" in collective("factor_reduce").obstacle(nb.codec("lowrank:rank=2"), None)
    assert collective("factor_reduce").obstacle(nb.codec("lowrank:rank=2"), nb.PowerSGD()) is None
    with pytest.raises(TypeError, match="needs the state of powersgd"):
        collective("factor_reduce")([], Peers(None, 0, 1), measure=False)
