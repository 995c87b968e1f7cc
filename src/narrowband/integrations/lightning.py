"""Compression with Lightning: a callback for its Trainer, and a function for Fabric.

Lightning registers communication hooks on GPUs only, and silently ignores them on a CPU; Fabric has no argument for
one. The callback registers the hook on both, as soon as Lightning has wrapped the model in DistributedDataParallel.

A Lightning checkpoint is one file, written by rank 0, which ``ModelCheckpoint`` renames, links, uploads and deletes. So
all ranks send their states to rank 0, which saves them in that file. The file grows by the residuals of all ranks, each
of the size of the model in float32, and every rank reads the whole file when it resumes.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from narrowband import gradients, updates
from narrowband.errors import need
from narrowband.integrations.replica import Replica
from narrowband.integrations.states import gather, load
from narrowband.integrations.wrapped import check_clipping, ddp_in, is_wrapped
from narrowband.updates import UpdateCompression

if find_spec("lightning") is None and find_spec("pytorch_lightning") is not None:  # Lightning's former name
    need("pytorch-lightning", "2.4", "2", extra="lightning")
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.exceptions import SIGTERMException
else:
    need("lightning", "2.4", "2", extra="lightning")
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.exceptions import SIGTERMException

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from narrowband.adapt import Plan, Policy
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression, Method
    from narrowband.gradients import GradientCompression
    from narrowband.integrations.replica import Saves

__all__ = ["CompressGradients", "CompressUpdates", "Stateful", "compress_gradients", "compress_updates"]

log = logging.getLogger(__name__)

#: The key of all ranks' states in a checkpoint.
KEY = "narrowband"


class _Callback(Callback, ABC):
    """Compresses the model that a Lightning Trainer fits, and saves all ranks' states in its checkpoints."""

    _waits = False  # whether a state is loaded only when Lightning has loaded the optimizers

    def __init__(
        self, spec: str | Codec | Compression | Method | Plan | Policy, *, strict: bool = True, **options: Any
    ) -> None:
        self._spec, self._strict, self._options = spec, strict, options
        self._saves: Saves | None = None  # what every rank saves; None: nothing has been fitted
        self._fitted: weakref.ref[LightningModule] | None = None  # the handle's model
        self._begun = False  # whether the model of this fit is compressed
        self._alone = False  # whether an exception ends this fit that other ranks may not have
        self._found: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None  # in a checkpoint, not loaded yet

    @property
    @abstractmethod
    def _residual_nbytes(self) -> int:
        """Bytes of what the fit before has not sent yet."""

    @abstractmethod
    def _begin(self, trainer: Trainer, ddp: DistributedDataParallel) -> Saves:
        """Compress the model that Lightning has wrapped. Return what every rank saves."""

    def _made(self) -> Saves:
        """Return what every rank saves.

        Raises:
            RuntimeError: nothing has been fitted in this process.
        """
        if self._saves is None:
            raise RuntimeError(
                "there is no handle before trainer.fit has put the model into DistributedDataParallel in this process: "
                "strategies that fork or spawn do so in processes that end with the fit; use strategy='ddp'"
            )
        return self._saves

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset at the start of a fit: forget a state that an earlier fit has found but not loaded."""
        if stage == "fit":
            self._begun, self._found, self._alone = False, None, False

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the state from a checkpoint until the model is wrapped: to resume, Lightning reads the checkpoint first.

        Lightning also reads a checkpoint to undo the steps of a trial, such as a learning-rate search. Trials before
        ``on_fit_start`` are uncompressed, and their checkpoints have no compression state.
        """
        if trainer.state.fn != "fit":
            return
        if self._begun or not is_wrapped(trainer.strategy.model):
            self._found = _mine(checkpoint.get(KEY), trainer.global_rank, trainer.world_size)
        if self._begun and not self._waits:
            self._load("the checkpoint that was read in training")

    def _load(self, where: str) -> None:
        """Load the state that was found in a checkpoint, if any, on all ranks.

        Raises:
            ValueError: it is missing or does not fit.
        """
        found, self._found = self._found, None
        if found is not None:
            load(self._made(), found, where, strict=self._strict)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compress the model that Lightning has wrapped. A second fit begins with empty residuals, as it begins with
        new optimizers, unless it resumes from a checkpoint.

        Raises:
            UnsupportedError: the model is not in DistributedDataParallel, or the Trainer clips averages that are sums
                of many gradients.
            ValueError: the state in the checkpoint is missing or does not fit.
        """
        ddp = ddp_in(trainer.strategy.model, "use Trainer(strategy='ddp', devices=…) with two devices or more")
        again = self._fitted is not None and self._fitted() is pl_module and self._found is None
        if again and self._saves is not None and self._residual_nbytes and trainer.is_global_zero:
            log.warning(
                "this fit begins with empty residuals: what the fit before had not sent yet is dropped, as Lightning "
                "drops the state of its optimizers; to go on with both, pass ckpt_path=... to trainer.fit"
            )
        self._saves = None  # release its residuals before there are new ones
        self._saves = self._begin(trainer, ddp)
        self._fitted = weakref.ref(pl_module)
        if not self._waits:
            self._load(str(trainer.ckpt_path))
        self._begun = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Refuse to train without compression.

        Raises:
            RuntimeError: the callback was added after training had begun.
        """
        if self._saves is None:
            name = type(self).__name__
            raise RuntimeError(f"{name} was added when training had begun: give it to Trainer(callbacks=…)")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Note whether other ranks may go on without this exception. SIGTERM is raised on all, at the same step."""
        self._alone = not isinstance(exception, SIGTERMException)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the states of all ranks to the checkpoint on rank 0. After an exception, the other ranks may be anywhere
        in a step and send nothing, so the checkpoint is saved without states.
        """
        if self._saves is None:  # a Trainer may save a model that it has not fitted
            return
        if self._alone:
            log.warning(
                "this checkpoint is saved without a state of compression, after an exception: other ranks may be in "
                "the middle of a step; to resume from it, pass strict=False to the callback"
            )
            return
        if states := gather(self._saves):
            checkpoint[KEY] = states


