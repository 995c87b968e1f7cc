"""The protocol of peers that meet: many of them as threads, with faults drawn at random, and what must hold whatever
happens.
"""

from __future__ import annotations

import hashlib
import json
import random
import socket
import threading
import time
from collections import defaultdict
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist

import narrowband as nb
from narrowband.updates.rendezvous import Entry, Meeting, RendezvousError, View
from narrowband.updates.stores import serve
from tests.thorough import thorough

GRACE_S, EXCHANGE_S = 0.03, 0.25


def rules(**options):
    return nb.Rendezvous("here:1", **{"least": 1, "grace_s": GRACE_S, "exchange_s": EXCHANGE_S, **options})


class Peer(threading.Thread):
    """Meets until it is told to stop. Its parameters are a text that says which rounds, and with whom, made them."""

    def __init__(self, name, store, board, stop, seed, faults):
        super().__init__(daemon=True)
        self.board, self.stop, self.dice, self.faults = board, stop, random.Random(f"{name} {seed}"), faults
        self.meeting = Meeting(rules(name=name, patience_s=5.0, begin_with=2), store, {"spec": "none"})
        self.parameters, self.round, self.error = f"{name}'s own", -1, None
        self.applied = []  # (turn, round, parameters)

    def run(self):
        try:
            while not self.stop.is_set():
                self.meet()
        except BaseException as error:  # the test looks at it
            self.error = error

    def meet(self):
        if self.dice.random() < self.faults:  # late
            time.sleep(self.dice.uniform(0, 3 * GRACE_S))
        view = self.meeting.arrive(self.round, 1.0)
        self.board["views"][view.turn].append(view)
        if self.dice.random() < self.faults:  # the exchange breaks off, for this peer at least
            self.meeting.vote(view, good=False)
            return
        if view.rank == 0:  # all take these
            self.board["first"][view.turn] = self.parameters
            self.board["there"][view.turn].set()
        elif not self.board["there"][view.turn].wait(EXCHANGE_S):
            self.meeting.vote(view, good=False)
            return
        if self.dice.random() < self.faults:  # it freezes
            time.sleep(self.dice.uniform(0, 2 * EXCHANGE_S))
        if self.meeting.vote(view, good=True):
            base = self.board["first"][view.turn]
            if not view.behind and not view.beginning:
                assert base == self.parameters
            peers = " ".join(entry.peer for entry in view.entries)
            self.parameters = hashlib.sha256(f"{base} {view.turn} {peers}".encode()).hexdigest()
            self.round = view.round + 1
            self.applied.append((view.turn, self.round, self.parameters))


