"""The context: errors, threads, states, names, warnings."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import logging
import math
import os
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowband as nb
from narrowband.activations import Saved
from narrowband.units import format_bytes
from tests.activations.helpers import compress, grads_of, linears
from tests.activations.models import ViT, error, mlp, same


def is_clean(model):
    """Whether nothing of a context is left: hooks of modules, of saved tensors, modes."""
    everywhere = torch.nn.modules.module
    return not (
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_forward_hooks_always_called
        or any(m._forward_hooks or m._forward_pre_hooks or m._forward_pre_hooks_with_kwargs for m in model.modules())
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._len_torch_function_stack()
    )


def test_an_exception_leaves_everything_clean():
    model = linears(16, 32, 8)
    handle = compress(model)
    for wrong in (torch.randn(3, 5), "no tensor"):
        with pytest.raises((RuntimeError, TypeError)), handle:
            model(wrong)
        assert is_clean(model)
    with handle as saved:  # in the model, and caught there
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        y = model(torch.randn(20, 16)).exp()
    assert is_clean(model)
    assert saved.by_module["(outside)"].raw_bytes == saved.by_module["(outside)"].kept_bytes == 20 * 8 * 4
    y.sum().backward()


def test_an_interrupt_that_the_model_catches_does_not_confuse_modules():
    class Interrupts(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(16, 32), Interrupts(), nn.Linear(32, 8)

        def forward(self, x):
            x = self.first(x)
            with contextlib.suppress(KeyboardInterrupt):
                self.inner(x)
            return self.last(x)

    model = nn.Sequential(Catches(), nn.GELU())
    with compress(model) as saved:
        model(torch.randn(20, 16)).exp()
    assert set(saved.by_module) == {"0.last", "1", "(outside)"}


def test_ratios():
    assert nb.activations.SavedBytes(12, 3).ratio == 4
    assert nb.activations.SavedBytes(12, 0).ratio == math.inf
    assert nb.activations.SavedBytes().ratio == nb.activations.Saved().ratio == 1


def test_contexts_do_not_nest():
    model = linears(16, 32, 8)
    handle = compress(model)
    for inner in (handle, compress(linears(4, 4))):
        with (
            handle,
            pytest.raises(nb.UnsupportedError, match="inside another compress_activations"),
            inner,
        ):
            pass
        assert is_clean(model)
    with handle as saved:
        model(torch.randn(20, 16))
    assert saved.kept_bytes < saved.raw_bytes


def test_several_threads_have_a_pass_each():
    """They come and go at different times, and each sees only its own."""
    torch.manual_seed(0)
    model = ViT().eval()  # without dropout
    inputs = [torch.randn(2 + i, 3, 16, 16) for i in range(3)]
    alone, found, grads = [], [None] * 3, [None] * 3
    handle = compress(model, decay=0.0)
    for x in inputs:
        with handle as saved:
            model(x)
        alone.append(saved)
    barriers = [threading.Barrier(2) for _ in range(2)]
    failed = []

    def work(i):
        try:
            with compress(model, decay=0.0) if i else handle as saved:
                if i == 0:  # is in the middle of the model while others begin and end
                    release = model.norm.register_forward_pre_hook(lambda *_: meet() if me() else None)
                    y = model(inputs[i])
                    release.remove()
                else:
                    y = model(inputs[i])
                y.exp()  # outside of the model
            found[i] = saved
            grads[i] = torch.autograd.grad(y.sum(), list(model.parameters()))
        except BaseException as error:
            failed.append(error)
            raise

    def wait(which):
        barriers[which].wait(180)

    def meet():
        wait(0)
        wait(1)

    threads = []

    def me():
        return threading.current_thread() is threads[0]

    threads.append(threading.Thread(target=work, args=(0,)))
    threads[0].start()
    wait(0)
    others = [threading.Thread(target=work, args=(i,)) for i in (1, 2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    wait(1)
    threads[0].join()
    assert not failed
    for i in range(3):
        plain = torch.autograd.grad(model(inputs[i]).sum(), list(model.parameters()))
        as_dict = [dict(enumerate(part)) for part in (grads[i], plain)]
        assert error(*as_dict) < 0.03
        outside = found[i].by_module.pop("(outside)")
        assert outside.raw_bytes == outside.kept_bytes == (2 + i) * 10 * 4
        assert found[i].by_module == alone[i].by_module
    assert is_clean(model)


def test_as_a_decorator():
    model, x = linears(16, 32, 8), torch.randn(20, 16)

    @compress(model, rounding="nearest")
    def loss_of(x):
        """Of the batch."""
        return model(x).square().sum()

    assert loss_of.__doc__ == "Of the batch."
    for _ in range(2):
        loss = loss_of(x)
        assert is_clean(model)
        loss.backward()
    first = grads_of(model)
    model.zero_grad()
    model(x).square().sum().mul(2).backward()
    assert 0 < error(first, grads_of(model)) < 0.01


def test_functions_that_run_after_their_call_are_no_functions_to_decorate():
    def generator():
        yield

    async def coroutine():
        pass

    async def both():
        yield

    handle = compress(linears(16, 32, 8))
    for function in (generator, coroutine, both):
        with pytest.raises(TypeError, match=f"'{function.__name__}'.*around the forward pass"):
            handle(function)
    with handle:
        pass


def test_the_model_can_be_copied_and_pickled_afterwards():
    model, x = mlp(), torch.randn(16, 32)
    with compress(model):
        y = model(x)
    y.sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_clean(other)
        model.eval()
        other.eval()
        assert torch.equal(other(x), model(x))
        state = compress(other).state_dict()  # estimates are the original's
        assert state == {"estimates": {}, "seed": torch.initial_seed() & 0xFFFFFFFF, "draws": 0}


def loaded(module):
    """A module that was saved and loaded."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo looks at it
