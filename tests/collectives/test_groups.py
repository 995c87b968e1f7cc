"""Process groups of the library's own, where ranks have made different numbers of groups before."""

from __future__ import annotations

import gc
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import narrowband as nb
from narrowband.averaging.replicas import _relay
from narrowband.collectives import Loan, Peers, borrow, group_of, groups, new_group
from narrowband.collectives.primitives import all_to_all
from tests.gradients.training import compress, mlp, train, wrap
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def total(group):
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return int(x)


def after_others(rank, world_size):
    """Sums in groups that are made after groups of some of the ranks."""
    everyone = dist.group.WORLD
    dist.new_group([0])  # on all ranks, and only the first is in it
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    found = []
    if rank < 2:  # and one of the library's own
        found.append(total(borrow(first, CPU).group))
    found.append(total(borrow(everyone, CPU).group))
    if rank:
        found.append(total(new_group([1, 2], second, None)))
    found.append(total(dist.new_group()))  # the user's own, after some ranks made more of the library's than others
    # Among some, each rank names its own; one that has its group already helps the others.
    found.append(total(group_of([0, 1] if rank < 2 else [2], everyone, CPU)))
    found.append(total(group_of([0, 1] if rank < 2 else [2], everyone, CPU)))
    found.append(total(new_group([0, 1, 2], everyone, None)))
    return found


def test_ranks_that_hold_different_numbers_of_groups_make_one_together():
    one, two, three = run_ranks(after_others, 3)
    assert one == [2, 3, 3, 2, 2, 3]
    assert two == [2, 3, 2, 3, 2, 2, 3]
    assert three == [3, 2, 3, 1, 1, 3]


def again_and_again(rank, world_size, folder):
    """Files and threads that are left of groups of some of the ranks, of all, and so on, when these have ended."""
    left = []
    for at, size in enumerate((2, 4, 3, 4, 2)):
        if rank < size:
            store = dist.FileStore(f"{folder}/{at}", size)
            limit = timedelta(seconds=60)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
            model = wrap(mlp())
            handle = compress(model, "topk:density=0.1+ef", min_numel=64, nodes=2 if size == 4 else None)
            train(model, rank, range(2))
            if at % 2:
                handle.remove()
            dist.barrier()
            dist.destroy_process_group()
            del model, handle, store
            gc.collect()
        left.append(tuple(len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task")))
    return left


def test_nothing_is_left_of_groups_that_have_ended(tmp_path):
    for left in run_ranks(again_and_again, 4, str(tmp_path), group=False, fresh=True):
        assert len(set(left)) == 1, left


def other_time_outs(rank, world_size, options):
    """Whether a handle's time-out is that of all ranks at set-up, after that was changed, and where it is set up again
    with the first one.
    """
    world, found = dist.group.WORLD, []
    before = timeout_of(world)
    model = wrap(mlp())
    for later in (timedelta(seconds=77), before):
        handle = compress(model, "none", min_numel=32, **options)
        found.append(timeout_of(handle.process_group) == before)
        world.set_timeout(later)
        train(model, rank, range(1))
        found.append(timeout_of(handle.process_group) == later)
        world.set_timeout(before)
        handle.remove()
    return found


def timeout_of(group):
    return group._get_backend(CPU).options._timeout


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, {"nodes": 2})])
def test_a_time_out_that_is_changed_later_holds_for_groups_of_the_library_too(ranks, options):
    assert run_ranks(other_time_outs, ranks, options) == [[True] * 4] * ranks


def given_back_meanwhile(rank, world_size):
    """Borrow while another thread gives groups back, as an engine's that has let go of the last of its handle."""
    first = borrow(dist.group.WORLD, CPU)
    shelf, group = first._shelf, first.group
    first.give_back()

    done = threading.Event()

    def give_back():
        for number in range(10_000, 20_000):
            if done.is_set():
                break
            Loan(group, number, shelf, lambda: None, None).give_back()
            time.sleep(1e-5)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=give_back)
    try:
        thread.start()
        for _ in range(50):
            borrow(dist.group.WORLD, CPU).give_back()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
        shelf.free.clear()


def test_groups_may_be_given_back_by_another_thread():
    run_ranks(given_back_meanwhile, 1)


def times_out(rank, world_size, seconds):
    """With which time-outs groups like one of so many seconds are made, and with which they are lent."""
    made, plain = [], dist.new_group

    def noting(*ranks, **options):
        made.append(options["timeout"].total_seconds())
        return plain(*ranks, **options)

    like = dist.new_group(timeout=timedelta(seconds=seconds))
    dist.new_group = noting
    try:
        loan = borrow(like, CPU)
    finally:
        dist.new_group = plain
    return made, loan.group._get_backend(CPU).options._timeout.total_seconds(), total(loan.group)


@pytest.mark.parametrize(("seconds", "connects_in"), [(100, 20), (12, 5), (3, 3)])
def test_ranks_wait_no_longer_to_connect_than_for_an_answer(seconds, connects_in):
    """Gloo waits five time-outs for a rank that died while ranks connect."""
    assert run_ranks(times_out, 2, seconds) == [([connects_in], seconds, 2)] * 2


def messages_of_a_late_rank(rank, world_size):
    """What arrives of rank 0, which is later by more than ranks had to connect, and by less than the time-out."""
    connects_in, groups.to_connect = groups.to_connect, lambda _: timedelta(seconds=1)
    try:
        group = borrow(dist.group.WORLD, CPU).group
        coded = nb.CodedDataParallel(torch.nn.Linear(3, 1), 1, "broadcast")
    finally:
        groups.to_connect = connects_in
    total(group)  # ranks connect
    coded_gradient(coded)
    peers = Peers.of(group)
    peers.open_pairs(CPU)
    received, piece = torch.zeros(2), torch.full((1,), 5 - 5 * rank, dtype=torch.uint8)
    found = []
    for get in (
        lambda: all_to_all(received, torch.arange(2.0) + 2 * rank, [1, 1], [1, 1], peers).wait() or received,
        lambda: (_relay([piece], [[1]], rank, group), piece)[1],
        lambda: coded_gradient(coded),
    ):
        dist.barrier()
        if not rank:
            time.sleep(1.5)
        try:
            found.append(get().tolist())
        except RuntimeError as error:
            found.append(str(error))
    peers.close()
    return found


def coded_gradient(model):
    model.zero_grad()
    (x,) = model.split(torch.ones(4, 3))
    model(x).sum().backward()
    return model.module.bias.grad.clone()


def test_a_message_may_take_as_long_as_the_time_out_of_the_group():
    """And not as long as ranks had to connect, for which gloo waits by itself where only two ranks take part."""
    first, second = run_ranks(messages_of_a_late_rank, 2)
    assert first == [[0.0, 2.0], [5], [2.0]]
    assert second == [[1.0, 3.0], [5], [2.0]]
