"""Wrap a model such that coded data parallelism averages its gradients (algorithm 1 of CSSGD); used like DDP.

Forward cuts the batch into this rank's blocks and runs the module on one block after the other, so that backward can
compute the gradient of each. The r ranks that compute a block must get the same bits. So a block has the same shape on
all of them, the loss is a mean over equally many rows everywhere, and random numbers depend on block and step, not on
the rank. Where a tensor begins in memory may change how it is rounded, and a block lies at different places in
different ranks' batches; so each block gets copies of its rows. (Rows that only repeat a rank's last sample are not
computed, and their outputs are copies without a gradient.)

Backward of the outputs does the exchange: it runs backward of each block, passes the gradients to
:class:`~narrowband.coded.average.BlockAverage`, exchanges, and writes the average into ``.grad``.
"""

from __future__ import annotations

import functools
import hashlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from narrowband import kernels
from narrowband.averaging.agreement import checked_on_all, waiting_for_all
from narrowband.averaging.replicas import check_once
from narrowband.averaging.who import remember_coded, shares_with
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
from narrowband.collectives import borrow, group_or, waiting_in
from narrowband.errors import UnsupportedError
from narrowband.kernels.compiling import announced
from narrowband.stats import Stats
from narrowband.transport import Transport, connect
from narrowband.units import plain_number, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.coded.fixed_point import Span
    from narrowband.collectives import Loan

__all__ = ["CodedDataParallel"]


