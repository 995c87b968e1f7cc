"""Training loops under coded data parallelism that nobody would write in one piece: blocks of any size, few bits,
passes that accumulate, batches that are bad on one rank or on all, passes that one rank does again, Ctrl-C in a step,
and runs that go on from a checkpoint. Whatever happens, ranks have the same bits, which are those of a run that nothing
stopped, gradients are those of the whole mini-batch, and as many bytes are sent as statistics say.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import random
import signal
import threading
import traceback
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from narrowband.coded import parallel
from narrowband.coded.average import BlockAverage
from tests.ranks import run_ranks
from tests.thorough import thorough

STEPS = 9
#: Redundancies and groups, by the number of ranks.
SCHEMES = {2: [(1, 2), (1, 1)], 3: [(1, 3), (2, 3), (1, 1)], 4: [(2, 4), (3, 4), (2, 2), (1, 2)]}


class Net(nn.Module):
    """A model with a scalar, a parameter that is used in some steps only, and one that is frozen."""

    is_shifted = False

    def __init__(self, dropout, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)
        self.gain, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((8,), 0.5), requires_grad=False)
        self.to(dtype)

    def forward(self, x):
        outputs = self.b(self.dropout(self.a(x).tanh()) + self.frozen) * self.gain
        return outputs + self.shift if self.is_shifted else outputs


class TroubleError(Exception):
    """What goes wrong on one rank, and is caught there."""


class Step:
    """What happens in one step, the same on all ranks.

    Attributes:
        batches: features and targets of each pass.
        joint: whether one backward goes through all passes, and exchanges once for each of them.
        is_bad: whether a sample has an inf.
        alone: (rank, pass) whose loss is infinite, on that rank alone.
        more: the rank that does a pass too many.
        trouble: (rank, pass, kind, block): what goes wrong in which block of which pass, before the exchange.
        stop: (rank, when, number of exchanges before): where Ctrl-C is pressed if the step is to be interrupted.
    """

    def __init__(self, program, at):
        self.draw = draw = random.Random(f"{program.seed} {at}")
        world, blocks = dist.get_world_size(), program.model.assignment.blocks
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        sizes = [blocks + draw.choice([0, 1, 2, 5, 17]) for _ in range(draw.choice([1, 1, 2, 3]))]
        self.batches = [tuple(torch.randn(size, k, generator=generator) for k in (6, 3)) for size in sizes]

        def somewhere(share):
            rank, number = draw.randrange(world), draw.randrange(len(sizes))
            return (rank, number) if draw.random() < share else None

        self.joint = draw.random() < 0.15
        self.is_bad = draw.random() < 0.15
        if self.is_bad:
            x, _ = draw.choice(self.batches)
            x[draw.randrange(len(x)), 0] = math.inf
        self.alone = somewhere(0.0 if self.is_bad or self.joint else 0.12)
        self.more = draw.randrange(world) if draw.random() < 0.1 else None
        self.trouble = where = somewhere(0.0 if self.joint else 0.4)
        if where:
            kind = draw.choice(["forward", "backward", "ctrl-c"])
            self.trouble = *where, kind, draw.randrange(program.model.assignment.blocks_per_node)
        self.stop = draw.randrange(world), draw.choice(["before", "within", "after"]), draw.choice([0, 0, 1, 2, 5])


class Program:
    """What one seed makes of a loop: the model, how it is coded, and what happens in each step."""

    def __init__(self, rank, world_size, seed):
        self.rank, self.seed = rank, seed
        draw = random.Random(seed)
        redundancy, group = draw.choice(SCHEMES[world_size])
        self.dtype, self.dropout = draw.choice([*[torch.float32] * 7, torch.bfloat16]), draw.choice([0.0, 0.3])
        self.options = {
            "redundancy": redundancy,
            "group": group,
            "shares": None,
            "transport": draw.choice(["broadcast", "multicast"]),
            "bits": draw.choice([32, 32, 16, 8]),
            "span": draw.choice([None, None, "auto", 1.0, 1e-3]),
            "seed": seed,
        }
        if group > redundancy and draw.random() < 0.4:
            self.options["shares"] = [draw.choice([2.0, 2.5, 3.0]) for _ in range(world_size)]
        survives = self.options["transport"] == "multicast" and redundancy > 1 and draw.random() < 0.5
        if survives:
            self.options |= {"max_failures": 1, "silence_timeout": 100.0, "rejoin_steps": draw.choice([0, 4])}
        self.scaled, self.segment_nbytes = draw.random() < 0.4, draw.choice([40, 100, None])
        # Where a loss is survived, the others would go on without a rank that Ctrl-C stops in an exchange.
        self.stopped_at = draw.randrange(STEPS - 3) if not survives and draw.random() < 0.5 else None
        self.resumed_at = draw.randrange((self.stopped_at or 0) + 2, STEPS) if draw.random() < 0.5 else None
        self.saved, self.records, self.wrong = {}, {}, []
        self.build()

    def build(self):
        average = functools.partial(BlockAverage, segment_nbytes=self.segment_nbytes)
        with patch.object(parallel, "BlockAverage", average):
            self.model = nb.CodedDataParallel(Net(self.dropout, self.dtype), **self.options)
        torch.manual_seed(self.rank)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=self.scaled)
        self.sent, self.stop, self.is_stopped, self.units = 0, None, False, {}
        exchange, run = self.model.transport.exchange, self.model._average._exchange.run

        def counting(*given):
            self.sent += given[0].numel()
            if self.stop is None:
                return exchange(*given)
            when, left = self.stop
            self.stop = (when, left - 1) if left else None
            self.is_stopped = not left
            return exchange(*given) if left else self.interrupted(when, exchange, given)

        def noting(*given):
            average = self.model._average
            self.units[average.step] = average.unit.unit
            return run(*given)

        self.model.transport.exchange, self.model._average._exchange.run = counting, noting

    def interrupted(self, when, exchange, given):
        if when == "within":
            press = threading.Timer(0.001, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
            press.start()
            try:
                exchange(*given)
            finally:
                press.join()
        elif when == "after":
            exchange(*given)
        signal.raise_signal(signal.SIGINT)

    # ---- a run -------------------------------------------------------------------------------------------------------

    def run(self):
        at = 0
        while at < STEPS:
            if at not in self.saved:
                self.save(at)
            if at == self.resumed_at:
                self.resumed_at, at = None, at - 2
                self.resume(at)
            try:
                self.step(at)
            except (KeyboardInterrupt, RuntimeError) as error:
                if self.stopped_at is None or abs(at - self.stopped_at) > 1:  # who has sent all may be a step ahead
                    raise
                traceback.clear_frames(error.__traceback__)
                self.model.transport.close()
                reached = [0] * dist.get_world_size()
                dist.all_gather_object(reached, at)
                self.stopped_at, at = None, max(0, min(reached) - 1)
                self.resume(at)
                continue
            record = self.record()
            if not torch.equal(self.records.setdefault(at, record), record):
                self.wrong.append(f"step {at} has other bits after a checkpoint")
            at += 1
        return self.wrong

    def save(self, at):
        gradients = [p.grad for p in self.model.parameters()]
        states = [each.state_dict() for each in (self.model, self.optimizer, self.scaler)]
        self.saved[at] = copy.deepcopy((states, gradients))

    def resume(self, at):
        self.model.transport.close()
        self.model = self.optimizer = None
        gc.collect()
        self.build()
        states, gradients = copy.deepcopy(self.saved[at])
        for each, state in zip((self.model, self.optimizer, self.scaler), states, strict=True):
            each.load_state_dict(state)
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            p.grad = gradient

    def record(self):
        """Parameters, gradients, and the scale of the loss."""
        parameters = [p.detach() for p in self.model.parameters()]
        gradients = [torch.zeros(0) if p.grad is None else p.grad.nan_to_num(7.0) for p in self.model.parameters()]
        scale = torch.tensor(self.scaler.get_scale() if self.scaled else 1.0)
        return torch.cat([part.flatten().float() for part in (*parameters, *gradients, scale)])

    # ---- a step ------------------------------------------------------------------------------------------------------

    def step(self, at):
        this, model = Step(self, at), self.model
        model.train(this.draw.random() < 0.8)
        model.module.is_shifted = this.draw.random() < 0.5
        self.optimizer.param_groups[0]["lr"] = this.draw.choice([0.05, 0.01])
        if this.draw.random() < 0.3:
            self.do_what_is_no_step()
        if at == self.stopped_at and this.stop[0] == self.rank:
            self.stop = this.stop[1:]
        before = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
        steps, sent, said = model.stats().total.steps, self.sent, ""
        self.units.clear()
        try:
            self.passes(this)
        except RuntimeError as error:
            said = str(error)
            if "hold inf or NaN" not in said and "not in the same step" not in said:
                raise
        self.stop = None
        is_redundant = model.assignment.redundancy > 1
        expected = (
            "not in the same step" if this.more is not None else "hold inf" if this.alone and is_redundant else ""
        )
        if expected not in said or bool(said) != bool(expected):
            self.wrong.append(f"step {at} says {said!r}, not {expected!r}")
        if said:
            self.sent = sent
            model.zero_grad()
            return
        self.wrong += [f"step {at}: {problem}" for problem in self.problems(this, before, steps, sent)]
        self.use(this.draw)

    def do_what_is_no_step(self):
        """What cannot be meant is refused on each rank, and changes nothing; what needs no gradient is no step."""
        assignment = self.model.assignment
        for rows in (0, 1000):
            if rows == 0 or assignment.shares or rows % assignment.blocks_per_node:
                with pytest.raises(ValueError, match="rows, which"):
                    self.model(torch.randn(rows, 6, dtype=self.dtype))
        with pytest.raises(ValueError, match="smaller than the"):
            self.model.split(torch.randn(0, 6))
        with torch.no_grad():
            self.model(torch.randn(7, 6, dtype=self.dtype))

    def passes(self, this):
        """The passes of a step; a rank in trouble does its passes again."""
        done, trouble = False, this.trouble
        while not done:
            try:
                if this.more == self.rank:
                    self.backward([this.batches[0]], this, syncs=False)
                if this.joint:
                    self.backward(this.batches, this)
                for at, batch in enumerate([] if this.joint else this.batches):
                    factor, syncs = math.inf if this.alone == (self.rank, at) else 1.0, at == len(this.batches) - 1
                    if trouble and trouble[:2] == (self.rank, at):
                        (_, _, kind, block), trouble = trouble, None
                        with contextlib.suppress(*[TroubleError] * (kind == "forward")), self.in_trouble(kind, block):
                            self.backward([batch], this, factor, syncs=syncs)
                    self.backward([batch], this, factor, syncs=syncs)
                done = True
            except TroubleError:
                pass
            except KeyboardInterrupt:
                if self.is_stopped:
                    raise

    def backward(self, batches, this, factor=1.0, *, syncs=True):
        with contextlib.nullcontext() if syncs else self.model.no_sync():
            own = [self.model.split(*batch) for batch in batches]
            losses = [nn.functional.mse_loss(self.model(x.to(self.dtype)).float(), y) for x, y in own]
            self.scaler.scale(sum(losses) * factor / len(this.batches)).backward()

    @contextlib.contextmanager
    def in_trouble(self, kind, block):
        """Forward or backward of a block raises, the latter also because of Ctrl-C."""
        calls = []

        def fail(gradient):
            if kind == "ctrl-c":
                signal.raise_signal(signal.SIGINT)
            raise TroubleError

        def check(module, args, output):
            calls.append(output)
            if len(calls) == block + 1:
                fail(None) if kind == "forward" else output.register_hook(fail)

        hook = self.model.module.b.register_forward_hook(check)
        try:
            yield
        finally:
            hook.remove()

    def problems(self, this, before, steps, sent):
        """Yield what is wrong with the gradients and statistics of a step."""
        model, total, last = self.model, self.model.stats().total, self.model.stats().last
        trained = [p for p in model.parameters() if p.requires_grad]
        if total.sent_bytes != self.sent:
            yield f"{total.sent_bytes} bytes counted, {self.sent} sent"
        if total.steps != steps + (len(this.batches) if this.joint else 1):
            yield f"{total.steps} steps counted after {steps}"
        if last.raw_bytes != 4 * sum(p.numel() for p in trained):
            yield f"{last.raw_bytes} raw bytes"
        is_bad = this.is_bad or this.alone is not None
        if not is_bad and not this.joint and last.exchanges == 1 and self.sent - sent != model._average.nbytes:
            yield f"{self.sent - sent} bytes sent, {model._average.nbytes} foretold"
        for p in trained:
            if not (p.grad.isnan() if is_bad else p.grad.isfinite()).all():
                yield "finite or not as it should not be"
        if is_bad or (self.dropout and model.training) or self.dtype != torch.float32:
            return
        plain = copy.deepcopy(model.module).double()
        plain.zero_grad()
        for x, y in this.batches:
            self.scaler.scale(nn.functional.mse_loss(plain(x.double()), y.double()) / len(this.batches)).backward()
        rounding = model.assignment.blocks * sum(self.units.values()) / 2
        for p, q, old in zip(model.parameters(), plain.parameters(), before, strict=True):
            if p.requires_grad:
                expected = old + (0.0 if q.grad is None else q.grad)
                error = float((p.grad - expected).abs().max())
                if error > rounding + 2e-5 * max(1.0, float(expected.abs().max())):
                    yield f"a gradient is off by {error:.2g}, of which {rounding:.2g} may be rounding"

    def use(self, draw):
        is_finite = all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.model.parameters())
        if self.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif is_finite:
            self.optimizer.step()
        how = draw.choice(["model", "optimizer", "zeros", "zeros", "never"])
        if how == "model" or not is_finite:
            self.model.zero_grad()
        elif how != "never":
            self.optimizer.zero_grad(set_to_none=how == "optimizer")


def programs(rank, world_size, seeds):
    """By seed: what is wrong with a program on this rank, and where ranks differ."""
    found = {}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for seed in seeds:
            program = Program(rank, world_size, seed)
            found[seed] = program.run()
            everybody = [None] * world_size
            dist.all_gather_object(everybody, program.records)
            for step, record in program.records.items():
                if not all(torch.equal(record, records[step]) for records in everybody):
                    found[seed].append(f"ranks differ in step {step}")
                if not record.isfinite().all():
                    found[seed].append(f"something is not finite in step {step}")
            program.model.transport.close()
            del program
            gc.collect()
    finally:
        signal.signal(signal.SIGINT, before)
    return found


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [
        (3, range(6)),
        (4, [2, 3]),
        *thorough(*((size, range(at, at + 25)) for size in (2, 3, 4) for at in range(0, 100, 25))),
    ],
)
def test_ranks_have_the_bits_of_a_run_that_nothing_stopped(world_size, seeds):
    for found in run_ranks(programs, world_size, seeds):
        assert {seed: wrong for seed, wrong in found.items() if wrong} == {}
