"""Parts of a model, and schedules that train them."""

from __future__ import annotations

import torch
from torch import nn

MICROBATCHES = 4


BATCH = 8


STEPS = 4


CPU = torch.device("cpu")


def parts(number):
    """A model in so many parts."""
    torch.manual_seed(0)
    later = (nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)) for _ in range(number - 1))
    return [nn.Linear(10, 24), *later]


def batch(step, size=BATCH):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 10, generator=generator), torch.randn(size, 24, generator=generator)


def ids(step):
    """An epoch of two steps, in another order every time."""
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(step // 2))
    return order + BATCH * (step % 2)


def loss_fn(output, target):
    return (output - target).square().mean()


def schedule_of(name, stages, microbatches=MICROBATCHES):
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(name)
    given = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(given, microbatches, loss_fn=loss_fn)


def run_step(schedule, stages, x, y, train=True):
    """One step of the schedule; on the last stage's rank, a loss for every micro-batch."""
    losses = []
    arguments = [x] if any(stage.is_first for stage in stages) else []
    last = {"target": y, "losses": losses} if any(stage.is_last for stage in stages) else {}
    if train:
        schedule.step(*arguments, **last)
    else:
        with torch.no_grad():
            schedule.eval(*arguments, **last)
    return [loss.item() for loss in losses]