class CompressGradients(_Callback):
    """Compress the gradients of the model that a Lightning Trainer fits, and save all ranks' states in its checkpoints.

    Args:
        spec: codec and feedback, see :func:`narrowband.compress_gradients`.
        strict: whether resuming raises if the checkpoint has no compression state, or states of another number of
            ranks. Otherwise residuals begin empty, or are shared out.
        options: further arguments of :func:`narrowband.compress_gradients`. ``grad_scaler``, and ``optimizer`` if the
            Trainer has a single one, are taken from the Trainer by default.

    Example:
        >>> compression = CompressGradients("topk:density=0.01+ef")
        >>> trainer = Trainer(strategy="ddp", callbacks=[compression])
        >>> trainer.fit(model)
        >>> print(compression.handle.stats().total.ratio)
    """

    @property
    def handle(self) -> GradientCompression:
        """The handle of the model that is being fitted, or was fitted last.

        Raises:
            RuntimeError: nothing has been fitted in this process.
        """
        return cast("GradientCompression", self._made())

    @property
    def _residual_nbytes(self) -> int:
        return self.handle.residual_nbytes

    def _begin(self, trainer: Trainer, ddp: DistributedDataParallel) -> GradientCompression:
        options = {"grad_scaler": getattr(trainer.precision_plugin, "scaler", None), **self._options}
        if len(trainer.optimizers) == 1:
            options.setdefault("optimizer", trainer.optimizers[0])
        handle = gradients.compress_gradients(ddp, self._spec, **options)
        check_clipping(handle, trainer.gradient_clip_val, "gradient_clip_val")
        return handle


