"""A stage of PyTorch's own pipeline engine that sends and receives payloads.

:class:`CompressedStage` is a ``torch.distributed.pipelining.PipelineStage``. Schedules (GPipe, 1F1B, interleaved, zero
bubble) ask a stage for its send and receive operations; this one returns operations on payloads instead of tensors.
PyTorch's engine does everything else: order, autograd, DDP around a stage's module (:mod:`.averaged_stage`).

On the CPU the stage itself sends and receives while it computes (:mod:`.transfers`), and returns no operations to the
schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from narrowband.errors import UnsupportedError
from narrowband.pipeline.agreement import Neighbour, agree
from narrowband.pipeline.averaged_stage import AveragedStage
from narrowband.pipeline.channel import At, Channel, ChannelStats
from narrowband.pipeline.pairs import ChannelPairs, compressible
from narrowband.pipeline.transfers import BACKWARD, FORWARD, Transfers
from narrowband.pipeline.warmup import warm_up

if TYPE_CHECKING:
    from torch import Tensor, nn

    from narrowband.codecs import Codec
    from narrowband.feedback import Compression

    Specs = str | Codec | Compression | Sequence[str | Codec | Compression]

__all__ = ["CompressedStage"]


class _Arriving(NamedTuple):
    """A message that is being received.

    Attributes:
        channel: unpacks the payload; None where a tensor travels uncompressed.
        payload: the buffer that the message is received into: ``place`` itself where a contiguous tensor travels
            uncompressed.
        place: the tensor that the payload is unpacked into.
        work: wait for it before using the payload; None where the schedule waits.
    """

    channel: Channel | None
    payload: Tensor
    place: Tensor
    work: dist.Work | None


class CompressedStage(AveragedStage):
    """A pipeline stage whose activations and gradients travel compressed.

    It replaces ``torch.distributed.pipelining.PipelineStage`` under every schedule. Several tensors may cross a
    boundary; those that are not floating point travel uncompressed. Shapes are static, as the engine requires. Where a
    schedule puts two neighbouring stages on one rank, nothing is sent and nothing compressed. Several schedules may
    share a stage. If they have different numbers of micro-batches, the stage no longer sends while it computes.

    Args:
        submodule: the part of the model that runs here. Its replicas may be averaged by DDP, with or without
            :func:`~narrowband.compress_gradients`; by ``compress_gradients`` alone, also where FSDP2 shards the part;
            or by FSDP2, with or without :func:`~narrowband.compress_shards`. Each of these averages once per step.
        stage_index: the index of this stage, from 0.
        num_stages: how many stages the model has.
        device: the device that the stage runs on.
        forward: the spec for activations, see :class:`Channel`; or one for each of the num_stages − 1 boundaries.
        backward: the same for gradients. ``topk:density=0.1,reuse=forward`` sends the values of the elements that were
            chosen in forward, and no indices.
        seed: the seed of stochastic rounding; the same on all ranks.
        warmup_steps: how many training steps are uncompressed at first.
        warmup_epochs: the same in epochs: call :meth:`set_epoch` at the beginning of each, on all ranks.
        compress_in_eval: whether ``schedule.eval`` compresses, too. A model that was trained with compression needs it.
        **options: those of ``PipelineStage``: ``input_args``, ``output_args``, ``group``, ``dw_builder``, …

    Attributes:
        compress_in_eval: as given; may be changed between two steps, on all ranks.
        samples: for ``aq-sgd``: the ids, int64, of the samples of the whole batch, in its order. Set it on every rank
            before every step, which resets it to None.

    Raises:
        ValueError: a spec is not valid, or their number is not that of the boundaries; at the first step, neighbouring
            stages have different configurations.
        UnsupportedError: no process group; a spec cannot work between stages; a schedule sends micro-batches in
            different orders where feedback needs one order; or PyTorch's stage cannot see what averages the submodule.

    Example:
        >>> stage = nb.CompressedStage(part, rank, 4, device, forward="uniform:bits=8", backward="qsgd:bits=4")
        >>> schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
        >>> schedule.step(x) if rank == 0 else schedule.step(target=y) if rank == 3 else schedule.step()
        >>> print(stage.stats()["forward"].ratio)
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        forward: Specs = "none",
        backward: Specs = "none",
        seed: int = 0,
        warmup_steps: int = 0,
        warmup_epochs: int = 0,
        compress_in_eval: bool = True,
        **options: Any,
    ) -> None:
        if not dist.is_initialized():
            raise UnsupportedError("no process group: call torch.distributed.init_process_group(...) first")
        super().__init__(submodule, stage_index, num_stages, device, **options)
        there, back = (
            _each(specs, num_stages - 1, name) for name, specs in (("forward", forward), ("backward", backward))
        )
        #: The channels of the boundaries before and behind this stage; None at the ends of the pipeline.
        self._before: ChannelPairs | None = None
        self._behind: ChannelPairs | None = None
        config = {"seed": seed, "warmup_steps": warmup_steps, "warmup_epochs": warmup_epochs}
        if stage_index > 0:
            at = stage_index - 1
            self._before = ChannelPairs(there[at], back[at], boundary=at, end="behind", **config)
        if stage_index < num_stages - 1:
            self._behind = ChannelPairs(
                there[stage_index], back[stage_index], boundary=stage_index, end="before", **config
            )
        if torch.device(device).type == "cpu":
            for at in {max(stage_index - 1, 0), min(stage_index, num_stages - 2)} if num_stages > 1 else ():
                warm_up(there[at], back[at])
        self.compress_in_eval = compress_in_eval
        self._step = -1
        self._transfers = Transfers(stage_index, num_stages, torch.device(device))
        self._agreed = False
        self.samples: Tensor | None = None
        #: The sample ids of this step's batch.
        self._whole: Tensor | None = None
        #: (direction, micro-batch) → messages that are being received.
        self._arriving: dict[tuple[int, int], list[_Arriving]] = {}

    def set_epoch(self, epoch: int) -> None:
        """Announce that an epoch begins, from 0 on, where the warm-up counts epochs. Call it on all ranks."""
        for side in (self._before, self._behind):
            if side is not None:
                side.set_epoch(epoch)

    # ---- what the schedule asks --------------------------------------------------------------------------------------

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send a micro-batch's activations."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        metas = self._metas_of_outputs()
        numbers = [n for n, stages in self.act_send_info.items() for stage in stages if stage is not None]
        return self._send(self._packed(ops, numbers, metas, FORWARD, fwd_chunk_id), FORWARD, fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the gradients of a micro-batch's inputs."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if not ops:
            return ops
        metas = [self._meta_of_gradient(n) for n in range(len(self.grad_send_info or ()))]
        numbers = [n for n, stage in enumerate(self.grad_send_info or ()) if stage is not None and metas[n] is not None]
        return self._send(self._packed(ops, numbers, metas, BACKWARD, bwd_chunk_id), BACKWARD, bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive a micro-batch's activations."""
        return self._receive(FORWARD, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradients of a micro-batch's outputs."""
        return self._receive(BACKWARD, bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch forward."""
        self._unpack(FORWARD, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch backward."""
        self._unpack(BACKWARD, bwd_chunk_id)
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._transfers.went_backward()
        return result

    def clear_runtime_states(self) -> None:
        """Begin a new step."""
        super().clear_runtime_states()
        self._arriving.clear()
        self._transfers.begin()
        if not self._agreed:
            self._agreed = True
            self._agree()
        if not self.has_backward:
            return
        sides = [side for side in (self._before, self._behind) if side is not None]
        if any(side.by_sample for side in sides):
            if self.samples is None:
                raise ValueError(
                    "aq-sgd needs the sample ids of every batch: before every step, on every rank, set stage.samples "
                    "to an int64 tensor with one id for each sample"
                )
            self._whole, self.samples = self.samples, None
        self._step += 1

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        if not self._predates_metadata and self._stage_meta.has_dtensors():
            raise UnsupportedError(
                "a DTensor crosses this boundary, and a CompressedStage sends only plain tensors: convert it to a "
                "plain tensor, or use PipelineStage"
            )
        self._transfers.numbers.add(num_microbatches)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        self.chunks = max(self._transfers.numbers)  # otherwise PyTorch takes no more than the schedule that began last
        return result

    # ---- sending and receiving ---------------------------------------------------------------------------------------

    def _packed(
        self, ops: list[dist.P2POp], numbers: list[int], metas: Sequence[Any], direction: int, microbatch: int
    ) -> list[dist.P2POp]:
        """Replace the tensors of send operations with payloads."""
        side = self._before if direction else self._behind
        for op, number in zip(ops, numbers, strict=True):
            x, meta = op.tensor, metas[number]
            if x.shape != meta.shape or x.dtype != meta.dtype:
                raise ValueError(
                    f"stage {self.stage_index}, micro-batch {microbatch}: expected tensor {number} of shape "
                    f"{tuple(meta.shape)} and {meta.dtype}, as in the first step, got {tuple(x.shape)} and {x.dtype}. "
                    "A pipeline has static shapes: drop or pad the last batch if it is smaller"
                )
            if self._compresses(x):
                assert side is not None
                channel = side.of(number)[direction]
                samples = self._samples(channel, microbatch, x)
                op.tensor = channel.pack(x, self._at(microbatch), samples=samples, training=self.has_backward)
            else:
                op.tensor = x.contiguous()
        return ops

    def _send(self, ops: list[dist.P2POp], direction: int, microbatch: int) -> list[dist.P2POp]:
        """Send, and return the operations that are left to the schedule."""
        if not self._transfers.by_itself:
            return ops
        self._transfers.send(ops, direction, microbatch, training=self.has_backward)
        return []

    def _receive(self, direction: int, microbatch: int) -> list[dist.P2POp]:
        """Begin to receive a micro-batch and the next ones, and return the operations that are left to the schedule."""
        if not self._transfers.by_itself:
            return self._expect(direction, microbatch)
        for coming in self._transfers.coming(direction, microbatch):
            self._expect(direction, coming)
        return []

    def _expect(self, direction: int, microbatch: int) -> list[dist.P2POp]:
        """Allocate the buffers for a micro-batch's messages, and return the operations that receive them."""
        if direction == BACKWARD:
            ops = super().get_bwd_recv_ops(microbatch)
            infos, side = self.grad_recv_info[microbatch] if ops else (), self._behind
        else:
            ops, infos, side = super().get_fwd_recv_ops(microbatch), self.args_recv_info[microbatch], self._before
        numbers = [n for n, info in enumerate(infos) if _is_received(info)]
        arriving = self._arriving[direction, microbatch] = []
        for op, number in zip(ops, numbers, strict=True):
            place, channel = op.tensor, None
            if any(size > 1 and not stride for size, stride in zip(place.shape, place.stride(), strict=True)):
                raise UnsupportedError(
                    f"stage {self.stage_index}: tensor {number} that crosses the boundary, of shape "
                    f"{tuple(place.shape)}, is an expanded view, whose elements share memory. Return a copy of it from "
                    "the stage before the boundary: x.contiguous()"
                )
            if self._compresses(place):
                assert side is not None
                channel = side.of(number)[direction]
                nbytes = self._room_for(channel, direction, microbatch, place)
                op.tensor = torch.empty(nbytes, dtype=torch.uint8, device=place.device)
            elif not place.is_contiguous():  # backends receive into contiguous memory only
                op.tensor = torch.empty(place.shape, dtype=place.dtype, device=place.device)
            work = self._transfers.receive(op, direction, microbatch) if self._transfers.by_itself else None
            arriving.append(_Arriving(channel, op.tensor, place, work))
        return ops

    def _room_for(self, channel: Channel, direction: int, microbatch: int, place: Tensor) -> int:
        """Return the bytes of the buffer that a message is received into.

        Raises:
            ValueError: the length of the message must be known, and depends on one that has not arrived yet.
        """
        if channel.by_sample and self.has_backward:
            if self._transfers.takes_shorter:
                return channel.most_nbytes(tuple(place.shape), place.dtype)
            self._check_length(channel, direction, microbatch, place)
        return self._nbytes(channel, microbatch, place)

    def _check_length(self, channel: Channel, direction: int, microbatch: int, place: Tensor) -> None:
        """Check that no message that is still arriving brings buffers of this one's samples, so that it is shorter."""
        samples = self._samples(channel, microbatch, place)
        before = [each for way, each in self._arriving if way == direction and each != microbatch]
        if samples is None or self._whole is None or not before or channel.warming_up(self._at(microbatch)):
            return
        size = len(samples)
        coming = torch.cat([self._whole[each * size : (each + 1) * size] for each in before])
        shared = samples[torch.isin(samples, coming)].cpu()
        held = channel.reference_ids() if shared.numel() else None
        if held is not None and not bool(torch.isin(shared, held).all()):
            raise ValueError(
                f"stage {self.stage_index}: micro-batch {microbatch} holds a new sample of an earlier micro-batch of "
                "the same step, which has not arrived yet, so the length of its message is not known. With aq-sgd "
                "on a GPU, under this schedule, no sample may be in a batch twice before it has been visited"
            )

    def _nbytes(self, channel: Channel, microbatch: int, place: Tensor) -> int:
        """Return the bytes of a message, which may depend on what has been unpacked before it."""
        at, samples = self._at(microbatch), self._samples(channel, microbatch, place)
        return channel.payload_nbytes(
            tuple(place.shape), place.dtype, at, samples=samples, training=self.has_backward
        )  # fmt: skip

    def _unpack(self, direction: int, microbatch: int) -> None:
        """Wait for a micro-batch's messages, and unpack their payloads."""
        for channel, payload, place, work in self._arriving.pop((direction, microbatch), ()):
            if work is not None:
                work.wait()
            if channel is not None:
                samples, nbytes = self._samples(channel, microbatch, place), self._nbytes(channel, microbatch, place)
                channel.unpack(
                    payload[:nbytes], place.detach(), self._at(microbatch), samples=samples, training=self.has_backward
                )
            elif payload is not place:
                place.detach().copy_(payload)

    def _compresses(self, x: Tensor) -> bool:
        return compressible(x) and (self.has_backward or self.compress_in_eval)

    def _at(self, microbatch: int) -> At:
        return At(self._step, microbatch)

    def _samples(self, channel: Channel, microbatch: int, x: Tensor) -> Tensor | None:
        """Return the sample ids of the micro-batch that ``x`` belongs to; all micro-batches have the same size.

        Returns None where the channel needs none.
        """
        if not channel.by_sample or not self.has_backward:
            return None
        assert self._whole is not None
        size = x.shape[0] if x.dim() else 1
        if len(self._whole) not in [number * size for number in self._transfers.numbers]:
            numbers = " or ".join(map(str, sorted(self._transfers.numbers)))
            raise ValueError(
                f"stage.samples has {len(self._whole)} ids, but the batch has {numbers} micro-batches of {size} "
                "samples: give one id for each sample of the whole batch"
            )
        return self._whole[microbatch * size : (microbatch + 1) * size]

    # ---- before the first step ---------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Compare configurations and sample buffers with the neighbouring stages on other ranks; see :func:`agree`."""
        for side, other in ((self._before, self.stage_index - 1), (self._behind, self.stage_index + 1)):
            if side is None or self.stage_index_to_group_rank[other] == self.group_rank:
                continue
            rank = self.stage_index_to_group_rank[other]
            if self.group is not None:
                rank = dist.get_global_rank(self.group, rank)
            neighbour = Neighbour(self.stage_index, other, rank, self.group, self.device)
            samples = self.samples if side.by_sample and self.has_backward else None
            agree(neighbour, side, compress_in_eval=self.compress_in_eval, step=self._step, samples=samples)

    # ---- versions of PyTorch -----------------------------------------------------------------------------------------

    @property
    def _predates_metadata(self) -> bool:
        """Whether PyTorch's stage keeps tensor metadata as PyTorch 2.11 does; later versions do it differently."""
        return not hasattr(self, "_stage_meta")

    def _metas_of_outputs(self) -> Sequence[Any]:
        """Return shape and dtype of each output."""
        old: Any = self
        return old.get_outputs_meta() if self._predates_metadata else self._stage_meta.outputs or ()

    def _meta_of_gradient(self, number: int) -> Any:
        """Return shape and dtype of an input's gradient; None where the input has none."""
        asked = getattr(self, "_get_grad_send_meta", None)  # since PyTorch 2.13
        if asked is not None:
            return asked(number)
        received = self.args_recv_info[0][number]
        meta = getattr(received, "tensor_meta", None)
        return getattr(received, "buffer", None) if meta is None else meta

    # ---- what a user asks --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, ChannelStats]:
        """Return what this stage sent so far: activations under ``forward``, gradients under ``backward``."""
        found = {}
        for name, side, direction in (("forward", self._behind, 0), ("backward", self._before, 1)):
            found[name] = ChannelStats() if side is None else side.stats(direction)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what this stage's channels keep between two steps; the module's own state is not part of it."""
        return {
            "stage": self.stage_index,
            "step": self._step,
            "before": None if self._before is None else self._before.state_dict(),
            "behind": None if self._behind is None else self._behind.state_dict(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned, bit for bit; call it before the first step, on all ranks.

        Raises:
            ValueError: this is not such a state, or is one of another stage or spec; or steps have been done already.
                Nothing has been changed then.
        """
        if self._agreed:
            raise ValueError(
                "a state must be loaded before its first step, and this stage has done one: make a new CompressedStage"
            )
        sides = {"before": self._before, "behind": self._behind}
        missing = {"step", *sides} - (state.keys() if isinstance(state, Mapping) else set())
        if missing:
            raise ValueError(f"this is not the state of a CompressedStage: it lacks {', '.join(sorted(missing))}")
        if state.get("stage", self.stage_index) != self.stage_index:  # earlier states do not say
            raise ValueError(f"the state is of stage {state['stage']}, but this is stage {self.stage_index}")
        if any((side is None) != (state[name] is None) for name, side in sides.items()):
            raise ValueError(
                "the state is of a stage at another place in the pipeline: it has other neighbours than this stage"
            )
        if type(state["step"]) is not int or state["step"] < -1:
            raise ValueError(f"'step' in the state must be a whole number of at least -1, got {state['step']!r}")
        there = [(side, state[name]) for name, side in sides.items() if side is not None]
        for side, own in there:
            side.check_state(own)
        for side, own in there:
            side.load_state_dict(own)
        self._step = state["step"]


def _is_received(info: Any) -> bool:
    """Whether an input comes from another stage; in PyTorch 2.11, inputs that do not have another class."""
    return not getattr(info, "is_root_arg", False) and getattr(info, "buffer", None) is not None


def _each(specs: Any, number: int, name: str) -> list[Any]:
    """Return one spec for each boundary.

    Raises:
        ValueError: a sequence of another length.
    """
    if isinstance(specs, str) or not isinstance(specs, Sequence):
        return [specs] * number
    if len(specs) != number:
        raise ValueError(f"{name} has {len(specs)} specs, but there are {number} boundaries: give one, or one for each")
    return list(specs)
