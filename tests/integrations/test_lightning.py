"""Lightning: the same bits as a loop of one's own, on a CPU too, and one checkpoint with every rank's residuals."""

from __future__ import annotations

import contextlib
import importlib
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gradients.training import heard, loss_of, mlp, refusal, sgd
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
    growing_scaler,
    launched,
    learned,
    needs,
    on_two_ranks,
    outcome,
)
from tests.thorough import thorough

pytestmark = needs("lightning")

#: Batches of an epoch. A checkpoint is written after each.
EPOCH = ACCUMULATE * STEPS // 2


def fit(
    rank,
    world_size,
    folder,
    *,
    resume=None,
    spec=SPEC,
    package="lightning.pytorch",
    callbacks=(),
    strict=True,
    dies=False,
    loader=torch.utils.data.DataLoader,
    updates=False,
    **options,
):
    """Fit with Lightning's Trainer, with a checkpoint and a validation after each epoch."""
    pl = importlib.import_module(package)
    from narrowband.integrations.lightning import CompressGradients, CompressUpdates

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.losses = []

        def training_step(self, batch, index):
            loss = loss_of(self.net, self.current_epoch * EPOCH + int(batch), rank)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.log("validation", loss_of(self.net, 1000, rank), sync_dist=True)

        def train_dataloader(self):
            return loader(torch.arange(EPOCH))

        def val_dataloader(self):
            return torch.utils.data.DataLoader(torch.arange(EPOCH))

        def configure_optimizers(self):
            optimizer = sgd(self.net, momentum=0.9)
            return dies_at(optimizer, rank) if dies else optimizer

    by, of = (CompressUpdates, UPDATES) if updates else (CompressGradients, OPTIONS)
    compression = by(spec, strict=strict, **of)
    options = {"strategy": "ddp", "devices": world_size, **options}
    with launched(rank, world_size):
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=options.pop("max_epochs", 2),
            accumulate_grad_batches=options.pop("accumulate", ACCUMULATE),
            gradient_clip_val=options.pop("clip", CLIP),
            callbacks=[
                compression,
                pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1),
                *callbacks,
            ],
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        module = Module()
        trainer.fit(module, ckpt_path=resume)
    return outcome(module.net, module.losses, compression.handle)


def by_hand_whole_and_resumed(rank, world_size, folder, package):
    by_hand = direct(rank)
    whole = fit(rank, world_size, f"{folder}/whole", package=package)
    resumed = fit(rank, world_size, f"{folder}/resumed", resume=f"{folder}/whole/epoch=0.ckpt", package=package)
    return by_hand, whole, resumed


@pytest.mark.parametrize("package", ["lightning.pytorch", *thorough("pytorch_lightning")])
def test_what_the_trainer_fits_and_resumes_has_the_bits_of_a_loop_of_ones_own(package, tmp_path):
    answers = on_two_ranks(by_hand_whole_and_resumed, str(tmp_path), package)
    for by_hand, whole, resumed in answers:
        assert agree(by_hand, whole) == []
        assert whole["steps"] == STEPS
        assert agree(whole, resumed, but=("losses", "bytes")) == []
        assert resumed["losses"] == whole["losses"][EPOCH:]
    (_, first, _), (_, second, _) = answers
    assert not torch.equal(first["residuals"], second["residuals"])


class RemembersItsPlace(torch.utils.data.DataLoader):
    """Begins where a checkpoint was saved, as torchdata's StatefulDataLoader does."""

    begin = given = 0

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for self.given, batch in enumerate(super().__iter__(), 1):
            if self.given > begin:
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.begin = state["given"]


