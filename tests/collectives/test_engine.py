"""What the engine promises: one order on all ranks, no idle waiting, and a word when something breaks."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from narrowband.collectives import Engine, Transfer, engine
from tests.gradients.training import heard
from tests.ranks import run_ranks

CPU = torch.device("cpu")


class Bench:
    """An engine, and a record of what became of it."""

    def __init__(self):
        self.errors = []
        self.done = []
        self.changed = threading.Condition()
        self.engine = Engine(CPU, self.failed)

    def failed(self, error):
        with self.changed:
            self.errors.append(error)
            self.changed.notify_all()

    def finish(self, name):
        with self.changed:
            self.done.append(name)
            self.changed.notify_all()

    def start(self, job, name):
        self.engine.post(lambda: self.engine.start(job, lambda: self.finish(name)))

    def wait(self, jobs):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.done) >= jobs or self.errors, timeout=180)


def many_jobs(rank, world_size, seed, jobs):
    shape_of = random.Random(seed)  # the same on all ranks
    delay = random.Random(f"{seed} {rank}")  # another on each
    bench, issued, sums = Bench(), [], {}

    def job(index, phases):
        for phase, kind in enumerate(phases):
            time.sleep(delay.random() * 0.004)  # encoding takes one rank longer than another
            x = torch.full((index + 1,), float(rank + 1))
            out = torch.empty(world_size, index + 1)

            def issue(phase=phase, kind=kind, x=x, out=out):
                issued.append((index, phase))
                if kind == "reduce":
                    return dist.all_reduce(x, async_op=True)
                return dist.all_gather_into_tensor(out.view(-1), x, async_op=True)

            yield Transfer(issue, later=() if phase == len(phases) - 1 else ["group"])
            sums[index, phase] = float((x if kind == "reduce" else out.sum(0)).mean())

    expected = []
    for index in range(jobs):
        phases = [shape_of.choice(["reduce", "gather"]) for _ in range(shape_of.choice([1, 1, 2, 3]))]
        expected += [(index, phase) for phase in range(len(phases))]
        if delay.random() < 0.3:
            time.sleep(delay.random() * 0.02)  # backward reaches this bucket later than others do
        bench.start(job(index, phases), index)
    bench.wait(jobs)
    bench.engine.close()
    return issued, expected, sums, sorted(bench.done), [repr(e) for e in bench.errors], bench.engine.wire_seconds


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_are_issued_in_one_order_whatever_the_timing(world_size):
    for seed in (1, 2):
        answers = run_ranks(many_jobs, world_size, seed, 40)
        for issued, expected, sums, done, errors, wire_seconds in answers:
            assert errors == []
            assert issued == expected
            assert done == list(range(40))
            assert set(sums) == set(expected)
            assert set(sums.values()) == {world_size * (world_size + 1) / 2}
            assert wire_seconds > 0


def test_who_is_told_of_an_error_can_read_it():
    """An engine that says afterwards that it has stopped would be asked for more in between."""
    seen, told = [], threading.Event()

    def tell():
        seen.append(own.error)
        told.set()

    def fail():
        raise ZeroDivisionError

    own = Engine(CPU, lambda _: seen.append(own.error), tell)
    own.post(fail)
    assert told.wait(180)
    own.close()
    before, after = seen
    assert before is None
    assert isinstance(after, ZeroDivisionError)


def two_engines(rank, world_size):
    """Two engines on two groups, posted in opposite orders on the two ranks."""
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    benches = [Bench(), Bench()]
    got = [[], []]

    def job(which, index):
        x = torch.tensor([float(which * 100 + index)])
        yield Transfer(lambda: dist.all_reduce(x, group=groups[which], async_op=True))
        got[which].append((index, x.item()))

    for index in range(10):
        for which in (0, 1) if rank == 0 else (1, 0):
            benches[which].start(job(which, index), index)
    for bench in benches:
        bench.wait(10)
        bench.engine.close()
    return [sorted(pairs) for pairs in got]


def test_two_engines_do_not_wait_for_each_other():
    expected = [[(index, 2.0 * (which * 100 + index)) for index in range(10)] for which in range(2)]
    assert run_ranks(two_engines, 2) == [expected, expected]


def encode_while_waiting(rank, world_size):
    """Rank 1 takes part in the first collective only when rank 0 has begun to encode the second job."""
    bench = Bench()
    store = dist.distributed_c10d._get_default_store()
    order = []

    def first():
        if rank == 1:
            store.wait(["second is being encoded"], timedelta(seconds=30))
        yield Transfer(lambda: dist.all_reduce(torch.zeros(1), async_op=True), later=["group"])
        order.append("first phase arrived")
        yield Transfer(lambda: dist.all_reduce(torch.zeros(1), async_op=True))

    def second():
        order.append("second encoded")
        if rank == 0:
            store.set("second is being encoded", "yes")
        yield Transfer(lambda: dist.all_reduce(torch.zeros(1), async_op=True))

    bench.start(first(), 0)
    bench.start(second(), 1)
    bench.wait(2)
    bench.engine.close()
    return order, len(bench.errors)


def test_the_next_job_is_encoded_while_a_collective_is_on_the_wire():
    answers = run_ranks(encode_while_waiting, 2)
    assert answers[0] == (["second encoded", "first phase arrived"], 0)
    assert answers[1][1] == 0


def test_queues_do_not_wait_for_each_other_and_keep_their_order():
    """A job between two queues holds back only the queue that it still needs."""
    bench, issued, gates = Bench(), [], {}

    class Slow:
        """A collective that ends when it is told to."""

        def __init__(self, name):
            self.future = gates[name] = torch.futures.Future()
            issued.append(name)

        def wait(self):
            self.future.wait()

        def get_future(self):
            return self.future

    def two_phases(name):
        yield Transfer(lambda: Slow(f"{name} pairs"), "pairs", later=["group"])
        yield Transfer(lambda: Slow(f"{name} group"))

    def one_phase(name):
        yield Transfer(lambda: Slow(f"{name} group"))

    for job, name in ((two_phases, "a"), (two_phases, "b"), (one_phase, "c")):
        bench.start(job(name), name)

    def reached(*names):
        deadline = time.monotonic() + 20
        while issued != list(names) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)  # and nothing more
        assert issued == list(names)

    reached("a pairs", "b pairs")
    gates["b pairs"].set_result(None)  # early: its second phase waits for a's, and so does c
    reached("a pairs", "b pairs")
    gates["a pairs"].set_result(None)
    reached("a pairs", "b pairs", "a group", "b group", "c group")
    for name in ("c group", "a group", "b group"):
        gates[name].set_result(None)
    bench.wait(3)
    bench.engine.close()
    assert bench.done == ["c", "a", "b"]
    assert not bench.errors


def alone(rank, world_size):
    bench = Bench()
    got = []

    def job(index):
        yield Transfer(lambda: None, later=["group"])
        yield Transfer(lambda: None)
        got.append(index)

    def nothing_to_send():
        got.append("nothing")
        return
        yield

    bench.start(job(0), 0)
    bench.start(nothing_to_send(), 1)
    bench.start(job(2), 2)
    bench.wait(3)
    bench.engine.close()
    return sorted(got, key=str), bench.errors


def test_one_rank_needs_no_peer():
    assert run_ranks(alone, 1) == [([0, 2, "nothing"], [])]


# ---- what breaks -----------------------------------------------------------------------------------------------------


def threads():
    return {thread for thread in threading.enumerate() if thread.name == "narrowband-engine"}


@pytest.mark.parametrize("where", ["encoding", "second phase", "issuing", "done"])
def test_an_exception_reaches_the_callback_once_and_later_posts_do_nothing(where):
    before = threads()
    bench = Bench()
    ran = []

    def fail(now):
        if now == where:
            raise KeyError(where)

    def job():
        fail("encoding")
        yield Transfer(lambda: fail("issuing"), later=["group"])
        fail("second phase")
        yield Transfer(lambda: None)

    bench.engine.post(lambda: bench.engine.start(job(), lambda: fail("done")))
    bench.wait(1)
    bench.engine.post(lambda: ran.append("posted later"))
    bench.start(job(), "started later")
    bench.engine.close()
    assert threads() == before
    assert isinstance(bench.engine.error, KeyError)
    assert {repr(e) for e in bench.errors} == {repr(KeyError(where))}
    assert ran == []
    assert bench.done == []


def peer_stays_away(rank, world_size):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    bench = Bench()
    after = []

    def job():
        x = torch.ones(1000)
        yield Transfer(lambda: dist.all_reduce(x, group=group, async_op=True))
        after.append("resumed")

    if rank == 0:
        bench.start(job(), 0)
        bench.start(job(), 1)
        bench.wait(1)
        bench.engine.close()
    return [isinstance(e, RuntimeError) for e in bench.errors][:1], bench.done, after


def test_a_peer_that_stays_away_is_an_error_when_the_groups_time_is_up():
    assert run_ranks(peer_stays_away, 2)[0] == ([True], [], [])


def test_an_engine_closes_before_and_after_its_first_work():
    before = threads()
    unused = Bench()
    unused.engine.close()
    assert threads() == before
    used = Bench()
    done = threading.Event()
    used.engine.post(done.set)
    used.engine.close()  # finishes what is in the inbox first
    assert done.is_set()
    assert threads() == before


def test_what_has_been_done_is_not_kept_alive():
    """A thread that waits for work must not hold on to the last: it would keep a model's handle for ever."""

    class Big:
        def touch(self):
            pass

    bench = Bench()
    big = Big()
    gone = weakref.ref(big)

    def job(what):
        yield Transfer(lambda: None)
        what.touch()

    bench.start(job(big), 0)
    bench.wait(1)
    touched = threading.Event()
    bench.engine.post(lambda what=big: (what.touch(), touched.set()))
    assert touched.wait(180)
    del big
    deadline = time.monotonic() + 180
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None
    bench.engine.close()


