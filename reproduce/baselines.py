"""The baselines of CSSGD's paper, as simple as possible: synchronous SGD, and asynchronous SGD with a parameter server.

* :class:`SSGD`: every node computes the gradient of its share of the mini-batch, sends it uncompressed to all others,
  and averages all gradients. The transport decides whether a gradient leaves its node once (multicast) or n − 1 times
  (unicast).
* :func:`serve` and :func:`work` together are ASGD (Dean et al. 2012, *Large scale distributed deep networks*). One
  additional node, the server, holds the parameters. A worker gets the parameters, computes the gradient of a share,
  sends it, and gets the parameters that are current by then. No worker waits for another. The server applies gradients
  as they arrive, however old the parameters are that they were computed with.

Both use a model whose parameters are one flat vector (:class:`Flat`), and plain SGD, as the paper does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowband.transport import Transport

__all__ = ["SSGD", "Flat", "serve", "work"]

#: What the server sends a worker: ``_GO_ON`` before the parameters, or ``_STOP`` instead of them.
_GO_ON, _STOP = 1, 0


class Flat:
    """A model's parameters in one flat vector, its gradients in another; the model's tensors become views of these.

    Args:
        model: a float32 model; all of its parameters are trained.
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

    def descend(self, lr: float) -> None:
        """Take a step of SGD along the gradient."""
        self.weights.add_(self.gradient, alpha=-lr)


class SSGD:
    """Synchronous SGD: every node sends its gradient to all others, and all compute the same mean, bit for bit.

    Args:
        flat: this node's model.
        transport: connects this node to the others.
        rank: this node's rank.
        world_size: number of nodes.
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
        """Replace this node's gradient by the mean over all nodes. Collective: all nodes call it in the same step."""
        self._own.copy_(self._flat.gradient)
        self._transport.exchange(self._outgoing, self._incoming, self._wanted)
        torch.mean(self._gradients, dim=0, out=self._flat.gradient)


def serve(weights: Tensor, workers: list[int], updates: int, lr: float, on_update: Callable[[int], None]) -> None:
    """Run the parameter server until ``updates`` gradients have been applied and every worker was told to stop.

    Args:
        weights: the flat parameters; changed in place.
        workers: ranks of the workers.
        updates: number of gradients to apply.
        lr: learning rate of each gradient.
        on_update: called after each gradient with the number applied so far; no other is applied meanwhile.

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

    # One thread per worker, so that parameters can go to one worker while a gradient comes from another.
    threads = [threading.Thread(target=attend, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def work(flat: Flat, server: int, compute: Callable[[], None]) -> int:
    """Run a worker until the server says stop.

    Args:
        flat: this worker's model; its weights are overwritten by the server's.
        server: rank of the server.
        compute: computes the gradient of the next share and leaves it in ``flat``.

    Returns:
        The number of gradients sent.
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