@pytest.mark.parametrize("kind", ["eager", "checkpoint", "checkpoint of its own forward", "compiled"])
def test_the_model_can_be_copied_and_saved_inside(kind):
    """A copy computes with its own parameters, inside of the context and after it."""
    model, x = nn.Sequential(nn.Linear(32, 48), nn.Sequential(nn.GELU(), nn.Linear(48, 10))), torch.randn(16, 32)
    if kind == "compiled":
        model[1] = torch.compile(model[1], backend="eager")
    if kind == "checkpoint of its own forward":
        model[1].forward = functools.partial(type(model[1]).forward, model[1])
    options = {"modules": {"1": "checkpoint"}} if kind.startswith("checkpoint") else {}
    with compress(model, **options):
        expected = model(x)
        others = [make(model) for make in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), loaded)]
        parts = [make(model[1]) for make in (copy.deepcopy, loaded)]
        assert all(torch.equal(other(x), expected) for other in others)
    for part in (*(other[1] for other in others), *parts):
        with torch.no_grad():
            [p.zero_() for p in part.parameters()]
        assert not part(torch.randn(16, 48)).any()
    with compress(others[0], **options):
        assert not others[0](x).any()
    assert torch.equal(model(x), expected)
    assert is_clean(model)


class HasItsContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 10))
        self.saving = nb.compress_activations(self, min_numel=64)

    def forward(self, x):
        return self.net(x)


def test_a_model_that_holds_its_context_can_be_copied_and_saved(caplog):
    model, x = HasItsContext(), torch.randn(16, 32)
    with model.saving:
        expected = model(x)
        inside = copy.deepcopy(model)
    for other in (inside, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded(model)):
        assert torch.equal(other(x), expected)
        assert other.saving.model is other
        assert other.saving.stats().total.steps == 0
        with other.saving as saved:
            other(x).sum().backward()
        assert saved.ratio > 1
        assert other.saving.stats().total.steps == 1
        assert not hasattr(other.saving, "something")
    assert model.saving.stats().total.steps == 1
    assert "never used" not in caplog.text


def test_estimates_belong_to_the_model_and_not_to_the_context():
    model, x = linears(16, 32, 8), torch.randn(20, 16)
    for _ in range(3):
        with compress(model):
            model(x * 2)
    assert compress(model).state_dict()["draws"] == 3
    one = linears(16, 32, 8)
    handle = compress(one)
    for _ in range(3):
        with handle:
            one(x * 2)
    expected = handle.state_dict()["estimates"]
    assert all(torch.equal(compress(model).state_dict()["estimates"][name], expected[name]) for name in expected)