class Held:
    """A transfer under way, whose callback stays held after it was called, as torch's threads hold it for a while."""

    def __init__(self, callbacks):
        self._callbacks = callbacks

    def get_future(self):
        return self

    def add_done_callback(self, callback):
        self._callbacks.append(callback)

    def wait(self):
        pass


def until(what):
    deadline = time.monotonic() + 60
    while not what() and time.monotonic() < deadline:
        time.sleep(0.001)
    return what()


def test_whoever_releases_a_callback_last_releases_no_work_and_the_engine_waits_for_it():
    """Torch's thread must need the interpreter's lock no more once the engine is closed: the interpreter may exit."""
    bench, callbacks, works = Bench(), [], []

    def issue():
        work = Held(callbacks)
        works.append(weakref.ref(work))
        return work

    def job():
        yield Transfer(issue)

    bench.start(job(), "job")
    assert until(lambda: callbacks)
    callbacks[0](None)
    bench.wait(1)
    assert not bench.errors
    assert until(lambda: works[0]() is None)

    closing = threading.Thread(target=bench.engine.close)
    closing.start()
    closing.join(timeout=0.2)
    assert closing.is_alive()
    callbacks.clear()
    closing.join(timeout=60)
    assert not closing.is_alive()


def test_two_threads_may_ask_at_once_whether_a_callback_is_held():
    """A handle is closed while its thread, which a slow link holds up, is still at work."""
    engine, held, asked = Bench().engine, print, []

    def released():
        if not asked:  # the other thread asks just now
            asked.append(True)
            engine._is_held()

    engine._callbacks.extend([released, lambda: held])
    assert engine._is_held()
    assert engine._is_held()


