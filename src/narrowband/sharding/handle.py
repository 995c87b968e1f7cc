"""The handle of :func:`~narrowband.compress_shards`: it finds out which parameters have changed, and has statistics and
checkpoints.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from narrowband.averaging.agreement import Agreement, agree_in_all, agreement_in
from narrowband.averaging.core import is_in_backward
from narrowband.averaging.warmup import FAILED
from narrowband.collectives import Peers, all_reduce_nbytes
from narrowband.collectives.primitives import all_gather
from narrowband.compiler import refuse_compiled_autograd, unseen
from narrowband.errors import UnsupportedError
from narrowband.sharding.exchange import NOTHING, Common, GradientExchange, ParameterExchange
from narrowband.stats import Stats, StepRecord
from narrowband.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from narrowband.averaging.agreement import Facts
    from narrowband.averaging.saved import Saved
    from narrowband.codecs import Codec
    from narrowband.sharding.layout import Layout

__all__ = ["ShardCompression", "ShardStats"]

_VERSION = 1

#: Ranks compare their references in the first forward pass, and then in every ``_COMPARE_EVERY``-th.
_COMPARE_EVERY = 50

_LOAD_ADVICE = "Call load_state_dict on all ranks, between the same two steps. No state was loaded on any rank"


@dataclass
class ShardStats(StepRecord):
    """Statistics of one step, from one forward pass of the model to the next, or of several steps together.

    Attributes:
        steps: number of steps.
        raw_bytes: bytes that this rank would have sent uncompressed. Over gloo gradients count twice in it, since
            PyTorch's reduce-scatter is an all-reduce there.
        sent_bytes: bytes that it sent, without network headers.
        raw_gradient_bytes: the part of ``raw_bytes`` that is gradients.
        sent_gradient_bytes: the part of ``sent_bytes`` that is gradients.
    """

    steps: int = 0
    raw_gradient_bytes: int = 0
    sent_gradient_bytes: int = 0


class ShardCompression:
    """The handle of :func:`compress_shards`. ``repr(handle)`` shows its settings and the bytes that it has saved.

    Args:
        model: the model that FSDP2 shards.
        modules: the modules that ``fully_shard`` was called with, each with the layout of what is sent of it.
        gradients: the codec of gradients; None: they are not compressed.
        parameters: the codec of parameters; None: they are not compressed.
        referenced: whether differences of parameters are sent.
        seed: seed of stochastic rounding.
        groups: the process groups in which ranks train the model together.
        failure: the error of this rank's warm-up, if there was one. It is raised on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[tuple[FSDPModule, Layout]],
        gradients: Codec | None,
        parameters: Codec | None,
        *,
        referenced: bool,
        seed: int,
        groups: Sequence[dist.ProcessGroup],
        failure: Exception | None,
    ) -> None:
        self._codecs = (gradients, parameters)
        self._gradients: list[GradientExchange] = []
        self._parameters: list[ParameterExchange] = []
        self._total, self._last = ShardStats(), ShardStats()
        self._forward = False  # whether a forward pass of the model is running, which has set every exchange's `due`
        self._looks = 0
        self._dtypes: dict[str, torch.dtype] = {}  # of parameters, in the first forward pass
        own = weakref.WeakMethod(self._count)
        common = Common()
        for at, (_, layout) in enumerate(modules):
            each = seed * 0x9E3779B97F4A7C15 + at * 0xD6E8FEB86659FD93
            sender = GradientExchange(layout, gradients, each, _counter(own, of_gradients=True), common)
            gatherer = ParameterExchange(
                layout,
                parameters,
                each + 1,
                _counter(own, of_gradients=False),
                common,
                _agreer(self),
                referenced=referenced,
            )
            self._gradients.append(sender)
            self._parameters.append(gatherer)
        of_modules = [_group_of(layout) for _, layout in modules]
        self.process_group = of_modules[0]
        self._among: dict[str, tuple[Peers, list[ParameterExchange]]] = {}
        for group, exchange in zip(of_modules, self._parameters, strict=True):
            self._among.setdefault(group.group_name, (Peers.of(group), []))[1].append(exchange)
        #: Groups of ranks that hold the same shards of several replicas.
        self._across = [group for group in groups if group.group_name not in self._among]
        self._device = next(model.parameters()).device
        names = {
            layout.module: ", ".join(shard.name for shard in layout.shards if shard.compressed) or "none"
            for _, layout in modules
        }
        facts: Facts = {"call": "compress_shards", **self._facts(), "compressed parameters": names}
        self._agree(facts, "Call compress_shards on all ranks with the same arguments")
        self._agree({"call": "warm_up", "problem": "none"}, FAILED, failure)
        # Nothing of the model was changed before this line, so that a model that was refused trains as before.
        for (module, _), sender, gatherer in zip(modules, self._gradients, self._parameters, strict=True):
            module.set_custom_reduce_scatter(sender)  # type: ignore[arg-type]
            module.set_custom_all_gather(gatherer)  # type: ignore[arg-type]
        self._hooks = [
            model.register_forward_pre_hook(unseen(self._begin), prepend=True),
            model.register_forward_hook(unseen(self._end), always_call=True),
        ]
        self.removed = False

    def __repr__(self) -> str:
        total, (gradients, parameters) = self._total, self._codecs
        facts = [
            f"gradients {str(gradients or 'none')!r}",
            f"parameters {str(parameters or 'none')!r}",
            counted(dist.get_world_size(self.process_group), "rank"),
            f"references of {format_bytes(self.reference_nbytes)}",
        ]
        if self.removed:
            facts.append("removed")
        if total.steps:
            facts.append(f"{counted(total.steps, 'step')} of {format_bytes(total.sent_bytes / total.steps)}")
            facts.append(f"{total.ratio:.3g} times less than uncompressed")
        return f"{type(self).__name__}({', '.join(facts)})"

    # ---- what users call ---------------------------------------------------------------------------------------------

    def stats(self) -> Stats[ShardStats]:
        """Return the bytes in total, and since the model was last called."""
        return Stats(ShardStats(**vars(self._total)), ShardStats(**vars(self._last)))

    @property
    def reference_nbytes(self) -> int:
        """Bytes of this rank's memory that references take: as many as the whole model's parameters, once they have
        been sent; 0 without references.
        """
        return sum(each.reference.nbytes for each in self._parameters if each.reference is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs to resume bit for bit: this rank's part of the references. Every rank has its
        own state.

        Without it, a resumed run sends all parameters once uncompressed, and continues from there.
        """
        rank = dist.get_rank(self.process_group)
        return {
            "version": _VERSION,
            "rank": rank,
            "world_size": dist.get_world_size(self.process_group),
            **self._facts(),
            "calls": {each.layout.module: each.calls for each in self._gradients},
            "sent": {
                each.layout.module: {
                    "calls": each.calls,
                    "mark": each.mark,
                    "reference": each.reference[self._peers_of(each).rank].clone(),
                }
                for each in self._parameters
                if each.reference is not None
            },
        }

    @property
    def stateful(self) -> Saved:
        """The handle's state in the form that ``torch.distributed.checkpoint`` saves and loads, beside model and
        optimizer. The number of ranks must be the same when it is loaded.

        Example:
            >>> import torch.distributed.checkpoint as dcp
            >>> dcp.save({"model": own, "shards": handle.stateful}, checkpoint_id="step-0")  # doctest: +SKIP
        """
        from narrowband.averaging.saved import Saved

        return Saved(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`. Call it on all ranks, with the same number of ranks as when it was saved.

        Raises:
            ValueError: on any rank, the state is of another rank, number of ranks, model or codecs. All ranks raise.
        """
        problem = self._problem(state)
        facts = {"call": "load_state_dict"}
        if not problem:
            facts["modules"] = ", ".join(state["sent"])
            facts["calls"] = str([each["calls"] for each in state["sent"].values()])
            facts["dtypes"] = str([each["reference"].dtype for each in state["sent"].values()])
        failure = ValueError(problem) if problem else None
        try:
            try:
                self._agree(facts, _LOAD_ADVICE, failure)
            except ValueError as error:  # other replicas must not load theirs
                failure = error
            agree_in_all(map(agreement_in, self._across), {"call": "load_state_dict"}, _LOAD_ADVICE, failure)
        finally:
            del failure  # it refers to this frame
        for sender in self._gradients:
            sender.calls = state["calls"][sender.layout.module]
        for each in self._parameters:
            kept = state["sent"].get(each.layout.module)
            each.forget()
            if kept is None:
                continue
            peers, part = self._peers_of(each), kept["reference"].to(self._device)
            reference = torch.empty(peers.size, part.numel(), dtype=part.dtype, device=self._device)
            if (work := all_gather(reference, part, peers)) is not None:
                work.wait()
            each.reference, each.mark, each.calls, each.due = reference, kept["mark"], kept["calls"], NOTHING
        self._total, self._last = ShardStats(), ShardStats()

    def remove(self) -> None:
        """End compression: FSDP2 sends everything as it is, and the references' memory is released. Call it on all
        ranks, between steps.
        """
        if self.removed:
            return
        self._agree({"call": "remove"}, "Call remove on all ranks, between the same two steps")
        self.removed = True
        for each in (*self._gradients, *self._parameters):
            each.close()
        for hook in self._hooks:
            hook.remove()

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _begin(self, _: nn.Module, __: Any) -> None:
        """Begin a step: the model's forward pre-hook."""
        if is_in_backward():  # activation checkpointing recomputes the forward pass
            return
        self._check_dtypes()
        self._last = ShardStats()
        self._count(ShardStats(steps=1))
        self.look(self._parameters)
        self._forward = True

    def _check_dtypes(self) -> None:
        """Refuse a model that was converted after its first forward pass, from which FSDP2 keeps the dtypes.

        Raises:
            UnsupportedError: it was converted.
        """
        now = {shard.name: shard.parameter.dtype for each in self._parameters for shard in each.layout.shards}
        self._dtypes = self._dtypes or now
        for name, before in self._dtypes.items():
            if now[name] != before:
                raise UnsupportedError(
                    f"{name} has dtype {now[name]} now, and had {before} in the first forward pass, from which FSDP2 "
                    "keeps the dtypes of what it sends. Convert the model before fully_shard, or compute in another "
                    "dtype with fully_shard's mp_policy=MixedPrecisionPolicy(param_dtype=...)"
                )

    def _end(self, _: nn.Module, __: Any, outputs: Any) -> None:
        self._forward = False
        if not is_in_backward():
            for x in torch.utils._pytree.tree_leaves(outputs):
                if isinstance(x, Tensor) and x.grad_fn is not None:  # on a leaf, which persists, hooks would pile up
                    cast("Any", x).register_hook(_BACKWARD_BEGINS)

    @torch.no_grad()
    def look(self, exchanges: Sequence[ParameterExchange]) -> None:
        """Find out what must be sent of these modules' parameters, and agree on it among all ranks. A collective."""
        wanted = {id(each) for each in exchanges if each.referenced}
        compare = self._looks % _COMPARE_EVERY == 0
        self._looks += 1
        for peers, members in self._among.values():
            looked = [each for each in members if id(each) in wanted]
            if not looked:
                continue
            codes = [each.look(peers.rank) for each in looked]
            for each, code in zip(looked, self._largest(codes, torch.uint8, peers), strict=True):
                each.due = code
            if compare:
                sums = [each.sum_of_reference() for each in looked]
                found = self._largest([*sums, *(-x for x in sums)], torch.int64, peers)
                for each, most, least in zip(looked, found, found[len(sums) :], strict=False):
                    if most != -least:
                        raise RuntimeError(
                            f"ranks have different references of {each.layout.module or 'the model'}, so they computed "
                            "with different parameters; restart from a checkpoint, without the state of this handle"
                        )

    def _largest(self, numbers: Sequence[int], dtype: torch.dtype, peers: Peers) -> list[int]:
        """Return the elementwise maximum of ``numbers`` over ranks. A collective."""
        words = torch.tensor(numbers, dtype=dtype, device=self._device)
        dist.all_reduce(words, dist.ReduceOp.MAX, group=peers.group)
        self._count(ShardStats(sent_bytes=all_reduce_nbytes(words.nbytes, peers.size)))
        largest: list[int] = words.tolist()
        return largest

    def agree(self, exchange: ParameterExchange) -> None:
        """Called before a module's parameters are gathered. Outside a forward pass of the model, :meth:`look` at them
        first.
        """
        if not self._forward:
            self.look([exchange])

    def _count(self, counted: ShardStats) -> None:
        self._last.add(counted)
        self._total.add(counted)

    # ---- agreement ---------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, str]:
        gradients, parameters = self._codecs
        return {
            "gradients": str(gradients or "none"),
            "parameters": str(parameters or "none"),
            "references": str(any(each.referenced for each in self._parameters)),
            "shards": ", ".join(f"{each.layout.module} {each.layout.numel}" for each in self._parameters),
        }

    def _agree(self, facts: Facts, advice: str, failure: Exception | None = None) -> None:
        """Compare facts in every group of ranks that share a module, see :func:`agree_in_all`. A collective."""
        agree_in_all((Agreement(peers, self._device) for peers, _ in self._among.values()), facts, advice, failure)

    def _peers_of(self, exchange: ParameterExchange) -> Peers:
        return next(peers for peers, members in self._among.values() if exchange in members)

    def _problem(self, state: object) -> str:
        """Return why this state cannot be loaded; an empty text if it can."""
        if not isinstance(state, Mapping) or state.get("version") != _VERSION or "sent" not in state:
            return "expected a state of a handle of compress_shards, in this version of its format"
        here = (dist.get_rank(self.process_group), dist.get_world_size(self.process_group))
        there = (state.get("rank"), state.get("world_size"))
        if here != there:
            return (
                f"this is rank {here[0]} of {here[1]}, but the state is of rank {there[0]} of {there[1]}; if the "
                "number of ranks has changed, do not load the handle's state: all parameters are then sent "
                "uncompressed once"
            )
        for name, value in self._facts().items():
            if state.get(name) != value:
                return f"the state has {name}={state.get(name)!r}, but this handle has {value!r}"
        calls, sent = state.get("calls"), state["sent"]
        if not isinstance(calls, Mapping) or not isinstance(sent, Mapping):
            return "the state is invalid: 'calls' and 'sent' must be dictionaries by the names of modules"
        numels = {each.layout.module: each.layout.numel for each in self._parameters}
        if calls.keys() != numels.keys() or not all(map(_is_count, calls.values())) or not sent.keys() <= numels.keys():
            return "the state is of other modules, or has an invalid number of calls for a module"
        for name, kept in sent.items():
            if problem := _problem_of(kept, numels[name]):
                return f"the state of {name or 'the model'} {problem}"
        return ""


#: None before anything was sent.
_MARK = (int, type(None))


def _problem_of(kept: object, numel: int) -> str:
    """Return why a module's reference cannot be loaded from a state; an empty text if it can."""
    if not isinstance(kept, Mapping) or not _is_count(kept.get("calls")) or not isinstance(kept.get("mark", ""), _MARK):
        return "lacks 'calls' or 'mark', or one of them is no whole number"
    reference = kept.get("reference")
    if not isinstance(reference, Tensor) or not reference.is_floating_point() or reference.layout != torch.strided:
        return "has no reference of floating-point numbers"
    return "" if reference.shape == (numel,) else f"has a reference of shape {tuple(reference.shape)}, not ({numel},)"


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


#: A hook on the model's outputs, which runs when backward begins.
_BACKWARD_BEGINS = unseen(lambda _: refuse_compiled_autograd())


def _counter(count: weakref.WeakMethod[Any], *, of_gradients: bool) -> Any:
    """Return a function that reports an exchange's bytes to a handle, and does not keep the handle alive."""

    def counted(raw: int, sent: int) -> None:
        if (own := count()) is not None:
            gradients = (raw, sent) if of_gradients else (0, 0)
            own(ShardStats(raw, sent, 0, *gradients))

    return counted


def _agreer(handle: ShardCompression) -> Any:
    own = weakref.ref(handle)

    def agree(exchange: ParameterExchange) -> None:
        if (alive := own()) is not None:
            alive.agree(exchange)

    return agree


def _group_of(layout: Layout) -> dist.ProcessGroup:
    """Return the group of the ranks among which a module's parameters are sharded."""
    p: Any = layout.shards[0].parameter
    dim = next(at for at, placement in enumerate(p.placements) if placement.is_shard())
    group: dist.ProcessGroup = p.device_mesh.get_group(dim)
    return group
