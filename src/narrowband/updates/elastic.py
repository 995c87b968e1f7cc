"""Rounds of updates among peers that come and go.

Peers meet before each round, and agree on which peers take part and whether the round is committed
(:mod:`narrowband.updates.rendezvous`). A peer that dies, freezes or is late is left out, and the others go on. A peer
that is new or returns gets the parameters, bit for bit, from a peer that has them, and takes part in the same round.
Buffers that are not averaged are each peer's own: only a new peer gets them.

Copies of updates and residuals are kept until all peers have voted. If the exchange breaks off, the copies are
restored, and the round is held again among the remaining peers. So a broken round loses no part of an update, and no
update is applied twice. A peer that was left out contributes its update in the round in which it returns.

The mean is weighted by what each peer has done since it was last in a round (:mod:`narrowband.updates.weights`). A peer
that has just come has weight 0; :mod:`narrowband.updates.newcomers` says what it must have in common with the others.
:mod:`narrowband.updates.connections` connects the peers of a round, and says how long an exchange may take.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from narrowband.averaging.state import check_state, kept
from narrowband.averaging.warmup import warm_up_alone
from narrowband.errors import DisagreementError, UnsupportedError
from narrowband.kernels.compiling import announced
from narrowband.updates.changed import Changes, all_or_none
from narrowband.updates.connections import Connections
from narrowband.updates.fragments import compile_loops
from narrowband.updates.newcomers import copy_from_the_first, digest, facts_of_peer
from narrowband.updates.rendezvous import Meeting, Rendezvous, RendezvousError, View
from narrowband.updates.rounds import UpdateCompression
from narrowband.updates.weights import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from narrowband.averaging.agreement import Facts
    from narrowband.averaging.settings import Settings
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression, Method
    from narrowband.updates.fragments import Fragment
    from narrowband.updates.settings import Rounds

__all__ = ["ElasticUpdateCompression"]

log = logging.getLogger(__name__)

#: The value of ``every`` for rounds that are due by time instead of steps.
_MANY = 1 << 40


class ElasticUpdateCompression(UpdateCompression):
    """The handle of :func:`compress_updates` with ``peers=``.

    Attributes:
        peers: names of the peers that took part in the last round.
    """

    _compares_updates = False  # a peer that comes later knows not whether the others have
    _error_level = logging.DEBUG  # what breaks off is held again, and a warning says so

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        rendezvous: Rendezvous,
        rounds: Rounds,
    ) -> None:
        # Steps, or seconds as a float.
        self._period_s = rounds.every if isinstance(rounds.every, float) else None
        steps = rounds.every if isinstance(rounds.every, int) else _MANY
        self._rules = rendezvous
        self._connections, self._linked = Connections(rendezvous), False
        self._weight = Weight(rounds.weigh)
        self._changes = Changes()
        self._round = -1  # number of commits since the peers' run began in the store; -1: not in a round yet
        self._has_its_round = True  # whether the parameters are those of `_round`: no later round was left midway
        # The round that this peer is in, how to undo its exchange, and whether it had its parameters before, until the
        # peer has learned the outcome.
        self._unsettled: tuple[View, Callable[[], None], bool] | None = None
        self._rounds_before = 0  # rounds of the run before, from which a state was loaded
        self.peers: tuple[str, ...] = ()
        facts = facts_of_peer(model, optimizers, settings, rounds)
        self._meeting = Meeting(rendezvous, rendezvous.connect(), facts, self._hang_up)
        with announced("updates"):  # before this peer arrives, since others wait for it from then on
            device = next(p.device for p in model.parameters() if p.requires_grad)
            warm_up_alone(settings, device, self._meeting.told_specs())
            compile_loops(device)

        def begin(view: View) -> None:
            group = self._open(view)
            super(ElasticUpdateCompression, self).__init__(
                model, optimizers, settings, group, replace(rounds, every=steps)
            )
            if rounds.weigh != "steps":
                self._stepping.before_first(self._weight.check)
            self._share(view)

        self._hold(0.0, begin, lambda: self._let_go() if "_stepping" in vars(self) else None)
        self._whole.keep(self._averaged.tensors(), parameters=False)
        self._changes.begin(self._averaged)
        self._held_at = time.monotonic()

    # ---- rounds ------------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Number of rounds that the run has applied, as far as this peer knows. If the run began from checkpoints, the
        rounds of the run before are included.
        """
        return self._round + self._rounds_before

    def count(self, number: float) -> None:
        """Add to the weight of this peer's next update, in the unit of ``weigh=``. Call it before every optimizer step;
        with gradient accumulation, once per batch.

        Args:
            number: number of tokens, samples, or whatever all peers count; 0 if a step has learned from none.

        Raises:
            ValueError: peers are weighted by steps, or ``number`` is negative or not finite. Nothing has changed then.

        Example:
            >>> handle = nb.compress_updates(model, optimizer, "none", every=50, peers=peers, weigh="tokens")
            >>> handle.count(batch.numel())
            >>> optimizer.step()
        """
        self._weight.add(number)

    def _after_step(self) -> None:
        self._weight.stepped()
        super()._after_step()

    @torch.no_grad()
    def average(self) -> None:
        """Hold a round now, among the peers that are there. It happens automatically after every ``every``-th step.

        If no peer has taken a step since it was last in a round, the parameters stay as they are.

        Raises:
            RendezvousError: the store does not answer, or no round was held for ``patience_s``. The parameters are then
                those of the last round, and this handle cannot be used any more.
            DisagreementError: peers are about to do different things, or differ. If only some peers have changed their
                parameters since the last round otherwise than by steps, only the fewer get the error: these or the
                others.
        """
        self._check_between_steps("average")
        self._before_step(stepping=False)
        self._changes.end()  # until this round is over
        tensors = self._averaged.tensors()
        weight = self._weight.of(self._steps)
        self._steps, self._weight.counted = 0, 0.0
        # Otherwise Ctrl-C came in the last round before they were copied, and this peer's buffers must become the
        # others' once more.
        self._has_its_round &= self._whole.buffers_anchored
        try:
            with self._changing():
                brings = self._take_updates(self._fragments, tensors)
            before = self._snapshot()
            self._hold(weight, lambda view: self._relink(view, before), lambda: self._put_back(before), brings=brings)
        finally:
            with self._changing():
                self._whole.keep(tensors, parameters=False)
            self._held_at = time.monotonic()
            self._changes.begin(self._averaged)

    @torch.no_grad()
    def _before_step(self, *, stepping: bool = True) -> None:
        """Note, before the first step since the last round, whether parameters are still those after the round."""
        if not self._whole.anchored:
            self._changes.look(self._averaged)
        super()._before_step(stepping=stepping)

    def _check_others(self, view: View) -> bool:
        """Return whether the round can be held, see :func:`~narrowband.updates.changed.all_or_none`."""
        try:
            equal = all_or_none(view, self.rounds)
        except DisagreementError:
            self._meeting.leave()
            raise
        if equal:
            self._check_next |= any(view.changed)  # those who loaded the same go on
        return equal

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Count as behind, and so get parameters in the next round, if this is left by an exception: tensors or anchors
        may be changed in part then.
        """
        has, self._has_its_round = self._has_its_round, False
        yield
        self._has_its_round = has

    @property
    def _whole(self) -> Fragment:
        """The only fragment, which is the whole model."""
        return self._fragments[0]

    def _due(self) -> int | None:
        if self._period_s is None:
            return super()._due()
        return 0 if time.monotonic() - self._held_at >= self._period_s else None

    def _hold(
        self, weight: float, link: Callable[[View], None], put_back: Callable[[], None], *, brings: bool = True
    ) -> None:
        """Repeat a round until it is committed, and apply it. A peer that leaves a committed round before its end, as
        by Ctrl-C, is behind, and gets parameters in its next round.

        Args:
            weight: weight of this peer's update.
            link: function that connects the peers of a view.
            put_back: function that undoes the effects of an exchange.
            brings: whether this peer contributes an update.
        """
        end = time.monotonic() + self._rules.patience_s
        while True:
            if time.monotonic() > end:
                raise RendezvousError(
                    f"no exchange has succeeded for patience_s={self._rules.patience_s:g} seconds; warnings in the log "
                    "say why"
                )
            had = self._has_its_round
            number = self._round if had else min(self._round, 0)
            try:
                # In one line, since Ctrl-C may come between two.
                self._unsettled = (view := self._arrive(number, weight)), put_back, had
                good, took, self._has_its_round = False, None, False
                try:
                    if self._meeting.is_open(view) and ("_engine" not in vars(self) or self._check_others(view)):
                        if view.fresh:
                            link(view)
                            self._linked = True
                            self._check_next = True  # on all peers of a fresh view, so that all check in the same round
                        took = self._meet(view, brings=brings)
                        good = True
                except (RendezvousError, UnsupportedError):
                    raise
                except RuntimeError as error:  # errors of the network: gloo raises RuntimeError
                    self._tell_of_another_try(view, _in_a_line(error))
                committed = self._meeting.vote(view, good=good, within_s=self._connections.breaks_off_after_s)
                if good and not committed:
                    self._tell_of_another_try(view, "it broke off on another peer, or a peer did not say in time")
            except BaseException:
                self._leave_round()
                raise
            if committed:
                self._unsettled = None
                if took is not None:  # otherwise all weights are 0, and there is no mean
                    if self.process_group is not None:
                        self._connections.expect(took, self.process_group)
                    self._apply(self._fragments, self._averaged.tensors())
                self._round, self.peers = view.round + 1, tuple(entry.peer for entry in view.entries)
                self._has_its_round, self._changes.found = True, False
                return
            self._undo(put_back, had)

    def _arrive(self, number: int, weight: float) -> View:
        return self._meeting.arrive(number, weight, changed=self._changes.found, linked=self._linked)

    def _tell_of_another_try(self, view: View, why: str) -> None:
        log.warning("round %d: the exchange broke off, and will be repeated: %s", view.round + self._rounds_before, why)

    def _leave_round(self) -> None:
        """Vote against the round whose outcome this peer does not know, if there is one, and undo its exchange unless
        it was committed all the same. If this is interrupted, too, it can be called again.
        """
        if self._unsettled is None:
            return
        view, put_back, had = self._unsettled
        try:
            committed = self._meeting.vote(view, good=False)
        except RendezvousError:  # nobody will know; the parameters are those of the last round
            committed = False
        if committed:
            self._unsettled = None
        else:
            self._undo(put_back, had)

    def _undo(self, put_back: Callable[[], None], had: bool) -> None:
        """Close the connections, and restore this peer's state from before the round."""
        self._unlink()
        put_back()
        self._has_its_round = had
        self._unsettled = None

    def _check_between_steps(self, what: str) -> None:
        self._leave_round()
        super()._check_between_steps(what)

    def _meet(self, view: View, *, brings: bool) -> float | None:
        """Scale this peer's update by its weight, and exchange.

        Returns:
            The seconds that the exchange took; None if all weights are 0, so that nothing is exchanged.
        """
        total = sum(entry.weight for entry in view.entries)
        if not total:  # such as when all peers have just come
            self._whole.bring_nothing()
            return None
        share = view.size * view.entries[view.rank].weight / total
        if view.behind:
            self._drop_buffers()
        if not share:
            self._whole.bring_nothing()
        elif share != 1.0:
            for update in self._whole.updates:
                update.mul_(share)
        self._scaled_by = share or 1.0
        began = time.monotonic()
        self._exchange(self._fragments, share=share if brings else 0.0)
        took = time.monotonic() - began
        self._connections.warn_if_slow(took)
        return took

    def _drop_buffers(self) -> None:
        """Set the updates of buffers to zero on a peer that is behind. The change since an earlier round says nothing
        about their current values: a variance that fell since then would fall once more.
        """
        tensors = self._averaged.tensors()
        for group in self._whole.groups:
            for name, _, part in group.parts(group.update, tensors):
                if name in self._averaged.buffers:
                    part.zero_()

    def _snapshot(self) -> dict[str, Any]:
        """Return copies of all state that an exchange changes."""
        return {
            "updates": [update.clone() for update in self._whole.updates],
            "feedback": {
                name: {key: value.clone() for key, value in state.state_dict().items()}
                for name, state in self.layers.states.items()
            },
            "kinds": {name: type(state) for name, state in self.layers.states.items()},
            "specs": self.layers.override_texts(),
            "length": self._saved.lengths(),
            "step": self._step,
        }

    def _put_back(self, before: Mapping[str, Any]) -> None:
        """Undo what an exchange has changed, except for the updates, whose memory may be in use as anchors again."""
        self.layers.load(before["specs"], before["feedback"])
        self._saved.load_lengths(before["length"])
        self._step = before["step"]

    # ---- connections -------------------------------------------------------------------------------------------------

    def _open(self, view: View) -> dist.ProcessGroup:
        """Connect the peers of a view."""
        self._view = view
        return self._connections.open(view, self._meeting.store_of(view))

    def _relink(self, view: View, before: Mapping[str, Any]) -> None:
        """Connect to the peers of a view. Peers that are behind get what they lack from the first."""
        self._unlink()
        for update, copy in zip(self._whole.updates, before["updates"], strict=True):
            update.copy_(copy)
        own = {name: before["kinds"][name].moved(values, view.size) for name, values in before["feedback"].items()}
        self._reconnect(self._open(view), before["specs"], own)
        if view.some_are_behind:
            self._begin_with_the_first()
            self._share(view)

    def _begin_with_the_first(self) -> None:
        """Copy the first peer's parameters and averaged buffers to all peers, and its other buffers to new peers. A
        collective.
        """
        copy_from_the_first(self._averaged, self._view, self.process_group, self._rules.exchange_s)

    def _hang_up(self) -> None:
        if self._linked:
            self._unlink()

    def _unlink(self) -> None:
        if "_engine" in vars(self):
            self._disconnect()
            self._engine.error = None  # it stopped connections that are closed now; the next ones have their own engine
            self._peers.group = None  # dropping the group closes its connections, which peers that wait notice
        self._linked = False
        self._connections.close()

    @torch.no_grad()
    def _share(self, view: View) -> None:
        """Send to peers that are behind what they lack beside parameters and buffers, and check the parameters and
        buffers that arrived. A collective.
        """
        digests = [digest(tensors) for tensors in self._averaged.in_common()]
        got = 2 if view.rank in view.newcomers else 1
        sent: list[Any] = [None]
        if view.rank == 0:
            sent = [
                {
                    "rounds before": self._rounds_before,
                    "step": self._step,
                    "epoch": self._epoch,
                    "paused": self._paused,
                    "seed": self._seed,
                    "specs": self.layers.override_texts(),
                    "outer": None if self.outer is None else self.outer.state_dict(),
                    "length": self._saved.lengths(),
                    "digests": digests,
                }
            ]
        dist.broadcast_object_list(sent, src=0)
        first = sent[0]
        if digests[:got] != first["digests"][:got]:
            raise RuntimeError("the parameters that arrived differ from those that were sent, and will be sent again")
        if view.behind and view.rank != 0:
            self._step, self._epoch, self._paused, self._seed = (
                first[key] for key in ("step", "epoch", "paused", "seed")
            )
            self._rounds_before = first["rounds before"]
            self.layers.set(first["specs"])
            if self.outer is not None:
                self.outer.load_state_dict(first["outer"])
            self._saved.load_lengths(first["length"])

    def set_layers(self, specs: Mapping[str, str | Codec | Compression | Method]) -> None:
        """See :meth:`Handle.set_layers`. Peers that come later get these specs, too."""
        super().set_layers(specs)
        self._tell_specs()

    def _tell_specs(self) -> None:
        self._meeting.tell_specs(sorted(set(self.layers.override_texts().values())))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that this peer needs to resume, beside the states of model and optimizer."""
        state = super().state_dict()
        return state | {
            "updates": state["updates"]
            | self._weight.state_dict()
            | {"scaled by": self._scaled_by, "rounds": self.rounds}
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from a :meth:`state_dict`. Call it on all peers of the last round, after loading the states of model
        and optimizer. :attr:`rounds` continues, too, also on peers that come later.

        Raises:
            ValueError: a state does not fit, on any peer. Nothing has changed then.
            RendezvousError: other peers of the last round loaded no state, but went on. Nothing has changed then.
        """
        self._check_between_steps("load_state_dict")
        broken = self._engine.error is not None
        try:
            super().load_state_dict(state)
            own = self._own_updates(state)
            said = [own.get("rounds", self.rounds)]  # states of earlier versions lack it
            dist.broadcast_object_list(said, src=0)
        except RuntimeError as error:
            if broken or isinstance(error, RendezvousError):
                raise
            raise RendezvousError(
                f"load_state_dict: not all peers of the last round loaded a state ({error}). A peer that comes to a "
                "run that goes on gets the others' parameters, and loads no checkpoint. To take all back to a "
                "checkpoint, start all of them again"
            ) from error
        self._weight.counted, self._scaled_by = own["counted"], own.get("scaled by", 1.0)
        self._rounds_before = said[0] - self._round
        self._changes.begin(self._averaged)
        self._changes.found = False
        self._tell_specs()

    def _agree(self, facts: Facts, advice: str, failure: Exception | None = None) -> None:
        """Compare only where a state is loaded: otherwise peers wait for nobody between rounds."""
        if facts["call"] == "load_state_dict":
            super()._agree(facts, advice, failure)
        elif failure is not None:
            raise failure

    def _check_updates(self, state: Mapping[str, Any]) -> None:
        super()._check_updates(state)
        own = state["updates"]
        self._weight.check_state(own)
        if type(rounds := own.get("rounds", 0)) is not int or rounds < 0:
            raise ValueError(f"the state has {rounds!r} for 'rounds'; expected a whole number of at least 0")
        scaled_by = own.get("scaled by", 1.0)
        if not (isinstance(scaled_by, (int, float)) and 0 < scaled_by < math.inf):
            raise ValueError(f"the state has {scaled_by!r} for 'scaled by'; expected a number above 0")

    def _moment_of(self, state: Mapping[str, Any]) -> Facts:
        """Return nothing to compare: since the last round, peers may have taken different numbers of steps."""
        return {}

    def _loadable(self, state: object) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        """Accept a peer's own state, whatever rank it had when it was saved."""
        mine = dict(check_state(state))
        states = self.layers.states
        moved = {
            name: type(states[name]).moved(values, self.size) if name in states else values
            for name, values in kept(mine).items()
        }
        mine |= {"rank": self._peers.rank, "world_size": self.size, "feedback": moved.pop("", {})}
        return super()._loadable(mine | {"others": moved})

    # ---- the end -----------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """End the averaging for this peer; the others go on. Statistics remain. Steps since the last round stay this
        peer's own, and a warning says so; call :meth:`average` before to contribute them.
        """
        if self._removed:
            return
        self._check_between_steps("remove")
        self._warn_of_own_steps(say=True)
        self._meeting.leave()
        self._removed = True
        self._unlink()
        self._let_go()


def _in_a_line(error: BaseException) -> str:
    """Return what an error says, without the C++ stack that PyTorch adds to some."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
