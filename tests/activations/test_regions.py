"""Models that torch.compile was applied to, as a whole or in parts, in the context."""

from __future__ import annotations

import contextlib
import logging
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import narrowband as nb
from narrowband.activations.dynamo import compiled_modules, eager_modules
from tests.activations.models import error
from tests.thorough import thorough

# Dynamo looks at gradients of what it did not compute itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

BATCH, WIDTH, HIDDEN = 64, 32, 128
EXACT = 4 * BATCH * HIDDEN  # bytes of one hidden activation


@pytest.fixture(autouse=True)
def _nothing_compiled_yet():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Block(nn.Module):
    """Layers of PyTorch alone would not be compiled one by one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class CompiledForward(Block):
    @torch.compile(backend="aot_eager")
    def forward(self, x):
        return super().forward(x)


class DisabledForward(nn.Module):
    @torch.compiler.disable
    def forward(self, x):
        return x


def whole(counter="aot_eager"):
    return torch.compile(Block(), backend=counter)


def in_place(counter="aot_eager"):
    model = Block()
    model.compile(backend=counter)
    return model


def forward(counter="aot_eager"):
    model = Block()
    model.forward = torch.compile(model.forward, backend=counter)
    return model


def inside(make):
    return lambda counter="aot_eager": nn.Sequential(make(counter))


SOME = ("whole", "in place", "forward")
WAYS = [
    pytest.param(whole, id="whole"),
    pytest.param(in_place, id="in place"),
    pytest.param(forward, id="forward"),
    pytest.param(lambda _: CompiledForward(), id="class"),
    pytest.param(inside(whole), id="whole inside"),
    pytest.param(inside(in_place), id="in place inside", marks=pytest.mark.thorough),
    pytest.param(inside(forward), id="forward inside", marks=pytest.mark.thorough),
]
ways = pytest.mark.parametrize("make", WAYS)
# Where it matters that a compiled object is found again, and put back.
some_ways = pytest.mark.parametrize(
    "make",
    [pytest.param(*way.values, id=way.id, marks=() if way.id in SOME else pytest.mark.thorough) for way in WAYS],
)


def compress(model, **options):
    return nb.compress_activations(model, **{"min_numel": 512, **options})


def run(model, x, context=None):
    """Output, gradients, what the context yields."""
    with context or contextlib.nullcontext() as saved:
        y = model(x)
    return y.detach(), torch.autograd.grad(y.square().mean(), list(model.parameters())), saved


def norm(gradients, wanted):
    return error(*(dict(enumerate(those)) for those in (gradients, wanted)))


@ways
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.01), *thorough((4, 0.1), (2, 0.5))])
def test_a_compiled_model_keeps_codes_and_its_output_is_exact(make, bits, bound):
    model, x = make("aot_eager"), torch.randn(BATCH, WIDTH)
    y, wanted, _ = run(model, x)
    packed_y, gradients, saved = run(model, x, compress(model, bits=bits))
    assert torch.equal(packed_y, y)
    assert 0 < norm(gradients, wanted) < bound
    compiled = saved.by_operator["compiled"]
    assert compiled.raw_bytes == EXACT
    assert compiled.kept_bytes == EXACT // 4 * bits // 8 + EXACT // 4 // 256 * 8


def test_a_policy_says_how_many_neighbours_share_a_range_in_a_graph():
    torch.manual_seed(0)
    model, x = whole(), torch.randn(BATCH, WIDTH)
    with compress(model, bits=8, granularity=32) as saved:
        model(x).sum().backward()
    assert saved.by_operator["compiled"].kept_bytes == EXACT // 4 + EXACT // 4 // 32 * 8


@some_ways
def test_every_step_may_make_its_context_anew_and_nothing_is_compiled_again(make):
    counter = CompileCounterWithBackend("aot_eager")
    model, x = make(counter), torch.randn(BATCH, WIDTH)
    before = dict(torch._dynamo.utils.counters["frames"])  # of all tests so far
    run(model, x, compress(model))
    compiled = counter.frame_count
    for _ in range(3):
        run(model, x, compress(model))
    assert counter.frame_count == compiled
    frames = torch._dynamo.utils.counters["frames"]
    ok, total = (frames[name] - before.get(name, 0) for name in ("ok", "total"))
    assert ok == total > 0


@some_ways
def test_afterwards_the_model_is_what_it_was(make):
    model, x = make("aot_eager"), torch.randn(BATCH, WIDTH)
    before = [dict(vars(module)) for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    run(model, x, compress(model))
    with contextlib.suppress(ZeroDivisionError), compress(model):
        raise ZeroDivisionError
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module) == attributes
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


class Parts(nn.Module):
    """Compiled and other layers by turns."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([torch.compile(Block(), backend="aot_eager"), Block(), in_place()])
        self.head = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_compiled_and_other_parts_are_compressed_side_by_side():
    model, x = Parts(), torch.randn(BATCH, WIDTH)
    _, wanted, _ = run(model, x)
    _, gradients, saved = run(model, x, compress(model))
    assert 0 < norm(gradients, wanted) < 0.02
    assert set(saved.by_operator) == {"compiled", "matmul", "relu", "gelu"}
    assert saved.by_operator["compiled"].raw_bytes >= 2 * EXACT
    assert saved.by_module["blocks.0"].raw_bytes >= EXACT
    assert saved.by_module["blocks.1"].kept_bytes == EXACT // 4 // 8, (
        "ReLU keeps one bit per element, for both layers' use"
    )
    assert saved.kept_bytes < saved.raw_bytes * 0.35


