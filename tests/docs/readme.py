"""What a reader of README.md has: a model, an optimizer, batches and a loss, in a script that ``torchrun`` starts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel  # noqa: F401  the pages' blocks use it

import narrowband as nb  # noqa: F401

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = nn.CrossEntropyLoss()
batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(10)]
x, y = batches[0]
