"""A gradient that is not finite on one rank: all ranks skip that step, and the residual stays as it was.

No average is finite then, also of other layers: an optimizer of theirs alone would step with what the residual holds.
"""

from __future__ import annotations

import copy
import importlib
import threading

import pytest
import torch
from torch import nn

from narrowband.collectives import Exchange
from tests.gradients.training import HUGE, TINY, compress, flat, loss_of, mlp, residuals, same, sgd, train, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

SPECS = [
    ("topk:density=0.05+ef", "auto"),
    ("threshold:value=0.02+ef", "auto"),
    ("qsgd:bits=4+ef", "scatter_reduce"),
    ("uniform:bits=4+ef", "all_gather"),
    ("sign:bucket=64+ef", "auto"),
    ("randomk:density=0.1+ef", "auto"),
    ("fp16+ef", "auto"),
    ("lowrank:rank=1+ef", "auto"),
    ("topk:density=0.05+ef-mixed", "auto"),
    ("topk:density=0.05+ef21", "auto"),
    ("randomk:density=0.1+ef21", "auto"),
]
BAD_STEP = 2


def break_one(rank, world_size, specs, parameter, cap, make=mlp, place=5):
    """Four steps with a scaler, the third with inf in one element of one rank's gradient."""
    answers = []
    for spec, collective, *small in specs:
        model = wrap(make(), cap=cap)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        options = {"collective": collective, "small": small[0] if small else "uncompressed"}
        handle = compress(model, spec, min_numel=64, grad_scaler=scaler, early=cap == TINY, **options)
        now = [0]

        def spoil(grad, now=now):
            if now[0] == BAD_STEP and rank == world_size - 1:
                grad = grad.clone()
                grad.view(-1)[place] = torch.inf
            return grad

        dict(model.module.named_parameters())[parameter].register_hook(spoil)
        optimizer = sgd(model)
        history = []
        for step in range(4):
            now[0] = step
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, rank)).backward()
            finite = {bool(each) for p in model.parameters() for each in p.grad.isfinite().unique()}
            scaler.step(optimizer)
            scaler.update()
            history.append((finite, flat(model), residuals(handle), scaler.get_scale()))
        answers.append(history)
    return answers


def check_skipped(answers, specs):
    for index, (spec, *options) in enumerate(specs):
        for rank, of_rank in enumerate(answers):
            name = f"{spec} {' '.join(options)}, rank {rank}"
            before, bad, after = of_rank[index][1:4]
            assert [finite for finite, *_ in of_rank[index]] == [{True}, {True}, {False}, {True}], name
            assert torch.equal(bad[1], before[1]), f"{name}: did not skip"
            assert bad[3] == before[3] / 2, f"{name}: the scaler did not see it"
            assert same(bad[2], before[2]), f"{name}: the residual has changed"
            assert not torch.equal(after[1], bad[1]), f"{name}: does not go on"
            assert not same(after[2], bad[2]), f"{name}: does not go on"
            assert all(value.isfinite().all() for value in after[2].values()), name
            assert torch.equal(after[1], answers[0][index][3][1]), f"{name}: other parameters than rank 0"


@pytest.mark.parametrize("cap", [TINY, *thorough(HUGE)])
@pytest.mark.parametrize("parameter", ["3.weight", *thorough("3.bias", "1.weight")])
def test_inf_in_one_gradient_of_one_rank_is_skipped_by_all(parameter, cap):
    check_skipped(run_ranks(break_one, 2, SPECS, parameter, cap), SPECS)


def test_four_ranks():
    specs = [
        SPECS[0],
        SPECS[2],
        SPECS[5],
        (*SPECS[0], "fused"),
        (*SPECS[0], "fp16"),
        (*SPECS[3], "randomk:density=0.5"),
    ]
    check_skipped(run_ranks(break_one, 4, specs, "0.weight", TINY), specs)


class WithFloat64(nn.Sequential):
    """A layer of a dtype that travels dense, in a bucket of its own."""

    def __init__(self):
        torch.manual_seed(6)
        super().__init__(nn.Linear(24, 16), nn.Linear(16, 16, dtype=torch.float64), nn.Linear(16, 8))

    def forward(self, x):
        return self[2](self[1](self[0](x).double()).float())


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(50, 24, sparse=True)
        self.out = nn.Linear(24, 8)

    def forward(self, x):
        return self.out(self.table((x * 10).long().remainder(50)).mean(1))