def test_a_policy_names_compiled_parts():
    model, x = Parts(), torch.randn(BATCH, WIDTH)
    _, wanted, _ = run(model, x)
    off = {"bits": "off", "operators": {"compiled": 8}}
    _, _, saved = run(model, x, compress(model, **off))
    assert saved.by_operator["compiled"].ratio > 2
    assert saved.by_operator["gelu"].ratio == 1
    _, _, saved = run(model, x, compress(model, bits=8, modules={"blocks.0": "off", "blocks.2": 4}))
    assert saved.by_module["blocks.0"].ratio == 1
    graph_input = 4 * BATCH * WIDTH  # is kept as it is
    assert saved.by_module["blocks.2"].kept_bytes == graph_input + EXACT // 8 + EXACT // 4 // 256 * 8
    _, gradients, saved = run(model, x, compress(model, bits="off"))
    assert saved.ratio == 1
    assert all(map(torch.equal, gradients, wanted))


def test_patterns_are_of_names_before_anything_was_compiled():
    model = torch.compile(nn.Sequential(Block(), Block()), backend="aot_eager")
    compress(model, modules={"0.first": "off"})
    with pytest.raises(ValueError, match="matches no module"):
        compress(model, modules={"_orig_mod.0": "off"})


def test_what_a_loss_saves_stays_as_it_is():
    model, x = whole(), torch.randn(BATCH, WIDTH)
    with compress(model) as saved:
        y = model(x)
        x.requires_grad_()
        loss = (y.detach() * x.exp()).sum()
    assert saved.by_module["(outside)"].ratio == 1
    assert torch.equal(torch.autograd.grad(loss, x)[0], y.detach() * x.exp())


def test_between_the_graphs_of_a_model_that_breaks_all_is_exact():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            x = torch.tanh(x) if x.sum() > -1e9 else x
            return self.second(x)

    model, x = torch.compile(Broken(), backend="aot_eager"), torch.randn(BATCH, WIDTH)
    y, wanted, _ = run(model, x)
    packed_y, gradients, saved = run(model, x, compress(model))
    assert torch.equal(packed_y, y)
    assert 0 < norm(gradients, wanted) < 0.02
    assert saved.by_operator["compiled"].raw_bytes >= 2 * EXACT
    assert saved.by_operator["compiled"].ratio > 2


def test_a_backend_that_saves_in_python_is_left_alone_and_that_is_said(caplog):
    model, x = torch.compile(Block(), backend="eager"), torch.randn(BATCH, WIDTH)
    _, wanted, _ = run(model, x)
    with caplog.at_level(logging.WARNING, "narrowband"):
        _, gradients, saved = run(model, x, compress(model))
    assert all(map(torch.equal, gradients, wanted))
    assert saved.ratio == 1
    assert "nothing was compressed" in caplog.text


