"""The examples in docstrings do what they show, on two ranks where they need ranks."""

from __future__ import annotations

import doctest
import functools
import importlib
import pkgutil
import re
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowband
import narrowband as nb
from narrowband.codecs import QSGD
from tests.ranks import run_ranks

#: Examples that are not run here, and why.
ELSEWHERE = {
    "narrowband": "README.md runs these lines",
    "narrowband.activations.compiled.compiled_hooks": "Inductor takes a minute; tests/activations/test_compiled.py",
    "narrowband.activations.compiled.compiled_saving": "Inductor takes a minute; tests/activations/test_compiled.py",
    "narrowband.activations.dynamo.is_compiled_itself": "importing Inductor warns, which is an error in a test",
    "narrowband.adapt.plan.Plan": "needs a file; docs/how-to/adapt.md runs these lines",
    "narrowband.bench.peaks.footprint": "an interpreter of its own; tests/bench/test_bench_memory.py",
    "narrowband.coded.choose.choose_redundancy": "needs three ranks; docs/how-to/coded.md runs these lines",
    "narrowband.coded.parallel.CodedDataParallel": "needs three ranks; docs/how-to/coded.md runs these lines",
    "narrowband.coded.parallel.CodedDataParallel.split": "needs three ranks; tests/coded/test_parallel.py",
    "narrowband.gradients.timing.measure_times": "hundreds of steps; docs/how-to/adapt.md runs these lines",
    "narrowband.pipeline.stage.CompressedStage": "needs four ranks; docs/how-to/pipeline.md runs these lines",
    "narrowband.updates.elastic.ElasticUpdateCompression.count": "needs a store; tests/updates/test_peers_late.py",
}

#: Modules that import what few have installed; docs/how-to/trainers.md runs what their examples show.
OF_TRAINERS = {f"narrowband.integrations.{trainer}" for trainer in ("accelerate", "lightning", "transformers")}

#: Names that need a process group.
ON_RANKS = {"model", "handle"}


class Checker(doctest.OutputChecker):
    """What an example prints without showing it may be anything."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


def examples(modules):
    """Those of these modules, by name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in modules for test in finder.find(importlib.import_module(name), name)]
    return {test.name: test for test in found if any(not e.options.get(doctest.SKIP) for e in test.examples)}


@functools.cache
def all_examples():
    modules = [
        m.name
        for m in pkgutil.walk_packages(narrowband.__path__, "narrowband.")
        if "__main__" not in m.name and m.name not in OF_TRAINERS
    ]
    return examples(["narrowband", *modules])


def needed(test):
    """The names of :class:`World` that an example uses."""
    source = "".join(e.source for e in test.examples)
    used = {name for name in dir(World(test)) if re.search(rf"\b{name}\b", source)} - test.globs.keys()
    return used - {"handle"} if "handle = " in source else used


class World:
    """What the names in examples usually stand for."""

    def __init__(self, test):
        torch.manual_seed(0)
        self.nb, self.nn, self.torch, self.DDP = nb, nn, torch, DistributedDataParallel
        self.test = test
        self.net = nn.Sequential()
        self.net.add_module("body", nn.Linear(64, 64))
        self.net.add_module("head", nn.Linear(64, 64))
        self.layers = [nn.Linear(64, 64) for _ in range(8)]
        self.x, self.y = torch.randn(2, 64), torch.randint(64, (2,))
        self.a, self.b, self.out, self.total = (torch.zeros_like(self.x) for _ in range(4))
        self.loss = lambda predicted, *_: predicted.square().mean()
        self.step = 0
        self.codec, self.QSGD = nb.codec("qsgd:bits=4"), QSGD
        self.microbatch = 0
        self.writer = SimpleNamespace(add_scalar=lambda *_: None)

    @property
    def model(self):
        alone = r"(DistributedDataParallel|compress_updates|Averager)\("
        plain = any(re.search(alone, e.source) for e in self.test.examples)
        return self.net if plain else self.ddp

    @property
    def ddp(self):
        if not hasattr(self, "_ddp"):
            self._ddp = DistributedDataParallel(self.net)
        return self._ddp

    @property
    def handle(self):
        return nb.compress_gradients(self.ddp, "powersgd:rank=4")

    @property
    def optimizer(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def failures(tests):
    """What did not happen as it is shown."""
    said = []
    for test in tests:
        world = World(test)
        test.globs.update({name: getattr(world, name) for name in needed(test)})
        doctest.DocTestRunner(checker=Checker(), verbose=False).run(test, out=said.append)
    return "".join(said)


def failures_on_a_rank(rank, world_size, names, modules):
    found = examples(modules)
    return failures(found[name] for name in names)


def run_here():
    return {name: test for name, test in all_examples().items() if name not in ELSEWHERE}


def test_examples_do_what_they_show():
    alone = [test for test in run_here().values() if not needed(test) & ON_RANKS]
    assert len(alone) >= 20
    said = failures(alone)
    assert not said, said


def test_examples_of_distributed_training_do_what_they_show():
    together = {name: test.globs["__name__"] for name, test in run_here().items() if needed(test) & ON_RANKS}
    assert len(together) >= 5
    modules = sorted(set(together.values()))
    for said in run_ranks(failures_on_a_rank, 2, list(together), modules, timeout_s=240):
        assert not said, said


def test_examples_that_run_elsewhere_exist():
    assert not ELSEWHERE.keys() - all_examples().keys()


def test_an_example_that_shows_something_else_fails():
    shown = ">>> codec.name\n'coffee'\n"
    assert "coffee" in failures([doctest.DocTestParser().get_doctest(shown, {}, "shown", None, 0)])
