"""Peers that die or freeze, exchanges that break, and a store that dies."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import time

import pytest
import torch

import narrowband as nb
from narrowband.updates.stores import serve
from tests.gradients.training import adamw, flat, heard, mlp, refusal, train
from tests.ranks import run_ranks
from tests.updates.peers import LONG_S, SPECS, die, join, left_over


def dying(rank, world_size, address, spec, when):
    """Peer 2 dies before it arrives at its third round, or in the middle of that round's exchange. Nobody waits for it
    after that.
    """
    model, optimizer, handle = join(address, rank, spec, begin_with=world_size)
    side, feed = nb.Rendezvous(address).connect(), handle.feed

    def fed(*given, **options):
        if handle.rounds == 3 and when == "in the exchange":
            if rank == 2:
                side.wait(["0 exchanges", "1 exchanges"])  # a round that has ended before they begin is no exchange
                die(handle)
            side.set(f"{rank} exchanges", "1")
        return feed(*given, **options)

    handle.feed = fed
    seen = []
    with heard(shown) as messages:
        for step in range(12):
            if rank == 2 and when == "before" and handle.rounds == 3 and handle.steps == 1:
                die(handle)
            train(model, rank, [step], optimizer)
            if not handle.steps:
                seen.append((handle.rounds, len(handle.peers), flat(model)))
    residual = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
    handle.remove()
    return seen, residual, messages


def shown(record):
    """What a user sees of a log record, who has set up no logging."""
    text = logging.Formatter().format(record) if record.levelno >= logging.WARNING else ""
    return text, record.levelno >= logging.ERROR


@pytest.mark.parametrize("spec", SPECS[:2])
def test_what_died_in_an_exchange_leaves_no_trace_of_it(store, spec):
    """The round is held again, with the updates and residuals that were there before: the same bits as if the peer had
    never come to it.
    """
    clean = left_over(dying, 3, store, spec, "before")
    address = serve(0, "127.0.0.1")
    torn = left_over(dying, 3, f"127.0.0.1:{address.port}", spec, "in the exchange")
    for rank in (0, 1):
        seen, residual, messages = torn[rank]
        told = [text for text, _ in messages if text]
        assert told
        assert all(text.startswith("round 3: the exchange broke off, and will be repeated: ") for text in told)
        assert not any("\n" in text for text in told)  # no traceback
        assert not any(is_an_error for _, is_an_error in messages)
        assert not any(text for text, _ in clean[rank][2])
        assert [(rounds, peers) for rounds, peers, _ in seen] == [(2, 3), (3, 3), (4, 2), (5, 2), (6, 2), (7, 2)]
        for (_, _, mine), (_, _, others), (_, _, expected) in zip(seen, torn[0][0], clean[rank][0], strict=True):
            assert torch.equal(mine, others)
            assert torch.equal(mine, expected)
        assert residual.keys() == clean[rank][1].keys()
        assert all(torch.equal(residual[name], clean[rank][1][name]) for name in residual)


def freezing(rank, world_size, address, where):
    """Peer 2 is stopped for longer than the others wait, wherever it is or in an exchange, and goes on."""
    in_exchange = where == "in an exchange"
    exchange_s = LONG_S if in_exchange else 10.0
    model, optimizer, handle = join(address, rank, begin_with=world_size, grace_s=5.0, exchange_s=exchange_s)
    side = nb.Rendezvous(address).connect()
    seen = []
    if in_exchange and rank == 2:
        feed = handle.feed

        def fed(*given, **options):
            if handle.rounds == 3 and not side.check(["stopped"]):
                side.set("stopped", "1")
                os.kill(os.getpid(), signal.SIGSTOP)
            return feed(*given, **options)

        handle.feed = fed
    if rank == 2:
        side.set("pid", str(os.getpid()))
    for step in itertools.count():
        if not in_exchange and handle.rounds == 3 and rank == 0 and not side.check(["stopped"]):
            os.kill(int(side.get("pid")), signal.SIGSTOP)
            side.set("stopped", "1")
        if handle.rounds == 6 and rank == 0 and not side.check(["woken"]):
            side.set("woken", "1")
            os.kill(int(side.get("pid")), signal.SIGCONT)
        if side.check(["enough"]) and handle.steps == 0:
            break
        train(model, rank, [step], optimizer)
        if not handle.steps:
            seen.append((handle.rounds, len(handle.peers), flat(model)))
            if handle.rounds > 6 and len(handle.peers) == 3:
                side.set("enough", "1")
        if handle.rounds >= 6:  # let it have a core
            time.sleep(0.05)
    handle.remove()
    return seen


@pytest.mark.parametrize("where", ["anywhere", "in an exchange"])
def test_a_peer_that_froze_returns_and_is_equal_again(store, where):
    """In an exchange the others wait ten times as long as the longest before it, and not until ``exchange_s`` is over:
    that would be five minutes here.
    """
    results = run_ranks(freezing, 3, store, where, group=False)
    by_round = [{rounds: parameters for rounds, _, parameters in seen} for seen in results]
    sizes = {rounds: peers for rounds, peers, _ in results[0]}
    assert min(sizes[rounds] for rounds in (5, 6)) == 2
    assert max(sizes[rounds] for rounds in sizes if rounds > 6) == 3
    for rounds in by_round[2]:
        for other in by_round[:2]:
            assert rounds not in other or torch.equal(other[rounds], by_round[2][rounds])
    assert max(by_round[2]) > 6


def breaking_twice(rank, world_size, address):
    """On peer 1 the first exchange breaks off before anything is sent, and then a connection when it is half made."""
    model, optimizer, handle = join(address, rank, begin_with=world_size, exchange_s=LONG_S)
    handle.set_layers({"5.weight": "topk:density=0.5+ef"})
    exchange, connect, broken = handle._exchange, handle._connect, []

    def exchanged(fragments, **options):
        if not broken:
            broken.append("exchange")
            raise RuntimeError("the wire broke")
        exchange(fragments, **options)

    def connected(group):
        connect(group)
        if len(broken) == 1:
            broken.append("connection")
            raise RuntimeError("the wire broke again")

    if rank == 1:
        handle._exchange, handle._connect = exchanged, connected
    train(model, rank, range(4), optimizer)
    specs = handle.layers.override_texts()
    handle.remove()
    return flat(model), handle.rounds, specs, broken


def test_what_breaks_half_way_is_held_again_with_all_that_was_set(store):
    (mine, rounds, specs, _), (its, others, theirs, broken) = run_ranks(breaking_twice, 2, store, group=False)
    assert broken == ["exchange", "connection"]
    assert rounds == others == 3
    assert torch.equal(mine, its)
    assert specs == theirs == {"5.weight": "topk:density=0.5+ef"}


def without_a_store(rank, world_size, port):
    """The last rank serves the store, until peers have taken their fifth step."""
    peers, address = world_size - 1, f"127.0.0.1:{port}"
    if rank == peers:
        held = serve(port, "127.0.0.1")
        side = nb.Rendezvous(address).connect()
        side.wait([f"{peer} is in no round" for peer in range(peers)])
        os.kill(os.getpid(), signal.SIGKILL)
        return held
    model, optimizer, handle = join(address, rank, begin_with=peers)
    train(model, rank, range(5), optimizer)
    nb.Rendezvous(address).connect().set(f"{rank} is in no round", "1")
    with contextlib.suppress(OSError):
        while True:  # until nothing listens there
            socket.create_connection(("127.0.0.1", port)).close()
    error = refusal(lambda: train(model, rank, [5], optimizer))
    return error, handle.rounds, flat(model)


def test_a_store_that_dies_is_an_error_and_parameters_are_those_of_the_last_round():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results = left_over(without_a_store, 3, port)
    for error, rounds, after in results.values():
        assert error[0] == "RendezvousError"
        assert f"the store at 127.0.0.1:{port} does not answer any more" in error[1]
        assert rounds == 3
        assert torch.equal(after, results[0][2])  # the round's parameters, not this peer's own


def alone(rank, world_size, address):
    model, optimizer, handle = join(address, rank, "sign+ef", begin_with=1, outer="auto")
    plain = mlp()
    plain_optimizer = adamw(plain)
    train(model, 0, range(4), optimizer)
    train(plain, 0, range(4), plain_optimizer)
    apart = float((flat(model) - flat(plain)).abs().max())
    handle.remove()
    return handle.rounds, len(handle.peers), apart, handle.stats().total.sent_bytes


def test_who_is_left_alone_trains_on(store):
    ((rounds, peers, apart, sent),) = run_ranks(alone, 1, store, group=False)
    assert (rounds, peers, sent) == (3, 1, 0)
    assert apart < 0.03  # signs, on their way to the update