def resumed_within_an_epoch(rank, world_size, folder):
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = []
    for loader in (torch.utils.data.DataLoader, RemembersItsPlace):
        own = f"{folder}/{loader.__name__}"
        each_step = ModelCheckpoint(own, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        fit(rank, world_size, own, callbacks=[each_step], loader=loader)
        dist.barrier()
        found.append(fit(rank, world_size, f"{own}/resumed", resume=f"{own}/step=1.ckpt", loader=loader))
    repeated = [*range(ACCUMULATE), *range(ACCUMULATE), *range(EPOCH, 2 * EPOCH)]
    return [(direct(rank, batches=repeated), found[0]), (direct(rank), found[1])]


def test_a_run_that_resumes_within_an_epoch_has_the_bits_of_a_loop_over_the_batches_that_the_loader_gives(tmp_path):
    """Lightning begins the epoch's loader again, and ends the epoch after as many batches as were left, unless the
    loader remembers its place.
    """
    for pairs in on_two_ranks(resumed_within_an_epoch, str(tmp_path)):
        for by_hand, resumed in pairs:
            assert agree(by_hand, resumed, but=("losses", "bytes")) == []
            assert resumed["losses"] == by_hand["losses"][ACCUMULATE:]
        assert pairs[0][0]["losses"] != pairs[1][0]["losses"]


def by_hand_and_in_other_ways(rank, world_size, folder):
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy

    by_hand, halves_by_hand = direct(rank), direct(rank, fp16=True)
    every_batch = direct(rank, accumulate=1)  # DDP cannot begin a static graph in no_sync
    static = fit(rank, world_size, folder, strategy=DDPStrategy(static_graph=True), accumulate=1)
    unused = fit(rank, world_size, folder, strategy="ddp_find_unused_parameters_true")
    halves = fit(rank, world_size, folder, plugins=[MixedPrecision("16-mixed", "cpu", growing_scaler())])
    return [(every_batch, static), (by_hand, unused), (halves_by_hand, halves)]


def test_static_graphs_unused_parameters_and_a_gradient_scaler_change_no_bit(tmp_path):
    for pairs in on_two_ranks(by_hand_and_in_other_ways, str(tmp_path)):
        for by_hand, fitted in pairs:
            assert agree(by_hand, fitted) == []
        assert len({tuple(by_hand["losses"]) for by_hand, _ in pairs}) == 3


def killed(rank, world_size, folder):
    fit(rank, world_size, folder, dies=True)


def resumed(rank, world_size, folder):
    return direct(rank), fit(rank, world_size, f"{folder}/resumed", resume=f"{folder}/epoch=0.ckpt")


@pytest.mark.thorough
def test_a_run_whose_rank_was_killed_resumes_to_the_bit(tmp_path):
    check_killed_and_resumed(killed, resumed, tmp_path)


def train_with_fabric(rank, world_size, steps, folder, resume=False, dies=False, updates=False):
    from lightning.fabric import Fabric

    from narrowband.integrations.lightning import Stateful, compress_gradients, compress_updates

    with launched(rank, world_size):
        fabric = Fabric(accelerator="cpu", strategy="ddp", devices=world_size)
        fabric.launch()
        net = mlp()
        optimizer = sgd(net, momentum=0.9)
        model, optimizer = fabric.setup(net, dies_at(optimizer, rank) if dies else optimizer)
        if updates:
            handle = compress_updates(fabric, model, optimizer, SPEC, **UPDATES)
        else:
            handle = compress_gradients(fabric, model, SPEC, **OPTIONS)
        state = {"model": model, "optimizer": optimizer, "compression": Stateful(handle)}
        if resume:
            fabric.load(f"{folder}/state.ckpt", state)
        losses = []
        for batch in range(ACCUMULATE * steps.start, ACCUMULATE * steps.stop):
            last = (batch + 1) % ACCUMULATE == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = loss_of(model, batch, rank)
                fabric.backward(loss / ACCUMULATE)
            losses.append(loss.item())
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
            if updates and last and (batch + 1) % (ACCUMULATE * STEPS) == 0:
                handle.average()
            if batch + 1 == ACCUMULATE * STEPS // (1 if updates else 2):
                fabric.save(f"{folder}/state.ckpt", state)
    return outcome(net, losses, handle)


def by_hand_and_with_fabric(rank, world_size, folder):
    by_hand = direct(rank)
    first = train_with_fabric(rank, world_size, range(STEPS // 2), folder)
    dist.barrier()
    return by_hand, first, train_with_fabric(rank, world_size, range(STEPS // 2, STEPS), folder, resume=True)


def test_fabric_trains_and_resumes_with_the_bits_of_a_loop_of_ones_own(tmp_path):
    for by_hand, first, resumed in on_two_ranks(by_hand_and_with_fabric, str(tmp_path)):
        assert first["losses"] + resumed["losses"] == by_hand["losses"]
        assert first["bytes"] + resumed["bytes"] == by_hand["bytes"]
        assert agree(by_hand, resumed, but=("losses", "bytes")) == []


def killed_with_fabric(rank, world_size, folder):
    train_with_fabric(rank, world_size, range(STEPS), folder, dies=True)


def resumed_with_fabric(rank, world_size, folder):
    return direct(rank), train_with_fabric(rank, world_size, range(STEPS // 2, STEPS), folder, resume=True)


@pytest.mark.thorough
def test_a_run_with_fabric_whose_rank_was_killed_resumes_to_the_bit(tmp_path):
    check_killed_and_resumed(killed_with_fabric, resumed_with_fabric, tmp_path)


def refused(rank, world_size, folder):
    from lightning.pytorch import Callback

    from narrowband.integrations.lightning import CompressGradients

    class AddsOne(Callback):
        def on_train_epoch_start(self, trainer, module):
            trainer.callbacks.append(CompressGradients(SPEC))

    early = refusal(lambda: CompressGradients(SPEC).handle)
    late = refusal(lambda: fit(rank, world_size, folder, callbacks=[AddsOne()]))
    one = refusal(lambda: fit(rank, world_size, folder, strategy="auto", devices=1))
    sums = refusal(lambda: fit(rank, world_size, folder, spec="dgc:density=0.05,momentum=0"))
    twice = refusal(lambda: fit(rank, world_size, folder, spec="dgc:density=0.05"))
    fit(rank, world_size, folder, max_epochs=1)
    dist.barrier()
    checkpoint = torch.load(f"{folder}/epoch=0.ckpt", weights_only=False)
    of_all = [state["rank"] for state in checkpoint.pop("narrowband")]
    other = f"{folder}/without-{rank}.ckpt"
    torch.save(checkpoint, other)
    without = refusal(lambda: fit(rank, world_size, folder, resume=other))
    lenient = fit(rank, world_size, folder, resume=other, strict=False)
    return early, late, one, sums, twice, of_all, without, lenient["steps"]


def test_what_would_train_uncompressed_or_forget_residuals_is_refused(tmp_path):
    for early, late, one, sums, twice, of_all, without, steps in on_two_ranks(refused, str(tmp_path)):
        assert [each[0] for each in (early, late, one, sums, twice, without)] == [
            "RuntimeError",
            "RuntimeError",
            "UnsupportedError",
            "UnsupportedError",
            "ValueError",
            "ValueError",
        ]
        assert "no handle before trainer.fit" in early[1]
        assert "strategies that fork or spawn do so in processes that end with the fit" in early[1]
        assert "added when training had begun: give it to Trainer(callbacks=…)" in late[1]
        assert "has a Module without one; use Trainer(strategy='ddp', devices=…)" in one[1]
        assert "gradient_clip_val=0.05 would clip the averages, which with dgc are sums of many gradients" in sums[1]
        assert "momentum" in twice[1]
        assert of_all == [0, 1]
        assert "ckpt has no state of compression; strict=False begins with empty residuals" in without[1]
        assert steps == STEPS // 2


def with_and_without_trials(rank, world_size, folder):
    from lightning.pytorch.callbacks import LearningRateFinder

    class Later(LearningRateFinder):
        """Searches when an epoch begins, as Lightning's documentation shows."""

        def on_fit_start(self, trainer, module):
            pass

        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                self.lr_find(trainer, module)

    finders = [kind(num_training_steps=STEPS, update_attr=False) for kind in (LearningRateFinder, Later)]
    return [fit(rank, world_size, folder, callbacks=callbacks) for callbacks in ([], finders[:1], finders[1:])]


def test_steps_of_a_trial_leave_nothing_in_the_residuals(tmp_path):
    for without, before, between in on_two_ranks(with_and_without_trials, str(tmp_path)):
        assert agree(without, before, but=("losses",)) == []
        assert agree(without, between, but=("losses", "bytes")) == []


def fitted_again(rank, world_size, folder, updates):
    """Fit, fit again, fit another model, and resume from a checkpoint: what the handles hold, and what is said."""
    from lightning.pytorch import LightningModule, Trainer

    from narrowband.integrations.lightning import CompressGradients, CompressUpdates

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def training_step(self, batch, index):
            return loss_of(self.net, index, rank)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.arange(EPOCH))

        def configure_optimizers(self):
            return sgd(self.net, momentum=0.9)

    compression = CompressUpdates(SPEC, **UPDATES) if updates else CompressGradients(SPEC, **OPTIONS)
    seen = []
    with launched(rank, world_size):
        trainer = Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=world_size,
            max_epochs=1,
            callbacks=[compression],
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        module, saved = Module(), f"{folder}/saved.ckpt"
        for model, resumes in ((module, False), (module, False), (Module(), False), (module, True)):
            with heard() as messages:
                trainer.fit(model, ckpt_path=saved if resumes else None)
            trainer.save_checkpoint(saved)
            trainer.fit_loop.max_epochs += 1
            seen.append((compression.handle.step, [text for text in messages if "begins with empty residuals" in text]))
    return seen


@pytest.mark.parametrize(("updates", "steps"), [(False, EPOCH), (True, 2)])  # two rounds: after three steps and four
def test_a_second_fit_says_that_it_begins_with_empty_residuals(updates, steps, tmp_path):
    first, second = on_two_ranks(fitted_again, str(tmp_path), updates)
    assert [found for found, _ in first] == [steps, steps, steps, 2 * steps]
    assert [len(said) for _, said in first] == [0, 1, 0, 0]
    assert "pass ckpt_path=... to trainer.fit" in first[1][1][0]
    assert [len(said) for _, said in second] == [0, 0, 0, 0]


def broken_in_backward(rank, world_size, folder):
    from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    class Breaks(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                module.net[0].weight.register_hook(self.fail)

        def fail(self, gradient):
            raise ValueError("the first layer's gradient")

    callbacks, buckets = [Breaks(), OnExceptionCheckpoint(folder, "broken")], DDPStrategy(bucket_cap_mb=1e-6)
    with heard() as messages:
        error = refusal(lambda: fit(rank, world_size, folder, callbacks=callbacks, strategy=buckets, accumulate=1))
    saved = torch.load(f"{folder}/broken.ckpt", weights_only=False)
    said = [message for message in messages if "without a state of compression, after an exception" in message]
    return error, saved["global_step"], "narrowband" in saved, len(said)


def test_after_an_exception_in_the_middle_of_a_step_parameters_are_saved_without_residuals(tmp_path):
    for error, step, has_state, said in on_two_ranks(broken_in_backward, str(tmp_path)):
        assert error == ("ValueError", "the first layer's gradient")
        assert (step, has_state, said) == (EPOCH, False, 1)


def interrupted_alone(rank, world_size, folder, kind):
    """Rank 0 ends by an exception that rank 1 has not, until the checkpoint of rank 0 is there."""
    from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    path = Path(folder, "broken.ckpt")
    error = {"KeyboardInterrupt": KeyboardInterrupt, "SIGTERM": SIGTERMException}[kind]

    class Ends(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == 2:
                while rank == 1 and kind != "SIGTERM" and not path.exists():
                    time.sleep(0.01)
                raise error

    with contextlib.suppress(SystemExit):
        fit(rank, world_size, folder, callbacks=[Ends(), OnExceptionCheckpoint(folder, "broken")])
    dist.barrier()
    checkpoint = torch.load(path, weights_only=False)
    return checkpoint["global_step"], [state["step"] for state in checkpoint.get("narrowband", ())]


@pytest.mark.parametrize(("kind", "steps"), [("KeyboardInterrupt", []), ("SIGTERM", [2, 2])])
def test_a_rank_that_is_interrupted_alone_saves_its_checkpoint_without_waiting_for_the_others(kind, steps, tmp_path):
    """SIGTERM is an exception on all ranks."""
    answers = on_two_ranks(interrupted_alone, str(tmp_path), kind)
    assert answers == [(2, steps)] * 2


def removed(rank, world_size, folder):
    from lightning.fabric import Fabric
    from lightning.pytorch import Callback

    from narrowband.integrations.lightning import CompressGradients, Stateful, compress_gradients

    class Removes(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                next(each for each in trainer.callbacks if isinstance(each, CompressGradients)).handle.remove()

    ended = fit(rank, world_size, folder, callbacks=[Removes()])
    dist.barrier()
    last = f"{folder}/epoch=1.ckpt"
    keys = torch.load(last, weights_only=False).keys()
    strict = refusal(lambda: fit(rank, world_size, folder, resume=last, max_epochs=3))
    lenient = fit(rank, world_size, f"{folder}/lenient", resume=last, max_epochs=3, strict=False)

    with launched(rank, world_size):
        fabric = Fabric(accelerator="cpu", strategy="ddp", devices=world_size)
        fabric.launch()
        model, _ = fabric.setup(mlp(), sgd(mlp()))
        handle = compress_gradients(fabric, model, SPEC, **OPTIONS)
        handle.remove()
        state = {"model": model, "compression": Stateful(handle)}
        fabric.save(f"{folder}/state.ckpt", state)
        fabric.load(f"{folder}/state.ckpt", state)
        again = Stateful(compress_gradients(fabric, model, SPEC, **OPTIONS))
        without = refusal(lambda: fabric.load(f"{folder}/state.ckpt", {"compression": again}, strict=False))
    return ended["steps"], "narrowband" in keys, strict, lenient["steps"], without


def test_after_the_end_of_compression_checkpoints_are_saved_and_loaded_as_without_it(tmp_path):
    for steps, there, strict, lenient, without in on_two_ranks(removed, str(tmp_path)):
        assert (steps, there, lenient) == (STEPS // 2, False, STEPS // 2)
        for kind, text in (strict, without):
            assert kind == "ValueError"
            assert "has no state of compression; strict=False begins with empty residuals" in text


def test_the_example_learns_and_sends_less(tmp_path):
    words = ("train_lightning.py", "--steps", "20", "--folder", str(tmp_path))
    losses, ratio = learned(on_two_ranks(example, *words)[0])
    assert losses[-1] < 4.5  # guessing bytes evenly would be ln 256 = 5.5
    assert ratio >= 40


def fit_in_turns(rank, world_size, toggles):
    """A GAN with manual optimization; in the turn of one player the other is frozen, if ``toggles``."""
    pl = importlib.import_module("lightning.pytorch")
    from narrowband.integrations.lightning import CompressGradients

    class Gan(pl.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.made, self.judged = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)
            self.random = torch.Generator().manual_seed(rank)

        def training_step(self, batch, index):
            for optimizer, others in zip(self.optimizers(), (False, True), strict=True):
                made = self.made(torch.randn(6, 16, generator=self.random))
                x = torch.randn(6, 24, generator=self.random)
                optimizer.zero_grad()
                if toggles:
                    self.toggle_optimizer(optimizer)
                self.manual_backward(self.judged(made if others else torch.cat([x, made])).square().mean())
                optimizer.step()
                if toggles:
                    self.untoggle_optimizer(optimizer)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.arange(4))

        def configure_optimizers(self):
            return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.judged, self.made)]

    compression = CompressGradients("topk:density=0.1+ef", min_numel=64)
    with launched(rank, world_size), heard() as said:
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy="ddp_find_unused_parameters_true",
            devices=world_size,
            max_epochs=1,
            callbacks=[compression],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Gan()
        trainer.fit(module)
    return torch.cat([p.detach().flatten() for p in module.parameters()]), compression.handle.step, said


def test_manual_optimization_in_turns_has_the_same_bits_with_and_without_toggling():
    thrown, frozen = on_two_ranks(fit_in_turns, False), on_two_ranks(fit_in_turns, True)
    for rank, ((own, steps, said), (wanted, _, nothing)) in enumerate(zip(thrown, frozen, strict=True)):
        assert steps == 8
        assert torch.equal(own, wanted)
        assert [message.split(" (")[0] for message in said] == ["averages of 2 of 4 parameters"] * (rank == 0)
        assert nothing == []
