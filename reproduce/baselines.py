"""What CSSGD's paper compares it with, as plainly as it can be done: synchronous SGD, and SGD with a parameter server.

* :class:`SSGD`: every node adds up the gradient of its share of the mini-batch, sends it to all others as it is, and
  averages what it has. The transport says whether a gradient leaves its node once (multicast) or n − 1 times (unicast).
* :func:`serve` and :func:`work`, together ASGD (Dean et al. 2012, *Large scale distributed deep networks*): one node
  more, the server, has the parameters. Workers get them, compute the gradient of a share, send it, and get the
  parameters as they are by then. Nobody waits for another worker, and gradients are applied as they arrive, whatever
  the parameters were that they were computed with.

Both work on a model whose parameters are one flat vector (:class:`Flat`), and use plain SGD, as the paper does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowband.transport import Transport

__all__ = ["SSGD", "Flat", "serve", "work"]

#: What a server tells a worker before the parameters, or instead of them.
_GO_ON, _STOP = 1, 0


class Flat:
    """A model's parameters and their gradients, each as one vector that the model's own tensors are views of.

    Args:
        model: float32, all of whose parameters are trained.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.weights = torch.cat([p.detach().flatten() for p in parameters])
        self.gradient = torch.zeros_like(self.weights)
        begin = 0
        for p in parameters:
            part = slice(begin, begin + p.numel())
            p.data, p.grad = self.weights[part].view(p.shape), self.gradient[part].view(p.shape)
            begin += p.numel()

    def descend(self, lr: float, gradient: Tensor | None = None) -> None:
        """A step of SGD, along the own gradient or another."""
        self.weights.add_(self.gradient if gradient is None else gradient, alpha=-lr)


class SSGD:
    """Gradients of all nodes, from each to all, and their mean: the same bits on all nodes.

    Args:
        flat: this node's model.
        transport: to the other nodes.
        rank: of this node.
        world_size: how many there are.
    """

    def __init__(self, flat: Flat, transport: Transport, rank: int, world_size: int) -> None:
        self._flat, self._transport = flat, transport
        self._gradients = torch.empty(world_size, flat.gradient.numel())
        self._own = self._gradients[rank]
        rows = [row.view(torch.uint8) for row in self._gradients]
        self._outgoing = rows[rank]
        self._incoming = [None if node == rank else row for node, row in enumerate(rows)]
        self._wanted = [[] if row is None else [(0, row.numel())] for row in self._incoming]

    def average(self) -> None:
        """Make of this node's gradient the mean of all nodes'. All call it in the same step."""
        self._own.copy_(self._flat.gradient)
        self._transport.exchange(self._outgoing, self._incoming, self._wanted)
        torch.mean(self._gradients, dim=0, out=self._flat.gradient)


def serve(weights: Tensor, workers: list[int], updates: int, lr: float, on_update: Callable[[int], None]) -> None:
    """Be the parameter server until so many gradients have been applied, and every worker knows that it is over.

    Args:
        weights: flat; changed in place.
        workers: their ranks.
        updates: how many gradients are applied.
        lr: of each gradient.
        on_update: called after each with how many have been, while no other is applied.

    Raises:
        RuntimeError: a worker is lost.
    """
    lock = threading.Lock()
    handed_out = applied = 0
    errors: list[Exception] = []

    def attend(worker: int) -> None:
        nonlocal handed_out, applied
        received = torch.empty_like(weights)
        try:
            while True:
                with lock:
                    goes_on = handed_out < updates and not errors
                    handed_out += goes_on
                    copy = weights.clone() if goes_on else None
                dist.send(torch.tensor([_STOP if copy is None else _GO_ON]), worker)
                if copy is None:
                    return
                dist.send(copy, worker)
                dist.recv(received, worker)
                with lock:
                    weights.add_(received, alpha=-lr)
                    applied += 1
                    on_update(applied)
        except Exception as error:
            errors.append(error)

    # A thread for each worker, so that parameters go to one while gradients come from another.
    threads = [threading.Thread(target=attend, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def work(flat: Flat, server: int, compute: Callable[[], None]) -> int:
    """Be a worker until the server has enough.

    Args:
        flat: this worker's model; its weights are the server's.
        server: its rank.
        compute: leaves the gradient of the next share in ``flat``.

    Returns:
        How many gradients were sent.
    """
    told = torch.empty(1, dtype=torch.int64)
    sent = 0
    while True:
        dist.recv(told, server)
        if int(told) == _STOP:
            return sent
        dist.recv(flat.weights, server)
        compute()
        dist.send(flat.gradient, server)
        sent += 1
