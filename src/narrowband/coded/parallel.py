"""A model whose gradients are averaged by coded data parallelism (algorithm 1 of CSSGD), used like DDP.

Forward cuts the batch into this rank's blocks and runs the module on one block after the other, so that backward can
ask for the gradient of each. The r ranks that compute a block have to find the same bits. So a block has the same shape
on all of them, the loss is a mean over equally many rows everywhere, and random numbers come from block and step, not
from the rank. Where a tensor begins in memory may change how it is rounded, and a block is at another place in each
rank's batch: so a block gets copies of its rows. (Rows that only repeat a rank's last sample are not computed, and
their outputs are copies without a gradient.)

Backward of the outputs is where the step happens: it runs backward of each block, hands the gradients to
:class:`~narrowband.coded.average.BlockAverage`, exchanges, and writes the average into ``.grad``.
"""

from __future__ import annotations

import functools
import hashlib
import math
import weakref
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from narrowband import kernels
from narrowband.coded.assignment import Assignment, CodedSampler
from narrowband.coded.average import BlockAverage
from narrowband.coded.blocks import Run
from narrowband.coded.checks import (
    NORMS,
    check_agreement,
    check_extra_state,
    check_failures,
    check_model,
    no_batch_norm,
    other_parameters,
)
from narrowband.coded.fixed_point import DTYPES
from narrowband.coded.stats import CodedStepStats
from narrowband.collectives import new_group
from narrowband.errors import UnsupportedError
from narrowband.kernels.compiling import announced
from narrowband.stats import Stats
from narrowband.transport import Transport, connect
from narrowband.units import plain_number, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.coded.fixed_point import Span

__all__ = ["CodedDataParallel"]


