"""Transformers' Trainer: the same bits as a loop of one's own, and its checkpoints hold every rank's residuals."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gradients.training import data, mlp, refusal, sgd
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

pytestmark = needs("transformers", "accelerate")

#: Batches of an epoch.
BATCHES = ACCUMULATE * STEPS


class WithLoss(nn.Module):
    """What a Trainer trains; it keeps the losses of its training."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.losses = []

    def forward(self, x, y):
        loss = (self.net(x) - y).square().mean()
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss}


class OfRank(torch.utils.data.IterableDataset):
    """The batches of a rank, one by one."""

    batches = BATCHES

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        for batch in range(self.batches):
            x, y = data(batch, self.rank)
            yield {"x": x, "y": y}


def trainer_of(rank, folder, steps, dies=False, saves=STEPS // 2, **more):
    """A Trainer that saves and evaluates in the middle."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    class OwnData(Trainer):
        """Every rank reads its own batches; a Trainer would deal out those of one data set."""

        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(OfRank(rank), batch_size=None)

        def get_eval_dataloader(self, eval_dataset=None):
            return self.get_train_dataloader()

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=steps,
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=CLIP,
        save_steps=saves,
        eval_strategy="steps",
        eval_steps=saves,
        label_names=["y"],
        prediction_loss_only=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **more,
    )
    model = WithLoss()
    optimizer = sgd(model, momentum=0.9)
    optimizer = dies_at(optimizer, rank) if dies else optimizer
    rates = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return OwnData(model, arguments, eval_dataset=OfRank(rank), optimizers=(optimizer, rates))


def train(
    rank, world_size, folder, *, steps=STEPS, resume=None, spec=SPEC, callbacks=(), strict=True, dies=False, times=1,
    updates=False, **more,
):  # fmt: skip
    from narrowband.integrations.transformers import compress_gradients, compress_updates

    with launched(rank, world_size):
        trainer = trainer_of(rank, folder, steps, dies, **more)
        by, options = (compress_updates, UPDATES) if updates else (compress_gradients, OPTIONS)
        compression = by(trainer, spec, strict=strict, **options)
        for callback in callbacks:
            trainer.add_callback(callback(trainer))
        for _ in range(times):
            trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer.model.net, trainer.model.losses, compression.handle)


def by_hand_whole_and_resumed(rank, world_size, folder):
    by_hand = direct(rank)
    whole = train(rank, world_size, f"{folder}/whole")
    train(rank, world_size, f"{folder}/stopped", steps=STEPS // 2)
    dist.barrier()
    return by_hand, whole, train(rank, world_size, f"{folder}/stopped", resume=True)


def test_a_trainer_trains_and_resumes_with_the_bits_of_a_loop_of_ones_own(tmp_path):
    answers = on_two_ranks(by_hand_whole_and_resumed, str(tmp_path))
    for by_hand, whole, resumed in answers:
        assert agree(by_hand, whole) == []
        assert whole["steps"] == STEPS
        assert agree(whole, resumed, but=("losses", "bytes")) == []
        assert resumed["losses"] == whole["losses"][BATCHES // 2 :]
    (_, first, _), (_, second, _) = answers
    assert not torch.equal(first["residuals"], second["residuals"])
    assert sorted(path.name for path in tmp_path.glob("stopped/checkpoint-2/narrowband*")) == [
        "narrowband-rank0-of-2.pt",
        "narrowband-rank1-of-2.pt",
    ]


def trained_twice(rank, world_size, folder):
    batches = range(BATCHES // 2)
    return direct(rank, batches=[*batches, *batches]), train(rank, world_size, folder, steps=STEPS // 2, times=2)


def test_a_second_train_goes_on_with_the_residuals_as_with_the_optimizer(tmp_path):
    for by_hand, twice in on_two_ranks(trained_twice, str(tmp_path)):
        assert twice["steps"] == STEPS
        assert agree(by_hand, twice) == []


def with_a_batch_left(rank, world_size, folder):
    """Epochs of a step and one batch more."""
    OfRank.batches = ACCUMULATE + 1
    try:
        return train(rank, world_size, folder, steps=STEPS // 2)
    finally:
        OfRank.batches = BATCHES


def test_batches_that_are_left_of_an_epoch_of_unknown_length_are_averaged_once_more(tmp_path):
    """The Trainer takes them into the first step of the next epoch, and has DDP average after the last one, too."""
    first, second = on_two_ranks(with_a_batch_left, str(tmp_path))
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["steps"] == second["steps"] == STEPS // 2 + 1
    assert len(first["losses"]) == (STEPS // 2) * ACCUMULATE + 1


def killed(rank, world_size, folder):
    train(rank, world_size, folder, dies=True)


def resumed(rank, world_size, folder):
    return direct(rank), train(rank, world_size, folder, resume=True)


@pytest.mark.thorough
def test_a_run_whose_rank_was_killed_resumes_to_the_bit(tmp_path):
    check_killed_and_resumed(killed, resumed, tmp_path)


def terminated(event, step):
    """A callback that gets SIGTERM at an event, and waits until the Trainer knows."""
    from transformers import TrainerCallback
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    class Terminated(TrainerCallback):
        def __init__(self, trainer):
            (saves,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback))
            saves.jit_manager.kill_wait = 0

    def on_event(self, args, state, control, **kwargs):
        if state.global_step == step:
            signal.raise_signal(signal.SIGTERM)
            for thread in threading.enumerate():
                if isinstance(thread, threading.Timer):
                    thread.join()

    setattr(Terminated, event, on_event)
    return Terminated


def terminated_and_resumed(rank, world_size, folder, events):
    event, step = events[rank]
    stops = {"callbacks": [terminated(event, step)], "enable_jit_checkpoint": True, "save_strategy": "no"}
    stopped = train(rank, world_size, folder, steps=2 * STEPS, **stops)
    dist.barrier()
    saved = sorted(str(path.relative_to(folder)) for path in Path(folder).glob("checkpoint-*/narrowband*"))
    steps = torch.load(f"{folder}/{saved[rank]}")["step"]
    whole = stopped["steps"] == STEPS
    return (
        stopped["steps"],
        saved,
        steps,
        direct(rank),
        stopped if whole else train(rank, world_size, folder, resume=True),
    )


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ((("on_step_begin", 2), ("on_optimizer_step", 2)), 3),  # in the middle of a step, and when it ends
        ((("on_step_begin", 2), ("on_step_end", 2)), 3),  # in the middle of it, and when it begins
        ((("on_step_end", STEPS), ("on_step_end", STEPS)), STEPS),  # when an epoch ends
    ],
)
def test_what_is_saved_on_sigterm_resumes_to_the_bit_wherever_in_a_step_each_rank_learns_of_it(events, step, tmp_path):
    for stopped, saved, steps, by_hand, after in on_two_ranks(terminated_and_resumed, str(tmp_path), events):
        assert stopped == steps == step
        assert saved == [f"checkpoint-{step}/narrowband-rank{rank}-of-2.pt" for rank in range(2)]
        assert agree(by_hand, after, but=("losses", "bytes")) == []
        assert after["losses"] == by_hand["losses"][-len(after["losses"]) :]


def without_a_known_way(rank, world_size, folder):
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    from narrowband.integrations.transformers import compress_gradients

    with launched(rank, world_size):
        trainer = trainer_of(rank, folder, STEPS, enable_jit_checkpoint=True)
        trainer.pop_callback(JITCheckpointCallback)
        return refusal(lambda: compress_gradients(trainer, SPEC))


def test_a_trainer_that_saves_on_sigterm_in_a_way_that_is_not_known_is_refused(tmp_path):
    for kind, text in on_two_ranks(without_a_known_way, str(tmp_path)):
        assert kind == "UnsupportedError"
        assert "so residuals would be lost: set it to False" in text


def removed(rank, world_size, folder):
    from transformers import TrainerCallback

    from narrowband.integrations.transformers import CompressGradients

    class Removes(TrainerCallback):
        def __init__(self, trainer):
            self.callbacks = trainer.callback_handler.callbacks

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                next(each for each in self.callbacks if isinstance(each, CompressGradients)).handle.remove()

    ended = train(rank, world_size, folder, steps=STEPS // 2, callbacks=[Removes])
    dist.barrier()
    saved = sorted(path.name for path in Path(folder, "checkpoint-2").iterdir())
    strict = refusal(lambda: train(rank, world_size, folder, resume=True))
    lenient = train(rank, world_size, folder, resume=True, strict=False)
    return ended["steps"], saved, strict, lenient["steps"]


def test_after_the_end_of_compression_checkpoints_are_saved_as_without_it(tmp_path):
    for steps, saved, strict, lenient in on_two_ranks(removed, str(tmp_path)):
        assert (steps, lenient) == (1, STEPS // 2)
        assert "optimizer.pt" in saved
        assert not [name for name in saved if name.startswith("narrowband")]
        assert strict[0] == "ValueError"
        assert "has no state of compression; strict=False begins with empty residuals" in strict[1]


def refused(rank, world_size, folder):
    from transformers import TrainerCallback

    from narrowband.integrations.transformers import CompressGradients, compress_gradients

    class Adds(TrainerCallback):
        def __init__(self, trainer):
            self.trainer = trainer

        def on_epoch_begin(self, args, state, control, **kwargs):
            compress_gradients(self.trainer, SPEC)

    class AddsCallback(Adds):
        def on_epoch_begin(self, args, state, control, **kwargs):
            self.trainer.add_callback(CompressGradients(self.trainer, SPEC, True, {}))

    late = refusal(lambda: train(rank, world_size, folder, callbacks=[Adds]))
    later = refusal(lambda: train(rank, world_size, folder, callbacks=[AddsCallback]))
    sums = refusal(lambda: train(rank, world_size, folder, spec="dgc:density=0.05,momentum=0"))
    twice = refusal(lambda: train(rank, world_size, folder, spec="dgc:density=0.05"))
    with launched(rank, world_size):
        trainer = trainer_of(rank, folder, STEPS)
        early = refusal(lambda: compress_gradients(trainer, SPEC).handle)
        trainer.evaluate()
        alone = refusal(trainer.train)
    train(rank, world_size, folder, steps=STEPS // 2)
    dist.barrier()
    for path in Path(folder).glob("checkpoint-2/narrowband*"):
        path.unlink(missing_ok=True)
    dist.barrier()
    without = refusal(lambda: train(rank, world_size, folder, resume=f"{folder}/checkpoint-2"))
    lenient = train(rank, world_size, folder, resume=f"{folder}/checkpoint-2", strict=False)
    return late, later, sums, twice, early, alone, without, lenient["steps"]


def test_what_would_train_uncompressed_or_forget_residuals_is_refused(tmp_path):
    for late, later, sums, twice, early, alone, without, steps in on_two_ranks(refused, str(tmp_path)):
        assert [each[0] for each in (late, later, sums, twice, early, alone, without)] == [
            "RuntimeError",
            "RuntimeError",
            "UnsupportedError",
            "ValueError",
            "RuntimeError",
            "UnsupportedError",
            "ValueError",
        ]
        assert "has begun to train: call compress_gradients before trainer.train()" in late[1]
        assert "added when training had begun: use compress_gradients(trainer, …)" in later[1]
        assert "max_grad_norm=0.05 would clip the averages, which with dgc are sums of many gradients" in sums[1]
        assert "momentum" in twice[1]
        assert "no handle before trainer.train()" in early[1]
        assert "has a WithLoss without one" in alone[1]
        assert "Call evaluate() and predict() after train(), or pass eval_on_start=True" in alone[1]
        assert "checkpoint-2 has no state of compression; strict=False begins with empty residuals" in without[1]
        assert steps == STEPS // 2


def test_a_model_in_the_place_of_the_trainer_is_refused():
    from narrowband.integrations.transformers import compress_gradients

    with pytest.raises(TypeError, match="takes the Trainer here, not Linear; for a model in DistributedDataParallel"):
        compress_gradients(torch.nn.Linear(2, 2), SPEC)


def test_the_example_learns_and_sends_less(tmp_path):
    words = ("train_transformers.py", "--steps", "20", "--folder", str(tmp_path))
    losses, ratio = learned(on_two_ranks(example, *words)[0])
    assert losses[0] < 5.0  # the mean of the first 20 steps; guessing bytes evenly would be ln 256 = 5.5
    assert ratio >= 40
