"""Compression with the Trainer of Hugging Face Transformers, and with trainers derived from it.

The Trainer wraps the model in ``train()``, with no argument for a hook. A callback is called when the model has been
wrapped and no step has been trained, but is not told where the wrapped model is, nor which checkpoint the run resumes
from. So :func:`compress_gradients` and :func:`compress_updates` take the Trainer, and wrap its ``train`` method.

With ``enable_jit_checkpoint``, the Trainer writes a checkpoint on SIGTERM as soon as it notices the signal, and runs no
callback. Usually this is between backward and the optimizer's step, when residuals are already those after the step but
parameters are those before it. Moreover, ranks that notice the signal at different points wait for each other forever.
So this module delays that checkpoint to the end of the step, and then stops training.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from narrowband import gradients, updates
from narrowband.errors import UnsupportedError, need
from narrowband.integrations.replica import Replica
from narrowband.integrations.states import load, read, write
from narrowband.integrations.wrapped import check_clipping, ddp_in

need("transformers", "5.0", "5", extra="transformers")
need("accelerate", "1.1", "1", extra="transformers")

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn.parallel import DistributedDataParallel
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from narrowband.adapt import Plan, Policy
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression, Method
    from narrowband.gradients import GradientCompression
    from narrowband.integrations.replica import Saves
    from narrowband.updates import UpdateCompression

__all__ = ["CompressGradients", "CompressUpdates", "compress_gradients", "compress_updates"]

_ADVICE = (
    "start two processes or more with torchrun, without FSDP; without GPUs with TrainingArguments(use_cpu=True). Call "
    "evaluate() and predict() after train(), or pass eval_on_start=True: the Trainer does not wrap a model that was "
    "evaluated before, and every rank would train alone"
)


def compress_gradients(
    trainer: Trainer,
    spec: str | Codec | Compression | Method | Plan | Policy,
    *,
    strict: bool = True,
    **options: Any,
) -> CompressGradients:
    """Compress the gradients of a Trainer's model, and save every rank's state in the Trainer's checkpoints.

    Call it on all ranks, before ``trainer.train()``.

    Args:
        trainer: the Trainer of Transformers, or one derived from it.
        spec: codec and feedback, see :func:`narrowband.compress_gradients`.
        strict: whether resuming raises if the checkpoint has no compression state, or states of another number of
            ranks. Otherwise residuals begin empty, or are shared out.
        options: further arguments of :func:`narrowband.compress_gradients`. ``grad_scaler`` and ``optimizer`` are taken
            from the Trainer by default.

    Returns:
        The callback. Its ``handle`` exists when training has begun.

    Raises:
        TypeError: it is no Trainer.
        RuntimeError: training has begun.
        UnsupportedError: ``enable_jit_checkpoint`` is set, and this version of Transformers implements it in an unknown
            way.

    Example:
        >>> compression = compress_gradients(trainer, "topk:density=0.01+ef")
        >>> trainer.train()
        >>> print(compression.handle.stats().total.ratio)
    """
    _check_trainer(trainer, "compress_gradients")
    callback = CompressGradients(trainer, spec, strict, options)
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        callback.save_on_sigterm()
    _add(callback, trainer)
    return callback


def compress_updates(
    trainer: Trainer,
    spec: str | Codec | Compression | Method | Plan | Policy,
    *,
    strict: bool = True,
    **options: Any,
) -> CompressUpdates:
    """Average the updates of a Trainer's model in place of its gradients, and save what each replica has for itself
    (residuals, the optimizer's moments, buffers) in the Trainer's checkpoints.

    Call it on all ranks, before ``trainer.train()``. Before the Trainer saves or evaluates, and when training ends,
    there is a round, so that all replicas have the same parameters.

    Args:
        trainer: the Trainer of Transformers, or one derived from it.
        spec: codec and feedback, see :func:`narrowband.compress_updates`.
        strict: whether resuming raises if the checkpoint has no such states, or those of another number of ranks.
            Otherwise residuals begin empty, or are shared out, and optimizers go on with the moments of rank 0.
        options: further arguments of :func:`narrowband.compress_updates`. ``grad_scaler`` is taken from the Trainer by
            default.

    Returns:
        The callback. Its ``handle`` exists when training has begun.

    Raises:
        TypeError: it is no Trainer.
        RuntimeError: training has begun.
        UnsupportedError: ``enable_jit_checkpoint`` is set. Ranks that get SIGTERM at different steps cannot hold the
            round that a checkpoint needs.

    Example:
        >>> compression = compress_updates(trainer, "uniform:bits=2+ef", every=15, outer="nesterov")
        >>> trainer.train()
        >>> print(compression.handle.step)  # rounds
    """
    _check_trainer(trainer, "compress_updates")
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        raise UnsupportedError(
            "enable_jit_checkpoint=True cannot be combined with compress_updates: a checkpoint begins with a round of "
            "all ranks, and they may get SIGTERM at different steps. Set it to False, and save as often as needed"
        )
    callback = CompressUpdates(trainer, spec, strict, options)
    _add(callback, trainer)
    return callback


def _check_trainer(trainer: Trainer, call: str) -> None:
    """Check that this is a Trainer that has not begun.

    Raises:
        TypeError: it is none.
        RuntimeError: it has begun.
    """
    if not hasattr(trainer, "is_in_train"):
        raise TypeError(
            f"{call} takes the Trainer here, not {type(trainer).__name__}; for a model in DistributedDataParallel "
            f"there is nb.{call}"
        )
    if trainer.is_in_train:
        raise RuntimeError(f"this Trainer has begun to train: call {call} before trainer.train()")


def _add(callback: _Callback, trainer: Trainer) -> None:
    """Add a callback to a Trainer, and tell it from which checkpoint each ``train`` resumes."""
    trainer.add_callback(callback)
    train = trainer.train

    @functools.wraps(train)
    def listened(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        callback.resume_from = (
            get_last_checkpoint(trainer.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        )
        return train(resume_from_checkpoint, *args, **kwargs)

    trainer.train = listened


class _Callback(TrainerCallback, ABC):
    """Compresses the model that a Trainer has wrapped, and saves every rank's state in its checkpoints."""

    _call = ""  # the function that adds the callback

    def __init__(
        self,
        trainer: Trainer,
        spec: str | Codec | Compression | Method | Plan | Policy,
        strict: bool,
        options: dict[str, Any],
    ) -> None:
        self._trainer, self._spec, self._strict, self._options = trainer, spec, strict, options
        self._ddp: DistributedDataParallel | None = None
        self._saves: Saves | None = None  # what every rank saves; None: training has not begun
        #: The checkpoint folder from which this call of ``train`` resumes.
        self.resume_from: str | bool | None = None

    @abstractmethod
    def _begin(self, ddp: DistributedDataParallel, args: TrainingArguments) -> Saves:
        """Compress the model that the Trainer has wrapped. Return what every rank saves."""

    def _begun(self) -> Saves:
        """Return what every rank saves.

        Raises:
            RuntimeError: nothing has been trained.
        """
        if self._saves is None:
            raise RuntimeError("there is no handle before trainer.train() has wrapped the model")
        return self._saves

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compress the model that the Trainer has wrapped.

        Raises:
            UnsupportedError: the model is not in DistributedDataParallel; the Trainer clips averages that are sums of
                many gradients; or it is a hyperparameter search, whose folders callbacks are not told.
            ValueError: the state in the checkpoint is missing or does not fit.
            RuntimeError: the run resumes from an unknown checkpoint.
        """
        if state.is_hyper_param_search:
            raise UnsupportedError(
                "hyperparameter_search is not supported: callbacks cannot find out where it keeps its checkpoints"
            )
        ddp = ddp_in(self._trainer.model_wrapped, _ADVICE)
        if ddp is not self._ddp:
            self._saves = self._begin(ddp, args)
            self._ddp = ddp
        folder = self.resume_from
        if state.global_step and not folder:
            raise RuntimeError(
                f"this run resumes at step {state.global_step} from an unknown checkpoint: call "
                f"{self._call}(trainer, …) first, and then trainer.train(…) of the same object"
            )
        if folder:
            load(self._begun(), read(str(folder)), str(folder), strict=self._strict)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse to train without compression.

        Raises:
            RuntimeError: the callback was added after training had begun.
        """
        if self._saves is None:
            raise RuntimeError(f"this callback was added when training had begun: use {self._call}(trainer, …)")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write this rank's state into the checkpoint folder of the Trainer."""
        if not args.save_only_model:
            write(self._begun(), Path(args.output_dir, f"checkpoint-{state.global_step}"))


class CompressGradients(_Callback):
    """The callback that :func:`compress_gradients` adds to a Trainer."""

    _call = "compress_gradients"
    _asked: Callable[[], None] | None = None  # writes the checkpoint that SIGTERM has asked for

    @property
    def handle(self) -> GradientCompression:
        """The handle of the model that is being trained, or was trained last.

        Raises:
            RuntimeError: nothing has been trained.
        """
        return cast("GradientCompression", self._begun())

    def _begin(self, ddp: DistributedDataParallel, args: TrainingArguments) -> GradientCompression:
        options = {"grad_scaler": self._trainer.accelerator.scaler, "optimizer": self._trainer.optimizer.optimizer}
        handle = gradients.compress_gradients(ddp, self._spec, **{**options, **self._options})
        check_clipping(handle, args.max_grad_norm, "max_grad_norm")
        return handle

    def save_on_sigterm(self) -> None:
        """Delay the checkpoint that SIGTERM asks for to the end of the step, and add this rank's state to it.

        Raises:
            UnsupportedError: no callback of the Trainer saves on SIGTERM in a known way.
        """
        managers = [getattr(each, "jit_manager", None) for each in self._trainer.callback_handler.callbacks]
        manager = next((each for each in managers if hasattr(each, "execute_jit_checkpoint")), None)
        if manager is None:
            raise UnsupportedError(
                "enable_jit_checkpoint=True is not supported with this Trainer: its callback that saves on SIGTERM was "
                "not found, so residuals would be lost: set it to False"
            )

        save = manager.execute_jit_checkpoint

        def later() -> None:
            manager.is_checkpoint_requested = False
            # The caller has set this flag. It would end the step with this batch, before its other micro-batches.
            self._trainer.control.should_training_stop = False
            self._asked = save

        manager.execute_jit_checkpoint = later

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the checkpoint that SIGTERM has asked for, if any, and stop training."""
        save, self._asked = self._asked, None
        if save is not None:
            control.should_training_stop, control.should_save = True, False
            save()
            self.on_save(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The same, if SIGTERM came after the last step of an epoch."""
        self.on_step_end(args, state, control)


class CompressUpdates(_Callback):
    """The callback that :func:`compress_updates` adds to a Trainer."""

    _call = "compress_updates"
    _handle: UpdateCompression

    @property
    def handle(self) -> UpdateCompression:
        """The handle of the model that is being trained, or was trained last.

        Raises:
            RuntimeError: nothing has been trained.
        """
        self._begun()
        return self._handle

    def _begin(self, ddp: DistributedDataParallel, args: TrainingArguments) -> Replica:
        options = {"grad_scaler": self._trainer.accelerator.scaler, **self._options}
        self._handle = updates.compress_updates(ddp, self._trainer.optimizer.optimizer, self._spec, **options)
        return Replica(self._handle)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hold a round before the Trainer saves or evaluates, and when training ends."""
        ends = control.should_save or control.should_evaluate or control.should_training_stop
        if ends and not self.handle.removed:
            self.handle.average()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The same, where the Trainer saves or evaluates by epochs."""
        self.on_step_end(args, state, control)