@pytest.mark.parametrize("world_size", [1, 2])
def test_inf_in_what_no_codec_takes_counts_too(world_size):
    specs = [("topk:density=0.05+ef", "auto"), ("randomk:density=0.1+ef", "auto")]
    check_skipped(run_ranks(break_one, world_size, specs, "1.weight", HUGE, WithFloat64), specs)


def sparse_inf(rank, world_size):
    model = wrap(WithTable())
    handle = compress(model, "topk:density=0.05+ef", min_numel=64)
    history = []
    for step in range(2):
        model.zero_grad()
        # In the second step, one rank's gradient of the table is inf, and that of the matrix stays finite.
        loss = loss_of(model, step, rank)
        if step == 1 and rank == 1:
            model.module.table.weight.register_hook(
                lambda g: torch.sparse_coo_tensor(
                    g._indices(), g._values() * torch.inf, g.shape, check_invariants=False
                )
            )
        loss.backward()
        grad = model.module.table.weight.grad.coalesce().values()
        history.append((bool(grad.isfinite().all()), residuals(handle)))
    return history


def test_inf_in_a_sparse_gradient_counts_too():
    for history in run_ranks(sparse_inf, 2):
        assert [finite for finite, _ in history] == [True, False]
        assert same(history[0][1], history[1][1])


def without_feedback(rank, world_size, specs):
    answers = []
    for spec in specs:
        model = wrap(mlp(), cap=TINY)
        compress(model, spec, min_numel=64)
        loss_of(model, 0, rank).backward()  # from the second step on, every parameter has a bucket of its own
        if rank == 1:
            model.module[3].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([4]), torch.nan))
        model.zero_grad()
        loss_of(model, 0, rank).backward()
        answers.append({name: bool(p.grad.isfinite().all()) for name, p in model.module.named_parameters()})
    return answers


def first_step_is_bad(rank, world_size):
    model = wrap(mlp())
    handle = compress(model, "qsgd:bits=4", min_numel=64)
    errors = []
    for step in range(2):
        model.zero_grad()
        (loss_of(model, step, rank) * (torch.inf if step == 0 else 1.0)).backward()
        errors.append(handle.stats().total.relative_error)
    return errors


def test_without_feedback_the_other_ranks_see_it_in_the_same_step():
    specs = ["topk:density=0.01", "randomk:density=0.01", "qsgd:bits=4", "fp16", "bf16", "none"]
    for answers in run_ranks(without_feedback, 2, specs):
        for spec, finite in zip(specs, answers, strict=True):
            assert not finite["3.weight"], spec
            assert finite["0.weight"], spec
            assert finite["3.bias"], spec


def test_the_relative_error_is_that_of_a_good_step():
    for first, second in run_ranks(first_step_is_bad, 2):
        assert first is None
        assert 0.0 < second < 1.0


# ---- mixed precision -------------------------------------------------------------------------------------------------


def with_scaler(rank, world_size, spec, tell, growth_interval):
    """Loss scales are powers of two, so scaling, sending and unscaling changes no bit if units are kept apart."""
    model = wrap(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=growth_interval)
    handle = compress(model, spec, min_numel=64, grad_scaler=scaler if tell else None)
    optimizer = sgd(model)
    for step in range(7):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        scaler.step(optimizer)
        scaler.update()
    return (
        flat(model),
        scaler.get_scale(),
        {name: e / handle.state_dict()["loss_scale"] for name, e in residuals(handle).items()} if tell else {},
    )


def without_scaler(rank, world_size, spec):
    model = wrap(mlp())
    handle = compress(model, spec, min_numel=64)
    optimizer = sgd(model)
    for step in range(7):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return flat(model), residuals(handle)


@pytest.mark.parametrize("spec", ["topk:density=0.1+ef", "qsgd:bits=4+ef", "topk:density=0.1+ef21"])
def test_the_residual_follows_the_loss_scale(spec):
    parameters, residual = run_ranks(without_scaler, 2, spec)[0]
    scaled, scale, unscaled_residual = run_ranks(with_scaler, 2, spec, True, 2)[0]
    assert scale == 64.0 * 2**3
    assert torch.equal(scaled, parameters)
    assert same(unscaled_residual, residual)
    # The test sees the difference: without telling the handle, old residuals are in the old unit.
    assert not torch.equal(run_ranks(with_scaler, 2, spec, False, 2)[0][0], parameters)


class Held:
    """A collective that ends when ``release`` is called, with what became of it or with an error."""

    def __init__(self, work):
        self.work = work
        self.future = torch.futures.Future()

    def release(self, error=None):
        self.work.wait()
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def wait(self):
        self.future.wait()

    def get_future(self):
        return self.future


