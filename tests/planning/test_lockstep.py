"""Ranks of which one cannot go on: what each of them hears, wherever it is just then."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from narrowband.errors import DisagreementError
from narrowband.planning.meeting import Lockstep, Meeting, OtherRankError


def ended(*works):
    """How the work of each rank ends, all of them in one process: what it returns or raises."""
    store = HashStore()

    def run(rank):
        lockstep = Lockstep(Meeting(store, rank, len(works), "here", wait_s=20.0), patience_s=20.0)
        try:
            return works[rank](lockstep)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, range(len(works))))


def fails(error):
    def work(lockstep):
        lockstep.point()
        with lockstep.together():
            raise error

    return work


def waits(lockstep):
    lockstep.point()
    with lockstep.together():
        lockstep.point()  # in the middle of its work
    return "done"


def compares(lockstep):
    lockstep.point()
    lockstep.compare("something", {"a": 1})
    return "done"


@pytest.mark.parametrize("other", [waits, compares])
def test_what_is_given_wrong_to_one_ends_all_with_the_same_words(other):
    for end in ended(other, fails(ValueError("no such file"))):
        assert isinstance(end, OtherRankError)
        assert str(end) == "rank 1: no such file"


def test_an_error_of_another_kind_stays_what_it_is_where_it_was_raised():
    def leaves(lockstep):
        try:
            return waits(lockstep)
        finally:
            lockstep._meeting.leave(1)

    error = KeyError("ours")
    first, second = ended(leaves, fails(error))
    assert second is error
    assert isinstance(first, OtherRankError)
    assert str(first) == "rank 1: KeyError: 'ours'"


def test_the_first_name_that_differs_is_said_and_one_that_is_missing_is_not_given():
    def said(values):
        return lambda lockstep: lockstep.compare("options", values)

    for end in ended(said({"codecs": ("fp16",), "link": None}), said({"codecs": ["fp16"], "link": "1gbit"})):
        assert isinstance(end, DisagreementError)
        assert "ranks disagree on options: link is 1gbit on rank 1 and not given on rank 0; start all" in str(end)
    assert ended(said({"seed": 0}), said({"seed": 0})) == [None, None]


def test_ranks_that_can_go_on_do():
    assert ended(waits, waits) == ["done", "done"]