def wait_until(condition):
    """Wait for threads; for minutes at most."""
    end = time.monotonic() + 240.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("faults", "seed"),
    [
        (0.0, 0),
        (0.15, 0),
        *thorough(*((faults, seed) for faults in (0.0, 0.15) for seed in range(1, 40))),
    ],
)
def test_whatever_happens_all_apply_the_same_rounds_in_the_same_order(seed, faults):
    store, stop = dist.HashStore(), threading.Event()
    board = {"views": defaultdict(list), "first": {}, "there": defaultdict(threading.Event)}
    peers = [Peer(f"{number}", store, board, stop, seed, faults) for number in range(4)]
    for peer in peers[:3]:
        peer.start()
    wait_until(lambda: sum(len(peer.applied) for peer in peers) >= 6 or not any(peer.is_alive() for peer in peers[:3]))
    peers[3].start()  # comes later
    wait_until(lambda: len(peers[3].applied) >= 3 or not any(peer.is_alive() for peer in peers))
    stop.set()
    for peer in peers:
        peer.join(60.0)  # those that are left wait for a view without the others
        assert not peer.is_alive()
        assert peer.error is None or isinstance(peer.error, RendezvousError), peer.error

    by_turn = defaultdict(set)
    for peer in peers:
        turns = [turn for turn, _, _ in peer.applied]
        rounds = [number for _, number, _ in peer.applied]
        assert turns == sorted(set(turns))
        assert rounds == sorted(set(rounds))
        for turn, number, parameters in peer.applied:
            by_turn[turn].add((number, parameters))
    # Who applied a turn's round has the same parameters as all others that did, and rounds are counted without a gap.
    assert all(len(outcomes) == 1 for outcomes in by_turn.values())
    numbers = [next(iter(by_turn[turn]))[0] for turn in sorted(by_turn)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 5
    assert len(peers[3].applied) >= 3
    for views in board["views"].values():
        assert len({(view.round, view.entries) for view in views}) == 1
        assert len({view.rank for view in views}) == len(views)
        first = views[0].entries[0]
        assert first.round == views[0].round or views[0].beginning


def meeting(store, name, facts=None, **options):
    return Meeting(rules(name=name, **options), store, facts or {"spec": "none"})


def together(*calls):
    """Results of calls at the same time."""
    found = [None] * len(calls)

    def call(at):
        try:
            found[at] = calls[at]()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=call, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return found


def begun(store, *names, **options):
    """Peers that have been in a first view together."""
    options = {"begin_with": len(names), "grace_s": 60.0, **options}
    peers = [meeting(store, name, **options) for name in names]
    views = together(*(lambda peer=peer: peer.arrive(-1, 0.0) for peer in peers))
    assert all(isinstance(view, View) for view in views), views
    votes = together(*(lambda p=p, v=v: p.vote(v, good=True, within_s=60.0) for p, v in zip(peers, views, strict=True)))
    assert votes == [True] * len(names)
    return peers


def without_a_third(a, b):
    """Views of two peers in a round that they hold without the third: the grace window of one is over as soon as both
    are there.
    """
    rules = a._rules

    def last():
        while not any(entry.peer == b.peer for entry in a._records(a._turn() + 1).values()):
            time.sleep(0.003)
        a._rules = replace(rules, grace_s=0.001)
        try:
            return a.arrive(1, 1.0)
        finally:
            a._rules = rules

    views = together(last, lambda: b.arrive(1, 1.0))
    assert [[entry.peer for entry in view.entries] for view in views] == [[a.peer, b.peer]] * 2
    return views


def test_one_bad_vote_is_enough_and_the_round_is_held_again_with_new_connections():
    a, b = begun(dist.HashStore(), "a", "b")
    views = together(lambda: a.arrive(1, 1.0), lambda: b.arrive(1, 1.0))
    assert [view.fresh for view in views] == [False, False]
    assert together(lambda: a.vote(views[0], good=True), lambda: b.vote(views[1], good=False)) == [False, False]
    again = together(lambda: a.arrive(1, 1.0), lambda: b.arrive(1, 1.0))
    assert [(view.turn, view.round, view.fresh) for view in again] == [(3, 1, True)] * 2


def test_a_beginning_that_breaks_off_is_begun_again():
    store = dist.HashStore()
    a, b = (meeting(store, name, begin_with=2, grace_s=60.0) for name in "ab")
    for good in (False, True):
        views = together(lambda: a.arrive(-1, 0.0), lambda: b.arrive(-1, 0.0))
        assert all(view.beginning for view in views)
        votes = together(lambda v=views, g=good: a.vote(v[0], good=g), lambda v=views: b.vote(v[1], good=True))
        assert votes == [good, good]
    b.leave()
    assert not a.arrive(1, 1.0).beginning


def test_without_all_votes_a_round_is_aborted_in_time():
    a, b = begun(dist.HashStore(), "a", "b")
    views = together(lambda: a.arrive(1, 1.0), lambda: b.arrive(1, 1.0))
    assert a.vote(views[0], good=True) is False
    assert not b.is_open(views[1])
    assert b.vote(views[1], good=True) is False  # whoever votes later finds that out


def test_who_left_is_not_waited_for():
    a, b, c = begun(dist.HashStore(), "a", "b", "c")  # they wait for a minute otherwise
    c.leave()
    views = together(lambda: a.arrive(1, 1.0), lambda: b.arrive(1, 1.0))
    assert [[entry.peer[0] for entry in view.entries] for view in views] == [["a", "b"]] * 2


def test_who_left_is_not_counted_among_the_least(caplog):
    store = dist.HashStore()
    gone = meeting(store, "b", least=2, patience_s=0.2)
    with pytest.raises(RendezvousError, match="1 peer is here"):
        gone.arrive(-1, 0.0)
    with pytest.raises(RendezvousError, match=r"1 peer is here \(least=2\)"):
        meeting(store, "a", least=2, begin_with=2, patience_s=0.4).arrive(-1, 0.0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "each says once that it waits"
    assert "1 peer is here, and a round needs 2 (least=): this peer waits for others, 0.4 s at most" in said[1]


def test_peers_that_are_behind_wait_for_one_that_is_not():
    store = dist.HashStore()
    a, b = begun(store, "a", "b")
    new = meeting(store, "aa", patience_s=0.4)
    found = new.arrive
    (error,) = together(lambda: found(-1, 0.0))
    assert isinstance(error, RendezvousError)
    assert "possibly none of them has the parameters" in str(error)
    another = meeting(store, "aaa", grace_s=60.0)

    def after(peer):
        while not any(entry.peer == another.peer for entry in peer._records(2).values()):
            time.sleep(0.01)
        return peer.arrive(1, 1.0)

    views = together(lambda: another.arrive(-1, 0.0), lambda: after(a), lambda: after(b))
    assert [entry.peer.split("-")[0] for entry in views[0].entries] == ["a", "b", "aaa"]  # who gave up is not there
    assert views[0].behind
    assert not views[1].behind
    assert views[1].some_are_behind


def test_where_all_that_had_the_last_round_died_who_waits_says_so_once(caplog):
    store = dist.HashStore()
    a, b, _ = begun(store, "a", "b", "c")
    views = without_a_third(a, b)
    assert together(lambda: a.vote(views[0], good=True), lambda: b.vote(views[1], good=True)) == [True, True]
    late = meeting(store, "c", grace_s=0.1, patience_s=0.5)
    with pytest.raises(RendezvousError, match="no round was held"):
        late.arrive(1, 1.0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "no peer that is here has the parameters of round 2" in said
    assert f"have not left: {a.peer}, {b.peer}. They train on, or have died. This peer waits for one of them" in said


def test_who_is_late_for_the_last_round_is_told_that_the_run_is_over():
    """It would wait for hours otherwise. Whoever has the last round's parameters, say from a checkpoint, goes on."""
    store = dist.HashStore()
    a, b, c = begun(store, "a", "b", "c")
    views = without_a_third(a, b)
    c._rules = replace(c._rules, grace_s=0.1)
    assert together(lambda: a.vote(views[0], good=True), lambda: b.vote(views[1], good=True)) == [True, True]
    a.leave()
    with pytest.raises(RendezvousError, match="no round was held"):  # b may come yet
        meeting(store, "d", grace_s=0.1, patience_s=0.4).arrive(-1, 0.0)
    b.leave()
    with pytest.raises(RendezvousError, match=r"ended with round 2: .* has those of round 1\. To start a new run"):
        c.arrive(1, 1.0)
    with pytest.raises(RendezvousError, match="has those of no round"):
        meeting(store, "e", grace_s=0.1).arrive(-1, 0.0)
    resumed = meeting(store, "f", grace_s=0.1).arrive(2, 0.0)
    assert (resumed.size, resumed.round, resumed.behind) == (1, 2, False)


def test_where_all_of_a_view_are_gone_a_current_peer_goes_on_alone():
    store = dist.HashStore()
    a, b, c = begun(store, "a", "b", "c")
    without_a_third(a, b)  # c is late, and both die before they vote
    c._rules = replace(c._rules, grace_s=0.1)
    view = c.arrive(1, 1.0)
    assert [entry.peer[0] for entry in view.entries] == ["c"]
    assert (view.round, view.behind) == (1, False)


def test_a_run_that_begins_from_checkpoints_begins_with_the_latest():
    store = dist.HashStore()
    peers = [meeting(store, name, begin_with=3, grace_s=60.0) for name in "abc"]
    views = together(*(lambda p=p, r=r: p.arrive(r, 0.0) for p, r in zip(peers, (4, 7, -1), strict=True)))
    assert [entry.peer[0] for entry in views[0].entries] == ["b", "a", "c"]
    assert [view.round for view in views] == [7, 7, 7]


def test_facts_that_differ_are_named():
    store = dist.HashStore()
    meeting(store, "a", {"spec": "none", "every": "5"})
    with pytest.raises(nb.DisagreementError, match="every: 5 in the run, 6 here") as caught:
        meeting(store, "b", {"spec": "none", "every": "6"})
    assert "spec" not in str(caught.value).partition("differs from the run")[2].partition(". Start")[0]
    meeting(store, "c", {"spec": "sign"}, run="another")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "here"}, "address='here' is not host:port"),
        ({"address": "here:"}, "is not host:port"),
        ({"address": "tcp://here:1"}, "is not host:port"),
        ({"address": "here:65536"}, "is not host:port"),
        ({"least": 0}, "least=0"),
        ({"least": 3, "begin_with": 2}, "begin_with=2 is less than least=3"),
        ({"grace_s": 0.0}, "grace_s=0.0 must be above 0"),
        ({"exchange_s": float("nan")}, "exchange_s=nan must be above 0"),
        ({"exchange_s": float("inf")}, "exchange_s=inf must be finite"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nb.Rendezvous(**{"address": "here:1", **options})


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "reached"), [("127.0.0.1", ["127.0.0.1"]), ("::1", ["[::1]"]), ("[::1]", ["[::1]", "::1"]),
                          ("::", ["[::1]", "127.0.0.1"])],
)  # fmt: skip
def test_a_store_has_an_address_of_ipv4_or_of_ipv6(host, reached):
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    store = serve(0, host)
    for at, address in enumerate(reached):
        client = nb.Rendezvous(f"{address}:{store.port}").connect()
        assert client.add("there", 1) == at + 1