class CodedDataParallel(nn.Module):
    """Data parallelism in which every block of a mini-batch is computed on ``redundancy`` ranks, and gradients are sent
    in packets that are sums of slices. Averages are exact, to the bit. With multicast, the traffic is (n−r)/((n−1)·r)
    of what it takes to send each block's gradient to each rank separately (Li et al. 2021, CSSGD, DOI
    10.19678/j.issn.1000-3428.0057340).

    Create it on all ranks, from the same model. Then train as with ``DistributedDataParallel``, with batches from
    :meth:`sampler` or :meth:`split`. After backward, ``.grad`` is the average over the mini-batch, the same bits on all
    ranks; zero for a parameter that was not used. Hooks of ``register_post_accumulate_grad_hook`` run then, once per
    exchange. A rank keeps the gradients of its C(g−1, r−1) blocks
    (:class:`Assignment`) until they are sent, each in 4 bytes per parameter, plus ``bits`` bits per parameter.

    Args:
        module: the model. Its outputs have a row for each sample; the loss, a mean over rows, is computed outside of
            it. On CPUs the loss may be cross entropy of classes or squared error. A loss with exponentials or
            logarithms of single elements, such as ``BCEWithLogitsLoss``, must be computed inside: let the model return
            the loss of each sample, and take only ``.mean()`` outside.
        redundancy: number of ranks on which each block is computed, r: 1 ≤ r < n.
        transport: ``multicast``; ``broadcast``, through the process group; ``auto``, multicast if it reaches all ranks,
            else broadcast; or a :class:`~narrowband.transport.Transport`.
        group: number of ranks that share blocks, g: all by default. The ranks of a group of g = r compute the same, and
            send least.
        shares: how much of the work each rank does, in rank order and any unit, such as the samples that it computes in
            a second; by default all do the same. No share may exceed 1/r of the sum (of its group's, with groups).
            Ranks send the same number of bytes whatever their shares, and load the same number of rows.
        bits: bits of a number on the wire: 32; or 16 or 8, which round more but sum as exactly.
        span: the largest magnitude of averages, 10 by default with 32 bits. If a gradient exceeds it, all ranks widen
            the span in the same step, until gradients are small again. ``auto``, the default with fewer bits: as much
            as the last step needed.
        process_group: the ranks; by default all.
        seed: seed of random numbers in the model (dropout).
        max_failures: how many ranks may be lost while the others go on, 0 or 1. 1 requires ``redundancy`` of at least
            2, and multicast. If a rank dies or falls silent, the others exchange the step without it, and take its
            blocks from the other ranks that compute them. They get the same bits as if nothing had happened.
        silence_timeout: with ``max_failures``, the seconds without a sign of life after which a rank that the others
            wait for is lost. A rank that computes gives signs of life; the others wait for it as long as the process
            group would.
        rejoin_steps: with ``max_failures``, the number of steps within which a lost rank whose process is alive may
            return. It gets the averages that it missed, and applies them one after the other in its own training loop,
            with the same bits as all ranks. One of the others keeps these averages meanwhile, in its host's memory, in
            4 bytes per parameter and step. 0: lost ranks never return.

    Raises:
        ValueError: numbers that do not fit together, or ranks that differ in model or arguments.
        UnsupportedError: no process group; a model that cannot be trained this way (BatchNorm, sparse or complex
            gradients, several devices), or that the same ranks average already; or a transport that cannot go on
            without a rank as ``max_failures`` wants.

    Backward raises :class:`~narrowband.transport.RanksLostError` on all ranks if more are lost than ``max_failures``,
    and on a rank that the others have gone on without, once it cannot return.

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

        def prepared() -> tuple[dist.ProcessGroup, torch.device, Assignment, dict[str, Any]]:
            users = group_or(process_group)
            numbers = (("redundancy", redundancy), ("bits", bits), ("seed", seed))
            arguments: dict[str, Any] = {name: whole_number(name, value) for name, value in numbers}
            arguments |= {
                "transport": transport if isinstance(transport, str) else transport.name,
                "group": None if group is None else whole_number("group", group),
                "shares": None if shares is None else tuple(map(plain_number, shares)),
                "span": span,
                "max_failures": max_failures,
                "silence_timeout": silence_timeout,
                "rejoin_steps": rejoin_steps,
            }
            device = check_model(module)
            if shares_with(module):
                raise UnsupportedError(
                    "compress_gradients was called for this model, whose gradients CodedDataParallel averages by "
                    "itself: call the handle's remove() on all ranks first, and send fewer bytes with bits=16 or bits=8"
                )
            check_once(module, users, "compress_updates")  # a model may be wrapped anew
            check_failures(max_failures, silence_timeout, rejoin_steps, arguments["redundancy"], transport)
            size = dist.get_world_size(users)
            chosen = Assignment(size, arguments["redundancy"], arguments["group"] or 0, arguments["shares"] or ())
            return users, device, chosen, arguments

        users, device, assignment, arguments = checked_on_all(
            "CodedDataParallel", [waiting_in(process_group)], prepared
        )
        check_agreement(arguments, module, users)
        bits, seed = arguments["bits"], arguments["seed"]
        self.assignment = assignment
        self.module = module
        self._as_set_up = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        self._trained = [p for _, p, is_trained in self._as_set_up if is_trained]
        named = module.named_modules()
        self._norms = {name: m for name, m in named if isinstance(m, NORMS) and m.track_running_stats}
        self._anchor = torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
        self._seed = seed
        self._syncs = True
        self._forwards = 0  # forward passes since the last step
        self._samples = 0  # of all mini-batches that the gradients of this step come from
        self._lengths: dict[int, int] = {}  # rows of this rank's batches → samples of their mini-batches

        limits: dict[str, Any] = {}
        if max_failures:
            limits = {"max_failures": max_failures, "silence_timeout": silence_timeout, "readmits": rejoin_steps > 0}
        self._rank = dist.get_rank(users)
        # A group of our own, so that the user's collectives do not interleave with our messages.
        loan = borrow(users, device)
        own = loan.hand_over()
        self._followed = loan if isinstance(transport, str) else None  # whose time-out the transport has
        try:
            self.transport = (
                connect(transport, own, loan.timeout, **limits) if isinstance(transport, str) else transport
            )
            self._average = BlockAverage(
                self.assignment,
                self._rank,
                [p.numel() for p in self._trained],
                self.transport,
                bits=bits,
                span=span,
                device=device,
                rejoin_steps=rejoin_steps,
            )
            _warm_up(bits, device, own)
        except BaseException as error:
            loan.broken = not isinstance(error, (ValueError, UnsupportedError))  # these are raised on all ranks
            loan.give_back()
            raise
        weakref.finalize(self, _close, self.transport, loan)
        remember_coded(module, self, users)

    # ---- for the user ------------------------------------------------------------------------------------------------

    def sampler(
        self, dataset: Sized, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> CodedSampler:
        """Return the ``batch_sampler`` of this rank's DataLoader, which yields the rows of this rank's blocks.

        Args:
            dataset: the dataset, the same on all ranks.
            batch_size: samples of a mini-batch, over all ranks; at least the number of blocks.
            shuffle: draw a new order for each epoch (:meth:`CodedSampler.set_epoch`).
            seed: seed of the order.
            drop_last: leave out the last mini-batch if it is smaller.

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
        """Return this rank's rows of a mini-batch that all ranks have. All ranks split the same mini-batches, in the
        same order.

        Args:
            tensors: tensors with one row for each sample, all with the same number of rows.

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
        length = self.assignment.length(samples, self._lengths)
        self._lengths[length] = samples
        rows = self.assignment.rows(self._rank, samples, length)
        return tuple(tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)] for tensor in tensors)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them, until a backward whose forward was outside of this context.

        They are not accumulated in ``.grad``, so ``optimizer.zero_grad()`` does not reset them. To drop them, call
        :meth:`zero_grad` of this module on all ranks. A backward that raises drops them, too.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as every module does, and drop those accumulated in :meth:`no_sync`. After a call on all
        ranks, forward passes that only some of them did make no difference, either.
        """
        self._average.clear()
        self._samples = self._forwards = 0
        super().zero_grad(set_to_none)

    @property
    def lost(self) -> tuple[int, ...]:
        """The lost rank that the others go on without; empty while all ranks take part."""
        return self.transport.lost

    def stats(self) -> Stats[CodedStepStats]:
        """Return bytes and seconds, in total and of the last step."""
        return Stats(replace(self._average.total), replace(self._average.last))

    def get_extra_state(self) -> dict[str, Any]:
        """Return the part of :meth:`state_dict` that makes a resumed run end with the same bits; equal on all ranks."""
        return {
            **self._average.state_dict(),
            "assignment": str(self.assignment),
            "lengths": dict(self._lengths),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the part that :meth:`get_extra_state` returned; :meth:`load_state_dict` calls this. If the assignment or
        the number of bits has changed, the unit is not restored.

        Raises:
            ValueError: ``state`` is no such part. Nothing has changed then.
        """
        check_extra_state(state)
        same = state["assignment"] == str(self.assignment)
        self._average.load_state_dict(state, same_assignment=same)
        for length, samples in state["lengths"].items() if same else ():
            self._lengths.setdefault(length, samples)

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for all rows of this rank. Without gradients (``torch.no_grad()``) the module is
        called directly, with any batch. If neither :meth:`split` nor :meth:`sampler` chose the rows, each row counts as
        a sample.

        Raises:
            ValueError: the rows are not this rank's blocks.
            UnsupportedError: outputs without a row for each sample, or parameters that were frozen or thawed after the
                model was wrapped.
        """
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        for name, norm in self._norms.items():
            if norm.training:  # was in eval mode at set-up, but model.train() has changed that
                raise UnsupportedError(no_batch_norm(name, norm))
        changed = [name for name, p, was_trained in self._as_set_up if p.requires_grad != was_trained]
        if changed:
            raise UnsupportedError(other_parameters(changed))
        leaves = tree_flatten((args, kwargs))[0]
        rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 0)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise UnsupportedError(
                "an input requires a gradient, which would be lost when it is cut into blocks; compute it inside of "
                "the wrapped module, or detach it"
            )
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
        """Return the number of samples of the mini-batch of which this rank has ``rows`` rows."""
        if rows in self._lengths:
            return self._lengths[rows]
        blocks = self.assignment.blocks_per_node
        if self.assignment.shares or rows == 0 or rows % blocks:
            even = f"cannot be cut into {blocks} blocks of equal size"
            why = "are not this rank's part of a mini-batch" if self.assignment.shares else even
            raise ValueError(
                f"the batch has {rows} rows, which {why}: take batches from "
                "model.sampler(...) or model.split(...), and evaluate under torch.no_grad()"
            )
        return rows // blocks * self.assignment.blocks

    @contextmanager
    def _randomness_of(self, block: int) -> Iterator[None]:
        """Seed random numbers such that they are the same on all ranks that compute this block. The user's generators
        are restored afterwards.
        """
        device = self._anchor.device
        what = f"{self._seed} {self._average.step} {self._forwards} {block}"
        seed = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little") >> 1
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _finish(self, samples: int, *, syncs: bool) -> None:
        """Called when a backward is complete: exchange, unless gradients are accumulated further."""
        self._samples += samples
        if not syncs:
            return
        if self._followed is not None and self._followed.follow() and self._followed.timeout is not None:
            self.transport.wait_at_most(self._followed.timeout)
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
            hooks: dict[int, Callable[[Tensor], None]] | None = getattr(p, "_post_accumulate_grad_hooks", None)
            for hook in tuple((hooks or {}).values()):  # autograd calls them where it accumulates, and here we do
                hook(p)

    def _drop(self) -> None:
        """Called when a backward has raised: drop all that was computed for this step."""
        self._average.clear()
        self._samples = self._forwards = 0


def _close(transport: Transport, loan: Loan) -> None:
    transport.close()
    loan.give_back()


def _warm_up(bits: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Compile or load every kernel now, on rank 0 first, so that the other ranks find what it compiled."""
    rank = dist.get_rank(group)
    for turn in (True, False):
        if turn == (rank == 0):
            with announced(f"coded data parallelism in {bits} bits", say=rank == 0):
                _use_once(bits, device)
        with waiting_for_all("CodedDataParallel"):
            dist.barrier(group)


def _use_once(bits: int, device: torch.device) -> None:
    x, total = torch.ones(8, dtype=torch.float32, device=device), torch.zeros(8, dtype=torch.int32, device=device)
    codes = torch.empty(8, dtype=DTYPES[bits], device=device)
    kernels.fixed_quantize(x, codes, 1.0, 100)
    for out in (codes[:4], total[:4]):
        kernels.fixed_sum(codes, [4], out)
    kernels.fixed_decode(codes[:4], codes, [4], total[:4])
    kernels.fixed_dequantize(total, x, math.ldexp(1.0, -4))
