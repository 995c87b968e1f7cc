"""Hooks that Dynamo does not see: neither where it traces what calls them, nor where C++ does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

from narrowband import compiler
from narrowband.compiler import unseen


@pytest.fixture(autouse=True)
def _nothing_compiled_yet():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Backend:
    """Keeps what it is asked to compile, and runs it as it is."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph

    def functions(self):
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes]


def step(w, x):
    (w * x).sum().backward()


def frames_with(hide, count):
    """Frames that Dynamo has compiled of a step whose backward calls so many hooks, and what the hooks have seen."""
    torch.compiler.reset()
    counters.clear()
    seen, backend, w = [], Backend(), torch.ones(4, requires_grad=True)
    for number in range(count):
        w.register_hook(hide(lambda g, number=number: seen.append((number, g.cos().sum().item()))))
    compiled = torch.compile(step, backend=backend)
    for _ in range(2):
        compiled(w, torch.zeros(4))
    return counters["frames"]["total"], seen, backend


def test_hooks_that_autograd_calls_in_a_compiled_step_are_not_compiled():
    """More of them than Dynamo would compile anew before it gives up."""
    count = torch._dynamo.config.recompile_limit + 2
    frames_with(torch.compiler.disable, 1)  # the first compilation of a process has more frames: with PyTorch 2.11
    frames, seen, backend = frames_with(unseen, count)
    assert seen == [(number, 4.0) for number in range(count)] * 2
    assert not any("cos" in name for name in backend.functions())
    assert frames == frames_with(torch.compiler.disable, count)[0]
    seeing = frames_with(lambda hook: hook, count)
    assert seeing[0] > frames
    assert any("cos" in name for name in seeing[2].functions())


@unseen
def cosine_of(gradient):
    """Has code of its own, which is marked itself."""
    return below_cosine(gradient)


def below_cosine(gradient):
    return gradient.cos()


class Cosine:
    """So has a method."""

    @unseen
    def of(self, gradient):
        return below_cosine(gradient)


@pytest.mark.parametrize("hook", [cosine_of, Cosine().of], ids=["function", "method"])
def test_a_function_or_a_method_is_hidden_without_another_around_it(hook):
    assert "wrapper" not in hook.__code__.co_name
    backend, w = Backend(), torch.ones(4, requires_grad=True)
    w.register_hook(hook)
    compiled = torch.compile(step, backend=backend)
    for _ in range(2):
        w.grad = None
        compiled(w, torch.zeros(4))
        assert torch.equal(w.grad, torch.zeros(4).cos())
    assert not any("cos" in name for name in backend.functions())
    w = torch.ones(4, requires_grad=True)
    w.register_hook(below_cosine)
    compiled(w, torch.zeros(4))
    assert any("cos" in name for name in backend.functions())


def test_a_traced_caller_is_cut_there():
    @unseen
    def hidden(x):
        assert not torch.compiler.is_compiling()
        return below(x)

    def below(x):
        return x.cos()

    backend = Backend()
    compiled = torch.compile(lambda x: hidden(x.sin()) + 1, backend=backend)
    x = torch.rand(3)
    assert torch.equal(compiled(x), x.sin().cos() + 1)
    assert len(backend.graphs) == 2
    assert any("sin" in name for name in backend.functions())
    assert not any("cos" in name for name in backend.functions())


def test_what_is_called_afterwards_is_compiled_also_where_the_hidden_function_raised():
    """Dynamo does not compile a function that breaks off within ``try``, but what that function calls."""

    @unseen
    def fails(x):
        raise KeyError(x)

    def after(x):
        return x.cos()

    def caller(x):
        try:
            fails("x")
        except KeyError:
            x = x + 1
        return after(x)

    backend = Backend()
    assert torch.equal(torch.compile(caller, backend=backend)(torch.zeros(2)), torch.ones(2).cos())
    assert any("cos" in name for name in backend.functions())


def test_a_compiled_function_is_compiled_wherever_it_is_called():
    def plain(x):
        return x.sin()

    backend = Backend()
    compiled = torch.compile(plain, backend=backend)

    @unseen
    def hidden(x):
        return compiled(x) + 1

    assert torch.equal(hidden(torch.ones(2)), torch.ones(2).sin() + 1)
    assert any("sin" in name for name in backend.functions())


def test_methods_keep_their_name_and_a_reset_brings_nothing_back():
    class Counter:
        def count(self, g, by=1):
            """Counts."""
            self.counted = getattr(self, "counted", 0) + by

    own = Counter()
    hidden = unseen(own.count)
    assert (hidden.__name__, hidden.__doc__) == ("count", "Counts.")
    hidden(None, by=2)
    assert own.counted == 2
    before = frames_with(unseen, 3)[0]
    torch.compiler.reset()
    assert frames_with(unseen, 3)[0] == before


def test_without_pytorchs_names_its_own_decorator_is_taken(monkeypatch):
    monkeypatch.setattr(compiler, "_SKIP", None)
    _, seen, backend = frames_with(unseen, 2)
    assert seen == [(number, 4.0) for number in range(2)] * 2
    assert not any("cos" in name for name in backend.functions())


def test_hiding_does_not_import_dynamo():
    program = (
        "import sys; from narrowband.compiler import unseen; assert unseen(abs)(-1) == 1; "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