def test_who_stops_to_wait_has_no_part_in_the_turn_and_may_come_again():
    store = dist.HashStore()
    a, b = (meeting(store, name, begin_with=2, grace_s=60.0) for name in "ab")
    looks = a._looks

    def interrupted(key):
        for now, _ in zip(looks(key), range(3), strict=False):
            yield now
        raise KeyboardInterrupt

    a._looks = interrupted
    with pytest.raises(KeyboardInterrupt):
        a.arrive(-1, 0.0)
    a._looks = looks
    views = together(lambda: a.arrive(-1, 0.0), lambda: b.arrive(-1, 0.0))
    assert [[entry.peer[0] for entry in view.entries] for view in views] == [["a", "b"]] * 2


def test_who_left_a_round_after_its_vote_is_behind_in_a_view_of_new_connections():
    store = dist.HashStore()
    a, b = begun(store, "a", "b", grace_s=60.0)
    views = together(lambda: a.arrive(1, 1.0), lambda: b.arrive(1, 1.0))
    assert [view.fresh for view in views] == [False, False]
    together(*(lambda p=p, v=v: p.vote(v, good=True) for p, v in zip((a, b), views, strict=True)))
    views = together(lambda: a.arrive(2, 1.0), lambda: b.arrive(1, 1.0))  # b has not applied what it voted for
    assert [(view.fresh, view.behind, view.round) for view in views] == [(True, False, 2), (True, True, 2)]