class CompressUpdates(_Callback):
    """Average the updates of the model that a Lightning Trainer fits, in place of its gradients, and save what each
    replica has for itself (residuals, the optimizer's moments, buffers) in the Trainer's checkpoints.

    There is a round at the end of every epoch, before the Trainer validates or saves, and when the fit ends, so that
    all replicas have the same parameters then. A checkpoint that has weights only and is saved in the middle of an
    epoch has those of rank 0.

    Args:
        spec: codec and feedback, see :func:`narrowband.compress_updates`.
        strict: whether resuming raises if the checkpoint has no such states, or those of another number of ranks.
            Otherwise residuals begin empty, or are shared out, and optimizers go on with the moments of rank 0.
        options: further arguments of :func:`narrowband.compress_updates`. ``grad_scaler`` is taken from the Trainer by
            default.

    Example:
        >>> compression = CompressUpdates("uniform:bits=2+ef", every=15, outer="nesterov")
        >>> trainer = Trainer(strategy="ddp", callbacks=[compression])
        >>> trainer.fit(model)
        >>> print(compression.handle.step)  # rounds
    """

    _waits = True
    _handle: UpdateCompression | None = None

    @property
    def handle(self) -> UpdateCompression:
        """The handle of the model that is being fitted, or was fitted last.

        Raises:
            RuntimeError: nothing has been fitted in this process.
        """
        self._made()
        return cast("UpdateCompression", self._handle)

    @property
    def _residual_nbytes(self) -> int:
        return self.handle.residual_nbytes

    def _begin(self, trainer: Trainer, ddp: DistributedDataParallel) -> Replica:
        if self._handle is not None and not self._handle.removed:
            self._handle.remove()  # of the fit before, with other optimizers
        options = {"grad_scaler": getattr(trainer.precision_plugin, "scaler", None), **self._options}
        self._handle = updates.compress_updates(ddp, trainer.optimizers, self._spec, **options)
        return Replica(self._handle)

    def _average(self) -> None:
        """Hold a round, if training has begun and goes on on all ranks."""
        if self._saves is not None and self._begun and not self._alone and not self._saves.removed:
            self.handle.average()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Load the state of a checkpoint, once Lightning has loaded its optimizers.

        Raises:
            ValueError: the state in the checkpoint is missing or does not fit.
            RuntimeError: the callback was added after training had begun.
        """
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._load(str(trainer.ckpt_path))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hold a round: all replicas validate the same parameters."""
        if trainer.state.fn == "fit" and self._found is None:
            self._average()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hold a round."""
        self._average()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hold a round."""
        self._average()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hold a round, which also changes the parameters in the checkpoint, and add the states of all ranks."""
        self._average()
        super().on_save_checkpoint(trainer, pl_module, checkpoint)


def compress_gradients(
    fabric: Fabric, model: nn.Module, spec: str | Codec | Compression | Method | Plan | Policy, **options: Any
) -> GradientCompression:
    """Compress the gradients of a model that Fabric has set up. Call it on all ranks, before the first backward.

    Args:
        fabric: the Fabric that set up the model. Its gradient scaler is used, if it has one.
        model: the model that ``fabric.setup`` returned.
        spec: codec and feedback, see :func:`narrowband.compress_gradients`.
        options: further arguments of :func:`narrowband.compress_gradients`.

    Returns:
        The handle. Wrap it in :class:`Stateful` to save it in a checkpoint.

    Raises:
        UnsupportedError: the model is not in DistributedDataParallel.

    Example:
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> handle = compress_gradients(fabric, model, "topk:density=0.01+ef")
        >>> fabric.save("state.ckpt", {"model": model, "optimizer": optimizer, "compression": Stateful(handle)})
    """
    ddp = ddp_in(model, "call fabric.setup(model) of Fabric(strategy='ddp', devices=…) with two devices or more")
    options.setdefault("grad_scaler", getattr(fabric.strategy.precision, "scaler", None))
    return gradients.compress_gradients(ddp, spec, **options)


def compress_updates(
    fabric: Fabric,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    spec: str | Codec | Compression | Method | Plan | Policy,
    **options: Any,
) -> UpdateCompression:
    """Average the updates of a model that Fabric has set up, in place of its gradients. Call it on all ranks, before
    the first backward.

    Args:
        fabric: the Fabric that set up the model. Its gradient scaler is used, if it has one.
        model: the model that ``fabric.setup`` returned.
        optimizer: the optimizer that it returned, or several.
        spec: codec and feedback, see :func:`narrowband.compress_updates`.
        options: further arguments of :func:`narrowband.compress_updates`.

    Returns:
        The handle. Call its ``average()`` before you save or evaluate, and wrap it in :class:`Stateful` to save it.

    Raises:
        UnsupportedError: the model is not in DistributedDataParallel.

    Example:
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> handle = compress_updates(fabric, model, optimizer, "uniform:bits=2+ef", every=15)
    """
    ddp = ddp_in(model, "call fabric.setup(model) of Fabric(strategy='ddp', devices=…) with two devices or more")
    options.setdefault("grad_scaler", getattr(fabric.strategy.precision, "scaler", None))
    given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    return updates.compress_updates(ddp, [getattr(each, "optimizer", each) for each in given], spec, **options)


class Stateful:
    """Wraps a handle for ``fabric.save`` and ``fabric.load``: the states of all ranks are in the file of rank 0. With a
    handle of updates these include the moments of every rank's optimizers; pass it to ``fabric.load`` behind these.

    Args:
        handle: the handle to save or load.
        strict: whether loading raises if the checkpoint has no compression state (because the handle had been removed),
            or states of another number of ranks. Otherwise residuals begin empty, or are shared out.
    """

    def __init__(self, handle: GradientCompression | UpdateCompression, *, strict: bool = True) -> None:
        self._saves: Saves = Replica(handle) if isinstance(handle, UpdateCompression) else handle
        self._strict = strict

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0. Call on all ranks, as ``fabric.save`` does."""
        return {"states": gather(self._saves)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the states of all ranks. Call on all ranks, as ``fabric.load`` does.

        Raises:
            ValueError: with ``strict``: there are no states, or they are of another number of ranks.
        """
        found = _mine(state["states"], dist.get_rank(), dist.get_world_size())
        load(self._saves, found, "the checkpoint", strict=self._strict)


def _mine(
    states: Sequence[Mapping[str, Any]] | None, rank: int, size: int
) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
    """Return this rank's state if the number of ranks is unchanged; else all states, or an empty list."""
    return states[rank] if states and len(states) == size else states or []
