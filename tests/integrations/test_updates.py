"""Updates in place of gradients with each trainer: the same bits as a loop of one's own, also after a resume."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tests.gradients.training import mlp, refusal
from tests.integrations.direct import (
    ACCUMULATE,
    SPEC,
    STEPS,
    UPDATES,
    agree,
    direct_updates,
    launched,
    needs,
    on_two_ranks,
    outcome,
)
from tests.integrations.test_accelerate import Run
from tests.integrations.test_lightning import EPOCH, fit, train_with_fabric
from tests.integrations.test_transformers import OfRank, train, trainer_of
from tests.ranks import run_ranks


def check(answers, until):
    """Of each rank: by hand, by the trainer, and resumed after ``until`` of the batches."""
    for by_hand, whole, resumed in answers:
        assert agree(by_hand, whole) == []
        assert agree(by_hand, resumed, but=("losses", "bytes")) == []
        assert resumed["losses"] == by_hand["losses"][until:]
    (first, *_), (second, *_) = answers
    assert torch.equal(first["parameters"], second["parameters"])  # right after a round
    assert not torch.equal(first["residuals"], second["residuals"])
    assert first["losses"] != second["losses"]


# ---- Accelerate ------------------------------------------------------------------------------------------------------


def with_accelerate(rank, world_size, folder):
    by_hand = direct_updates(rank)
    run = Run(rank, world_size, updates=True)
    run.train(range(STEPS))
    run.accelerator.save_state(folder)
    run.train(range(STEPS, 2 * STEPS))
    run.handle.average()
    whole = outcome(run.model, run.losses, run.handle)
    dist.barrier()
    found = [by_hand, whole]
    for loads in (None, folder):
        again = Run(rank, world_size, updates=True, loads=loads)
        if loads is None:
            again.train(range(3))  # forgotten, with moments and residuals
            again.losses.clear()
            again.accelerator.load_state(folder)
        again.train(range(STEPS, 2 * STEPS))
        again.handle.average()
        found.append(outcome(again.model, again.losses, again.handle))
    return found


@needs("accelerate")
def test_with_accelerate(tmp_path):
    answers = on_two_ranks(with_accelerate, str(tmp_path))
    for by_hand, *_ in answers:
        assert by_hand["steps"] == 4  # after 3, 4, 7 and 8 steps
    check([answer[:3] for answer in answers], ACCUMULATE * STEPS)
    check([[*answer[:2], answer[3]] for answer in answers], ACCUMULATE * STEPS)
    assert len(list(tmp_path.glob("narrowband-rank*-of-2.pt"))) == 2


# ---- Transformers ----------------------------------------------------------------------------------------------------


def with_transformers(rank, world_size, folder):
    by_hand = direct_updates(rank)
    OfRank.batches, more = ACCUMULATE * 2 * STEPS, {"updates": True, "saves": STEPS}
    whole = train(rank, world_size, f"{folder}/whole", steps=2 * STEPS, **more)
    train(rank, world_size, f"{folder}/stopped", steps=STEPS, **more)
    dist.barrier()
    return by_hand, whole, train(rank, world_size, f"{folder}/stopped", steps=2 * STEPS, resume=True, **more)


@needs("transformers", "accelerate")
def test_with_transformers(tmp_path):
    check(on_two_ranks(with_transformers, str(tmp_path)), ACCUMULATE * STEPS)
    assert len(list(tmp_path.glob("stopped/checkpoint-4/narrowband-rank*-of-2.pt"))) == 2


# ---- Lightning -------------------------------------------------------------------------------------------------------


def with_lightning(rank, world_size, folder):
    by_hand = direct_updates(rank, accumulate=1, stops=(EPOCH, 2 * EPOCH))
    more = {"updates": True, "accumulate": 1}
    whole = fit(rank, world_size, f"{folder}/whole", **more)
    return by_hand, whole, fit(rank, world_size, f"{folder}/again", resume=f"{folder}/whole/epoch=0.ckpt", **more)


@needs("lightning")
def test_with_lightning(tmp_path):
    check(on_two_ranks(with_lightning, str(tmp_path)), EPOCH)


def with_fabric(rank, world_size, folder):
    by_hand = direct_updates(rank)
    before = train_with_fabric(rank, world_size, range(STEPS), folder, updates=True)
    dist.barrier()
    after = train_with_fabric(rank, world_size, range(STEPS, 2 * STEPS), folder, resume=True, updates=True)
    return by_hand, before, after


@needs("lightning")
def test_with_fabric(tmp_path):
    for by_hand, before, after in on_two_ranks(with_fabric, str(tmp_path)):
        assert before["losses"] + after["losses"] == by_hand["losses"]
        assert agree(by_hand, after, but=("losses", "bytes")) == []


# ---- what cannot go on -----------------------------------------------------------------------------------------------


def saved(rank, world_size, folder):
    run = Run(rank, world_size, updates=True)
    run.train(range(2))
    run.accelerator.save_state(folder)


def more_ranks(rank, world_size, folder):
    """A run of three ranks that goes on from the checkpoint of two."""
    strict = refusal(lambda: Run(rank, world_size, updates=True, loads=folder))
    run = Run(rank, world_size, updates=True, loads=folder, strict=False)
    moments = torch.cat([each["momentum_buffer"].flatten() for each in run.optimizer.state.values()])
    run.train(range(2, 3))
    run.handle.average()
    return strict, moments, outcome(run.model, [], run.handle)["parameters"]


@needs("accelerate")
def test_more_ranks_go_on_if_asked_to(tmp_path):
    on_two_ranks(saved, str(tmp_path))
    answers = run_ranks(more_ranks, 3, str(tmp_path), timeout_s=240.0)
    for strict, moments, parameters in answers:
        assert strict[0] == "ValueError"
        assert "the compression states of 2 ranks, and here are 3" in strict[1]
        assert torch.equal(moments, answers[0][1])
        assert torch.equal(parameters, answers[0][2])


def refused(rank, world_size, folder):
    from narrowband.integrations import lightning, transformers

    gradients = Run(rank, world_size)
    gradients.train(range(1))
    gradients.accelerator.save_state(f"{folder}/gradients")
    run = Run(rank, world_size, updates=True)
    run.train(range(1))
    apart = refusal(lambda: lightning.Stateful(run.handle).state_dict())
    run.accelerator.save_state(f"{folder}/updates")
    together = refusal(lambda: lightning.Stateful(run.handle).state_dict())
    dist.barrier()
    others = refusal(lambda: Run(rank, world_size, updates=True, loads=f"{folder}/gradients"))
    theirs = refusal(lambda: Run(rank, world_size, loads=f"{folder}/updates"))
    with launched(rank, world_size):
        trainer = trainer_of(rank, f"{folder}/jit", STEPS, enable_jit_checkpoint=True)
        jit = refusal(lambda: transformers.compress_updates(trainer, SPEC, **UPDATES))
    bare = refusal(lambda: transformers.compress_updates(mlp(), SPEC))
    return apart, together, others, theirs, jit, bare


@needs("accelerate", "transformers", "lightning")
def test_what_would_lose_steps_or_moments_is_refused(tmp_path):
    for apart, together, others, theirs, jit, bare in on_two_ranks(refused, str(tmp_path)):
        assert apart[0] == "RuntimeError"
        assert "call average() of the handle on all ranks before you save" in apart[1]
        assert together is None
        assert others[0] == theirs[0] == "ValueError"
        assert "this state is not of compress_updates: it has no optimizers of a replica" in others[1]
        assert jit[0] == "UnsupportedError"
        assert "enable_jit_checkpoint=True cannot be combined with compress_updates" in jit[1]
        assert bare[0] == "TypeError"
        assert "there is nb.compress_updates" in bare[1]


def after_the_end(rank, world_size, folder):
    """Saved and loaded with a handle that was removed: as without it, by a trainer that averages gradients again."""
    run = Run(rank, world_size, updates=True)
    run.train(range(1))
    run.handle.average()
    run.handle.remove()
    run.train(range(1, 3))
    run.accelerator.save_state(folder)
    dist.barrier()
    left = [path.name for path in Path(folder).glob("narrowband*")]
    run.accelerator.load_state(folder)
    return outcome(run.model, [], run.handle)["parameters"], left


@needs("accelerate")
def test_after_remove_the_trainer_averages_gradients_again(tmp_path):
    (first, left), (second, _) = on_two_ranks(after_the_end, str(tmp_path))
    assert torch.equal(first, second)
    assert left == []