def test_names_of_estimates_do_not_change_with_the_batch():
    """A small batch, of which less is compressed, and a long one learn what the first one began."""
    torch.manual_seed(0)
    model = ViT()
    handle = compress(model, min_numel=2000)
    with handle:
        model(torch.randn(8, 3, 16, 16))
    before = handle.state_dict()["estimates"]
    with handle:
        model(torch.randn(2, 3, 16, 16))
    between = handle.state_dict()["estimates"]
    with handle:
        model(torch.randn(5, 3, 16, 32))
    after = handle.state_dict()["estimates"]
    assert before.keys() == between.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], between[name])]
    assert 0 < len(changed) < len(before)
    assert not any(torch.equal(before[name], after[name]) for name in before if not name.endswith(":scores"))


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    def train(steps, model, optimizer, handle):
        for at in steps:
            generator = torch.Generator().manual_seed(at)
            torch.manual_seed(at)
            with handle:
                loss = model(torch.randn(16, 32, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def new():
        torch.manual_seed(0)
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.5), compress(model, bits=4)

    whole = new()
    train(range(8), *whole)
    first = new()
    train(range(4), *first)
    torch.save([part.state_dict() for part in first], tmp_path / "state.pt")
    second = new()
    for part, state in zip(second, torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    train(range(4, 8), *second)
    assert all(same(p, q) for p, q in zip(whole[0].parameters(), second[0].parameters(), strict=True))
    assert second[2].state_dict()["draws"] == whole[2].state_dict()["draws"]
    forgetful = new()
    for part, state in zip(forgetful[:2], torch.load(tmp_path / "state.pt", weights_only=True)[:2], strict=True):
        part.load_state_dict(state)
    train(range(4, 8), *forgetful)
    assert not all(same(p, q) for p, q in zip(whole[0].parameters(), forgetful[0].parameters(), strict=True))


def test_roundings_follow_the_seed_of_torch():
    def gradients(seed):
        model, x = linears(16, 32, 8), torch.ones(20, 16)
        torch.manual_seed(seed)
        with compress(model, bits=2):
            y = model(x)
        y.square().sum().backward()
        return grads_of(model)["1.weight"]

    assert torch.equal(gradients(1), gradients(1))
    assert not torch.equal(gradients(1), gradients(2))


def test_a_context_that_is_never_used_says_so(caplog):
    model = linears(16, 32, 8)
    with compress(model):
        model(torch.randn(20, 16))
    assert "never used as a context" not in caplog.text
    nb.compress_activations(model)
    gc.collect()
    assert "write 'with nb.compress_activations(model):' around the forward pass" in caplog.text
    with pytest.raises(TypeError, match="pass it by its name, as in compress_activations"):
        nb.compress_activations(model, nb.ActivationPolicy(bits=4))
    with pytest.raises(TypeError, match=r"pass policy=nb.ActivationPolicy.load\('policy.toml'\)"):
        nb.compress_activations(model, "policy.toml")


@pytest.mark.parametrize(
    ("options", "warns"),
    [({"min_numel": 10**6}, True), ({}, False), ({"bits": "off"}, False), ({"modules": {"*": "off"}}, True)],
    ids=str,
)
def test_a_pass_in_which_nothing_was_compressed_warns(options, warns, caplog):
    model = linears(16, 32, 8)
    with caplog.at_level(logging.WARNING), compress(model, **options):
        model(torch.randn(20, 16))
    assert any("nothing was compressed" in record.message for record in caplog.records) == warns
    caplog.clear()
    with caplog.at_level(logging.WARNING), compress(model, **options):
        model(torch.randn(20, 16))
    assert not caplog.records  # it was said, of this model
    model = linears(16, 32, 8)
    with caplog.at_level(logging.WARNING), compress(model, **options), torch.no_grad():
        model(torch.randn(20, 16))
    assert not caplog.records  # nothing was saved
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError), compress(model, min_numel=10**6):
        model(model(torch.randn(20, 16)))
    assert not caplog.records


@pytest.mark.parametrize("compiled", [False, True])
def test_a_pass_inside_of_other_hooks_warns(compiled, caplog):
    """PyTorch calls the innermost hooks alone."""
    model, x = linears(16, 32, 8), torch.randn(20, 16)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    with caplog.at_level(logging.WARNING), compress(run), torch.autograd.graph.save_on_cpu(), torch.no_grad():
        run(x)
    assert not caplog.records
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)
    with caplog.at_level(logging.WARNING), compress(run), hooks:
        run(x).sum().backward()
    assert "ran inside other hooks on saved tensors" in caplog.text