def test_a_process_that_exits_right_after_a_collective_waits_for_torchs_threads(monkeypatch):
    slept = []
    monkeypatch.setattr(engine._Latest, "exiting", False)
    bench = Bench()
    monkeypatch.setattr(engine.time, "sleep", slept.append)
    monkeypatch.setattr(engine._Latest, "completed_at", time.monotonic())
    engine._settle()
    assert 0 < slept.pop() <= engine.SETTLE_S
    bench.engine.close()  # as the handle's finalizer does, after that
    assert 0 < slept.pop() <= engine.SETTLE_S
    monkeypatch.setattr(engine._Latest, "completed_at", time.monotonic() - engine.SETTLE_S)
    engine._settle()
    assert slept == [0.0]


def first_product(rank, world_size):
    """A matrix product as the first work of an engine, and the same on the main thread, which has one thread."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in ((5, 37), (37, 148)))
    bench, products = Bench(), []
    bench.engine.post(lambda: products.append(a @ b))
    bench.engine.close()
    return torch.equal(products[0], a @ b)


def test_an_engine_computes_on_as_many_threads_as_its_user_has_set():
    """Otherwise the first step after a resume would have other bits than the same step before."""
    assert run_ranks(first_product, 1, fresh=True) == [True]


def left_waiting(rank, world_size, folder):
    """What is logged on a rank that waits for another, which comes only when that is logged, or when the first has had
    time enough for it.
    """
    said, enough = Path(folder, "said"), Path(folder, "enough")
    former, engine.LONG_S = engine.LONG_S, 0.1
    try:
        bench = Bench()
    finally:
        engine.LONG_S = former

    def seen(record):
        said.touch()
        return record.getMessage()

    def job():
        yield Transfer(lambda: dist.all_reduce(torch.ones(1), async_op=True))

    with heard(seen) as messages:
        while rank and not (said.exists() or enough.exists()):
            time.sleep(0.01)
        bench.start(job(), "one")
        for _ in range(500):  # looks, not seconds: where the machine stands still, so does the engine
            if rank or said.exists():
                break
            time.sleep(0.01)
        enough.touch()
        bench.wait(1)
    bench.engine.close()
    return messages


def test_a_rank_that_waits_for_long_says_so(tmp_path):
    first, _ = run_ranks(left_waiting, 2, str(tmp_path))
    assert first
    assert "this rank has waited for other ranks for 0.1 s" in first[0]
    assert "has left the loop alone" in first[0]