def own():
    """Compiled in a way that PyTorch 2.13 ignores for modules of its own, and 2.15 does not."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize(("make", "stance"), [(own, "default"), (whole, "force_eager"), (in_place, "force_eager")])
def test_a_module_of_which_no_graph_is_made_is_left_alone_and_that_is_said_once(make, stance, caplog):
    model, x = make(), torch.randn(BATCH, WIDTH, requires_grad=True)
    counters.clear()
    (want,) = torch.autograd.grad(model(x).square().sum(), x)
    compiled = stance == "default" and counters["stats"]["unique_graphs"] > 0
    for times_said in (0, 0) if compiled else (1, 0):
        caplog.clear()
        with torch.compiler.set_stance(stance), caplog.at_level(logging.WARNING):
            with nb.compress_activations(model, min_numel=1) as saved:
                y = model(x)
            (got,) = torch.autograd.grad(y.square().sum(), x)
        assert torch.equal(got, want)
        assert 0 < saved.kept_bytes <= saved.raw_bytes
        assert (saved.kept_bytes < saved.raw_bytes) == compiled
        assert sum("made no graph of it" in record.message for record in caplog.records) == times_said


def test_no_warning_where_there_are_graphs_and_something_between_them(caplog):
    class Broken(Block):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return torch.compiler.disable(torch.tanh)(super().forward(y))

    model = torch.compile(Broken(), backend="aot_eager")
    with caplog.at_level(logging.WARNING), nb.compress_activations(model, min_numel=256) as saved:
        model(torch.randn(BATCH, WIDTH))
    assert 0 < saved.kept_bytes < saved.raw_bytes
    assert not caplog.records


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_compiled_block_keeps_its_input_in_few_bits(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block = nn.Linear(WIDTH, WIDTH), whole()

        def forward(self, x):
            return checkpoint(self.block, self.stem(x), use_reentrant=reentrant)

    model, x = Checkpointed(), torch.randn(BATCH, WIDTH)
    y = model(x)
    y.square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for outside in (True, False):
        with compress(model) as saved, contextlib.ExitStack() as stack:
            y = model(x)
            if outside:
                stack.pop_all()
            if not outside:
                y.square().mean().backward()
        if outside:
            y.square().mean().backward()
        assert saved.by_operator["checkpoint"].ratio > 3
        assert norm([p.grad for p in model.parameters()], wanted) < 0.02
        model.zero_grad()


@pytest.mark.parametrize("what", ["model", "larger model", "function"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_model_that_was_given_before_it_was_compiled_is_told_once_to_run_uncompiled(what, caplog):
    model, x = nn.Sequential(Block()), torch.randn(BATCH, WIDTH)
    run = {"model": model, "larger model": nn.Sequential(model, nn.Tanh()), "function": lambda x: model(x) * 2}[what]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, backend=counter)

    def told():
        return [each.getMessage() for each in caplog.records if each.name.startswith("narrowband")]

    with compress(model):
        model(x)
    assert not told()
    for _ in range(2):
        with compress(model) as saved:
            y = compiled(x)
        y.sum().backward()
        assert saved.ratio > 2
        assert not counter.frame_count
        (line,) = told()
        assert line.startswith("torch.compile was applied to something around the model that was given")
    whole = torch.compile(model, backend=counter)
    with compress(whole) as saved:
        whole(x).sum().backward()
    assert counter.frame_count
    assert {*saved.by_operator} == {"compiled"}
    assert len(told()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("inside", [True, *thorough(False)])
@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")
def test_a_compiled_function_around_a_model_that_is_not_runs_as_it_is_written(inside):
    model, x = nn.Sequential(Block(), nn.Dropout(0.1)), torch.randn(BATCH, WIDTH)

    def function(x):
        return model(x).square().mean()

    def entering(x):
        with compress(model) as saved:
            loss = function(x)
        return loss, saved

    torch.manual_seed(1)
    wanted_loss, wanted = entering(x)
    for _ in range(2):
        torch.manual_seed(1)
        if inside:
            loss, saved = torch.compile(entering, backend="aot_eager")(x)
        else:
            with compress(model) as saved:
                loss = torch.compile(function, backend="aot_eager")(x)
        assert torch.equal(loss, wanted_loss)
        assert saved.by_operator["relu"] == wanted.by_operator["relu"]
        assert saved.by_module["0"].ratio > 3
        gradients = [
            torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in (loss, wanted_loss)
        ]
        assert norm(*gradients) < 0.01


def test_other_modes_on_functions_stay():
    class Called(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Called.calls += 1
            return func(*args, **(kwargs or {}))

    model, x = torch.compile(Block(), backend="aot_eager"), torch.randn(BATCH, WIDTH)
    with compress(model), Called() as mode:
        model(x)
        assert torch.overrides._get_current_function_mode_stack()[-1] is mode
        before = Called.calls
        x + x
        assert Called.calls == before + 1
    assert not torch.overrides._get_current_function_mode_stack()


def test_threads_have_passes_of_their_own():
    model, x = whole(), torch.randn(BATCH, WIDTH)
    compiled = vars(model)["forward"]
    _, wanted, _ = run(model, x, compress(model))
    first, second = threading.Barrier(2, timeout=180), []

    def other():
        with compress(model, bits=4) as saved:
            first.wait()
            model(x)
            first.wait()
        second.append(saved)

    thread = threading.Thread(target=other)
    with compress(model) as saved:
        thread.start()
        first.wait()
        first.wait()
        y = model(x)
    thread.join()
    assert saved.by_operator["compiled"].raw_bytes == second[0].by_operator["compiled"].raw_bytes == EXACT
    assert second[0].by_operator["compiled"].kept_bytes < saved.by_operator["compiled"].kept_bytes
    gradients = torch.autograd.grad(y.square().mean(), list(model.parameters()))
    assert all(map(torch.equal, gradients, wanted))
    assert vars(model)["forward"] is compiled


def test_a_pytorch_without_what_this_needs_is_refused_at_set_up(monkeypatch):
    monkeypatch.delattr("torch._functorch._aot_autograd.graph_compile._get_saved_tensor_hook_context")
    nb.compress_activations(Block())
    with pytest.raises(nb.UnsupportedError, match="does not support compiled models with PyTorch"):
        nb.compress_activations(whole())


@pytest.mark.parametrize(
    ("make", "compiled", "eager"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), [], 2),
        (DisabledForward, [], 1),
        (lambda: torch.compiler.disable(Block()), [], 4),
        (whole, [""], 0),
        (lambda: nn.Sequential(Block(), whole(), nn.Sequential(in_place())), ["1", "2.0"], 5),
        (lambda: nn.ModuleDict({"inner": CompiledForward()}), ["inner"], 1),
    ],
    ids=["plain", "disabled forward", "disabled", "whole", "parts", "forward"],
)
def test_which_modules_are_compiled(make, compiled, eager):
    model = make()
    found = compiled_modules(model)
    assert [name for name, module in model.named_modules() if module in found] == compiled
    assert len(eager_modules(model)) == eager
