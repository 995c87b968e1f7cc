"""A peer has all loops that a round needs before others wait for it."""

from __future__ import annotations

import time
from pathlib import Path

from narrowband.kernels.cpu.cache import LoopCache
from narrowband.updates.rendezvous import Meeting
from tests.gradients.training import train
from tests.ranks import run_ranks
from tests.updates.peers import join

#: Each with what it adds to the loops of the others.
RUNS = {
    "none": {},
    "topk:density=0.01+ef": {},
    "qsgd:bits=2+ef": {"outer": "auto"},
    "powersgd:rank=2,min_ratio=1": {},
}


class FirstUses:
    """The loops that this process uses first ``before`` it arrives, and ``after`` that."""

    def __init__(self):
        load, arrive = LoopCache.load_overload, Meeting.arrive

        def loaded(cache, *given):
            self._here.append(cache.name)
            return load(cache, *given)

        def arrived(meeting, *given, **options):
            self._here = self.after
            return arrive(meeting, *given, **options)

        LoopCache.load_overload, Meeting.arrive = loaded, arrived
        self.begin()

    def begin(self):
        self.before, self.after = [], []
        self._here = self.before


def loading(rank, world_size, address):
    """For each run, the loops that this process used first before it arrived, and after that."""
    loops, found = FirstUses(), {}
    for spec, options in RUNS.items():
        loops.begin()
        model, optimizer, handle = join(address, rank, spec, begin_with=world_size, run=spec, **options)
        train(model, rank, range(4), optimizer)
        handle.remove()
        found[spec] = loops.before, loops.after
    return found


def test_who_comes_compiles_before_others_wait_for_it(store):
    for found in run_ranks(loading, 3, store, group=False, fresh=True):
        assert found["none"][0]
        assert {spec: after for spec, (_, after) in found.items() if after} == {}


def coming_later(rank, world_size, address, file):
    """On the peer that comes when the others have given a layer a spec of its own: the loops that this process used
    first before it arrived, and after that.
    """
    while rank == 2 and not Path(file).exists():
        time.sleep(0.01)
    loops = FirstUses()
    model, optimizer, handle = join(address, rank, "none+ef", begin_with=2, grace_s=0.5)
    if rank < 2:
        handle.set_layers({"0.weight": "qsgd:bits=4"})
        Path(file).touch()
    while len(handle.peers) < world_size:
        train(model, rank, range(2), optimizer)
    return loops.before, loops.after, handle.layers.override_texts()


def test_who_comes_compiles_the_specs_of_set_layers_too(store, tmp_path):
    found = run_ranks(coming_later, 3, store, str(tmp_path / "set"), group=False, fresh=True)
    before, after, specs = found[2]
    assert specs == found[0][2] != {}
    assert before
    assert after == []
