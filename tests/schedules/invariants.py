"""What always holds, whatever happened to peers: checked after the last round, when all reports are there."""

from __future__ import annotations

import torch

__all__ = ["Ledger"]


class Ledger:
    """All that peers reported.

    Attributes:
        rounds: number of rounds → the parameters and buffers after it, of the first peer that reported them.
    """

    def __init__(self, s):
        self.s = s
        self.rounds = {}
        self.brought = {}  # turn → peer → (round, the view's peers and weights, what the peer brought)
        self.outcomes = {}  # turn → committed
        self.turns = {}  # rounds → turn of the last one
        self.lengths, self.losses = {}, {}
        self.momentum = None
        self.resumed = None  # the round from which all went on after the store had died
        self.generation = 0  # how many stores there were before
        self.problems = []

    def after(self, who, rounds, turn, parameters, buffers, length, loss):
        """A peer has these parameters after a round."""
        self.turns[rounds] = self.generation, turn
        self.lengths[rounds], self.losses[rounds] = length, loss
        own = parameters, buffers
        first, others = self.rounds.setdefault(rounds, (who, own))
        names = ("parameters", "buffers")
        for name, x, y in zip(names, own, others, strict=True):
            if not torch.equal(x, y):
                apart = float((x - y).abs().max())
                self.problems.append(f"after round {rounds} {name} of {who} and {first} are {apart:.3g} apart")

    def brings(self, turn, round_number, peers, who, what):
        self.brought.setdefault((self.generation, turn), {})[who] = round_number, peers, what

    def outcome(self, turn, committed):
        if self.outcomes.setdefault((self.generation, turn), committed) is not committed:
            self.problems.append(f"turn {turn} is committed for some peers, and not for others")

    def cut_off(self, who, rounds, parameters):
        """A peer that lost the store has the parameters of its last round."""
        if rounds in self.rounds and not torch.equal(self.rounds[rounds][1][0], parameters):
            self.problems.append(f"{who} lost the store, and its parameters are not those of round {rounds}")

    def begin_again(self, rounds):
        """All peers go on from their checkpoints of this round."""
        self.check_moves()
        self.momentum = None  # the outer optimizer's is not followed beyond that
        self.generation += 1
        self.resumed = rounds
        for table in (self.rounds, self.turns, self.lengths, self.losses):
            for later in [each for each in table if each > rounds]:
                del table[later]
        self.turns.clear()

    def last_peers(self):
        """The peers that have the parameters of the last round, as far as they live: ``slot.life``."""
        for turn in sorted(self.brought, reverse=True):
            votes = self.brought[turn]
            _, peers, _ = next(iter(votes.values()))
            if turn[0] == self.generation and self.outcomes.get(turn, len(votes) == len(peers)):
                return {name.rpartition("-")[0] for name, _ in peers}
        return set()

    # ---- what is checked ---------------------------------------------------------------------------------------------

    def check(self):
        self.check_moves()
        self.check_residuals()
        first, last = self.losses[min(self.losses)], self.losses[max(self.losses)]
        if not last < first:
            self.problems.append(f"the loss was {first:.4f} after the first round and is {last:.4f} after the last")

    def check_moves(self):
        """Parameters moved in each round by the mean of what its peers brought."""
        nesterov = self.s["outer"] == "nesterov"
        follows = self.generation == 0
        for rounds in sorted(self.turns):
            here = self.brought.get(self.turns[rounds], {})
            if rounds == self.resumed or not here or rounds - 1 not in self.rounds:
                follows = follows and rounds == min(self.turns)
                continue
            peers = next(iter(here.values()))[1]
            lacking = [name for name, _ in peers if name not in here]
            if lacking:
                self.problems.append(f"round {rounds} was committed without the votes of {lacking}")
                continue
            mean = self.mean_of(rounds, peers, here) if sum(weight for _, weight in peers) else None
            before, after = (self.rounds[number][1][0].double() for number in (rounds - 1, rounds))
            moved = after - before
            if nesterov:
                if not follows:
                    continue
                due = torch.zeros_like(moved) if mean is None else self.nesterov(mean)
            else:
                due = torch.zeros_like(moved) if mean is None else self.lengths[rounds] * mean
            error, size = float((moved - due).abs().max()), float(due.abs().max())
            stored = 1e-2 if ":store=" in self.s["spec"] else 1e-4  # residuals are rounded
            if error > 2e-6 + stored * size:
                self.problems.append(
                    f"round {rounds} moved parameters by {float(moved.abs().max()):.3g}, and the mean of what peers "
                    f"brought is {size:.3g}: {error:.3g} apart"
                )

    def mean_of(self, rounds, peers, here):
        total = sum(weight for _, weight in peers)
        mean = torch.zeros(())
        for name, weight in peers:
            _, theirs, what = here[name]
            if theirs != peers:
                self.problems.append(f"round {rounds}: {name} was in another view")
            if weight != what["weight"]:
                self.problems.append(f"round {rounds}: {name} had {what['weight']} steps and was weighted by {weight}")
            share = weight / total
            own = share * what["update"] if weight else torch.zeros(())
            mean = mean + own + (what["before"].double() - what["after"].double()) / len(peers)
        return mean

    def nesterov(self, mean):
        """The step of DiLoCo's outer optimizer: learning rate 0.7, momentum 0.9."""
        self.momentum = -mean if self.momentum is None else 0.9 * self.momentum - mean
        return -0.7 * (-mean + 0.9 * self.momentum)

    def check_residuals(self):
        """What a peer did not send in its last committed round is what it has when the next exchange begins."""
        if self.s["residuals"] == "in-place" or self.s["collective"] == "scatter_reduce":
            return
        kept = {}
        for turn in sorted(self.brought):
            for who, (number, _, what) in self.brought[turn].items():
                if "before" not in what:
                    continue
                if who in kept and kept[who] is not None:
                    apart = float((kept[who] - what["before"]).abs().max())
                    if apart > 1e-6:
                        self.problems.append(f"round {number}: the residuals of {who} changed by {apart:.3g} before it")
                committed = self.outcomes.get(turn)
                if committed:
                    kept[who] = what["after"]
                elif committed is None:
                    kept[who] = None
                else:
                    kept[who] = what["before"]
