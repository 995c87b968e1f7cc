"""Accelerate: the same bits as a loop of one's own, and its ``save_state`` folders hold every rank's residuals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gradients.training import flat, heard, loss_of, mlp, refusal, sgd
from tests.integrations.direct import (
    ACCUMULATE,
    CLIP,
    OPTIONS,
    SPEC,
    STEPS,
    UPDATES,
    agree,
    check_killed_and_resumed,
    dies_at,
    direct,
    example,
    launched,
    learned,
    needs,
    on_two_ranks,
    outcome,
)

pytestmark = needs("accelerate")


class Run:
    """A model, prepared and compressed, of this rank."""

    def __init__(self, rank, world_size, spec=SPEC, *, loads=None, dies=False, updates=False, **options):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        from narrowband.integrations.accelerate import compress_gradients, compress_updates

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.rank = rank
        with launched(rank, world_size):
            self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        model = mlp()
        optimizer = sgd(model, momentum=0.9)
        optimizer = dies_at(optimizer, rank) if dies else optimizer
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.losses = []
        if loads is not None:
            self.accelerator.load_state(loads)
        if updates:
            options = UPDATES | options
            self.handle = compress_updates(self.accelerator, self.model, self.optimizer, spec, **options)
        else:
            self.handle = compress_gradients(self.accelerator, self.model, spec, **(OPTIONS | options))

    def train(self, steps):
        for batch in range(ACCUMULATE * steps.start, ACCUMULATE * steps.stop):
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch, self.rank)
                self.accelerator.backward(loss)
                self.losses.append(loss.item())
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return outcome(self.model, self.losses, self.handle)


def by_hand_whole_and_resumed(rank, world_size, folder):
    by_hand = direct(rank)
    whole = Run(rank, world_size).train(range(STEPS))

    stopped = Run(rank, world_size)
    stopped.train(range(STEPS // 2))
    stopped.accelerator.save_state(folder)
    del stopped
    dist.barrier()
    resumed = Run(rank, world_size)
    resumed.accelerator.load_state(folder)
    later = Run(rank, world_size, loads=folder)
    steps = range(STEPS // 2, STEPS)
    return by_hand, whole, resumed.train(steps), later.train(steps)


def test_a_prepared_model_trains_and_resumes_with_the_bits_of_a_loop_of_ones_own(tmp_path):
    answers = on_two_ranks(by_hand_whole_and_resumed, str(tmp_path))
    for by_hand, whole, *resumed in answers:
        assert agree(by_hand, whole) == []
        assert whole["steps"] == STEPS
        for each in resumed:  # compressed before load_state, and after it
            assert agree(whole, each, but=("losses", "bytes")) == []
            assert each["losses"] == whole["losses"][ACCUMULATE * STEPS // 2 :]
    (_, first, *_), (_, second, *_) = answers
    assert not torch.equal(first["residuals"], second["residuals"])
    assert sorted(path.name for path in tmp_path.glob("narrowband*")) == [
        "narrowband-rank0-of-2.pt",
        "narrowband-rank1-of-2.pt",
    ]


def killed(rank, world_size, folder):
    run = Run(rank, world_size, dies=True)
    run.train(range(STEPS // 2))
    run.accelerator.save_state(folder)
    run.train(range(STEPS // 2, STEPS))


def resumed(rank, world_size, folder):
    run = Run(rank, world_size)
    run.accelerator.load_state(folder)
    return direct(rank), run.train(range(STEPS // 2, STEPS))


@pytest.mark.thorough
def test_a_run_whose_rank_was_killed_resumes_to_the_bit(tmp_path):
    check_killed_and_resumed(killed, resumed, tmp_path)


def refused(rank, world_size, folder):
    from narrowband.integrations.accelerate import compress_gradients

    run = Run(rank, world_size)
    run.train(range(1))
    late = refusal(lambda: compress_gradients(run.accelerator, run.model, SPEC))
    bare = refusal(lambda: compress_gradients(run.accelerator, mlp(), SPEC))
    run.accelerator.save_state(folder)
    run.handle.remove()
    dist.barrier()
    for path in Path(folder).glob("narrowband*"):
        path.unlink(missing_ok=True)
    dist.barrier()
    strict = Run(rank, world_size)
    without = refusal(lambda: strict.accelerator.load_state(folder))
    before = refusal(lambda: Run(rank, world_size, loads=folder))
    begun = Run(rank, world_size, strict=False, loads=folder)
    begun.train(range(1))
    begun.handle.remove()
    begun = refusal(lambda: compress_gradients(begun.accelerator, begun.model, SPEC))
    lenient = Run(rank, world_size, strict=False)
    lenient.accelerator.load_state(folder)
    return late, bare, [without, before], begun, lenient.accelerator.step, lenient.handle.step


def test_what_would_train_uncompressed_or_forget_residuals_is_refused(tmp_path):
    for late, bare, withouts, begun, step, compressed in on_two_ranks(refused, str(tmp_path)):
        assert late[0] == "RuntimeError"
        assert "has counted 2 batches: call compress_gradients before training begins" in late[1]
        assert begun == ("RuntimeError", late[1].replace("2 batches", "4 batches"))
        assert bare[0] == "UnsupportedError"
        assert "has a Sequential without one; call accelerator.prepare(model) first" in bare[1]
        for without in withouts:  # whichever of the two comes first
            assert without[0] == "ValueError"
            assert "has no state of compression; strict=False begins with empty residuals" in without[1]
        assert (step, compressed) == (ACCUMULATE, 0)


def removed(rank, world_size, folder):
    from narrowband.integrations.accelerate import compress_gradients

    run = Run(rank, world_size)
    run.train(range(1))
    run.accelerator.save_state(folder)
    run.handle.remove()
    ended = run.train(range(1, 2))
    run.accelerator.save_state(folder)  # the same one
    dist.barrier()
    left = sorted(path.name for path in Path(folder).glob("narrowband*"))
    run.accelerator.load_state(folder)
    strict = refusal(lambda: Run(rank, world_size, loads=folder))
    Run(rank, world_size, strict=False, loads=folder)

    again = Run(rank, world_size)
    again.handle.remove()
    handle = compress_gradients(again.accelerator, again.model, SPEC, **OPTIONS)
    loss_of(again.model, 0, rank).backward()
    with heard() as messages:
        again.accelerator.save_state(f"{folder}/again")
        handle.pause()
        again.accelerator.load_state(f"{folder}/again")
    return ended["steps"], left, strict, (handle.step, handle.paused, messages)


def test_after_the_end_of_compression_save_state_and_load_state_work_as_without_it(tmp_path):
    for steps, left, strict, again in on_two_ranks(removed, str(tmp_path)):
        assert steps == 1
        assert left == []
        assert strict[0] == "ValueError"
        assert "has no state of compression; strict=False begins with empty residuals" in strict[1]
        assert again == (1, False, [])  # nothing is said of the handle before it


def test_the_example_learns_and_sends_less(tmp_path):
    words = ("train_accelerate.py", "--steps", "20", "--folder", str(tmp_path))
    losses, ratio = learned(on_two_ranks(example, *words)[0])
    assert losses[-1] < 4.5  # guessing bytes evenly would be ln 256 = 5.5
    assert ratio >= 40


def local_steps(rank, world_size, spec):
    """Steps of local SGD, and one behind it."""
    from accelerate.local_sgd import LocalSGD

    run = Run(rank, world_size, spec)
    parted = []
    with LocalSGD(accelerator=run.accelerator, model=run.model, local_sgd_steps=3) as local:
        for step in range(6):
            run.accelerator.backward(loss_of(run.model, step, rank))
            run.optimizer.step()
            run.optimizer.zero_grad()
            local.step()
            parted.append(flat(run.model))
    steps = run.handle.step
    run.train(range(6, 7))
    return parted, steps, run.handle.step


def test_local_sgd_sends_parameters_and_no_gradients_so_nothing_is_compressed():
    (mine, before, after), (its, *_) = on_two_ranks(local_steps, SPEC)
    assert [torch.equal(a, b) for a, b in zip(mine, its, strict=True)] == [False, False, True] * 2
    assert (before, after) == (0, 1)