def test_where_one_has_closed_its_connections_all_need_new_ones():
    a, b = begun(dist.HashStore(), "a", "b")
    views = together(lambda: a.arrive(1, 1.0), lambda: b.arrive(1, 1.0, linked=False))
    assert [(view.fresh, view.some_are_behind) for view in views] == [(True, False)] * 2


def test_a_round_with_a_peer_that_left_while_it_was_proposed_is_aborted():
    """The peer that leaves finds no view yet, and the one that proposes has seen it there."""
    closed = []
    a, b = begun(dist.HashStore(), "a", "b")
    b._hang_up, records, looks = lambda: closed.append(b.peer), a._records, b._looks

    def interrupted(key):
        looks(key)
        raise KeyboardInterrupt

    def sees(turn):
        found = records(turn)
        if len(found) == 1:
            b._looks = interrupted
            with pytest.raises(KeyboardInterrupt):
                b.arrive(1, 1.0)
            b._looks = looks
            found[1] = replace(found[0], peer=b.peer)
            a._records = records
        return found

    a._records = sees
    view = a.arrive(1, 1.0)
    assert [entry.peer for entry in view.entries] == [a.peer, b.peer]
    assert closed == [b.peer]  # so a notices also where it has begun the exchange
    assert not a.is_open(view)


def test_a_peer_that_could_not_withdraw_is_in_a_view_once():
    store = dist.HashStore()
    a, b = begun(store, "a", "b")
    number = a._store.add("2/arrived", 1) - 1
    a._store.set(f"2/{number}", json.dumps(asdict(Entry(a.peer, 1, 5.0))))

    def second():
        wait_until(lambda: any(entry.weight == 1.0 for entry in b._records(2).values()))
        return b.arrive(1, 2.0)

    views = together(lambda: a.arrive(1, 1.0), second)
    assert [[entry.weight for entry in view.entries] for view in views] == [[1.0, 2.0]] * 2