def too_large_for_the_scale(rank, world_size, spec, options):
    """Steps of a scaler that doubles its scale after the second. One rank's residuals are then too large for that."""
    model = wrap(mlp(), cap=TINY)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    handle = compress(model, spec, min_numel=64, grad_scaler=scaler, **options)
    optimizer, steps, of_layer = sgd(model), [], []
    for step in range(4):
        if step == 2:
            state = handle.state_dict()
            of_layer = [key for key, x in state["feedback"].items() if key.endswith("3.weight") and x.numel() == 1280]
            if rank == world_size - 1:
                state["feedback"] = {key: x.clone() for key, x in state["feedback"].items()}
                for key in of_layer:
                    state["feedback"][key].view(-1)[7] = 2e38
            handle.load_state_dict(state)
        before, at = residuals(handle), flat(model)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        finite = {bool(each) for p in model.parameters() for each in p.grad.isfinite().unique()}
        scaler.step(optimizer)
        scaler.update()
        after = residuals(handle)
        same = [torch.equal(after[key], before[key]) for key in of_layer]
        steps.append((finite, scaler.get_scale(), torch.equal(at, flat(model)), same))
        if step == 2:
            skipped = handle.stats().total.skipped
            handle.load_state_dict(copy.deepcopy(handle.state_dict()))
    return steps, all(x.isfinite().all() for x in after.values()), skipped


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("topk:density=0.05+ef", {}),
        ("qsgd:bits=4+ef", {"collective": "scatter_reduce"}),
        ("topk:density=0.05+ef:store=bf16", {}),
        ("dgc:density=0.05", {"small": "fused"}),
    ],
)
def test_a_residual_too_large_for_a_new_loss_scale_is_a_gradient_that_overflows(spec, options):
    """The step counts on no rank, the scaler takes the scale back, and nothing of the residual is lost. All residuals
    stay in one unit, so that a state that is saved then can be loaded.
    """
    for steps, finite, skipped in run_ranks(too_large_for_the_scale, 2, spec, options):
        assert [each for each, *_ in steps] == [{True}, {True}, {False}, {True}]
        assert [scale for _, scale, *_ in steps] == [256.0, 512.0, 256.0, 256.0]
        _, _, stands, as_before = steps[2]
        assert stands
        assert as_before
        assert all(as_before)
        assert finite
        assert skipped == 1


def hold_the_last_payload(rank, world_size, breaks):
    """A step whose last all-gather stays on the wire until everything else of it is written (or for ten seconds)."""
    module = importlib.import_module("narrowband.collectives.all_gather")
    model = wrap(mlp(), cap=TINY)
    handle = compress(model, "topk:density=0.05+ef", min_numel=64)
    train(model, rank, range(2))  # DDP has its buckets now
    gather, deliver, held, events = module.all_gather_in_pairs, Exchange.deliver, [], []  # as two ranks do it
    payloads = sum(p.dim() > 1 for p in model.parameters())

    def holding(out, x, peers):
        work = gather(out, x, peers)
        held.append(Held(work))
        if len(held) < payloads:
            held[-1].release()
        return held[-1]

    def recording(self, good):
        deliver(self, good)
        events.append("written")
        if len(events) == payloads - 1:
            events.append("released")
            held[-1].release(RuntimeError("the wire broke") if breaks else None)

    module.all_gather_in_pairs, Exchange.deliver = holding, recording
    spare = threading.Timer(10, lambda: held[-1].future.done() or held[-1].release())
    spare.start()
    try:
        train(model, rank, range(2, 3))
        failure = None
    except RuntimeError as error:
        failure = str(error)
    finally:
        module.all_gather_in_pairs, Exchange.deliver = gather, deliver
        spare.cancel()
    try:
        handle.state_dict()
        state = "given"
    except RuntimeError as error:
        state = str(error)
    return payloads, events, failure, state


def test_averages_are_written_while_the_last_payload_is_on_the_wire():
    for payloads, events, failure, state in run_ranks(hold_the_last_payload, 2, False):
        assert payloads > 2
        assert events == ["written"] * (payloads - 1) + ["released", "written"]
        assert (failure, state) == (None, "given")


def test_no_state_is_given_when_the_wire_breaks_in_the_middle_of_writing():
    for payloads, events, failure, state in run_ranks(hold_the_last_payload, 2, True):
        assert events == ["written"] * (payloads - 1) + ["released"]
        assert "the wire broke" in failure
        assert "restart all ranks from the last checkpoint" in state