def test_hooks_of_a_checkpoint_are_no_others(caplog):
    model, x = linears(16, 32, 8), torch.randn(20, 16)
    with caplog.at_level(logging.WARNING), compress(model):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert "or if torch.utils.checkpoint computes it again" in caplog.text


def test_a_pass_that_does_not_call_the_model_says_so(caplog):
    with caplog.at_level(logging.WARNING), compress(linears(16, 32, 8)):
        linears(16, 32, 8)(torch.randn(20, 16))
    assert "compress_activations (Sequential) was not called inside the context" in caplog.text


def test_modules_are_named_and_policies_go_by_these_names():
    torch.manual_seed(0)
    model = ViT(fused=False)
    with compress(model, modules={"blocks.0.*": "off", "blocks.*.attn:softmax": 2}) as saved:
        model(torch.randn(4, 3, 16, 16))
    names = {name for name, _ in model.named_modules()} | {"(outside)"}
    assert set(saved.by_module) <= names
    for name, entry in saved.by_module.items():
        if name.startswith("blocks.0.") and name != "blocks.0.attn":
            assert entry.kept_bytes == entry.raw_bytes
        elif name in ("blocks.1.norm1", "blocks.1.mlp.1", "norm"):
            assert entry.kept_bytes < entry.raw_bytes / 2
    softmax = saved.by_operator["softmax"]
    assert softmax.kept_bytes * 16 == softmax.raw_bytes == 2 * 4 * 4 * 16 * 16 * 4


def test_no_garbage_is_looked_for_while_passes_last():
    """All that a pass makes lives until backward, and would be looked through again and again."""
    one, other = (compress(linears(16, 16)) for _ in range(2))
    assert gc.isenabled()
    with one:
        assert not gc.isenabled()
        thread = threading.Thread(target=lambda: other.__enter__() and other.__exit__(None, None, None))
        thread.start()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), one:
        1 / 0  # noqa: B018
    assert gc.isenabled()
    gc.disable()
    try:
        with one:
            pass
        assert not gc.isenabled()  # whoever stopped it
    finally:
        gc.enable()


def test_a_forked_process_looks_for_garbage():
    """As a worker of a data loader whose batches are drawn inside of the context."""
    read, write = os.pipe()
    with compress(linears(16, 16)), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that a fork leaves behind
        child = os.fork()
        if not child:
            os.write(write, bytes([gc.isenabled()]))
            os._exit(0)
        assert not gc.isenabled()
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"\x01"
    os.close(read)
    os.close(write)


def test_what_a_pass_makes_is_not_counted_towards_the_next_search_for_garbage():
    """What others make in between is, from step to step."""
    model, usual, searches, others = linears(*[16] * 200), gc.get_threshold(), [], []
    saving = compress(model)

    def steps(made):
        for _ in range(10):
            with saving:
                loss = model(torch.randn(16, 16)).square().mean()
            loss.backward()
            others.append([[] for _ in range(made)])
        return gc.get_threshold()[0]

    gc.callbacks.append(note := lambda phase, _: searches.append(phase))
    try:
        for wanted in (300, 400):
            gc.set_threshold(wanted, *usual[1:])
            gc.collect()
            for _ in range(2):  # what lasts is made here, and memory that Python keeps for new objects: 2,000 tuples
                steps(made=0)
            searches.clear()
            raised = steps(made=0)
            assert 2000 < raised - wanted < 8000
            assert not searches
            assert steps(made=1000) < raised + 500
            assert searches
        gc.set_threshold(0)
        assert steps(made=0) == 0
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*usual)


