"""Lightning: a callback for its Trainer, and a function for Fabric.

Lightning registers communication hooks on GPUs only, and on a CPU silently does not; Fabric has no argument for one.
The callback gives the hook to the model as soon as Lightning has put it into DistributedDataParallel, on either.

A checkpoint of Lightning is one file, written by rank 0, which ``ModelCheckpoint`` renames, links, uploads and deletes.
So rank 0 is sent the states of all ranks, and they lie in that file. It grows by the residuals of all ranks, each of
the size of the model in float32, and every rank reads all of it when it resumes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from narrowband import gradients
from narrowband.errors import need
from narrowband.integrations.states import gather, load
from narrowband.integrations.wrapped import check_clipping, ddp_in, is_wrapped

if find_spec("lightning") is None and find_spec("pytorch_lightning") is not None:  # the same, under its former name
    need("pytorch-lightning", "2.4", "2", extra="lightning")
    from pytorch_lightning import Callback
else:
    need("lightning", "2.4", "2", extra="lightning")
    from lightning.pytorch import Callback

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    from narrowband.adapt import Plan, Policy
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression, Method
    from narrowband.gradients import GradientCompression

__all__ = ["CompressGradients", "Stateful", "compress_gradients"]

log = logging.getLogger(__name__)

#: What the states of all ranks are called in a checkpoint.
KEY = "narrowband"


class CompressGradients(Callback):
    """Compress what a model sends that Lightning's Trainer fits, and put every rank's state into its checkpoints.

    Args:
        spec: codec and feedback, see :func:`narrowband.compress_gradients`.
        strict: whether to resume is an error where the checkpoint has no state of compression, or that of another
            number of ranks. Otherwise residuals begin empty, or are shared out.
        options: more for :func:`narrowband.compress_gradients`. A gradient scaler, and the optimizer if there is one
            only, are found.

    Example:
        >>> compression = CompressGradients("topk:density=0.01+ef")
        >>> trainer = Trainer(strategy="ddp", callbacks=[compression])
        >>> trainer.fit(model)
        >>> print(compression.handle.stats().total.ratio)
    """

    def __init__(
        self, spec: str | Codec | Compression | Method | Plan | Policy, *, strict: bool = True, **options: Any
    ) -> None:
        self._spec, self._strict, self._options = spec, strict, options
        self._handle: GradientCompression | None = None
        self._begun = False  # whether the model of this fit is compressed
        self._found: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None  # in a checkpoint, not loaded yet

    @property
    def handle(self) -> GradientCompression:
        """The handle of the model that is fitted, or was last.

        Raises:
            RuntimeError: nothing has been fitted in this process.
        """
        if self._handle is None:
            raise RuntimeError(
                "there is no handle before trainer.fit has put the model into DistributedDataParallel in this process: "
                "strategies that fork or spawn do so in processes that end with the fit; use strategy='ddp'"
            )
        return self._handle

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin anew: what an earlier fit was, or found and did not begin with, is over."""
        if stage == "fit":
            self._begun, self._found = False, None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep what will be loaded: to resume, Lightning reads a checkpoint before it wraps the model.

        One that is read later takes back the steps of a trial, such as a search of the learning rate. Trials before
        ``on_fit_start`` are uncompressed, and their checkpoints are none of compression. After a later one its state is
        taken back, too.
        """
        if trainer.state.fn != "fit":
            return
        found = _mine(checkpoint.get(KEY), trainer.global_rank, trainer.world_size)
        if self._begun:
            load(self.handle, found, "the checkpoint that was read in training", strict=self._strict)
        elif not is_wrapped(trainer.strategy.model):
            self._found = found

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compress the model that Lightning has wrapped.

        Raises:
            UnsupportedError: it is not in DistributedDataParallel, or gradients are clipped that are sums.
            ValueError: the checkpoint lacks something.
        """
        options = {"grad_scaler": getattr(trainer.precision_plugin, "scaler", None), **self._options}
        if len(trainer.optimizers) == 1:
            options.setdefault("optimizer", trainer.optimizers[0])
        ddp = ddp_in(trainer.strategy.model, "use Trainer(strategy='ddp', devices=…) with two devices or more")
        self._handle = gradients.compress_gradients(ddp, self._spec, **options)
        check_clipping(self._handle, trainer.gradient_clip_val, "gradient_clip_val")
        found, self._found = self._found, None
        if found is not None:
            load(self._handle, found, str(trainer.ckpt_path), strict=self._strict)
        self._begun = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Refuse to train uncompressed.

        Raises:
            RuntimeError: the callback was added when training had begun.
        """
        if self._handle is None:
            raise RuntimeError("CompressGradients was added when training had begun: give it to Trainer(callbacks=…)")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the states of all ranks into what rank 0 writes. After an exception in the middle of a step there is none
        to be had, and what is saved then has the parameters and the optimizer alone.
        """
        if self._handle is None:  # a Trainer may save what it has not fitted
            return
        try:
            states = gather(self._handle)
        except RuntimeError as error:
            if trainer.state.status != "interrupted":
                raise
            log.warning("this checkpoint is saved without a state of compression, after an exception: %s", error)
            return
        if states:
            checkpoint[KEY] = states


def compress_gradients(
    fabric: Fabric, model: nn.Module, spec: str | Codec | Compression | Method | Plan | Policy, **options: Any
) -> GradientCompression:
    """Compress what a model sends that Fabric has set up. Call it on all ranks, before the first backward.

    Args:
        fabric: that set it up. Its gradient scaler is used, if it has one.
        model: as ``fabric.setup`` returned it.
        spec: codec and feedback, see :func:`narrowband.compress_gradients`.
        options: more for :func:`narrowband.compress_gradients`.

    Returns:
        The handle. :class:`Stateful` puts it into a checkpoint.

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


class Stateful:
    """What ``fabric.save`` and ``fabric.load`` take for a handle: the states of all ranks, in the file of rank 0.

    Args:
        handle: whose.
        strict: whether to load is an error where the checkpoint has no state of compression, since the handle had been
            removed, or that of another number of ranks. Otherwise residuals begin empty, or are shared out.
    """

    def __init__(self, handle: GradientCompression, *, strict: bool = True) -> None:
        self._handle, self._strict = handle, strict

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on rank 0. Call on all ranks, as ``fabric.save`` does."""
        return {"states": gather(self._handle)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from them. Call on all ranks, as ``fabric.load`` does.

        Raises:
            ValueError: there are none, or those of another number of ranks.
        """
        found = _mine(state["states"], dist.get_rank(), dist.get_world_size())
        load(self._handle, found, "the checkpoint", strict=self._strict)


def _mine(
    states: Sequence[Mapping[str, Any]] | None, rank: int, size: int
) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
    """This rank's state, of as many ranks as there are; or else all, or an empty list."""
    return states[rank] if states and len(states) == size else states or []