class CodedDataParallel(nn.Module):
    """Data parallelism in which every block of a mini-batch is computed on ``redundancy`` ranks, and packets that are
    sums of slices move the gradients: exact, to the bit, and, with multicast, (n−r)/((n−1)·r) of the traffic of each
    block's gradient going to each rank by itself (Li et al. 2021, CSSGD, DOI 10.19678/j.issn.1000-3428.0057340).

    Make it on all ranks, from the same model; then train as with ``DistributedDataParallel``, from :meth:`sampler` or
    :meth:`split`. After backward, ``.grad`` is the average over the mini-batch, the same bits on all ranks; zero where
    a parameter was not used. A rank keeps the gradients of its C(g−1, r−1) blocks (:class:`Assignment`) until they are
    sent, in 4 bytes per parameter and ``bits`` on top.

    Args:
        module: the model. Its outputs have a row for each sample; the loss, a mean over rows, is outside of it. On CPUs
            that may be cross entropy of classes or squared error. What computes exponentials or logarithms of single
            elements, such as ``BCEWithLogitsLoss``, goes inside: a model that returns the loss of each sample, and
            outside only ``.mean()``.
        redundancy: on how many ranks each block is computed, r: 1 ≤ r < n.
        transport: ``multicast``; ``broadcast``, through the process group; ``auto``, multicast if it reaches all ranks,
            else broadcast; or a :class:`~narrowband.transport.Transport`.
        group: how many ranks share blocks, g: all by default. Groups of g = r compute the same and send least.
        shares: how much of the work each rank does, in rank order and any unit, such as the samples that it computes in
            a second; by default all do the same. No share may exceed 1/r of the sum (of its group's, with groups).
            Ranks send the same number of bytes whatever their shares, and load the same number of rows.
        bits: of a number on the wire: 32, or 16 or 8, which round more and sum as exactly.
        span: the largest magnitude of averages, 10 by default with 32 bits. If a gradient exceeds it, all ranks widen
            it in the same step, until gradients are small again. ``auto``, the default with fewer bits: as much as the
            last step needed.
        process_group: the ranks; by default all.
        seed: of random numbers in the model (dropout).
        max_failures: how many ranks may be lost while the others go on, 0 or 1. One takes ``redundancy`` 2 or more, and
            multicast: when a rank dies or falls silent, the others exchange the step without it, and compute what it
            would have, since all its blocks are on other ranks, too. They get the same bits as if nothing had happened.
        silence_timeout: with ``max_failures``, after so many seconds without a sign of life a rank that is waited for
            is lost. A rank that computes gives signs of life; that one is waited for as long as the process group
            would.
        rejoin_steps: with ``max_failures``, for so many steps a lost rank whose process lives may return: it is given
            the averages that it missed and applies one after the other in its own training loop, with the same bits as
            all. One of the others keeps them meanwhile, in 4 bytes per parameter and step of its host's memory. 0:
            never.

    Raises:
        ValueError: numbers that do not fit together, or ranks that differ in model or arguments.
        UnsupportedError: no process group, or a model that cannot be trained this way (BatchNorm, sparse or complex
            gradients, several devices), or a transport that cannot go on without a rank, but should.

    Backward raises :class:`~narrowband.transport.RanksLostError` on all ranks where more are lost than ``max_failures``
    says, and on a rank that the others have gone on without, once it cannot return.

    Example:
        >>> model = nb.CodedDataParallel(net, redundancy=2)
        >>> sampler = model.sampler(dataset, batch_size=256)
        >>> for x, y in DataLoader(dataset, batch_sampler=sampler):
        ...     optimizer.zero_grad()
        ...     loss(model(x), y).backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        redundancy: int = 2,
        transport: str | Transport = "auto",
        *,
        group: int | None = None,
        shares: Sequence[float] | None = None,
        bits: int = 32,
        span: Span | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        max_failures: int = 0,
        silence_timeout: float = 30.0,
        rejoin_steps: int = 16,
    ) -> None:
        super().__init__()
        if not dist.is_available() or not dist.is_initialized():
            raise UnsupportedError("no process group: call torch.distributed.init_process_group(...) first")
        users = process_group or dist.group.WORLD
        redundancy, bits, seed = (
            whole_number(name, value) for name, value in (("redundancy", redundancy), ("bits", bits), ("seed", seed))
        )
        group = None if group is None else whole_number("group", group)
        shares = None if shares is None else tuple(map(plain_number, shares))
        arguments = {
            "redundancy": redundancy,
            "transport": transport if isinstance(transport, str) else transport.name,
            "group": group,
            "shares": shares,
            "bits": bits,
            "span": span,
            "seed": seed,
            "max_failures": max_failures,
            "silence_timeout": silence_timeout,
            "rejoin_steps": rejoin_steps,
        }
        check_agreement(arguments, module, cast("dist.ProcessGroup", users))
        device = check_model(module)
        ranks = dist.get_process_group_ranks(users)
        self.assignment = Assignment(len(ranks), redundancy, group or 0, shares or ())
        check_failures(max_failures, silence_timeout, rejoin_steps, redundancy, transport)
        self.module = module
        self._as_set_up = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        self._trained = [p for _, p, is_trained in self._as_set_up if is_trained]
        named = module.named_modules()
        self._norms = {name: m for name, m in named if isinstance(m, NORMS) and m.track_running_stats}
        self._anchor = torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
        self._seed = seed
        self._syncs = True
        self._forwards = 0  # since the last step
        self._samples = 0  # of all mini-batches that the gradients of this step come from
        self._lengths: dict[int, int] = {}  # rows of this rank's batches → samples of their mini-batches

        # A group of our own: nothing of the user's may slip between our messages.
        timeout = _timeout_of(users, device)
        own = new_group(ranks, cast("dist.ProcessGroup", users), timeout)
        self._rank = dist.get_rank(own)
        limits: dict[str, Any] = {}
        if max_failures:
            limits = {"max_failures": max_failures, "silence_timeout": silence_timeout, "readmits": rejoin_steps > 0}
        self.transport = connect(transport, own, timeout, **limits) if isinstance(transport, str) else transport
        weakref.finalize(self, self.transport.close)
        numels = [p.numel() for p in self._trained]
        self._average = BlockAverage(
            self.assignment,
            self._rank,
            numels,
            self.transport,
            bits=bits,
            span=span,
            device=device,
            rejoin_steps=rejoin_steps,
        )
        _warm_up(bits, device, own)

    # ---- for the user ------------------------------------------------------------------------------------------------

    def sampler(
        self, dataset: Sized, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> CodedSampler:
        """The ``batch_sampler`` of this rank's DataLoader: of each mini-batch the rows of this rank's blocks.

        Args:
            dataset: the same on all ranks.
            batch_size: samples of a mini-batch, over all ranks; any number from the number of blocks on.
            shuffle: draw a new order for each epoch (:meth:`CodedSampler.set_epoch`).
            seed: of the order.
            drop_last: leave out the last mini-batch where it is smaller.

        Raises:
            ValueError: a mini-batch with fewer samples than there are blocks.
        """
        return CodedSampler(
            dataset,
            batch_size,
            self.assignment,
            self._rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            lengths=self._lengths,
        )

    def split(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """This rank's rows of a mini-batch that all ranks have. All ranks split the same ones, in the same order.

        Args:
            tensors: with a row for each sample, and equally many.

        Raises:
            ValueError: tensors of different lengths, or fewer samples than there are blocks.

        Example:
            >>> x, y = model.split(x, y)
            >>> loss(model(x), y).backward()
        """
        lengths = {tensor.shape[0] for tensor in tensors}
        if len(lengths) != 1:
            raise ValueError(f"split takes tensors with equally many rows, not {sorted(lengths)}")
        samples = lengths.pop()
        rows = self.assignment.rows(self._rank, samples, self.assignment.length(samples, self._lengths))
        return tuple(tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)] for tensor in tensors)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """What is computed inside is not exchanged: gradients add up until a backward whose forward was outside.

        They do so beside ``.grad``, where ``optimizer.zero_grad()`` does not find them. To do without them, call
        :meth:`zero_grad` of this module on all ranks. A backward that raises drops them, too.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every module; and what has added up in :meth:`no_sync` is dropped."""
        self._average.clear()
        self._samples = 0
        super().zero_grad(set_to_none)

    @property
    def lost(self) -> tuple[int, ...]:
        """The rank that the others, and so this one, go on without; empty as long as, and as soon as, all are there."""
        return self.transport.lost

    def stats(self) -> Stats[CodedStepStats]:
        """Bytes and seconds: in total, and of the last step."""
        return Stats(replace(self._average.total), replace(self._average.last))

    def get_extra_state(self) -> dict[str, Any]:
        """Part of :meth:`state_dict`: with it, a resumed run ends with the same bits. The same on all ranks."""
        return {
            **self._average.state_dict(),
            "assignment": str(self.assignment),
            "lengths": dict(self._lengths),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Part of :meth:`load_state_dict`. Where the number of ranks or bits has changed, the span begins anew.

        Raises:
            ValueError: it is no such part. Nothing has changed then.
        """
        check_extra_state(state)
        same = state["assignment"] == str(self.assignment)
        self._average.load_state_dict(state, same_assignment=same)
        for length, samples in state["lengths"].items() if same else ():
            self._lengths.setdefault(length, samples)

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs, for all rows of this rank. Without gradients (``torch.no_grad()``) the module is called
        as it is, with any batch. Of rows that neither :meth:`split` nor :meth:`sampler` chose, each counts as a sample.

        Raises:
            ValueError: rows that are not this rank's blocks.
            UnsupportedError: outputs without a row for each sample, or parameters that were frozen or thawed after the
                model was wrapped.
        """
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        for name, norm in self._norms.items():
            if norm.training:  # frozen before, and woken by model.train()
                raise UnsupportedError(no_batch_norm(name, norm))
        changed = [name for name, p, was_trained in self._as_set_up if p.requires_grad != was_trained]
        if changed:
            raise UnsupportedError(other_parameters(changed))
        leaves = tree_flatten((args, kwargs))[0]
        rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 0)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise UnsupportedError("inputs that want gradients cannot be cut into blocks; move what makes them inside")
        samples = self._samples_of(rows)
        finish = functools.partial(self._finish, samples, syncs=self._syncs)
        run = Run(self._trained, self._average, samples, rows, finish, self._drop)
        sizes, end = self.assignment.sizes(samples), 0
        for block in self.assignment.held(self._rank):
            part, end = slice(end, end + sizes[block]), end + sizes[block]

            def cut(leaf: Any, part: slice = part) -> Any:
                is_batch = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == rows
                return leaf[part].clone() if is_batch else leaf

            own_args, own_kwargs = tree_map(cut, (args, kwargs))
            with self._randomness_of(block):
                run.add(self.module(*own_args, **own_kwargs), sizes[block])
        self._forwards += 1
        return run.outputs(self._anchor)

    def _samples_of(self, rows: int) -> int:
        """Samples of the mini-batch of which this rank has so many rows."""
        if rows in self._lengths:
            return self._lengths[rows]
        blocks = self.assignment.blocks_per_node
        if self.assignment.shares or rows == 0 or rows % blocks:
            of_blocks = "those of a mini-batch" if self.assignment.shares else f"{blocks} blocks of equally many"
            raise ValueError(
                f"the batch has {rows} rows, which are not {of_blocks}: take batches from model.sampler(...) or "
                "model.split(...), and evaluate under torch.no_grad()"
            )
        return rows // blocks * self.assignment.blocks

    @contextmanager
    def _randomness_of(self, block: int) -> Iterator[None]:
        """Random numbers that are the same wherever this block is computed, and leave the user's own as they were."""
        device = self._anchor.device
        what = f"{self._seed} {self._average.step} {self._forwards} {block}"
        seed = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little") >> 1
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _finish(self, samples: int, *, syncs: bool) -> None:
        """A backward is complete: exchange, unless gradients are to add up further."""
        self._samples += samples
        if not syncs:
            return
        average = self._average.average(self._samples)
        self._samples = self._forwards = 0
        begin = 0
        for p in self._trained:
            part = average[begin : begin + p.numel()].view(p.shape).to(p.dtype)
            begin += p.numel()
            if p.grad is None:
                p.grad = part
            else:
                p.grad += part

    def _drop(self) -> None:
        """A backward has raised: the next step begins without what was computed for this one."""
        self._average.clear()
        self._samples = self._forwards = 0


def _warm_up(bits: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Have every loop compiled or loaded now, on one rank first, so that the others find what it compiled."""
    rank = dist.get_rank(group)
    for turn in (True, False):
        if turn == (rank == 0):
            with announced(f"coded data parallelism in {bits} bits", say=rank == 0):
                _use_once(bits, device)
        dist.barrier(group)


def _use_once(bits: int, device: torch.device) -> None:
    x, total = torch.ones(8, dtype=torch.float32, device=device), torch.zeros(8, dtype=torch.int32, device=device)
    codes = torch.empty(8, dtype=DTYPES[bits], device=device)
    kernels.fixed_quantize(x, codes, 1.0, 100)
    for out in (codes[:4], total[:4]):
        kernels.fixed_sum(codes, [4], out)
    kernels.fixed_decode(codes[:4], codes, [4], total[:4])
    kernels.fixed_dequantize(total, x, math.ldexp(1.0, -4))


def _timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """Our group waits as long as the user's does."""
    try:
        options = cast("dist.ProcessGroup", group)._get_backend(device).options
    except (RuntimeError, AttributeError):  # a backend without options
        return None
    return cast("timedelta | None", getattr(options, "_timeout", None))
