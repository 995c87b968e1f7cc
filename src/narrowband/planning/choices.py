"""List the options of a model in a cluster, measure the codecs that they need, and make the plan of one option."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from narrowband.adapt import LayerPlan, Plan
from narrowband.adapt.traffic import dense_nbytes
from narrowband.collectives import LayerCollectives
from narrowband.feedback import compression
from narrowband.planning.facts import facts
from narrowband.planning.links import Cluster
from narrowband.planning.measure import Measured, measure_codec
from narrowband.planning.options import Option, averaged_by_rank, way_of
from narrowband.planning.profile import Codec, Profile, Share
from narrowband.planning.shares import sent_whole

__all__ = ["DEFAULT_CODECS", "check_specs", "measured", "options", "plan_of", "takes_updates"]

#: One codec of each family, with settings whose loss was measured.
DEFAULT_CODECS = (
    "none", "fp16", "uniform:bits=8", "qsgd:bits=4", "eden:bits=2", "eden:bits=1", "powersgd:rank=4", "sign+ef",
    "topk:density=0.01+ef",
)  # fmt: skip


def check_specs(specs: Sequence[str], rounds: Sequence[int]) -> None:
    """Check that specs can compress gradients and send a fixed number of bytes, and that rounds are positive.

    Raises:
        ValueError: they do not; the message names the first.
    """
    for spec in specs:
        chosen = compression(spec)
        if chosen.feedback is not None and chosen.feedback.per_sample:
            raise ValueError(
                f"{spec} compresses activations between pipeline stages, not gradients; remove it from codecs"
            )
        if not chosen.codec.fixed_size:
            raise ValueError(
                f"{spec} sends a number of bytes that depends on the gradients and cannot be predicted; remove it "
                "from codecs"
            )
    for every in rounds:
        if every < 1:
            raise ValueError(f"every={every}: expected at least 1 optimizer step from one round of updates to the next")


def options(specs: Sequence[str], optimizer: str, cluster: Cluster, rounds: Sequence[int]) -> list[Option]:
    """List the options: plain DDP, 16 bits and each spec for gradients, also on two levels, and rounds of updates.

    Args:
        specs: for gradients. Rounds of updates use ``none`` and those specs that can compress updates. ``fp16``, the
            baseline, is always added.
        optimizer: rounds that were measured with this optimizer are added.
        cluster: the machines and ranks that train. Two levels need several machines with several ranks each.
        rounds: optimizer steps from one round to the next, for each option with rounds.

    Raises:
        ValueError: rounds are asked for, and machines have several ranks.
    """
    if rounds and cluster.per_node > 1:
        raise ValueError(
            "rounds of updates are predicted only for machines with one rank each: remove every or per_node "
            "(nb.compress_updates itself supports several ranks per replica)"
        )
    # Write specs in full, as facts do: "qsgd" becomes "qsgd:bits=4", whose loss is known.
    specs = list(dict.fromkeys(str(compression(spec)) for spec in specs))
    gradients = specs if "fp16" in specs else ["fp16", *specs]
    found = [Option(None), *map(Option, gradients)]
    if cluster.per_node > 1 and cluster.nodes > 1:
        found += [Option(spec, levels=True) for spec in gradients]
    measured_before = [(fact.spec, fact.every) for fact in facts() if fact.optimizer == optimizer and fact.every]
    asked = [(spec, every) for every in rounds for spec in ("none", *specs) if takes_updates(spec)]
    if cluster.per_node == 1:  # communication among the ranks of one replica is not simulated
        found += [Option(spec, every=every) for spec, every in dict.fromkeys([*measured_before, *asked])]
    return list(dict.fromkeys(found))


def takes_updates(spec: str) -> bool:
    """Return whether a spec can compress updates: ``dgc`` cannot, since it applies the momentum of an optimizer."""
    feedback = compression(spec).feedback
    return feedback is None or not feedback.observes_uncompressed


def measured(
    measurement: Measured, chosen: Mapping[Cluster, Sequence[Option]], on_codec: Callable[[str], None]
) -> Profile:
    """Measure all codecs that these options need, and return the profile with them.

    Args:
        measurement: of the model.
        chosen: the options of each cluster.
        on_codec: called with each spec before it is measured.
    """
    profile = measurement.profile
    found: dict[tuple[str, str, Share], Codec] = {}
    for cluster, own in chosen.items():
        for option in own:
            spec = str(option.spec)
            if option.spec is None or sent_whole(compression(spec)):
                continue
            shared, size = averaged_by_rank(profile, option, cluster)
            if size == 1 or not shared.layers:
                continue
            key = spec, way_of(shared, spec, size).name, shared.share
            if key not in found:
                on_codec(spec)
                found[key] = measure_codec(measurement.part(shared), *key[:2])
    return replace(profile, codecs=tuple(found.values()))


def plan_of(profile: Profile, option: Option, cluster: Cluster) -> Plan:
    """Make a plan for ``nb.compress_gradients`` or ``nb.compress_updates`` that has one spec for all layers.

    Raises:
        ValueError: the model has no layers to compress.
    """
    if not profile.layers:
        raise ValueError(
            "the plan would be empty: this model has no parameter with 2 dimensions and at least 1024 elements, and "
            "smaller ones are not compressed"
        )
    spec = "none" if option.spec is None else option.spec
    chosen = compression(spec)
    own, size = averaged_by_rank(profile, option, cluster)
    compressed, held = dict(own.layers), {each.name: each.shape for each in own.trained}
    collectives = LayerCollectives([(chosen, shape) for shape in compressed.values()], size)

    def sent_nbytes(name: str) -> int:
        if name in compressed:
            return collectives.sent_nbytes(chosen, compressed[name])
        return dense_nbytes(held[name], size)

    layers = [LayerPlan(name, shape, spec, sent_nbytes(name), None) for name, shape in profile.layers]
    return Plan(tuple(layers), policy="narrowband plan", world_size=size, model=spec)