def test_what_was_saved_is_added_up_over_runs():
    model = linears(16, 32, 8)
    handle = compress(model)
    assert handle.stats().total.steps == 0
    runs = []
    for _ in range(2):
        with handle as saved:
            model(torch.randn(20, 16)).exp().sum().backward()
        runs.append(saved)
    with pytest.raises(RuntimeError), handle:  # nothing of it lives
        model(torch.randn(3, 5))
    stats = handle.stats()
    assert (stats.total.steps, stats.last.steps) == (2, 1)
    assert stats.total.raw_bytes == sum(saved.raw_bytes for saved in runs)
    assert stats.total.sent_bytes == sum(saved.kept_bytes for saved in runs) < stats.total.raw_bytes
    assert (stats.last.raw_bytes, stats.last.sent_bytes) == (saved.raw_bytes, saved.kept_bytes)


def test_what_was_kept_can_be_printed():
    model = linears(64, 256, 64)
    handle = compress(model)
    assert repr(handle) == "ActivationCompression(Sequential, bits=8)"
    assert str(Saved()) == "kept 0 B of 0 B"
    with handle as saved:
        model(torch.randn(64, 64)).exp().sum().backward()
    said = str(saved)
    assert said.startswith(f"kept {format_bytes(saved.kept_bytes)} of {format_bytes(saved.raw_bytes)} (")
    for operator, own in saved.by_operator.items():
        assert f"{operator} {format_bytes(own.kept_bytes)} of {format_bytes(own.raw_bytes)}" in said
    assert repr(handle).endswith(f", kept {format_bytes(saved.kept_bytes)} of {format_bytes(saved.raw_bytes)})")
    saved.add("gelu", "0", 10, 10, outliers=2)
    assert str(saved).endswith("; 2 tensors kept exactly because of outliers")
    torn = object.__new__(type(handle))  # as pickle makes one, before it has its attributes
    assert repr(torn) == "ActivationCompression(…)"


def test_each_context_of_a_model_has_its_own_decay():
    def learned(another):
        model, x = linears(32, 128, 32).append(nn.Tanh()), torch.randn(64, 32)
        context = compress(model, decay=0.9)
        with context:
            model(x)
        if another:
            compress(model, decay=0.0)  # is made, and never entered
        with context:
            model(x / 8)
        return context.state_dict()["estimates"]

    torch.manual_seed(0)
    alone = learned(another=False)
    torch.manual_seed(0)
    beside = learned(another=True)
    assert alone
    assert all(torch.equal(beside[name], alone[name]) for name in alone)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # which is deprecated, and still used
def test_a_scripted_model_is_refused_and_a_scripted_module_inside_is_kept_as_it_is():
    scripted = torch.jit.trace(linears(32, 64), torch.randn(8, 32))
    with pytest.raises(nb.UnsupportedError, match="is scripted or traced"):
        nb.compress_activations(scripted)
    model, x = nn.Sequential(scripted, nn.Tanh()), torch.randn(64, 32)
    exact = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    with compress(model, operators={"other": "off"}):
        y = model(x)
    ours = torch.autograd.grad(y.sum(), [*model.parameters()])
    assert all(map(same, ours, exact))


def test_a_model_without_memory_runs_as_it_does_without_the_context():
    model = linears(32, 128, 32).to("meta")
    with compress(model) as saved:
        y = model(torch.randn(64, 32, device="meta"))
    y.sum().backward()
    assert saved.kept_bytes == saved.raw_bytes
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


class Doubled(nn.Module):
    """A ReLU whose result is changed after backward's part of it was saved, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.first, self.in_place = nn.Linear(64, 128), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        return y.mul_(-2.0) if self.in_place else y * -2.0


def test_the_result_of_a_relu_may_be_modified_in_place():
    gradients = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model, x = Doubled(in_place=in_place), torch.randn(64, 64)
        with nb.compress_activations(model, bits=8, rounding="nearest"):
            loss = model(x).square().sum()
        loss.backward()
        gradients.append(model.first.weight.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()
